"""Which experts a token has, and their weights.

With ``p = softmax(logits)`` or ``sigmoid(logits)``, in float32::

    choices = the k greatest of p + bias, descending      w_j = p[choices_j]
    weights = scale w / sum(w)   if normalize, else   scale w

The bias balances the load without a loss (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy
for Mixture-of-Experts", 2024): it selects, and is no part of the weights. There is no capacity: no
token is dropped.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ._arguments import ANY_FLOAT, FLOAT_DTYPES, check_shape, check_tensor, wide
from ._declared import define
from ._register import caller, check_places

_MOST_EXPERTS, _MOST_CHOICES = 1024, 32


def route_tokens(
    logits: Tensor,
    k: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    bias: Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token, and their weights, in one pass. Formulas: see the module.

    Args:
        logits: ``[tokens, experts]``, float32, bfloat16 or float16.
        k: how many experts a token has.
        scoring: ``"softmax"`` or ``"sigmoid"``.
        bias: ``[experts]``, float32, added to the scores that select; no gradient.
        normalize: divide a token's weights by their sum.
        scale: a factor of the weights.

    Returns:
        the weights, float32, and the choices, int64, both ``[tokens, k]``, as
        :func:`flexops.gated_experts` takes them. Of equal scores the first expert is chosen. The
        weights are differentiable, once, with respect to ``logits``.

    Raises:
        TypeError: a tensor is not of these dtypes.
        ValueError: shapes, devices, ``k`` or ``scoring`` are not as above; on the CPU, ``logits``
            has a NaN. On a GPU such a token's weights are NaN, and its choices are experts.
    """
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(
            f'flexops.route_tokens: scoring must be "softmax" or "sigmoid", got {scoring!r}'
        )
    weights, choices = _CALL(logits, bias, k, scoring == "sigmoid", normalize, scale)
    return weights, choices


def _check(logits: Tensor, bias: Tensor | None, k: int, *_: Any) -> None:
    op = "flexops.route_tokens"
    check_tensor(op, "logits", logits, ANY_FLOAT)
    if logits.dim() != 2:
        raise ValueError(f"{op}: logits must be [tokens, experts], got {list(logits.shape)}")
    if not isinstance(k, int):
        raise TypeError(f"{op}: k must be a whole number, got {type(k).__name__}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"{op}: k must be 1 to {logits.shape[1]}, the experts, got {k}")
    if bias is None:
        return
    check_tensor(op, "bias", bias, (torch.float32,))
    check_shape(op, "bias", bias, logits.shape[1:])
    check_places(op, {"logits": logits, "bias": bias})


def _scores(logits: Tensor, sigmoid: bool) -> Tensor:
    return wide(logits).sigmoid() if sigmoid else wide(logits).softmax(-1)


def _reference(
    logits: Tensor, bias: Tensor | None, k: int, sigmoid: bool, normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if logits.device.type == "cpu" and bool(logits.isnan().any()):
        token = int(logits.isnan().any(1).nonzero()[0])
        raise ValueError(
            f"flexops.route_tokens: logits must not be NaN, got one in row {token}; check what the"
            " router is given"
        )
    scores = _scores(logits, sigmoid)
    keys = scores if bias is None else scores + bias
    choices = keys.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    weights = scores.gather(1, choices)
    factor = scale / weights.sum(-1, keepdim=True) if normalize else scale
    return weights * factor, choices


def _backward_reference(
    grad: Tensor,
    logits: Tensor,
    weights: Tensor,
    choices: Tensor,
    sigmoid: bool,
    normalize: bool,
    scale: float,
) -> Tensor:
    scores = _scores(logits, sigmoid)
    of_chosen = scale * grad
    if normalize:
        of_chosen = of_chosen - (grad * weights).sum(-1, keepdim=True)
        of_chosen = of_chosen / scores.gather(1, choices).sum(-1, keepdim=True)
    of_scores = torch.zeros_like(scores).scatter_(1, choices, of_chosen)
    if sigmoid:
        return (of_scores * scores * (1 - scores)).to(logits.dtype)
    return (scores * (of_scores - (of_scores * scores).sum(-1, keepdim=True))).to(logits.dtype)


def _takes_kernels(logits: Tensor, k: int) -> bool:
    return (
        logits.is_cuda
        and logits.dtype in FLOAT_DTYPES
        and logits.shape[1] <= _MOST_EXPERTS
        and k <= _MOST_CHOICES
    )


def _forward(logits: Tensor, bias: Tensor | None, k: int, *options: Any) -> Any:
    takes = _takes_kernels(logits, k)
    means = torch.ops.flexops.expert_routes.default if takes else _reference
    return means(logits, bias, k, *options)


def _backward(
    grad: Tensor, logits: Tensor, weights: Tensor, choices: Tensor, *options: Any
) -> Tensor:
    takes = _takes_kernels(logits, choices.shape[1])
    means = torch.ops.flexops.expert_routes_backward.default if takes else _backward_reference
    result: Tensor = means(grad, logits, weights, choices, *options)
    return result


def _fake(logits: Tensor, _: Tensor | None, k: int, *__: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def _setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(args[0], *results)
    ctx.options = args[3:]


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    backward = torch.ops.flexops.route_tokens_backward.default
    return backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


define("expert_routes", _reference)
define("expert_routes_backward", _backward_reference)
define(
    "route_tokens",
    _forward,
    _fake,
    check=_check,
    setup_context=_setup,
    backward=_gradient,
)
define(
    "route_tokens_backward",
    _backward,
    lambda _, logits, *__: logits.new_empty(logits.shape),
)
_CALL = caller(torch.ops.flexops.route_tokens.default)
