"""``flexops image``: images of the targets, on a container engine."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexops import targets
from flexops.errors import FlexopsError

from ..images import building, checking, naming, running
from ..images.building import Report, Wish
from ..images.engine import connect
from ..images.failure import Step
from ..targets import render as rendering

if TYPE_CHECKING:
    from ..images.building import Built

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Images of the targets. Requires a container engine and the program docker with BuildKit."
    ),
)

Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
StageOption = Annotated[
    str, typer.Option(help="runtime, or dev: with compiler, ninja and ccache, for work on kernels.")
]
TagOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "Name of the image, or a repository that the usual tag is added to. Default:"
            " flexops:ID."
        )
    ),
]
Network = Annotated[
    str,
    typer.Option(metavar="MODE", help="The engine's network for the containers: host, none, ..."),
]
_INTERRUPTED = 130
_INDEX = "Package index to download from; not kept. May have user:password."
_ACCEPT = "A row for the CPU takes a torch for CUDA, too (5 GB), where its own index is silent."


@app.command()
def build(
    ids: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...", help="Targets, or globs such as 'cu130-*'; 'all' is every one."
        ),
    ],
    stage: StageOption = "runtime",
    tag: TagOption = None,
    build_base: Annotated[
        str,
        typer.Option(
            metavar="REF",
            help="Base of the build stages instead of the row's: a mirror's, or a local image.",
        ),
    ] = "",
    runtime_base: Annotated[
        str, typer.Option(metavar="REF", help="Base of the image itself instead of the row's.")
    ] = "",
    index_url: Annotated[str, typer.Option(metavar="URL", help=_INDEX)] = "",
    accept_other_torch: Annotated[bool, typer.Option("--accept-other-torch", help=_ACCEPT)] = False,
    ca_bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Certificates (PEM) to trust while downloading; not kept."
        ),
    ] = None,
    network: Network = "",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do not use cached steps.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers in parallel.")] = None,
    as_json: Json = False,
) -> None:
    """Build images, from this checkout: toolkit, torch and operators that match, checked."""
    rows = naming.select(targets.load(), ids)
    root, kind = rendering.checkout(), naming.stage(stage)
    options = (build_base, runtime_base, index_url, ca_bundle, network, no_cache, jobs)
    names = [naming.reference(row.id, kind, tag, several=len(rows) > 1) for row in rows]
    wishes = [
        Wish(row, kind, name, *options, accept_torch=accept_other_torch)
        for row, name in zip(rows, names, strict=True)
    ]
    client = connect()
    results: list[dict[str, Any]] = []
    code = 0
    for wish in wishes:
        try:
            with _progress(wish.target.id, quiet=as_json) as report:
                built = building.build(client, wish, root, report)
            results.append({**_built(built), "error": None})
            _say(
                f"{built.reference}  {built.size / 1e9:.2f} GB, {built.seconds:.0f} s,"
                f" {built.cached} of {built.steps} steps were there",
                as_json,
            )
        except KeyboardInterrupt:
            _say(
                f"flexops: stopped while building {wish.target.id}; nothing was tagged, finished"
                " steps are kept",
                False,
                error=True,
            )
            raise typer.Exit(_INTERRUPTED) from None
        except FlexopsError as error:
            code = code or error.exit_code
            results.append(
                {
                    "target": wish.target.id,
                    "image": wish.reference,
                    "error": _error(error),
                    "log": str(building.log_path(root, wish)),
                }
            )
            _say(f"flexops: {error}", as_json, error=True)
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    raise typer.Exit(code)


@app.command()
def check(
    target_id: Annotated[
        str, typer.Argument(metavar="ID", help="As `flexops target list` names it.")
    ],
    stage: StageOption = "runtime",
    tag: TagOption = None,
    network: Network = "",
    as_json: Json = False,
) -> None:
    """Run doctor in an image in every way that it must work, and compare labels, versions and
    compiled architectures with the matrix."""
    row = targets.load().find(target_id)
    client = connect()
    options = {**running.engine_gpus(client, row).options, **_given(network_mode=network)}
    checked = checking.check(
        client, row, naming.reference(row.id, naming.stage(stage), tag), options
    )
    if as_json:
        typer.echo(json.dumps(checked.as_dict(), indent=1))
    else:
        for line in _report(checked):
            typer.echo(line)
    raise typer.Exit(1 if checked.status == "fail" else 0)


def _given(**options: str) -> dict[str, str]:
    return {name: value for name, value in options.items() if value}


def _built(built: Built) -> dict[str, Any]:
    return {
        "target": built.target,
        "image": built.reference,
        "id": built.image,
        "seconds": built.seconds,
        "size": built.size,
        "steps": built.steps,
        "cached": built.cached,
        "log": str(built.log),
    }


def _error(error: FlexopsError) -> dict[str, str]:
    return {"what": error.what, "found": error.found, "required": error.required, "fix": error.fix}


def _say(text: str, quiet: bool, *, error: bool = False) -> None:
    if error or not quiet:
        typer.echo(text, err=error)


def _report(checked: checking.Checked) -> Iterator[str]:
    yield f"{checked.reference}: {checked.size / 1e9:.2f} GB"
    for layer in checked.layers:
        yield f"  {layer.size / 1e6:9.1f} MB  {layer.made_by}"
    width = max(len(one.id) for one in checked.findings)
    for one in checked.findings:
        yield f"  {one.status:<4}  {one.id:<{width}}  {one.found}"
        if one.status != "ok":
            yield f"{'':{width + 10}}required: {one.required}"
            yield f"{'':{width + 10}}fix: {one.fix}"
    yield checked.status


@contextlib.contextmanager
def _progress(name: str, *, quiet: bool) -> Iterator[Report | None]:
    """A bar over the steps on a terminal; elsewhere a line a step."""
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield _line_reporter(name)
    else:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=None, line="")

            def report(step: Step, line: str) -> None:
                description = f"{name}: {step.instruction[:40]}"
                bar.update(
                    task,
                    description=description,
                    completed=step.number - 1,
                    total=step.total,
                    line=line.replace("[", r"\[")[:60],
                )

            yield report


def _line_reporter(name: str) -> Report:
    shown = 0

    def report(step: Step, _line: str) -> None:
        nonlocal shown
        if step.number != shown:
            shown = step.number
            typer.echo(f"{name}: [{step.number}/{step.total}] {step.instruction[:120]}", err=True)

    return report
