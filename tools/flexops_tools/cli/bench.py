"""``flexops bench``: what flexops claims, measured on this machine with both sides in one run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from flexops import _json, settings, toolchain
from flexops.bench import text as bench_text
from flexops.build.store.cache import replace_file
from flexops.errors import FlexopsError, SettingsError

from ..bench import (
    build_ladder,
    build_markdown,
    build_text,
    machine,
    ops_markdown,
    ops_plot,
    ops_text,
    plot,
)
from ..bench.build_ladder import Ladder
from ..bench.machine import Machine
from ..bench.results import Results

_Result = TypeVar("_Result")
_SAVE_HELP = (
    "Keep the results here (JSON) as they come; the same command goes on after an interruption,"
    " without what it holds already."
)
_COMPILE_HELP = (
    "torch.compile's mode for the contenders made by it, or off. Off on the CPU and default on"
    " CUDA, if not given."
)

_Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
_Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print the results as tables in Markdown.")
]
_Chart = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also draw a chart (.png, .svg, .pdf)."),
]
_Earlier = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FILE", help="Show the JSON of an earlier run instead of measuring."
    ),
]
_Device = Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is a GPU.")]
_Contenders = Annotated[
    list[str] | None, typer.Option(help="A contender (repeatable); default: all.")
]


def build(
    as_json: _Json = False,
    chart: _Chart = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=(
                "Leave out the rungs that take minutes; about two minutes instead of a quarter of"
                " an hour."
            ),
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--rung",
            metavar="ID",
            help="A rung to climb (repeatable; --json shows their ids); all if none.",
        ),
    ] = None,
    arch: Annotated[
        str, typer.Option(help="The architecture of the rungs with one architecture.")
    ] = build_ladder.DEFAULT_ARCHITECTURE,
    saved: Annotated[Path | None, typer.Option("--save", metavar="FILE", help=_SAVE_HELP)] = None,
    as_markdown: _Markdown = False,
    earlier: _Earlier = None,
) -> None:
    """The build-time ladder on one op: the conventional way with more and more of the usual advice,
    then flexops; and flexops's families, one by one.

    Needs no GPU; the conventional side needs an nvcc, and is left out where there is none.
    """
    if chart:
        plot.check(chart)
    if earlier and (quick or only or saved):
        raise SettingsError(
            "--from shows an earlier run, so there is nothing to choose",
            found="--quick, --rung or --save",
            fix="omit it",
        )
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
    # said now, and not after the first rung
    if saved and not os.access(saved.absolute().parent, os.W_OK):
        raise FlexopsError(
            "the results cannot be stored",
            found=str(saved),
            required="a file in a writable directory",
        )
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

        # `timeout` and batch systems stop with it: as tidily as with Ctrl-C
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return build_ladder.run(
                settings.current(),
                architecture=arch,
                quick=quick,
                only=only,
                earlier=so_far,
                report=report,
                keep=keep,
            )
        except KeyboardInterrupt:
            if so_far is None:
                raise
        finally:
            signal.signal(signal.SIGTERM, before)
    console.print(
        f"interrupted; the same command goes on from {saved}" if saved else "interrupted; so far:",
        highlight=False,
        soft_wrap=True,
    )
    _show(so_far, Console())
    raise typer.Exit(130)


def _read_ladder(file: Path) -> Ladder:
    return _read(file, "build", Ladder.from_dict)


def _read(file: Path, command: str, parse: Callable[[Any], _Result]) -> _Result:
    """The results of an earlier run."""
    try:
        return parse(_json.load(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlexopsError(
            "the results cannot be read",
            found=f"{file}: {error}",
            required=f"what flexops bench {command} --json printed",
        ) from error


def _write(file: Path, text: str) -> None:
    try:
        replace_file(file, text)
    except OSError as error:
        raise FlexopsError(
            "the results cannot be stored",
            found=f"{file}: {error.strerror}",
            required="a file in a writable directory",
        ) from error


def _show(ladder: Ladder, console: Console) -> None:
    for line in build_text.lines(ladder):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def ops(
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op",
            help="An op to measure, by family or by function (repeatable); all if none is named.",
        ),
    ] = None,
    device: _Device = None,
    small: Annotated[
        bool, typer.Option("--small", help="Smaller tensors, for a quick look.")
    ] = False,
    mode: Annotated[
        str | None, typer.Option("--compile", metavar="MODE", help=_COMPILE_HELP)
    ] = None,
    as_json: _Json = False,
    chart: _Chart = None,
    as_markdown: _Markdown = False,
    earlier: _Earlier = None,
) -> None:
    """Every op against torch's own ways to do the same, with the copy bandwidth of the same run."""
    if chart:
        plot.check(chart)
    if earlier and (device or small or mode):
        raise SettingsError(
            "--from shows an earlier run, so there is nothing to choose but --op",
            found="--device, --small or --compile",
            fix="omit it",
        )
    run = (
        _read_run(earlier, tuple(op or ()))
        if earlier
        else _measure_ops(device, tuple(op or ()), small, mode)
    )
    if chart:
        ops_plot.save(run.results, ops_text.title(run.results, run.device), str(run.machine), chart)
    if as_json:
        typer.echo(bench_text.as_json(run.as_dict()))
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

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> _Run:
        return cls(Machine(**data["machine"]), data["device"], Results.from_dict(data))


def _measure_ops(device: str | None, names: tuple[str, ...], small: bool, mode: str | None) -> _Run:
    from flexops.bench.setup import Setup, default_device, device_name

    from ..bench import ops  # torch is imported only when it is needed

    where = device or default_device()
    if mode is None:
        mode = "default" if where == "cuda" else "off"
    console = Console(stderr=True)
    with console.status("flexops: starting") as status:

        def report(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        results = ops.run(
            Setup(where, small=small, compile="" if mode == "off" else mode), names, report=report
        )
    return _Run(
        machine.describe(toolchain.discover(settings.current(), device="cuda")),
        device_name(where),
        results,
    )


def _read_run(file: Path, names: tuple[str, ...]) -> _Run:
    run = _read(file, "ops", _Run.from_dict)
    return replace(run, results=run.results.only(names)) if names else run


def _show_ops(run: _Run, console: Console) -> None:
    for line in (
        ops_text.title(run.results, run.device),
        "",
        *ops_text.lines(run.results),
        str(run.machine),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def model(
    size: Annotated[
        str,
        typer.Option(
            help=(
                "1b (1.24 billion parameters), 8b-4 (four layers of an 8 B model), moe (four of"
                " Qwen3-30B-A3B), vlm (Qwen2.5-VL, eight layers), hybrid (eight of Qwen 3.5 4B; all"
                " need a large GPU), small (for losses) or tiny; tiny, if not given, where there is"
                " no GPU."
            )
        ),
    ] = "",
    contender: _Contenders = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence.")] = None,
    budget: Annotated[
        float, typer.Option(min=0.0, help="Seconds of timing, all together; 0 for none.")
    ] = 20.0,
    curve: Annotated[
        int, typer.Option(min=0, help="Also train each for this many steps, and report the losses.")
    ] = 0,
    curve_batch: Annotated[
        int, typer.Option(min=0, help="Sequences a step of these; those of the timing if 0.")
    ] = 0,
    device: _Device = None,
    as_json: _Json = False,
    chart: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Also draw the bars; the losses go to FILE's name with -losses.",
        ),
    ] = None,
    as_markdown: _Markdown = False,
    earlier: _Earlier = None,
) -> None:
    """A training step of a whole model: transformers' own, compiled, by Liger, and with one line of
    flexops."""
    from ..bench import model as bench_model  # torch is imported only when it is needed
    from ..bench import model_plot

    if chart:
        plot.check(chart)
    found = (
        _read(earlier, "model", bench_model.Run.from_dict)
        if earlier
        else _measure_model(
            size, device, contender or [], batch, length, budget, curve, curve_batch
        )
    )
    if chart and found.results:
        model_plot.draw(found.as_dict(), chart)
    if chart and found.losses:
        model_plot.draw_losses(
            found.as_dict(), chart.with_name(f"{chart.stem}-losses{chart.suffix}")
        )
    typer.echo(
        json.dumps(found.as_dict(), indent=1)
        if as_json
        else "\n".join(bench_model.markdown(found) if as_markdown else bench_model.lines(found))
    )


def _measure_model(
    size: str,
    device: str | None,
    names: list[str],
    batch: int | None,
    length: int | None,
    budget: float,
    curve: int,
    curve_batch: int,
) -> Any:
    from flexops.bench.setup import default_device

    from ..bench import model as bench_model

    where = device or default_device()
    shape = _shape(bench_model.TRAINED, size, where)
    shape = replace(shape, batch=batch or shape.batch, length=length or shape.length)
    console = Console(stderr=True)
    with console.status("flexops: starting") as status:
        return bench_model.run(
            shape,
            where,
            names,
            budget=budget,
            curve=curve,
            curve_batch=curve_batch,
            report=status.update,
        )


def _shape(shapes: Mapping[str, _Result], size: str, device: str) -> _Result:
    size = size or ("1b" if device == "cuda" else "tiny")
    if size not in shapes:
        raise SettingsError("there is no such model", found=size, required=" or ".join(shapes))
    return shapes[size]


def generate(
    size: Annotated[
        str,
        typer.Option(
            help=(
                "1b (1.24 billion parameters), 8b (both need a large GPU) or tiny; tiny, if not"
                " given, where there is no GPU."
            )
        ),
    ] = "",
    contender: _Contenders = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences (repeatable); default: 1 and 16.")
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a prompt (repeatable); default: 512 and 4096."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="New tokens of the longer of two calls; default: 200, with --quick 50.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One sequence and prompt of 512, without torch.compile."),
    ] = False,
    device: _Device = None,
    as_json: _Json = False,
    chart: _Chart = None,
    as_markdown: _Markdown = False,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Show the JSON of an earlier run (repeatable: parts of one) instead of measuring.",
        ),
    ] = None,
) -> None:
    """Generation: transformers' own, compiled, patched by flexops, and flexops.generate, beside the
    memory limit."""
    from ..bench import generate as bench_generate  # torch is imported only when it is needed

    if chart:
        plot.check(chart)
    if earlier:
        found = bench_generate.merged(
            [_read(file, "generate", bench_generate.Run.from_dict) for file in earlier]
        )
    else:
        found = _measure_generation(
            size,
            device,
            contender or (bench_generate.QUICK if quick else ()),
            batch or (bench_generate.BATCHES[:1] if quick else bench_generate.BATCHES),
            prompt or (bench_generate.PROMPTS[:1] if quick else bench_generate.PROMPTS),
            tokens if tokens is not None else bench_generate.QUICK_TOKENS if quick else 200,
        )
    if chart:
        bench_generate.draw(found.as_dict(), chart)
    typer.echo(
        json.dumps(found.as_dict(), indent=1)
        if as_json
        else "\n".join(
            bench_generate.markdown(found) if as_markdown else bench_generate.lines(found)
        )
    )


def _measure_generation(
    size: str,
    device: str | None,
    names: Sequence[str],
    batches: Sequence[int],
    prompts: Sequence[int],
    tokens: int,
) -> Any:
    from flexops.bench.setup import default_device

    from ..bench import generate as bench_generate

    where = device or default_device()
    shape = _shape(bench_generate.SHAPES, size, where)
    console = Console(stderr=True)
    with console.status("flexops: measuring"):
        return bench_generate.run(
            shape,
            where,
            names,
            batches=batches,
            prompts=prompts,
            tokens=tokens,
            report=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
