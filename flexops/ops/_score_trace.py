"""What a score modifier computes with while it is called once: symbols for numbers, rows of them
for what a tensor has at an index, and, for tensors of its own, how they are made again.

``traced`` calls the function under a mode that sees every call of torch's. One with a symbol
becomes an operation of the trace. One of tensors alone runs, and is kept as a ``Source``: it runs
again when kernels receive the tensors, so that later values, and gradients, are the tensors' own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
Line = tuple[str, tuple[Any, ...], str]

ARGUMENTS = {"score": "float", "b": "int", "h": "int", "q": "int", "k": "int"}
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KINDS = {torch.bool: "bool", **dict.fromkeys(INTEGERS, "int"), **dict.fromkeys(FLOATS, "float")}
_DTYPES = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}
_MOST_COLUMNS = 32  # of a row that is computed with

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_BOOLS = {
    "and": "and",
    "or": "or",
    "xor": "ne",
    "add": "or",
    "mul": "and",
    "maximum": "or",
    "minimum": "and",
}
_INTS = {"and": "bitand", "or": "bitor", "xor": "bitxor", "not": "bitnot"}
_WHOLE = {"add", "sub", "mul", "neg", "abs", "minimum", "maximum", "where"}  # of integers, integers
_INTEGERS_ONLY = {
    **dict.fromkeys(("floordiv", "mod"), "// and %"),
    **dict.fromkeys(("shl", "shr"), "<< and >>"),
}


_CONSTANT = {"floor", "round", "detach"}  # their derivative is 0


def fail(message: str) -> Any:
    raise TypeError(f"flexops.attention: score_mod must {message}")


class Source:
    """A tensor that a modifier looks things up in: what it is now, and how it is made again."""

    def __init__(self, tensor: Tensor, make: Function | None, arguments: Any, name: str) -> None:
        self._tensor, self._make, self._arguments, self.name = tensor, make, arguments, name
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.leaves: tuple[Tensor, ...] = (tensor,) if make is None else tuple(_leaves(arguments))

    def value(self) -> Tensor:
        """The tensor with today's values, differentiable."""
        if self._make is None:
            return self._tensor
        made: Tensor = self._make(*_replaced(self._arguments, lambda source: source.value()))
        return made

    @property
    def traced(self) -> Tensor:
        return self._tensor


def _replaced(value: Any, of: Function) -> Any:
    """Arguments with something else in place of the sources among them."""
    if isinstance(value, Source):
        return of(value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(one, of) for one in value)
    return (
        {name: _replaced(one, of) for name, one in value.items()} if type(value) is dict else value
    )


def _leaves(value: Any) -> dict[Tensor, None]:
    found: dict[Tensor, None] = {}

    def collect(source: Source) -> None:
        found.update(dict.fromkeys(source.leaves))

    _replaced(value, collect)
    return found


class Trace:
    """The operations of a modifier, in order, and the tensors that it looks things up in."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.lines: list[Line] = [(name, (), kind) for name, kind in ARGUMENTS.items()]
        self.tables: list[Source] = []
        self.varying = {0}  # the lines that have a derivative by the score
        self._names, self._sources = names, dict[int, Source]()

    # ---- operations

    def put(self, name: str, *given: Any) -> Any:
        """An operation; the kinds of its arguments choose among the forms that it has."""
        if not torch.is_grad_enabled():
            fail("not call torch.autograd.Function or no_grad: use detach() to stop a gradient")
        args = tuple(map(self.scalar, given))
        for arg in args:
            if not isinstance(arg, (Symbol, int, float)):
                found = f"{type(arg).__name__} in {name}"
                fail(f"compute with its arguments and plain numbers, got {found}")
        kinds = {_kind_of(arg) for arg in (args[1:] if name == "where" else args)}
        if name == "where" and _kind_of(args[0]) != "bool":
            args = (self.put("ne", args[0], 0), *args[1:])
        if kinds == {"bool"} and name in _BOOLS:
            name, kind = _BOOLS[name], "bool"
        elif name in _INTS and "float" not in kinds:
            kind = "bool" if kinds == {"bool"} else "int"
            name = name if kind == "bool" else _INTS[name]
        elif name in COMPARISONS:
            kind = "bool"
        elif name in _INTEGERS_ONLY or name in _INTS:
            if "float" in kinds:
                used, found = _INTEGERS_ONLY.get(name, name), " and ".join(sorted(kinds))
                fail(f"use {used} on integers only, got {found}")
            kind = "int"
        elif name in ("toint", "tofloat"):
            kind = name[2:]
        elif name == "where" and kinds == {"bool"}:
            kind = "bool"
        else:
            kind = "int" if name in _WHOLE and "float" not in kinds else "float"
        return self.add(name, args, kind)

    def add(self, name: str, args: tuple[Any, ...], kind: str) -> Symbol:
        self.lines.append((name, args, kind))
        varying = any(arg.position in self.varying for arg in args if isinstance(arg, Symbol))
        if varying and kind == "float" and name not in _CONSTANT:
            self.varying.add(len(self.lines) - 1)
        return Symbol(self, len(self.lines) - 1, kind)

    def scalar(self, value: Any) -> Any:
        """A tensor of no dimensions, or a row of none left, as the symbol of its value."""
        if isinstance(value, Tensor) and value.dim() == 0:
            return self.element(self.source(value), ())
        return value

    # ---- tensors

    def source(self, tensor: Tensor) -> Source:
        known = self._sources.get(id(tensor))
        if known is None:
            name = self._names.get(id(tensor), f"a tensor of shape {list(tensor.shape)}")
            known = self._sources[id(tensor)] = Source(tensor, None, (), name)
        return known

    def run(self, function: Function, args: Any, kwargs: Any) -> Any:
        """A call of tensors alone, which is made again whenever the tables are."""
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        several = isinstance(result, (tuple, list)) and any(isinstance(x, Tensor) for x in result)
        if not several and not isinstance(result, Tensor):
            if name in _READING:
                fail(f"not read numbers out of tensors, got {name}: they may change later")
            return result
        if name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__")):
            fail(f"not write tensors, got {name}")
        kept = _kept((tuple(args), dict(kwargs)), self)
        for index, made in enumerate(result if several else [result]):
            if isinstance(made, Tensor) and id(made) not in self._sources:
                make = functools.partial(_call, function, index if several else None)
                label = next((one.name for one in _sources_in(kept)), "a tensor")
                self._sources[id(made)] = Source(made, make, kept, label)
        return result

    def lookup(self, tensor: Tensor, index: Any) -> Any:
        """``tensor[index]`` where symbols are in the index: a symbol, or the row that is left."""
        at = index if isinstance(index, tuple) else (index,)
        symbols = [self.scalar(one) for one in at]
        whole = all(_is_whole(one) for one in symbols)
        name = self.source(tensor).name
        if not whole or len(at) > tensor.dim():
            fail(f"look up {name} by {tensor.dim()} integers, got {index!r}")
        for dim in reversed(range(len(symbols))):  # numbers are a view, in which symbols look up
            if not isinstance(symbols[dim], Symbol):
                tensor = self.run(torch.select, (tensor, dim, symbols.pop(dim)), {})
        return Row(self, self.source(tensor), ()).of(symbols)

    def element(self, source: Source, index: tuple[Any, ...]) -> Symbol:
        if source.dtype not in _KINDS:
            found = str(source.dtype).removeprefix("torch.")
            fail(f"look things up in float or integer tensors, {source.name} is {found}")
        number = next(
            (i for i, one in enumerate(self.tables) if _same(one, source)), len(self.tables)
        )
        if number == len(self.tables):
            self.tables.append(source)
        return self.add("at", (number, *index), _KINDS[source.dtype])


_READING = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "equal",
}


def _call(function: Function, index: int | None, args: Any, kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return result if index is None else result[index]


def _kept(value: Any, trace: Trace) -> Any:
    if isinstance(value, Tensor):
        return trace.source(value)
    if isinstance(value, (tuple, list)):
        return (
            type(value)(_kept(one, trace) for one in value)
            if type(value) in (tuple, list)
            else value
        )
    return (
        {name: _kept(one, trace) for name, one in value.items()} if type(value) is dict else value
    )


def _sources_in(value: Any) -> list[Source]:
    found: list[Source] = []
    _replaced(value, found.append)
    return found


def _same(left: Source, right: Source) -> bool:
    """Whether two are views of one memory, which tables need to hold once only."""
    a, b = left.traced, right.traced
    alike = (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
    )
    return a is b or (
        alike
        and [*map(id, left.leaves)] == [*map(id, right.leaves)]
        and a.data_ptr() == b.data_ptr() != 0
    )


def _is_whole(value: Any) -> bool:
    if isinstance(value, Symbol):
        return value.kind == "int"
    return isinstance(value, int) and not isinstance(value, bool)


def _kind_of(value: Any) -> str:
    return value.kind if isinstance(value, Symbol) else type(value).__name__


class _Traced:
    """What symbols and rows of them share: operators, and torch's functions and methods."""

    __hash__ = None  # type: ignore[assignment]
    trace: Trace

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        return call(name, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *args, **kwargs: call(name, (self, *args), kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        return fail(f"use, of methods, {', '.join(sorted(METHODS))}, got {name}")

    def __bool__(self) -> bool:
        fail("not branch on its arguments: torch.where(condition, a, b) chooses")
        return False

    def __pow__(self, exponent: Any) -> Any:
        return call("pow", (self, exponent), {})

    def __rpow__(self, base: Any) -> Any:
        return call("pow", (base, self), {})


class Symbol(_Traced):
    """A number. ``kind``: float, int or bool."""

    shape, ndim, device, requires_grad = torch.Size(), 0, torch.device("cpu"), False

    def __init__(self, trace: Trace, position: int, kind: str) -> None:
        self.trace, self.position, self.kind = trace, position, kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.kind]

    def __index__(self) -> int:
        fail("look things up in tensors, not in lists, by its arguments")
        return 0


class Row(_Traced):
    """What a tensor has at an index that leaves dimensions open."""

    def __init__(self, trace: Trace, source: Source, index: tuple[Any, ...]) -> None:
        self.trace, self.source, self.index = trace, source, index

    def of(self, index: list[Any]) -> Any:
        index = [*self.index, *index]
        if len(index) < len(self.source.shape):
            return Row(self.trace, self.source, tuple(index))
        return self.trace.element(self.source, tuple(index))

    @property
    def shape(self) -> torch.Size:
        return self.source.shape[len(self.index) :]

    def __getitem__(self, index: Any) -> Any:
        at = list(map(self.trace.scalar, index if isinstance(index, tuple) else (index,)))
        if len(at) > len(self.shape) or not all(map(_is_whole, at)):
            fail(f"look up {self.source.name} by {len(self.source.shape)} integers, got {index!r}")
        for place, (size, one) in enumerate(zip(self.shape, at, strict=False)):
            if not isinstance(one, Symbol):
                if not -size <= one < size:
                    fail(f"look up {self.source.name} within its size, got {one} of {size}")
                at[place] = one % size
        return self.of(at)

    def vector(self) -> Vector:
        if len(self.shape) != 1 or not 0 < self.shape[0] <= _MOST_COLUMNS:
            wanted = f"rows of at most {_MOST_COLUMNS} numbers"
            fail(
                f"compute with {wanted}, got one of {self.source.name} of shape {list(self.shape)}"
            )
        return Vector(self.trace, [self[i] for i in range(self.shape[0])])


class Vector(_Traced):
    """Several numbers, one operation of each."""

    def __init__(self, trace: Trace, items: list[Any]) -> None:
        self.trace, self.items = trace, items

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self.items)])

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def _rows(trace: Trace, value: Any) -> Any:
    """An argument of an elementwise function: a symbol, a number or a vector."""
    if isinstance(value, Row):
        return value.vector()
    if isinstance(value, Tensor) and value.dim():
        items = trace.run(torch.Tensor.unbind, (value,), {}) if value.dim() == 1 else ()
        if not 0 < len(items) <= _MOST_COLUMNS:
            found = f"a tensor of shape {list(value.shape)}"
            fail(f"compute with rows of at most {_MOST_COLUMNS} numbers, got {found}")
        return Vector(trace, [trace.scalar(item) for item in items])
    return trace.scalar(value)


def _method(name: str, swapped: bool = False) -> Function:
    def method(self: Any, *others: Any) -> Any:
        return call(name, (*reversed((self, *others)),) if swapped else (self, *others), {})

    return method


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "matmul",
):
    setattr(_Traced, f"__{_name}__", _method(_name))
    setattr(_Traced, f"__r{_name}__", _method(_name, swapped=True))
for _name in (*COMPARISONS, "neg", "abs", "invert"):
    setattr(_Traced, f"__{_name}__", _method(_name))
setattr(_Traced, "__pos__", lambda self: self)  # noqa: B010  mypy knows no such attribute


# ---- torch's functions ----


def _clamp(t: Trace, x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else t.put("maximum", x, min)
    return x if max is None else t.put("minimum", x, max)


def _pow(t: Trace, x: Any, exponent: Any) -> Any:
    if not isinstance(x, Symbol) and isinstance(x, (int, float)) and x > 0:
        return t.put("exp2", t.put("mul", exponent, math.log2(x)))
    if not isinstance(exponent, Symbol) and exponent in (0.5, -0.5):
        root = t.put("sqrt", x)
        return root if exponent > 0 else t.put("div", 1.0, root)
    if isinstance(exponent, Symbol) or exponent not in range(-8, 9):
        fail(f"raise to whole powers from -8 to 8, 0.5 or -0.5, got {exponent!r}")
    power = functools.reduce(operator.mul, [x] * abs(int(exponent))) if exponent else 1.0
    return (
        power
        if exponent > 0
        else t.put("div", 1.0, power)
        if exponent
        else t.put("mul", x, 0.0) + 1.0
    )


def _div(t: Trace, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return t.put("div", x, y)
    if "float" not in (_kind_of(x), _kind_of(y)) and rounding_mode == "floor":
        return t.put("floordiv", x, y)
    quotient = t.put("div", x, y)
    return t.put("floor", quotient) if rounding_mode == "floor" else _trunc(t, quotient)


def _trunc(t: Trace, x: Any) -> Any:
    return t.put("where", x < 0, -t.put("floor", -x), t.put("floor", x))


def _cast(t: Trace, x: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
    """Numbers are float32, int32 or bool, whatever was asked for."""
    if isinstance(dtype, (Tensor, Symbol)):
        dtype = dtype.dtype
    kind = _KINDS.get(dtype) if isinstance(dtype, torch.dtype) else None
    if isinstance(dtype, torch.dtype) and kind is None:
        fail(f"use float, integer or bool numbers, got {dtype}")
    if kind is None or kind == _kind_of(x):
        return x
    return t.put("ne", x, 0) if kind == "bool" else t.put(f"to{kind}", x)


def _to(t: Trace, x: Any, *args: Any, dtype: Any = None, other: Any = None, **_: Any) -> Any:
    found = next((arg for arg in args if isinstance(arg, (torch.dtype, Tensor, Symbol))), None)
    return _cast(t, x, dtype or other or found)


def _softplus(t: Trace, x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    return t.put("where", scaled > threshold, x, t.put("log", t.put("exp", scaled) + 1.0) / beta)


def _plain(name: str) -> Function:
    return lambda t, *args: t.put(name, *args)


def _logical(name: str) -> Function:
    return lambda t, *args: t.put(name, *(_cast(t, arg, torch.bool) for arg in args))


_PLAIN = (
    "neg", "abs", "exp", "exp2", "log", "tanh", "sigmoid", "sqrt", "sin", "cos", "floor", "round",
    "add", "sub", "mul", "minimum", "maximum", "floordiv", "mod", "where", "detach",
    *COMPARISONS,
)  # fmt: skip
_SPELLED = {
    "absolute": "abs", "negative": "neg", "subtract": "sub", "multiply": "mul", "truediv": "div",
    "true_divide": "div", "divide": "div", "floor_divide": "floordiv", "remainder": "mod",
    "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "clip": "clamp",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not",
    "invert": "not", "lshift": "shl", "rshift": "shr", "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr", "expit": "sigmoid", "type": "to",
}  # fmt: skip
FUNCTIONS: dict[str, Function] = {
    **{name: _plain(name) for name in (*_PLAIN, "and", "or", "xor", "not", "shl", "shr")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    "div": _div,
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda t, x, most: _clamp(t, x, None, most),
    "masked_fill": lambda t, x, mask, value: t.put("where", mask, value, x),
    "square": lambda _, x: x * x,
    "reciprocal": lambda t, x: t.put("div", 1.0, x),
    "rsqrt": lambda t, x: t.put("div", 1.0, t.put("sqrt", x)),
    "log2": lambda t, x: t.put("log", x) * (1 / math.log(2)),
    "log10": lambda t, x: t.put("log", x) * (1 / math.log(10)),
    "log1p": lambda t, x: t.put("log", x + 1.0),
    "tan": lambda t, x: t.put("div", t.put("sin", x), t.put("cos", x)),
    "silu": lambda t, x: x * t.put("sigmoid", x),
    "relu": lambda t, x: t.put("where", x > 0, x, 0.0 if _kind_of(x) == "float" else 0),
    "leaky_relu": lambda t, x, slope=0.01: t.put("where", x > 0, x, x * slope),
    "logsigmoid": lambda t, x: -_softplus(t, -x),
    "softplus": _softplus,
    "ceil": lambda t, x: -t.put("floor", -x),
    "trunc": _trunc,
    "sign": lambda t, x: t.put("where", x > 0, 1, t.put("where", x < 0, -1, 0)),
    "to": _to,
    "type_as": _cast,
    "float": lambda t, x: _cast(t, x, torch.float32),
    "double": lambda t, x: _cast(t, x, torch.float64),
    "half": lambda t, x: _cast(t, x, torch.float16),
    "bfloat16": lambda t, x: _cast(t, x, torch.bfloat16),
    "int": lambda t, x: _cast(t, x, torch.int32),
    "long": lambda t, x: _cast(t, x, torch.int64),
    "bool": lambda t, x: _cast(t, x, torch.bool),
    **dict.fromkeys(("clone", "contiguous"), lambda _, x, **__: x),
    **dict.fromkeys(("new_zeros", "zeros_like"), lambda *_, **__: 0),
    **dict.fromkeys(("new_ones", "ones_like"), lambda *_, **__: 1),
}
FUNCTIONS |= {name: FUNCTIONS[of] for name, of in _SPELLED.items()}


def _sum(x: Vector) -> Any:
    return functools.reduce(operator.add, x.items)


_REDUCTIONS: dict[str, Function] = {
    "sum": _sum,
    "mean": lambda x: _sum(x) / len(x),
    "amax": lambda x: functools.reduce(lambda a, b: x.trace.put("maximum", a, b), x.items),
    "amin": lambda x: functools.reduce(lambda a, b: x.trace.put("minimum", a, b), x.items),
    "norm": lambda x: x.trace.put("sqrt", _sum(_elementwise(x.trace, "square", [x], {}))),
}
_PRODUCTS = {"dot", "inner", "matmul", "vdot"}
_OF_TYPES = {"to", "type", "type_as"}  # what follows the first argument is no number
METHODS = {*FUNCTIONS, *_REDUCTIONS, *_PRODUCTS, "size", "dim", "numel"}
METHODS -= {"where", "and", "or", "not", "xor"}
PUBLIC = sorted(name for name in {*FUNCTIONS, *_REDUCTIONS} if hasattr(torch, name))


def call(name: str, args: Any, kwargs: Any) -> Any:
    """One of torch's functions or methods, of symbols, rows, numbers and tensors."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    trace = next(one.trace for one in (*args, *kwargs.values()) if isinstance(one, _Traced))
    kwargs = {
        key: value for key, value in kwargs.items() if value is not None and value is not False
    }
    first: Any = args[0] if args else None
    if name in ("dim", "size", "numel"):
        shape = first.shape
        if name == "size":
            return shape[args[1]] if len(args) > 1 else shape
        return len(shape) if name == "dim" else shape.numel()
    if name in _REDUCTIONS:
        return _reduced(trace, name, *args, **kwargs)
    if name in _PRODUCTS:
        return _sum(_elementwise(trace, "mul", args, {}))
    if name not in FUNCTIONS:
        fail(f"use, of torch, {', '.join(PUBLIC)}, got torch.{name}")
    return _elementwise(trace, name, args, kwargs)


def _reduced(trace: Trace, name: str, x: Any, dim: Any = -1, **options: Any) -> Any:
    x = _rows(trace, x)
    if options or dim not in (-1, 0, (-1,), [-1], (0,)):
        fail(f"use {name} over the one dimension of a row only, and without options")
    return _REDUCTIONS[name](x) if isinstance(x, Vector) else x


def _elementwise(trace: Trace, name: str, args: Any, kwargs: Any) -> Any:
    args = [arg if name in _OF_TYPES and i else _rows(trace, arg) for i, arg in enumerate(args)]
    kwargs = (
        kwargs if name in _OF_TYPES else {key: _rows(trace, arg) for key, arg in kwargs.items()}
    )
    lengths = {len(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, Vector)}
    if not lengths:
        return FUNCTIONS[name](trace, *args, **kwargs)
    if len(lengths) > 1:
        found = " and ".join(map(str, sorted(lengths)))
        fail(f"compute with rows of one length in {name}, got {found}")

    def at(arg: Any, i: int) -> Any:
        return arg[i] if isinstance(arg, Vector) else arg

    items = [
        FUNCTIONS[name](
            trace, *(at(arg, i) for arg in args), **{key: at(arg, i) for key, arg in kwargs.items()}
        )
        for i in range(lengths.pop())
    ]
    return Vector(trace, items)


# ---- tracing ----


class _Tracing(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _has_symbols((args, kwargs)):
            return self._trace.run(func, args, kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__getitem__" and isinstance(args[0], Tensor):
            return self._trace.lookup(*args)
        return call(name, args, kwargs)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_symbols, value))
    return (
        any(map(_has_symbols, value.values()))
        if type(value) is dict
        else isinstance(value, _Traced)
    )


def traced(function: Function, names: Mapping[int, str]) -> tuple[Trace, Symbol]:
    """The function's operations on ``(score, b, h, q, k)``, and which of them is the score.

    Args:
        function: is called once.
        names: of tensors, by ``id``, for errors.

    Raises:
        TypeError: it does what kernels cannot.
    """
    with contextlib.suppress(ValueError):  # a function of C without a signature
        try:
            inspect.signature(function).bind(*ARGUMENTS)
        except TypeError as error:
            fail(f"be a function of (score, b, h, q, k): {error}")
    trace = Trace(names)
    symbols = [Symbol(trace, i, kind) for i, kind in enumerate(ARGUMENTS.values())]
    with torch.enable_grad(), _Tracing(trace):
        result = function(*symbols)
        if isinstance(result, Tensor):
            result = trace.scalar(result)
    if not isinstance(result, Symbol) or result.kind == "bool":
        found = (
            f"rows of shape {list(result.shape)}"
            if hasattr(result, "shape")
            else type(result).__name__
        )
        found = "a bool" if isinstance(result, Symbol) else found
        fail(f"give a score that it computed from its arguments, got {found}")
    return trace, result
