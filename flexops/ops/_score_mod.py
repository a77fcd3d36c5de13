"""Score modifiers of people's own: a Python function that is called once, with symbols, and becomes device code and its derivative.

What the function does to its arguments is kept as a list of operations in the order in which they were done. From it come the text that NVRTC compiles
into attention's kernels, where ``Dual`` (``csrc/attention/attention_score.cuh``) carries the derivative along, and the same in plain PyTorch.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..op_builder import provider_texts

_ARGUMENTS = {"score": "float", "b": "int", "h": "int", "q": "int", "k": "int"}
Number = int | float | bool
Function = Callable[..., Any]


# name: the value in PyTorch; the derivative's factor for each argument, from the arguments and the value. Integers and comparisons have none.
_UNARY: dict[str, tuple[Function, Function]] = {
    "neg": (operator.neg, lambda *_: -1.0),
    "abs": (torch.abs, lambda x, _: torch.sign(x)),
    "exp": (torch.exp, lambda _, y: y),
    "log": (torch.log, lambda x, _: 1 / x),
    "tanh": (torch.tanh, lambda _, y: 1 - y * y),
    "sigmoid": (torch.sigmoid, lambda _, y: y * (1 - y)),
    "sqrt": (torch.sqrt, lambda _, y: 0.5 / y),
    "sin": (torch.sin, lambda x, _: torch.cos(x)),
    "cos": (torch.cos, lambda x, _: -torch.sin(x)),
}
_BINARY: dict[str, tuple[Function, Function]] = {
    "add": (operator.add, lambda *_: (1.0, 1.0)),
    "sub": (operator.sub, lambda *_: (1.0, -1.0)),
    "mul": (operator.mul, lambda x, y: (y, x)),
    "div": (operator.truediv, lambda x, y: (1 / y, -x / (y * y))),
    "minimum": (torch.minimum, lambda x, y: ((x <= y) * 1.0, (x > y) * 1.0)),
    "maximum": (torch.maximum, lambda x, y: ((x >= y) * 1.0, (x < y) * 1.0)),
}
_INTEGERS: dict[str, Function] = {"floordiv": operator.floordiv, "mod": operator.mod}
_COMPARISONS: dict[str, tuple[str, Function]] = {
    "lt": ("<", operator.lt),
    "le": ("<=", operator.le),
    "gt": (">", operator.gt),
    "ge": (">=", operator.ge),
    "eq": ("==", operator.eq),
    "ne": ("!=", operator.ne),
}
_LOGIC: dict[str, tuple[str, Function]] = {"and": ("&&", operator.and_), "or": ("||", operator.or_)}
_OF_TORCH = {
    "neg": "neg", "abs": "abs", "exp": "exp", "log": "log", "tanh": "tanh", "sigmoid": "sigmoid", "sqrt": "sqrt", "sin": "sin", "cos": "cos",
    "absolute": "abs", "add": "add", "sub": "sub", "mul": "mul", "div": "div", "true_divide": "div", "minimum": "minimum", "maximum": "maximum",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne", "logical_and": "and", "logical_or": "or", "where": "where",
}  # fmt: skip

_BESIDE = ("clamp", "square")


class Symbol:
    """What a score modifier computes with. ``kind``: float, int or bool."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: list[tuple[str, tuple[Any, ...], str]], position: int, kind: str) -> None:
        self.trace, self.position, self.kind = trace, position, kind

    def _then(self, name: str, *args: Any) -> Symbol:
        for arg in args:
            if not isinstance(arg, (Symbol, int, float)):
                raise TypeError(f"flexops.attention: score_mod must compute with its arguments and plain numbers, got {type(arg).__name__} in {name}")
        kinds = [arg.kind if isinstance(arg, Symbol) else type(arg).__name__ for arg in args]
        if name in _COMPARISONS or name in _LOGIC or name == "not":
            kind = "bool"
        elif name in _INTEGERS:
            if set(kinds) != {"int"}:
                raise TypeError(f"flexops.attention: score_mod must use // and % on integers only, got {' and '.join(kinds)}")
            kind = "int"
        else:
            kind = "int" if set(kinds) == {"int"} and name in ("add", "sub", "mul", "neg", "abs", "minimum", "maximum") else "float"
        self.trace.append((name, args, kind))
        return Symbol(self.trace, len(self.trace) - 1, kind)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        called = getattr(func, "__name__", str(func))
        first = next(arg for arg in args if isinstance(arg, Symbol))
        if called == "square":
            return first**2
        if called == "clamp":
            limits = dict(zip(("min", "max"), args[1:], strict=False)) | (kwargs or {})
            for name, limit in (("maximum", limits.get("min")), ("minimum", limits.get("max"))):
                first = first if limit is None else first._then(name, first, limit)
            return first
        if called not in _OF_TORCH or kwargs:
            raise TypeError(f"flexops.attention: score_mod must use, of torch, {', '.join(sorted((*_OF_TORCH, *_BESIDE)))}, got torch.{called}")
        return first._then(_OF_TORCH[called], *args)

    def __bool__(self) -> bool:
        raise TypeError("flexops.attention: score_mod must not branch on its arguments: torch.where(condition, a, b) chooses")

    def __pow__(self, exponent: Any) -> Symbol:
        if not isinstance(exponent, int) or not 1 <= exponent <= 8:
            raise TypeError(f"flexops.attention: score_mod must raise to whole powers from 1 to 8, got {exponent!r}")
        return functools.reduce(operator.mul, [self] * exponent)


def _method(name: str, swapped: bool = False) -> Function:
    def call(self: Symbol, *others: Any) -> Symbol:
        return self._then(name, *(reversed((self, *others)) if swapped else (self, *others)))

    return call


for _name in ("add", "sub", "mul", "div", "floordiv", "mod"):
    _python = {"div": "truediv"}.get(_name, _name)
    setattr(Symbol, f"__{_python}__", _method(_name))
    setattr(Symbol, f"__r{_python}__", _method(_name, swapped=True))
for _name in (*_COMPARISONS, *_LOGIC, "neg", "abs"):
    setattr(Symbol, f"__{_name}__", _method(_name))
setattr(Symbol, "__invert__", _method("not"))  # noqa: B010  mypy knows no such attribute


class ScoreMod:
    """A function ``(score, b, h, q, k) -> score`` as attention's kernels take it: ``score`` is ``scale q k``, the others
    are the numbers of the sequence, the query head, the query and the key (within a packed sequence).

    It may use arithmetic, comparisons, ``&``, ``|``, ``~``, whole powers, and of torch ``where``, ``exp``, ``log``, ``tanh``, ``sigmoid``, ``sqrt``, ``sin``,
    ``cos``, ``abs``, ``square``, ``minimum``, ``maximum``, ``clamp``, on its arguments and plain numbers. It is called once, here.

    Raises:
        TypeError: it does anything else.
    """

    def __init__(self, function: Function) -> None:
        if not callable(function):
            raise TypeError(f"flexops.ScoreMod: function must be a function of (score, b, h, q, k), got {type(function).__name__}")
        trace: list[tuple[str, tuple[Any, ...], str]] = [(name, (), kind) for name, kind in _ARGUMENTS.items()]
        result = function(*(Symbol(trace, position, kind) for position, kind in enumerate(_ARGUMENTS.values())))
        if not isinstance(result, Symbol) or result.kind == "bool":
            raise TypeError(f"flexops.attention: score_mod must give a score that it computed from its arguments, got {type(result).__name__}")
        self._trace, self._result = trace, result
        self.text = " ".join([*(f"const auto t{i} = {self._line(i)};" for i in range(len(_ARGUMENTS), len(trace))), f"return {self._place(result)};"])
        self.number = int(hashlib.sha256(self.text.encode()).hexdigest()[:15], 16)
        provider_texts.add(self.number, f"#define FLEXOPS_SCORE {self.text}\n")
        known[self.number] = self

    def __call__(self, score: Tensor, *at: Tensor) -> tuple[Tensor, Tensor]:
        """The score, and its derivative by ``score``: of broadcastable tensors."""
        values: list[Any] = [score, *at]
        slopes: list[Any] = [1.0, 0.0, 0.0, 0.0, 0.0]

        def value(arg: Any) -> Any:
            if isinstance(arg, Symbol):
                return values[arg.position]
            return torch.tensor(arg, device=score.device, dtype=score.dtype if isinstance(arg, float) else None)

        def slope(arg: Any) -> Any:
            return slopes[arg.position] if isinstance(arg, Symbol) else 0.0

        for name, args, kind in self._trace[len(_ARGUMENTS) :]:
            given = [value(arg) for arg in args]
            along: Any = 0.0
            if name in _UNARY:
                function, derivative = _UNARY[name]
                made = function(given[0] if kind == "int" else given[0].to(score.dtype))
                along = derivative(given[0], made) * slope(args[0]) if kind == "float" else 0.0
            elif name in _BINARY:
                function, factors = _BINARY[name]
                given = given if kind == "int" else [x.to(score.dtype) for x in given]
                made = function(*given)
                along = sum(factor * slope(arg) for factor, arg in zip(factors(*given), args, strict=True)) if kind == "float" else 0.0
            elif name == "where":
                made = torch.where(given[0], given[1].to(score.dtype), given[2].to(score.dtype))
                along = torch.where(given[0], *(torch.as_tensor(slope(arg), dtype=score.dtype, device=score.device) for arg in args[1:]))
            elif name == "not":
                made = ~given[0]
            else:
                function = _COMPARISONS[name][1] if name in _COMPARISONS else _LOGIC[name][1] if name in _LOGIC else _INTEGERS[name]
                made = function(*given)
            values.append(made)
            slopes.append(along)
        position = self._result.position
        shape = torch.broadcast_shapes(score.shape, values[position].shape)
        made, slope_of = (torch.as_tensor(x, dtype=score.dtype, device=score.device).expand(shape) for x in (values[position], slopes[position]))
        return made, slope_of

    def _place(self, arg: Any) -> str:
        if isinstance(arg, Symbol):
            return [*_ARGUMENTS][arg.position] if arg.position < len(_ARGUMENTS) else f"t{arg.position}"
        if isinstance(arg, (bool, int)):
            return str(int(arg))
        if arg != arg or arg in (float("inf"), -float("inf")):
            return {"inf": "infinity()", "-inf": "-infinity()"}.get(str(arg), "bit_cast<float>(0x7fffffffu)")
        return f"{arg.hex()}f"

    def _line(self, position: int) -> str:
        name, args, kind = self._trace[position]
        given = [self._place(arg) for arg in args]
        if name in _COMPARISONS or name in _LOGIC:
            return f"{given[0]} {(_COMPARISONS.get(name) or _LOGIC[name])[0]} {given[1]}"
        if name == "not":
            return f"!{given[0]}"
        if name in ("floordiv", "mod") or kind == "int":
            return f"score::{name}({', '.join(given)})"
        if name == "where":
            return f"score::where({given[0]}, Dual({given[1]}), Dual({given[2]}))"
        return f"score::{name}({', '.join(f'Dual({one})' for one in given)})"


known: dict[int, ScoreMod] = {}
"""Those of this process, by their numbers, which operators take."""


@functools.lru_cache(maxsize=256)
def _made(function: Function) -> ScoreMod:
    return ScoreMod(function)


def number_of(score_mod: Any) -> int:
    """What operators take for it; 0 for None."""
    if score_mod is None:
        return 0
    if isinstance(score_mod, ScoreMod):
        return score_mod.number
    if not callable(score_mod):
        raise TypeError(f"flexops.attention: score_mod must be a function of (score, b, h, q, k) or a flexops.ScoreMod, got {type(score_mod).__name__}")
    return _made(score_mod).number
