"""Linear layers whose matrix products are of fp8: forward pass, gradient of the input and gradient
of the weight.

Every operand is quantized to float8_e4m3fn with a float32 scale for each row or column, along the
dimension that the product sums over (``value = code * scale``)::

    largest = max(|x|) over the row or column
    scale   = the least power of two with largest <= 448 * scale, at least 2**-126;
              1 if largest is 0
    code    = x / scale, rounded to the nearest code (halves to even)

    y  = rows(x) @ rows(weight).T + bias
    dx = rows(grad) @ columns(weight)
    dw = columns(rows(grad)).T @ columns(rows(x))

``columns(rows(x))`` quantizes the values of the rows' codes again, so that of ``x`` only its codes
are kept for the backward pass; its scales follow from the largest elements of x's columns, which
the pass over the rows finds. Powers of two keep the second rounding from changing what the first
one gave, except codes that are subnormal in their column. These are the recipes of torchao's
``Float8LinearConfig.from_recipe_name``.

A row or column with a NaN or an infinity has codes 0 and the scale NaN, and columns of such a row
have NaN there. The products become NaN, as they would in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import (
    forward_mode,
    is_transforming,
    product_dtype,
    scaled_product,
    scaled_product_refusal,
)
from ._arguments import check_tensor
from ._declared import define
from ._register import check_places, no_forward_mode, once_differentiable
from ._self_check import Make, checking
from .activation import gated_backward_reference, gated_reference
from .norm import add_rms_norm_gradient, add_rms_norm_reference

RECIPES = ("rowwise", "rowwise_with_gw_hp")
ACTIVATIONS = ("silu", "none", "tanh")
"""Of gated blocks, in the order of their numbers here; gelu is named by its approximation."""
MULTIPLE = 16
"""What both dimensions of a weight must be a multiple of."""
Codes = tuple[Tensor, Tensor, Tensor]
"""Of rows: the codes, a scale for each row ``[rows, 1]``, the largest magnitude of each column."""
_CODES = torch.float8_e4m3fn
_MOST_NORM_BYTES = 65536  # of a row that fp8_norm_rows takes


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: str = "rowwise"
) -> Tensor:
    """``torch.nn.functional.linear(x, weight, bias)`` with matrix products of fp8, in the backward
    pass, too. Formulas: see the module.

    Args:
        x: ``[..., k]``, float32, bfloat16 or float16, any number of rows.
        weight: ``[n, k]`` of these dtypes; ``n`` and ``k`` are multiples of 16.
        bias: ``[n]`` of these dtypes, or None.
        recipe: ``"rowwise"``; or ``"rowwise_with_gw_hp"``, whose gradient of the weight is a
            product of x's dtype, for which x is kept.

    Returns:
        ``[..., n]`` of x's dtype, or of autocast's. Sums are rounded to bfloat16. Differentiable,
        once, with respect to the three tensors.

    Raises:
        TypeError: a tensor is not of these dtypes.
        ValueError: ``recipe`` or a shape is not as above.
        RuntimeError: under transforms of ``torch.func``.

    On a GPU the products are ``torch._scaled_mm``'s, which requires compute capability 8.9 and row
    scales in that torch; elsewhere on a GPU this is ``torch.nn.functional.linear``
    (:func:`fp8_refusal` gives the reason). On the CPU the same codes are multiplied in float32.
    """
    _check(x, weight, bias, recipe)
    if is_transforming():
        raise RuntimeError(
            "flexops.fp8_linear: transforms of torch.func (grad, vmap, jvp) are not supported;"
            " fix: torch.nn.functional.linear"
        )
    if not torch.compiler.is_compiling() and forward_mode._current_level >= 0:
        no_forward_mode("flexops.fp8_linear")
    if x.numel() == 0 or weight.numel() == 0 or fp8_refusal(x.device):
        return F.linear(x, weight, bias)
    return fp8_linears(x, (weight,), () if bias is None else (bias,), recipe)


def fp8_refusal(device: torch.device | str) -> str:
    """Why products on that device are not of fp8; "" if they are."""
    device = torch.device(device)
    return scaled_product_refusal(device) if device.type == "cuda" else ""


def fp8_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    recipe: str,
    *,
    codes: Codes | None = None,
    keep_input: bool = False,
) -> Tensor:
    """:func:`fp8_linear` with several weights as one, unchecked: the results side by side.

    Args:
        codes: x's, if they are known.
        keep_input: keep ``x`` for the backward pass, not its codes: where something else keeps it
            anyway.
    """
    result: Tensor = _Linears.apply(
        x, product_dtype(x), recipe, codes, keep_input, len(weights), *weights, *biases
    )[0]
    return result


def fp8_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Codes] | None:
    """:func:`flexops.add_rms_norm` and the codes of its result, in one pass; None if the tensors
    have not one dtype, or rows are too long or no multiple of 16."""
    width = x.shape[-1]
    if (
        not x.dtype == residual.dtype == weight.dtype
        or width % MULTIPLE
        or width * x.element_size() > _MOST_NORM_BYTES
        or x.numel() == 0
    ):
        return None
    y, total, *codes = _NormRows.apply(x, residual, weight, eps, offset)
    return y, total, (codes[0], codes[1], codes[2])


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str) -> None:
    where = "flexops.fp8_linear:"
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None or name != "bias":
            check_tensor(where[:-1], name, tensor)
    if recipe not in RECIPES:
        raise ValueError(
            f"{where} recipe must be {' or '.join(map(repr, RECIPES))}, got {recipe!r}"
        )
    check_places(where[:-1], {"x": x, "weight": weight, "bias": bias})
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{where} weight must have shape [n, k] for an x of shape [..., k], got"
            f" {list(weight.shape)} and {list(x.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{where} bias must have shape [{weight.shape[0]}], got {list(bias.shape)}"
        )
    if any(size % MULTIPLE for size in weight.shape):
        raise ValueError(
            f"{where} both dimensions of weight must be multiples of {MULTIPLE}, got"
            f" {list(weight.shape)}; fix: torch.nn.functional.linear"
        )


# ---- quantization ----


def _scales(largest: Tensor) -> Tensor:
    """448 is 1.75 * 2**8: a fraction above .75 carries into the exponent."""
    bits = largest.view(torch.int32)
    bits = ((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    scales = bits.clamp(min=1 << 23).view(torch.float32)
    return scales.masked_fill(largest == 0, 1.0).masked_fill(~largest.isfinite(), torch.nan)


def _encode(x: Tensor, scales: Tensor) -> Tensor:
    codes = x * scales.reciprocal()
    return codes.masked_fill(scales.isnan(), 0.0).to(_CODES)


def _stack(x: Tensor, more: Sequence[Tensor]) -> Tensor:
    return torch.cat([x, *more]) if more else x


def _check_matrices(x: Tensor, more: Sequence[Tensor], *_: Any) -> None:
    matrices = [x, *more]
    if any(one.dim() != 2 or one.shape[1] != x.shape[-1] for one in matrices):
        raise ValueError(
            "flexops: x and more must be matrices of one width, got shapes"
            f" {[list(one.shape) for one in matrices]}"
        )
    if x.shape[1] % MULTIPLE or any(one.shape[0] % MULTIPLE for one in matrices[:-1]):
        raise ValueError(
            f"flexops: the width, and the rows of all matrices but the last, must be multiples of"
            f" {MULTIPLE}, got shapes {[list(one.shape) for one in matrices]}"
        )


def _rows_reference(x: Tensor, more: Sequence[Tensor], rows: int) -> Codes:  # noqa: ARG001
    data = _stack(x, more).float()
    magnitudes = data.abs()
    scales = _scales(magnitudes.amax(1, keepdim=True))
    largest = magnitudes.amax(0) if len(data) else data.new_zeros(data.shape[1])
    return _encode(data, scales), scales, largest


def _norm_rows_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, ...]:
    y, total, rstd = add_rms_norm_reference(x, residual, weight, eps, offset)
    return y, total, rstd, *_rows_reference(y, (), len(y))


def _columns_reference(
    x: Tensor, more: Sequence[Tensor], row_scales: Tensor | None, largest: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    data = _stack(x, more).float() if row_scales is None else x.float() * row_scales
    scales = _scales(largest)
    codes = data.new_zeros(data.shape[1], rows, dtype=_CODES)
    codes[:, : len(data)] = _encode(data, scales).t()
    return codes, scales[:, None]


def _gated_rows_reference(packed: Tensor, grad: Tensor | None, activation: int) -> Sequence[Tensor]:
    product = gated_reference(packed, None, ACTIVATIONS[activation], False)
    rows = _rows_reference(product, (), len(product))
    if grad is None:
        return *rows, packed.new_empty(0, dtype=_CODES), *rows[1].new_empty(2, 0)
    of_packed, _ = gated_backward_reference(grad, packed, None, ACTIVATIONS[activation], False)
    return *rows, *_rows_reference(of_packed, (), len(of_packed))


def _with_room(reference: Any) -> Any:
    """What kernels reduce columns in is an operator's last result."""
    return lambda x, *args: (*reference(x, *args), x.new_empty(1 << 24, dtype=torch.uint8))


define("fp8_gated_rows", _with_room(_gated_rows_reference))
define("fp8_norm_rows", _with_room(_norm_rows_reference))
define("fp8_rows", _with_room(_rows_reference), check=_check_matrices)
define("fp8_columns", _columns_reference, check=_check_matrices)


def _on(device: torch.device, name: str, reference: Any, *args: Any) -> Any:
    """An operator's results; the CPU has no kernels."""
    return (getattr(torch.ops.flexops, name).default if device.type == "cuda" else reference)(*args)


def _rows(matrices: Sequence[Tensor]) -> Codes:
    first, count = matrices[0], sum(one.shape[0] for one in matrices)
    found = _on(first.device, "fp8_rows", _rows_reference, first, list(matrices[1:]), count)
    return tuple(found[:3])


def _gated_rows(packed: Tensor, grad: Tensor | None, activation: str) -> tuple[Codes, Codes]:
    """The codes of ``act(gate) * up``; and with the gradient of the product those of gate's and
    up's, side by side."""
    found = _on(
        packed.device, "fp8_gated_rows", _gated_rows_reference,
        packed, grad, ACTIVATIONS.index(activation),
    )  # fmt: skip
    return tuple(found[:3]), tuple(found[3:6])


def _columns(
    matrices: Sequence[Tensor], largest: Tensor, row_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``[columns, rows]``; the rows are filled up with zeros to a multiple of 16."""
    first, count = matrices[0], sum(one.shape[0] for one in matrices)
    found: tuple[Tensor, Tensor] = _on(
        first.device, "fp8_columns", _columns_reference,
        first, list(matrices[1:]), row_scales, largest, -(-count // MULTIPLE) * MULTIPLE,
    )  # fmt: skip
    return found


def _product(
    a: tuple[Tensor, ...],
    b: tuple[Tensor, ...],
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """``a @ b.T + bias``."""
    if a[0].is_cuda:
        return scaled_product(a[0], b[0], a[1], b[1], bias).to(dtype)
    result = (a[0].float() * a[1]) @ (b[0].float() * b[1]).t()
    return (result if bias is None else result + bias).to(dtype)


# ---- gradients ----


class _NormRows(torch.autograd.Function):
    """``y``, the new residual, and codes of ``y``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, ...]:
        rows, more = (one.reshape(-1, one.shape[-1]) for one in (x, residual))
        y, total, rstd, *codes = _on(
            x.device, "fp8_norm_rows", _norm_rows_reference, rows, more, weight, eps, offset
        )[:6]
        y, total = y.view(x.shape), total.view(x.shape)
        results = y, total, rstd.view(x.shape[:-1])
        add_rms_norm_gradient[0](ctx, (x, residual, weight, eps, offset), results)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*codes)
        return y, total, *codes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, of_total: Tensor | None, *_: Any) -> Any:
        return add_rms_norm_gradient[1](ctx, grad, of_total)


class _Linears(torch.autograd.Function):
    """``linear(x, cat(weights), cat(biases))``, and an empty tensor: saved in place of what it
    depends on, of which only codes are kept, it is how a second derivative is noticed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, recipe: str, codes: Codes | None,
        keep_input: bool, count: int, *parts: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weights, biases = parts[:count], parts[count:]
        rows = x.reshape(-1, x.shape[-1])
        codes = codes or _rows((rows,))
        of_weights = _rows(weights)
        bias = torch.cat(biases).to(torch.bfloat16) if biases else None
        result = _product(codes, of_weights, dtype, bias)
        ctx.x_dtype, ctx.shape, ctx.recipe, ctx.count = x.dtype, x.shape, recipe, count
        ctx.dtypes = [part.dtype for part in parts]
        keep, wanted = keep_input or recipe != RECIPES[0], any(ctx.needs_input_grad[6 : 6 + count])
        graph = result.new_empty(0)
        _save(ctx, rows if keep else None, codes, wanted,
              graph if wanted else None, of_weights[2], *weights)  # fmt: skip
        return result.view(*x.shape[:-1], result.shape[-1]), graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        of_input, scales, of_columns, _, largest, *weights = ctx.saved_tensors
        x = of_input, scales, of_columns
        wanted = ctx.needs_input_grad[6:]
        rows, of_x = grad.reshape(-1, grad.shape[-1]), None
        of_parts: list[Any] = [None] * len(wanted)
        with torch.autocast(grad.device.type, enabled=False):
            codes = _rows((rows,))
            if ctx.needs_input_grad[0]:
                of_x = _product(codes, _columns(weights, largest), ctx.x_dtype).view(ctx.shape)
            if any(wanted[: ctx.count]):
                high = None if ctx.recipe == RECIPES[0] else rows
                whole = _weight_gradient(high, codes, x, ctx.dtypes[0])
                of_parts[: ctx.count] = whole.split([weight.shape[0] for weight in weights])
            if any(wanted[ctx.count :]):
                sums = rows.sum(0, dtype=torch.float32)
                of_parts[ctx.count :] = sums.split([weight.shape[0] for weight in weights])
        given = [
            part.to(dtype) if asked and part is not None else None
            for part, dtype, asked in zip(of_parts, ctx.dtypes, wanted, strict=True)
        ]
        return of_x, None, None, None, None, None, *given


def _save(
    ctx: Any, rows: Tensor | None, codes: Codes, wanted: bool, *others: Tensor | None
) -> None:
    """Save others and, if a gradient of the weight is wanted, x: its rows, or else their codes."""
    kept = (None, None, None)
    if wanted:
        kept = codes if rows is None else (rows, None, codes[2])  # type: ignore[assignment]
    ctx.save_for_backward(*kept, *others)


def _weight_gradient(
    grad: Tensor | None, codes: Codes, x: Sequence[Any], dtype: torch.dtype
) -> Tensor:
    """Of ``grad``, rows whose codes are there, as a 16-bit product; without it in fp8. ``x``: as
    :func:`_save` has saved it."""
    of_x, scales, largest = x
    if grad is not None:
        result: Tensor = (grad.t() @ of_x.to(grad.dtype)).to(dtype)
        return result
    turned = _columns((codes[0],), codes[2], codes[1])
    return _product(turned, _columns((of_x,), largest, scales), dtype)


def fp8_gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    recipe: str,
    codes: Codes | None = None,
) -> Tensor:
    """``linear(act(linear(x, gate)) * linear(x, up), down)``, unchecked. Of what is between the
    products, their results are kept for the backward pass, not ``act(...) * ...``.

    Args:
        activation: ``"silu"``, or gelu's approximation: ``"none"`` or ``"tanh"``.
        codes: x's, if they are known.
    """
    options = product_dtype(x), activation, recipe, codes
    result: Tensor = _GatedMlp.apply(x, *options, gate, up, down)[0]
    return result


class _GatedMlp(torch.autograd.Function):
    """The block, and an empty tensor as of :class:`_Linears`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, activation: str, recipe: str,
        codes: Codes | None, gate: Tensor, up: Tensor, down: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows = x.reshape(-1, x.shape[-1])
        codes = codes or _rows((rows,))
        first, second = _rows((gate, up)), _rows((down,))
        packed = _product(codes, first, dtype)
        result = _product(_gated_rows(packed, None, activation)[0], second, dtype)
        ctx.x_dtype, ctx.shape, ctx.activation, ctx.recipe = x.dtype, x.shape, activation, recipe
        graph = result.new_empty(0)
        _save(ctx, rows if recipe != RECIPES[0] else None, codes, any(ctx.needs_input_grad[5:7]),
              graph, packed, first[2], second[2], gate, up, down)  # fmt: skip
        return result.view(*x.shape[:-1], result.shape[-1]), graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        *x, _, packed, of_first, of_second, gate, up, down = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        rows, of_x, of_down = grad.reshape(-1, grad.shape[-1]), None, None
        halves: tuple[Any, ...] = (None, None)
        with torch.autocast(grad.device.type, enabled=False):
            codes, of_packed = _rows((rows,)), None
            high = None if ctx.recipe == RECIPES[0] else rows
            of_product = _product(codes, _columns((down,), of_second), packed.dtype)
            product: Sequence[Any]
            if high is None:
                product, inner = _gated_rows(packed, of_product, ctx.activation)
            else:
                product = _gated(packed, ctx.activation), None, None
                of_packed = _gated_gradient(of_product, packed, ctx.activation)
                inner = _rows((of_packed,))
            del of_product
            if wanted[7]:
                of_down = _weight_gradient(high, codes, product, down.dtype)
            del product
            if wanted[0]:
                of_x = _product(inner, _columns((gate, up), of_first), ctx.x_dtype).view(ctx.shape)
            if wanted[5] or wanted[6]:
                halves = _weight_gradient(of_packed, inner, x, gate.dtype).chunk(2)
        of_gate, of_up = (
            half if asked else None for half, asked in zip(halves, wanted[5:7], strict=True)
        )
        return of_x, None, None, None, None, of_gate, of_up, of_down


def _gated(packed: Tensor, activation: str) -> Tensor:
    ops = torch.ops.flexops
    result: Tensor = (
        ops.swiglu.default(packed, None, False)
        if activation == "silu"
        else ops.geglu.default(packed, None, activation == "tanh", False)
    )
    return result


def _gated_gradient(grad: Tensor, packed: Tensor, activation: str) -> Tensor:
    ops = torch.ops.flexops
    results: tuple[Tensor, Tensor] = (
        ops.swiglu_backward.default(grad, packed, None, False)
        if activation == "silu"
        else ops.geglu_backward.default(grad, packed, None, activation == "tanh", False)
    )
    return results[0]


@checking()
def self_check(make: Make) -> Any:
    """The values and scales of codes, of rows and of columns."""
    x, ops = make(72, 96), torch.ops.flexops
    codes, scales, largest = ops.fp8_rows(x, [], 72)[:3]
    turned, of_columns = ops.fp8_columns(codes, [], scales, largest, 80)
    return codes.float() * scales, turned.float() * of_columns
