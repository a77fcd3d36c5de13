"""The formats of 4-bit checkpoints: one table, and what turns a layer's tensors into an
:class:`flexops.Int4Weight`. MXFP4 is only named here; its tensors are those of :mod:`.mxfp4`.

In every other format a weight is ``(code - zero) * scale``, with codes of 4 bits, eight to an int32
word. The formats differ in names, in the order of dimensions, in the dimension along which a word
lies, in the order within a word and in an offset of the zero point. Codes are unpacked to one byte
each, one layer at a time; no weight is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PatchError
from ..ops.int4_linear import GROUP_SIZES, Int4Weight, pack_int4

METHOD = "flexops_int4"
"""``quant_method`` of flexops' own format, and of :class:`flexops.patching.Int4Config`."""
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_PER_WORD = 8
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Words:
    """A matrix of numbers of 4 bits, eight to an int32 word.

    Attributes:
        name: the tensor's name, behind the layer's.
        axes: its dimensions: N outputs, K inputs, G groups of inputs.
        packed: the dimension along which eight numbers are one word.
        order: the place among its eight of the number in each four bits, lowest bits first.
    """

    name: str
    axes: str
    packed: str
    order: tuple[int, ...] = _IN_ORDER

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(
            -(-sizes[axis] // _PER_WORD) if axis == self.packed else sizes[axis]
            for axis in self.axes
        )

    def unpack(self, words: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """uint8 of shape ``[N, K]`` or ``[N, G]``, from words of :meth:`shape`."""
        if self.packed != self.axes[1]:
            words = words.t()
        # bytes of a little-endian word: the low half of each comes first
        octets = words.contiguous().view(torch.uint8)
        numbers = torch.stack([octets & 15, octets >> 4], -1).view(*words.shape, _PER_WORD)
        if self.order != _IN_ORDER:
            numbers = numbers[..., [self.order.index(place) for place in range(_PER_WORD)]]
        numbers = numbers.flatten(1)[:, : sizes[self.packed]]
        return (numbers.t() if self.packed == "N" else numbers).contiguous()

    def pack(self, numbers: Tensor) -> Tensor:
        """int32 words, from uint8 of shape ``[N, K]`` or ``[N, G]``; for words in order only."""
        numbers = numbers.t() if self.packed == "N" else numbers
        numbers = F.pad(numbers, (0, -numbers.shape[1] % _PER_WORD)).unflatten(1, (-1, 2))
        words = (numbers[..., 0] | numbers[..., 1] << 4).contiguous().view(torch.int32)
        return (words if self.packed == self.axes[1] else words.t()).contiguous()


@dataclass(frozen=True)
class Format:
    """How the layers of a checkpoint are stored.

    Attributes:
        name: for messages.
        method: ``quant_method`` of a config.
        codes, scales, zeros: their tensors; of those in floats, the name and the dimensions.
        zero_offset: what is added to a stored zero point, modulo 16.
        index: the name of the group of each input, if there may be one.
        others: further tensors, without a meaning here.
        check: why a config is not of this format; "" if it is.
    """

    name: str
    method: str
    codes: Words
    scales: tuple[str, str]
    zeros: Words | tuple[str, str]
    check: Callable[[Mapping[str, Any]], str]
    zero_offset: int = 0
    index: str = ""
    others: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Of a layer, beside its bias."""
        known = (self.codes.name, self.scales[0], self.zeros_name, self.index, *self.others)
        return tuple(name for name in known if name)

    @property
    def zeros_name(self) -> str:
        return self.zeros.name if isinstance(self.zeros, Words) else self.zeros[0]


class Experts(NamedTuple):
    """A format of experts, whose tensors are those of :mod:`.mxfp4`.

    Attributes:
        name, method: as of :class:`Format`.
    """

    name: str
    method: str


def _reasons(config: Mapping[str, Any], **wanted: tuple[Any, ...]) -> str:
    """The first setting that has none of the wanted values."""
    return next(
        (
            f"{name}={config.get(name)!r}, where {' or '.join(map(repr, values))} is supported"
            for name, values in wanted.items()
            if config.get(name, values[0]) not in values
        ),
        "",
    )


def _gptq(version: str) -> Callable[[Mapping[str, Any]], str]:
    def check(config: Mapping[str, Any]) -> str:
        config = {"checkpoint_format": config.get("format", "gptq"), **config}
        return _reasons(config, bits=(4,), checkpoint_format=(version,), activation=(None,))

    return check


def _awq(config: Mapping[str, Any]) -> str:
    version = config.get("version", config.get("checkpoint_format", config.get("format", "gemm")))
    settings = {"bits": config.get("bits", config.get("w_bit", 4)), "version": str(version).lower()}
    return _reasons(settings, bits=(4,), version=("gemm",))


def _compressed_tensors(config: Mapping[str, Any]) -> str:
    reason = _reasons(config, kv_cache_scheme=(None,))
    if config.get("transform_config"):
        return "transform_config, which is not supported"
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        return f"config_groups={groups!r}, which is no mapping of groups"
    for group in groups.values():
        weights = group.get("weights") or {}
        packing = group.get("format") or config.get("format")
        reason = (
            reason
            or _reasons({"format": packing}, format=("pack-quantized",))
            or _reasons(group, input_activations=(None,), output_activations=(None,))
            or _reasons({"num_bits": 8, **weights}, num_bits=(4,))
            or _reasons(weights, type=("int",), strategy=("group", "channel"))
        )
    return reason or ("" if groups else "no config_groups")


_GPTQ_TENSORS: dict[str, Any] = {
    "codes": Words("qweight", "KN", "K"),
    "scales": ("scales", "GN"),
    "zeros": Words("qzeros", "GN", "N"),
    "index": "g_idx",
}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

FORMATS = (
    Format(
        "compressed-tensors pack-quantized",
        "compressed-tensors",
        codes=Words("weight_packed", "NK", "K"),
        scales=("weight_scale", "NG"),
        zeros=Words("weight_zero_point", "NG", "N"),
        index="weight_g_idx",
        others=("weight_shape",),
        check=_compressed_tensors,
    ),
    # a stored zero point is less by one, except in version 2
    Format("GPTQ", "gptq", **_GPTQ_TENSORS, zero_offset=1, check=_gptq("gptq")),
    Format("GPTQ v2", "gptq", **_GPTQ_TENSORS, check=_gptq("gptq_v2")),
    Format(
        "AWQ GEMM",
        "awq",
        codes=Words("qweight", "KN", "N", _AWQ_ORDER),
        scales=("scales", "GN"),
        zeros=Words("qzeros", "GN", "N", _AWQ_ORDER),
        check=_awq,
    ),
    Format(
        "flexops int4",
        METHOD,
        codes=Words("weight_packed", "NK", "K"),
        scales=("weight_scale", "NG"),
        zeros=("weight_zero_point", "NG"),
        others=("weight_shape",),
        check=lambda config: _reasons(config, version=(1,)),
    ),
)

WRITTEN, OWN = FORMATS[0], FORMATS[-1]
"""The formats of checkpoints that flexops writes. Other software reads the first one, too; it has
no zero points between two codes."""
MXFP4 = Experts("MXFP4", "mxfp4")
SUPPORTED = ", ".join(one.name for one in (*FORMATS, MXFP4)) + ", with 4 bits"


def format_of(config: Mapping[str, Any]) -> Format | Experts:
    """The format of a checkpoint, from its ``quantization_config``.

    Raises:
        PatchError: it is none of the table; it says what differs, and what is supported.
    """
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method")))
    if method == MXFP4.method:
        return MXFP4
    reasons = []
    for one in FORMATS:
        if one.method == method:
            reason = one.check(config)
            if not reason:
                return one
            reasons.append(f"{one.name}: {reason}")
    raise PatchError(
        "flexops does not read this format of a checkpoint's weights",
        found="; ".join([f"quant_method={method!r}", *reasons]),
        required=SUPPORTED,
        fix="load it without Int4Config, or convert it with the library that wrote it",
    )


@dataclass(frozen=True)
class Declared:
    """What a config says of all its layers.

    Attributes:
        group_sizes: 0 stands for one group of all inputs; empty if none is declared.
        zeros: whether every layer has zero points.
    """

    group_sizes: frozenset[int] = frozenset()
    zeros: bool = False

    @staticmethod
    def by(config: Mapping[str, Any]) -> Declared:
        groups = dict(config.get("config_groups") or {}).values()
        each = [dict(one.get("weights") or {}) for one in groups] or [dict(config)]
        sizes = [
            0
            if one.get("strategy") == "channel"
            else one.get("group_size", one.get("q_group_size"))
            for one in each
        ]
        known = [one for one in sizes if one is not None]
        if odd := [one for one in known if not re.fullmatch(r"-?\d+", str(one))]:
            raise PatchError(
                "the checkpoint's config has a group size that is no whole number",
                found=f"group_size={odd[0]!r}",
                required="inputs to a scale, such as 128",
                fix="correct quantization_config in its config.json",
            )
        # in GPTQ and AWQ every layer has zero points
        zeros = not any(one.get("symmetric", bool(groups)) for one in each)
        return Declared(frozenset(max(int(one), 0) for one in known), zeros)


class Codes(NamedTuple):
    """The arguments of :func:`flexops.pack_int4`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int

    def packed(self) -> Int4Weight:
        return pack_int4(*self[:3], group_size=self.group_size)


def weight_of(
    where: str,
    form: Format,
    tensors: Mapping[str, Tensor],
    in_features: int,
    out_features: int,
    declared: Declared = Declared(),
) -> Int4Weight:
    """A layer's weight; see :func:`codes_of`."""
    return codes_of(where, form, tensors, in_features, out_features, declared).packed()


def codes_of(
    where: str,
    form: Format,
    tensors: Mapping[str, Tensor],
    in_features: int,
    out_features: int,
    declared: Declared = Declared(),
) -> Codes:
    """What a layer's weight consists of.

    Args:
        where: the layer's name, for errors.
        form: its format.
        tensors: those of ``form.tensors`` that it has, by their names.
        in_features: K.
        out_features: N.
        declared: what its config says.

    Raises:
        PatchError: a tensor is missing, has another shape or dtype or numbers that are not finite,
            the group size is not supported or is not the declared one, or the inputs are not in the
            order of groups.
    """
    check_shapes(where, form, {name: _meta(one) for name, one in tensors.items()},
                 in_features, out_features, declared)  # fmt: skip
    scales = tensors[form.scales[0]]
    scales = scales if form.scales[1] == "NG" else scales.t().contiguous()
    groups = scales.shape[1]
    sizes = {"N": out_features, "K": in_features, "G": groups}
    group_size = in_features // groups
    _check_order(where, tensors.get(form.index), group_size)
    zeros = tensors.get(form.zeros_name)
    _check_finite(where, {form.scales[0]: scales, form.zeros_name: zeros})
    if zeros is not None and isinstance(form.zeros, Words):
        zeros = ((form.zeros.unpack(zeros, sizes) + form.zero_offset) & 15).half()
    used = usable_group_size(group_size)
    if used != group_size:
        scales = scales.repeat_interleave(group_size // used, 1)
        zeros = None if zeros is None else zeros.repeat_interleave(group_size // used, 1)
    return Codes(form.codes.unpack(tensors[form.codes.name], sizes), scales, zeros, used)


def _meta(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def usable_group_size(group_size: int) -> int:
    """The largest that kernels have and that divides it: a longer group is cut into equal ones. 0:
    there is none."""
    return next((one for one in sorted(GROUP_SIZES, reverse=True) if group_size % one == 0), 0)


def check_shapes(
    where: str,
    form: Format,
    found: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    in_features: int,
    out_features: int,
    declared: Declared = Declared(),
) -> None:
    """Shapes and dtypes of a layer's tensors, before any is read; see :func:`codes_of`."""

    def wrong(name: str, required: str) -> PatchError:
        shape, dtype = found[name]
        return PatchError(
            f"{where}.{name} does not fit a layer of {in_features} inputs and {out_features}"
            f" outputs in {form.name}",
            found=f"shape {list(shape)}, {dtype}",
            required=required,
            fix="load the checkpoint that belongs to this model's config",
        )

    scales, axes = form.scales
    required = (form.zeros_name,) if declared.zeros else ()
    for name in (form.codes.name, scales, *required):
        if name not in found:
            raise PatchError(
                f"{where}: a tensor of {form.name} is missing from the checkpoint",
                found=", ".join(sorted(found)) or "none",
                required=name,
                fix="download the checkpoint again, or quantize the model again",
            )
    shape, dtype = found[scales]
    groups = shape[axes.index("G")] if len(shape) == 2 else 0
    sizes = {"N": out_features, "K": in_features, "G": groups}
    plain = len(shape) == 2 and shape[axes.index("N")] == out_features and groups > 0
    if not plain or in_features % groups:
        raise wrong(scales, f"{_named(axes)}, where groups divide {in_features}")
    group_size = in_features // groups
    stated = declared.group_sizes
    if stated and not stated & {group_size, 0 if groups == 1 else group_size}:
        allowed = sorted(in_features // size if size else 1 for size in stated)
        raise wrong(scales, f"{' or '.join(map(str, allowed))} groups, as the config declares")
    if dtype not in _FLOATS:
        raise wrong(scales, "float16, bfloat16 or float32")
    if "bias" in found and found["bias"][0] != (out_features,):
        raise wrong("bias", f"shape {[out_features]}")
    if form.index in found and found[form.index][0] not in ((in_features,), (0,)):
        raise wrong(form.index, f"shape {[in_features]}")
    packed = [one for one in (form.codes, form.zeros) if isinstance(one, Words)]
    zeros = form.zeros_name
    floats = zeros in found and not isinstance(form.zeros, Words)
    if floats and (found[zeros][0] != shape or found[zeros][1] not in _FLOATS):
        raise wrong(zeros, f"shape {list(shape)}, float16 or float32")
    for words in packed:
        if words.name in found and found[words.name] != (words.shape(sizes), torch.int32):
            raise wrong(words.name, f"shape {list(words.shape(sizes))}, torch.int32")
    if not usable_group_size(group_size):
        raise PatchError(
            f"{where}: no kernel of flexops has this group size",
            found=f"{group_size} inputs to a scale",
            required=f"a multiple of {min(GROUP_SIZES)}",
            fix="quantize the model with another group size, such as 128",
        )


def _named(axes: str) -> str:
    return f"shape {[{'N': 'outputs', 'K': 'inputs', 'G': 'groups'}[axis] for axis in axes]}"


def _check_order(where: str, index: Tensor | None, group_size: int) -> None:
    """Inputs that were sorted by their activations (``desc_act``, ``actorder="group"``) would have
    to be sorted at each call."""
    if index is None or not index.numel():
        return
    expected = torch.arange(index.numel(), device=index.device) // group_size
    if not torch.equal(index.to(torch.int64), expected):
        raise PatchError(
            f"{where}: inputs are not in the order of their groups (desc_act=True, or"
            ' actorder="group")',
            found=f"groups {index[:8].tolist()}... of the first inputs",
            required=f"inputs in order, {group_size} to a group",
            fix='quantize the model with desc_act=False, or actorder="weight"',
        )


def _check_finite(where: str, numbers: Mapping[str, Tensor | None]) -> None:
    """Scales and zero points, whose NaN would reach every output of the model."""
    for name, one in numbers.items():
        if one is None or one.is_meta or not one.is_floating_point():
            continue
        odd = int(one.isfinite().logical_not_().sum())
        if odd:
            raise PatchError(
                f"{where}.{name} has numbers that are not finite",
                found=f"{odd} of {one.numel()} are NaN or infinite",
                required="finite scales and zero points",
                fix="download the checkpoint again, or quantize the model again",
            )
