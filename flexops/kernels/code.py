"""A kernel's source and what calls need of it: compiling, launching, errors."""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import _torch, settings
from .._warning import warn
from ..build.compile import device_code
from ..build.describe import layout
from ..build.load import loader, provider
from ..build.plan import kernel_names, kernel_plan
from ..errors import CompileError, FlexopsError, NativeUnavailableError, ToolchainError
from ..ops._declared import check_reference, check_results
from ..ops._register import check_places
from ..toolchain import libcuda
from . import binding, launch, limits
from .call_text import Bound
from .options import KernelOptions, unfit_options
from .schema import KernelSchema
from .signature import CPP_TYPES, SCALARS, CudaSignature, TemplateParameter
from .structs import TENSOR_MAP, TENSOR_MAP_TEXT
from .tuning import Tuner, content

_PRELUDE = '#include "common/kernel.cuh"\n'
_FP8 = '#include "common/fp8.cuh"\n'
_FIXES = {
    'identifier "__nv_bfloat16"': (
        "write bfloat16, which is there without a header and converts to and from float"
    ),
    'identifier "__half"': (
        "write float16, which is there without a header and converts to and from float"
    ),
    "unrecognized option": ("correct options=[...]: options of NVRTC, of which nvcc has more"),
    "cannot open source file": "name its directory in include=[...]",
    '"std"': (
        "#include <the header of C++'s that declares it>, such as <cmath> or <type_traits>; device"
        " code has no containers, strings and streams"
    ),
}
"""The fix for a compiler error, by its text."""

_MOST_PLANS = 1024  # of one kernel: shapes that a call finds worked out
_lock = threading.RLock()


class KernelCode:
    """A kernel's source and what calls need of it."""

    def __init__(
        self,
        source: str,
        signature: CudaSignature,
        schema: KernelSchema,
        bound: Bound,
        options: KernelOptions,
        reference: Callable[..., Any] | None,
        include: tuple[str, ...],
        flags: tuple[str, ...],
        steps: tuple[KernelCode, ...] = (),
    ) -> None:
        self.parts = (source, signature, schema, bound, options, reference, include, flags, steps)
        self.steps = steps
        self.candidates: tuple[KernelCode, ...] = (self,)
        self.tuner: Tuner | None = None
        self.source, self.signature, self.schema, self.bound, self.options, self.reference = (
            source,
            signature,
            schema,
            bound,
            options,
            reference,
        )
        self.include, self.flags = include, flags
        self._kernels: dict[tuple[Any, ...], ctypes.c_void_p] = {}
        self._plans: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._loaded: dict[tuple[str, Any], int] = {}
        self._allowed: dict[tuple[int, int], int] = {}
        self._told = False
        self._compared = reference is None
        format_ = launch.layout(bound.letters)
        cluster = (
            options.cluster
            if isinstance(options.cluster, (tuple, list))
            else (options.cluster or 1,)
        )
        self.names: dict[str, Any] = {
            **bound.functions,
            **{f"_default_{one.name}": one.default for one in schema.arguments if one.has_default},
            "_kernels": self._kernels,
            "_prepare": self._prepare,
            "_allow": self._allow,
            "_explain": self._explain,
            "_failed": self._failed,
            "_plans": self._plans,
            "_remember": self._remember,
            "_empty_strided": _torch.empty_strided_cuda,
            "_refuse_strides": self._refuse_strides,
            "_refuse_shape": self._refuse_shape,
            "_refuse_dims": self._refuse_dims,
            "_broadcast": self._broadcast,
            "_three": self._three,
            "_results": self._results,
            "_room": self._room,
            "_refuse_none": self._refuse,
            "_fall_back": self._fall_back,
            "_MISSING": (ToolchainError, NativeUnavailableError),
            "_NOT_PACKED": (struct.error, OverflowError, TypeError),
            "_WITHOUT_ASKING": launch.SHARED_WITHOUT_ASKING,
            "_buffers": launch.Buffers(
                bound.letters, (*cluster, 1, 1)[:3], cooperative=options.cooperative
            ),
            "_pack": struct.Struct(format_).pack_into,
            "_launch": self._first_launch,
            "_empty_like": torch.empty_like,
            "_PLAIN": frozenset({torch.Tensor, torch.nn.Parameter}),
            "_guard": torch.cuda.device,
            "_current_device": _torch.current_gpu,
            "_stream": _torch.current_stream,
            "_is_compiling": _torch.is_compiling,
            "_compiler": _torch.compiler,
            "_count_write": _count_write,
            "_forward_mode": _torch.forward_mode,
            "_modes": _torch.count_of_modes,
            "_is_transforming": _torch.is_transforming,
            "_is_grad_enabled": _torch.is_grad_enabled,
            "_is_deterministic": torch.are_deterministic_algorithms_enabled,
            "_index_of": _index_of,
            "_usual_device": torch.get_default_device,
            "_choices": {},
            "_choose": self._choose,
            **{f"_step{number}": step.run for number, step in enumerate(steps)},
        }
        exec(compile(bound.text, f"<flexops.kernel {schema.name}>", "exec"), self.names)
        for one in ("__call__", "complete", "everything", "run"):  # as errors of Python name it
            if function := self.names.get(one):
                function.__qualname__ = schema.name
        self.run: Callable[..., Any] = self.names["run"]
        self.names["_run"] = self.run  # an argument may be called run
        self.fake: Callable[..., Any] = self.names["fake"]

    def let_choose(self, candidates: tuple[KernelCode, ...]) -> None:
        """Serve each call by one of these."""
        self.candidates = candidates
        fixed = self.options.candidate
        if fixed is not None and not 0 <= fixed < len(candidates):
            raise unfit_options(self.schema, f"candidate {fixed}", f"0 to {len(candidates) - 1}")
        self.tuner = Tuner(self.schema, self._identity(), [one.run for one in candidates], fixed)

    def _identity(self) -> list[tuple[str, str]]:
        """What decides how fast the candidates are."""
        return [
            ("source", self.source),
            ("options", content(self.options[:6] + self.options[11:])),
            ("flags", content(self.flags)),
        ]

    def _choose(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Callable[..., Any]:
        assert self.tuner is not None
        return self.tuner.choose(key, args, self.names["_choices"])

    def tune(self, *args: Any, **kwargs: Any) -> tuple[float, ...]:
        given = tuple(self.names["complete"](*args, **kwargs).values())
        if self.tuner is None or not any(
            isinstance(one, torch.Tensor) and one.is_cuda for one in given
        ):
            found = "tensors that are on no GPU" if self.tuner else "no candidates"
            raise FlexopsError(
                f"{self.schema.qualname} cannot be tuned", found=found,
                required="candidates=, and tensors on a GPU", fix="see docs/kernels.md",
            )  # fmt: skip
        return self.tuner.tune(given, self.names["key"](*given))

    def native(self, *args: Any, **kwargs: Any) -> Any:
        """What the dispatcher calls for tensors on a GPU."""
        try:
            return self.run(*args, **kwargs)
        except (ToolchainError, NativeUnavailableError) as error:
            return self._fall_back(error, tuple(self.names["complete"](*args, **kwargs).values()))

    def elsewhere(self, *args: Any, **kwargs: Any) -> Any:
        """What the dispatcher calls for all other tensors, and for factories."""
        place = not self.schema.tensors and self.names["complete"](*args, **kwargs)
        if place and _device(place[self.schema.device]).type == "cuda":
            return self.native(*args, **kwargs)
        self.check_tensors(self.names["complete"](*args, **kwargs))
        if self.reference is None:
            raise NativeUnavailableError(
                f"{self.schema.qualname} has a kernel for GPUs only",
                found="tensors that are on none",
                required="a reference for other devices",
                fix="flexops.kernel(..., reference=<a function in plain PyTorch>)",
            )
        return self._refer(*args, **kwargs)

    def faked(self, *args: Any, **kwargs: Any) -> Any:
        """What torch calls for fake tensors and those on ``meta``."""
        given = self.names["complete"](*args, **kwargs)
        self.check_tensors(given)
        results = self.fake(*args, **kwargs)
        self._compare(tuple(given.values()))
        return results

    def _refer(self, *args: Any, **kwargs: Any) -> Any:
        """What the reference returns: what a call returns, for ``torch.compile``."""
        expected, made = self.fake(*args, **kwargs), self.names["refer"](*args, **kwargs)
        check_results(*self._unlike(), made, expected, args)
        return made

    def _compare(self, args: tuple[Any, ...]) -> None:
        """In the first call, which need not run the reference: verify what that would return."""
        if not self._compared:
            self._compared = check_reference(*self._unlike(), self.names["refer"], self.fake, args)

    def _unlike(self) -> tuple[str, str]:
        what = f"the reference of {self.schema.qualname} returns something else than the kernel"
        return what, "correct the reference, or out=<a function that returns the result(s)>"

    def check_tensors(self, given: Mapping[str, Any]) -> None:
        self._require_tensors(given)
        check_places(self.schema.name, dict(given))

    def _require_tensors(self, given: Mapping[str, Any]) -> None:
        for one in self.schema.tensors:
            value = given[one.name]
            if not isinstance(value, torch.Tensor) and not (value is None and one.optional):
                self._refuse(one.name, "None" if value is None else type(value).__name__)

    def _refuse(self, name: str, found: str = "None") -> NoReturn:
        raise TypeError(f"{self.schema.name}: {name} must be a tensor, got {found}")

    def _room(self, name: str, made: Any) -> torch.Tensor:
        if not isinstance(made, torch.Tensor):
            what = f"the workspace {name} must be a tensor, or a function that returns one"
            raise TypeError(f"{self.schema.name}: {what}, got {type(made).__name__}")
        return made

    def _results(self, made: Any) -> Any:
        """What the function given for ``out`` returned."""
        names, several = self.schema.results, isinstance(made, (tuple, list))
        results = made if several else (made,)
        tensors = all(isinstance(one, torch.Tensor) for one in results)
        if several == (len(names) > 1) and len(results) == len(names) and tensors:
            return made
        found = ", ".join(type(one).__name__ for one in results)
        raise TypeError(f"{self.schema.name}: out must return {', '.join(names)}, got {found}")

    # ---- compiling ----

    def launched(self, *args: Any, **kwargs: Any) -> list[tuple[KernelCode, str]]:
        """The kernels of a call, each with its name in C++; of every candidate."""
        if self.tuner:
            return [pair for one in self.candidates for pair in one.launched(*args, **kwargs)]
        if self.steps:
            everything = self.names["everything"](*args, **kwargs)
            return [pair for step in self.steps for pair in step.launched(*everything)]
        arguments = self.names["complete"](*args, **kwargs)
        self._require_tensors(arguments)
        made = self.fake(*args, **kwargs)
        results = made if isinstance(made, tuple) else (made,)
        known = {**arguments, **dict(zip(self.schema.results, results, strict=False))}
        return [(self, self._expression(known, self.names["values"](*args, **kwargs)))]

    def _expression(self, arguments: Mapping[str, Any], values: Mapping[str, Any]) -> str:
        dtypes = {
            name: _dtype_name(value.dtype) if isinstance(value, torch.Tensor) else None
            for name, value in arguments.items()
        }
        types = binding.check_types(self.signature, self.bound, dtypes)
        spelled = {
            name: CPP_TYPES[dtype] if dtype in CPP_TYPES else self._no_type(name, dtype)
            for name, dtype in types.items()
        }
        return binding.expression_of(
            self.signature,
            {
                **spelled,
                **{
                    one.name: literal(self.schema.name, one, values[one.name])
                    for one in self.signature.template
                    if one.name in values
                },
            },
        )

    def _no_type(self, name: str, dtype: str) -> NoReturn:
        raise TypeError(
            f"{self.schema.name}: {dtype} has no type in C++ that {name} could be:"
            f" template={{{name!r}: ...}} names one"
        )

    def text_kernel(self, expression: str) -> kernel_plan.TextKernel:
        first = _FP8 if "flexops::e" in expression else ""
        if any(one.type == TENSOR_MAP for one in self.signature.parameters):
            first += TENSOR_MAP_TEXT
        first += self.options.constants
        text = f'{_PRELUDE}{first}#line 1 "{self.schema.name}.cu"\n{self.source}\n'
        return kernel_plan.TextKernel(
            self.schema.name, text, expression, layout.csrc_root(), self.include, self.flags
        )

    def compiled(self, expression: str, arch: str | None) -> list[Any]:
        from .. import toolchain

        chosen = settings.current()
        choice = provider.compiler_for(
            chosen, toolchain.local_capabilities(), asked=arch or chosen.arch_list
        )
        # nvcc takes C++'s library and CUDA's headers, which NVRTC rejects on the machine of the
        # call
        if choice.compiler.kind != "nvrtc":
            what = f"{self.schema.qualname} cannot be verified: there is no NVRTC"
            found = f"{choice.compiler}, which compiles more than NVRTC does"
            raise ToolchainError(
                what,
                found=found,
                required="NVRTC of torch's CUDA",
                fix=toolchain.nvrtc_fix(choice.compiler.version),
            )
        plans = [
            self.text_kernel(expression).plan(one, choice.compiler)
            for one in kernel_names.single(choice.architectures)
        ]
        try:
            return [
                result.require()
                for result in device_code.obtain(
                    plans, loader.open_cache(chosen), time_limit=chosen.compile_timeout
                )
            ]
        except CompileError as error:
            raise _with_fix(error, self.schema.name) from None

    def _remember(
        self, key: tuple[Any, ...], like: torch.Tensor, result: torch.Tensor
    ) -> torch.Tensor:
        """Keep what the next call with tensors of these dtypes and this shape need not work out;
        this one's result is there already."""
        kernel, n = self._kernels.get(key[:-1]), result.numel()
        if kernel is not None and n > 0:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            threads = (
                math.prod(self.options.block)
                if isinstance(self.options.block, Sequence)
                else self.options.block
            )
            self._plans[key] = (kernel, -(-n // threads), n, tuple(like.shape), like.stride())
        return result

    def _prepare(
        self,
        key: tuple[Any, ...],
        device: int,
        arguments: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> ctypes.c_void_p:
        """The kernel for a combination of dtypes that is new: everything that can be wrong with
        tensors is looked at here, and only here."""
        first = self.schema.first or self.schema.device
        self._compare(tuple(arguments[one.name] for one in self.schema.arguments))
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and (value.get_device() != device or value.is_meta):
                raise ValueError(
                    f"{self.schema.name}: {name} must be on the device of {first}, got"
                    f" {value.device}"
                )
        for name in () if self.options.strided else self.schema.results:
            if not arguments[name].is_contiguous():
                raise ValueError(
                    f"{self.schema.name}: the result {name} must be contiguous, as out= makes it;"
                    " or strided=True"
                )
        expression = self._expression(arguments, values)
        self._kernels[key] = found = ctypes.c_void_p(self.load(expression, device))
        return found

    def load(self, expression: str, device: int) -> int:
        """The driver's handle of a kernel, for a device."""
        if torch.version.hip:
            raise ToolchainError(
                f"{self.schema.qualname} is compiled by NVRTC, which AMD GPUs have not",
                fix="reference=<a function in plain PyTorch>",
            )
        with _lock:
            capability = libcuda.driver().capability(device)
            loaded = self._loaded.get((expression, capability))
            if loaded is None:
                try:
                    loaded = self._loaded[expression, capability] = provider.load(
                        self.text_kernel(expression), capability
                    )
                except CompileError as error:
                    raise _with_fix(error, self.schema.name) from None
            return loaded

    def _fall_back(self, error: FlexopsError, args: tuple[Any, ...]) -> Any:
        policy = settings.current().fallback
        if self.reference is None or policy == "forbid":
            raise error
        if policy == "warn" and not self._told:
            self._told = True
            message = (
                f"flexops: {self.schema.qualname} runs as plain PyTorch: {error}\n  silence:"
                " FLEXOPS_FALLBACK=allow"
            )
            warn(message, loader.FallbackWarning)
        return self._refer(*args)

    # ---- launching ----

    def _first_launch(self, *arguments: Any) -> int:
        self.names["_launch"] = found = launch.driver_call()
        return found(*arguments)

    def _allow(self, kernel: ctypes.c_void_p, size: int, device: int) -> None:
        loaded = kernel.value or 0
        if self._allowed.get((loaded, device), 0) < size:
            try:
                libcuda.driver().allow_shared(loaded, size, device)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self.schema.name}: {size} bytes of dynamic shared memory: {error}: a GPU of"
                    " this kind has not so much"
                ) from None
            self._allowed[loaded, device] = size

    def _three(self, what: str, given: Any) -> tuple[int, int, int]:
        """What a function gave for grid or block, as three numbers."""
        values = list(given) if isinstance(given, (tuple, list)) else [given]
        try:
            x, y, z = (*map(operator.index, values), *(1,) * (3 - len(values)))
        except (TypeError, ValueError):
            raise TypeError(
                f"{self.schema.name}: {what} must be a whole number, or up to three of them, got"
                f" {given!r}"
            ) from None
        return x, y, z

    def _refuse_strides(self, name: str) -> NoReturn:
        raise ValueError(
            f"{self.schema.name}: {name} is written in place and must be contiguous; or"
            " strided=True, and a kernel that knows strides"
        )

    def _refuse_shape(self, name: str, wanted: Sequence[Any], found: Sequence[Any]) -> NoReturn:
        raise ValueError(
            f"{self.schema.name}: {name} must have shape {list(wanted)}, got {list(found)}"
        )

    def _broadcast(self, name: str, tensor: torch.Tensor, other: str, shape: Any) -> torch.Tensor:
        try:
            return tensor.expand(shape)
        except RuntimeError:
            raise ValueError(
                f"{self.schema.name}: {name} must be broadcastable to {other}, got shape"
                f" {list(tensor.shape)} for {list(shape)}"
            ) from None

    def _refuse_dims(self, name: str, least: int) -> NoReturn:
        plural = "s" if least > 1 else ""
        raise ValueError(f"{self.schema.name}: {name} must have at least {least} dimension{plural}")

    def _explain(
        self, grid: Sequence[Any], block: Sequence[Any], shared: Any, values: Sequence[Any]
    ) -> None:
        """Raise for the first value that does not fit, by its name."""
        named = [
            *zip(("grid",) * 3, "I" * 3, grid, strict=True),
            *zip(("block",) * 3, "I" * 3, block, strict=True),
            ("shared", "I", shared),
        ]
        parameters = zip(
            (str(one) for one in self.signature.parameters), self.bound.letters, values, strict=True
        )
        for name, letter, value in [*named, *parameters]:
            try:
                struct.pack("=" + letter.partition("@")[0], value)
            except (struct.error, OverflowError, TypeError) as error:
                kind = ValueError if isinstance(value, (int, float)) else TypeError
                raise kind(f"{self.schema.name}: {name} cannot be {value!r}: {error}") from None

    def _failed(
        self,
        status: int,
        device: int,
        call: tuple[launch.Pointer, ...],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
    ) -> None:
        if status in launch.NO_CONTEXT:  # the first thing of CUDA's on this thread
            libcuda.driver().enter_context(device)
            status = self.names["_launch"](*call)
        if status:
            said, hint = libcuda.driver().error_text(status), ""
            bounds = self.signature.bounds
            found, required = limits.launch_error(grid, block, bounds)
            if found:
                hint = f": {found} was given, {required} is required"
            elif status == launch.OUT_OF_RESOURCES:
                hint = (
                    ": fewer threads in a block, or __launch_bounds__(threads) in the kernel, by"
                    " which each gets fewer registers"
                )
            elif bounds:
                hint = f": the kernel has __launch_bounds__({bounds}), the most threads of a block"
            raise RuntimeError(
                f"{self.schema.name}: CUDA error: {said} (grid {grid}, block {block}, {shared}"
                f" bytes of dynamic shared memory){hint}"
            )


def _count_write(tensor: torch.Tensor | None) -> None:
    """Report to autograd that a kernel wrote the tensor: a backward pass that had saved it then
    says so instead of being silently wrong."""
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _device(given: Any) -> torch.device:
    """The device that a factory's argument means."""
    return torch.get_default_device() if given is None else torch.device(given)


def _index_of(given: Any) -> int:
    index = _device(given).index
    return torch.cuda.current_device() if index is None else index


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def literal(kernel_name: str, parameter: TemplateParameter, value: Any) -> str:
    """A template argument in C++."""
    if isinstance(value, str):
        return value
    if parameter.kind == "typename":
        if isinstance(value, torch.dtype):
            return CPP_TYPES[_dtype_name(value)]
        required = "a torch.dtype, or a type as C++ text"
    elif parameter.kind == "bool":
        if isinstance(value, int) and value in (0, 1):
            return str(bool(value)).lower()
        required = "True or False"
    else:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int):
            letter = SCALARS.get(parameter.kind, "q")
            with contextlib.suppress(struct.error):
                struct.pack("=" + letter, value)
                return str(value)
        required = f"a whole number that {parameter.kind} holds, or C++ text"
    what = f"the template's {parameter.kind} {parameter.name} cannot be {value!r}"
    raise TypeError(f"{kernel_name}: {what}: {required}")


def _with_fix(error: CompileError, name: str) -> CompileError:
    from ..build.compile.kernel_compiler import CORRECT_USE
    from ..toolchain import device_headers

    missing = re.search(r'cannot open source file "([^"]+)"', error.found)
    version = re.search(r"NVRTC ([\d.]+)", error.what)
    fix = device_headers.fix_for(missing[1], version[1]) if missing and version else ""
    fix = fix or next((one for said, one in _FIXES.items() if said in error.found), error.fix)
    place = re.search(r"^\s*(\S+)\(\d+\): (?:catastrophic )?error", error.found, re.MULTILINE)
    known = fix != error.fix or fix.startswith(CORRECT_USE)
    if not known and place and place[1] != f"{name}.cu":
        fix = (
            f"the error is in {Path(place[1]).name}, not in your source: correct what your source"
            " passes to it (a line after the error names where it is instantiated)"
        )
    return CompileError(
        error.what, found=error.found, required=error.required, fix=fix, log=error.log
    )
