"""The plain function to which a class's attention falls back, and what it reads."""

from __future__ import annotations

import dis
import inspect
import types
from typing import Any


def keywords_read(module: Any, others: dict[str, Any]) -> list[str]:
    """Those of a call's keywords with which the eager attention of a module's class computes, and
    ``output_attentions``, which asks for its weights."""
    return [
        name
        for name, x in others.items()
        if x is not None
        and x is not False
        and (name == "output_attentions" or _is_read(type(module), name))
    ]


_named: dict[type, tuple[frozenset[str], bool]] = {}


def _is_read(cls: Any, keyword: str) -> bool:
    """Whether a class's eager attention names a keyword, or reads those that it does not name. One
    without has what transformers' function for torch's attention reads."""
    if cls not in _named:
        eager = eager_of(cls)
        names, rest = frozenset({"position_bias"}), ""
        if eager is not None:
            given = inspect.signature(eager).parameters
            names = frozenset(given)
            rest = next((x for x in given if given[x].kind is inspect.Parameter.VAR_KEYWORD), "")
        code = dis.get_instructions(inspect.unwrap(eager)) if rest else ()
        _named[cls] = names, any(one.argval == rest for one in code)
    return keyword in _named[cls][0] or _named[cls][1]


_is_read._dynamo_marked_constant = True  # type: ignore[attr-defined]


def eager_of(cls: Any) -> Any:
    """The plain function that a class's ``forward`` falls back to; None if it names none."""
    forward = inspect.unwrap(cls.forward)
    names = forward.__code__.co_names if isinstance(forward, types.FunctionType) else ()
    name = next((one for one in names if one.endswith("eager_attention_forward")), None)
    return forward.__globals__.get(name) if name else None
