"""Linear layers whose matrix products are of fp8: ``flexops.patch(model, fp8="rowwise")``.

A layer's ``forward`` is replaced by :func:`fp8_forward`, whose arguments have the recipe; so its
class, parameters and state dict stay what they are. Layers that read one tensor (q, k and v; gate
and up) quantize it once outside of graphs; within one, the compiler finds that it is quantized
repeatedly. A norm behind a sum that such layers read quantizes its result in the same pass, and the
codes are kept beside it (:func:`add_rms_norm`). Decode steps are those of a model without fp8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import is_transforming, is_unheard
from ..errors import PatchError
from ..generation.state import state
from ..nn.linears import DTYPES, NAMES, REPLACED, function_of, is_plain, shared
from ..ops.fp8_linear import (
    MULTIPLE,
    RECIPES,
    Codes,
    fp8_add_rms_norm,
    fp8_gated_mlp,
    fp8_linears,
    fp8_refusal,
)
from ..report import Row

LEAST_SIZE = 850
"""Of :func:`size_of`, from which on forward and backward pass are faster in fp8, with quantization.
Measured on an H200: 0.93 times as fast at 819, 1.14 at 910, 1.35 at 1489, 1.7 at 2320."""


_CODES = "_flexops_codes"


def size_of(rows: float, inputs: int, outputs: int) -> float:
    """Operations of a product over elements of its operands: what fp8 saves, over what quantization
    costs."""
    return 1 / (1 / rows + 1 / inputs + 1 / outputs) if rows else 0.0


def fp8_forward(
    module: nn.Module,
    x: Tensor,
    *,
    recipe: str,
    siblings: tuple[Any, ...] = (),
    step: Callable[[Tensor], Tensor] | None = None,
    keep: bool = False,
) -> Tensor:
    """A linear layer. Of ``siblings``, which read the same tensor, the first one that is called
    computes all. ``step`` computes it in a decode step. ``keep``: x is kept by something else
    anyway."""
    if step is not None and state.active:
        return step(x)
    if siblings and not torch.compiler.is_compiling():
        known = shared(module, x, siblings, together)
        if known is not None:
            return known
    weight: Any = module.weight
    bias: Any = module.bias
    if not takes(x, (module,)):
        return F.linear(x, weight, bias)
    biases = () if bias is None else (bias,)
    return fp8_linears(x, (weight,), biases, recipe, codes=_codes_of(x), keep_input=keep)


def _codes_of(x: Tensor) -> Codes | None:
    found = None if torch.compiler.is_compiling() else getattr(x, _CODES, None)
    return found[0] if found is not None and found[1] == x._version else None


def add_rms_norm(
    norm: Any, x: Tensor, residual: Tensor, weight: Any, eps: float, offset: float
) -> tuple[Tensor, Tensor] | None:
    """:func:`flexops.add_rms_norm` for layers that read its result in fp8; None for others'."""
    if not norm.__dict__["forward"].keywords.get("codes") or weight is None:
        return None
    width = x.shape[-1]
    if size_of(x.numel() / width, width, width) < LEAST_SIZE:
        return None
    made = fp8_add_rms_norm(x, residual, weight, eps, offset)
    if made is None:
        return None
    y, total, codes = made
    setattr(y, _CODES, (codes, y._version))
    return y, total


def recipe_of(linear: Any) -> str:
    """The recipe that a layer was patched with; "" if it was not."""
    ours = function_of(linear) is fp8_forward
    return linear.__dict__["forward"].keywords["recipe"] if ours else ""


def takes(x: Any, linears: tuple[Any, ...]) -> bool:
    """Whether these layers, patched with one recipe, compute x in fp8 together."""
    return (
        type(x) is Tensor
        and x.dtype in DTYPES
        and len({recipe_of(one) for one in linears}) == 1
        and bool(recipe_of(linears[0]))
        and _pays(x, linears)
        and all(is_plain(one.weight) and is_plain(one.bias) for one in linears)
        and len({one.bias is None for one in linears}) == 1
        and len({one.weight.dtype for one in linears}) == 1
        and not is_transforming()
        and not fp8_refusal(x.device)
    )


def _pays(x: Tensor, linears: tuple[Any, ...]) -> bool:
    inputs, outputs = x.shape[-1], sum(one.weight.shape[0] for one in linears)
    return size_of(x.numel() / inputs, inputs, outputs) >= LEAST_SIZE


def together(x: Tensor, linears: tuple[Any, ...]) -> list[Tensor] | None:
    """What layers make of x by one product; None if it is not theirs (:func:`takes`)."""
    if not takes(x, linears):
        return None
    weights = [one.weight for one in linears]
    biases = [one.bias for one in linears if one.bias is not None]
    result = fp8_linears(x, weights, biases, recipe_of(linears[0]), codes=_codes_of(x))
    return list(result.split([weight.shape[0] for weight in weights], -1))


def gated_mlp(x: Any, linears: list[Any], activation: str) -> Tensor | None:
    """Gate, up and down as one, if they have no biases and no hooks; else None."""
    gate, up, down = linears
    if not recipe_of(gate) or not takes(x, (gate, up)) or recipe_of(down) != recipe_of(gate):
        return None
    if size_of(x.numel() / x.shape[-1], *down.weight.shape) < LEAST_SIZE:
        return None
    if not all(one.bias is None and is_unheard(one) and is_plain(one.weight) for one in linears):
        return None
    weights = gate.weight, up.weight, down.weight
    return fp8_gated_mlp(x, *weights, activation, recipe_of(gate), codes=_codes_of(x))


def patch(model: nn.Module, recipe: Any) -> Iterator[Row]:
    """Every linear layer that gains by it."""
    if recipe not in RECIPES:
        raise PatchError(
            "flexops.patch has no such fp8 recipe",
            found=f"fp8={recipe!r}",
            required=f"one of {', '.join(map(repr, RECIPES))}",
            fix='flexops.patch(model, fp8="rowwise")',
        )
    from ..int4.layers import heads, plain_linears

    keep = heads(model)
    beside = {id(one): both for both in map(_gate_and_up, model.modules()) for one in both}
    for name, module in plain_linears(model):
        own = module.__dict__.get("forward")
        siblings = own.keywords.get("siblings", ()) if own is not None else ()
        reason = why_kept(name, module, keep, siblings or beside.get(id(module), (module,)))
        if not reason:
            module.__dict__["forward"] = functools.partial(
                fp8_forward,
                module,
                recipe=recipe,
                siblings=siblings,
                step=own,
                keep=name.endswith("o_proj"),
            )
        yield Row("Linear", 1, "fp8_linear", not reason, reason)
    for layer in model.modules():
        parts = list(layer.children())
        if any(recipe_of(one) for part in parts for one in part.children()):
            _have_codes_written(parts)


def _have_codes_written(norms: list[nn.Module]) -> None:
    """Beside blocks whose layers were patched, norms are read by these."""
    for norm in norms:
        if getattr(function_of(norm), "__name__", "") == "rms_norm":
            norm.__dict__["forward"] = functools.partial(norm.__dict__["forward"], codes=True)


def _gate_and_up(module: nn.Module) -> tuple[Any, ...]:
    """The two layers of a gated block that are computed together; none in another module."""
    both = tuple(module._modules.get(name) for name in ("gate_proj", "up_proj"))
    return both if all(type(one) is nn.Linear for one in both) else ()


def why_kept(name: str, module: Any, keep: tuple[str, ...], beside: tuple[Any, ...]) -> str:
    """Why a layer's products stay 16-bit; "" if they need not. ``beside``: the layers that are
    computed with it, and itself."""
    own = module.__dict__.get("forward")
    if before := recipe_of(module):
        return f"it was replaced before, with fp8={before!r}: flexops.unpatch undoes that"
    if any(name == one or name.endswith(f".{one}") for one in keep):
        return "an output layer or a shared weight: its products stay 16-bit"
    if own is not None and getattr(function_of(module), "__name__", "") not in NAMES:
        return REPLACED
    if module.weight.dtype not in DTYPES:
        return f"its weight is {str(module.weight.dtype).removeprefix('torch.')}"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return (
            f"its size, {module.out_features} x {module.in_features}, is not a multiple of"
            f" {MULTIPLE}"
        )
    outputs = sum(one.out_features for one in beside)
    if size_of(float("inf"), module.in_features, outputs) < LEAST_SIZE:
        return f"fp8 would be slower for {outputs} x {module.in_features} weights"
    device = module.weight.device
    if device.type != "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return fp8_refusal(device)
