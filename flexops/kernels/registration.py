"""The operator of torch that a kernel is: the dispatcher, fake tensors, autograd."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .. import _torch
from ..errors import FlexopsError
from ..ops._register import no_forward_mode, transformable
from .schema import KernelSchema

_defined: dict[str, Registered] = {}
defining = threading.RLock()


class Registered:
    """An operator of torch; ``current`` is what it is now, because a cell of a notebook is run
    again and again."""

    def __init__(self, schema: KernelSchema, library: Any, op: Any, caller: str) -> None:
        self.schema, self.library, self.op, self.caller = schema, library, op, caller
        self.current: Any = None
        self.backward: Any = None
        self.setup_context: Any = None
        self.jvp: Any = None

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any, **more: Any) -> None:
        """``more``: torch's ``keyword_only_inputs``, where the schema has such arguments."""
        if self.setup_context:
            if more:
                self.setup_context(ctx=ctx, inputs=inputs, output=output, **more)
            else:
                self.setup_context(ctx, inputs, output)

    def differentiate(self, ctx: Any, *gradients: Any) -> Any:
        return self.backward(ctx, *gradients) if self.backward else _no_gradient(self)

    def call(self, *args: Any) -> Any:
        """The operator, with the arguments in the schema's order."""
        named = [one.name for one in self.schema.arguments if one.keyword_only]
        first = len(args) - len(named)
        return self.op(*args[:first], **dict(zip(named, args[first:], strict=True)))

    def transformed(self, *args: Any) -> Any:
        """A call inside of a transform of ``torch.func``, or in forward mode."""
        if self.schema.functional:
            return self._function().apply(*args)
        if _torch.forward_mode._current_level >= 0 and any(map(_is_dual, args)):
            no_forward_mode(self.schema.qualname)
        return self.call(*args)

    @functools.cache  # noqa: B019 - an operator is there for the life of its process
    def _function(self) -> type[torch.autograd.Function]:
        """``torch.library``'s is not one that transforms take."""
        names = [one.name for one in self.schema.arguments if one.keyword_only]

        def forward(*args: Any) -> Any:
            with _torch.below_autograd():
                return self.call(*args)

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if not names:
                return self.setup(ctx, inputs, output)
            more = dict(zip(names, inputs[-len(names) :], strict=True))
            return self.setup(ctx, inputs[: -len(names)], output, keyword_only_inputs=more)

        def backward(ctx: Any, *gradients: Any) -> Any:
            given = self.differentiate(ctx, *gradients)
            given = given if isinstance(given, (tuple, list)) else (given,)
            return (*given, *(None,) * len(names))

        def jvp(ctx: Any, *tangents: Any) -> Any:
            known = self.jvp or functools.partial(no_forward_mode, self.schema.qualname)
            return known(ctx, *tangents)

        return transformable("Functional", forward, setup, backward, jvp)


def register(
    schema: KernelSchema, gradient: tuple[Callable[..., Any] | None, ...], caller: str
) -> Registered:
    known = _defined.get(schema.qualname)
    if known and caller != known.caller:
        raise FlexopsError(
            f"there is an operator {schema.qualname} already",
            found=f"{known.schema.text}, defined in {known.caller}",
            required="one definition",
            fix=f'a namespace of your own: "{caller.partition(".")[0]}::{schema.text}"',
        )
    if known and known.schema.text != schema.text:
        _torch.forget(known.library)
        known = None
    if known is None:
        known = _defined[schema.qualname] = _new(schema, caller)
    known.backward, known.setup_context, known.jvp = gradient
    return known


def _new(schema: KernelSchema, caller: str) -> Registered:
    namespace, _, name = schema.qualname.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        library.define(
            (
                schema.text.partition("::")[2]
                if "::" in schema.text.partition("(")[0]
                else schema.text
            ),
            tags=(torch.Tag.pt2_compliant_tag,),
        )
    except RuntimeError as error:  # another module's operator of this name
        raise FlexopsError(
            f"{schema.qualname} cannot be defined",
            found=str(error).splitlines()[0],
            fix="another name or namespace",
        ) from None
    made = Registered(schema, library, getattr(getattr(torch.ops, namespace), name).default, caller)
    library.impl(name, lambda *args, **kwargs: made.current.native(*args, **kwargs), "CUDA")
    library.impl(
        name,
        lambda *args, **kwargs: made.current.elsewhere(*args, **kwargs),
        "CompositeExplicitAutograd",
    )
    torch.library.register_fake(
        schema.qualname, lambda *args, **kwargs: made.current.faked(*args, **kwargs), lib=library
    )
    if not schema.tensors:
        return made
    if schema.functional:
        _let_differentiate(made)
    else:
        library.impl(name, functools.partial(_guarded, made), "Autograd")
    return made


def _let_differentiate(made: Registered) -> None:
    """Register the gradient, be it there or not: torch would differentiate the reference on the
    CPU, and leave the gradient out elsewhere."""

    torch.library.register_autograd(
        made.schema.qualname, made.differentiate, setup_context=made.setup, lib=made.library
    )


def _is_dual(value: Any) -> bool:
    dual = torch.autograd.forward_ad.unpack_dual
    return isinstance(value, torch.Tensor) and dual(value).tangent is not None


def _guarded(made: Registered, *args: Any, **kwargs: Any) -> Any:
    """A kernel that writes its arguments, where autograd would look at it."""
    if _torch.is_grad_enabled() and _torch.any_requires_grad(*args, *kwargs.values()):
        _no_gradient(made)
    with _torch.below_autograd():
        return made.op(*args, **kwargs)


def _no_gradient(made: Registered) -> NoReturn:
    what = (
        f"{made.schema.qualname} has no gradient: call it under torch.no_grad(), or on detached"
        " tensors"
    )
    raise RuntimeError(
        f"{what}{', or give it one (backward=...)' if made.schema.functional else ''}"
    )
