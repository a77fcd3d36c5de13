"""``flexops target``: the matrix of targets. flexops-tools adds what changes or proves it."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import targets
from ..targets import text

app = typer.Typer(no_args_is_help=True, help="The targets that flexops supports.")
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


@app.command("list")
def list_targets(as_json: Json = False) -> None:
    """All targets: id, toolkit, torch, GPUs."""
    typer.echo(text.listing(targets.load(), as_json))


@app.command()
def show(
    target_id: Annotated[
        str, typer.Argument(metavar="ID", help="As `flexops target list` names it.")
    ],
    as_json: Json = False,
) -> None:
    """Every pin of one target."""
    typer.echo(text.details(targets.load().find(target_id), as_json))


@app.command()
def detect(as_json: Json = False) -> None:
    """The best target for this machine, and why."""
    typer.echo(text.detection(targets.detect(), as_json))
