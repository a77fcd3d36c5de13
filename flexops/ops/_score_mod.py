"""Score modifiers of people's own: a Python function that is called once, with symbols, and becomes device code and its derivative.

What the function does to its arguments is kept as a list of operations in the order in which they were done. From it come the text that NVRTC compiles
into attention's kernels, where ``Dual`` (``csrc/attention/attention_score.cuh``) carries the derivative along, and the same in plain PyTorch.

Tensors that the function looks things up in go to kernels as one buffer of int32 words: of each its first word, rows and columns, then their elements.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..op_builder import provider_texts
from ._score_text import function_of

_ARGUMENTS = {"score": "float", "b": "int", "h": "int", "q": "int", "k": "int"}
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

    def __index__(self) -> int:
        raise TypeError("flexops.attention: score_mod must find the tensors that it looks things up in among its own closure, its globals or ScoreMod's")

    def __bool__(self) -> bool:
        raise TypeError("flexops.attention: score_mod must not branch on its arguments: torch.where(condition, a, b) chooses")

    def __pow__(self, exponent: Any) -> Symbol:
        if not isinstance(exponent, int) or not 1 <= exponent <= 8:
            raise TypeError(f"flexops.attention: score_mod must raise to whole powers from 1 to 8, got {exponent!r}")
        return functools.reduce(operator.mul, [self] * exponent)


_KINDS = {torch.bool: "bool", **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64), "int")}


class Table:
    """A tensor of one or two dimensions, which a score modifier looks things up in. An index beyond its ends is the last (or first) one."""

    def __init__(self, trace: list[tuple[str, tuple[Any, ...], str]], number: int, tensor: Tensor, name: str) -> None:
        self.trace, self.number, self.dim, self.kind, self.name = trace, number, tensor.dim(), _KINDS.get(tensor.dtype, "float"), name

    def __getitem__(self, index: Any) -> Symbol:
        at = index if isinstance(index, tuple) else (index,)
        if len(at) != self.dim or any(isinstance(i, bool) or not (isinstance(i, int) or (isinstance(i, Symbol) and i.kind == "int")) for i in at):
            raise TypeError(f"flexops.attention: score_mod must look up {self.name} by {self.dim} integers, got {index!r}")
        self.trace.append(("at", (self.number, *(0,) * (2 - len(at)), *at), self.kind))
        return Symbol(self.trace, len(self.trace) - 1, self.kind)


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


def _captured(function: Function) -> dict[str, Tensor]:
    """The tensors that a function finds outside of itself, by name."""
    if not isinstance(function, types.FunctionType):
        return {}
    code, outside = function.__code__, {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        outside[name] = cell.cell_contents
    outside |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__ and name not in outside}
    return {name: found for name, found in outside.items() if isinstance(found, Tensor)}


def _instead(function: Any, tables: dict[str, Any]) -> Function:
    """The function, with other things where it had tensors."""
    cells = (
        types.CellType(tables[name]) if name in tables else cell for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    made = types.FunctionType(function.__code__, {**function.__globals__, **tables}, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class ScoreMod:
    """A function ``(score, b, h, q, k) -> score`` as attention's kernels take it: ``score`` is ``scale q k``, the others
    are the numbers of the sequence, the query head, the query and the key (within a packed sequence).

    It may use arithmetic, comparisons, ``&``, ``|``, ``~``, whole powers, and of torch ``where``, ``exp``, ``log``, ``tanh``, ``sigmoid``, ``sqrt``, ``sin``,
    ``cos``, ``abs``, ``square``, ``minimum``, ``maximum``, ``clamp``, on its arguments, plain numbers, and what it looks up in tensors of one or two
    dimensions by whole numbers. It is called once, here.

    Args:
        function: the function, or an expression of the same as text, in Python's syntax: ``"score - slopes[h] * abs(q - k) if q >= k else -inf"``.
        tables: tensors that it looks things up in, by name: keyword arguments of a function, names of an expression. Those that a function finds in its closure
            or globals need not be named. Their values may change, as long as dtype and number of dimensions stay. They get no gradient.

    Raises:
        TypeError: it does anything else.
    """

    def __init__(self, function: Function | str, **tables: Tensor) -> None:
        if isinstance(function, str):
            function = function_of(function)
        if not callable(function):
            raise TypeError(f"flexops.ScoreMod: function must be a function of (score, b, h, q, k), or an expression, got {type(function).__name__}")
        trace: list[tuple[str, tuple[Any, ...], str]] = [(name, (), kind) for name, kind in _ARGUMENTS.items()]
        outside = _captured(function)
        self._tensors = {**outside, **tables}
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, Tensor) or tensor.dim() > 2 or tensor.dtype not in (*_KINDS, torch.float32, torch.bfloat16, torch.float16):
                found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"flexops.attention: score_mod must look things up in float or integer tensors of one or two dimensions, {name} is {found}")
        names = [*self._tensors]
        symbols = {name: _table(trace, names.index(name), tensor, name) for name, tensor in self._tensors.items()}
        if outside:
            function = _instead(function, {name: symbols[name] for name in outside})
        function = functools.partial(function, **{name: symbols[name] for name in tables})
        self._words: tuple[Any, Tensor] | None = None
        result = function(*(Symbol(trace, position, kind) for position, kind in enumerate(_ARGUMENTS.values())))
        if not isinstance(result, Symbol) or result.kind == "bool":
            raise TypeError(f"flexops.attention: score_mod must give a score that it computed from its arguments, got {type(result).__name__}")
        self._trace, self._result = trace, result
        self.text = " ".join([*(f"const auto t{i} = {self._line(i)};" for i in range(len(_ARGUMENTS), len(trace))), f"return {self._place(result)};"])
        self.number = int(hashlib.sha256(self.text.encode()).hexdigest()[:15], 16)
        provider_texts.add(self.number, f"#define FLEXOPS_SCORE {self.text}\n#define FLEXOPS_SCORES_AT_ONCE {_at_once(trace)}\n")
        known[self.number] = self

    def words(self, device: torch.device) -> Tensor | None:
        """What kernels look things up in, as it is now; None if that is nothing."""
        if not self._tensors:
            return None
        for name, tensor in self._tensors.items():
            if tensor.device != device or tensor.requires_grad:
                found = f"on {tensor.device}" if tensor.device != device else "one that requires a gradient, of which there is none"
                raise ValueError(f"flexops.attention: score_mod must look things up in tensors on {device} without gradients, {name} is {found}")
        tensors = [*self._tensors.values()]
        if torch.compiler.is_compiling():
            return _words(tensors)
        state = [(id(tensor), tensor._version, tensor.shape) for tensor in tensors]
        if self._words is None or self._words[0] != state:
            self._words = state, _words(tensors)
        return self._words[1]

    def __call__(self, score: Tensor, *at: Tensor, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The score, and its derivative by ``score``: of broadcastable tensors. ``words``: see above."""
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
            elif name == "at":
                assert words is not None
                first, rows, columns = words[3 * args[0] : 3 * args[0] + 3].tolist()
                found = words[first + given[1].clamp(0, rows - 1) * columns + given[2].clamp(0, columns - 1)]
                made = found.view(torch.float32).to(score.dtype) if kind == "float" else found != 0 if kind == "bool" else found.long()
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
        if name == "at":
            return {"float": "bit_cast<float>({})", "int": "{}", "bool": "({} != 0)"}[kind].format(f"score::at(words, {', '.join(given)})")
        if name in ("floordiv", "mod") or kind == "int":
            return f"score::{name}({', '.join(given)})"
        if name == "where":
            return f"score::where({given[0]}, Dual({given[1]}), Dual({given[2]}))"
        return f"score::{name}({', '.join(f'Dual({one})' for one in given)})"


_FUNCTIONS = {*_UNARY, *_INTEGERS, "div", "at"} - {"neg", "abs"}
_LONG = 24  # operations; a function counts as four


def _at_once(trace: list[tuple[str, tuple[Any, ...], str]]) -> int:
    """For how many of a thread's scores kernels write a modifier out, 0 for all of them (``csrc/attention/attention_score.cuh``). Written out for all, a long
    one is most of what NVRTC has to do: ten seconds for twenty functions, where a loop over eight scores, which moves registers, takes it 1.7."""
    operations = sum(4 if name in _FUNCTIONS else 1 for name, _, _ in trace[len(_ARGUMENTS) :])
    return 8 if operations > _LONG else 0


def _table(trace: list[tuple[str, tuple[Any, ...], str]], number: int, tensor: Tensor, name: str) -> Table | Symbol:
    table = Table(trace, number, tensor, name)
    return table if tensor.dim() else table[()]


def _words(tensors: Sequence[Tensor]) -> Tensor:
    header, first = [], 3 * len(tensors)
    for tensor in tensors:
        columns = tensor.shape[-1] if tensor.dim() else 1
        header += [first, tensor.shape[0] if tensor.dim() == 2 else 1, columns]
        first += tensor.numel()
    parts = [(x if x.dtype in _KINDS else x.float().view(torch.int32)).reshape(-1).to(torch.int32) for x in tensors]
    return torch.cat([torch.tensor(header, dtype=torch.int32, device=parts[0].device), *parts])


known: dict[int, ScoreMod] = {}
"""One of each number, which operators take, of this process. What they look up is an argument of the operators."""


@functools.lru_cache(maxsize=64)
def _made(score_mod: Function | str, _captured: tuple[int, ...]) -> ScoreMod:
    return ScoreMod(score_mod)


def made(score_mod: Any) -> ScoreMod:
    """What people may give, as kernels take it; made once, and again if a function's tensors are others."""
    if isinstance(score_mod, ScoreMod):
        return score_mod
    if isinstance(score_mod, str):
        return _made(score_mod, ())
    if not callable(score_mod):
        found = type(score_mod).__name__
        raise TypeError(f"flexops.attention: score_mod must be a function of (score, b, h, q, k), an expression or a flexops.ScoreMod, got {found}")
    return _made(score_mod, tuple(map(id, _captured(score_mod).values())))
