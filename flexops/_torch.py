"""What flexops takes of torch that torch does not promise to keep: all of it, and nowhere else
(``tests/repository/test_promises.py`` looks), each with its reason; where a torch may come to be
without it, with what does without it.

Operators' tests ran with torch 2.4, 2.7, 2.10, 2.11 and 2.13, and their results were compared with
2.14 and 2.15, too (docs/targets.md). All that is here is in 2.13; of it, 2.4 has only
``_any_requires_grad`` not, and no ``donated_buffer``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch

# documented, of a module that is not
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad

# documented, of a module that is not
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

_C: Any = torch._C

CUDA_KEYS: Any = _C.DispatchKeySet(_C.DispatchKey.CUDA)
"""For ``redispatch``: an operator's kernel for CUDA, wherever its tensors are."""


class TorchDispatchMode(_TorchDispatchMode):
    """torch's, whose first call does not import ``torch._dynamo``, which takes two seconds.

    torch does so to keep ``torch.compile`` out of ``__torch_dispatch__``: a process that has not
    imported it compiles nothing.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call, unused-ignore]
        kept_out = cls.__dict__.get("__torch_dispatch__")
        own = getattr(kept_out, "__wrapped__", None)
        if not kept_out or not own:  # older torch leaves it as it is
            return

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # it has no ``disable`` while it is being imported
            compiler = hasattr(sys.modules.get("torch._dynamo"), "disable")
            return (kept_out if compiler else own)(self, func, types, args, kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


is_grad_enabled = torch.is_grad_enabled  # public, but a call looks it up: here that costs less

REPLICATES = "_replicate_for_data_parallel"
"""What ``torch.nn.DataParallel`` calls to copy each module of a model."""

_FLAG = "_is_compiling_flag"
is_compiling: Callable[[], bool] = (
    torch.compiler.is_dynamo_compiling
    if hasattr(torch.compiler, _FLAG)
    else torch.compiler.is_compiling
)
compiler: Any = (
    torch.compiler if hasattr(torch.compiler, _FLAG) else SimpleNamespace(_is_compiling_flag=False)
)
"""``is_compiling() or compiler._is_compiling_flag`` is what torch's function returns, in a third of
its time."""

forward_mode: Any = (
    forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=-1)
)
"""Inside a level of forward-mode differentiation, its ``_current_level`` is 0 or more."""


def _guard_by_keys() -> AbstractContextManager[None]:
    guard: AbstractContextManager[None] = _C._ExcludeDispatchKeyGuard(
        _C.DispatchKeySet(_C.DispatchKey.AutogradFunctionality)
    )
    return guard


below_autograd: Callable[[], AbstractContextManager[None]] = getattr(
    _C, "_AutoDispatchBelowAutograd", _guard_by_keys
)
"""Inside, the dispatcher passes autograd over."""

below_versions: Callable[[], AbstractContextManager[None]] = _C._AutoDispatchBelowADInplaceOrView
"""Inside, the dispatcher passes over autograd, and what counts the times that a tensor was
written."""

after_versions: Any = _C._after_ADInplaceOrView_keyset
"""The dispatch keys that come after that."""

not_compiled: Callable[..., Any] = getattr(
    getattr(torch, "_compile", None), "_disable_dynamo", torch.compiler.disable
)
"""Decorates what ``torch.compile`` leaves as it is; unlike the public one, without importing the
compiler."""


compiles_written_lists = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
"""Whether ``torch.compile`` takes ops that write lists of tensors: torch 2.4's stops with an error
of its own, where a break in the graph would do."""


def _any_requires_grad(*args: Any) -> bool:
    return any(
        (
            _any_requires_grad(*arg)
            if isinstance(arg, list)
            else isinstance(arg, torch.Tensor) and arg.requires_grad
        )
        for arg in args
    )


# torch's own is half a microsecond faster
any_requires_grad: Callable[..., bool] = getattr(_C, "_any_requires_grad", _any_requires_grad)

is_transforming: Callable[[], bool] = getattr(_C, "_are_functorch_transforms_active", lambda: True)
"""Whether inside of a transform of ``torch.func``; where that cannot be asked, every call takes the
way of such a one, which is right, and slower."""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, less the Python that torch has for functorch's sake."""
    found: Callable[..., Any] = getattr(
        super(torch.autograd.Function, function), "apply", function.apply
    )
    return found


def builtin(op: Any) -> Callable[..., Any]:
    """What calls an op with less Python than the op itself."""
    found: Callable[..., Any] = getattr(op, "_op", op)
    return found


schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An op's name, arguments and results; torch has no public way to ask for them."""

parse_schema: Callable[[str], Any] = _C.parse_schema
"""The same of a text, read as ``torch.library`` does."""


def forget(library: torch.library.Library) -> None:
    """Take back what the library defined: else a user's operator cannot be defined again in
    the same process, as notebooks do."""
    library._destroy()  # type: ignore[no-untyped-call, unused-ignore]


def define_with_fake(
    library: torch.library.Library,
    schema: str,
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """``library.define`` and ``torch.library.register_fake``, which looks through all modules and
    reads a source file for each operator: a third of what our import took. Torch's entry for the
    fake kernel is made first: afterwards torch would search the schema for objects, of which
    ours have none."""
    name = schema.partition("(")[0]
    qualified = f"{library.ns}::{name}"
    registry = getattr(getattr(torch._library, "simple_registry", None), "singleton", None)
    entry: Any = registry and registry.find(qualified)
    library.define(schema, tags=tags)  # type: ignore[no-untyped-call, unused-ignore]
    try:
        handle = entry.fake_impl.register(
            fake, f"flexops: {qualified}", lib=library, allow_override=True
        )
        library._registration_handles.append(handle)
    except (AttributeError, TypeError):  # another torch
        torch.library.register_fake(qualified, fake, lib=library)


has_kernel: Callable[[str, str], bool] = getattr(
    _C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True
)
"""Whether an op, named with its namespace, has a kernel of its own for a dispatch key: a library
that was loaded has one for each of its ops."""

count_of_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)
"""How many dispatch modes are active; where that cannot be asked, calls go by the dispatcher, which
knows."""


def only_fake_mode() -> bool:
    """Whether no dispatch mode is active that sees what is called, but fake tensors' own."""
    top = getattr(_C, "_get_dispatch_stack_at", lambda _: None)
    active = count_of_modes()
    return not active or (active == 1 and isinstance(top(0), FakeTensorMode))


current_gpu: Callable[[], int] = getattr(_C, "_cuda_getDevice", lambda: torch.cuda.current_device())
"""The number of torch's current GPU."""

current_stream: Callable[[int], int] = getattr(
    _C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""The handle of torch's current stream on a GPU."""


def _empty_strided(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


empty_strided_cuda: Callable[..., torch.Tensor] = getattr(
    _C._dynamo.guards, "_empty_strided_cuda", _empty_strided
)
"""A tensor on the current GPU, by what the compiler's own code allocates with: two thirds of the
time."""


def register_flops(formulas: Callable[[], dict[Any, Callable[..., int]]]) -> None:
    """Let ``torch.utils.flop_counter`` count operations, once it is imported: each of the formulas
    takes the op's arguments, and gives a number."""

    def tell() -> None:
        try:
            from torch.utils.flop_counter import flop_registry, register_flop_formula

            for op, formula in formulas().items():
                register_flop_formula(op, get_raw=True)(formula)
                # torch 2.4 registers an op's overloads, and looks for the op
                flop_registry.setdefault(op, formula)
        except (ImportError, TypeError):  # an older torch, whose counter cannot be read
            return

    after_import("torch.utils.flop_counter", tell)


def after_import(module: str, act: Callable[[], None]) -> None:
    """Do something as soon as a module is imported."""
    if module in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Afterwards(module, act))


class _Afterwards:
    """Does something after a module's first import. torch's counter of operations is imported by
    few, and imports all of Triton."""

    def __init__(self, module: str, act: Callable[[], None]) -> None:
        self._module, self._act = module, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 (sys.meta_path's protocol)
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: Any) -> None:
                execute(module)
                self._act()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """In which torch would multiply matrices of x's dtype: autocast's, inside of it."""
    return torch.get_autocast_dtype(x.device.type) if _autocasts(x) else x.dtype


def _autocasts(x: torch.Tensor) -> bool:
    # of others, such as meta, autocast knows nothing; torch.amp.is_autocast_available would say so,
    # but not every compiler traces it
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def widens_layer_norm(x: torch.Tensor) -> bool:
    """Whether torch's layer norm gives float32, whatever it reads: under a GPU's autocast."""
    return x.is_cuda and x.dtype != torch.float32 and _autocasts(x)


def factors(*tensors: Any) -> tuple[Any, ...]:
    """The factors of a matrix product as autocast passes them on: in its dtype, but for float64."""
    if any(not isinstance(x, torch.Tensor) or x.dtype == torch.float64 for x in tensors):
        return tensors
    casts = _autocasts(tensors[0])
    return tuple(x.to(product_dtype(x)) if casts and x.is_floating_point() else x for x in tensors)


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(a * scale_a) @ (b * scale_b).T + bias`` in bfloat16, of fp8 codes with scales of rows."""
    result: torch.Tensor = torch._scaled_mm(
        a, b.t(), scale_a, scale_b.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result


_refusals: dict[torch.device, str] = {}


def scaled_product_refusal(device: torch.device) -> str:
    """Why a GPU has no :func:`scaled_product`; "" if it has. Tried once on each: no version of
    torch lists the GPUs for which it has scales of rows."""
    if device not in _refusals:
        _refusals[device] = _try_scaled_product(device)
    return _refusals[device]


# What torch.compiler.assume_constant_result sets, which imports torch._dynamo: seconds.
scaled_product_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _try_scaled_product(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        found = ".".join(map(str, capability))
        return f"fp8 products require compute capability 8.9, this GPU has {found}"
    if not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no fp8 products"
    try:
        codes = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
        scales = torch.ones(16, 1, device=device)
        scaled_product(codes, codes, scales, scales)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"torch {torch.__version__} has no fp8 products with scales of rows here: {error}"
    return ""


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules of a model, itself first, each once; torch's own walk, which makes their names,
    takes four times as long."""
    found, seen = [model], {model}
    for module in found:
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                found.append(part)
    return found


def is_unheard(module: torch.nn.Module, but: Callable[..., Any] | None = None) -> bool:
    """Whether the module has no hooks, ``but`` one of ours before its forward pass."""
    before = module._forward_pre_hooks
    ours = but is not None and all(hook is but for hook in before.values())
    return not module._forward_hooks and (not before or ours) and not module._backward_hooks


def hears_of_parameters_only(module: torch.nn.Module) -> bool:
    """Whether only those listen who gather a module's parameters: FSDP and DeepSpeed, whom results
    do not concern."""
    hooks = [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]
    return all(
        str(getattr(hook, "__module__", "")).startswith(("torch.distributed.", "deepspeed."))
        for hook in hooks
    )


def remove_pre_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """Without its handle, which would go into every copy of the module."""
    for key in [key for key, one in module._forward_pre_hooks.items() if one is hook]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def pybind_abi() -> dict[str, str]:
    """What torches up to 2.8 name the ABI of their own bindings; an extension that names another
    could not take their tensors."""
    values = {
        name: getattr(_C, f"_{name}", None)
        for name in ("PYBIND11_COMPILER_TYPE", "PYBIND11_STDLIB", "PYBIND11_BUILD_ABI")
    }
    return {name: value for name, value in values.items() if value is not None}


def store_of_ranks() -> Any:
    """The key-value store that the processes of a ``torch.distributed`` job share; raises where
    there is none."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def sharded_tensors() -> Any:
    """``torch.distributed.tensor``, which has DTensor since torch 2.5."""
    from torch.distributed import tensor

    if hasattr(tensor, "DTensor"):
        return tensor
    from torch.distributed import _tensor

    return _tensor


def compile_modes() -> list[str]:
    """What ``torch.compile`` takes as its mode."""
    return list(torch._inductor.list_mode_options())


def keep_saved_memory() -> None:
    """Compiled backward passes leave what was saved for them as it is, so that they can be repeated
    (an option since torch 2.6)."""
    import torch._functorch.config as options

    if hasattr(options, "donated_buffer"):
        options.donated_buffer = False


def counting_backend(name: str) -> Any:
    """A backend of ``torch.compile`` that counts its graphs: ``frame_count``."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(name)


def keep_gpu_busy(cycles: int) -> None:
    """Put a kernel on the current stream that does nothing for so long."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call, unused-ignore]
