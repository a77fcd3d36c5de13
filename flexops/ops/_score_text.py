"""Score modifiers as text: ``"20 * tanh(score / 20) if q >= k else -inf"`` is the function that
computes this from symbols."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

_BINARY: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARE: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_UNARY: dict[type[ast.unaryop], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: lambda x: x,
    ast.Not: operator.invert,
    ast.Invert: operator.invert,
}
_FUNCTIONS = {"min": torch.minimum, "max": torch.maximum} | {
    name: getattr(torch, name)
    for name in (
        "abs",
        "exp",
        "log",
        "tanh",
        "sigmoid",
        "sqrt",
        "sin",
        "cos",
        "square",
        "minimum",
        "maximum",
        "clamp",
        "where",
    )
}
_FUNCTIONS |= {
    name: getattr(torch, name)
    for name in ("exp2", "log2", "tan", "floor", "ceil", "round", "rsqrt", "relu")
}
_FUNCTIONS["silu"] = torch.nn.functional.silu
_NAMES = ("score", "b", "h", "q", "k")


def function_of(text: str) -> Callable[..., Any]:
    """The function ``(score, b, h, q, k, **tables)`` that an expression in Python's syntax stands
    for; ``s`` is ``score``, too.

    Raises:
        TypeError: the text is no expression, or calls or names what there is not.
    """
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise TypeError(
            f"flexops.attention: score_mod must be an expression in Python's syntax, got {text!r}:"
            f" {error.msg}"
        ) from None

    def function(*args: Any, **tables: Any) -> Any:
        return _value(
            body,
            {**tables, **dict(zip(_NAMES, args, strict=True)), "s": args[0], "inf": float("inf")},
        )

    return function


def _called(name: str, *args: Any, **options: Any) -> Any:
    """One of torch's functions of symbols and numbers: torch itself would reject some of the
    latter."""
    function = _FUNCTIONS[name]
    symbol = next((arg for arg in args if hasattr(arg, "__torch_function__")), None)
    if symbol is None:
        raise TypeError(
            f"flexops.attention: score_mod must compute {name} of what depends on its arguments,"
            f" got {', '.join(map(str, args))}"
        )
    return symbol.__torch_function__(function, (), args, options)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    def value(part: ast.expr) -> Any:
        return _value(part, names)

    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.UnaryOp():
            return _UNARY[type(node.op)](value(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        case ast.BoolOp():
            return functools.reduce(
                operator.and_ if isinstance(node.op, ast.And) else operator.or_,
                map(value, node.values),
            )
        case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
            sides = [value(part) for part in (node.left, *node.comparators)]
            return functools.reduce(
                operator.and_,
                (_COMPARE[type(op)](*sides[i : i + 2]) for i, op in enumerate(node.ops)),
            )
        case ast.IfExp():
            return _called("where", value(node.test), value(node.body), value(node.orelse))
        case ast.Subscript():
            index = node.slice
            return value(node.value)[
                tuple(map(value, index.elts)) if isinstance(index, ast.Tuple) else value(index)
            ]
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS and all(
            keyword.arg for keyword in node.keywords
        ):
            return _called(
                name,
                *map(value, node.args),
                **{str(keyword.arg): value(keyword.value) for keyword in node.keywords},
            )
    known = (
        f"{', '.join((*_NAMES, 'inf', *sorted(set(names) - {*_NAMES, 's', 'inf'})))}, numbers,"
        f" operators and {', '.join(sorted(_FUNCTIONS))}"
    )
    raise TypeError(
        f"flexops.attention: score_mod must be made of {known}, got {ast.unparse(node)!r}"
    )
