"""The report, as text for people or JSON for scripts. The only place of doctor that prints."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from .examination import examine
from .finding import DoctorReport, Finding, Status

HELP = (
    "Examine this machine, build a small op, verify every operator against its reference, and"
    " report what is wrong and how to fix it."
)
JSON_HELP = "Print the report as JSON."
TARGET_HELP = "Check the machine against this row of the matrix (see `flexops target list`)."
STRICT_HELP = "Exit 1 for a warning too."

_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_VERDICTS: dict[Status, str] = {
    "ok": "everything is in order",
    "warn": "operators and builds work; the warnings name possible improvements",
    "fail": "operators or builds do not work; each finding marked fail names its fix",
}

Line = tuple[str, str]
"""A line of text and its style; empty for the default one."""


def run(target: str | None, *, as_json: bool, strict: bool) -> int:
    """Examine, print, and return the exit status: 0 unless something failed (``strict``: or is
    worth a warning)."""
    with _waiting(as_json):
        report = examine(target)
    with contextlib.suppress(BrokenPipeError):
        if as_json:
            print(json.dumps(report.as_dict(), indent=1), flush=True)
        else:
            _print_lines(lines(report))
    return report.exit_code(strict=strict)


def lines(report: DoctorReport) -> Iterator[Line]:
    """The text report: grouped, aligned, with what is required and the fix below each finding that
    needs one. The verdict comes first, for readers of a log, and again at the end, where a
    terminal stops."""
    yield "flexops doctor" + (f", target {report.target}" if report.target else ""), "bold"
    yield _verdict(report), _STYLES[report.status]
    width = max((len(finding.id) for finding in report.findings), default=0)
    for section in report.sections:
        yield "", ""
        yield section.title, "bold"
        for finding in section.findings:
            yield from _finding_lines(finding, width)
    yield "", ""
    yield _verdict(report), _STYLES[report.status]


def _finding_lines(finding: Finding, width: int) -> Iterator[Line]:
    yield (
        f"  {finding.status:<4}  {finding.id:<{width}}  {finding.found}",
        "" if finding.status == "ok" else _STYLES[finding.status],
    )
    if finding.status != "ok":
        indent = " " * (width + 10)
        if finding.required:
            yield f"{indent}required: {finding.required}", ""
        if finding.fix:
            yield f"{indent}fix: {finding.fix}", "bold"


def _verdict(report: DoctorReport) -> str:
    counts = {
        status: [one.id for one in report.findings if one.status == status]
        for status in ("fail", "warn")
    }
    named = [
        f"{len(ids)} {status}: {', '.join(dict.fromkeys(ids))}"
        for status, ids in counts.items()
        if ids
    ]
    return f"{report.status}: {_VERDICTS[report.status]}" + (
        f" ({'; '.join(named)})" if named else ""
    )


def _print_lines(rendered: Iterator[Line]) -> None:
    stream = sys.stdout
    with contextlib.suppress(AttributeError, ValueError):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print("\n".join(text for text, _ in rendered), flush=True)
        return
    console = Console(file=stream, soft_wrap=True, highlight=False)
    for text, style in rendered:
        console.print(Text(text, style=style))


@contextlib.contextmanager
def _waiting(as_json: bool) -> Iterator[None]:
    """Say on a terminal that it takes a moment; nothing otherwise."""
    stream: TextIO = sys.stderr
    if as_json or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    print(
        "flexops doctor: looking, building a small op, running every operator ...",
        end="",
        file=stream,
        flush=True,
    )
    try:
        yield
    finally:
        print("\r\033[K", end="", file=stream, flush=True)
