"""What a declaration says, in Python: checks whose words are those of the binding, results of the
fake kernel, and what a gradient keeps. Both ``flexops.builder`` and flexops' own operators are
defined through it; flexops' own by :func:`define`, from ``build/describe/families.py``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import TorchDispatchMode, only_fake_mode, register_flops
from ..build.describe import families
from ..build.describe.declaration import Declared, Rows, in_words
from ..errors import FlexopsError
from . import _register

if TYPE_CHECKING:
    from ..build.describe.schema import Dimensions, Signature


def declare_all() -> None:
    """Register what ``families.py`` declares with torch; ``import flexops`` does so, except in
    commands, where the first module of operators declares them."""
    _declare()
    register_flops(lambda: import_module(f"{__package__}.attention").FLOPS)


@functools.cache
def _declare() -> None:
    for family, one in families.OPERATORS.values():
        _register.declare(
            one.schema, family=family, plain=one.plain, hidden=one.hidden, gradient=one.gradient
        )


def define(
    name: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    check: Callable[..., None] | None = None,
    saves: Sequence[str] | None = None,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    function: str = "",
) -> None:
    """Give an operator that ``families.py`` declares, ``torch.ops.flexops.<name>``, its functions.

    Args:
        reference: plain PyTorch, called with the schema's arguments.
        fake: results' shapes, dtypes and devices, for operators without a library, or with a result
            that the host function allocates.
        check: raises for what the declaration cannot say; asked after what it says.
        saves: for ``backward``: tensors among arguments and results that ``ctx.saved_tensors`` has;
            arguments that are no tensors are attributes of ``ctx``. In its place ``setup_context``.
        setup_context, backward, function: see ``_register.supply``; with ``saves``, the gradients
            that ``backward`` leaves off at the end are None.
    """
    _declare()
    family, declared = families.OPERATORS[name]
    text = declared.schema
    if saves is not None and backward is not None:
        setup_context, backward = _saving(text, saves, backward)
    if family:
        signature = functools.partial(_signature, declared)
        fake = fake or _nothing if text.endswith("-> ()") else fake or _fake(signature)
        check = _checking(f"flexops.{function or name}", signature, check)
    assert fake is not None, f"{name} needs a fake kernel"
    _register.supply(
        text,
        reference,
        fake,
        family=family,
        check=check,
        setup_context=setup_context,
        backward=backward,
        plain=declared.plain,
        function=function,
    )


def _signature(declared: Declared) -> Signature:
    from ..build.describe.schema import signature_of  # parses; most processes never ask

    return signature_of(declared)


def _nothing(*_: Any, **__: Any) -> None:
    """The fake kernel of an op that returns nothing."""


def _fake(signature: Callable[[], Signature]) -> Callable[..., Any]:
    return lambda *args, **named: results_of(signature(), *args, **named)


def checks_of(
    name: str, function: str, more: Callable[..., None] | None = None
) -> Callable[..., None]:
    """What raises if arguments, by position, are not what the declaration of ``name`` and ``more``
    require; for a Python function that writes before it calls the operator. While torch.compile
    traces, the operator's fake kernel is what raises."""
    declared = families.OPERATORS[name][1]
    check = _checking(f"flexops.{function}", functools.partial(_signature, declared), more)

    def checked(*args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        names = _signature(declared).names
        _register.check_places(f"flexops.{function}", dict(zip(names, args, strict=False)))
        check(*args)

    return checked


def _checking(
    label: str, signature: Callable[[], Signature], more: Callable[..., None] | None
) -> Callable[..., None]:
    def check(*args: Any, **named: Any) -> None:
        known = signature()
        check_arguments(label, known, dict(zip(known.names, args, strict=False)) | named)
        if more is not None:
            more(*args, **named)

    return check


def _saving(text: str, saves: Sequence[str], backward: Callable[..., Any]) -> tuple[Any, Any]:
    arguments = _register.arguments_of(text)
    numbers = [name for name, type_ in arguments if not type_.startswith("Tensor")]
    results = text.rpartition("-> ")[2].split(", ")
    return saving([name for name, _ in arguments], numbers, results, saves, backward)


def saving(
    names: Sequence[str],
    numbers: Sequence[str],
    results: Sequence[str],
    saves: Sequence[str],
    backward: Callable[..., Any],
) -> tuple[Callable[..., None], Callable[..., tuple[Any, ...]]]:
    """``setup_context``, which keeps the tensors ``saves`` and, as attributes, the ``numbers``; and
    ``backward`` with None for every argument that it leaves off."""

    def keep(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
        made = result if isinstance(result, tuple) else (result,)
        there = dict(zip((*names, *results), (*args, *made), strict=True))
        ctx.save_for_backward(*(there[name] for name in saves))
        for name in numbers:
            setattr(ctx, name, there[name])

    def gradient(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        made = backward(ctx, *gradients)
        made = made if isinstance(made, (tuple, list)) else (made,)
        return (*made, *(None,) * (len(names) - len(made)))

    return keep, gradient


def _check_rows(label: str, signature: Signature, rows: Rows, given: dict[str, Any]) -> None:
    first, params = rows.lists[0], given[rows.lists[0]]
    if not params and signature.schema.results:
        raise ValueError(f"{label}: {first} must hold at least one tensor")
    for name in rows.every:
        tensors = given[name]
        if name in rows.optional and not tensors:
            continue
        joined = (
            name == rows.steps
            and len(tensors) == 1
            and tensors[0].shape == (len(params),)
            and tensors[0].is_contiguous()
        )
        if not joined and len(tensors) != len(params):
            raise ValueError(
                f"{label}: {name} must hold {len(params)} tensors, as {first} does, got"
                f" {len(tensors)}"
            )
        for i, (tensor, param) in enumerate(zip(tensors, params, strict=False)):
            if name == rows.steps:
                if not joined and tensor.numel() != 1:
                    raise ValueError(
                        f"{label}: {name}[{i}] must have one element, got shape"
                        f" {list(tensor.shape)}"
                    )
            elif block := dict(rows.blocks).get(name):
                if (
                    tensor.numel() < (least := -(-param.numel() // block))
                    or not tensor.is_contiguous()
                ):
                    what = (
                        f"a contiguous {str(tensor.dtype)[6:]} tensor of at least {least} elements"
                    )
                    raise ValueError(
                        f"{label}: {name}[{i}] must be {what}, got shape {list(tensor.shape)}"
                    )
            elif tensor.shape != param.shape:
                raise ValueError(
                    f"{label}: {name}[{i}] must have the shape of {first}[{i}],"
                    f" {list(param.shape)}, got {list(tensor.shape)}"
                )


def check_arguments(label: str, signature: Signature, given: dict[str, Any]) -> None:
    found: list[tuple[str, str, Tensor]] = []
    for argument in signature.schema.arguments:
        if argument.type != "Tensor":
            continue
        value, name = given.get(argument.name), argument.name
        if argument.many:
            items = [(f"{name}[{i}]", item) for i, item in enumerate(value or ())]
        else:
            items = [] if value is None and argument.optional else [(name, value)]
        for called, item in items:
            if not isinstance(item, Tensor):
                raise TypeError(f"{label}: {called} must be a tensor, got {type(item).__name__}")
            found.append((name, called, item))
    for name, called, tensor in found:
        if name in signature.numbers:
            if tensor.dtype != torch.float32 or tensor.numel() != 1:
                raise TypeError(
                    f"{label}: {called} must be a float32 tensor of one element, got"
                    f" {str(tensor.dtype)[6:]} {list(tensor.shape)}"
                )
            continue
        allowed = dict(signature.dtypes)[name]
        other = given.get(allowed[0])
        if isinstance(other, Tensor):
            if tensor.dtype != other.dtype:
                raise TypeError(
                    f"{label}: {called} must be {str(other.dtype)[6:]}, as {allowed[0]}, got"
                    f" {str(tensor.dtype)[6:]}"
                )
        elif str(tensor.dtype)[6:] not in allowed:
            raise TypeError(
                f"{label}: {called} must be {in_words(allowed)}, got {str(tensor.dtype)[6:]}"
            )
    if signature.rows:
        _check_rows(label, signature, signature.rows, given)
    for name, called, tensor in found:
        shape = dict(signature.shapes).get(name)
        if shape is not None and tuple(tensor.shape) != (wanted := _shape(label, shape, given)):
            whose = f"{shape}'s " if isinstance(given.get(shape), Tensor) else ""
            raise ValueError(
                f"{label}: {called} must have {whose}shape {list(wanted)}, got {list(tensor.shape)}"
            )
        layout = signature.layout(name)
        if layout.startswith("as ") and not _fits(tensor.shape, given[layout[3:]].shape):
            other = layout[3:]
            raise ValueError(
                f"{label}: {called} must be broadcastable to {other}, got shape"
                f" {list(tensor.shape)} for {list(given[other].shape)}"
            )


def _fits(shape: Sequence[int], other: Sequence[int]) -> bool:
    missing = len(other) - len(shape)
    return missing >= 0 and all(
        size == 1 or size == wanted for size, wanted in zip(shape, other[missing:], strict=True)
    )


def results_of(signature: Signature, *args: Any, **named: Any) -> Any:
    given = dict(zip(signature.names, args, strict=False)) | named
    first = given[signature.first][0] if signature.rows else given[signature.first]
    made = []
    for output in signature.outputs:
        like = given.get(output.dtype, output.dtype) if output.dtype else first
        like = first if like is None else like
        dtype = (
            like.dtype
            if isinstance(like, Tensor)
            else getattr(torch, like)
            if isinstance(like, str)
            else like
        )
        conditions = [
            argument
            for argument in signature.schema.arguments
            if argument.name in output.conditions
        ]
        there = all(
            given[one.name] is not None if one.optional else given[one.name] for one in conditions
        )
        if output.by_host:
            raise TypeError(f"{signature.schema.name} must have a fake kernel of its own")
        if there and output.order:
            made.append(empty_in_order(given[output.order], dtype))
            continue
        shape = (output.shape or signature.first) if there else (output.otherwise or "0")
        made.append(first.new_empty(_shape(signature.schema.name, shape, given), dtype=dtype))
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def empty_in_order(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A dense tensor of the shape of ``like``, whose dimensions lie in memory in the order of that
    one's, the last one innermost. A dimension of stride 0 keeps its place among its neighbours."""
    strides, order = like.stride(), list(range(like.dim()))
    for end in range(1, like.dim() - 1):
        at = end
        while at and 0 < strides[order[at - 1]] < strides[order[at]]:
            order[at - 1], order[at] = order[at], order[at - 1]
            at -= 1
    made = like.new_empty([like.shape[d] for d in order], dtype=dtype)
    return made.permute([order.index(d) for d in range(like.dim())])


_FEW = 1000
"""Calls of torch's operators that a reference may take to be verified without being needed."""


_SMALL = 1 << 20
"""Elements of the CPU's tensors for which a reference may compute to be verified."""


class _Few(TorchDispatchMode):
    """Raises where there are more."""

    left = _FEW

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("more than a few")
        return func(*args, **(kwargs or {}))


class _FewOfShapes(_Few):
    """Raises, too, where zeros are not as good as any values: they decide the shape of a result or
    the way on, draw random numbers, or reach a kernel that is not torch's."""

    _BY_VALUE = (
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.nondeterministic_seeded,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten" or any(tag in func.tags for tag in self._BY_VALUE):
            raise RuntimeError("of values")
        return super().__torch_dispatch__(func, types, args, kwargs)


def check_reference(
    what: str,
    fix: str,
    reference: Callable[..., Any],
    declared: Callable[..., Any],
    args: Sequence[Any],
) -> bool:
    """Verify the results of a reference that is not needed, as ``check_results`` does: on tensors
    of ``meta``, which compute nothing. One that cannot run there, or has many steps, is not
    verified.

    torch imports its compiler for most operators of ``meta``, which takes two seconds. Before that,
    zeros are tried for a call with small tensors of the CPU; what they contradict, meta decides.

    Returns whether that need not be done again: a trace's sizes may have no numbers, and a mode of
    the caller's would see it.
    """
    tensors = [one for arg in args for one in _listed(arg) if isinstance(one, Tensor)]
    if not only_fake_mode() or not all(
        type(size) is int for one in tensors for size in (*one.shape, *one.stride())
    ):
        return False
    on_cpu = all(one.device.type == "cpu" for one in tensors)
    small = on_cpu and "torch._dynamo" not in sys.modules and sum(map(_extent, tensors)) <= _SMALL
    if small:
        with contextlib.suppress(Exception):  # then meta decides
            of_zeros = _results("cpu", _FewOfShapes, reference, declared, args)
            check_results(what, fix, *of_zeros, args)
            return True
    found = None
    with contextlib.suppress(Exception):
        found = _results("meta", _Few, reference, declared, args)
    if found is not None:
        check_results(what, fix, *found, args)
    return True


def _results(
    place: str, few: type[_Few], reference: Callable[..., Any], declared: Callable[..., Any],
    args: Sequence[Any],
) -> tuple[Any, Any]:  # fmt: skip
    """What a reference gives on that device, and what is declared, of like arguments."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        with few():
            made = reference(*(_on(place, arg) for arg in args))
        return made, declared(*(_on("meta", arg) for arg in args))


def _on(place: str, arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_on(place, one) for one in arg]
    if isinstance(arg, torch.device):
        return torch.device(place)
    if not isinstance(arg, Tensor):
        return arg
    made = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=place)
    return made.zero_() if place == "cpu" else made


def _extent(tensor: Tensor) -> int:
    """Elements of memory that a tensor's strides reach over."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def check_results(what: str, fix: str, found: Any, declared: Any, args: Sequence[Any]) -> None:
    """Raise if a reference's results have other shapes or dtypes than a kernel's. float64, which
    references compute for tests, has any."""
    shapes_only = any(isinstance(arg, Tensor) and arg.dtype == torch.float64 for arg in args)
    pairs = [
        [_described(one, shapes_only) for one in _listed(results)] for results in (found, declared)
    ]
    if pairs[0] != pairs[1]:
        raise FlexopsError(
            what,
            found=", ".join(pairs[0]) or "nothing",
            required=", ".join(pairs[1]) or "nothing",
            fix=fix,
        )


def _listed(results: Any) -> Sequence[Any]:
    if results is None:
        return ()
    return results if isinstance(results, (tuple, list)) else (results,)


def _described(result: Any, shapes_only: bool) -> str:
    if not isinstance(result, Tensor):
        return type(result).__name__
    dtype = "" if shapes_only else f"{str(result.dtype)[6:]} "
    return f"{dtype}{list(result.shape)}"


def _shape(label: str, text: str, given: dict[str, Any]) -> tuple[Any, ...]:
    from ..build.describe.schema import dimensions

    return tuple(size for part in dimensions(text) for size in _sizes(label, part, given))


def _sizes(label: str, part: Dimensions, given: dict[str, Any]) -> tuple[Any, ...]:
    if not part.name:
        return (part.number,)
    value = given[part.name]
    if isinstance(value, Tensor) and not part.single:
        return tuple(value.shape[part.first : part.last])
    return (_one_size(label, part, value) * part.times // part.over + part.plus,)


def _one_size(label: str, part: Dimensions, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return len(value) if part.many else value
    at = part.first or 0
    if not -value.dim() <= at < value.dim():
        least = -at if at < 0 else at + 1
        wanted = (
            "one dimension" if least == 1 else f"{least} dimensions, got shape {list(value.shape)}"
        )
        raise ValueError(f"{label}: {part.name} must have at least {wanted}")
    return value.shape[at]
