"""Experts in MXFP4 checkpoints, as gpt-oss is published: which tensors they are, what holds them
until all are read, and what is written.

Only experts are in this format; the rest of such a checkpoint has 16 bits. A matrix of all experts
``[E, N, K]`` is two tensors of uint8: ``*_blocks`` ``[E, N, K / 32, 16]``, with two codes to a
byte, the low half first, and ``*_scales`` ``[E, N, K / 32]``, exponents plus 127. In an
:class:`flexops.Int4Weight` the scales are bfloat16, which has all these powers of two, one of them
(2^-127) below its normal numbers. The exponent 255 stands for NaN and is rejected.

Formula: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchError
from ..nn import Int4Experts
from ..nn.expert_parts import flag
from ..nn.experts import Gate, biases_of, joined, matrices, why_not
from ..ops.int4_linear import Int4Weight, int4_codes, pack_int4
from .formats import MXFP4

GROUP = 32
_SUBNORMAL = 0x40
"""2^-127 in bfloat16, whose bits are otherwise the exponent, shifted by 7."""
_PARTS = ("blocks", "scales", "bias")
_Entry = tuple[tuple[int, ...], torch.dtype]


class StoredExperts(nn.Module):
    """Experts with the tensors of a checkpoint, under their names."""

    def __init__(self, experts: Any, entries: Mapping[str, _Entry]) -> None:
        super().__init__()
        self.count, self.gate = len(experts.down_proj), Gate.of(experts)
        self.products = _products(flag(experts, "has_gate"))
        self.biases = tuple(biases_of(experts))
        for name in self.biases:
            self.register_parameter(name, getattr(experts, name))
        for name, (shape, dtype) in entries.items():
            if name not in self.biases:
                self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))

    def built(self, where: str, dtype: torch.dtype) -> Int4Experts:
        first, last = (self._weight(where, name) for name in self.products)
        biases = {name: getattr(self, name).detach().to(dtype) for name in self.biases}
        return Int4Experts(first, last, self.count, biases, self.gate, mxfp4=True)

    def _weight(self, where: str, name: str) -> Int4Weight:
        tensors = [self._buffers.pop(f"{name}_{part}") for part in ("blocks", "scales")]
        blocks, scales = tensors  # of no module any more, so that they are freed
        assert blocks is not None
        assert scales is not None
        if bool((scales == 255).any()):
            raise PatchError(
                f"{where}.{name}_scales has numbers that are not finite",
                found=f"{int((scales == 255).sum())} of {scales.numel()} are 255, which is NaN",
                required="exponents from 0 to 254",
                fix="download the checkpoint again, or quantize the model again",
            )
        return joined([_packed(*one) for one in zip(blocks, scales, strict=True)])


def _products(has_gate: bool) -> tuple[str, str]:
    return "gate_up_proj" if has_gate else "up_proj", "down_proj"


def _packed(blocks: Tensor, exponents: Tensor) -> Int4Weight:
    """One expert's ``[N, K / 32, 16]`` and ``[N, K / 32]``."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
    bits = exponents.to(torch.int16) << 7
    scales = bits.masked_fill_(exponents == 0, _SUBNORMAL).view(torch.bfloat16)
    return pack_int4(codes, scales, group_size=GROUP)


def _unpacked(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """The reverse."""
    codes, scales, _ = int4_codes(weight)
    pairs = codes.unflatten(1, (-1, GROUP // 2, 2))
    blocks = pairs[..., 0] | pairs[..., 1] << 4
    return blocks, (scales.view(torch.int16) >> 7).to(torch.uint8)


def saved_tensors(experts: Int4Experts) -> dict[str, Tensor]:
    """What a checkpoint has of a module, on the CPU, by names within it."""
    written = {}
    weights = experts.gate_up, experts.down
    for name, weight in zip(_products(experts.has_gate), weights, strict=True):
        rows = weight.n // experts.num_experts
        parts = (one.chunk(experts.num_experts) for one in (weight.packed, weight.scales))
        each = [
            _unpacked(Int4Weight(packed, scales, None, rows, weight.k, GROUP))
            for packed, scales in zip(*parts, strict=True)
        ]
        for part, tensors in zip(("blocks", "scales"), zip(*each, strict=True), strict=True):
            written[f"{name}_{part}"] = torch.stack([one.cpu() for one in tensors])
    return written


def of_model(model: Any) -> list[Int4Experts]:
    """The modules of a model whose codes are MXFP4's."""
    return [one for one in model.modules() if isinstance(one, Int4Experts) and one.mxfp4]


def stored(
    model: Any, entries: Mapping[str, _Entry], renamed: Callable[[str], str]
) -> dict[str, nn.Module]:
    """What takes the place of experts while a checkpoint is read, by their names. All of their
    tensors are checked.

    Args:
        model: on the meta device.
        entries: the checkpoint's tensors.
        renamed: what a name of the checkpoint is in the model.

    Raises:
        PatchError: a tensor is missing, unknown, or of another shape or dtype.
    """
    known = {name: module for name, module in model.named_modules() if _has_experts(module)}
    found: dict[str, dict[str, _Entry]] = {}
    for key, entry in entries.items():
        stem, _, part = key.rpartition("_")
        path, _, own = renamed(stem).rpartition(".") if part in _PARTS else ("", "", "")
        if path in known and own in _products(flag(known[path], "has_gate")):
            found.setdefault(path, {})[f"{own}_{part}"] = entry
        elif part in ("blocks", "scales"):
            raise PatchError(
                f"flexops cannot place {key} of this {MXFP4.name} checkpoint",
                found=f"{path}.{own} is no weight of experts of this model",
                required="blocks and scales of experts",
                fix="load the checkpoint that belongs to this model's config",
            )
    quantized = {
        path: tensors
        for path, tensors in found.items()
        if any(name.endswith(("_blocks", "_scales")) for name in tensors)
    }
    for path, tensors in quantized.items():
        _check(path, known[path], tensors)
    return {path: StoredExperts(known[path], tensors) for path, tensors in quantized.items()}


def _has_experts(module: Any) -> bool:
    last = module._parameters.get("down_proj")
    return isinstance(last, Tensor) and last.dim() == 3


def _check(path: str, experts: Any, found: Mapping[str, _Entry]) -> None:
    reason = why_not(experts, GROUP)
    if reason:
        raise PatchError(
            f"flexops does not compute {path}, {type(experts).__name__}, with weights of 4 bits",
            found=reason,
            fix="load the checkpoint without Int4Config",
        )
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {}
    products = _products(flag(experts, "has_gate"))
    for name, matrix in zip(products, matrices(experts), strict=True):
        count, rows, columns = matrix.shape
        of_groups = count, rows, columns // GROUP
        wanted[f"{name}_blocks"] = (*of_groups, GROUP // 2), (torch.uint8,)
        wanted[f"{name}_scales"] = of_groups, (torch.uint8,)
    floats = torch.bfloat16, torch.float16, torch.float32
    wanted |= {name: (tuple(one.shape), floats) for name, one in biases_of(experts).items()}
    for name, (shape, dtypes) in wanted.items():
        entry = found.get(name)
        if entry is None or entry[0] != shape or entry[1] not in dtypes:
            raise PatchError(
                f"{path}.{name} is missing from the checkpoint"
                if entry is None
                else f"{path}.{name} does not fit this model's experts in {MXFP4.name}",
                found=", ".join(sorted(found)) if entry is None else _described(*entry),
                required=_described(shape, *dtypes),
                fix="load the checkpoint that belongs to this model's config",
            )
    odd = sorted(found.keys() - wanted)
    if odd:
        raise PatchError(
            f"flexops cannot place {path}.{odd[0]} of this {MXFP4.name} checkpoint",
            found="the experts of this model have no biases",
            fix="load the checkpoint that belongs to this model's config",
        )


def _described(shape: tuple[int, ...], *dtypes: torch.dtype) -> str:
    return f"shape {list(shape)}, {' or '.join(map(str, dtypes))}"


def saved_config(before: Any) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint, with what the one that was read says beside its
    format: names that keep 16 bits."""
    kept = dict(before) if isinstance(before, Mapping) else {}
    same = getattr(kept.get("quant_method"), "value", kept.get("quant_method")) == MXFP4.method
    return {**(kept if same else {}), "quant_method": MXFP4.method}
