"""Softmax over the last dimension, fused with the scaling and the masking that attention puts
before it.

With ``s = x * scale``, and ``s + mask`` where the mask is a float one, over the elements that take
part::

    y = exp(s - max(s)) / sum(exp(s - max(s)))

and 0 for the others. Everything is computed in float32 and rounded once, to the dtype of ``x``. Two
things are defined here that a chain of torch's operations leaves to chance:

- A row in which no element takes part (all masked out, or all ``s`` are ``-inf``) gives zeros, and
  zeros as its gradient; torch's softmax gives NaN.
- What a boolean mask or causality leaves out is not looked at: a NaN there has no effect. A NaN or
  ``+inf`` that takes part makes its row NaN (but not what is beyond a causal row's end, which is
  0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._declared import define
from ._register import caller
from ._self_check import Make, checking


def scaled_masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """``softmax(x * scale + mask)`` over the last dimension, in one pass over memory.

    Args:
        x: ``[..., length]``, float32, float16 or bfloat16, at least one dimension, any strides; may
            be empty. ``length`` is at most 2**30.
        mask: None, or a tensor that can be broadcast to the shape of ``x``; it is never expanded in
            memory. As in ``torch.nn.functional.scaled_dot_product_attention``, **a boolean mask is
            True where an element takes part**; a float32, float16 or bfloat16 one is added, so
            ``-inf`` leaves out.
        scale: what ``x`` is multiplied by first; a number that is finite in float32.

    Returns:
        a contiguous tensor of the shape and dtype of ``x``. Rows in which nothing takes part are
        zeros (see the module).

    Raises:
        TypeError: ``x`` or ``mask`` is no tensor of the dtypes above, or ``scale`` no number.
        ValueError: shapes or devices do not fit each other, or ``scale`` is not finite.

    Differentiable once, with respect to ``x`` and to a float ``mask``: the gradient of ``x`` is
    ``scale * y * (g - sum(g * y))``, computed in float32 from the rounded ``y``, which is all that
    is kept for the backward pass. The mask's is the same without the scale, summed over the
    dimensions that it was broadcast along. Under autocast the dtype of ``x`` is kept.
    """
    _check_scale("flexops.scaled_masked_softmax:", scale)
    result: Tensor = _MASKED(x, mask, scale)
    return result


def causal_softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """``softmax(x * scale)`` over the keys that each query may see, for scores ``[..., queries,
    keys]``.

    Query ``i`` sees the keys up to ``i + (keys - queries)``: the last query sees all of them, as in
    decoding with a cache (the triangle is at the lower right). With more queries than keys the
    first ones see nothing, and are zeros. Scores beyond are not read, results there are 0.

    Args:
        x: at least two dimensions, float32, float16 or bfloat16, any strides; may be empty.
            ``keys`` is at most 2**30.
        scale: what ``x`` is multiplied by first; a number that is finite in float32.

    Returns:
        a contiguous tensor of the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is no tensor of these dtypes, or ``scale`` no number.
        ValueError: ``x`` has less than two dimensions, or ``scale`` is not finite.

    Differentiable once. For anything else than this triangle there is
    :func:`scaled_masked_softmax`.
    """
    _check_scale("flexops.causal_softmax:", scale)
    result: Tensor = _CAUSAL(x, scale)
    return result


def _check_x(where: str, x: Tensor, dims: int) -> None:
    if x.dim() < dims:
        least = "one dimension" if dims == 1 else "two dimensions, queries and keys"
        raise ValueError(f"{where} x must have at least {least}, got shape {tuple(x.shape)}")


_LARGEST = torch.finfo(torch.float32).max


def _check_scale(where: str, scale: Any) -> None:
    """What is not finite makes every row NaN, without a word: ``0 * inf`` is none of the scores."""
    try:
        finite = -_LARGEST <= scale <= _LARGEST
    except (TypeError, RuntimeError):  # a tensor of several elements is neither true nor false
        raise TypeError(f"{where} scale must be a number, got {type(scale).__name__}") from None
    if not finite:
        raise ValueError(f"{where} scale must be finite in float32, got {scale}")


# ---- the ops ----


def _compute_dtype(x: Tensor) -> torch.dtype:
    """float32; float64 stays, for the reference's own check."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _softmax(s: Tensor, keep: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Of scores that are scaled already."""
    if keep is not None:
        s = s.masked_fill(~keep, -torch.inf)
    if s.numel() == 0:
        return s.to(dtype)
    highest = s.amax(-1, keepdim=True)
    powers = torch.exp(s - highest.masked_fill(highest == -torch.inf, 0.0))
    total = powers.sum(-1, keepdim=True)
    return (powers / total.masked_fill(total == 0, 1.0)).to(dtype)


def _scaled_masked_softmax_reference(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    s = x.to(_compute_dtype(x)) * scale
    if mask is None or mask.dtype == torch.bool:
        return _softmax(s, mask, x.dtype).contiguous()
    return _softmax(s + mask, None, x.dtype).contiguous()


def _visible(x: Tensor) -> Tensor:
    """``[queries, keys]``: True where a query sees a key."""
    queries, keys = x.shape[-2], x.shape[-1]
    return torch.arange(keys, device=x.device) <= torch.arange(queries, device=x.device).unsqueeze(
        1
    ) + (keys - queries)


def _causal_softmax_reference(x: Tensor, scale: float) -> Tensor:
    keep = _visible(x)
    return (
        _softmax(x.to(_compute_dtype(x)) * scale, keep, x.dtype)
        .masked_fill(~keep, 0.0)
        .contiguous()
    )


def _softmax_backward_reference(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    dtype = _compute_dtype(y)
    g, p = grad.to(dtype), y.to(dtype)
    beyond = ~_visible(y) if causal else None
    if beyond is not None:
        g = g.masked_fill(beyond, 0.0)
    of_x = (scale * p * (g - (g * p).sum(-1, keepdim=True))).to(y.dtype)
    return (of_x if beyond is None else of_x.masked_fill(beyond, 0.0)).contiguous()


def _masked_setup(ctx: Any, args: tuple[object, ...], y: Tensor) -> None:
    _, mask, scale = args
    ctx.save_for_backward(y)
    ctx.scale = scale
    ctx.mask_like = None if not isinstance(mask, Tensor) else (mask.shape, mask.dtype)


def _masked_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    (y,) = ctx.saved_tensors
    needs_x, needs_mask, _ = ctx.needs_input_grad
    scale: float = ctx.scale
    of_x: Any = _BACKWARD(grad, y, scale, False) if needs_x else None
    if not needs_mask:
        return of_x, None, None
    shape, dtype = ctx.mask_like
    of_scores: Tensor = of_x if needs_x and scale == 1.0 else _BACKWARD(grad, y, 1.0, False)
    return of_x, of_scores.sum_to_size(shape).to(dtype), None


def _causal_setup(ctx: Any, args: tuple[object, ...], y: Tensor) -> None:
    ctx.save_for_backward(y)
    ctx.scale = args[1]


def _causal_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return _BACKWARD(grad, y, ctx.scale, True), None


define(
    "scaled_masked_softmax",
    _scaled_masked_softmax_reference,
    check=lambda x, *_: _check_x("flexops.scaled_masked_softmax:", x, 1),
    setup_context=_masked_setup,
    backward=_masked_backward,
)
define(
    "causal_softmax",
    _causal_softmax_reference,
    check=lambda x, _: _check_x("flexops.causal_softmax:", x, 2),
    setup_context=_causal_setup,
    backward=_causal_backward,
)
define("softmax_backward", _softmax_backward_reference)
_MASKED = caller(torch.ops.flexops.scaled_masked_softmax.default)
_CAUSAL = caller(torch.ops.flexops.causal_softmax.default)
_BACKWARD = torch.ops.flexops.softmax_backward.default


@checking()
def self_check(make: Make) -> Any:
    """With and without masks, forward and backward."""
    x, grad, ops = make(3, 5, 77), make(3, 5, 77), torch.ops.flexops
    masks = None, make.uniform(3, 1, 77) < 0.7, make(5, 1)
    y = ops.causal_softmax(x, 1.5)
    return (
        [ops.scaled_masked_softmax(x, mask, 1.5) for mask in masks],
        y,
        ops.softmax_backward(grad, y, 1.5, True),
    )
