"""The result of a check: what was found, what is required and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from .facts import OpTrial

Status = Literal["ok", "warn", "fail"]
_ORDER: tuple[Status, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """One judgement.

    Attributes:
        id: stable, for scripts: ``torch``, ``cache``, ``op-adam-cpu``.
        status: ``fail``: operators or builds cannot work; ``warn``: they work, but not as well as
            they could; ``ok``.
        found: what there is.
        required: what there would have to be; may be empty if it is ok.
        fix: a command to copy; may be empty if it is ok.
    """

    id: str
    status: Status
    found: str
    required: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def ok(id: str, found: str, required: str = "") -> Finding:
    return Finding(id, "ok", found, required)


def warn(id: str, found: str, required: str, fix: str) -> Finding:
    return Finding(id, "warn", found, required, fix)


def fail(id: str, found: str, required: str, fix: str) -> Finding:
    return Finding(id, "fail", found, required, fix)


def worst(findings: Iterable[Finding]) -> Status:
    """The status that decides: the worst there is."""
    return max((finding.status for finding in findings), key=_ORDER.index, default="ok")


@dataclass(frozen=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class DoctorReport:
    """A whole examination.

    Attributes:
        target: the row that was judged against: the one asked for, else the one detected; None if
            neither is known.
        sections: the findings, grouped.
        ops: every op on every device.
    """

    target: str | None
    sections: tuple[Section, ...]
    ops: tuple[OpTrial, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for section in self.sections for finding in section.findings)

    @property
    def status(self) -> Status:
        return worst(self.findings)

    def exit_code(self, *, strict: bool = False) -> int:
        """0 unless something failed or, if ``strict``, is worth a warning."""
        return int(self.status == "fail" or (strict and self.status == "warn"))

    def as_dict(self) -> dict[str, object]:
        """The JSON form."""
        return {
            "status": self.status,
            "target": self.target,
            "findings": [finding.as_dict() for finding in self.findings],
            "ops": [op.as_dict() for op in self.ops],
        }
