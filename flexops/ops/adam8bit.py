"""Adam and AdamW steps with both averages held in 8 bits, on lists of tensors, in place.

States are quantized in blocks of 256 elements, each with the largest magnitude of its block, after
Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (2022).
Two things are different here: the codes, which are roots instead of a table (so that they cost a
few instructions, and relative precision falls off evenly instead of in decades), and rounding,
which is stochastic: an average that moves by a thousandth a step would never leave its code if it
were rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ._declared import define
from ._multi_tensor import (
    CHECKED,
    Writer,
    each_step,
    step_of_lists,
    three_steps,
)
from ._self_check import Make, OnReference

BLOCK = 256
"""Elements that share a scale."""


@step_of_lists
def adam8bit_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make one Adam step (AdamW with ``decoupled``) on every parameter, in place, with averages of
    8 bits.

    The formula is that of :func:`flexops.adam_`; the averages of before are read from their codes,
    and those of after written as codes. A block is 256 elements in row-major order, the last one
    shorter. With s its scale, the largest magnitude in the block::

        exp_avg    = s * sign(c) * (c / 127)^2    c: int8, -127 to 127
        exp_avg_sq = s * (c / 255)^4              c: uint8, 1 to 255 (0 before the first step)

    A number between two codes becomes either, at random, so that it is right on average. The random
    number is a hash of the step and the element's place: the same call gives the same result, on
    every device (up to the rounding of float32 arithmetic).

    Args:
        params: float32, bfloat16 or float16 tensors of any shape, written. Row-major (contiguous)
            ones are stepped where they lie.
        grads: float32, bfloat16 or float16 (each on its own), of their parameters' shapes; written
            only with ``grad_scale``.
        exp_avgs: int8, of their parameters' shapes, written. Zero to begin with.
        exp_avg_sqs: uint8, of their parameters' shapes, written. Zero to begin with.
        exp_avg_scales, exp_avg_sq_scales: contiguous float32 of at least ceil(elements / 256)
            elements, of which that many are written. Zero to begin with.
        state_steps: as in :func:`flexops.adam_`.
        eps: as in :func:`flexops.adam_`, but at least 1e-30.
        lr, beta1, beta2, weight_decay, maximize, decoupled, grad_scale, found_inf: see
            :func:`flexops.adam_`.

    Raises:
        TypeError: an entry is no tensor or has a dtype that is not accepted; the message names it.
        ValueError: lengths, shapes or devices do not match, or a number is out of range; the
            message names it.
    """


def blocks(numel: int) -> int:
    """How many scales a tensor of ``numel`` elements has."""
    return -(-numel // BLOCK)


# ---- the reference ----


def dequantize_averages(codes: Tensor, scales: Tensor) -> Tensor:
    """An average in float32 from its codes (int8: the first moment, uint8: the second) and
    scales."""
    root = codes.flatten().float()
    power, most = (
        (root * root.abs(), 127.0**2)
        if codes.dtype == torch.int8
        else (root.square().square(), 255.0**4)
    )
    scale = (scales * (1 / most)).repeat_interleave(BLOCK)[: root.numel()]
    return (power * scale).view(codes.shape)


def _hash(x: Tensor) -> Tensor:
    """A well-mixed 32-bit word of each 32-bit word (Wellons, "Prospecting for Hash Functions",
    lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def _random(step: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Two numbers in [0, 1) for each element, of 16 bits."""
    place = torch.arange(numel, device=step.device)
    seed = _hash(step.reshape(()).long() & 0xFFFFFFFF)
    word = (((place + (place >> 32) * 0x9E3779B9 + seed) & 0xFFFFFFFF) * 0x21F0AAAD) & 0xFFFFFFFF
    word = ((word ^ (word >> 16)) * 0x735A2D97) & 0xFFFFFFFF
    return (word & 0xFFFF).float() / 65536, (word >> 16).float() / 65536


def _block_scales(magnitude: Tensor) -> Tensor:
    """The largest of each block; NaN if one is there."""
    padded = torch.nn.functional.pad(magnitude, (0, -magnitude.numel() % BLOCK))
    return padded.view(-1, BLOCK).amax(1) if magnitude.numel() else magnitude.new_zeros(0)


def quantize_averages(
    exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of both averages, flat."""
    random1, random2 = _random(step, exp_avg.numel())

    def relative(magnitude: Tensor, most: float) -> tuple[Tensor, Tensor]:
        scales = _block_scales(magnitude)
        factor = torch.where((scales > 0) & (scales < float("inf")), most / scales, 0.0).clamp(
            max=3e38
        )
        return scales, (
            magnitude * factor.repeat_interleave(BLOCK)[: magnitude.numel()]
        ).nan_to_num(0.0).clamp(max=most)

    scales1, power1 = relative(exp_avg.abs(), 127.0**2)
    low = power1.sqrt().floor()
    code1 = (low + (power1 - low * low > random1 * (2 * low + 1))).clamp(max=127)
    scales2, power2 = relative(exp_avg_sq, 255.0**4)
    power2 = power2.clamp(min=1)
    low = power2.sqrt().sqrt().floor()
    low4, high4 = low.square().square(), (low + 1).square().square()
    code2 = (low + (power2 - low4 > random2 * (high4 - low4))).clamp(max=255)
    return (
        (code1 * exp_avg.sign().nan_to_num(0.0)).to(torch.int8),
        code2.to(torch.uint8),
        scales1,
        scales2,
    )


def _reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    state_steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    decoupled: bool,
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One parameter at a time, in plain PyTorch and float32; waits for no device."""
    lists = [params, grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, state_steps]
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    lists[-1] = each_step(state_steps, params)
    writer = Writer(found_inf)
    for param, grad_, codes1, codes2, scales1, scales2, steps in zip(*lists, strict=True):
        step = steps + 1
        writer.put(steps, step)
        grad, value = writer.gradient(grad_, grad_scale, maximize), param.float()
        if decoupled:
            value = value * (1 - rate * weight_decay)
        elif weight_decay:
            grad = grad + weight_decay * value
        exp_avg = dequantize_averages(codes1, scales1) * beta1 + (1 - beta1) * grad
        exp_avg_sq = dequantize_averages(codes2, scales2) * beta2 + (1 - beta2) * grad * grad
        count = step.double().reshape(())
        step_size, root = rate / (1 - beta1**count), (1 - beta2**count).sqrt()
        writer.put(
            param, value - step_size * exp_avg / (exp_avg_sq.sqrt() / root + max(eps, 1e-30))
        )
        made = quantize_averages(exp_avg.flatten(), exp_avg_sq.flatten(), step)
        new1, new2, new_scales1, new_scales2 = made
        writer.put(codes1, new1.view(codes1.shape))
        writer.put(codes2, new2.view(codes2.shape))
        writer.put(scales1[: len(new_scales1)], new_scales1)
        writer.put(scales2[: len(new_scales2)], new_scales2)


define("adam8bit_", _reference)


def self_check(device: str) -> float:
    """Three AdamW steps: the largest difference of the parameter from the reference's, less the few
    elements where a code rounds the other way, by a last bit."""
    results = []
    for mode in (nullcontext(), OnReference()):
        make = Make(torch.float32, device)
        codes = [
            torch.zeros(CHECKED, dtype=one, device=device) for one in (torch.int8, torch.uint8)
        ]
        scales = [torch.zeros(blocks(CHECKED), device=device) for _ in codes]
        numbers = 0.1, 0.9, 0.999, 1e-8, 0.1, False, True, None, None, None
        with mode:
            results.append(three_steps(make, "adam8bit_", [*codes, *scales], *numbers)[0])
    return float((results[0] - results[1]).abs().quantile(0.99))
