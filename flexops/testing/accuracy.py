"""Errors against float64, ours and torch's.

``FLEXOPS_TEST_ACCURACY=FILE pytest`` appends each measured error to FILE.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .case import Case, Make, argument_name
from .comparing import numbers_of, size_of
from .isa import isa_limit, levels
from .running import cast, run


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest and mean absolute difference, of the elements that float64 has finite."""
    finite = expected.isfinite()
    if not finite.any():
        return 0.0, 0.0
    difference = (actual.detach().double() - expected).abs()[finite]
    return float(difference.max()), float(difference.mean())


class Measured(NamedTuple):
    """Of a result: the kernels' level ("" for the machine's default), its label, largest
    and mean error, ours and the rival's, and its size."""

    level: str
    label: str
    ours: tuple[float, float]
    rivals: tuple[float, float]
    size: float


def compared(case: Case, device: str, dtype: torch.dtype) -> Iterator[Measured]:
    """Each result and gradient, over all draws, at each level of instructions."""
    draws = [list(_measure(case, Make(dtype, device, seed=3 + draw))) for draw in range(case.draws)]
    for same in zip(*draws, strict=True):
        ours, rivals = _pooled([one.ours for one in same]), _pooled([one.rivals for one in same])
        yield Measured(
            same[0].level, same[0].label, ours, rivals, sum(one.size for one in same) / len(same)
        )


def _measure(case: Case, make: Make) -> Iterator[Measured]:
    args = case.inputs(make, case.shapes[-1])
    exact = run(case.oracle, cast(args, torch.float64), case.differentiable)
    rival = run(case.rival or case.oracle, args, case.differentiable)
    labels = (
        [f"result {i}" for i in range(len(exact.outputs))] if len(exact.outputs) > 1 else ["result"]
    )
    labels += [f"gradient of {argument_name(case, i)}" for i in case.differentiable]
    for level in (*levels()[:-1], "") if make.device == "cpu" else ("",):
        with isa_limit(level) if level else nullcontext():
            ours = run(case.call, args, case.differentiable)
        for label, one, other, value in zip(
            labels,
            *([*result.outputs, *result.gradients] for result in (ours, rival, exact)),
            strict=True,
        ):
            if (
                one is not None
                and other is not None
                and value is not None
                and value.is_floating_point()
            ):
                yield Measured(
                    level,
                    label,
                    errors(numbers_of(one), value),
                    errors(numbers_of(other), value),
                    float(size_of(value)),
                )


def _pooled(draws: list[tuple[float, float]]) -> tuple[float, float]:
    return max(largest for largest, _ in draws), sum(mean for _, mean in draws) / len(draws)


def write(
    case: Case,
    device: str,
    dtype: torch.dtype,
    what: str,
    ours: tuple[float, float],
    torchs: tuple[float, float],
    size: float,
) -> None:
    file = os.environ.get("FLEXOPS_TEST_ACCURACY")
    if not file:
        return
    row = {
        "op": case.name,
        "what": what,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "size": size,
        "torch": torch.__version__,
    }
    row |= {"max": ours[0], "mean": ours[1], "torch_max": torchs[0], "torch_mean": torchs[1]}
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
