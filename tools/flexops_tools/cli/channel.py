"""``flexops channel``: the conda packages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from flexops import targets

from .. import channel
from ..channel.place import DEFAULT
from ..channel.place import Place as _Place
from ..targets import conda

app = typer.Typer(
    no_args_is_help=True,
    help="Build conda packages into a channel, index and check it.",
)
Channel = Annotated[str, typer.Option("--channel", metavar="DIR", help="The channel: a folder.")]
Readable = Annotated[
    str,
    typer.Option(
        "--channel",
        metavar="DIR|URL",
        help="The channel: a folder, or the address of one on the web.",
    ),
]
_FROM = "Where dependencies come from, best first: names or URLs. [default: conda-forge]"
Upstream = Annotated[list[str] | None, typer.Option("--from", metavar="CHANNEL", help=_FROM)]
Engine = Literal["auto", "conda-build", "rattler-build"]


@app.command("build")
def build_packages(
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", metavar="NAME", help="cpu, cuda130, …; all if none is named."),
    ] = None,
    where: Channel = str(DEFAULT),
    upstream: Upstream = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe", metavar="DIR", help="The folder of recipe.yaml. [default: this checkout's]"
        ),
    ] = None,
    override: Annotated[
        list[Path] | None,
        typer.Option(
            "--variant-config", metavar="FILE", help="Further variant files, whose values win."
        ),
    ] = None,
    engine: Annotated[
        Engine, typer.Option("--engine", help="auto selects conda-build if it is installed.")
    ] = "auto",
    test: Annotated[
        bool, typer.Option("--test/--no-test", help="Run the recipe's tests on each package.")
    ] = True,
) -> None:
    """Build variants of recipe/recipe.yaml into a channel, and index it."""
    known = conda.variants(targets.load())
    wanted = [conda.find(known, name) for name in variant] if variant else list(known)
    with _shown() as say:
        built = channel.build(
            wanted,
            _Place.parse(where),
            upstream=upstream or ("conda-forge",),
            recipe=recipe,
            overrides=override or (),
            wish=engine,
            test=test,
            on_phase=lambda one, phase: say(f"{one.id}: {phase}"),
        )
    for one in built:
        typer.echo(
            f"{one.variant:<8} {one.package.stat().st_size / 1e6:6.2f} MB {one.seconds:6.1f} s "
            f" {one.package}"
        )


@app.command("index")
def index_channel(
    where: Channel = str(DEFAULT),
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Accept the folder as it is: read every package again, changed ones too.",
        ),
    ] = False,
) -> None:
    """Write the index of a channel whose packages were added or removed by hand."""
    typer.echo(f"{channel.index(_Place.parse(where), force=force)} packages indexed in {where}")


@app.command()
def check(
    where: Readable = str(DEFAULT),
    upstream: Upstream = None,
    install: Annotated[
        bool,
        typer.Option(
            "--install/--no-install", help="Install into a fresh prefix too, and run doctor there."
        ),
    ] = True,
    prefix: Annotated[
        Path | None,
        typer.Option(
            "--prefix",
            metavar="DIR",
            help="Where to install, to be kept. [default: a folder that is removed]",
        ),
    ] = None,
) -> None:
    """Compare the index with the packages, solve for several machines, install into a fresh prefix,
    run doctor there."""
    place = _Place.parse(where)
    sources = upstream or ("conda-forge",)
    known = conda.variants(targets.load())
    packages, good = channel.audit(place, channel.PACKAGE), True
    typer.echo(f"ok   {len(packages)} packages are what the index of {place.url} says")
    for machine in channel.machines(known):
        solved = channel.solve(place, machine, known, upstream=sources, packages=packages)
        good &= solved.good
        verdict = "ok  " if solved.good else "FAIL"
        typer.echo(
            f"{verdict} {machine.name:<22} gets {solved.build}"
            + ("" if solved.good else f", should get {solved.expected}")
            + f", torch {solved.torch}"
        )
    if install:
        with _shown() as say:
            installed = channel.install_and_examine(
                place,
                upstream=sources,
                prefix=prefix,
                on_phase=lambda phase: say(f"check: {phase}"),
            )
        for finding in installed.findings:
            typer.echo(f"     {finding}")
        good &= installed.exit_code == 0
        typer.echo(
            f"{'FAIL' if installed.exit_code else 'ok  '} {installed.packages} packages installed;"
            f" doctor exits {installed.exit_code}"
        )
    if not good:
        raise typer.Exit(1)


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[str], None]]:
    """What is being done: beside a spinner on a terminal, a line each otherwise."""
    last = ""
    if not sys.stderr.isatty():

        def echo(text: str) -> None:
            nonlocal last
            if text != last:
                typer.echo(text, err=True)
            last = text

        yield echo
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update
