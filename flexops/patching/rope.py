"""Rotary embedding inside of transformers' attention: the class's own ``forward``, with another
``apply_rotary_pos_emb`` among the names that it sees."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..generation import state
from ..ops.rope import rotary_embedding
from .forwards import plain, replacement

_NAME = "apply_rotary_pos_emb"
_TABLES = "_flexops_tables"
"""The attribute by which cosines of a decode step name the tables that they are from."""
_FIXED = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose angles do not depend on how long a sequence is."""


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """transformers' function of this name: ``cos`` and ``sin`` are ``[batch or 1, length,
    rotary_dim]``, each number twice."""
    later = getattr(cos, _TABLES, None)
    if later is not None:  # a decode step: attention rotates what it appends
        state.rotate_later(*later)
        return q, k
    if unsqueeze_dim == 2:
        q, k = rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
    return rotary_embedding(q, k, cos, sin)


def original(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """The function that a class's ``forward`` calls, if it calls one of that name."""
    forward = cls.forward
    return (
        forward.__globals__.get(_NAME)
        if isinstance(forward, types.FunctionType) and _NAME in forward.__code__.co_names
        else None
    )


_made: dict[type, Callable[..., Any]] = {}
"""The code of each class, seeing our function. No cache of functools', which torch.compile would
look into."""


def prepare(cls: Any) -> None:
    """Make the code of a class."""
    forward = cls.forward
    assert isinstance(forward, types.FunctionType)
    names = {**forward.__globals__, _NAME: apply_rotary_pos_emb}
    del names["__name__"]  # by which torch.compile would look the names up in the module
    made = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    _made[cls] = made


@replacement
def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of an attention module."""
    cls = type(module)
    if cls not in _made:  # in a process that has unpickled the module
        prepare(cls)
    return _made[cls](module, *args, **kwargs)


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


@replacement
def embedding(module: Any, x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> Any:
    """A rotary embedding: in a decode step its results are rows of tables, which they name."""
    tables = state.tables()
    if tables is None or position_ids.dim() != 2:
        return plain(module, x, position_ids, *more, **named)
    key = (id(module), more, tuple(named.items()))
    cos, sin = tables.of(key, x, lambda every: plain(module, x, every, *more, **named))
    rows = position_ids.flatten()
    found = [one.index_select(0, rows).view(*position_ids.shape, -1) for one in (cos, sin)]
    half = cos.shape[-1] // 2
    setattr(found[0], _TABLES, (cos[:, :half], sin[:, :half]))
    return tuple(found)
