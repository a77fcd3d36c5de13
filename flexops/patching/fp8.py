"""Linear layers whose matrix products are of fp8: ``flexops.patch(model, fp8="rowwise")``.

A layer's ``forward`` is replaced by :func:`forward`, whose arguments have the recipe; so its class,
parameters and state dict stay what they are. Layers that read one tensor (q, k and v; gate and up)
quantize it once outside of graphs; within one, the compiler finds that it is quantized repeatedly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import is_transforming, is_unheard
from ..errors import PatchError
from ..ops.fp8_linear import MULTIPLE, RECIPES, fp8_gated_mlp, fp8_linears, fp8_refusal
from .linears import DTYPES, NAMES, is_plain, shared
from .report import Row

LEAST_ROWS = 1024
"""Of fewer rows, products of bfloat16 are faster."""
LEAST_WEIGHT = 1 << 20
"""Elements of a weight; smaller layers' products take less time than the quantization."""


def forward(
    module: nn.Module, x: Tensor, *, recipe: str, siblings: tuple[Any, ...] = (), keep: bool = False
) -> Tensor:
    """A linear layer. Of ``siblings``, which read the same tensor, the first one that is called
    computes all. ``keep``: x is kept by something else anyway."""
    if siblings and not torch.compiler.is_compiling() and takes(x, siblings):
        known = shared(module, x, siblings, together)
        if known is not None:
            return known
    if not takes(x, (module,)):
        return F.linear(x, module.weight, module.bias)  # type: ignore[arg-type]
    biases = () if module.bias is None else (module.bias,)
    return fp8_linears(x, (module.weight,), biases, recipe, keep_input=keep)  # type: ignore[arg-type]


def recipe_of(linear: Any) -> str:
    """The recipe that a layer was patched with; "" if it was not."""
    own = linear.__dict__.get("forward")
    ours = isinstance(own, functools.partial) and own.func is forward
    return own.keywords["recipe"] if ours else ""


def takes(x: Any, linears: tuple[Any, ...]) -> bool:
    """Whether these layers, patched with one recipe, compute x in fp8 together."""
    return (
        type(x) is Tensor
        and x.dtype in DTYPES
        and x.numel() >= LEAST_ROWS * x.shape[-1]
        and len({recipe_of(one) for one in linears}) == 1
        and bool(recipe_of(linears[0]))
        and all(is_plain(one.weight) and is_plain(one.bias) for one in linears)
        and len({one.bias is None for one in linears}) == 1
        and len({one.weight.dtype for one in linears}) == 1
        and not is_transforming()
        and not fp8_refusal(x.device)
    )


def together(x: Tensor, linears: tuple[Any, ...]) -> list[Tensor]:
    """What layers that :func:`takes` make of x, by one product."""
    weights = [one.weight for one in linears]
    biases = [one.bias for one in linears if one.bias is not None]
    result = fp8_linears(x, weights, biases, recipe_of(linears[0]))
    return list(result.split([weight.shape[0] for weight in weights], -1))


def gated_mlp(x: Any, linears: list[Any], activation: str) -> Tensor | None:
    """Gate, up and down as one, if they have no biases and no hooks; else None."""
    gate, up, down = linears
    if not recipe_of(gate) or not takes(x, (gate, up)) or recipe_of(down) != recipe_of(gate):
        return None
    if not all(one.bias is None and is_unheard(one) and is_plain(one.weight) for one in linears):
        return None
    return fp8_gated_mlp(x, gate.weight, up.weight, down.weight, activation, recipe_of(gate))


def patch(model: nn.Module, recipe: Any) -> Iterator[Row]:
    """Every linear layer that gains by it."""
    if recipe not in RECIPES:
        raise PatchError(
            "flexops.patch has no such fp8 recipe",
            found=f"fp8={recipe!r}",
            required=f"one of {', '.join(map(repr, RECIPES))}",
            fix='flexops.patch(model, fp8="rowwise")',
        )
    from .int4 import heads, plain_linears

    keep = heads(model)
    for name, module in plain_linears(model):
        reason = why_kept(name, module, keep)
        if not reason:
            own = module.__dict__.get("forward")
            siblings = own.keywords.get("siblings", ()) if own is not None else ()
            module.__dict__["forward"] = functools.partial(
                forward,
                module,
                recipe=recipe,
                siblings=siblings,
                keep=name.endswith("o_proj"),
            )
        yield Row("Linear", 1, "fp8_linear", not reason, reason)


def why_kept(name: str, module: Any, keep: tuple[str, ...]) -> str:
    """Why a layer's products stay 16-bit; "" if they need not."""
    own = module.__dict__.get("forward")
    if any(name == one or name.endswith(f".{one}") for one in keep):
        return "an output layer or a shared weight: its products stay 16-bit"
    if own is not None and getattr(getattr(own, "func", None), "__name__", "") not in NAMES:
        return "its forward was replaced before, by something else"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return (
            f"its size, {module.out_features} x {module.in_features}, is not a multiple of"
            f" {MULTIPLE}"
        )
    if module.in_features * module.out_features < LEAST_WEIGHT:
        return f"fewer than {LEAST_WEIGHT} weights: fp8 would be slower"
    device = module.weight.device
    if device.type != "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return fp8_refusal(device)
