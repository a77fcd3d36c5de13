"""``flexops bench ops``: every op against torch's own ways to do the same, as bytes over time and
as a part of the copy bandwidth."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from flexops._torch import compile_modes, keep_saved_memory
from flexops.bench import timing
from flexops.build.load import loader
from flexops.errors import FlexopsError, SettingsError

from .cases import Case, Setup, sources
from .results import FLEXOPS, Results, Timing


def run(
    setup: Setup, ops: Sequence[str] = (), *, report: Callable[[str], None] | None = None
) -> Results:
    """Measure every case of the ops called ``ops``, by family or by function (none: all).

    Raises:
        FlexopsError: an op has no cases, there is no such device or mode of torch.compile here, or
            an op's native library is missing (a reference timed as flexops would mislead).
    """
    chosen = sources(ops)
    _check(setup)
    keep_saved_memory()
    copy = timing.copy_bandwidth(setup.device)
    timings: list[Timing] = []
    absent: list[tuple[str, str, str]] = []
    for source in chosen:
        for family in source.families:
            if not loader.ensure(family, setup.device):
                raise FlexopsError(
                    f"{family} is not native on {setup.device}, so there is nothing to measure",
                    fix="flexops doctor",
                )
        for case in source.cases(setup):
            if not ops or source.family in ops or case.function in ops:
                if report:
                    report(f"{case.name}, {case.part}")
                timings += _measure(case, setup.device, copy, absent)
            case.contenders.clear()
        _release(setup.device)
    return Results(copy, tuple(timings), tuple(absent))


def _check(setup: Setup) -> None:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if setup.device not in devices:
        found = (
            setup.device
            if setup.device != "cuda"
            else f"cuda, and torch {torch.__version__} sees no GPU"
        )
        raise SettingsError(
            "this device cannot be measured",
            found=found,
            required=" or ".join(devices),
            fix="omit --device, or flexops doctor",
        )
    if setup.compile and setup.compile not in (modes := compile_modes()):
        raise FlexopsError(
            "torch.compile has no such mode",
            found=setup.compile,
            required=", ".join([*modes, "off"]),
            fix="--compile default",
        )


def _measure(
    case: Case, device: str, copy: float, absent: list[tuple[str, str, str]]
) -> Iterator[Timing]:
    ready: dict[str, Callable[[], object]] = {}
    preparation: dict[str, float] = {}
    for name, call in case.contenders.items():
        try:
            preparation[name] = timing.warm_up(call, device)
            ready[name] = call
        except Exception as error:  # the other contenders are still measured
            if name == FLEXOPS:
                raise
            absent.append(
                (
                    case.name,
                    name,
                    (
                        f"{type(error).__name__}:"
                        f" {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                    ),
                )
            )
    seconds = timing.MEASURES[case.measure](ready, device)
    for name, value in seconds.items():
        bandwidth = case.bytes / value
        memory = timing.extra_memory(ready[name]) if case.memory and device == "cuda" else None
        yield Timing(
            case.op,
            case.function,
            case.name,
            case.part,
            name,
            value,
            bandwidth,
            bandwidth / copy,
            memory,
            preparation[name],
            case.operations / value,
        )


def _release(device: str) -> None:
    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
