"""When two results are the same, and when they are near."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import Result

ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


def assert_same(actual: Result, expected: Result) -> None:
    """Bit for bit, NaNs in the same places."""
    for one, other in zip(
        [*actual.outputs, *actual.gradients], [*expected.outputs, *expected.gradients], strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            torch.testing.assert_close(
                numbers_of(one), numbers_of(other), rtol=0, atol=0, equal_nan=True
            )


def assert_near(
    actual: Result, expected: Result, rounding: float | None = None, *, what: str = ""
) -> None:
    """As near as the coarser dtype of the two lets them be; ``rounding`` is the least that is
    granted."""
    labels = [
        *(f"output {i}" for i in range(len(actual.outputs))),
        *(f"gradient {i}" for i in range(len(actual.gradients))),
    ]
    for label, one, other in zip(
        labels,
        [*actual.outputs, *actual.gradients],
        [*expected.outputs, *expected.gradients],
        strict=True,
    ):
        if one is None or other is None:
            assert (one is None) == (other is None), f"{what} {label}: {one} against {other}"
            continue
        assert one.shape == other.shape, f"{what} {label}"
        grain = max(ROUNDING.get(one.dtype, 0.0), ROUNDING.get(other.dtype, 0.0), rounding or 0.0)
        one, other = numbers_of(one).double(), numbers_of(other).double()
        # Zeros (masked, or of rows that are ignored) do not tell how large the others' terms are.
        size = torch.where(other == 0, size_of(other), size_of(other[other != 0]))
        bound = 8 * grain * (other.abs().nan_to_num(0, 0, 0) + size)
        wrong = ~(((one - other).abs() <= bound) | (one == other) | (one.isnan() & other.isnan()))
        first = f"first {one[wrong][:4].tolist()} against {other[wrong][:4].tolist()}"
        assert not wrong.any(), (
            f"{what} {label}: {int(wrong.sum())} of {wrong.numel()} differ, {first}"
        )


def numbers_of(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def size_of(tensor: Tensor) -> Tensor:
    """Root mean square of the finite elements."""
    finite = tensor[tensor.isfinite()]
    return (
        finite.square().mean().sqrt()
        if finite.numel()
        else torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    )
