"""The one family of errors that flexops raises.

Every error says what went wrong, what was found, what was required and the command (or setting)
that fixes it. ``exit_code`` is what the command line exits with.
"""

from __future__ import annotations

from pathlib import Path

NO_CODE = "flexops has no code of the kernel"
"""How the error of a launch begins whose kernel has no code for this GPU."""


class FlexopsError(Exception):
    """Base of every error flexops raises on purpose.

    Args:
        what: one sentence: what failed.
        found: what there is.
        required: what there would have to be.
        fix: a command to copy, or the setting to change.
    """

    exit_code = 1

    def __init__(self, what: str, *, found: str = "", required: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.found = found
        self.required = required
        self.fix = fix

    @property
    def reason(self) -> str:
        """What failed and what was found, on one line."""
        return "; ".join(part for part in (self.what, self.found) if part)

    def __str__(self) -> str:
        details = (("found", self.found), ("required", self.required), ("fix", self.fix))
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in details if text)])


class SettingsError(FlexopsError):
    """An environment variable, or an argument of the command line, has a value that is not
    understood."""

    exit_code = 2


class TargetError(FlexopsError):
    """The matrix of targets is wrong, or a target id is unknown."""

    exit_code = 3


class ArchitectureError(FlexopsError):
    """A GPU architecture is not understood, or the compiler at hand cannot produce it."""

    exit_code = 4


class ToolchainError(FlexopsError):
    """A compiler, toolkit or torch that a build needs is missing or does not match."""

    exit_code = 5


class LoggedError(FlexopsError):
    """An error of another program, in full. ``log`` is the path of its output, if that was
    kept."""

    def __init__(
        self,
        what: str,
        *,
        found: str = "",
        required: str = "",
        fix: str = "",
        log: Path | None = None,
    ) -> None:
        super().__init__(what, found=found, required=required, fix=fix)
        self.log = log

    def __str__(self) -> str:
        return super().__str__() + (f"\n  log: {self.log}" if self.log else "")


class CompileError(LoggedError):
    """A build ran and failed."""

    exit_code = 6


class CacheError(FlexopsError):
    """The build cache cannot be used as asked: not ours, not writable, full, or not a flexops
    cache."""

    exit_code = 7


class RemoteError(CacheError):
    """The remote cache cannot be used as asked: not reached, forbidden, or its client is not
    installed."""


class NativeUnavailableError(FlexopsError):
    """No native kernel is available for an op, and ``FLEXOPS_FALLBACK=forbid`` rules the reference
    out."""

    exit_code = 8


class TorchUnavailableError(FlexopsError, ImportError):
    """``import torch`` failed, so the operators cannot be used; the command line and doctor still
    work."""

    exit_code = 9


class ChannelError(LoggedError):
    """A conda package or channel cannot be built, indexed, solved or installed."""

    exit_code = 11


class ImageError(LoggedError):
    """An image cannot be built, run or checked: no engine, no space, no base image, or a step that
    fails."""

    exit_code = 10


class PatchError(FlexopsError):
    """``flexops.patch`` was given what is no model, or an architecture or config that cannot be
    made into one."""

    exit_code = 12


class GenerationError(FlexopsError):
    """Arguments of :func:`flexops.generate` or :class:`flexops.KVCache` are wrong, or a cache does
    not fit the tokens that it is given."""

    exit_code = 14
