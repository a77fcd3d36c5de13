"""States that an optimizer loads: a foreign format is an error, the same meaning is converted."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..ops._register import is_distributed
from ..ops.adam8bit import dequantize_averages

CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
"""The averages that AdamW8bit keeps as codes. It calls these ``exp_avg_codes`` and
``exp_avg_sq_codes``, so that ``torch.optim`` does not take them for averages."""

_FRESH = "state_dict['state'] = {} starts with fresh states, and keeps the options of the groups"
_BITSANDBYTES = {"state1", "state2", "absmax1", "qmap1", "__bnb_optimizer_quant_state__"}


def check_names(
    state: dict[str, Any], known: Collection[str], required: Collection[str], where: str
) -> None:
    """Raise ``ValueError`` if there are other states than the optimizer has, or too few."""
    if set(required) <= set(state) <= set(known):
        return
    found, fix = ", ".join(sorted(map(str, state))), _FRESH
    if _BITSANDBYTES & set(state):
        found = f"{found}, which is bitsandbytes' format"
        exact = "exp_avg is qmap1[state1.long()] times absmax1 of its block"
        fix = f"{_FRESH}; or dequantize them first: {exact}, exp_avg_sq is the same of state2"
    elif set(map(_codes_of, CODES)) & set(state):
        found = f"{found}, which is the format of flexops.optim.AdamW8bit"
        fix = f"load them with flexops.optim.AdamW8bit, AdamW, Adam or LAMB; {_FRESH}"
    raise ValueError(f"{where} must have {', '.join(required)}, got {found}. fix: {fix}")


def check_floats(state: dict[str, Any], where: str) -> None:
    """Raise ``TypeError`` if an average is an integer tensor: it may be a code."""
    for name, value in state.items():
        if name != "step" and not (
            isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        ):
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"{where} must have {name} as a floating-point tensor, got {found}. fix: {_FRESH}"
            )


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    """A state with AdamW8bit's names: before, codes were saved under the names of the averages."""
    codes = {
        name
        for name, dtype in CODES.items()
        if isinstance(state.get(name), Tensor) and state[name].dtype == dtype
    }
    return {_codes_of(name) if name in codes else name: value for name, value in state.items()}


def float_state(state: dict[str, Any], where: str) -> dict[str, Any]:
    """A state with float32 averages, if it has the codes of AdamW8bit; else as it is.

    Exact: these are the numbers that the next step would read from the codes.
    """
    state = renamed(state)
    names = {name: (_codes_of(name), _scale_of(name)) for name in CODES}
    if not all(name in state for pair in names.values() for name in pair):
        return state
    tensors = [state[name] for pair in names.values() for name in pair]
    if any(map(is_distributed, tensors)):
        fix = f"load them with flexops.optim.AdamW8bit; {_FRESH}"
        found = "codes of AdamW8bit that are sharded over ranks"
        raise ValueError(f"{where} must have exp_avg and exp_avg_sq, got {found}. fix: {fix}")
    averages = {name: _dequantized(*(state[each] for each in pair)) for name, pair in names.items()}
    return {
        name: value
        for name, value in state.items()
        if not any(name in pair for pair in names.values())
    } | averages


def row_major(tensor: Tensor) -> list[int]:
    """The order of the dimensions in which a dense tensor is row-major."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """Blocks follow memory."""
    order = row_major(codes)
    averages = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    averages.permute(order).copy_(
        dequantize_averages(codes.permute(order), scales.to(codes.device))
    )
    return averages


def _codes_of(name: str) -> str:
    return f"{name}_codes"


def _scale_of(name: str) -> str:
    return f"{name}_scale"
