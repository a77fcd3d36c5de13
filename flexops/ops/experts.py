"""Mixtures of experts: tokens to their experts, through them, and back.

Each token has ``k`` experts, its choices. Choices are ordered by expert (a stable counting sort on
the device), their rows are one matrix, and every linear layer is one grouped product
(:mod:`.grouped_linear`). With ``s`` the slot of choice ``j`` of token ``t``, and ``e`` its expert::

    packed[s] = gate_up[e] x[t]              h[s] = act(gate) up
    out[t] = sum_j weights[t, j] down[e] h[s]

    dh[s] = down[e]^T dout[t]                dweights[t, j] = dh[s] h[s]
    ddown[e] = sum_s dout[t] (w h[s])^T      dpacked[s]: of w h, by dh
    dgate_up[e] = sum_s dpacked[s] x[t]^T    dx[t] = sum_j gate_up[e]^T dpacked[s]

Few choices without a gradient are computed where they are, not ordered (:mod:`.few_experts`).
The backward pass needs ``packed`` only: neither the rows of the tokens nor the experts' results,
both of tokens x k x hidden, are kept. (Guo et al., "SonicMoE", 2025, have the gradient of the
weights from ``h``, too.)
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._torch import factors, is_grad_enabled
from . import few_experts
from ._arguments import ANY_FLOAT, FLOAT_DTYPES, check_shape, check_tensor, wide
from ._declared import define
from ._register import caller, check_places
from ._self_check import Make, checking
from .activation import gated_backward_reference
from .grouped_linear import (
    gated_reference,
    gathers_rows,
    outer,
    outer_to,
    product,
    takes_kernels,
)

Activation = Literal["silu", "gelu", "gelu_tanh"]
_NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_MOST_EXPERTS, _MOST_CHOICES = 1024, 32


class Order(NamedTuple):
    """Choices in the order of their experts.

    Attributes:
        order: int32, ``[tokens, k]``, read as one row: the choice in each slot.
        inverse: int32, ``[tokens, k]``: the slot of each choice.
        offsets: int32, ``[experts]``: where the slots of each expert end.
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor


def gated_experts(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Activation = "silu",
) -> Tensor:
    """The gated feed-forward experts of each token, weighted and added up. Formulas: see the
    module.

    Args:
        x: ``[tokens, hidden]``, float32, bfloat16 or float16.
        choices: ``[tokens, k]``, int64 or int32: the numbers of each token's experts. The number
            ``experts`` marks a choice that is left out, as tensor-parallel routers do.
        weights: ``[tokens, k]``, any floating-point dtype; computed with in float32.
        gate_up: ``[experts, 2 inner, hidden]``, x's dtype: the gates' rows, then the ups'.
        down: ``[experts, hidden, inner]``, x's dtype.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.

    Returns:
        ``[tokens, hidden]`` of x's dtype, or of autocast's. Differentiable, once, with respect to
        ``x``, ``weights``, ``gate_up`` and ``down``.

    Raises:
        TypeError: a tensor is not of these dtypes.
        ValueError: shapes, devices or ``activation`` are not as above; on the CPU, ``choices`` has
            a number that is no expert's. On a GPU such choices are left out.

    Nothing waits for the GPU. The number of rows of each expert may be anything.
    """
    if activation not in _NUMBERS:
        raise ValueError(
            f"flexops.gated_experts: activation must be {', '.join(_NUMBERS)}, got {activation!r}"
        )
    x, gate_up, down = factors(x, gate_up, down)
    # torch's builtin for this is none that torch.compile of torch 2.11 traces
    floats = x, weights, gate_up, down  # of any kind: the operator rejects what is no tensor
    keep = is_grad_enabled() and any(getattr(one, "requires_grad", False) for one in floats)
    if not keep and _are_few(choices):
        _check(x, choices, weights, gate_up, down)
        if few_experts.fits(x, choices, gate_up, down):
            given = x, choices, few_experts.weights_for(x, weights), gate_up, down
            return few_experts.few_experts(*given, activation=activation)
    result: Tensor = _CALL(x, choices, weights, gate_up, down, _NUMBERS[activation], keep)[0]
    return result


def _are_few(choices: Any) -> bool:
    return (
        isinstance(choices, Tensor)
        and choices.is_cuda
        and choices.numel() <= few_experts.MOST_CHOICES
        and not torch.compiler.is_compiling()
    )


def expert_order(choices: Tensor, experts: int) -> Order:
    """Order choices by expert, stably.

    Args:
        choices: ``[tokens, k]``, int64 or int32. Numbers outside of ``[0, experts)`` come last, and
            belong to no expert.
        experts: how many there are, 1 or more.
    """
    if not choices.is_cuda or experts > _MOST_EXPERTS:
        return Order(*_order_reference(choices, experts))
    return Order(*torch.ops.flexops.expert_order.default(choices, experts))


def spread_rows(x: Tensor, order: Order) -> Tensor:
    """``[tokens, n]`` to ``[tokens k, n]``: each token's row to the slots of its choices, zeros to
    those of no expert. Differentiable with respect to ``x``."""
    result: Tensor = _SPREAD(x, order.inverse, order.offsets)
    return result


def combine_rows(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """``[tokens k, n]`` to ``[tokens, n]``: the weighted sum of the rows of each token's choices,
    in float32. Differentiable with respect to ``rows`` and ``weights``, ``[tokens, k]``."""
    result: Tensor = _COMBINE(rows, weights, order.inverse, order.offsets)
    return result


def add_bias(rows: Tensor, bias: Tensor, order: Order) -> Tensor:
    """``rows[s] + bias[e]`` with ``e`` the expert of slot ``s``; ``[tokens k, n]`` and
    ``[experts, n]``. Differentiable with respect to both; the bias's gradient is a grouped product,
    so that it is reproducible."""
    result: Tensor = _ADD_BIAS(rows, bias, order.offsets)
    return result


# ---- checks ----


def _check(
    x: Tensor, choices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *_: Any
) -> None:
    op = "flexops.gated_experts"
    for name, tensor, dims in (("x", x, 2), ("gate_up", gate_up, 3), ("down", down, 3)):
        check_tensor(op, name, tensor, ANY_FLOAT, dims=dims)
        if tensor.dtype != x.dtype:
            raise TypeError(f"{op}: {name} must be {x.dtype}, as x, got {tensor.dtype}")
    check_tensor(op, "choices", choices, (torch.int64, torch.int32))
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        found = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"{op}: weights must be a floating-point tensor, got {found}")
    check_places(
        op,
        {"x": x, "choices": choices, "weights": weights, "gate_up": gate_up, "down": down},
    )
    check_shape(op, "choices", choices, [x.shape[0], "k"])
    if choices.shape[1] < 1:
        raise ValueError(f"{op}: choices must have at least one column")
    check_shape(op, "weights", weights, choices.shape, whose="choices")
    experts, packed = gate_up.shape[:2]
    check_shape(op, "gate_up", gate_up, ["experts", "2 inner", x.shape[1]])
    if experts < 1 or packed % 2:
        raise ValueError(
            f"{op}: gate_up must have experts, and an even second dimension, got"
            f" {list(gate_up.shape)}"
        )
    check_shape(op, "down", down, [experts, x.shape[1], packed // 2])


def check_choices(choices: Tensor, experts: int) -> None:
    """Raise if a choice on the CPU is no expert's number, nor the one that leaves it out."""
    if choices.device.type == "cpu" and not choices.is_cuda and choices.numel():
        least, most = (int(one) for one in choices.aminmax())
        if least < 0 or most > experts:
            raise ValueError(
                f"flexops: choices must be experts' numbers, 0 to {experts - 1}, or {experts} for"
                f" one that is left out, got {least if least < 0 else most}"
            )


# ---- references ----


def _order_reference(choices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = choices.reshape(-1).long()
    flat = flat.where((flat >= 0) & (flat < experts), experts)
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(flat.shape[0], device=flat.device)
    )
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    return (
        order.int().view(choices.shape),
        inverse.int().view(choices.shape),
        counts[:experts].cumsum(0).int(),
    )


def _spread_reference(x: Tensor, inverse: Tensor, offsets: Tensor, slots: int) -> Tensor:
    spread = x[:, None].expand(*inverse.shape, x.shape[1])
    spread = torch.where((inverse < offsets[-1])[..., None], spread, 0)
    return x.new_empty(slots, x.shape[1]).index_copy_(
        0, inverse.reshape(-1).long(), spread.reshape(-1, x.shape[1])
    )


def _chosen(rows: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
    """The row of each choice, ``[tokens, k, n]``."""
    chosen = rows[inverse.reshape(-1).long()].view(*inverse.shape, rows.shape[1])
    return torch.where((inverse < offsets[-1])[..., None], wide(chosen), 0)


def _combine_reference(
    rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    chosen = _chosen(rows, inverse, offsets)
    if weights is not None:
        chosen = torch.where((inverse < offsets[-1])[..., None], chosen * weights[..., None], 0)
    return chosen.sum(1).to(rows.dtype)


def _combine_backward_reference(
    grad: Tensor, rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    of_weights = (_chosen(rows, inverse, offsets) * wide(grad)[:, None]).sum(-1)
    spread = weights[..., None] * wide(grad)[:, None]
    spread = torch.where((inverse < offsets[-1])[..., None], spread, 0).to(rows.dtype)
    of_rows = torch.empty_like(rows).index_copy_(
        0, inverse.reshape(-1).long(), spread.view(-1, rows.shape[1])
    )
    return of_rows, of_weights.to(weights.dtype)


def _gate_backward_reference(
    grad: Tensor, packed: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, activation: int
) -> tuple[Tensor, Tensor]:
    flat = order.reshape(-1).long()
    exists = (torch.arange(flat.shape[0], device=flat.device) < offsets[-1])[:, None]
    weight = torch.where(exists, weights.reshape(-1)[flat][:, None], 0)
    of_product = torch.where(exists, wide(grad), 0)
    held = torch.where(exists, packed, 0)
    computed = gated_reference(wide(held), activation)
    of_packed, _ = gated_backward_reference(
        of_product * weight, wide(held), None, ("silu", "none", "tanh")[activation], False
    )
    of_weights = torch.empty_like(weights).view(-1)
    of_weights[flat] = (of_product * computed).sum(1).to(weights.dtype)
    grad.copy_(computed * weight)
    return of_packed.to(packed.dtype), of_weights.view(weights.shape)


# ---- the means: kernels where rows are whole vectors ----


def _fits(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in FLOAT_DTYPES and x.shape[-1] * x.element_size() % 16 == 0


def _spread(x: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
    means = torch.ops.flexops.spread_rows.default if _fits(x) else _spread_reference
    result: Tensor = means(x, inverse, offsets, inverse.numel())
    return result


def _combine(rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    means = torch.ops.flexops.combine_rows.default if _fits(rows) else _combine_reference
    result: Tensor = means(rows, inverse, offsets, weights)
    return result


def _halves(x: Tensor) -> list[tuple[Tensor, int]]:
    """The columns of ``x`` in two parts, and where these begin; whole where a half is not aligned
    as ``x`` is, or small."""
    half = x.shape[1] // 2
    if half % 256:
        return [(x, 0)]
    return [(x[:, :half], 0), (x[:, half:], half)]


def _as_weights(weights: Tensor, like: Tensor) -> Tensor:
    return weights.to(torch.float64 if like.dtype == torch.float64 else torch.float32)


# ---- the operators ----


def _forward(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: int,
    keep: bool,
) -> tuple[Tensor, ...]:
    """The result, and what the backward pass needs: ``packed`` if ``keep``, and the order."""
    check_choices(choices, gate_up.shape[0])
    order, inverse, offsets = expert_order(choices, gate_up.shape[0])
    width, slots = gate_up.shape[1] // 2, choices.numel()
    if takes_kernels(x, width) and gate_up.is_contiguous():
        gathers = gathers_rows(x, width)
        inner, packed = torch.ops.flexops.grouped_gated.default(
            x if gathers else _spread(x, inverse, offsets),
            gate_up,
            offsets,
            order if gathers else None,
            slots,
            activation,
            keep,
        )
    else:
        packed = product(_spread(x, inverse, offsets), gate_up, offsets)
        inner = _gated(packed, activation)
    out = _combine(
        product(inner, down, offsets), inverse, offsets, _as_weights(weights, x).contiguous()
    )
    return out, packed if keep else x.new_empty(0), order, inverse, offsets


def _gated(packed: Tensor, activation: int) -> Tensor:
    if packed.dtype == torch.float64:
        return gated_reference(packed, activation)
    ops = torch.ops.flexops
    result: Tensor = (
        ops.geglu.default(packed, None, activation == 2, False)
        if activation
        else ops.swiglu.default(packed, None, False)
    )
    return result


def _forward_fake(
    x: Tensor, choices: Tensor, _: Tensor, gate_up: Tensor, __: Tensor, ___: int, keep: bool
) -> tuple[Tensor, ...]:
    slots = choices.shape[0] * choices.shape[1]
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((slots, gate_up.shape[1]) if keep else (0,)),
        choices.new_empty(choices.shape, dtype=torch.int32),
        choices.new_empty(choices.shape, dtype=torch.int32),
        choices.new_empty(gate_up.shape[0], dtype=torch.int32),
    )


def _backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    packed: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    activation: int,
    of_x: bool,
    of_gate_up: bool,
    of_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``x``, ``weights``, ``gate_up`` and ``down``; those that are not asked for
    are empty."""
    nothing = x.new_empty(0)
    grad_rows = _spread(grad.contiguous(), inverse, offsets)
    inner = product(grad_rows, down.transpose(1, 2), offsets)
    means = (
        torch.ops.flexops.expert_gate_backward_.default
        if _fits(inner)
        else _gate_backward_reference
    )
    grad_packed, grad_weights = means(
        inner, packed, _as_weights(weights, x).contiguous(), order, offsets, activation
    )
    grad_down = outer(grad_rows, inner, offsets) if of_down else nothing
    del grad_rows, inner
    grad_x = (
        _combine(product(grad_packed, gate_up.transpose(1, 2), offsets), inverse, offsets, None)
        if of_x
        else nothing
    )
    grad_gate_up = nothing
    if of_gate_up:
        grad_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        # in two pieces, so that half as many columns of the tokens' rows are held
        for part, column in _halves(x):
            outer_to(grad_gate_up, column, grad_packed, _spread(part, inverse, offsets), offsets)
    return grad_x, grad_weights.to(weights.dtype), grad_gate_up, grad_down


def _backward_fake(
    _: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_x, of_gate_up, of_down = rest[-3:]
    return (
        x.new_empty(x.shape if of_x else (0,)),
        weights.new_empty(weights.shape),
        gate_up.new_empty(gate_up.shape if of_gate_up else (0,)),
        down.new_empty(down.shape if of_down else (0,)),
    )


def _setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    x, _, weights, gate_up, down, ctx.activation, _ = args
    ctx.save_for_backward(x, weights, gate_up, down, *results[1:])


def _gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    of_x, _, of_weights, of_gate_up, of_down = ctx.needs_input_grad[:5]
    made = torch.ops.flexops.gated_experts_backward.default(
        grad, *ctx.saved_tensors, ctx.activation, of_x, of_gate_up, of_down
    )
    wanted = (of_x, of_weights, of_gate_up, of_down)
    grad_x, *others = (one if want else None for one, want in zip(made, wanted, strict=True))
    return grad_x, None, *others, None, None


define("expert_order", _order_reference)
define("spread_rows", _spread_reference)
define("combine_rows", _combine_reference)
define("combine_rows_backward", _combine_backward_reference)
define("expert_gate_backward_", _gate_backward_reference)


def _spread_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    inverse, offsets = ctx.saved_tensors
    return _COMBINE(grad, None, inverse, offsets), None, None


def _combine_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, inverse, offsets = ctx.saved_tensors
    if weights is None:
        return _SPREAD(grad, inverse, offsets), None, None, None
    of_rows, of_weights = torch.ops.flexops.experts_combine_backward.default(
        grad, rows, weights, inverse, offsets
    )
    return of_rows, of_weights, None, None


def _combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, inverse: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    fits = _fits(rows) and inverse.shape[1] <= _MOST_CHOICES
    means = torch.ops.flexops.combine_rows_backward.default if fits else _combine_backward_reference
    of_rows, of_weights = means(
        grad.contiguous(), rows, inverse, offsets, _as_weights(weights, rows).contiguous()
    )
    return of_rows, of_weights.to(weights.dtype)


define(
    "experts_spread",
    _spread,
    lambda x, inverse, _: x.new_empty(inverse.shape[0] * inverse.shape[1], x.shape[1]),
    setup_context=lambda ctx, args, _: ctx.save_for_backward(*args[1:]),
    backward=_spread_gradient,
)


def _add_bias(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    slots = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    experts = torch.searchsorted(offsets, slots, right=True).clamp_(max=bias.shape[0] - 1)
    return rows + bias.to(rows.dtype)[experts]


def _bias_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    if not ctx.needs_input_grad[1]:
        return grad, None, None
    ones = grad.new_ones(grad.shape[0], 8)
    of_bias = torch.ops.flexops.grouped_linear_outer.default(ones, grad, offsets)
    return grad, of_bias[:, 0].to(ctx.dtype), None


def _bias_setup(ctx: Any, args: tuple[Any, ...], _: Tensor) -> None:
    ctx.save_for_backward(args[2])
    ctx.dtype = args[1].dtype


define(
    "experts_add_bias",
    _add_bias,
    lambda rows, *_: torch.empty_like(rows),
    setup_context=_bias_setup,
    backward=_bias_gradient,
)
define(
    "experts_combine",
    lambda rows, weights, inverse, offsets: _combine(
        rows,
        inverse,
        offsets,
        None if weights is None else _as_weights(weights, rows).contiguous(),
    ),
    lambda rows, _, inverse, __: rows.new_empty(inverse.shape[0], rows.shape[1]),
    setup_context=lambda ctx, args, _: ctx.save_for_backward(*args),
    backward=_combine_gradient,
)
define(
    "experts_combine_backward",
    _combine_backward,
    lambda _, rows, weights, *__: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
)
define(
    "gated_experts",
    _forward,
    _forward_fake,
    check=_check,
    setup_context=_setup,
    backward=_gradient,
)
define(
    "gated_experts_backward",
    _backward,
    _backward_fake,
)
_CALL = caller(torch.ops.flexops.gated_experts.default)
_SPREAD = caller(torch.ops.flexops.experts_spread.default)
_ADD_BIAS = caller(torch.ops.flexops.experts_add_bias.default)
_COMBINE = caller(torch.ops.flexops.experts_combine.default)


@checking()
def self_check(make: Make) -> Any:
    """Order, rows to their experts and back, gates, and routing."""
    tokens, k, experts = 50, 3, 4
    choices = make.uniform(tokens, 5).argsort(1)[:, :k]
    x, grad, rows = make(tokens, 32), make(tokens, 32), make(tokens * k, 32)
    product, packed = make(tokens * k, 24), make(tokens * k, 48)
    weights, logits = make(tokens, k), make(tokens, 40)
    ops, options = torch.ops.flexops, (False, True, 1.0)
    order, inverse, offsets = ops.expert_order(choices, experts)
    chosen, numbers = ops.expert_routes(logits, None, k, *options)
    return (
        (order, inverse, offsets),
        ops.spread_rows(x, inverse, offsets, tokens * k),
        ops.combine_rows(rows, inverse, offsets, weights),
        ops.combine_rows_backward(grad, rows, inverse, offsets, weights),
        ops.expert_gate_backward_(product, packed, weights, order, offsets, 0),
        product,
        (chosen, numbers),
        ops.expert_routes_backward(weights, logits, chosen, numbers, *options),
    )
