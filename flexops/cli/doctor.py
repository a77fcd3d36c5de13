"""``flexops doctor``: what this machine has, what is wrong, and the fix."""

from __future__ import annotations

from typing import Annotated

import typer

from ..doctor import report


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help=report.JSON_HELP)] = False,
    target: Annotated[
        str | None, typer.Option("--target", metavar="ID", help=report.TARGET_HELP)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help=report.STRICT_HELP)] = False,
) -> None:
    """Examine this machine, build a small op, verify every operator against its reference, and
    report what is wrong and how to fix it."""
    raise typer.Exit(report.run(target, as_json=as_json, strict=strict))
