"""Group-wise quantization to 4 or 8 bits, and back.

A tensor is cut into groups of ``group_size`` consecutive elements along one dimension; the last
group may be short. Each group is stored as integer codes and one pair ``(scale, minimum)``, or a
``scale`` alone if symmetric. Format and formulas are those of FlexGen's group-wise compression
(Sheng et al., "FlexGen: High-Throughput Generative Inference of Large Language Models with a Single
GPU", 2023, section 4.1), made total: constant groups, NaN and infinities have defined results, and
8 bits, symmetric codes and odd group sizes exist.

The arithmetic, in float32 with one rounding an operation, to nearest even, and never a fused
multiply-add (``lowest`` and ``highest`` are over the group's own elements: what pads a short group
takes no part)::

    asymmetric, B = 2**bits - 1                             symmetric, B = 2**(bits - 1) - 1
    minimum = lowest + 0.0                                  minimum = 0
    span    = highest - minimum                             span    = max(|lowest|, |highest|)
    scale   = (1 / span) * B, at most the largest finite number of x.dtype, rounded to x.dtype;
              1 if span is 0
    code    = clamp(round((x - minimum) * scale), 0, B)     code    = clamp(round(x * scale), -B, B)
    value   = code * (1 / scale) + minimum, rounded to the result's dtype

The native CPU and CUDA kernels give exactly the codes, pairs and values of the plain PyTorch
version in this file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._arguments import FLOAT_DTYPES, check_device, check_tensor, whole
from ._declared import define
from ._register import caller
from ._self_check import Make, checking

_FLOAT32_MAX = torch.finfo(torch.float32).max


class QuantizedTensor(NamedTuple):
    """What :func:`quantize` returns and :func:`dequantize` takes.

    With ``x`` of shape ``[*before, length, *after]`` grouped along ``dim``, ``G = ceil(length /
    group_size)``:

    Attributes:
        packed: uint8 ``[*before, G * group_bytes, *after]``, contiguous; ``group_bytes`` is
            ``group_size`` with 8 bits and ``ceil(group_size / 2)`` with 4. Every group starts on a
            byte. With 4 bits an even element of the group is in the high half of its byte and the
            next one in the low half. Symmetric codes are two's complement. What pads a short group
            is 0.
        scales: ``[*before, G, 2, *after]`` of x's dtype, contiguous: ``scale`` and ``minimum`` of
            each group; ``[*before, G, 1, *after]``, the scale alone, if symmetric.
        length: ``x.shape[dim]``.
        bits: 4 or 8.
        group_size: elements a group.
        dim: the grouped dimension, of ``x`` and of ``packed``.
    """

    packed: Tensor
    scales: Tensor
    length: int
    bits: int = 4
    group_size: int = 64
    dim: int = -1

    @property
    def symmetric(self) -> bool:
        """Whether the groups have no minimum."""
        return self.scales.shape[self.dim % self.packed.dim() + 1] == 1

    @property
    def scale(self) -> Tensor:
        """Codes a unit of ``x``, ``[*before, G, *after]``: a view. A larger scale is a finer
        one."""
        return self.scales.select(self.dim % self.packed.dim() + 1, 0)

    @property
    def minimum(self) -> Tensor | None:
        """The groups' minima, ``[*before, G, *after]``: a view; None if symmetric."""
        return None if self.symmetric else self.scales.select(self.dim % self.packed.dim() + 1, 1)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that was quantized."""
        dim = self.dim % self.packed.dim()
        return torch.Size([*self.packed.shape[:dim], self.length, *self.packed.shape[dim + 1 :]])

    @property
    def nbytes(self) -> int:
        """Bytes that codes and scales take together."""
        return self.packed.nbytes + self.scales.nbytes


def quantize(
    x: Tensor, bits: int = 4, group_size: int = 64, dim: int = -1, symmetric: bool = False
) -> QuantizedTensor:
    """Quantize ``x`` in groups of ``group_size`` along ``dim``. Formulas: see the module; layout:
    see :class:`QuantizedTensor`.

    Results of special groups:

    - constant (all elements equal, in asymmetric mode) and all zero (in either): reproduced
      exactly; the scale is 1 and the codes are 0.
    - holding a NaN or an infinity, or spanning more than the largest float32: the codes are 0,
      scale and minimum are NaN, and so the whole group comes back as NaN, loudly. Other groups are
      not touched.
    - spanning less than ``B / torch.finfo(x.dtype).max`` (4e-3 for float16 and 8 bits): the scale
      stays at that largest number.

    Every other element comes back within half a step, ``0.5 / scale``, before the result is rounded
    to its dtype. Only with bfloat16, 8 bits and asymmetric groups the elements nearest the maximum
    may be a whole step off, because a bfloat16 scale is known to 8 bits only.

    Args:
        x: float32, float16 or bfloat16, at least one dimension, any strides; may be empty.
        bits: 4 or 8.
        group_size: elements a group, from 1 on; -1 makes one group of the whole dimension. Kernels
            are fastest with powers of two from 16 to 128, and next with other multiples of 8.
        dim: the dimension to group along. FlexGen groups weights ``[out, in]`` along 0 and a KV
            cache ``[length, heads, size]`` along 0 or 2.
        symmetric: codes around zero without a minimum, for ``x`` that is centred on zero.

    Returns:
        a :class:`QuantizedTensor` on the device of ``x``. With 4 bits, asymmetric and an even
        ``group_size``, ``packed`` and ``scales`` are what FlexGen's decompression reads (which
        divides codes by ``scale`` and adds ``minimum``). It quantizes float32 to the same bits,
        unless the last group is short (FlexGen lets its padding of zeros into minimum and maximum)
        or a group is constant (FlexGen divides by zero).

    Raises:
        TypeError: ``x`` is no tensor of these dtypes.
        ValueError: one of the other arguments is not as above.

    Not differentiable: results do not require gradients.
    """
    _check_input(x, bits, dim)
    dim = dim % x.dim()
    length = x.shape[dim]
    if group_size == -1:
        group_size = max(length, 1)
    _check_group_size("flexops.quantize:", group_size)
    packed, scales = _QUANTIZE(
        x.detach() if x.requires_grad else x, bits, group_size, dim, symmetric
    )
    return QuantizedTensor(packed, scales, length, bits, group_size, dim)


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor that ``quantized`` stands for: ``code / scale + minimum`` (in this order: ``code *
    (1 / scale) + minimum``).

    Args:
        quantized: from :func:`quantize`, or made from FlexGen's data: ``QuantizedTensor(packed,
            scales, length, 4, group_size, dim)``. Any strides; they need not be contiguous.
        dtype: float32, float16 or bfloat16; that of ``quantized.scales`` if None. A value beyond
            the dtype's range becomes infinite.

    Returns:
        a contiguous tensor of ``quantized.shape``.

    Raises:
        TypeError: one of the dtypes is not as above.
        ValueError: shapes, devices and numbers of ``quantized`` do not fit each other.
    """
    if not isinstance(quantized, QuantizedTensor):
        raise TypeError(
            "flexops.dequantize: quantized must be a QuantizedTensor, got"
            f" {type(quantized).__name__}"
        )
    packed, scales, length, bits, group_size, dim = quantized
    dtype = scales.dtype if dtype is None else dtype
    scales = scales.detach() if scales.requires_grad else scales
    _check_dequantize(packed, scales, length, bits, group_size, dim, dtype)
    result: Tensor = torch.ops.flexops.dequantize(
        packed, scales, length, bits, group_size, dim % packed.dim(), dtype
    )
    return result


def _check_input(x: Tensor, bits: int, dim: int) -> None:
    check_tensor("flexops.quantize", "x", x)
    _check_numbers("flexops.quantize:", "x", x.dim(), bits, dim)


def _check_numbers(where: str, name: str, dims: int, bits: int, dim: int) -> None:
    if dims == 0:
        raise ValueError(f"{where} {name} must have at least one dimension, got a scalar")
    if bits not in (4, 8):
        raise ValueError(f"{where} bits must be 4 or 8, got {bits!r}")
    if not -dims <= whole(f"{where} dim", dim) < dims:
        raise ValueError(
            f"{where} dim must be in [{-dims}, {dims - 1}] for {name} of {dims} dimensions, got"
            f" {dim}"
        )


def _check_quantize(x: Tensor, bits: int, group_size: int, dim: int, _symmetric: bool) -> None:
    _check_input(x, bits, dim)
    _check_group_size("flexops.quantize:", group_size)


def _check_group_size(where: str, group_size: int) -> None:
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(
            f"{where} group_size must be at least 1 (or, to quantize, -1 for the whole dimension),"
            f" got {group_size!r}"
        )


def _check_dequantize(
    packed: Tensor,
    scales: Tensor,
    length: int,
    bits: int,
    group_size: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    where = "flexops.dequantize:"
    check_tensor(where[:-1], "packed", packed, (torch.uint8,))
    check_tensor(where[:-1], "scales", scales)
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{where} dtype must be float32, float16 or bfloat16, got {dtype!r}")
    _check_numbers(where, "packed", packed.dim(), bits, dim)
    _check_group_size(where, group_size)
    if length < 0:
        raise ValueError(f"{where} length must not be negative, got {length}")
    check_device(where[:-1], "scales", scales, "packed", packed)
    _check_packed_shapes(where, packed, scales, length, bits, group_size, dim % packed.dim())


def _check_packed_shapes(
    where: str, packed: Tensor, scales: Tensor, length: int, bits: int, group_size: int, dim: int
) -> None:
    groups = _group_count(length, group_size)
    expected = groups * _group_bytes(bits, group_size)
    if packed.shape[dim] != expected:
        raise ValueError(
            f"{where} packed must have {expected} bytes along dim {dim} for length={length},"
            f" bits={bits}, group_size={group_size}, got shape {tuple(packed.shape)}"
        )
    before, after = list(packed.shape[:dim]), list(packed.shape[dim + 1 :])
    shape = list(scales.shape)
    if shape != [*before, groups, 2, *after] and shape != [*before, groups, 1, *after]:
        raise ValueError(
            f"{where} scales must have shape {[*before, groups, '2 (1 if symmetric)', *after]}, got"
            f" {shape}"
        )


def _group_count(length: int, group_size: int) -> int:
    return (length + group_size - 1) // group_size


def _group_bytes(bits: int, group_size: int) -> int:
    return group_size if bits == 8 else (group_size + 1) // 2


def _largest_code(bits: int, symmetric: bool) -> int:
    return (1 << (bits - 1 if symmetric else bits)) - 1


def _quantize_reference(
    x: Tensor, bits: int, group_size: int, dim: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    dim = dim % x.dim()
    length = x.shape[dim]
    data = _split_into_groups(x.detach().float(), group_size, dim)
    scale, minimum, broken = _group_parameters(
        data, _largest_code(bits, symmetric), symmetric, x.dtype, dim + 1
    )
    top = _largest_code(bits, symmetric)
    codes = (
        (data - minimum.float())
        .mul_(scale.float())
        .round_()
        .clamp_(-top if symmetric else 0, top)
        .masked_fill_(broken, 0.0)
    )
    codes = codes.to(torch.int8).view(torch.uint8) if symmetric else codes.to(torch.uint8)
    codes = codes.contiguous()
    codes.flatten(dim, dim + 1).narrow(dim, length, codes.shape[dim] * group_size - length).zero_()
    if bits == 4:
        codes = _pack_halves(codes, dim + 1)
    scales = scale if symmetric else torch.cat([scale, minimum], dim + 1)
    return codes.flatten(dim, dim + 1).contiguous(), scales.contiguous()


def _split_into_groups(x: Tensor, group_size: int, dim: int) -> Tensor:
    """``[*before, length, *after]`` -> ``[*before, G, group_size, *after]``; a short group is
    filled with copies of its last element."""
    length = x.shape[dim]
    groups = _group_count(length, group_size)
    missing = groups * group_size - length
    if missing:
        filling = list(x.shape)
        filling[dim] = missing
        x = torch.cat([x, x.narrow(dim, length - 1, 1).expand(filling)], dim)
    split: Tensor = x.unflatten(dim, (groups, group_size))
    return split


def _group_parameters(
    data: Tensor, top: int, symmetric: bool, dtype: torch.dtype, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and minimum, of ``dtype``, and which groups hold something that is not finite; each
    with one element along ``axis``."""
    lowest, highest = data.amin(axis, keepdim=True), data.amax(axis, keepdim=True)
    # + 0.0 turns -0.0 into 0.0, so that order of elements cannot matter
    minimum = torch.zeros_like(lowest) if symmetric else lowest + 0.0
    span = torch.maximum(lowest.abs(), highest.abs()) if symmetric else highest - minimum
    broken = ~(span <= _FLOAT32_MAX)
    scale = (span.reciprocal() * top).clamp(max=torch.finfo(dtype).max).masked_fill(span == 0, 1.0)
    return (
        scale.masked_fill(broken, torch.nan).to(dtype),
        minimum.masked_fill(broken, torch.nan).to(dtype),
        broken,
    )


def _pack_halves(codes: Tensor, axis: int) -> Tensor:
    """Two codes a byte along ``axis``, the even one in the high half."""
    if codes.shape[axis] % 2:
        shape = list(codes.shape)
        shape[axis] = 1
        codes = torch.cat([codes, codes.new_zeros(shape)], axis)
    even, odd = codes.unflatten(axis, (codes.shape[axis] // 2, 2)).unbind(axis + 1)
    packed: Tensor = (even << 4) | (odd & 15)
    return packed


def _dequantize_reference(
    packed: Tensor,
    scales: Tensor,
    length: int,
    bits: int,
    group_size: int,
    dim: int,
    dtype: torch.dtype,
) -> Tensor:
    dim = dim % packed.dim()
    codes = packed.unflatten(
        dim, (_group_count(length, group_size), _group_bytes(bits, group_size))
    )
    if bits == 4:
        codes = (
            torch.stack([codes >> 4, codes & 15], dim + 2)
            .flatten(dim + 1, dim + 2)
            .narrow(dim + 1, 0, group_size)
        )
    symmetric = scales.shape[dim + 1] == 1
    if symmetric:
        codes = codes.view(torch.int8) if bits == 8 else (codes.to(torch.int8) ^ 8) - 8
    values: Tensor = codes.float() * scales.narrow(dim + 1, 0, 1).float().reciprocal()
    if not symmetric:
        values = values + scales.narrow(dim + 1, 1, 1).float()
    return values.flatten(dim, dim + 1).narrow(dim, 0, length).to(dtype).contiguous()


def _quantize_fake(
    x: Tensor, bits: int, group_size: int, dim: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    dim = dim % x.dim()
    before, after = list(x.shape[:dim]), list(x.shape[dim + 1 :])
    groups = _group_count(x.shape[dim], group_size)
    packed = x.new_empty(
        [*before, groups * _group_bytes(bits, group_size), *after], dtype=torch.uint8
    )
    return packed, x.new_empty([*before, groups, 1 if symmetric else 2, *after])


def _dequantize_fake(
    packed: Tensor, _scales: Tensor, length: int, _bits: int, _size: int, dim: int, dtype: Any
) -> Tensor:
    dim = dim % packed.dim()
    return packed.new_empty([*packed.shape[:dim], length, *packed.shape[dim + 1 :]], dtype=dtype)


define("quantize", _quantize_reference, _quantize_fake, check=_check_quantize)
_QUANTIZE = caller(torch.ops.flexops.quantize.default)
define("dequantize", _dequantize_reference, _dequantize_fake, check=_check_dequantize)


@checking()
def self_check(make: Make) -> Any:
    """To 4 and 8 bits and back: the values that come back, and the scales."""
    x, ops, results = make(65, 193), torch.ops.flexops, []
    for bits, dim, symmetric in ((4, 1, False), (8, 0, True)):
        packed, scales = ops.quantize(x, bits, 64, dim, symmetric)
        size = x.shape[dim]
        results += [ops.dequantize(packed, scales, size, bits, 64, dim, x.dtype), scales]
    return results
