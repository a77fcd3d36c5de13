"""Logits, classes and options at random, and how near results must be: shared by the tests of cross
entropy on the CPU and on a GPU."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from contract import Make, Shape
from torch import Tensor

from flexops.ops import cross_entropy as module

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

WIDE = 37
"""Columns of a layer's weight."""

MOST_ON_CPU = 2**18
"""Elements that a CPU gets: several rows for each thread, whatever the number of classes; more of
the same shows nothing more, and takes seconds."""


def logits_and_target(make: Make, shape: Shape) -> tuple[Tensor, Tensor]:
    target = make.integers(0, shape[1], shape[0])
    target[1::5] = -100
    return make(*shape, scale=2.0), target


def layer_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    target = make.integers(0, WIDE, shape[0])
    target[1::5] = -100
    return make(*shape), make(WIDE, shape[1], scale=shape[1] ** -0.5), target, make(WIDE)


class Drawn(NamedTuple):
    """Arguments of the ops; ``numbers``: ignore_index, label_smoothing, z_loss and reduction."""

    logits: Tensor
    target: Tensor
    numbers: tuple[int, float, float, int]
    factors: Tensor | None
    upstream: Tensor


def draw(seed: int, device: str, classes: tuple[int, ...]) -> Drawn:
    """Sometimes with ignored and invalid classes, NaN, infinities, gaps between rows and odd
    alignments."""
    choose, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    length = choose.choice(classes)
    rows = (
        choose.choice([1, 2, 5, 17, 40]) if length > 5000 else choose.choice([1, 3, 64, 1000, 1500])
    )
    if device == "cpu":
        rows = min(rows, max(5, MOST_ON_CPU // length))
    dtype = choose.choice(DTYPES)
    x = (
        torch.randn(rows, length, generator=generator, device=device) * choose.choice([1, 3, 10])
    ).to(dtype)
    target = torch.randint(0, length, (rows,), generator=generator, device=device)
    ignored = choose.choice([-100, 0])
    if choose.random() < 0.5:
        target[torch.rand(rows, generator=generator, device=device) < 0.3] = ignored
    if choose.random() < 0.1:
        target[0] = length + 3
    if choose.random() < 0.2:
        x[rows // 2, length // 2] = choose.choice([torch.nan, torch.inf, -torch.inf])
    how = choose.random()
    if how < 0.2:
        x = torch.cat([x, x[:, : min(length, choose.choice([1, 5, 8]))]], 1)[:, :length]
    elif how < 0.35:
        x = torch.cat([x.new_zeros(3), x.flatten()])[choose.choice([1, 3]) :][: x.numel()].view(
            rows, length
        )
    reduction = choose.choice([0, 1, 2])
    numbers = (ignored, choose.choice([0.0, 0.1, 1.0]), choose.choice([0.0, 1e-3]), reduction)
    each = [rows] if choose.random() < 0.5 else []
    factors = (
        torch.rand(each, generator=generator, device=device) if choose.random() < 0.5 else None
    )
    return Drawn(
        x,
        target,
        numbers,
        factors,
        torch.randn([rows] if reduction == 0 else [], generator=generator, device=device),
    )


def assert_near(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """As near as two roundings to the dtype let results be, and float32's arithmetic on numbers of
    the size ``scale``, which may cancel."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    one, other = actual.double(), expected.double()
    size = other.abs().nan_to_num(0, 0, 0).amax() if other.numel() else 0.0
    bound = (
        (2 * ROUNDING[actual.dtype] + 2e-5) * other.abs()
        + 2e-5 * size
        + 2e-6 * scale
        + (2.0**-24 if actual.dtype == torch.float16 else 0.0)
    )
    wrong = ~(((one - other).abs() <= bound) | (one == other) | (one.isnan() & other.isnan()))
    assert not wrong.any(), (
        tuple(actual.shape),
        actual.dtype,
        int(wrong.sum()),
        one[wrong][:3].tolist(),
        other[wrong][:3].tolist(),
    )


def size_of(logits: Tensor, numbers: tuple[int, float, float, int]) -> float:
    """What the loss of these logits is made of: as many times the largest as are summed up."""
    largest = float(logits.float().nan_to_num(0, 0, 0).abs().amax()) if logits.numel() else 0.0
    return (1 + largest) * (logits.shape[0] ** 0.5 if numbers[3] == 1 else 1.0)


def compare_all(seed: int, device: str, classes: tuple[int, ...]) -> None:
    """The kernels against the references: forward, backward, and in place."""
    ops = torch.ops.flexops
    x, target, numbers, factors, upstream = draw(seed, device, classes)
    size = size_of(x, numbers)
    loss, stats = ops.cross_entropy(x, target, *numbers)
    expected_loss, expected_stats = module._cross_entropy_reference(x, target, *numbers)
    assert_near(loss, expected_loss, size)
    expected = module._cross_entropy_backward_reference(
        upstream, x, target, expected_stats, *numbers
    )
    assert_near(ops.cross_entropy_backward(upstream, x, target, stats, *numbers), expected)
    written, expected = x.clone(memory_format=torch.preserve_format), x.clone()
    loss = ops.cross_entropy_(written, target, factors, *numbers)[0]
    assert_near(loss, expected_loss, size)
    module._cross_entropy_inplace_reference(expected, target, factors, *numbers)
    assert_near(written, expected)
