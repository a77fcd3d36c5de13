"""Score modifiers of a user's own: a Python function that is called once, with symbols
(``_score_trace.py``), and becomes device code and its derivative.

From the list of what the function does come the text that NVRTC compiles into attention's kernels,
where ``Dual`` (``csrc/attention/attention_score.cuh``) carries the derivative along, and the same
in plain PyTorch.

Tensors that the function looks things up in go to kernels as one buffer of int32 words: of each its
first word and its sizes, then the elements of all.
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

from ..build.load import provider_texts
from ._score_text import function_of
from ._score_trace import ARGUMENTS, INTEGERS, Line, Symbol, traced

Function = Callable[..., Any]


# name: the value in PyTorch; the derivative's factor for each argument, from the arguments and the
# value. Integers and comparisons have none.
_UNARY: dict[str, tuple[Function, Function]] = {
    "neg": (operator.neg, lambda *_: -1.0),
    "abs": (torch.abs, lambda x, _: torch.sign(x)),
    "exp": (torch.exp, lambda _, y: y),
    "exp2": (torch.exp2, lambda _, y: y * 0.6931471805599453),
    "log": (torch.log, lambda x, _: 1 / x),
    "tanh": (torch.tanh, lambda _, y: 1 - y * y),
    "sigmoid": (torch.sigmoid, lambda _, y: y * (1 - y)),
    "sqrt": (torch.sqrt, lambda _, y: 0.5 / y),
    "sin": (torch.sin, lambda x, _: torch.cos(x)),
    "cos": (torch.cos, lambda x, _: -torch.sin(x)),
    "floor": (torch.floor, lambda *_: 0.0),
    "round": (torch.round, lambda *_: 0.0),
    "detach": (torch.clone, lambda *_: 0.0),
    "tofloat": (torch.clone, lambda *_: 1.0),
}
_BINARY: dict[str, tuple[Function, Function]] = {
    "add": (operator.add, lambda *_: (1.0, 1.0)),
    "sub": (operator.sub, lambda *_: (1.0, -1.0)),
    "mul": (operator.mul, lambda x, y: (y, x)),
    "div": (operator.truediv, lambda x, y: (1 / y, -x / (y * y))),
    "minimum": (torch.minimum, lambda x, y: ((x <= y) * 1.0, (x > y) * 1.0)),
    "maximum": (torch.maximum, lambda x, y: ((x >= y) * 1.0, (x < y) * 1.0)),
}
# name: C++'s operator, or "" for a function of the name; the same in PyTorch.
_PLAIN: dict[str, tuple[str, Function]] = {
    "floordiv": ("", operator.floordiv),
    "mod": ("", operator.mod),
    "lt": ("<", operator.lt),
    "le": ("<=", operator.le),
    "gt": (">", operator.gt),
    "ge": (">=", operator.ge),
    "eq": ("==", operator.eq),
    "ne": ("!=", operator.ne),
    "and": ("&&", operator.and_),
    "or": ("||", operator.or_),
    "bitand": ("&", operator.and_),
    "bitor": ("|", operator.or_),
    "bitxor": ("^", operator.xor),
    "shl": ("<<", operator.lshift),
    "shr": (">>", operator.rshift),
}
_PREFIX: dict[str, tuple[str, Function]] = {
    "not": ("!", torch.logical_not),
    "bitnot": ("~", torch.bitwise_not),
    "toint": ("static_cast<int>", lambda x: x.long()),
}


def _inside(function: Any, depth: int = 0) -> list[tuple[str, Any]]:
    """What a function finds outside of itself, by name, and what functions among it find."""
    if isinstance(function, functools.partial):
        given = [("", one) for one in (*function.args, *function.keywords.values())]
        return [*given, *_inside(function.func, depth)]
    if not isinstance(function, types.FunctionType) or depth > _DEPTH:
        return []
    code, defaults = function.__code__, function.__kwdefaults__ or {}
    found = list(
        zip(code.co_freevars, (_content(cell) for cell in function.__closure__ or ()), strict=True)
    )
    found += [
        (name, function.__globals__[name]) for name in _names(code) if name in function.__globals__
    ]
    found += [("", one) for one in (*(function.__defaults__ or ()), *defaults.values())]
    inner = [one for _, one in found if _is_function(one)]
    return found + [pair for one in inner for pair in _inside(one, depth + 1)]


_DEPTH = 8


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    names = (name for one in inner for name in _names(one))
    return tuple(dict.fromkeys((*code.co_names, *names)))


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, functools.partial))


_CONSTANT = (type(None), bool, int, float, str, torch.dtype, torch.device)
_FIXED = (types.ModuleType, types.BuiltinFunctionType, type)


def _fingerprint(function: Function) -> tuple[Any, ...] | None:
    """What a function's operations depend on; None if something may change without showing here."""
    parts: list[Any] = [function]
    for name, value in _inside(function):
        if isinstance(value, Tensor):
            try:
                address = value.data_ptr()
            except RuntimeError:
                raise RuntimeError(
                    f"flexops.attention: score_mod looks up {name or 'a tensor'}, which a transform"
                    " of torch.func (grad, vmap) differentiates or maps; fix: torch.autograd"
                ) from None
            parts.append((name, id(value), address, value.shape, value.dtype))
        elif isinstance(value, _CONSTANT):
            parts.append((name, type(value), value))
        elif _is_function(value) or isinstance(value, _FIXED) or _is_torchs(value):
            parts.append((name, id(value)))
        else:
            return None
    return tuple(parts) if isinstance(function, types.FunctionType) else None


def _is_torchs(value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "").partition(".")[0] == "torch"


class ScoreMod:
    """A function ``(score, b, h, q, k) -> score`` as attention's kernels take it: ``score`` is
    ``scale q k``, the others are the numbers of the sequence, the query head, the query and the key
    (within a packed sequence).

    It may use arithmetic, comparisons, logic, bits of integers, powers, and the functions and
    methods of torch that its errors list (``where``, ``exp``, ``exp2``, ``log``, ``tanh``,
    ``sigmoid``, ``silu``, ``sqrt``, ``sin``, ``cos``, ``tan``, ``abs``, ``floor``, ``minimum``,
    ``maximum``, ``clamp``, ``to`` and others) on its arguments, plain numbers, and what it looks up
    in tensors by whole numbers. A row of at most 32 numbers may be computed with, element by
    element, and summed up. The function is called once, here. Arithmetic is float32 and int32,
    whatever ``to`` asks for.

    Args:
        function: the function, or an expression of the same as text, in Python's syntax:
            ``"score - slopes[h] * abs(q - k) if q >= k else -inf"``.
        tables: tensors that it looks things up in, by name: keyword arguments of a function, names
            of an expression. Those that a function finds itself, in its closure, its globals or
            attributes of what is there, need not be named. Their values may change, as long as
            dtype and shape stay; float ones that require a gradient get one, by plain PyTorch,
            outside of ``torch.compile``.

    Raises:
        TypeError: it does anything else.
    """

    def __init__(self, function: Function | str, **tables: Tensor) -> None:
        if isinstance(function, str):
            function = function_of(function)
        if not callable(function):
            raise TypeError(
                "flexops.ScoreMod: function must be a function of (score, b, h, q, k), or an"
                f" expression, got {type(function).__name__}"
            )
        for name, table in tables.items():
            if not isinstance(table, Tensor):
                raise TypeError(
                    f"flexops.ScoreMod: {name} must be a tensor, got {type(table).__name__}"
                )
        names = {
            id(one): name
            for name, one in (*_inside(function), *tables.items())
            if isinstance(one, Tensor)
        }
        trace, self._result = traced(functools.partial(function, **tables), names)
        self._trace, self._tables, self._varying = trace.lines, trace.tables, trace.varying
        leaves = (leaf for table in trace.tables for leaf in table.leaves)
        self._leaves = list({id(leaf): leaf for leaf in leaves}.values())
        self._heads: list[int] = []
        head = 0  # of each table in the words: its first word and its sizes
        for one in trace.tables:
            self._heads.append(head)
            head += 1 + len(one.shape)
        self._words: tuple[Any, Tensor] | None = None
        places = range(len(ARGUMENTS), len(self._trace))
        lines = [f"const auto t{i} = {self._line(i)};" for i in places]
        self.text = " ".join([*lines, f"return {self._place(self._result)};"])
        self.number = int(hashlib.sha256(self.text.encode()).hexdigest()[:15], 16)
        at_once = _at_once(self._trace)
        text = f"#define FLEXOPS_SCORE {self.text}\n#define FLEXOPS_SCORES_AT_ONCE {at_once}\n"
        provider_texts.add(self.number, text)
        known[self.number] = self

    def words(self, device: torch.device) -> Tensor | None:
        """What kernels look things up in, as it is now; None if that is nothing."""
        if not self._tables:
            return None
        for table in self._tables:
            wrong = [leaf for leaf in table.leaves if leaf.device != device and leaf.dim()]
            if wrong:
                found = f"{table.name} is on {wrong[0].device}"
                where = f"must look things up in tensors on {device}, {found}"
                raise ValueError(f"flexops.attention: score_mod {where}")
        if torch.compiler.is_compiling():
            return _words([table.value().to(device) for table in self._tables])
        with torch.no_grad():
            if any(leaf.is_inference() for leaf in self._leaves):  # their versions are not counted
                return _words([table.value().to(device) for table in self._tables])
            state = [(id(x), x._version, x.shape, x.data_ptr()) for x in self._leaves]
            if self._words is None or self._words[0] != (device, state):
                words = _words([table.value().to(device) for table in self._tables])
                self._words = (device, state), words
            return self._words[1]

    def learned(self) -> list[int]:
        """Which tables are to have a gradient."""
        if not torch.is_grad_enabled():
            return []
        needed = [any(leaf.requires_grad for leaf in table.leaves) for table in self._tables]
        return [
            i for i, table in enumerate(self._tables) if needed[i] and table.dtype.is_floating_point
        ]

    def table(self, number: int, device: torch.device) -> Tensor:
        """A table as kernels read it, differentiable."""
        return self._tables[number].value().to(device, torch.float32)

    def __call__(
        self,
        score: Tensor,
        *at: Tensor,
        words: Tensor | None = None,
        tables: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The score, and its derivative by ``score``: of broadcastable tensors.

        ``tables``: some tables' values, by number, instead of the words: the score is then
        differentiable by them.
        """
        values: list[Any] = [score, *at]
        slopes: list[Any] = [1.0, 0.0, 0.0, 0.0, 0.0]

        def value(arg: Any) -> Any:
            if isinstance(arg, Symbol):
                return values[arg.position]
            return torch.tensor(
                arg, device=score.device, dtype=score.dtype if isinstance(arg, float) else None
            )

        def slope(arg: Any) -> Any:
            return slopes[arg.position] if isinstance(arg, Symbol) else 0.0

        lines = enumerate(self._trace[len(ARGUMENTS) :], len(ARGUMENTS))
        for position, (name, args, kind) in lines:
            varying = position in self._varying
            given = [value(arg) for arg in (args[1:] if name == "at" else args)]
            along: Any = 0.0
            if name in _UNARY:
                function, derivative = _UNARY[name]
                made = function(given[0].to(torch.int64 if kind == "int" else score.dtype))
                along = derivative(given[0], made) * slope(args[0]) if varying else 0.0
            elif name in _BINARY:
                function, factors = _BINARY[name]
                given = [x.to(torch.int64 if kind == "int" else score.dtype) for x in given]
                made = function(*given)
                if varying:
                    pairs = zip(factors(*given), args, strict=True)
                    along = sum(by * slope(arg) for by, arg in pairs if _varies(arg, self._varying))
            elif name == "at":
                made = self._looked_up(args[0], given, kind, score, words, tables or {})
            elif name == "where":
                dtype = {"float": score.dtype, "int": torch.int64, "bool": torch.bool}[kind]
                made = torch.where(given[0], given[1].to(dtype), given[2].to(dtype))
                if varying:
                    ways = [torch.as_tensor(slope(arg)).to(score) for arg in args[1:]]
                    along = torch.where(given[0], *ways)
            else:
                made = (_PREFIX.get(name) or _PLAIN[name])[1](*given)
            values.append(made)
            slopes.append(along)
        position = self._result.position
        shape = torch.broadcast_shapes(score.shape, values[position].shape)
        made, slope_of = (
            torch.as_tensor(x, dtype=score.dtype, device=score.device).expand(shape)
            for x in (values[position], slopes[position])
        )
        return made, slope_of

    def _looked_up(
        self,
        number: int,
        at: list[Tensor],
        kind: str,
        score: Tensor,
        words: Tensor | None,
        tables: dict[int, Tensor],
    ) -> Tensor:
        if number in tables:
            flat, sizes = tables[number].reshape(-1), list(tables[number].shape)
        else:
            assert words is not None
            head = self._heads[number]
            first, *sizes = words[head : head + 1 + len(at)].tolist()
            flat = words[first:]
        offset = torch.zeros((), dtype=torch.int64, device=score.device)
        for size, index in zip(sizes, at, strict=True):
            offset = offset * size + index.clamp(0, size - 1)
        found = flat[offset]
        if number in tables:
            return found.to(score.dtype)
        if kind == "float":
            return found.view(torch.float32).to(score.dtype)
        return found != 0 if kind == "bool" else found.long()

    def _place(self, arg: Any) -> str:
        if isinstance(arg, Symbol):
            names = [*ARGUMENTS]
            return names[arg.position] if arg.position < len(names) else f"t{arg.position}"
        if isinstance(arg, (bool, int)):
            return str(int(arg))
        if arg != arg or arg in (float("inf"), -float("inf")):
            return {"inf": "infinity()", "-inf": "-infinity()"}.get(
                str(arg), "bit_cast<float>(0x7fffffffu)"
            )
        return f"{arg.hex()}f"

    def _line(self, position: int) -> str:
        name, args, kind = self._trace[position]
        if name == "at":
            places = [str(self._heads[args[0]]), *map(self._place, args[1:])]
            found = f"score::at(words, {', '.join(places)})"
            texts = {"float": f"bit_cast<float>({found})", "bool": f"({found} != 0)"}
            return texts.get(kind, found)
        given = [self._place(arg) for arg in args]
        if name in _PREFIX:
            return f"{_PREFIX[name][0]}({self._value_of(args[0])})"
        if name in _PLAIN and _PLAIN[name][0]:
            return f"{given[0]} {_PLAIN[name][0]} {given[1]}"
        if name == "where" and kind != "float":
            return f"{given[0]} ? {given[1]} : {given[2]}"
        if kind == "int":
            return f"score::{name}({', '.join(given)})"
        numbers = [f"Dual({one})" for one in given]
        if name == "where":
            numbers[0] = given[0]
        # What does not depend on the score has no derivative: 0 times infinity would be NaN.
        return f"score::{name}({', '.join(numbers)}){'' if position in self._varying else '.value'}"

    def _value_of(self, arg: Any) -> str:
        """A number without its derivative."""
        is_dual = isinstance(arg, Symbol) and arg.position in self._varying
        return f"{self._place(arg)}.value" if is_dual else self._place(arg)


def _varies(arg: Any, varying: set[int]) -> bool:
    return isinstance(arg, Symbol) and arg.position in varying


_CHEAP = {"neg", "abs", "detach", "tofloat", "round"}
_FUNCTIONS = {*_UNARY, "floordiv", "mod", "div", "at"} - _CHEAP
_LONG = 24  # operations; a function counts as four


def _at_once(trace: list[Line]) -> int:
    """For how many of a thread's scores kernels write a modifier out, 0 for all of them
    (``csrc/attention/attention_score.cuh``). Written out for all, a long one is most of what NVRTC
    has to do: ten seconds for twenty functions, where a loop over eight scores, which moves
    registers, takes it 1.7."""
    operations = sum(4 if name in _FUNCTIONS else 1 for name, _, _ in trace[len(ARGUMENTS) :])
    return 8 if operations > _LONG else 0


def _words(tensors: Sequence[Tensor]) -> Tensor:
    header: list[int] = []
    first = sum(1 + tensor.dim() for tensor in tensors)
    for tensor in tensors:
        header += [first, *tensor.shape]
        first += tensor.numel()
    if first >= 2**31:
        raise ValueError(
            "flexops.attention: score_mod must look things up in fewer than 2^31 numbers, "
            f"got {first}"
        )
    whole = (torch.bool, *INTEGERS)
    wide = [x if x.dtype in whole else x.float().contiguous().view(torch.int32) for x in tensors]
    parts = [x.reshape(-1).to(torch.int32) for x in wide]
    return torch.cat([torch.tensor(header, dtype=torch.int32, device=parts[0].device), *parts])


known: dict[int, ScoreMod] = {}
"""One of each number, which operators take, of this process. What they look up is an argument of
the operators."""

_cache: dict[Any, tuple[ScoreMod, list[Any]]] = {}
_MOST_CACHED = 64


@functools.lru_cache(maxsize=64)
def _of_text(score_mod: str) -> ScoreMod:
    return ScoreMod(score_mod)


def made(score_mod: Any) -> ScoreMod:
    """What a user may give, as kernels take it.

    A function is called again where what it finds outside of itself is not what it was, or may have
    changed unseen, as attributes of an object may.
    """
    if isinstance(score_mod, ScoreMod):
        return score_mod
    if isinstance(score_mod, str):
        return _of_text(score_mod)
    if not callable(score_mod):
        found = type(score_mod).__name__
        raise TypeError(
            "flexops.attention: score_mod must be a function of (score, b, h, q, k), an expression"
            f" or a flexops.ScoreMod, got {found}"
        )
    fingerprint = _fingerprint(score_mod)
    if fingerprint is None:
        return ScoreMod(score_mod)
    if fingerprint not in _cache:
        while len(_cache) >= _MOST_CACHED:
            _cache.pop(next(iter(_cache)))
        # What the fingerprint has the addresses of must live as long as it does.
        _cache[fingerprint] = ScoreMod(score_mod), [value for _, value in _inside(score_mod)]
    return _cache[fingerprint][0]
