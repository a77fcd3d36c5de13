"""Rotary embedding inside of transformers' attention: the class's own ``forward``, with another
function among the names that it sees."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..generation import state
from ..generation.sources import hands_rotated_on
from ..nn.linears import DTYPES
from ..ops.rope import rotary_embedding
from .forwards import plain, rebind, replacement
from .probe import LENGTH, WIDTH, Swap, difference, own_class, own_code, undisturbed

_DTYPES = frozenset(DTYPES)
_TABLES = "_flexops_tables"
"""The attribute by which cosines of a decode step name the tables that they are from: pairs of the
first halves of cosines and sines, and of all of them."""
_FIXED = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose angles do not depend on how long a sequence is."""


# ---- what modeling files have --------------------------------------------------------------------


def _rotated(q: Any, k: Any, cos: Any, sin: Any, dim: int, interleaved: bool = False) -> Any:
    """With tables ``[batch or 1, length, rotary_dim]`` that have each number twice; with ``dim=2``
    heads come behind positions."""
    if dim != 2:
        return rotary_embedding(q, k, cos, sin, interleaved=interleaved)
    q, k = (x.transpose(1, 2) for x in (q, k))
    q, k = rotary_embedding(q, k, cos, sin, interleaved=interleaved)
    return q.transpose(1, 2), k.transpose(1, 2)


def _leaves_to_attention(cos: Any, once: bool) -> bool:
    """Whether it is a decode step, where attention rotates what it appends. ``once``: the tables
    have each number once."""
    tables = getattr(cos, _TABLES, None)
    if tables is not None:
        state.rotate_later(*tables[once])
    return tables is not None


def _half(q: Any, k: Any, cos: Any, sin: Any, dim: int) -> Any:
    return (q, k) if _leaves_to_attention(cos, False) else _rotated(q, k, cos, sin, dim)


def _short(q: Any, k: Any, cos: Any, sin: Any, dim: int) -> Any:
    if _leaves_to_attention(cos, True):
        return q, k
    cos, sin = (torch.cat([x, x], -1) for x in (cos, sin))
    return _rotated(q, k, cos, sin, dim)


def _sorted(q: Any, k: Any, cos: Any, sin: Any, dim: int) -> Any:
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return _rotated(q, k, cos, sin, dim)


def _trailing(q: Any, k: Any, cos: Any, sin: Any, dim: int) -> Any:
    width = 2 * cos.shape[-1]
    (q, of_q), (k, of_k) = (x.split((x.shape[-1] - width, width), -1) for x in (q, k))
    cos, sin = _twice(cos), _twice(sin)
    of_q, of_k = _rotated(of_q, of_k, cos, sin, dim, True)
    return torch.cat([q, of_q], -1), torch.cat([k, of_k], -1)


def _flat(q: Any, k: Any, cos: Any, sin: Any, _: int) -> Any:
    q, k = rotary_embedding(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


def _twice(table: Tensor) -> Tensor:
    """Each number of a table, and itself as its neighbour."""
    return table.repeat_interleave(2, -1)


def _of_sections(table: Tensor, sections: list[int]) -> Tensor:
    """One table of those of time, height and width, of each of which a part is taken: Qwen-VL's."""
    return torch.cat([one[i % 3] for i, one in enumerate(table.split(sections * 2, -1))], -1)


def _by(table: Callable[[Tensor], Tensor], interleaved: bool = False) -> Callable[..., Any]:
    """By what ``table`` makes of the tables."""

    def rotate(q: Any, k: Any, cos: Any, sin: Any, dim: int) -> Any:
        return _rotated(q, k, table(cos), table(sin), dim, interleaved)

    return rotate


_VARIANTS: dict[str, tuple[Callable[..., Any], str, int]] = {
    "half": (_half, "halves", 3),
    "neighbours": (_by(lambda x: x, True), "neighbours", 3),
    # pairs are neighbours, and tables those of halves
    "neighbours of halves": (_by(lambda x: _twice(x[..., : x.shape[-1] // 2]), True), "halves", 3),
    # neighbours are put half of the width apart, and rotated there: DeepSeek
    "sorted": (_sorted, "halves", 3),
    # tables have each number once: gpt-oss; and for neighbours with heads last: GPT-J
    "short": (_short, "once", 3),
    "neighbours short": (_by(_twice, True), "once", 3),
    # by the negative angle: nanochat
    "backward": (lambda q, k, cos, sin, dim: _rotated(q, k, cos, -sin, dim), "halves", 3),
    # neighbours among the last numbers of each head: DeepSeek V4
    "trailing": (_trailing, "few", 3),
    # [length, heads, width] and tables [length, width]: vision
    "flat": (_flat, "halves", 2),
}
"""Each takes (q, k, cos, sin, unsqueeze_dim); with how its tables repeat their numbers, and how
many dimensions they have."""
_NAMES = ("q", "k", "cos", "sin", "unsqueeze_dim", "mrope_section")
_SECTIONS = [1, 1, WIDTH // 2 - 2]


def _signature(function: Any) -> inspect.Signature:
    """Also of what HF's kernels make of a function: a module, or its code bound to one."""
    if isinstance(function, functools.partial):
        (module,) = function.args
        function = functools.partial(type(module).forward, module)
    return inspect.signature(getattr(function, "forward", function))


@functools.cache
def _slots(function: Any) -> dict[str, str] | None:
    """Which of a function's arguments stands for which of ours; None if it has none of them."""
    found = {}
    for name in _signature(function).parameters:
        kind = name if name in _NAMES else name.split("_")[0][:3]
        kind = {"que": "q", "xq": "q", "xk": "k", "key": "k", "x": "q", "ten": "q"}.get(kind, kind)
        if kind in _NAMES:
            found[kind] = name
    return found if {"q", "cos", "sin"} <= found.keys() else None


def _original(forward: Any) -> tuple[str, Any] | None:
    """The name and function that a class's code calls."""
    forward = inspect.unwrap(forward)
    if not isinstance(forward, types.FunctionType):
        return None
    for name in forward.__code__.co_names:
        found = forward.__globals__.get(name) if "rotary" in name else None
        if callable(found) and _slots(found) is not None:
            return name, found
    return None


def original(module: Any) -> Any:
    """The function for rotary embedding that a module's ``forward`` calls; None if it has none."""
    found: Any = _original(own_code(module))
    return found[1] if found else None


def replaced(function: Any, kind: str) -> Callable[..., Any]:
    """Ours with the arguments of a function; one without keys rotates queries only."""
    (ours, _, dims), signature = _VARIANTS[kind], _signature(function)
    slots = _slots(function) or {}
    order, alone = list(signature.parameters), "k" not in slots
    dim = signature.parameters[slots["unsqueeze_dim"]].default if "unsqueeze_dim" in slots else 1
    dim = 2 if kind == "neighbours short" else dim

    def rotate(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(order, args, strict=False)) | kwargs
        found: list[Any] = [given.get(slots.get(name, "")) for name in _NAMES]
        q, k, cos, sin, at, sections = found
        if sections is not None:
            cos, sin = (_of_sections(table, sections) for table in (cos, sin))
        at = dim if at is None else at
        if at == 0 and dims == 3 and cos.dim() == 2:  # the same for all of the batch: Pixtral
            cos, sin, at = cos[None], sin[None], 1
        fits = cos.dim() == dims and q.dim() == (3 if dims == 2 else 4)
        # Qwen 4 rotates queries alone; under autocast Zaya has keys of another dtype
        fits = fits and (alone or (k is not None and k.dtype == q.dtype))
        if at not in (1, 2) or not fits or not {q.dtype, cos.dtype} <= _DTYPES:
            return function(*args, **kwargs)
        if alone:
            return ours(q, q[:, :0] if at == 1 else q[:, :, :0], cos, sin, at)[0]
        return ours(q, k, cos, sin, at)

    return rotate


def _results(
    call: Callable[..., Any], slots: dict[str, str], both: bool, *tensors: Tensor
) -> Tensor:
    """Of a call, and with ``both`` of another with tables of a part of a head."""
    q, k, *tables = tensors
    tables = [one.detach() for one in tables]
    few = [torch.cat([one[..., : one.shape[-1] // 4]] * 2, -1) for one in tables]
    found: list[Tensor] = []
    for one in (tables, few)[: 1 + both]:
        given = dict(zip(_NAMES, (q, k, *one), strict=False)) | {"mrope_section": _SECTIONS}
        made = call(**{slots[name]: value for name, value in given.items() if name in slots})
        found += [made] if isinstance(made, Tensor) else list(made)
    return torch.cat([x.flatten() for x in found])


def _variants(function: Any) -> Iterator[str]:
    slots = _slots(function) or {}
    for kind, (_, __, dims) in _VARIANTS.items():
        if dims == 3 or ("unsqueeze_dim" not in slots and "k" in slots):
            yield kind


def _inputs(function: Any, kind: str) -> tuple[Tensor, ...]:
    slots, signature = _slots(function) or {}, _signature(function)
    _, repeats, dims = _VARIANTS[kind]
    batch = (3, 2) if "mrope_section" in slots else (2,)[3 - dims :]
    angles = torch.rand(*batch, LENGTH, WIDTH // 2) * 6.3
    if repeats == "halves":
        angles = torch.cat([angles, angles], -1)
    elif repeats == "neighbours":
        angles = angles.repeat_interleave(2, -1)
    elif repeats == "few":
        angles = angles[..., : WIDTH // 4]
    q, k = (torch.randn(2, heads, LENGTH, WIDTH) for heads in (4, 2))
    if dims == 2:
        q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)
    elif kind == "neighbours short" or (
        "unsqueeze_dim" in slots and signature.parameters["unsqueeze_dim"].default == 2
    ):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q, k, angles.cos(), angles.sin()


def kind_of(function: Any) -> str | None:
    """Which of the variants a function computes; None if none."""
    return next((kind for kind in _variants(function) if not _differs(function, kind)), None)


@functools.cache
def _differs(function: Any, kind: str) -> str:
    """What a function computes that a variant does not."""
    slots, make = _slots(function) or {}, functools.partial(_inputs, function, kind)
    both = _VARIANTS[kind][1:] == ("halves", 3)
    try:
        with undisturbed():
            _results(function, slots, both, *make())
    except (Exception, SystemExit):  # it rotates all of a head, or does not run
        both = False
    theirs, ours = (
        functools.partial(_results, call, slots, both)
        for call in (function, replaced(function, kind))
    )
    return difference(theirs, ours, make)


def refuse(module: Any) -> str:
    """Why attention rotates by its class's own function; "" if it need not."""
    function = original(module)
    first = next(_variants(function), None)
    if first is None:
        return "its function for rotary embedding has other arguments"
    return "" if kind_of(function) else _differs(function, first)


def swap(module: Any) -> Swap:
    kind = kind_of(original(module))
    assert kind is not None
    return rebind(module, kind, functools.partial(_names, kind))


def _names(kind: str, forward: Any) -> dict[str, Any]:
    name, function = _original(forward) or ("", None)
    known = name and (torch.compiler.is_compiling() or not _differs(function, kind))
    return {name: replaced(function, kind)} if known else {}


# ---- the angles of a decode step -----------------------------------------------------------------


def refusal(module: Any) -> str | None:
    """Why a rotary embedding's angles are computed anew in each step; "" if they need not be, None
    if the module is none."""
    kind = getattr(module, "rope_type", None)
    if not type(module).__name__.endswith("RotaryEmbedding") or kind is None:
        return None
    kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
    other = sorted(kinds - set(_FIXED))
    return f"its angles depend on the length: {', '.join(other)}" if other else ""


def rotates_last(model: nn.Module) -> bool:
    """Whether attention gets what is rotated as it is: no part of a model, such as Hunyuan's norms,
    reads it before."""
    return all(
        hands_rotated_on(cls, found[0])
        for cls in set(map(own_class, model.modules()))
        if (found := _original(cls.__dict__["forward"])) is not None
    )


@replacement
def embedding(module: Any, x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> Any:
    """A rotary embedding: in a decode step its results are rows of tables, which they name.
    Positions of sections of a head, ``[sections, batch, length]``, are then all alike."""
    tables = state.tables()
    if tables is None or position_ids.dim() not in (2, 3):
        return plain(module, x, position_ids, *more, **named)
    sections = position_ids.shape[:-2]
    places = position_ids[0] if sections else position_ids
    key = (id(module), more, tuple(named.items()))
    table = tables.of(
        key, x, lambda every: plain(module, x, every.expand(*sections, -1, -1), *more, **named)
    )
    rows = table[places]  # index_select takes some rows one after another
    cos, sin = rows.chunk(2, -1)
    setattr(cos, _TABLES, (table.chunk(4, -1)[::2], table.chunk(2, -1)))
    return cos, sin
