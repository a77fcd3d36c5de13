"""``flexops bench``: what flexops claims, measured on this machine with both sides in one run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import settings, toolchain
from ..bench import build_ladder, build_markdown, machine, ops_markdown, ops_plot, plot
from ..bench.build_ladder import Ladder, Measurement
from ..bench.machine import Machine
from ..bench.results import LEVEL, Results
from ..bench.text import duration, ratio
from ..errors import FlexopsError
from ..op_builder.cache import replace_file

_SAVE_HELP = "Keep the results here (JSON) as they come; the same command goes on after an interruption, without what it holds already."
_COMPILE_HELP = "torch.compile's mode for the contenders made by it, or off. Off on the CPU and default on CUDA, if not given."

app = typer.Typer(no_args_is_help=True, help="Measure what flexops claims, both sides in one run.")


@app.callback()
def bench() -> None:
    """Measure what flexops claims, both sides in one run."""


@app.command()
def build(
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    chart: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw a chart (.png, .svg, .pdf).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the rungs that take minutes; about two minutes instead of a quarter of an hour.")] = False,
    only: Annotated[list[str] | None, typer.Option("--rung", metavar="ID", help="A rung to climb (repeatable; --json shows their ids); all if none.")] = None,
    arch: Annotated[str, typer.Option(help="The architecture of the rungs with one architecture.")] = build_ladder.DEFAULT_ARCHITECTURE,
    saved: Annotated[Path | None, typer.Option("--save", metavar="FILE", help=_SAVE_HELP)] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the results as tables in Markdown.")] = False,
    earlier: Annotated[Path | None, typer.Option("--from", metavar="FILE", help="Show the JSON of an earlier run instead of measuring.")] = None,
) -> None:
    """The build-time ladder on one op: the conventional way with more and more of the usual advice, then flexops; and flexops's families, one by one.

    Needs nvcc, no GPU.
    """
    if chart:
        plot.check(chart)
    ladder = _read_ladder(earlier) if earlier else _climb(arch, quick, tuple(only or ()), saved)
    if chart:
        plot.save(ladder, chart)
    if as_json:
        typer.echo(json.dumps(ladder.as_dict(), indent=1))
    elif as_markdown:
        typer.echo(build_markdown.tables(ladder), nl=False)
    else:
        _show(ladder, Console())


def _climb(arch: str, quick: bool, only: tuple[str, ...], saved: Path | None) -> Ladder:
    console = Console(stderr=True)
    if saved and not os.access(saved.absolute().parent, os.W_OK):  # said now, and not after the first rung
        raise FlexopsError("the results cannot be stored", found=str(saved), required="a file in a writable directory")
    so_far: Ladder | None = _read_ladder(saved) if saved and saved.exists() else None

    def keep(ladder: Ladder) -> None:
        nonlocal so_far
        so_far = ladder
        if saved:
            _write(saved, json.dumps(ladder.as_dict(), indent=1) + "\n")

    with console.status("flexops: starting") as status:

        def report(finished: int, total: int, label: str) -> None:
            text = f"[{finished + 1}/{total}] {label}"
            status.update(text)
            if not console.is_terminal:
                console.print(text, markup=False, highlight=False)

        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` and batch systems stop with it: as tidily as with Ctrl-C
        try:
            return build_ladder.run(settings.current(), architecture=arch, quick=quick, only=only, earlier=so_far, report=report, keep=keep)
        except KeyboardInterrupt:
            if so_far is None:
                raise
        finally:
            signal.signal(signal.SIGTERM, before)
    console.print(f"interrupted; the same command goes on from {saved}" if saved else "interrupted; so far:", highlight=False, soft_wrap=True)
    _show(so_far, Console())
    raise typer.Exit(130)


def _read_ladder(file: Path) -> Ladder:
    try:
        return Ladder.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlexopsError("the results cannot be read", found=f"{file}: {error}", required="what flexops bench build --json printed") from error


def _write(file: Path, text: str) -> None:
    try:
        replace_file(file, text)
    except OSError as error:
        raise FlexopsError("the results cannot be stored", found=f"{file}: {error.strerror}", required="a file in a writable directory") from error


def _show(ladder: Ladder, console: Console) -> None:
    table = Table(title=f"One CUDA op ({ladder.op}) from source to loaded; import torch not counted", title_justify="left")
    table.add_column("built by")
    table.add_column("how")
    table.add_column("time", justify="right")
    table.add_column("against the first", justify="right")
    rungs = [item for item in ladder.measurements if not item.rung.family]
    slowest = next((item.seconds for item in rungs if item.seconds), None)
    for item in rungs:
        table.add_row(item.rung.side, item.rung.label, *_cells(item, slowest))
    if rungs:
        console.print(table)
    _show_families([item for item in ladder.measurements if item.rung.family], console)
    console.print(f"one architecture: {ladder.architecture}; all: {' '.join(ladder.architectures)}", highlight=False)
    for name, slow, fast in build_ladder.COMPARISONS:
        value = ladder.ratio(slow, fast)
        if value:
            console.print(f"{name}: {ratio(value)}", highlight=False, soft_wrap=True)
    console.print(str(ladder.machine), highlight=False, soft_wrap=True)


def _show_families(families: list[Measurement], console: Console) -> None:
    if not any(item.seconds for item in families):
        return
    table = Table(title="Each family's CUDA library from source to loaded, cold, for one architecture", title_justify="left")
    table.add_column("family")
    table.add_column("time", justify="right")
    for item in families:
        table.add_row(item.rung.family, item.note if item.seconds is None else duration(item.seconds))
    console.print(table)


def _cells(item: Measurement, slowest: float | None) -> tuple[str, str]:
    if item.seconds is None or slowest is None:
        return "-", item.note
    return duration(item.seconds), ratio(slowest / item.seconds)


@app.command()
def ops(
    op: Annotated[list[str] | None, typer.Option("--op", help="An op to measure, by family or by function (repeatable); all if none is named.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is a GPU.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Smaller tensors, for a quick look.")] = False,
    mode: Annotated[str | None, typer.Option("--compile", metavar="MODE", help=_COMPILE_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    chart: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw a chart (.png, .svg, .pdf).")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the results as tables in Markdown.")] = False,
    earlier: Annotated[Path | None, typer.Option("--from", metavar="FILE", help="Show the JSON of an earlier run instead of measuring.")] = None,
) -> None:
    """Every op against torch's own ways to do the same, with the copy bandwidth of the same run."""
    if chart:
        plot.check(chart)
    run = _read_run(earlier) if earlier else _measure_ops(device, tuple(op or ()), small, mode)
    if chart:
        title = f"{run.device}: copy {run.results.copy / 1e9:.0f} GB/s"
        ops_plot.save(run.results, title, str(run.machine), chart)
    if as_json:
        typer.echo(json.dumps(run.as_dict(), indent=1))
    elif as_markdown:
        typer.echo(ops_markdown.tables(run.results))
    else:
        _show_ops(run, Console())


@dataclass(frozen=True)
class _Run:
    machine: Machine
    device: str
    results: Results

    def as_dict(self) -> dict[str, Any]:
        return {"machine": self.machine.as_dict(), "device": self.device, **self.results.as_dict()}


def _measure_ops(device: str | None, names: tuple[str, ...], small: bool, mode: str | None) -> _Run:
    from ..bench import ops  # torch is imported only when it is needed
    from ..bench.cases import Setup

    where = device or ops.default_device()
    if mode is None:
        mode = "default" if where == "cuda" else "off"
    console = Console(stderr=True)
    with console.status("flexops: starting") as status:

        def report(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        results = ops.run(Setup(where, small=small, compile="" if mode == "off" else mode), names, report=report)
    return _Run(machine.describe(toolchain.discover(settings.current(), device="cuda")), ops.device_name(where), results)


def _read_run(file: Path) -> _Run:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return _Run(Machine(**data["machine"]), data["device"], Results.from_dict(data))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlexopsError("the results cannot be read", found=f"{file}: {error}", required="what flexops bench ops --json printed") from error


def _show_ops(run: _Run, console: Console) -> None:
    table = Table(title=f"{run.device}: copy {run.results.copy / 1e9:.0f} GB/s", title_justify="left")
    for name in ("what", "part", "by", "median", "GB/s", "of copy", "against flexops"):
        table.add_column(name, justify="left" if name in ("what", "part", "by") else "right")
    for group in run.results.groups():
        for number, item in enumerate(group):
            bandwidth = (f"{item.bandwidth / 1e9:.0f}", f"{item.of_copy:.2f}") if item.bandwidth else ("", "")
            memory = f" (+ {item.memory / 2**20:.0f} MiB)" if item.memory is not None else ""
            heading = ("", "") if number else (item.case, item.part)
            table.add_row(*heading, item.contender + memory, duration(item.seconds), *bandwidth, ratio(item.seconds / group[0].seconds, 2) if number else "")
    console.print(table)
    _show_behind(run, console)
    for case, contender, reason in run.results.absent:
        console.print(f"not measured: {contender} in {case}: {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print(str(run.machine), markup=False, highlight=False, soft_wrap=True)


def _show_behind(run: _Run, console: Console) -> None:
    behind = run.results.behind()
    if not behind:
        console.print("Nobody is ahead of flexops in any of these.", highlight=False)
        return
    table = Table(title=f"Not ahead (up to {(LEVEL - 1) * 100:.0f} % is called level)", title_justify="left")
    for name in ("what", "part", "faster", "flexops", "theirs", "by"):
        table.add_column(name, justify="left" if name in ("what", "part", "faster") else "right")
    for item in behind:
        by = "level" if item.ratio <= LEVEL else f"{(item.ratio - 1) * 100:.0f} %"
        table.add_row(item.case, item.part, item.by, duration(item.seconds), duration(item.theirs), by)
    console.print(table)
