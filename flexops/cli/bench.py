"""``flexops bench``: what flexops claims, measured on this machine with both sides in one run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import settings, toolchain
from ..bench import build_ladder, plot
from ..bench.build_ladder import Ladder, Measurement
from ..bench.text import duration, ratio

app = typer.Typer(no_args_is_help=True, help="Measure what flexops claims, both sides in one run.")


@app.callback()
def bench() -> None:
    """Measure what flexops claims, both sides in one run."""


@app.command()
def build(
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    chart: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw a chart (.png, .svg, .pdf).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the rungs that take minutes; about two minutes instead of ten.")] = False,
    arch: Annotated[str, typer.Option(help="The architecture of the rungs with one architecture.")] = build_ladder.DEFAULT_ARCHITECTURE,
) -> None:
    """The build-time ladder on one op: the conventional way with more and more of the usual advice, then flexops. Needs nvcc, no GPU."""
    console = Console(stderr=True)
    with console.status("flexops: starting") as status:

        def report(finished: int, total: int, label: str) -> None:
            text = f"[{finished + 1}/{total}] {label}"
            status.update(text)
            if not console.is_terminal:
                console.print(text, markup=False, highlight=False)

        ladder = build_ladder.run(settings.current(), architecture=arch, quick=quick, report=report)
    if chart:
        plot.save(ladder, chart)
    if as_json:
        typer.echo(json.dumps(ladder.as_dict(), indent=1))
    else:
        _show(ladder, Console())


def _show(ladder: Ladder, console: Console) -> None:
    table = Table(title=f"One CUDA op ({ladder.op}) from source to loaded; import torch not counted", title_justify="left")
    table.add_column("built by")
    table.add_column("how")
    table.add_column("time", justify="right")
    table.add_column("against the first", justify="right")
    slowest = next((item.seconds for item in ladder.measurements if item.seconds), None)
    for item in ladder.measurements:
        table.add_row(item.rung.side, item.rung.label, *_cells(item, slowest))
    console.print(table)
    console.print(f"one architecture: {ladder.architecture}; all: {' '.join(ladder.architectures)}", highlight=False)
    for name, slow, fast in build_ladder.COMPARISONS:
        value = ladder.ratio(slow, fast)
        if value:
            console.print(f"{name}: {ratio(value)}", highlight=False, soft_wrap=True)
    console.print(str(ladder.machine), highlight=False, soft_wrap=True)


def _cells(item: Measurement, slowest: float | None) -> tuple[str, str]:
    if item.seconds is None or slowest is None:
        return "-", item.note
    return duration(item.seconds), ratio(slowest / item.seconds)


@app.command()
def ops(
    op: Annotated[list[str] | None, typer.Option("--op", help="An op to measure (repeatable); all if none is named.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is a GPU.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Smaller tensors, for a quick look.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Every op against torch's own ways to do the same, with the copy bandwidth of the same run."""
    from ..bench import machine, ops  # torch is imported only when it is needed

    chosen = settings.current()
    where = device or ops.default_device()
    console = Console(stderr=True)
    with console.status("flexops: starting") as status:
        copy, timings = ops.run(where, tuple(op or ()), small=small, report=status.update)
    about = machine.describe(toolchain.discover(chosen, device="cuda"))
    if as_json:
        facts = {"machine": about.as_dict(), "device": ops.device_name(where), "copy_bandwidth": copy}
        typer.echo(json.dumps({**facts, "timings": [asdict(timing) for timing in timings]}, indent=1))
        return
    table = Table(title=f"{ops.device_name(where)}: copy {copy / 1e9:.0f} GB/s", title_justify="left")
    for name in ("what", "by", "median", "GB/s", "of copy"):
        table.add_column(name, justify="left" if name in ("what", "by") else "right")
    previous = ""
    for item in timings:
        table.add_row(item.case if item.case != previous else "", item.contender, duration(item.seconds), f"{item.bandwidth / 1e9:.0f}", f"{item.of_copy:.2f}")
        previous = item.case
    Console().print(table)
    typer.echo(str(about))
