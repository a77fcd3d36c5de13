"""``flexops new`` and ``flexops cmake-dir``: where one's own operators start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..build.describe import layout
from ..builder import new as writing


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The package, and the namespace of its operators.")
    ],
    family: Annotated[str, typer.Option(help="The first family, and its operator.")] = "scale",
) -> None:
    """Write a package of your own operators, with tests that pass at once (docs/builder.md)."""
    for path in writing.write(name, family, Path.cwd()):
        typer.echo(path.relative_to(Path.cwd()))
    typer.echo(f"\ncd {name} && {writing.INSTALL} && python -m pytest")


def cmake_dir() -> None:
    """Print the directory for CMake's flexops_DIR, where find_package(flexops) looks
    (docs/builder.md)."""
    typer.echo(layout.cmake_root())
