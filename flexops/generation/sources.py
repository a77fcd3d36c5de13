"""What the source of a class says of its attention, where calling it would not: the plain function
that it falls back to, and whether it hands masks, caches and rotated tensors on as they are."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import textwrap
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


@functools.cache
def code_of(cls: Any) -> ast.AST:
    """The syntax tree of a class's ``forward``; an empty one where there is no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


@functools.cache
def only_makes_masks(cls: Any, windows: bool) -> bool:
    """Whether a model reads its ``attention_mask`` only to have transformers make a mask of it,
    which without padding is known: causal or full, or a window that attention receives."""
    tree = code_of(cls)
    makes = [node for node in ast.walk(tree) if _makes_mask(node)]
    more = r"chunk|(or|and)_mask_function|block_sequence" + ("" if windows else "|sliding|window")
    if any(re.search(more, ast.dump(node)) for node in makes if isinstance(node, ast.Call)):
        return False
    allowed = {id(one) for node in makes for one in ast.walk(node)}
    reads = _reads(tree)
    return bool(reads) and all(id(node) in allowed for node in reads)


@functools.cache
def hands_mask_on(cls: Any, parts: tuple[str, ...]) -> bool:
    """Whether a module gives its ``attention_mask`` to its parts and to attention functions only:
    a local name is a part of a list, or such a function."""
    forward = inspect.unwrap(cls.forward)
    if "attention_mask" not in getattr(getattr(forward, "__code__", None), "co_varnames", ()):
        return True
    tree = code_of(cls)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", ""))
        in {*parts, *forward.__code__.co_varnames}
    ]
    given = [x for call in calls for x in (*call.args, *(one.value for one in call.keywords))]
    return {id(node) for node in _reads(tree)} <= {id(node) for node in given}


def _reads(tree: ast.AST) -> list[ast.AST]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "attention_mask"
    ]


def _makes_mask(node: ast.AST) -> bool:
    """A call of one of transformers' functions for masks, or a part of its arguments."""
    if isinstance(node, ast.Dict):
        return "attention_mask" in [getattr(key, "value", None) for key in node.keys]
    if not isinstance(node, ast.Call):
        return False
    name = str(getattr(node.func, "id", getattr(node.func, "attr", "")))
    return re.fullmatch(r"_?create_\w*masks?|mask_function|isinstance", name) is not None


@functools.cache
def hands_cache_on(cls: Any) -> bool:
    nodes = list(ast.walk(code_of(cls)))
    appended: Any = None
    for one in nodes:
        name = getattr(getattr(getattr(one, "value", None), "func", None), "attr", "")
        if isinstance(one, ast.Assign) and name == "update":
            appended = one
    if appended is None or not isinstance(appended.targets[0], ast.Tuple):
        return False
    given = {ast.unparse(x) for x in appended.targets[0].elts} | {"attention_mask"}
    later = [one for one in nodes if getattr(one, "lineno", 0) > appended.lineno]
    changed = {
        one.id for one in later if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    passed = (
        {ast.unparse(x) for x in (*one.args, *(named.value for named in one.keywords))}
        for one in later
        if isinstance(one, ast.Call)
    )
    return not changed & given and any(given <= one for one in passed)


@functools.cache
def hands_rotated_on(cls: Any, rotary: str) -> bool:
    """Whether a class's code calls no part of its own with what its function ``rotary`` has
    rotated."""
    nodes = list(ast.walk(code_of(cls)))
    rotated: set[str] = set()
    for one in nodes:
        name = getattr(getattr(getattr(one, "value", None), "func", None), "id", "")
        if isinstance(one, ast.Assign) and name == rotary:
            rotated |= {x.id for x in ast.walk(one.targets[0]) if isinstance(x, ast.Name)}
            line = one.lineno
    return bool(rotated) and not any(
        isinstance(one, ast.Call)
        and one.lineno > line
        and ast.unparse(one.func).startswith("self.")
        and any(getattr(x, "id", "") in rotated for x in one.args)
        for one in nodes
    )
