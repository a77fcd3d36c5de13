"""How an op is registered with torch, once for all of them.

Python defines the schema, the fake kernel and the reference; a native library only adds kernels for ``CPU`` or ``CUDA``, and the dispatcher
prefers those. The reference is what asks the loader for that library, the first time it is reached on a device. So nothing but the dispatcher
chooses between native and reference, and once the library is loaded a call costs no Python of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..op_builder import loader

NAMESPACE = "flexops"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


_differentiable: dict[Any, type[torch.autograd.Function]] = {}
_callers: dict[Any, Callable[..., Any]] = {}
public: dict[Any, Any] = {}
"""For each op below autograd that stands in for another with the same arguments, that one."""
references: dict[Any, Callable[..., Any]] = {}
"""Each op's reference, which is what tests hold native kernels against."""


def define(
    family: str,
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    check: Callable[..., None] | None = None,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    forward: Any = None,
    plain: bool = False,
    below_autograd: bool = False,
    tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,),
) -> None:
    """Define ``torch.ops.flexops.<name>``.

    Args:
        family: the op's name in the catalogue: which native library implements it.
        schema: ``name(arguments) -> results``, without the namespace, defaults and keyword-only arguments.
        reference: plain PyTorch with the schema's arguments; must not alias its inputs unless the schema says so.
        fake: gives the results' shapes, dtypes and devices from fake tensors.
        check: with the schema's arguments, raises if one is not as the public function says, in its words. It is asked before the reference and the
            fake kernel (not about float64, in which references are differentiated), and by ``caller`` after native kernels have refused an argument:
            these check in less time, and a call that is right waits for no Python.
        setup_context: ``(ctx, arguments, results)``, saves what ``backward`` needs; with ``backward``, for an op that has a gradient.
        backward: ``(ctx, *gradients of the results) -> one gradient or None for every argument``. A gradient that nobody asked for is None
            coming in (not all of them are), and need not be made going out (``ctx.needs_input_grad``). It is differentiable once: asking for more raises.
        forward: an op below autograd with the same arguments, which runs instead where there will be a gradient. Behind this op's results it has what
            ``backward`` needs; ``setup_context`` gets all of them.
        plain: the library has the op a second time, as ``<name>_plain``, below autograd: ``caller`` takes that one where nothing requires a gradient, and
            is spared the guard that keeps the op from coming back to Python, which takes torch as long as a small tensor does.
        below_autograd: the op is invisible to autograd: its results never require a gradient, and it is not for users.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, _loading(family, name, _checked(check, reference)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _checked(check, fake), lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    references[op] = reference
    if below_autograd:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    below = functools.partial(_below_autograd, op._op)
    if plain:
        define(family, schema.replace(name, f"{name}_plain", 1), reference, fake, check=check, below_autograd=True, tags=tags)
        twin = getattr(getattr(torch.ops, NAMESPACE), f"{name}_plain").default
        below, public[twin] = twin._op, op
    if forward is not None:
        public[forward] = op
    apply = below
    if backward is not None and setup_context is not None:
        _differentiable[op] = _function(op, forward, setup_context, backward)
        apply = super(torch.autograd.Function, _differentiable[op]).apply  # type: ignore[misc]  # less the Python that torch has for functorch's sake
        _library.impl(name, functools.partial(_autograd, op, apply), "Autograd")
    _callers[op] = _caller(op, apply, below, check)


def _any_requires_grad(*args: Any) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _any_requires_grad)  # torch's own is half a microsecond faster


# Names of this module, because a call looks each of them up.
_is_compiling, _is_grad_enabled, _is_transforming = torch.compiler.is_compiling, torch.is_grad_enabled, torch._C._are_functorch_transforms_active


def caller(op: Any) -> Callable[..., Any]:
    """What gives what ``op`` does at less cost: an op with a gradient goes through Python twice, if it is called itself, and through none of
    autograd's if nothing requires a gradient.

    Public functions call ops through this, before anything is checked: what native kernels refuse is looked at by the op's ``check``, for its wording.
    """
    return _callers[op]


def _caller(op: Any, apply: Callable[..., Any], plain: Callable[..., Any], check: Callable[..., None] | None) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if _is_compiling() or _is_transforming():
            return op(*args)
        try:
            return apply(*args) if _is_grad_enabled() and _requires_grad(*args) else plain(*args)
        except (RuntimeError, TypeError):
            if check is not None:
                check(*args)
            raise

    return call


def _below_autograd(op: Any, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _autograd(op: Any, apply: Callable[..., Any], *args: Any) -> Any:
    """What the dispatcher does for ``Autograd``, where tracing, too, has to get below it. torch refuses here to differentiate by ``torch.func``."""
    if _is_grad_enabled() and _requires_grad(*args):
        return _differentiable[op].apply(*args) if _is_transforming() else apply(*args)
    return _below_autograd(op._op, *args)


def _function(op: Any, below: Any, setup_context: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]) -> type[torch.autograd.Function]:
    count = len(op._schema.returns)
    shown = 0 if count == 1 else slice(count)
    native, is_below = (op if below is None else below)._op, below is not None

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            if is_below:
                results = native(*args)
                setup_context(ctx, args, results)
                return results[shown]
            with torch._C._AutoDispatchBelowAutograd():
                results = native(*args)
            setup_context(ctx, args, results)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            for gradient in gradients:
                if gradient is not None:
                    return refuse_twice(ctx, *gradients) if _is_grad_enabled() else backward(ctx, *gradients)
            return (None,) * len(ctx.needs_input_grad)

    refuse_twice = torch.autograd.function.once_differentiable(backward)
    Differentiable.__name__ = Differentiable.__qualname__ = str(op).partition(".default")[0].rpartition(".")[2]
    return Differentiable


def _checked(check: Callable[..., None] | None, function: Callable[..., Any]) -> Callable[..., Any]:
    if check is None:
        return function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if args[0].dtype != torch.float64:
            check(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


def _loading(family: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference, preceded by the search for something better."""
    qualified = f"{NAMESPACE}::{name}"

    @functools.wraps(reference)
    def entry(*args: Any, **kwargs: Any) -> Any:
        device = next((tensor.device.type for tensor in _tensors((args, kwargs))), "cpu")
        if loader.ensure(family, device) and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, _DISPATCH_KEYS[device]):
            return getattr(getattr(torch.ops, NAMESPACE), name)(*args, **kwargs)
        return reference(*args, **kwargs)

    return entry


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
