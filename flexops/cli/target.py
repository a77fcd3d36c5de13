"""``flexops target``: the matrix of targets."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import targets
from ..targets import locks, text
from ..targets import render as rendering

app = typer.Typer(no_args_is_help=True, help="What flexops is built for: the matrix of targets.")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_targets(as_json: Json = False) -> None:
    """All targets: id, toolkit, torch, GPUs."""
    typer.echo(text.listing(targets.load(), as_json))


@app.command()
def show(target_id: Annotated[str, typer.Argument(metavar="ID", help="As `flexops target list` names it.")], as_json: Json = False) -> None:
    """Every pin of one target."""
    typer.echo(text.details(targets.load().find(target_id), as_json))


@app.command()
def render(check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if anything would change.")] = False) -> None:
    """Write everything that follows from the matrix: envs/, docker/, the dev containers, the conda variants, and the table of targets."""
    matrix, root = targets.load(), rendering.checkout()
    changes = rendering.compare(matrix, root) if check else rendering.write(matrix, root)
    for line in changes.lines():
        typer.echo(line)
    if check and changes:
        typer.echo("these do not follow from flexops/targets/matrix.toml; fix: flexops target render", err=True)
        raise typer.Exit(1)
    typer.echo("everything follows from the matrix" if check or not changes else f"{len(changes.lines())} files changed")


@app.command()
def detect(as_json: Json = False) -> None:
    """The best target for this machine, and why."""
    typer.echo(text.detection(targets.detect(), as_json))


@app.command()
def lock(
    toolkits: Annotated[list[str] | None, typer.Argument(metavar="[TOOLKIT]...", help="Such as cu130; all that the default index serves by default.")] = None,
) -> None:
    """Resolve the pip requirements anew and lock them by hash: envs/requirements/<toolkit>.lock."""
    root = rendering.checkout()
    for target in locks.choose(targets.load(), toolkits or ()):
        typer.echo(str(locks.write(target, root).relative_to(root)))
