"""Scores and masks at random, and how near results must be: shared by the tests of softmax on the
CPU and on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from flexops.ops import softmax as module

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
LENGTHS = (1, 2, 3, 7, 8, 9, 17, 31, 64, 100, 255, 256, 257, 777, 1000, 1024, 1025, 2047, 2048,
    2049, 4096, 5000, 8191, 9001)  # fmt: skip


def draw_scores(
    choose: random.Random,
    generator: torch.Generator,
    device: str,
    lengths: tuple[int, ...] = LENGTHS,
) -> Tensor:
    """Up to four dimensions, sometimes with infinities and NaN, sometimes misaligned, with gaps,
    transposed or expanded."""
    shape = (
        *(choose.choice([1, 2, 3, 5]) for _ in range(choose.randint(0, 3))),
        choose.choice(lengths),
    )
    dtype, length = choose.choice(DTYPES), shape[-1]
    x = (torch.randn(shape, generator=generator, device=device) * choose.choice([0.1, 1, 5])).to(
        dtype
    )
    if choose.random() < 0.2:
        x[..., choose.randrange(length)] = -torch.inf
    if choose.random() < 0.1:
        x[..., choose.randrange(length)] = torch.nan
    how = choose.random()
    if how < 0.15:
        return torch.cat([x, x], -1)[..., :length]
    if how < 0.3:
        return torch.cat([x.new_zeros(3), x.flatten()])[choose.choice([1, 3]) :][: x.numel()].view(
            shape
        )
    if how < 0.4:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how < 0.5:
        return x[:1].expand(shape)
    return x


def draw_mask(choose: random.Random, generator: torch.Generator, x: Tensor) -> Tensor | None:
    """Of any dtype that can be a mask, and any shape that can be broadcast to x's; sometimes every
    second element of something."""
    if choose.random() < 0.3:
        return None
    shape = [size if choose.random() < 0.6 else 1 for size in x.shape][
        choose.randrange(x.dim()) if choose.random() < 0.3 else 0 :
    ]
    kept = torch.rand(shape, generator=generator, device=x.device) < choose.choice([0.0, 0.5, 0.9])
    dtype = choose.choice([torch.bool, *DTYPES])
    if dtype == torch.bool:
        mask = kept
    else:
        mask = torch.randn(shape, generator=generator, device=x.device).to(dtype)
        if choose.random() < 0.6:
            mask = mask.masked_fill(~kept, -torch.inf)
    return torch.stack([mask, mask], -1)[..., 0] if choose.random() < 0.2 else mask


def draw_lowest(
    dtype: torch.dtype, device: str, length: int
) -> Iterator[tuple[Tensor, Tensor | None, float]]:
    """Scores, masks and scales, with rows that have nothing but a lowest number: these are even.
    1/4 keeps sums with float16's exact."""
    x = (torch.randint(-40, 41, (2, 3, 2, length), device=device) / 4).to(dtype)
    for mask_dtype in DTYPES:
        for shape in ((2, 1, 1, length), (2, 1, 2, length), (2, 3, 2, length), (2, 3, 2, 1)):
            mask = torch.zeros(shape, dtype=mask_dtype, device=device)
            mask[0] = torch.finfo(mask_dtype).min
            yield x, mask, 0.25
    for lowest in (torch.finfo(dtype).min, -60000.0 if dtype == torch.float16 else -1e10):
        x[0, 0] = lowest
        for keep in (
            None,
            torch.ones(2, 1, 2, length, dtype=torch.bool, device=device),
            torch.zeros(2, 1, 1, length, device=device),
        ):
            yield x, keep, 0.3


def assert_near(actual: Tensor, expected: Tensor, units: float = 2, scale: float = 0.0) -> None:
    """As near as so many roundings to the dtype let results be, and float32's arithmetic on numbers
    of the size ``scale``, which may cancel."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    one, other = actual.double(), expected.double()
    largest = other.abs().nan_to_num(0, 0, 0).amax() if other.numel() else 0.0
    bound = (
        (units * ROUNDING[actual.dtype] + 1e-5) * other.abs()
        + SMALLEST[actual.dtype]
        + units * 2.0**-24 * largest
        + 1e-6 * scale
    )
    wrong = ~(((one - other).abs() <= bound) | (one.isnan() & other.isnan()))
    assert not wrong.any(), (
        tuple(actual.shape),
        actual.dtype,
        int(wrong.sum()),
        one[wrong][:3].tolist(),
        other[wrong][:3].tolist(),
    )


def compare_all(seed: int, device: str, lengths: tuple[int, ...] = LENGTHS) -> None:
    """The kernels against the references, forward and backward."""
    ops = torch.ops.flexops
    choose, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    x = draw_scores(choose, generator, device, lengths)
    mask = draw_mask(choose, generator, x)
    scale = choose.choice([1.0, 0.125, -0.7, 3.0])
    grad = torch.randn(x.shape, generator=generator, device=device).to(x.dtype)

    def compare(y: Tensor, expected: Tensor, causal: bool) -> None:
        assert_near(y, expected)
        actual = ops.softmax_backward(grad, y, scale, causal)
        wanted = module._softmax_backward_reference(grad, y, scale, causal)
        assert_near(actual, wanted, 8, abs(scale))

    y = ops.scaled_masked_softmax(x, mask, scale)
    compare(y, module._scaled_masked_softmax_reference(x, mask, scale), False)
    if x.dim() > 1:
        y = ops.causal_softmax(x, scale)
        compare(y, module._causal_softmax_reference(x, scale), True)
