"""Logits, classes and options at random for the tests of log-probabilities on the CPU and on a
GPU."""

from __future__ import annotations

import random

import torch
from cross_entropy_cases import assert_near
from cross_entropy_cases import draw as draw_logits
from torch import Tensor

from flexops.ops import logprobs as module

CLASSES = (1, 2, 3, 10, 33, 100, 1000, 1024, 1025, 1031, 4096, 10007)


def check_draw(seed: int, device: str, classes: tuple[int, ...] = CLASSES) -> None:
    """The kernels against the reference: strides, ignored and invalid classes, NaN, infinities."""
    ops, choose = torch.ops.flexops, random.Random(seed)
    x, target, numbers, _, _ = draw_logits(seed, device, classes)
    rest = (numbers[0], choose.choice([1.0, 0.3, 2.0]), choose.choice([0.0, 0.0, 5.0]))
    results = ops.logprobs(x, target, *rest)
    expected = module._logprobs_reference(x, target, *rest)
    # not the statistics: a maximum may ignore NaN, which is in the sum then
    for actual, wanted in zip(results[:2], expected[:2], strict=True):
        assert_near(actual, wanted, size_of(x))
    generator = torch.Generator(device).manual_seed(seed)
    grads = [torch.randn(x.shape[0], generator=generator, device=device) for _ in range(2)]
    known = (target, results[2], results[1], *rest)
    gradient = module._backward_reference(*grads, x, *known)
    # an exponent's own rounding is that of numbers of the logits' size
    scale = size_of(x) * float(torch.stack(grads).abs().amax())
    assert_near(ops.logprobs_backward(*grads, x, *known), gradient, scale)
    written = x.contiguous().clone()
    ops.logprobs_backward_(*grads, written, *known)
    assert_near(written, gradient, scale)


def size_of(x: Tensor) -> float:
    """What a scaled logit may be at most."""
    finite = x.float()[x.isfinite()]
    return max(10.0, float(finite.abs().amax()) / 0.3 if finite.numel() else 0.0)
