"""Products of a few rows with the weights of linear layers, as a decode step has them.

With ``n = rms_norm(x)`` where a norm's weight is given, else ``x``::

    y = concat(n W_1^T + b_1, n W_2^T + b_2, ...)         without an activation
    y = act(n W_1^T + b_1) * (n W_2^T + b_2)              with one
    y = y + residual                                      where there is one

Each product is rounded to x's dtype before it is activated or added, as linear layers round it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import check_device, check_shape, check_tensor
from ._declared import define
from ._register import caller
from ._self_check import Make, checking
from .int4_linear import TILE_N, Int4Weight, capability_of, int4_linear, streams
from .norm import rms_norm

ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
MOST_ROWS, MOST_WEIGHTS = 16, 3


def few_rows_linear(
    x: Tensor,
    weights: Sequence[Tensor] | Sequence[Int4Weight],
    biases: Sequence[Tensor] = (),
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Linear layers of one input of few rows, with the norm before and the activation or addition
    behind them, in one launch that takes as long as it takes to read the weights.

    Args:
        x: ``[..., k]``, bfloat16 or float16, at most 16 rows.
        weights: up to three of ``[n_i, k]``, x's dtype, contiguous; two of one shape for an
            activation. Or :class:`flexops.Int4Weight`, with scales of 16 bits, of one group size,
            all with zero points or all without; ``n_i`` is a multiple of 16 but of the last one.
            For more than 8 rows but on GPUs of 9.0, and on a CPU, these are several launches.
        biases: none, or one ``[n_i]`` for each.
        norm: ``[k]``: the weight of an RMS norm of ``x``; None: no norm. For more than two rows and
            weights of 4 bits it is a launch of its own on GPUs of 9.0.
        eps, offset: the norm's; ``offset`` is added to its weight.
        activation: None, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``, of the first product, by which
            the second one is multiplied.
        residual: added to the result, of its shape.
        early: in a captured graph on GPUs from 9.0 on, the weights may be read while the kernel
            before this one still runs. Only where that kernel does not write them.

    Returns:
        ``[..., n_1 + n_2 + ...]``, or ``[..., n_1]`` with an activation; of x's dtype. No gradient.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes or numbers are not as above.
    """
    call, arguments = _call(x, weights, biases, norm, eps, offset, activation, residual, early)
    result: Tensor = call(*arguments)
    return result


def composed(
    x: Tensor,
    weights: Sequence[Tensor] | Sequence[Int4Weight],
    biases: Sequence[Tensor] = (),
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """The same in plain PyTorch, of any dtype and number of rows."""
    kind = _kind(activation)
    return reference(x, weights, biases, norm, eps, offset, residual, kind, 0, early)


@functools.cache
def _int4_call() -> Any:
    """Defined in :mod:`.int4_few_rows`."""
    return caller(torch.ops.flexops.int4_few_rows_linear.default)


def _kind(activation: str | None) -> int:
    if activation not in list(ACTIVATIONS):  # also what has no hash
        names = ", ".join(repr(name) for name in ACTIVATIONS)
        raise ValueError(
            f"flexops.few_rows_linear: activation must be one of {names}, got {activation!r}"
        )
    return ACTIVATIONS[activation]


def _call(
    x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor], norm: Tensor | None,
    eps: float, offset: float, activation: str | None, residual: Tensor | None, early: bool,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """The operator and its arguments, from the public ones."""
    check_tensor(_NAME, "x", x, (torch.float16, torch.bfloat16))
    for name, given in (("weights", weights), ("biases", biases)):
        if not isinstance(given, Sequence):
            raise TypeError(
                f"{_NAME}: {name} must be a list of tensors, got {type(given).__name__}"
            )
    kind, weights, biases = _kind(activation), list(weights), list(biases)
    widths = [
        one.shape[0]
        if isinstance(one, Int4Weight) or (isinstance(one, Tensor) and one.dim())
        else 0
        for one in weights
    ]
    width = sum(widths) if activation is None else next(iter(widths), 0)
    rest = norm, eps, offset, residual, kind, width
    if not any(isinstance(one, Int4Weight) for one in weights):
        return _CALL, (x, weights, biases, *rest, early)
    first = weights[0]
    alike = all(
        isinstance(one, Int4Weight)
        and one.group_size == first.group_size
        and (one.zeros is None) == (first.zeros is None)
        for one in weights
    )
    if not alike or any(width % TILE_N for width in widths[:-1]):
        raise ValueError(
            "flexops.few_rows_linear: weights of 4 bits must have one group size, all or none of"
            f" them zero points, and {TILE_N} n rows but for the last one; fix: a call for each"
        )
    if not all(streams(x, one) for one in weights):
        _check_composed(x, weights, biases, norm, residual, kind, width)
        return reference, (x, weights, biases, *rest, early)
    if norm is not None and _is_faster_normalized(x):
        _check_alike(x, "norm", norm, [x.shape[-1]])
        x, rest = rms_norm(x.detach(), norm.detach(), eps, offset=offset), (None, *rest[1:])
    packed, scales, zeros = ([one[i] for one in weights] for i in range(3))
    zeros = [] if first.zeros is None else zeros
    return _int4_call(), (x, packed, scales, zeros, biases, *rest, first.group_size, 0)


_NAME = "flexops.few_rows_linear"


def _is_faster_normalized(x: Tensor) -> bool:
    """Whether products of so many rows by weights of 4 bits are faster with the norm apart:
    measured on one H200."""
    return x.is_cuda and x.numel() > 2 * x.shape[-1] and capability_of(x.device) == (9, 0)


def _fail(text: str) -> None:
    raise ValueError(f"{_NAME}: {text}")


def check_rows(x: Tensor, weights: int, biases: int, activation: int) -> None:
    """Raise unless there are few rows, and as many weights and biases as fit each other."""
    if x.dim() == 0 or x.numel() > MOST_ROWS * x.shape[-1]:
        _fail(f"x must have at most {MOST_ROWS} rows, got shape {list(x.shape)}")
    if not 1 <= weights <= MOST_WEIGHTS or (activation and weights != 2):
        required = 2 if activation else f"1 to {MOST_WEIGHTS}"
        _fail(f"weights must be {required} tensors, got {weights}")
    if biases not in (0, weights):
        _fail(f"biases must be none or {weights} tensors, got {biases}")


def _check_composed(
    x: Tensor, weights: Sequence[Int4Weight], biases: Sequence[Tensor], norm: Tensor | None,
    residual: Tensor | None, activation: int, width: int,
) -> None:  # fmt: skip
    """The declaration's checks, and those of the operator, which are not called."""
    check_rows(x, len(weights), len(biases), activation)
    of_biases = (
        (f"biases[{i}]", bias, [weight.n])
        for i, (bias, weight) in enumerate(zip(biases, weights, strict=False))
    )
    k, rows = weights[0].k, x.shape[:-1]
    if x.shape[-1] != k:
        _fail(f"x must have shape [..., {k}], got {list(x.shape)}")
    for name, tensor, shape in (
        *of_biases, ("norm", norm, [k]), ("residual", residual, [*rows, width])
    ):  # fmt: skip
        if tensor is not None:
            _check_alike(x, name, tensor, shape)


def _check_alike(x: Tensor, name: str, tensor: Tensor, shape: list[int]) -> None:
    check_tensor(_NAME, name, tensor, (x.dtype,))
    check_shape(_NAME, name, tensor, shape)
    check_device(_NAME, name, tensor, "x", x)


def check(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], norm: Tensor | None, eps: float,
    offset: float, residual: Tensor | None, activation: int, width: int, early: bool,
) -> None:  # fmt: skip
    del norm, eps, offset, residual, width, early
    check_rows(x, len(weights), len(biases), activation)
    k = x.shape[-1]
    for i, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != k:
            _fail(f"weights[{i}] must have shape [any, {k}], got {list(weight.shape)}")
    if activation and weights[0].shape != weights[1].shape:
        _fail(f"weights[1] must have weights[0]'s shape, got {list(weights[1].shape)}")
    for i, (bias, weight) in enumerate(zip(biases, weights, strict=False)):
        if bias.shape != weight.shape[:1]:
            _fail(f"biases[{i}] must have shape {list(weight.shape[:1])}, got {list(bias.shape)}")


def reference(
    x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor], norm: Tensor | None, eps: float,
    offset: float, residual: Tensor | None, activation: int, width: int, early: bool,
) -> Tensor:  # fmt: skip
    del width, early
    products = [
        functools.partial(
            int4_linear if isinstance(weight, Int4Weight) else F.linear, weight=weight, bias=bias
        )
        for weight, bias in itertools.zip_longest(weights, biases)
    ]
    return compute(x, products, norm, eps, offset, residual, activation)


def compute(
    x: Tensor, products: list[Any], norm: Tensor | None, eps: float, offset: float,
    residual: Tensor | None, activation: int,
) -> Tensor:  # fmt: skip
    """The module's formula, with products as functions of ``n``."""
    if norm is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        x = (wide * (norm.float() + offset)).to(x.dtype)
    made: list[Tensor] = [product(x) for product in products]
    if activation:
        gate, up = (one.float() for one in made)
        acted = F.silu(gate) if activation == 1 else _gelu(gate, activation)
        y = (acted * up).to(x.dtype)
    else:
        y = torch.cat(made, -1)
    return y if residual is None else y + residual


def _gelu(gate: Tensor, activation: int) -> Tensor:
    return F.gelu(gate, approximate="none" if activation == 2 else "tanh")


define("few_rows_linear", reference, check=check)
_CALL = caller(torch.ops.flexops.few_rows_linear.default)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """A norm, two products with biases, an activation and an addition."""
    half: Any = functools.partial(make, dtype=torch.bfloat16)
    x, norm, residual, biases = half(3, 264), half(264), half(3, 40), [half(40), half(40)]
    weights = [half(40, 264) / 16, half(40, 264) / 16]
    return _CALL(x, weights, biases, norm, 1e-6, 0.0, residual, 1, 40, False)
