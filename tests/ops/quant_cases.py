"""Inputs for the tests of quantization, on any device: tensors of many shapes and strides, with
what is special about numbers in them."""

from __future__ import annotations

import random

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPECIAL = (
    float("nan"),
    float("inf"),
    -float("inf"),
    0.0,
    -0.0,
    1e-40,
    6e-8,
    65504.0,
    -65504.0,
    3.0e38,
    -3.0e38,
)


def draw_input(
    random_: random.Random, generator: torch.Generator, device: str = "cpu"
) -> tuple[torch.Tensor, int]:
    """A tensor to quantize and the dimension to group along."""
    shape = [
        random_.choice((1, 2, 3, 5, 8, 17, 64, 128, 200))
        for _ in range(random_.choice((1, 2, 2, 3)))
    ]
    if random_.random() < 0.05:
        shape[random_.randrange(len(shape))] = 0
    x = torch.randn(shape, generator=generator) * 10 ** random_.uniform(-6, 6)
    kind = random_.random()
    if kind < 0.1:
        x = torch.full(shape, random_.choice((3.7, 0.0, -0.0, -1e-3)))
    elif kind < 0.4 and x.numel():
        for value in SPECIAL:
            x.view(-1)[random_.randrange(x.numel())] = value
    x = x.to(random_.choice(DTYPES)).to(device)
    return restride(x, random_), random_.randrange(-len(shape), len(shape))


def restride(x: torch.Tensor, random_: random.Random) -> torch.Tensor:
    """The same numbers, differently placed in memory."""
    choice = random_.random()
    if choice < 0.15 and x.dim() > 1:
        return x.transpose(0, -1)
    if choice < 0.3:
        return torch.cat([x, x], -1)[..., : x.shape[-1]]  # rows with gaps
    if choice < 0.4:
        return torch.stack([x, x], -1)[..., 0]  # no two elements are neighbours
    if choice < 0.5:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # not aligned
    if choice < 0.6:
        return x[:1].expand(x.shape)
    return x


def draw_options(random_: random.Random) -> tuple[int, int, bool]:
    """bits, group_size, symmetric."""
    return (
        random_.choice((4, 8)),
        random_.choice((1, 2, 3, 7, 16, 32, 64, 64, 100, 128, 256, 1025)),
        random_.random() < 0.5,
    )


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same shape, dtype and numbers, both contiguous; any NaN equals any other."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert expected.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
