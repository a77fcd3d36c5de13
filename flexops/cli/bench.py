"""``flexops bench``: measurements on this machine, with both sides in one run. flexops-tools adds
those of what flexops claims."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True, help="Measure flexops against other libraries, both sides in one run."
)


@app.callback()
def bench() -> None:
    """Measure flexops against other libraries, both sides in one run."""


@app.command()
def run(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Python files, or modules, with a function cases(setup)."
        ),
    ],
    text: Annotated[str, typer.Option("--case", help="Only cases whose name contains this.")] = "",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is a GPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Cases of your own: contenders in turns, as a fraction of the copy bandwidth, or of a matrix
    product, of the same run."""
    from ..bench import own  # torch is imported only when it is needed
    from ..bench.setup import Setup, default_device, device_name

    where = device or default_device()
    with Console(stderr=True).status("flexops: starting") as status:
        timings = own.run(places, Setup(where), text=text, report=status.update)
    if as_json:
        typer.echo(json.dumps(own.as_dicts(timings), indent=1))
        return
    for line in own.lines(timings):
        typer.echo(line)
    typer.echo(f"on {device_name(where)}")
