"""How an op is registered with torch, once for all of them.

Python defines the schema, the fake kernel and the reference; a native library only adds kernels for
``CPU`` or ``CUDA``, and the dispatcher prefers those. The reference is what asks the loader for
that library, the first time it is reached on a device. So nothing but the dispatcher chooses
between native and reference, and once the library is loaded a call costs no Python of ours.

An op of flexops' own is registered when flexops is imported (:func:`declare`), and gets its
functions when the module that has them is (:func:`supply`): at the first use of a public function,
or, if torch reaches the op before that, with all the others.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple, NoReturn

import torch

from .._torch import (
    after_versions,
    any_requires_grad,
    apply_of,
    below_autograd,
    below_versions,
    builtin,
    compiler,
    define_with_fake,
    forward_mode,
    has_kernel,
    is_compiling,
    is_grad_enabled,
    is_transforming,
    schema_of,
)
from ..build import load
from ..build.describe.spec import FLEXOPS, Project
from ..errors import NO_CODE

_libraries: dict[str, torch.library.Library] = {}
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


_families: dict[str, list[str]] = {}
_differentiable: dict[Any, type[torch.autograd.Function]] = {}
"""The function that autograd knows an op by."""
_refusing: set[Any] = set()
"""Those of them whose gradient is the error that they have none."""
tangents: dict[Any, Callable[..., Any]] = {}
"""The derivative in forward mode of each op that has one: ``(ctx, *tangents) -> tangents``."""
_applies: dict[Any, Callable[..., Any]] = {}
_callers: dict[Any, Callable[..., Any]] = {}
_with_autograd: set[str] = set()
"""The ops (``op.name()``) that are registered for ``Autograd``."""
public: dict[str, Any] = {}
"""For each overload (its name) that is the forward pass of another one where there is a gradient,
that one."""
references: dict[str, Callable[..., Any]] = {}
"""The reference of each op (``op.name()``) whose module is imported, which native kernels are
verified against."""


def declare(
    schema: str,
    *,
    family: str = "",
    plain: bool = False,
    hidden: bool = False,
    gradient: bool = False,
    tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,),
    project: Project = FLEXOPS,
) -> None:
    """Register ``torch.ops.<project>.<name>``, whose functions :func:`supply` brings.

    Args:
        schema: ``name(arguments) -> results``, without the namespace, defaults and keyword-only
            arguments. ``name.overload`` is another one of the op ``name``, which is there already.
        family: the op's name in the catalogue: which native library implements it. "" for none.
        plain: the library has the op a second time, as ``<name>_plain``, below autograd: ``caller``
            takes that one where nothing requires a gradient, and is spared the guard that keeps the
            op from coming back to Python, which takes torch as long as a small tensor does.
        hidden: the op is invisible to autograd: its results never require a gradient, and it is not
            for users.
        gradient: :func:`add_gradient` will give it one.
        project: whose op it is.
    """
    name = schema.partition("(")[0]
    op = f"{project.name}::{name}"
    library = _libraries.get(project.name)
    if library is None:
        library = _libraries[project.name] = torch.library.Library(project.name, "FRAGMENT")
    define_with_fake(library, schema, functools.partial(_run_fake, op), tags)
    library.impl(name, functools.partial(_run, op), "CompositeExplicitAutograd")
    if family:
        _families.setdefault(project.label(family), []).append(op)
    if hidden:
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    if gradient:
        _impl_autograd(library, op)
    if plain:
        plain_schema = schema.replace(name, f"{name}_plain", 1)
        declare(plain_schema, family=family, hidden=True, tags=tags, project=project)
        # modes and subclasses of tensors see the op that was called
        library.impl(
            f"{name}_plain", lambda *args, **kwargs: operator_of(op)(*args, **kwargs), "Python"
        )


def supply(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    family: str = "",
    check: Callable[..., None] | None = None,
    always: Callable[..., None] | None = None,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    plain: bool = False,
    function: str = "",
    project: Project = FLEXOPS,
) -> None:
    """Give a declared op its functions.

    Args:
        schema, family, plain, project: as for :func:`declare`.
        reference: plain PyTorch with the schema's arguments; must not alias its inputs unless the
            schema says so.
        fake: gives the results' shapes, dtypes and devices from fake tensors.
        check: with the schema's arguments, raises if one is not as the public function says, in its
            words. It is asked before the reference and the fake kernel, and by ``caller`` after
            native kernels have rejected an argument: these check in less time, and a call that is
            right waits for no Python. That all tensors are dense and on one device needs no check
            of the op's own.
        always: the part of ``check`` that native kernels lack: asked where the op itself is called
            above autograd. ``caller`` leaves it to the public function.
        setup_context: ``(ctx, arguments, results)``, saves what ``backward`` needs; with
            ``backward``, for an op that has a gradient.
        backward: ``(ctx, *gradients of the results) -> one gradient or None for every argument``. A
            gradient that is not requested is None coming in (not all of them are), and need not be
            made going out (``ctx.needs_input_grad``). It is differentiable once: asking for more
            raises.
        function: the public function that errors name, if its name is not the op's.
    """
    name = schema.partition("(")[0]
    called = f"{project.name}.{function or name}"
    refuse = _refusal(called, [argument for argument, _ in arguments_of(schema)], check)
    for op in (f"{project.name}::{name}", *([f"{project.name}::{name}_plain"] if plain else ())):
        implementation = _loading(project.label(family), op, reference) if family else reference
        references[op] = reference
        _parts[op] = _Parts(
            _libraries[project.name],
            f"{op}_plain" if plain and not op.endswith("_plain") else "",
            refuse,
            called,
            always,
            _checked(refuse, implementation),
            _checked(refuse, fake),
        )
    if backward is not None and setup_context is not None:
        add_gradient(operator_of(f"{project.name}::{name}"), setup_context, backward)


def define(
    family: str,
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    check: Callable[..., None] | None = None,
    always: Callable[..., None] | None = None,
    native: bool = True,
    project: Project = FLEXOPS,
) -> None:
    """:func:`declare` and :func:`supply`, for an op that only now is known. ``native``: its family
    has kernels for it."""
    family = family if native else ""
    declare(schema, family=family, project=project)
    supply(schema, reference, fake, family=family, check=check, always=always, project=project)


@functools.cache
def operator_of(qualified: str) -> Any:
    """``namespace::name`` or ``namespace::name.overload``, as torch has it."""
    namespace, _, name = qualified.partition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


class _Parts(NamedTuple):
    """An op's functions, and what its gradient is put together with."""

    library: torch.library.Library
    plain: str
    refuse: Callable[..., None]
    called: str
    always: Callable[..., None] | None
    implementation: Callable[..., Any]
    fake: Callable[..., Any]


_parts: dict[str, _Parts] = {}


def _parts_of(op: str) -> _Parts:
    """Of an op by its name, whose module may not be imported yet."""
    if op not in _parts:
        supply_all()
    return _parts[op]


def supply_all() -> None:
    """Import every module of operators: afterwards each op has its functions."""
    for module in iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_"):
            import_module(f"{__package__}.{module.name}")


def _run(op: str, *args: Any, **kwargs: Any) -> Any:
    return _parts_of(op).implementation(*args, **kwargs)


def _run_fake(op: str, *args: Any, **kwargs: Any) -> Any:
    return _parts_of(op).fake(*args, **kwargs)


def _impl_autograd(library: torch.library.Library, op: str) -> None:
    if op not in _with_autograd:
        _with_autograd.add(op)
        library.impl(op.partition("::")[2], functools.partial(_autograd, op), "Autograd")


def _below(op: Any) -> Callable[..., Any]:
    """What calls an op where nothing requires a gradient."""
    plain = _parts[op.name()].plain
    return builtin(operator_of(plain)) if plain else functools.partial(_below_autograd, builtin(op))


def add_gradient(
    op: Any,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., Any],
    *,
    forward: str = "",
) -> None:
    """Give an op that is defined its gradient; arguments as for :func:`define`.

    ``forward`` names a hidden overload of the op with the same arguments, which runs instead where
    there will be a gradient. Behind the op's results it has what ``backward`` needs;
    ``setup_context`` gets all of them. Being an overload, it is the same operator to dispatch modes
    and to profilers.
    """
    if forward:
        public[forward] = op
    parts = _parts[op.name()]
    _refusing.discard(op)
    function = _differentiable[op] = _function(op, forward, setup_context, backward)
    _impl_autograd(parts.library, op.name())
    transformed = (
        _no_transform(parts.called)
        if schema_of(op).is_mutable
        else _functional(op, forward, setup_context, backward)
    )
    apply, transformed = (
        _without_lists(op, parts.called, one) for one in (apply_of(function), transformed)
    )
    _applies[op] = apply
    _callers[op] = _caller(op, apply, _below(op), transformed)


def _without_lists(op: Any, called: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    lists = [
        (index, argument.name)
        for index, argument in enumerate(schema_of(op).arguments)
        if str(argument.type) == "List[Tensor]"
    ]
    return functools.partial(_apply_without_lists, called, lists, apply) if lists else apply


def _apply_without_lists(
    called: str, lists: list[tuple[int, str]], apply: Callable[..., Any], *args: Any
) -> Any:
    """torch looks for tensors among the arguments themselves: gradients of those in lists would be
    left out without a word."""
    for index, name in lists:
        if any_requires_grad(*args[index]):
            raise RuntimeError(
                f"{called} has no gradient for the tensors in {name}, a list: detach them, or call"
                " it under torch.no_grad()"
            )
    return apply(*args)


def reference_of(op: str) -> Callable[..., Any] | None:
    """By the op's name; None for an op of others."""
    if op.startswith(f"{FLEXOPS.name}::") and op not in references:
        supply_all()
    return references.get(op)


def has_gradient(op: Any) -> bool:
    return op in _differentiable and op not in _refusing


def refusal_of(op: Any) -> Callable[..., None]:
    """What raises for arguments that the op's ``check`` does not take."""
    return _parts_of(op.name()).refuse


def guard_gradient(op: Any) -> None:
    """Report that an op has no gradient where one is needed, where torch would leave it
    out without a word; :func:`add_gradient` may still give it one. And whoever writes a tensor that
    a backward pass has saved: native kernels do not count that."""
    schema, parts, below = schema_of(op), _parts[op.name()], _below(op)
    name = schema.name.partition("::")[2]
    what = f"{parts.called} has no gradient: call it under torch.no_grad(), or on detached tensors"
    if not schema.is_mutable:
        add_gradient(
            op,
            _saves_nothing,
            functools.partial(_no_gradient, f"{what}, or give it one (@{name}.backward)"),
        )
        _refusing.add(op)
        return

    def guarded(*args: Any) -> Any:
        if parts.always is not None:
            parts.always(*args)
        return (
            _no_gradient(what) if is_grad_enabled() and any_requires_grad(*args) else below(*args)
        )

    parts.library.impl(name, guarded, "Autograd")
    _callers[op] = _caller(op, guarded, below, op)
    written = [
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    parts.library.impl(
        name, functools.partial(_count_writes, op, written), "ADInplaceOrView", with_keyset=True
    )


def _saves_nothing(*_: Any) -> None:
    pass


def _no_gradient(what: str, *_: Any) -> Any:
    raise RuntimeError(what)


def _count_writes(op: Any, written: list[int], keys: Any, *args: Any) -> Any:
    for index in written:
        for tensor in args[index] if isinstance(args[index], (list, tuple)) else (args[index],):
            if tensor is not None:
                torch.autograd.graph.increment_version(tensor)
    with below_versions():
        return op.redispatch(keys & after_versions, *args)


def caller(op: Any) -> Callable[..., Any]:
    """What gives what ``op`` does at less cost: an op with a gradient goes through Python twice, if
    it is called itself, and through none of autograd's if nothing requires a gradient.

    Public functions call ops through this, before anything is checked: what native kernels reject
    is looked at by the op's ``check``, for its wording.
    """
    if op not in _callers:
        _parts_of(op.name())  # its module may add the op
    if op not in _callers:
        below = _below(op)
        _callers[op] = _caller(op, below, below, op)
    return _callers[op]


def _caller(
    op: Any,
    apply: Callable[..., Any],
    plain: Callable[..., Any],
    transformed: Callable[..., Any],
) -> Callable[..., Any]:
    refuse = _parts[op.name()].refuse

    def call(*args: Any) -> Any:
        if is_compiling() or compiler._is_compiling_flag:
            return op(*args)
        try:
            if is_transforming() or forward_mode._current_level >= 0:
                return transformed(*args)
            return apply(*args) if is_grad_enabled() and any_requires_grad(*args) else plain(*args)
        except (RuntimeError, TypeError) as error:
            try:
                refuse(*args)
                _refuse_kind(op, str(error))
            except Exception as clearer:  # that error in better words, shown once
                raise clearer from None
            raise

    return call


_WRONG_KIND = (  # compiled only when it is used
    r"Expected a value of type '([^']*)' for argument '(\w+)' but instead found type '([^']*)'"
)
_KINDS = {"float": "a number", "int": "a whole number", "bool": "True or False"}


def _refuse_kind(op: Any, said: str) -> None:
    """Raise, in the public function's words, what the dispatcher says of a number of another
    type."""
    if not (found := re.search(_WRONG_KIND, said)):
        return
    wanted, name, given = found.groups()
    inner = wanted.removeprefix("Optional[").removesuffix("]")
    if inner in _KINDS:
        required = _KINDS[inner] + (" or None" if inner != wanted else "")
        raise TypeError(f"{_parts[op.name()].called}: {name} must be {required}, got {given}")


def _below_autograd(op: Callable[..., Any], *args: Any) -> Any:
    with below_autograd():
        return op(*args)


def is_tracing() -> bool:
    """Whether a call is seen by a compiler, which asks the op's fake kernel."""
    return is_compiling() or bool(compiler._is_compiling_flag)


def _autograd(name: str, *args: Any) -> Any:
    """What the dispatcher does for ``Autograd``, where tracing, too, has to get below it. torch
    rejects here to differentiate by ``torch.func``, which public functions do elsewhere."""
    always, op = _parts_of(name).always, operator_of(name)
    if always is not None:
        always(*args)
    if is_grad_enabled() and any_requires_grad(*args):
        return (_differentiable[op].apply if is_transforming() else _applies[op])(*args)
    return _below_autograd(builtin(op), *args)


def _function(
    op: Any,
    forward: str,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., Any],
) -> type[torch.autograd.Function]:
    """``forward``, if there is one, computes the results, with more behind them, which is only
    kept."""
    count, more = len(schema_of(op).returns), bool(forward)
    shown = 0 if count == 1 else slice(count)
    below = builtin(operator_of(forward)) if forward else _below(op)

    def run(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        results = below(*args)
        setup_context(ctx, args, results)
        return results[shown] if more else results

    def differentiate(ctx: Any, *gradients: Any) -> Any:
        for gradient in gradients:
            if gradient is not None:
                return once(ctx, *gradients)
        return (None,) * len(ctx.needs_input_grad)

    once = once_differentiable(backward)
    jvp = functools.partial(no_forward_mode, _parts[op.name()].called)
    parts: dict[str, Callable[..., Any]]
    parts = {"forward": run, "backward": differentiate, "jvp": jvp}
    # torch names the backward after the class when it is made: errors and profiles show it
    members = {label: staticmethod(function) for label, function in parts.items()}
    return type(_name_of(op), (torch.autograd.Function,), members)


def no_forward_mode(function: str, *_: Any) -> NoReturn:
    """What every ``jvp`` is: torch's own error names none of the functions."""
    what = (
        f"{function} has no derivative in forward mode (torch.func.jvp, jacfwd, hessian;"
        " forward_ad)"
    )
    raise NotImplementedError(f"{what}: use reverse mode: torch.func.vjp, jacrev or grad")


def transformable(
    name: str,
    forward: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    jvp: Callable[..., Any],
) -> type[torch.autograd.Function]:
    """An autograd function that transforms of ``torch.func`` take."""
    parts = {"forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp}
    members = {label: staticmethod(function) for label, function in parts.items()}
    return type(name, (torch.autograd.Function,), {"generate_vmap_rule": True, **members})


def _name_of(op: Any) -> str:
    return str(op).partition(".default")[0].rpartition(".")[2]


class _Once(torch.autograd.Function):
    """The first ``count`` tensors, which depend on all of them in a way that has no derivative
    here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    jvp = staticmethod(functools.partial(no_forward_mode, "flexops: a gradient"))

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(
            "flexops: trying to differentiate twice: operators of flexops have a first derivative"
            " only"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """An autograd function's ``backward`` whose results raise if they are differentiated. (torch's
    own decorator notices that only if the gradients that come in require a gradient, and leaves a
    gradient penalty out without a word.)"""

    @functools.wraps(backward)
    def entry(ctx: Any, *gradients: Any) -> Any:
        if is_compiling() or not is_grad_enabled():
            return backward(ctx, *gradients)
        return _once(backward, ctx, *gradients)

    return entry


def _once(backward: Callable[..., Any], ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """``backward`` where its results may be differentiated again."""
    sources = [tensor for tensor in (*ctx.saved_tensors, *gradients) if tensor is not None]
    with torch.no_grad():
        results = list(backward(ctx, *gradients))
    there = [i for i, result in enumerate(results) if result is not None]
    for i, result in zip(
        there, _Once.apply(len(there), *(results[i] for i in there), *sources), strict=True
    ):
        results[i] = result
    return tuple(results)


def _no_transform(function: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise RuntimeError(
            f"{function}: what is written in place has no gradient under torch.func: leave"
            " inplace=True out (docs/training.md)"
        )

    return refuse


def _functional(
    op: Any, forward: str, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The same for transforms of ``torch.func``, which want forward and context apart, and
    everything that is kept among the results."""
    count = len(schema_of(op).returns)

    # made when it is first needed: most processes need none, and to make a class takes as long as a
    # call
    @functools.cache
    def function() -> type[torch.autograd.Function]:
        native = operator_of(forward) if forward else op

        def run(*args: Any) -> Any:
            with below_autograd():
                return native(*args)

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            # gradients that were not requested are zeros: torch 2.4's vmap takes no None
            setup_context(ctx, inputs, output)
            if op in tangents:
                ctx.save_for_forward(*ctx.to_save)

        def differentiate(ctx: Any, *gradients: Any) -> Any:
            return _once(backward, ctx, *gradients[:count])

        def jvp(ctx: Any, *given: Any) -> Any:
            known = tangents.get(op) or functools.partial(no_forward_mode, _parts[op.name()].called)
            return known(ctx, *given)

        return transformable(_name_of(op), run, setup, differentiate, jvp)

    def call(*args: Any) -> Any:
        results = function().apply(*args)
        return results if not forward else results[0] if count == 1 else results[:count]

    return call


def arguments_of(schema: str) -> list[tuple[str, str]]:
    """Their names and types, without the parser, which most processes never import."""
    pieces = [
        argument.partition("=")[0].rpartition(" ")
        for argument in schema.partition("(")[2].partition(") ->")[0].split(", ")
    ]
    return [(name, type_) for type_, _, name in pieces if name != "*"]


def _refusal(
    function: str, names: list[str], check: Callable[..., None] | None
) -> Callable[..., None]:
    """What raises if the arguments are not what any op takes (see :func:`check_places`), or not as
    ``check`` requires them."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        check_places(function, dict(zip(names, args, strict=False)) | kwargs)
        if check is not None:
            check(*args, **kwargs)

    return refuse


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""What torch.compile of torch 2.4 cannot ask for an attribute."""


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; without importing torch.distributed if it is unused."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local")


def check_places(function: str, arguments: dict[str, Any]) -> None:
    """Raise if a tensor is not dense, or not where the first one is: to the dispatcher, one on
    ``meta`` is enough to compute nothing."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in _tensors(arguments):
        if tensor.is_quantized or not is_dense(tensor):
            found = (
                "a quantized one"
                if tensor.is_quantized
                else "a nested one"
                if tensor.is_nested
                else str(tensor.layout)
            )
            raise TypeError(f"{function}: {name} must be a dense (strided) tensor, got {found}")
        if is_distributed(tensor):
            fix = (
                f"call it in the forward pass of the module that holds {name}, where fully_shard"
                f" has gathered it, or with {name}.full_tensor()"
            )
            raise TypeError(
                f"{function}: {name} must be a plain tensor, got a DTensor, of which each rank has"
                f" a part: {fix} (docs/training.md)"
            )
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise ValueError(
                f"{function}: {name} must be on the device of {first[0]}, {first[1]}, got"
                f" {tensor.device}"
            )


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """With their names; those of a list have numbers."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield f"{name}[{index}]", item


def _checked(refuse: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


class _Thread(threading.local):
    references_only = False


_thread = _Thread()


@contextlib.contextmanager
def references_only() -> Iterator[None]:
    """On this thread, inside, no native library is looked for: what is not loaded runs as plain
    PyTorch."""
    before, _thread.references_only = _thread.references_only, True
    try:
        yield
    finally:
        _thread.references_only = before


def has_native(family: str, device: str) -> bool:
    """Whether a call may count on native kernels: they are loaded if they are available, but not
    inside of :func:`references_only`."""
    from ..build.load import loader  # most processes that import flexops call few of its operators

    return not _thread.references_only and loader.ensure(family, device)


def _loading(family: str, op: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference, preceded by the search for something better."""

    @functools.wraps(reference)
    def entry(*args: Any, **kwargs: Any) -> Any:
        device = next(
            (
                tensor.device.type
                for _, tensor in _tensors(
                    {str(i): arg for i, arg in enumerate((*args, *kwargs.values()))}
                )
            ),
            "cpu",
        )
        if has_native(family, device) and has_kernel(op, _DISPATCH_KEYS[device]):
            return operator_of(op)(*args, **kwargs)
        return reference(*args, **kwargs)

    return entry


def _stand_in(family: str, key: str = "CUDA") -> None:
    """Let the references stand in for kernels that few calls launch, where these are not compiled
    and nothing may compile them.

    Native kernels raise before they have launched anything then. With a torch older than 2.9, which
    cannot call a replaced kernel.
    """
    get_kernel: Callable[..., Any] | None = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        return
    for op in _families.get(family, ()):
        if has_kernel(op, key):
            namespace, _, name = op.partition("::")
            standing = _standing(
                family, get_kernel(operator_of(op), key).call_boxed, references[op]
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns of what is meant here
                _libraries[namespace].impl(
                    name, standing, key, with_keyset=True, allow_override=True
                )


def _standing(
    family: str, kernel: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(keys, *args, **kwargs)
        except RuntimeError as error:
            if NO_CODE not in str(error):
                raise
            from ..build.load import loader

            loader.decline(family, "cuda", str(error), f"flexops build {family} --rare")
            return reference(*args, **kwargs)

    return call


load.when_lacking = _stand_in
