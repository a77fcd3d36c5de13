"""Products with weights of 4 bits, in groups along the reduced dimension.

A weight ``[N, K]`` is stored as codes from 0 to 15, with one scale and one zero point for each
group of 32, 64 or 128 consecutive elements of a row::

    value[n, k] = (code[n, k] - zero[n, k // group_size]) * scale[n, k // group_size]

This is the form of GPTQ, AWQ and compressed-tensors. Zero points are floats in units of codes;
without them (symmetric) each is 8. :class:`Int4Weight` describes how kernels store it.

Kernels for GPUs multiply codes, which are exact in bfloat16 and float16. For few rows they apply
zero point and scale to the sum of each group in float32::

    out[m, n] = sum over groups: scale * (sum(code * x) - zero * sum(x))

so a result is at least as accurate as that of a product with the dequantized weight. More rows are
multiplied by the weight dequantized in registers, rounded to x's dtype.

Kernels for CPUs multiply codes in the same way, or, without products of bfloat16, AVX-512 the
weight dequantized in float32. Only more than 8 rows in bfloat16, with groups of 64 or 128, are
multiplied by the rounded weight where AVX-512 has products of bfloat16. They also multiply MXFP4's
numbers (:mod:`.few_experts`), for :mod:`.int4_grouped`.

From some number of rows on, it is faster to dequantize the weight in memory and to call torch's
product. Where codes are multiplied, an infinite element of x can make results NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import FLOAT_DTYPES, check_tensor
from ._declared import define
from ._register import caller, check_places
from ._self_check import difference
from .quant import QuantizedTensor

GROUP_SIZES = (32, 64, 128)
TILE_N, TILE_K = 16, 64
"""A tile of the packed weight: rows and columns."""
_COLUMNS = [
    16 * word + 2 * thread + column
    for thread in range(4)
    for word in range(4)
    for column in (0, 8, 1, 9)
]
"""The column of a tile that each of 64 bytes holds. A thread of a kernel has 16 of them: two
neighbours of each 8, as operands of tensor cores have them, from the low and the high half of a
word."""
_POSITIONS = sorted(range(TILE_K), key=_COLUMNS.__getitem__)
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes of MXFP4 stand for, and with the highest bit the same below zero."""


class Int4Weight(NamedTuple):
    """A weight ``[N, K]`` of 4-bit codes, in the layout of the kernels; made by :func:`pack_int4`
    and :func:`quantize_int4`.

    Rows are padded to a multiple of 16 and columns to a multiple of 64 (only with groups of 32).

    Attributes:
        packed: uint8 ``[ceil(N / 16), ceil(K / 64), 512]``, contiguous: tiles of 16 rows and 64
            columns. Byte ``64 r + 16 t + 4 w + b`` of a tile has the codes of rows ``r`` (low half)
            and ``r + 8`` (high half) in the tile's column ``16 w + 2 t + (0, 8, 1, 9)[b]``. So 16
            bytes are a thread's operands of four ``mma.m16n8k16``.
        scales: float32, float16 or bfloat16 ``[ceil(N / 16), groups, 16]``; position ``2 r + h``
            belongs to the tile's row ``r + 8 h``.
        zeros: zero points in the same order, float32 if the scales are, else float16; None: all
            are 8.
        n: rows.
        k: columns.
        group_size: 32, 64 or 128 columns.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    n: int
    k: int
    group_size: int

    @property
    def shape(self) -> torch.Size:
        """``[N, K]``."""
        return torch.Size([self.n, self.k])

    @property
    def dtype(self) -> torch.dtype:
        """Of the scales."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def data(self) -> Tensor:
        """None: what merges adapters would add to it."""
        raise AttributeError(
            "a weight of 4 bits has no data to which adapters can be added\n"
            '  fix: merge them into the 16-bit model, then flexops.patch(model, weights="int4")'
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.packed.nbytes + self.scales.nbytes + zeros

    def to(self, device: torch.device | str) -> Int4Weight:
        """The same weight on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return self._replace(
            packed=self.packed.to(device), scales=self.scales.to(device), zeros=zeros
        )


def pack_int4(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, group_size: int
) -> Int4Weight:
    """Store codes in the layout of the kernels. Formula: see the module.

    Args:
        codes: uint8 ``[N, K]``, from 0 to 15; other bits are ignored. ``K`` is a multiple of
            ``group_size``.
        scales: float32, float16 or bfloat16 ``[N, K / group_size]``.
        zeros: zero points in units of codes, of any of these dtypes and of the scales' shape.
            Stored as float32 if the scales are, else as float16. None: all are 8.
        group_size: 32, 64 or 128 columns.

    Returns:
        an :class:`Int4Weight` on the device of ``codes``.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape, a device or ``group_size`` is not as above.
    """
    where = "flexops.pack_int4"
    check_tensor(where, "codes", codes, (torch.uint8,))
    check_tensor(where, "scales", scales, FLOAT_DTYPES)
    if zeros is not None:
        check_tensor(where, "zeros", zeros, FLOAT_DTYPES)
    check_places(where, {"codes": codes, "scales": scales, "zeros": zeros})
    if codes.dim() != 2:
        raise ValueError(f"{where}: codes must have shape [N, K], got {list(codes.shape)}")
    n, k = codes.shape
    _check_group(where, "codes", k, group_size)
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and tensor.shape != (n, k // group_size):
            raise ValueError(
                f"{where}: {name} must have shape {[n, k // group_size]} for codes of shape"
                f" {[n, k]} and group_size={group_size}, got {list(tensor.shape)}"
            )
    rows, columns = _padding(n, TILE_N), _padding(k, TILE_K)
    tiles = F.pad(codes, (0, columns, 0, rows)).view(-1, 2, 8, (k + columns) // TILE_K, TILE_K)
    tiles = tiles[..., _COLUMNS]
    packed = (tiles[:, 0] & 15) | (tiles[:, 1] << 4)
    groups = -(-(k + columns) // group_size)
    zero_dtype = torch.float32 if scales.dtype == torch.float32 else torch.float16
    return Int4Weight(
        packed.transpose(1, 2).reshape(-1, (k + columns) // TILE_K, 8 * TILE_K).contiguous(),
        _pack_groups(scales, groups),
        None if zeros is None else _pack_groups(zeros.to(zero_dtype), groups),
        n,
        k,
        group_size,
    )


def int4_codes(weight: Int4Weight) -> tuple[Tensor, Tensor, Tensor | None]:
    """What :func:`pack_int4` was given: codes ``[N, K]``, scales and zero points
    ``[N, K / group_size]``."""
    groups = weight.k // weight.group_size
    scales = _unpack_groups(weight.scales, weight.n, groups).to(weight.scales.dtype)
    zeros = None if weight.zeros is None else _unpack_groups(weight.zeros, weight.n, groups)
    return _unpack_codes(weight.packed, weight.n, weight.k), scales, zeros


def unpack_int4(weight: Int4Weight, dtype: torch.dtype | None = None) -> Tensor:
    """The weight that the codes stand for.

    Args:
        weight: from :func:`pack_int4` or :func:`quantize_int4`.
        dtype: float32, float16 or bfloat16; that of the scales if None. Values are computed in
            float32 and rounded once.

    Returns:
        a contiguous tensor ``[N, K]``. Not differentiable.

    Raises:
        TypeError: ``weight`` or ``dtype`` is not as above.
        ValueError: the shapes in ``weight`` do not fit each other.
    """
    _check_weight("flexops.unpack_int4", weight)
    result: Tensor = _UNPACK(*weight, weight.scales.dtype if dtype is None else dtype)
    return result


def quantize_int4(weight: Tensor, group_size: int = 64, symmetric: bool = False) -> Int4Weight:
    """Quantize a weight to 4 bits, each element to the nearest code.

    The arithmetic, in float32, with ``scale`` rounded to weight's dtype before codes are found::

        asymmetric                                   symmetric
        lowest, highest: of the group and 0          largest = max(|x|)
        scale = (highest - lowest) / 15              scale = largest / 7
        zero  = -lowest / scale                      zero  = 8
        code  = clamp(round(x / scale + zero), 0, 15)

    Zero points are not rounded to whole numbers. The scale of a group of zeros is 1. A group that
    holds a NaN or an infinity has the scale NaN and the codes 0.

    Args:
        weight: float32, float16 or bfloat16 ``[N, K]``; ``K`` is a multiple of ``group_size``.
        group_size: 32, 64 or 128 columns.
        symmetric: without zero points.

    Returns:
        an :class:`Int4Weight` on the device of ``weight``, with scales of its dtype.

    Raises:
        TypeError: ``weight`` is no tensor of these dtypes.
        ValueError: a shape or ``group_size`` is not as above.
    """
    where = "flexops.quantize_int4"
    check_tensor(where, "weight", weight, FLOAT_DTYPES)
    if weight.dim() != 2 or not weight.shape[1]:
        raise ValueError(
            f"{where}: weight must have shape [N, K] with K > 0, got {list(weight.shape)}"
        )
    _check_group(where, "weight", weight.shape[1], group_size)
    data = weight.detach().unflatten(1, (weight.shape[1] // group_size, group_size)).float()
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        lowest = highest = data.new_zeros(data.shape[:2])
    else:
        lowest, highest = data.amin(-1).clamp(max=0), data.amax(-1).clamp(min=0)
    if symmetric:
        span, steps = torch.maximum(-lowest, highest), 7
    else:
        span, steps = highest - lowest, 15
    broken = ~span.isfinite()
    # a scale that rounds to 0 would divide by 0
    scales = (span / steps).to(weight.dtype)
    scales = scales.masked_fill(scales == 0, 1).masked_fill(broken, torch.nan)
    zeros = None if symmetric else (-lowest / scales.float())
    if zeros is not None and weight.dtype != torch.float32:
        zeros = zeros.half()  # as it is stored: codes are the nearest to what is stored
    codes = data / scales.float().unsqueeze(-1)
    codes = (codes + (8 if zeros is None else zeros.float().unsqueeze(-1))).round_().clamp_(0, 15)
    codes = codes.masked_fill_(broken.unsqueeze(-1), 0).to(torch.uint8).flatten(1)
    return pack_int4(codes, scales, zeros, group_size=group_size)


def from_quantized(quantized: QuantizedTensor) -> Int4Weight:
    """The weight of a :func:`flexops.quantize` result (FlexGen's format), with the same codes.

    The scales become their reciprocals, the minima zero points ``-minimum * scale``; both are
    rounded to the dtype in which an :class:`Int4Weight` stores them.

    Args:
        quantized: 4 bits, of a weight ``[N, K]``, grouped along its last dimension by 32, 64 or
            128 columns that divide ``K``.

    Raises:
        ValueError: ``quantized`` is not as above.
    """
    where = "flexops.ops.int4_linear.from_quantized"
    if quantized.bits != 4 or len(quantized.shape) != 2 or quantized.dim % 2 != 1:
        raise ValueError(
            f"{where}: quantized must have 4 bits and two dimensions, grouped along the last one,"
            f" got {quantized.bits} bits, shape {list(quantized.shape)}, dim={quantized.dim}; fix:"
            " flexops.quantize(weight, bits=4, dim=-1)"
        )
    _check_group(where, "quantized", quantized.length, quantized.group_size)
    packed, scale = quantized.packed, quantized.scale.float()
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten(-2)
    minimum = quantized.minimum
    if minimum is None:
        codes, zeros = codes ^ 8, None  # two's complement
    else:
        zeros = -minimum.float() * scale
    return pack_int4(
        codes,
        scale.reciprocal().to(quantized.scales.dtype),
        zeros,
        group_size=quantized.group_size,
    )


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """``linear(x, weight, bias)`` with a weight of 4 bits.

    On a GPU, few rows of ``x`` are multiplied by kernels that read the packed weight; for many, the
    weight is dequantized and torch's product is called. The choice depends on shapes only; nothing
    waits for the device, and calls can be captured in a CUDA graph.

    Args:
        x: float32, bfloat16 or float16 ``[..., K]``, any strides.
        weight: from :func:`pack_int4` or :func:`quantize_int4`, on x's device. Its scales may be of
            another dtype than ``x``.
        bias: ``[N]`` of x's dtype, or None.

    Returns:
        ``[..., N]`` of x's dtype, contiguous. Differentiable, once, with respect to ``x`` and
        ``bias``.

    Raises:
        TypeError: a tensor is not of these dtypes, or ``weight`` no :class:`Int4Weight`.
        ValueError: shapes or devices do not fit each other, or scales or zero points require a
            gradient.
    """
    check_tensor("flexops.int4_linear", "x", x, FLOAT_DTYPES)
    _check_weight("flexops.int4_linear", weight)
    packed, scales, zeros, n, k, group_size = weight
    result: Tensor = _CALL(x, packed, scales, zeros, bias, n, k, group_size)
    return result


def _check_group(where: str, name: str, k: int, group_size: int) -> None:
    if group_size not in GROUP_SIZES:
        raise ValueError(f"{where}: group_size must be 32, 64 or 128, got {group_size}")
    if k % group_size:
        raise ValueError(
            f"{where}: group_size must divide K, the columns of {name}: {k} is no multiple of"
            f" {group_size}"
        )


def _check_weight(where: str, weight: object) -> None:
    if not isinstance(weight, Int4Weight):
        raise TypeError(
            f"{where}: weight must be an Int4Weight, got {type(weight).__name__}; fix:"
            " flexops.quantize_int4(weight) or flexops.pack_int4(codes, scales, zeros,"
            " group_size=...)"
        )


def check_packed(where: str, weight: Int4Weight) -> None:
    """Raise unless the tensors of a weight fit each other."""
    packed, scales, zeros, n, k, group_size = weight
    check_tensor(where, "weight.packed", packed, (torch.uint8,))
    check_tensor(where, "weight.scales", scales, FLOAT_DTYPES)
    _check_group(where, "weight", k, group_size)
    tiles_n, tiles_k = -(-n // TILE_N), -(-k // TILE_K)
    groups = -(-tiles_k * TILE_K // group_size)
    wanted = [("packed", packed, [tiles_n, tiles_k, TILE_N * TILE_K // 2])]
    wanted.append(("scales", scales, [tiles_n, groups, TILE_N]))
    if zeros is not None:
        zero_dtype = torch.float32 if scales.dtype == torch.float32 else torch.float16
        check_tensor(where, "weight.zeros", zeros, (zero_dtype,))
        wanted.append(("zeros", zeros, [tiles_n, groups, TILE_N]))
    for name, tensor, shape in wanted:
        if list(tensor.shape) != shape:
            raise ValueError(
                f"{where}: weight.{name} must have shape {shape} for N={n}, K={k} and"
                f" group_size={group_size}, got {list(tensor.shape)}"
            )


def _check_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None, _: bool) -> None:
    where = "flexops.int4_linear"
    check_tensor(where, "x", x, FLOAT_DTYPES)
    if x.dim() == 0 or x.shape[-1] != weight.k:
        raise ValueError(
            f"{where}: x must have shape [..., {weight.k}] for a weight of shape"
            f" {list(weight.shape)}, got {list(x.shape)}"
        )
    if bias is not None:
        check_tensor(where, "bias", bias, (x.dtype,))
        if bias.shape != (weight.n,):
            raise ValueError(f"{where}: bias must have shape {[weight.n]}, got {list(bias.shape)}")
    check_packed(where, weight)


def _check_unpack(weight: Int4Weight, dtype: torch.dtype) -> None:
    where = "flexops.unpack_int4"
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{where}: dtype must be float32, float16 or bfloat16, got {dtype}")
    check_packed(where, weight)


def _padding(size: int, multiple: int) -> int:
    return -size % multiple


def _pack_groups(values: Tensor, groups: int) -> Tensor:
    """``[N, K / group_size]`` -> ``[ceil(N / 16), groups, 16]``."""
    n, before = values.shape
    padded = F.pad(values.detach(), (0, groups - before, 0, _padding(n, TILE_N)))
    return padded.view(-1, 2, 8, groups).permute(0, 3, 2, 1).reshape(-1, groups, 16).contiguous()


def _unpack_groups(values: Tensor, n: int, count: int) -> Tensor:
    """The reverse, as float32 ``[N, count]``."""
    rows: Tensor = values.float().unflatten(-1, (8, 2)).permute(0, 3, 2, 1).flatten(0, 2)
    return rows[:n, :count]


def _unpack_codes(packed: Tensor, n: int, k: int) -> Tensor:
    tiles = packed.unflatten(-1, (8, TILE_K))[..., _POSITIONS]
    halves = torch.stack([tiles & 15, tiles >> 4], 1)  # [N / 16, 2, K / 64, 8, 64]
    codes: Tensor = halves.permute(0, 1, 3, 2, 4).reshape(packed.shape[0] * TILE_N, -1)
    return codes[:n, :k]


def unpack_reference(weight: Int4Weight, dtype: torch.dtype, mxfp4: bool = False) -> Tensor:
    """:func:`unpack_int4` in plain PyTorch."""
    n, k, groups = weight.n, weight.k, weight.k // weight.group_size
    codes = _unpack_codes(weight.packed, n, k)
    if mxfp4:
        table = torch.tensor([*MXFP4, *(-one for one in MXFP4)], device=codes.device)
        data = table.index_select(0, codes.flatten().int()).view(n, groups, 32)
    else:
        data = codes.float().unflatten(1, (groups, weight.group_size))
        zero: Any = 8.0
        if weight.zeros is not None:
            zero = _unpack_groups(weight.zeros, n, groups).unsqueeze(-1)
        data = data - zero
    values: Tensor = data * _unpack_groups(weight.scales, n, groups).unsqueeze(-1)
    return values.flatten(1).to(dtype).contiguous()


def product_reference(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, mxfp4: bool = False
) -> Tensor:
    """:func:`int4_linear` in plain PyTorch."""
    dense = unpack_reference(weight, torch.float32, mxfp4)
    with torch.autocast(x.device.type, enabled=False):
        product = F.linear(x.float(), dense, None if bias is None else bias.float())
    result: Tensor = product.to(x.dtype).contiguous()
    return result


def linear(x: Tensor, weight: Int4Weight, bias: Tensor | None, mxfp4: bool = False) -> Tensor:
    """:func:`int4_linear` of checked arguments, without gradients. ``mxfp4``: codes are MXFP4's
    numbers, in groups of 32 and without zero points; on a CPU only."""
    ops = torch.ops.flexops
    packed, scales, zeros, n, k, group_size = weight
    result: Tensor
    if streams(x, weight):
        lists = [[] if one is None else [one] for one in (packed, scales, zeros, bias)]
        result = ops.int4_few_rows_linear.default(
            x, *lists, None, 0.0, 0.0, None, 0, n, group_size, 0
        )
    elif x.numel() <= _most_rows(x, scales) * k:
        given = x, packed, scales, zeros, bias, n, k, group_size
        result = ops.int4_product.default(*given, 0, mxfp4)
    else:
        result = _dequantized(x, weight, bias, mxfp4).contiguous()
    return result


_ELEMENTS_OF_A_PART = 1 << 21  # 4 MiB of 16 bits, which caches hold


def _dequantized(x: Tensor, weight: Int4Weight, bias: Tensor | None, mxfp4: bool) -> Tensor:
    """torch's product with the weight in x's dtype; on a CPU with some rows of it at a time."""
    n, part = weight.n, max(_ELEMENTS_OF_A_PART // weight.k // TILE_N * TILE_N, TILE_N)
    if x.device.type == "cpu" and n > part:
        products = []
        for first in range(0, n, part):
            rows = slice(first, min(first + part, n))
            tiles = slice(first // TILE_N, (first + part) // TILE_N)
            some = weight._replace(
                packed=weight.packed[tiles],
                scales=weight.scales[tiles],
                zeros=None if weight.zeros is None else weight.zeros[tiles],
                n=rows.stop - first,
            )
            products.append(_dequantized(x, some, None if bias is None else bias[rows], mxfp4))
        return torch.cat(products, -1)
    dense = torch.ops.flexops.int4_unpack.default(*weight, x.dtype, mxfp4)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, dense, bias)


MOST_STREAMED_ROWS = 16
_HALVES = (torch.float16, torch.bfloat16)


def streams(x: Tensor, weight: Int4Weight) -> bool:
    """Whether kernels for few rows compute this product: up to 16 on GPUs of 9.0. Elsewhere, and
    with a norm, ``x`` is kept in shared memory, on GPUs from 9.0 on in that of eight
    multiprocessors."""
    if not x.is_cuda or x.dtype not in _HALVES or weight.scales.dtype not in _HALVES:
        return False
    capability, rows = capability_of(x.device), x.numel() // max(weight.k, 1)
    if capability == (9, 0):
        return rows <= MOST_STREAMED_ROWS
    elements = x.numel() + weight.k  # with a norm's weight
    large = capability[0] in (9, 10, 11)
    return rows <= 8 and elements <= (1 << 18 if large else 28672 if rows <= 2 else 24576)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _most_rows(x: Tensor, scales: Tensor) -> int:
    """The most rows of ``x`` for which kernels read the packed weight: measured on one H200, and on
    one core of a CPU."""
    if x.device.type != "cuda":
        return 32
    if torch.float32 in (x.dtype, scales.dtype):
        return 0
    return 1024 if capability_of(x.device) == (9, 0) else 128


def _unpack_fake(packed: Tensor, *rest: Any) -> Tensor:
    n, k, _, dtype, *_ = rest[2:]
    return packed.new_empty([n, k], dtype=dtype)


def _product_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty([*x.shape[:-1], rest[4]])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    made: list[Tensor | None] = [None] * 8
    if ctx.needs_input_grad[0]:
        means = torch.ops.flexops.int4_linear_backward.default
        made[0] = means(grad, *ctx.saved_tensors, *ctx.numbers)
    if ctx.needs_input_grad[4]:
        made[4] = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(grad.dtype)
    return tuple(made)


def _setup(ctx: Any, args: tuple[Any, ...], _: Tensor) -> None:
    for name, required in zip(("scales", "zeros"), ctx.needs_input_grad[2:4], strict=True):
        if required:
            raise ValueError(
                f"flexops.int4_linear: weight.{name} must not require a gradient: there is none"
                " for it"
            )
    ctx.save_for_backward(*args[1:4])
    ctx.numbers = args[5:]


def _backward_reference(grad: Tensor, *weight: Any) -> Tensor:
    dense = torch.ops.flexops.int4_unpack.default(*weight, grad.dtype)
    with torch.autocast(grad.device.type, enabled=False):
        return torch.matmul(grad, dense)


def _grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of the arguments of an operator, ``function(x, weight, bias, mxfp4)``."""

    def call(
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        n: int,
        k: int,
        group_size: int,
        _plan: int = 0,
        mxfp4: bool = False,
    ) -> Any:
        return function(x, Int4Weight(packed, scales, zeros, n, k, group_size), bias, mxfp4)

    return call


define(
    "int4_unpack",
    lambda *args: unpack_reference(Int4Weight(*args[:6]), *args[6:]),
    _unpack_fake,
    check=lambda *args: _check_unpack(Int4Weight(*args[:6]), args[6]),
    function="unpack_int4",
)
define(
    "int4_product",
    _grouped(product_reference),
    _product_fake,
    check=_grouped(_check_linear),
    function="int4_linear",
)
define(
    "int4_linear_backward",
    _backward_reference,
    lambda grad, *rest: grad.new_empty([*grad.shape[:-1], rest[4]]),
)
define(
    "int4_linear",
    _grouped(linear),
    _product_fake,
    check=_grouped(_check_linear),
    setup_context=_setup,
    backward=_backward,
)
_CALL = caller(torch.ops.flexops.int4_linear.default)
_UNPACK = caller(torch.ops.flexops.int4_unpack.default)


def self_check(device: str) -> float:
    """The largest difference between what calls on ``device`` reach and the references, relative
    to the largest element."""
    generator = torch.Generator().manual_seed(0)
    weight = quantize_int4(torch.randn(40, 192, generator=generator)).to(device)
    pairs = [(unpack_int4(weight), unpack_reference(weight, torch.float32))]
    of_mxfp4 = quantize_int4(torch.randn(40, 192, generator=generator), 32, symmetric=True)
    for rows in (1, 5, 40):
        x = torch.randn(rows, 192, generator=generator).to(device)
        pairs.append((int4_linear(x, weight), product_reference(x, weight, None)))
        if device == "cpu":
            given = x, of_mxfp4, None, True
            pairs.append((linear(*given), product_reference(*given)))
    return difference(*zip(*pairs, strict=True))
