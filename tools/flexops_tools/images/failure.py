"""From a failed build's output to the real error, its cause and its fix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flexops.build.compile.diagnose import diagnose
from flexops.errors import ImageError


@dataclass(frozen=True)
class Step:
    """One instruction of the Dockerfile: its place, its text and what it said."""

    number: int
    total: int
    instruction: str
    output: str = ""


@dataclass(frozen=True)
class _Rule:
    pattern: str
    what: str
    required: str
    fix: str

    def error(self, target_id: str, said: str, log: Path | None, more: str = "") -> ImageError:
        """``more`` goes after the line that shows it."""
        return ImageError(
            f"{target_id}: {self.what}",
            found=_line(said, self.pattern) + more,
            required=self.required,
            fix=self.fix,
            log=log,
        )


_FULL = _Rule(
    r"no space left on device|disk quota exceeded",
    "the engine's disk is full",
    "space for the image and the stages that make it (CUDA: about 20 GB)",
    "docker system prune   # or move the engine's data-root to a larger disk",
)
_GONE = _Rule(
    r"Cannot connect to the Docker daemon|code = Unavailable|Connection refused|unexpected EOF",
    "the engine went away during the build",
    "an engine that stays up",
    "sudo systemctl start docker   # finished steps are kept",
)
_BASE_FAULTS = re.compile(
    r"pull access denied|manifest (for .* not found|unknown)|no such host|dial tcp|TLS"
    r" handshake|i/o timeout|connection refused|toomanyrequests|not found"
    r"|unauthorized|x509|invalid reference|context deadline exceeded|server"
    r" misbehaving|Client\.Timeout",
    re.IGNORECASE,
)
_STEP_RULES = (
    _Rule(
        r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSLError",
        "the package index's certificate is not trusted in the build",
        "the certificate authority that signs for your network",
        "--ca-bundle FILE   # on Debian and Ubuntu /etc/ssl/certs/ca-certificates.crt",
    ),
    _Rule(
        r"DO NOT MATCH THE HASHES",
        "the package index sent other files than the lock names",
        "the very files that envs/requirements/*.lock names",
        "another --index-url; or, if you trust it: flexops target lock",
    ),
    _Rule(
        r"[Tt]emporary failure (in name resolution|resolving)|Could not resolve|Name or service not"
        r" known|NewConnectionError|Network is unreachable"
        r"|No address associated|Failed to establish a new connection|ReadTimeoutError|Unable to"
        r" connect to",
        "the build has no way to the network",
        "a network that reaches the package indexes",
        "--network host; behind a mirror --index-url URL, behind a proxy HTTPS_PROXY in the"
        " engine's settings",
    ),
    _Rule(
        r"No matching distribution found|Could not find a version",
        "the package index lacks a package for this Python",
        "the versions that the row pins",
        "--index-url URL of one that has it; with a base of your own, one whose Python is the"
        " row's",
    ),
    _Rule(
        r"exit code: 137",
        "the step was killed, usually because memory ran out",
        "more memory for the engine",
        "--jobs 1",
    ),
)


def explain(
    target_id: str,
    step: Step | None,
    message: str,
    *,
    free_bytes: int | None = None,
    log: Path | None = None,
) -> ImageError:
    """The error of a failed build.

    Args:
        step: the step that failed, with its build arguments filled in; None if none had begun.
        message: what the engine says of it.
        free_bytes: on the engine's disk, if that is known.
    """
    said = f"{step.output}\n{message}" if step else message
    if re.search(_FULL.pattern, said, re.IGNORECASE):
        space = f"; {free_bytes / 1e9:.1f} GB are free" if free_bytes is not None else ""
        return _FULL.error(target_id, said, log, space)
    if (step is None or step.instruction.startswith("FROM")) and _BASE_FAULTS.search(message):
        return _base(target_id, step, message, log)
    if re.search(_GONE.pattern, message, re.IGNORECASE):
        return _GONE.error(target_id, message, log)
    where = (
        f"step {step.number} of {step.total} failed: {_shortened(step.instruction)}"
        if step
        else "the build could not start"
    )
    if step and (own := _own_words(step.output)):
        found, fix = own
        return ImageError(f"{target_id}: {where}", found=found, fix=fix, log=log)
    for rule in _STEP_RULES:
        if re.search(rule.pattern, said):
            return ImageError(
                f"{target_id}: {rule.what} ({where})",
                found=_line(said, rule.pattern),
                required=rule.required,
                fix=rule.fix,
                log=log,
            )
    if step and step.output.strip():
        diagnosis = diagnose(step.output)
        return ImageError(
            f"{target_id}: {where}", found=diagnosis.error, fix="see the log", log=log
        )
    return ImageError(f"{target_id}: {where}", found=message.strip(), fix="see the log", log=log)


def _base(target_id: str, step: Step | None, message: str, log: Path | None) -> ImageError:
    words = step.instruction.split() if step else []
    image, stage = (words[1], words[-1]) if len(words) >= 2 else ("the base image", "")
    option = "--runtime-base" if stage == "installed" else "--build-base"
    return ImageError(
        f"{target_id}: the base image is not available",
        found=" ".join(message.split()),
        required=f"{image}, or one like it",
        fix=(
            f"{option} REF   # a mirror's reference, or an image that the engine has (docker"
            " images)"
        ),
        log=log,
    )


def _own_words(output: str) -> tuple[str, str] | None:
    """What a script or module of flexops said failed: its first `flexops:` message with the details
    below it, and the fix named there."""
    lines = output.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("flexops: ")), None)
    if start is None:
        return None
    details = [lines[start].removeprefix("flexops: ")]
    for line in lines[start + 1 :]:
        if not line.startswith("  "):
            break
        details.append(line.strip())
    fix = next(
        (line.removeprefix("fix: ") for line in details if line.startswith("fix: ")), "see the log"
    )
    return "; ".join(line for line in details if not line.startswith(("fix: ", "log: "))), fix


def _line(text: str, pattern: str) -> str:
    """The first line that matches."""
    return next(
        (line.strip() for line in text.splitlines() if re.search(pattern, line, re.IGNORECASE)),
        text.strip(),
    )[:500]


def _shortened(instruction: str, width: int = 100) -> str:
    return instruction if len(instruction) <= width else instruction[: width - 3] + "..."
