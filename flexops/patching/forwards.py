"""What runs in place of modules' own ``forward``: each function takes the module first, and gives
what the module's class would.

A replaced ``forward`` is a ``functools.partial`` of one of these in the module's ``__dict__``. So
the class, its name and its parameters stay what they are, copies and pickles of the module are
replaced as well, and to take the entry away is to restore it. What a call brings that operators do
not take (float64, DTensors) goes to the class's own code.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import generation
from .._torch import is_transforming, is_unheard, tree_map, widens_layer_norm
from ..generation import products
from ..generation.state import state
from ..nn.linears import DTYPES as _DTYPES
from ..nn.linears import LINEARS, function_of, is_bare, is_plain, pair
from ..ops.activation import bias_gelu, bias_relu2, bias_silu, geglu, swiglu
from ..ops.gated_linear import geglu_linear, swiglu_linear
from ..ops.gated_norm import gated_rms_norm as _gated_rms_norm
from ..ops.norm import add_layer_norm, add_rms_norm
from ..ops.norm import layer_norm as _layer_norm
from ..ops.norm import rms_norm as _rms_norm
from . import fp8
from .probe import Swap, own_class

_AHEAD = "_flexops_normalized"
_OURS = (__package__, generation.__name__)
"""The packages whose functions take the place of forwards."""


def replacement(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Under ``torch.compile`` the module's own code runs, unless ``in_graphs``: inductor fuses it
    with what stands around, residual additions of the whole model included, which no operator of
    ours can."""
    options = options_of(forward)

    @functools.wraps(forward)
    def entry(module: nn.Module, *args: Any, in_graphs: bool = False, **kwargs: Any) -> Any:
        if not in_graphs and torch.compiler.is_compiling():
            return plain(module, *args, **_without(options, kwargs))
        return forward(module, *args, **kwargs)

    return entry


def options_of(forward: Callable[..., Any]) -> frozenset[str]:
    """What the patch passes to it, and no caller."""
    named = inspect.signature(forward).parameters.values()
    return frozenset(one.name for one in named if one.kind is one.KEYWORD_ONLY)


def _without(options: frozenset[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in options}


def plain(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What the module's class does."""
    return type(module).forward(module, *args, **kwargs)


def of_tensor(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of a function of one tensor. The module's own code runs for another call, and
    where the replacement gives NotImplemented."""
    options = options_of(forward)

    @replacement
    @functools.wraps(forward)
    def entry(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        rest = _without(options, kwargs)
        if len(args) == 1 and not rest and isinstance(args[0], Tensor):
            found = forward(module, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return plain(module, *args, **rest)

    return entry


def is_ours(forward: Any) -> bool:
    """Whether it is the replacement of a module's ``forward``."""
    where = str(getattr(getattr(forward, "func", None), "__module__", ""))
    return isinstance(forward, functools.partial) and where.rpartition(".")[0] in _OURS


def given(module: Any, name: str = "forward") -> Any:
    """The ``forward`` that others gave a module, below ours; None: its class's."""
    found = module.__dict__.get(name)
    while is_ours(found):
        found = found.keywords.get("inner")
    return found


def take_away(module: Any) -> bool:
    """Whether a module's ``forward`` was ours; it is what it was before."""
    taken = False
    for name in ("forward", "_old_forward"):  # accelerate's hooks call the second
        if is_ours(module.__dict__.get(name)):
            before, taken = given(module, name), True
            if before is None and name == "forward":
                del module.__dict__[name]
            else:
                module.__dict__[name] = before or types.MethodType(type(module).forward, module)
    return taken


_rebound: dict[Any, tuple[Any, dict[str, Any], Callable[..., Any]]] = {}
"""No cache of functools', which torch.compile would look into."""


def rebound(cls: type, kind: str, make: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    """The code of a class's ``forward``, which sees other functions under the names that ``make``
    gives for it. It is made anew if another library has replaced that code since, or what it
    calls."""
    key = cls, kind
    known = _rebound.get(key)
    if known is None or not (torch.compiler.is_compiling() or _is_current(cls, *known[:2])):
        forward: Any = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
        seen = forward.__globals__
        called = {name: seen[name] for name in _names(forward.__code__) if name in seen}
        ours = with_names(forward, make(forward))
        made = _in_place(cls.forward, ours)  # type: ignore[attr-defined]
        known = _rebound[key] = forward, called, made
    return known[2]


def rebind(module: Any, kind: str, make: Callable[[Any], dict[str, Any]]) -> Swap:
    """Have a module run its class's code so."""
    rebound(own_class(module), kind, make)  # a graph makes none
    return [(module, functools.partial(rebinding, module, kind=kind, make=make))]


@replacement
def rebinding(
    module: Any, *args: Any, kind: str, make: Callable[[Any], dict[str, Any]], **kwargs: Any
) -> Any:
    return rebound(own_class(module), kind, make)(module, *args, **kwargs)


def _names(code: types.CodeType) -> set[str]:
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _is_current(cls: Any, forward: Any, called: dict[str, Any]) -> bool:
    seen = forward.__globals__
    return inspect.unwrap(cls.forward) is forward and all(
        seen.get(name) is one for name, one in called.items()
    )


def with_names(forward: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """A function that sees these under their names."""
    seen = {**forward.__globals__, **names}
    del seen["__name__"]  # by which torch.compile would look the names up in the module
    made = types.FunctionType(
        forward.__code__, seen, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _in_place(outer: Any, made: Callable[..., Any]) -> Callable[..., Any]:
    """``made`` in the place of what a function wraps. What renames arguments stays around it:
    transformers 5.24 calls a cache ``cache``, other libraries' code ``past_key_values``."""
    inner = getattr(outer, "__wrapped__", None)
    if inner is None:
        return made
    made = _in_place(inner, made)
    if getattr(outer, "__globals__", {}).get("__name__") != "transformers.utils.deprecation":
        return made
    cells = (types.CellType(made) if x.cell_contents is inner else x for x in outer.__closure__)
    return functools.update_wrapper(
        types.FunctionType(outer.__code__, outer.__globals__, closure=tuple(cells)), made
    )


class OfModel(functools.partial[Any]):
    """The ``forward`` of a whole model, with the signature of what it replaces, ``inner`` or the
    class's: ``generate`` and trainers read it."""

    more: tuple[str, ...] = ()  # keywords that it has, too

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(self.keywords.get("inner") or type(self.args[0]).forward)
        names = list(own.parameters.values())[self.keywords.get("inner") is None :]
        rest = [one for one in names if one.kind is one.VAR_KEYWORD]
        added = [
            inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=None) for x in self.more
        ]
        return own.replace(parameters=[*names[: len(names) - len(rest)], *added, *rest])


# ---- norms ---------------------------------------------------------------------------------------


def _weight(module: Any) -> Any:
    """None where the module has none, or a buffer of ones that its code does not read."""
    weight = None if "weight" in module._buffers else getattr(module, "weight", None)
    return None if weight is None or weight.dim() == 0 else weight


def _known(module: Any, x: Any) -> Any:
    """What was computed with the sum x for this norm, which is its next."""
    ahead = getattr(x, _AHEAD, None)
    if ahead is None or ahead[0] is not module or ahead[2] != x._version:
        return None
    return ahead[1] if ahead[1].grad_fn is x.grad_fn else None


@of_tensor
def rms_norm(
    module: Any,
    x: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    codes: bool = False,  # noqa: ARG001
) -> Any:
    """``codes``: linear layers read the result in fp8 (``fp8.py``)."""
    weight = module._parameters.get("weight")
    if x.dtype not in _DTYPES or not is_plain(weight):
        return NotImplemented
    known = None if torch.compiler.is_compiling() else _known(module, x)
    if known is None and weight is not None and state.queue is not None:
        known = state.queue.normalize(x, weight, eps, offset)
    return _rms_norm(x, _weight(module), eps, offset=offset) if known is None else known


@of_tensor
def layer_norm(module: Any, x: Tensor, *, eps: float, offset: float = 0.0) -> Any:
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if x.dtype not in _DTYPES or not is_plain(weight) or not is_plain(bias):
        return NotImplemented
    known = None if torch.compiler.is_compiling() else _known(module, x)
    if known is not None:
        return known
    x = x.float() if widens_layer_norm(x) else x
    return _layer_norm(x, _weight(module), bias, eps, offset=offset)


@of_tensor
def picture_norm(module: Any, x: Tensor, *, eps: float) -> Any:
    """A layer norm of ``[batch, channels, height, width]`` over the channels."""
    return layer_norm(module, x.movedim(1, -1), eps=eps).movedim(-1, 1)


@replacement
def gated_rms_norm(
    module: Any, x: Any = None, gate: Any = None, *others: Any,
    eps: float, gate_first: bool = False, groups: int = 1, activation: Any = "silu", **more: Any,
) -> Any:  # fmt: skip
    """``norm(x) * act(gate)``, or with ``gate_first`` ``norm(x * act(gate))``."""
    usual = x is not None and x.dtype in _DTYPES and not others and not more
    if not usual or gate is None or gate.dtype != x.dtype or not is_plain(module.weight):
        return plain(module, x, *(() if gate is None else (gate,)), *others, **more)
    options = {"norm_first": not gate_first, "groups": groups, "activation": activation}
    return _gated_rms_norm(x, gate, module.weight, eps, **options)


def fuses(norm: Any, x: Tensor) -> bool:
    """Whether a sum can be normalized as the norm would, but without calling it: it is one of the
    above, and it has no hooks."""
    parameters = norm._parameters.values()
    return (
        function_of(norm) in NORMS
        and x.dtype in _DTYPES
        and is_unheard(norm)
        and all(is_plain(one) and (one is None or one.device == x.device) for one in parameters)
    )


def _add_norm(x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """``norm(residual + x)`` and the sum, in one pass."""
    ours = norm.__dict__["forward"]
    weight, eps = _weight(norm), ours.keywords["eps"]
    offset = ours.keywords.get("offset", 0.0)
    if ours.func is rms_norm:
        coded = fp8.add_rms_norm(norm, x, residual, weight, eps, offset)
        if coded is not None:
            return coded
        return add_rms_norm(x, residual, weight, eps, offset=offset)
    return add_layer_norm(x, residual, weight, norm._parameters.get("bias"), eps, offset=offset)


NORMS = (rms_norm, layer_norm)

# ---- layers: the residual's addition goes with the norm behind it --------------------------------

SUMS = frozenset(("add", "__add__", "__radd__"))
KEPT = frozenset(("dropout", "mul", "__mul__", "__rmul__", "view", "reshape", "to", "type_as"))
"""What may happen to a part's result before it is added."""


class Addend(Tensor):
    """The result of a part of a layer, on its way to the sum with the residual. Of that sum the
    next norm is computed in the same pass, and kept beside it (:func:`_known`). In all else it is
    the plain tensor that it stands for."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, one = func.__name__, next((x for x in args if type(x) is Addend), None)
        if one is not None and len(args) == 2 and not kwargs and name in SUMS:
            return _sum(one, *(_bare(x) for x in args if x is not one))
        kwargs = kwargs or {}
        if any(isinstance(x, (tuple, list, dict)) for x in (*args, *kwargs.values())):
            args, kwargs = tree_map(_bare, (args, kwargs))
        else:  # in a tenth of the time
            args, kwargs = map(_bare, args), {key: _bare(x) for key, x in kwargs.items()}
        result = func(*args, **kwargs)
        if one is not None and name in KEPT and isinstance(result, Tensor):
            return addend(result, one._site)  # type: ignore[attr-defined]
        return result


def _bare(x: Any) -> Any:
    return x._plain if type(x) is Addend else x  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Site:
    """Where a sum is made that a norm reads next.

    Attributes:
        norm: which; None: not known, or there is none.
        skip: how many sums there are before that one.
        stream: what the norm gives takes the place of the sum, which is not read any more.
        owner: the layer whose result the sum is; None: it is read within the layer.
        last: the norm's result is the model's, whose dtype is that of the sum.
    """

    norm: Any
    skip: int = 0
    stream: bool = False
    owner: Any = None
    last: bool = False


def addend(x: Tensor, site: Site) -> Tensor:
    made = x.as_subclass(Addend)
    made._plain, made._site = x, site  # type: ignore[attr-defined]
    return made


def _sum(one: Any, *others: Any) -> Any:
    x, site = one._plain, one._site
    residual = others[0] if others else x
    if not isinstance(residual, Tensor):
        return residual + x
    if site.skip:
        return addend(residual + x, replace(site, skip=site.skip - 1))
    fits = (
        type(residual) is Tensor
        and residual.shape == x.shape
        and residual.device == x.device
        and (
            residual.dtype == x.dtype
            or (residual.dtype == torch.float32 and not site.stream and not site.last)
        )
        and not (site.owner is not None and _checkpoints(site.owner))
        and not (site.stream and widens_layer_norm(x) and function_of(site.norm) is layer_norm)
    )
    if not fits or not fuses(site.norm, x):
        return residual + x
    if torch.is_inference_mode_enabled():  # there, changes in place are not counted
        with torch.inference_mode(False), torch.no_grad():
            return _sum(one, *others)
    y, total = _add_norm(x, residual, site.norm)
    setattr(total, _AHEAD, (site.norm, y, total._version))
    return total


def _checkpoints(layer: Any) -> bool:
    """What is kept beside a sum does not outlive a checkpointed layer."""
    return bool(layer.training and getattr(layer, "gradient_checkpointing", False))


def added(module: Any, *args: Any, inner: Any = None, site: Site, **kwargs: Any) -> Any:
    """A part of a layer whose result, or first result, is added to the residual."""
    result = plain(module, *args, **kwargs) if inner is None else inner(*args, **kwargs)
    if torch.compiler.is_compiling() or is_transforming() or not is_unheard(module):
        return result
    first = result[0] if type(result) is tuple else result
    if type(first) is not Tensor or first.dtype not in _DTYPES:
        return result
    made = addend(first, site)
    return (made, *result[1:]) if type(result) is tuple else made


def below_added(part: Any) -> Any:
    """The ``forward`` that was put into a module, without :func:`added` around it; None if none."""
    ours = part.__dict__.get("forward")
    return ours.keywords.get("inner") if function_of(part) is added else ours


# ---- feed-forward blocks -------------------------------------------------------------------------


def _down(down: Any, kind: Any, drop: Any, gate: Tensor, up: Tensor | None = None) -> Any:
    """``down(act(gate) * up)``; of a plain linear layer's input nothing is kept for the backward
    pass, but worked out again from gate and up. ``drop`` is applied to it; None: nothing is."""
    if drop is None and torch.is_grad_enabled() and is_bare(down):
        if kind == "silu":
            return swiglu_linear(gate, up, down.weight, down.bias)
        return geglu_linear(gate, up, down.weight, down.bias, approximate=kind)
    y = swiglu(gate, up) if kind == "silu" else geglu(gate, up, approximate=kind)
    return down(y if drop is None else drop(y))


Act = tuple[str, Any]
"""The name and the class of a block's activation, when the block was patched; the name is "" where
its code calls a function."""


def is_as_it_was(module: Any, act: Act) -> bool:
    """Whether the activation is still that one, and it has no hooks."""
    if not act[0]:
        return True
    found = getattr(module, act[0])
    return type(found) is act[1] and (not isinstance(found, nn.Module) or is_unheard(found))


def _dropout(module: Any, name: str) -> Callable[[Tensor], Tensor] | None:
    """What a part of that name, or a rate, drops; None if nothing, as in decode steps."""
    one = getattr(module, name) if name else None
    if not one or state.active:
        return None
    if isinstance(one, nn.Dropout):
        return one if (one.training and one.p) or not is_unheard(one) else None
    if isinstance(one, nn.Module):
        return one
    return functools.partial(F.dropout, p=one) if module.training else None


def _gated(x: Tensor, parts: list[Any], kind: str, drop: Any) -> Any:
    """``down(act(gate(x)) * up(x))``, of gate, up and down."""
    if products.takes(x, *parts[:2]):  # in a decode step, which drops nothing
        inner = products.product(x, (parts[0], parts[1]), activation=kind)
        if products.takes(inner, parts[2]):
            return products.product(inner, (parts[2],), ends=True)
        return parts[2](inner)
    in_fp8 = drop is None and not torch.compiler.is_compiling()
    if in_fp8 and (y := fp8.gated_mlp(x, parts, kind)) is not None:
        return y
    gate, up = pair(x, parts[0], parts[1])
    if gate.dtype not in _DTYPES or gate.dtype != up.dtype or type(gate) is not Tensor:
        return NotImplemented
    return _down(parts[2], kind, drop, gate, up)


def _packed(x: Tensor, parts: list[Any], kind: str, drop: Any, gate_first: bool = True) -> Any:
    """The same with gate and up in one product, of that layer and down."""
    inner = products.gated_halves(x, parts[0], kind, gate_first) if state.active else None
    if inner is not None:
        last = parts[1]
        return products.product(inner, (last,)) if products.takes(inner, last) else last(inner)
    both = parts[0](x)
    if both.dtype not in _DTYPES or type(both) is not Tensor:
        return NotImplemented
    if gate_first:
        return _down(parts[1], kind, drop, both)
    up, gate = both.chunk(2, -1)
    return _down(parts[1], kind, drop, gate.contiguous(), up.contiguous())


_BIASED: dict[str, Callable[..., Tensor]] = {
    "silu": bias_silu,
    "relu2": bias_relu2,
    **{kind: functools.partial(bias_gelu, approximate=kind) for kind in ("none", "tanh", "quick")},
}


def activated(first: Any, kind: str, x: Tensor) -> Tensor:
    """``act(first(x))``, the bias added where the activation reads it."""
    y = F.linear(x, first.weight if isinstance(first, nn.Linear) else first.weight.t())
    return _BIASED[kind](y, first.bias)


def _plain(x: Tensor, parts: list[Any], kind: str, drop: Any) -> Any:
    """``second(act(first(x)))``, of the two layers, or of the first."""
    first, *rest = parts
    usual = x.dtype in _DTYPES and is_bare(first, LINEARS)
    if not usual or (first.bias is None and kind != "relu2"):
        return NotImplemented
    y = activated(first, kind, x)
    y = y if drop is None else drop(y)
    return rest[0](y) if rest else y


_FORMS: dict[str, Callable[..., Any]] = {
    "gated": _gated,
    "packed": _packed,
    "packed, up first": functools.partial(_packed, gate_first=False),
    "plain": _plain,
}


@of_tensor
def block(
    module: Any,
    x: Tensor,
    *,
    form: str,
    kind: str,
    act: Act,
    names: tuple[str, ...],
    drops: tuple[str, str],
) -> Any:
    """``names`` are those of its linear layers; ``drops`` of the parts, or rates, that drop some of
    what the last one reads, and of the result."""
    if not is_as_it_was(module, act):
        return NotImplemented
    parts = [getattr(module, name) for name in names]
    within, behind = (_dropout(module, name) for name in drops)
    y = _FORMS[form](x, parts, kind, within)
    return y if behind is None or y is NotImplemented else behind(y)
