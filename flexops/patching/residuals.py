"""Layers whose residual additions go together with the norm that reads the sum next.

Where a layer adds, and which norm reads the sum, is seen by running a miniature of it: its norms
are small ones, each of its other parts a linear layer. What is found is put to use by
:func:`.forwards.added`, around the parts whose results are added; the layer's own code runs.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..generation.sources import code_of
from ..nn.linears import function_of, is_linear
from ..report import Row
from . import forwards
from .patterns import looks_like_norm, tiny_norm
from .probe import (
    LENGTH,
    WIDTH,
    Miniature,
    Swap,
    arguments,
    class_of,
    disagreement,
    failure,
    foreign,
    linear,
    once,
    own_class,
    own_code,
    settings,
    small,
    undisturbed,
)

_OUT = ""
_OPERATOR = "add_rms_norm / add_layer_norm"


class Structure(NamedTuple):
    """What a layer adds.

    Attributes:
        entry: the norm that reads the layer's input.
        replaces: that norm's result takes the input's place.
        sums: of each part whose result is added: the norm that reads the sum ("" where it is the
            layer's result), how many sums there are before, and whether the norm's result takes the
            sum's place.
    """

    entry: str = ""
    replaces: bool = False
    sums: dict[str, tuple[str, int, bool]] = {}  # noqa: RUF012 (never changed)


def is_norm(module: Any) -> bool:
    return isinstance(module, nn.Module) and function_of(module) in forwards.NORMS


class _Part(nn.Module):
    """Stands for a part of a layer."""

    def __init__(self, gives: int) -> None:
        super().__init__()
        self.projection, self.gives, self.called = linear(WIDTH, WIDTH), gives, False

    def forward(self, *args: Any, **named: Any) -> Any:
        self.called = True
        given = (*args, named.get("hidden_states"), *named.values())
        y = self.projection(next(x for x in given if isinstance(x, Tensor)))
        return (y, *[None] * (self.gives - 1)) if self.gives else y


def miniature(layer: Any, gives: tuple[int, ...], inputs: str) -> Miniature:
    """A small layer, with arguments for it.

    Args:
        gives: of each part that may give a tuple, how long it is; 0 for a tensor.
        inputs: which arguments are tensors: only the first, all that are required, or also those
            whose names say so; "picture" if the first has rows and columns.
    """
    parts: dict[str, Any] = {}
    kinds = iter(gives)
    for name, one in layer._modules.items():
        if is_norm(one):
            parts[name] = tiny_norm(one)
        elif one is None:
            parts[name] = nn.Identity()
        elif not _is_function(one):
            parts[name] = _Part(next(kinds) if _may_give_tuple(one) else 0)
    widths = {n for one in layer._parameters.values() if one is not None for n in one.shape} - {1}
    made = small(layer, dict.fromkeys(widths, WIDTH), **parts)
    args: list[Any] = []
    named: dict[str, Any] = {}
    for one in arguments(layer).values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        required = one.default is one.empty
        tensor = not args or (inputs != "first" and required)
        tensor = tensor or (inputs == "all" and bool(re.search("input|states|cond", one.name)))
        # so many that no tensor is unpacked in place of a tuple
        sizes = (LENGTH,) if inputs == "picture" else ()
        value = torch.randn(7, *sizes, LENGTH, WIDTH) if tensor else None
        if not args or (required and one.kind is not one.KEYWORD_ONLY):
            args.append(value)
        elif required or tensor:
            named[one.name] = value
    return made, tuple(args) or (torch.randn(7, LENGTH, WIDTH),), named


def _is_function(part: Any) -> bool:
    """An activation."""
    return not any(True for _ in part.parameters()) and len(list(part.modules())) == 1


def _may_give_tuple(part: Any) -> bool:
    return not is_linear(part) and not _is_function(part)


class _Watch(TorchFunctionMode):
    """Where results of parts are added, and what is made of the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Any] = []
        self.origin: dict[int, tuple[str, int]] = {}
        self.sums: dict[int, tuple[str, int]] = {}
        self.normed: dict[int, str] = {}
        self.found: dict[str, tuple[str, int, bool]] = {}
        self.entry, self.entry_replaces = "", False
        self.order: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        self.alive += [args, result]
        known = [self.origin[id(x)] for x in args if id(x) in self.origin]
        if func.__name__ in forwards.SUMS and len(args) == 2:
            for x in args:
                self.replaces(x)
            if known:
                name, sums = max(known, key=lambda one: self.order.index(one[0]))
                self.sums[id(result)], self.origin[id(result)] = (name, sums), (name, sums + 1)
        elif func.__name__ in forwards.KEPT:
            tables: tuple[dict[int, Any], ...] = (self.origin, self.normed)
            for names in tables:
                if found := [names[id(x)] for x in args if id(x) in names]:
                    names[id(result)] = found[0]
        return result

    def replaces(self, x: Any) -> None:
        """A norm's result that is added to is the stream."""
        site = self.normed.get(id(x))
        if site == self.entry and site:
            self.entry_replaces = True
        elif site in self.found:
            self.found[site] = (*self.found[site][:2], True)

    def part(self, name: str, x: Any, result: Any, norm: bool) -> None:
        first = result[0] if isinstance(result, tuple) else result
        self.alive += [x, first]
        if norm and id(x) in self.sums:
            site, skip = self.sums[id(x)]
            self.found[site] = (name, skip, False)
            self.normed[id(first)] = site
        elif norm and name == self.entry:
            self.normed[id(first)] = name
        self.order.append(name)
        self.origin[id(first)] = (name, 0)


def _watched(layer: Any, args: Any, kwargs: Any, norms: list[str]) -> Structure:
    watch = _Watch()
    for name, one in layer._modules.items():
        own = one.forward

        def forward(*a: Any, name: str = name, own: Any = own, **k: Any) -> Any:
            result = own(*a, **k)
            x = a[0] if a else k.get("hidden_states")
            if name in norms and x is args[0] and not watch.entry:
                watch.entry = name
            watch.part(name, x, result, name in norms)
            return result

        if not isinstance(one, nn.Identity):
            one.forward = forward
    with watch:
        result = layer(*args, **kwargs)
    result = result[0] if isinstance(result, tuple) else result
    watch.replaces(result)
    if id(result) in watch.sums:
        site, skip = watch.sums[id(result)]
        watch.found.setdefault(site, (_OUT, skip, False))
    return Structure(watch.entry, watch.entry_replaces, watch.found)


def _sites(
    layer: Any, structure: Structure, after: Any, last: bool = False, replaces: bool = False
) -> Swap:
    swaps = []
    for name, (norm, skip, stream) in structure.sums.items():
        part = getattr(layer, name)
        target = getattr(layer, norm) if norm else after
        if target is None or not is_norm(target):
            continue
        outer = not norm  # the sum is the layer's result
        owner, stream = layer if outer else None, stream or (outer and replaces)
        site = forwards.Site(target, skip, stream, owner, last and outer)
        inner = forwards.below_added(part)
        options = {"inner": inner} if inner is not None else {}
        swaps.append((part, functools.partial(forwards.added, part, site=site, **options)))
    return swaps


def _structure(layer: Any) -> tuple[Structure, str]:
    """What a layer adds, and why nothing of it is fused."""
    return once(key(layer), functools.partial(_watch, layer))


def _watch(layer: Any) -> tuple[Structure, str]:
    reason = foreign(own_class(layer)) or foreign(own_code(layer))
    if reason:
        return Structure(), reason
    norms = {name: part for name, part in layer._modules.items() if is_norm(part)}
    others = [
        name
        for name, part in layer._modules.items()
        if name not in norms and part is not None and _may_give_tuple(part)
    ]
    if len(others) > 4:
        return Structure(), "it has more parts than a layer with a residual"

    def swapped(tiny: Any) -> Swap:
        swaps: Swap = []
        for name, one in norms.items():
            ours: Any = one.__dict__["forward"]
            part = getattr(tiny, name)
            part.__dict__["forward"] = functools.partial(ours.func, part, **ours.keywords)
        return [*swaps, *_sites(tiny, found, None)]

    ran: Structure | None = None
    tried: list[tuple[str, dict[str, int]]] = []  # with what the parts gave that were called
    for gives in itertools.product((0, 2, 3), repeat=len(others)):
        kinds = dict(zip(others, gives, strict=True))
        for inputs in ("first", "required", "all", "picture"):
            if any(inputs == one and seen.items() <= kinds.items() for one, seen in tried):
                continue
            make, tiny = functools.partial(miniature, layer, gives, inputs), None
            try:
                with undisturbed():
                    tiny, args, kwargs = make()
                    found = _watched(tiny, args, kwargs, list(norms))
            except (Exception, SystemExit) as error:
                if not reason or "unpack" in reason:  # a tensor in place of a tuple
                    reason = failure(error)
                continue
            finally:
                parts: Any = {} if tiny is None else tiny._modules
                called = (x for x in others if x in parts and parts[x].called)
                tried.append((inputs, {x: kinds[x] for x in called}))
            if found.sums:
                return found, disagreement(make, swapped)
            ran = ran or found
    if ran is not None or not _adds(own_class(layer)):
        return ran or Structure(), "no norm reads a sum that it makes"
    return Structure(), reason


def _adds(cls: Any) -> bool:
    """Whether there is an addition, or a function called that may be one, in a class's code; or
    there is no code to read."""
    nodes = list(ast.walk(code_of(cls)))
    return len(nodes) == 1 or any(
        isinstance(one, ast.Add) or (isinstance(one, ast.Name) and "add" in one.id) for one in nodes
    )


def key(layer: Any) -> Any:
    norms = tuple(map(is_norm, layer.children()))
    return type(layer), own_code(layer), settings(layer), norms


def _looks(module: Any, norm: Callable[[Any], Any] = is_norm) -> bool:
    """A layer: norms beside other parts, and no model."""
    if module is None:
        return False
    parts = [part for part in module._modules.values() if part is not None]
    norms = sum(bool(norm(part)) for part in parts)
    return (
        0 < norms < len(parts)
        and not hasattr(module, "config_class")
        and not isinstance(module, (nn.Sequential, nn.ModuleList))
        and not any(isinstance(part, nn.ModuleList) for part in parts)
    )


def patch(model: nn.Module, wanted: bool, in_graphs: bool) -> Iterator[Row]:
    if in_graphs:
        return
    if not wanted:
        for layer in model.modules():
            if _looks(layer, looks_like_norm):
                yield Row(class_of(layer).__name__, 1, _OPERATOR, False, "residuals=False")
        return
    following = dict(_following(model))
    for layer in model.modules():
        if not _looks(layer):
            continue
        structure, reason = _structure(layer)
        if not reason:
            after = following.get(id(layer))
            last, behind = is_norm(after), _structure(after)[0] if _looks(after) else Structure()
            reader = after if last else getattr(after, behind.entry or " ", None)
            sites = _sites(layer, structure, reader, last, behind.replaces)
            reason = "" if sites else "no norm reads a sum that it makes"
            for part, forward in () if reason else sites:
                part.__dict__["forward"] = forward
        elif not structure.sums and not class_of(layer).__name__.endswith("Layer"):
            continue
        yield Row(class_of(layer).__name__, 1, _operator(layer), not reason, reason)


def _operator(layer: Any) -> str:
    """What its norms become with the addition before them."""
    kinds = [part.__dict__["forward"].func for part in layer.children() if is_norm(part)]
    return " / ".join(f"add_{one.__name__}" for one in forwards.NORMS if one in kinds)


def _following(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """What reads each layer's result: the next layer, or the norm behind the last."""
    for parent in model.modules():
        parts = list(parent._modules.items())
        for at, (_, stack) in enumerate(parts):
            if isinstance(stack, nn.ModuleList) and len(stack):
                norms = [part for _, part in parts[at + 1 :] if is_norm(part)]
                layers = list(stack)
                yield from ((id(a), b) for a, b in itertools.pairwise(layers))
                yield id(layers[-1]), norms[0] if norms else None
