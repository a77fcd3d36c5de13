"""``flexops patch``: what of a model would be replaced."""

from __future__ import annotations

from typing import Annotated

import typer

_MODEL_HELP = (
    "A model's config.json, or the folder with it; an architecture, such as llama; or a model's"
    " name on the Hugging Face Hub."
)


def patch(
    model: Annotated[str, typer.Argument(metavar="MODEL_CONFIG", help=_MODEL_HELP)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """What flexops.patch replaces in a model, what it skips and why; requires no weights."""
    from ..patching import from_config

    report = from_config.report(model)
    typer.echo(report.json() if as_json else str(report))
