"""Whether a replacement computes what the class's own code does, tried on a miniature of the
module: a class's code changes from one release of a library to the next, and its name does not.

A miniature is made without the class's constructor, a few numbers wide, on the CPU, so that a model
on ``meta``, a sharded one or one of 70 B parameters is probed in the same milliseconds. Operators
run as plain PyTorch here: nothing is compiled for it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..nn import Int4Linear
from ..ops._register import references_only

Swap = list[tuple[nn.Module, Any]]
"""Modules, and what becomes their ``forward``."""
Miniature = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A small module with arguments for it."""

WIDTH, INNER, CLASSES, LENGTH = 8, 12, 13, 5
_NOT_COPIED = frozenset(nn.Module().__dict__) | {"forward", "_hf_hook", "_old_forward"}
_TOLERANCE = 1e-4
T = TypeVar("T")
_known: dict[Any, Any] = {}
"""What was found out of classes. Each is probed once in a process."""
_FOREIGN = {
    "transformers_modules": "its code came with the model (trust_remote_code)",
    "liger_kernel": "Liger has replaced it before",
}
"""Whose code is not replaced."""


def once(key: Any, find: Callable[[], T]) -> T:
    if key not in _known:
        _known[key] = find()
    found: T = _known[key]
    return found


def foreign(code: Any) -> str:
    """Why a function, or a class, is left alone whatever it computes; "" for most."""
    package = str(getattr(inspect.unwrap(code), "__module__", "")).partition(".")[0]
    return _FOREIGN.get(package, "")


def is_transformers(code: Any) -> bool:
    """Whether a function is transformers' own: under its names others may be registered."""
    return str(getattr(code, "__module__", "")).partition(".")[0] == "transformers"


def class_of(module: nn.Module) -> type:
    """A module's class without those that FSDP2 puts before it, which cannot be copied."""
    return next(
        one
        for one in type(module).__mro__
        if "__deepcopy__" not in one.__dict__ and not one.__module__.startswith("torch.distributed")
    )


def own_class(module: nn.Module) -> type:
    """The class whose ``forward`` a module runs."""
    return next(cls for cls in type(module).__mro__ if "forward" in cls.__dict__)


def own_code(module: nn.Module) -> Any:
    """That ``forward``, as its class has it."""
    return own_class(module).__dict__["forward"]


def arguments(module: nn.Module) -> dict[str, inspect.Parameter]:
    """What it takes beside the module; nothing if that cannot be read."""
    try:
        found = list(inspect.signature(own_code(module)).parameters.items())
    except (TypeError, ValueError):
        return {}
    return dict(found[1:])


def bare(module: nn.Module, **children: Any) -> Any:
    """A module of the same class with the same settings, and these children and parameters."""
    made: Any = object.__new__(class_of(module))
    nn.Module.__init__(made)
    made.__dict__.update(
        {
            name: value
            for name, value in module.__dict__.items()
            if name not in _NOT_COPIED and not name.startswith("__")  # FSDP2's state, say
        }
    )
    for name, value in children.items():
        setattr(made, name, value)
    return made.eval()


def settings(module: nn.Module) -> Any:
    """What a module's code may depend on: numbers, functions and kinds of parts. Its
    place in the model (``layer_idx``) is none, so that a class is probed once."""
    parts = tuple(
        (name, type(part), getattr(part, "bias", None) is None)
        for name, part in module._modules.items()
    )
    config = vars(module).get("config")
    shared = values_of(config) if hasattr(config, "__dict__") or isinstance(config, dict) else ()
    return values_of(module), shared, parts, tuple(module._parameters)


def values_of(owner: Any) -> tuple[Any, ...]:
    """Numbers, names and functions; of a bound method its function, which keeps no model alive."""
    return tuple(
        (name, getattr(value, "__func__", value))
        for name, value in (owner if isinstance(owner, dict) else vars(owner)).items()
        if name not in ("training", "layer_idx", "layer_id", "forward")
        and (isinstance(value, (int, float, str, type(None))) or inspect.isroutine(value))
    )


def unheard(act: Any) -> Any:
    """The activation, without those who listen to its calls: what is tried here is none of
    theirs."""
    return bare(act, **dict(act.named_children())) if isinstance(act, nn.Module) else act


def by(forward: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Swap]:
    """What has a module run this ``forward`` with these options."""
    return lambda module: [(module, functools.partial(forward, module, **options))]


def small_sizes(*sizes: int) -> dict[int, int]:
    """Small numbers in place of sizes. What is twice another is so here, too."""
    made: dict[int, int] = {}
    for one in sorted(set(sizes)):
        half = one % 2 == 0 and made.get(one // 2)
        made[one] = 2 * half if half else 4 * (2 * len(made) + 3)
    return made


def small(module: Any, sizes: dict[int, int], **parts: Any) -> Any:
    """A module of the same class and settings with these parts, and with other sizes: of
    parameters, of other parts, and among its numbers and its config's."""
    if isinstance(module, (nn.Dropout, nn.Identity)):
        return nn.Identity()
    if type(module) in (nn.Linear, Int4Linear):
        inputs, outputs = module.in_features, module.out_features
        return linear(sizes.get(inputs, inputs), sizes.get(outputs, outputs), module)

    def like(x: Any) -> Any:
        return None if x is None else parameter(*(sizes.get(n, n) for n in x.shape))

    given = {name: like(one) for name, one in module._parameters.items()}
    given |= {
        name: None if one is None else small(one, sizes)
        for name, one in module._modules.items()
        if name not in parts
    }
    made = bare(module, **given | parts)
    for name, one in module._buffers.items():
        scalar = one is not None and one.dim() == 0
        value = torch.ones(()) if scalar else like(one)
        made.register_buffer(name, None if value is None else value.detach())
    if "config" in vars(module):
        made.config = copy.copy(module.config)
    for owner in (made, made.__dict__.get("config")):
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if type(value) is int and value in sizes:
                setattr(owner, name, sizes[value])
    return made


def linear(inputs: int, outputs: int, like: Any = None) -> nn.Linear:
    return nn.Linear(
        inputs,
        outputs,
        bias=like is None or getattr(like, "bias", None) is not None,
        dtype=torch.float32,
    )


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float32) * 0.5)


class Base(nn.Module):
    """Stands for a model, or a part of one, below a language model's head; and for its parts."""

    def __init__(self, real: Any) -> None:
        super().__init__()
        parts = {name: part for one in real.modules() for name, part in one._modules.items()}
        self.__dict__["parts"] = {
            name: isinstance(part, nn.Embedding) for name, part in parts.items()
        }
        for owner in (*parts.values(), real):  # of parts: how many tokens precede the text, say
            numbers = {key: one for key, one in vars(owner).items() if type(one) in (int, float)}
            self.__dict__.update(numbers if owner is real else dict.fromkeys(numbers, 0))
        decoder = real.get_decoder() if hasattr(real, "get_decoder") else real
        self.config = getattr(decoder, "config", None)
        self.embedding = nn.Embedding(CLASSES, WIDTH, dtype=torch.float32)

    def __getattr__(self, name: str) -> Any:
        own = name in self.__dict__.get("_modules", ())
        if own or name not in self.__dict__["parts"]:
            return super().__getattr__(name)
        return self.embedding if self.__dict__["parts"][name] else self

    def __getitem__(self, _: Any) -> Any:
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_decoder(self) -> Any:
        return self

    def forward(self, input_ids: Any = None, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        class Output(BaseModelOutputWithPast):
            """With whatever a wrapper asks its model for."""

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)

        if not isinstance(input_ids, Tensor):
            input_ids = torch.arange(2 * LENGTH).view(2, LENGTH) % CLASSES
        return Output(last_hidden_state=self.embedding(input_ids.long()))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Neither the caller's modes matter, nor are the caller's random numbers used up."""
    modes = (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    )
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack, torch.random.fork_rng([]), references_only():
        for mode in modes:
            stack.enter_context(mode)
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        torch.default_generator.manual_seed(0)  # and no GPU's
        yield


def disagreement(
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]],
    swap: Callable[[nn.Module], Swap],
    half: bool = False,
    without: str = "",
) -> str:
    """What differs between a miniature and the same with its ``forward`` swapped, result or
    gradients; "" if nothing does.

    Args:
        make: gives a miniature, and arguments for it.
        swap: gives the replacements for it.
        half: compare the results in bfloat16, too, and in training mode, with the same dropout.
        without: the output that the replacement must not compute.
    """
    try:
        with undisturbed():
            module, args, kwargs = make()
            expected = _run(module, args, kwargs)
            other = copy.deepcopy(module)
            for part, forward in swap(other):
                part.forward = forward
            actual = _run(other, args, kwargs, without)
            if half:
                for one, results in ((module, expected), (other, actual)):
                    torch.default_generator.manual_seed(0)
                    trained = _run(one.train(), args, kwargs)[0]
                    results += _run(one.eval().bfloat16(), _to_half(args), kwargs)[:1]
                    results.append(trained)
    except (Exception, SystemExit) as error:  # whatever code of another may raise
        return failure(error)
    if len(expected) != len(actual):
        return "on a small input it gives other tensors than the replacement"
    for a, b in zip(actual, expected, strict=True):
        if a.dtype != b.dtype:
            return f"it gives {b.dtype}, and the replacement {a.dtype}"
        rounding = _TOLERANCE if a.dtype == torch.float32 else 0.03
        if a.shape != b.shape or not torch.allclose(a, b, rounding, rounding):
            if half and b is expected[-1]:
                return "in training it drops something, or computes something else"
            return "on a small input it computes something else than the replacement"
    return ""


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def difference(
    theirs: Callable[..., Tensor], ours: Callable[..., Tensor], make: Callable[[], tuple[Any, ...]]
) -> str:
    """The same of two functions of tensors, which ``make`` gives."""
    return disagreement(lambda: (_Call(theirs), make(), {}), lambda tiny: [(tiny, ours)])


def failure(error: BaseException) -> str:
    return f"its code did not run on a small input: {first_line(error)}"


def first_line(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def _to_half(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.bfloat16() if _is_float(x) else x for x in args)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], without: str = ""
) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() if _is_float(x) else x for x in args]
    result = module(*inputs, **kwargs)
    if without and result.get(without) is not None:
        raise RuntimeError(f"the replacement has {without}, too")
    if isinstance(result, Tensor):
        output = result
    else:
        output = result[0] if isinstance(result, tuple) else result["loss"]
    weights = torch.linspace(-1.0, 1.0, output.numel()).view(output.shape) + 0.1
    sources = [
        x for x in (*inputs, *module.parameters()) if isinstance(x, Tensor) and x.requires_grad
    ]
    total = (output.float() * weights).sum()
    gradients = torch.autograd.grad(total, sources, allow_unused=True)
    pairs = zip(sources, gradients, strict=True)
    return [output.detach(), *(torch.zeros_like(x) if one is None else one for x, one in pairs)]
