"""``flexops new``: a package of one's own operators to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..builder import new as writing


def new(
    name: Annotated[str, typer.Argument(help="The package, and the namespace of its operators.")],
    family: Annotated[str, typer.Option(help="The first family, and its operator.")] = "scale",
) -> None:
    """Write a package of your own operators, with tests that pass at once (docs/builder.md)."""
    for path in writing.write(name, family, Path.cwd()):
        typer.echo(path.relative_to(Path.cwd()))
    typer.echo(f"\ncd {name} && pip install -e . --no-build-isolation && pytest")
