"""``flexops.kernel``: an operator of torch made of device code in a string."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import keyword
import math
import operator
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import _torch, settings
from .._warning import warn
from ..build.compile import device_code
from ..build.describe import layout
from ..build.describe.schema import RESERVED, TAKEN_NAMESPACES
from ..build.load import loader, provider
from ..build.plan import kernel_names, kernel_plan
from ..errors import CompileError, FlexopsError, NativeUnavailableError, ToolchainError
from ..ops._declared import check_reference, check_results
from ..ops._register import check_places, no_forward_mode, transformable
from ..toolchain import libcuda
from . import binding, launch, limits
from .binding import KernelArgument, KernelOptions, KernelSchema
from .signature import CPP_TYPES, SCALARS, CudaSignature, TemplateParameter, kernels, unclosed
from .structs import TENSOR_MAP, TENSOR_MAP_TEXT, constant_arrays, structs
from .tuning import Tuner, content

NAMESPACE = "flexops_kernels"
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
    '"std"': "#include <the header of C++'s that declares it>, such as <cmath> or <type_traits>",
}
"""The fix for a compiler error, by its text."""

_LONGEST_NAME = 150  # a file has at most 255 bytes in its name, of which the cache needs some
_MOST_PLANS = 1024  # of one kernel: shapes that a call finds worked out

_defined: dict[str, _Registered] = {}
_lock = threading.RLock()


def kernel(
    source: str,
    schema: str,
    *,
    grid: int | Sequence[int] | Callable[..., Any] | None = None,
    block: int | Sequence[int] | Callable[..., Any] = 256,
    shared: int | Callable[..., int] = 0,
    cluster: int | Sequence[int] | None = None,
    cooperative: bool = False,
    name: str | None = None,
    args: Mapping[str, Any] | None = None,
    template: Mapping[str, Any] | None = None,
    out: str | Callable[..., Any] | None = None,
    strided: bool = False,
    check: Callable[..., object] | None = None,
    shapes: Mapping[str, str] | None = None,
    reference: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    jvp: Callable[..., Any] | None = None,
    steps: Sequence[Mapping[str, Any]] = (),
    workspace: Mapping[str, Callable[..., Any]] | None = None,
    candidates: Sequence[Mapping[str, Any]] = (),
    key: Callable[..., Any] | None = None,
    candidate: int | None = None,
    constants: Mapping[str, Any] | None = None,
    defines: Mapping[str, object] | None = None,
    include: Sequence[str | Path] = (),
    options: Sequence[str] = (),
) -> Kernel:
    """Make an operator of a CUDA kernel in a string. NVRTC, which torch brings, compiles it at its
    first call; no C++ compiler takes part.

    The operator is ``torch.ops.flexops_kernels.<name>`` (or of the schema's own namespace) and
    works under ``torch.compile(fullgraph=True)``, in CUDA graphs, on any stream and device.
    docs/kernels.md is the guide.

    Each of the kernel's parameters gets what is called like it: an argument or a result of the
    schema (a tensor's pointer, a number), a size of one (``x_numel``, ``x_size0``, ``x_stride0``),
    ``n``, which is the number of elements of the first result, or what ``args`` says.

    Functions given for ``grid``, ``block``, ``shared``, ``args``, ``template`` and ``out`` take, by
    name, those arguments of the schema that they need (all but the last two may ask for results
    too). ``check`` takes arguments likewise.

    Args:
        source: device code. ``bfloat16``, ``float16`` and the integers of ``<cstdint>`` are there;
            flexops' own headers can be included (``#include "common/reduce.cuh"``).
        schema: as for ``torch.library``: ``"scale(Tensor x, float factor) -> Tensor"``;
            ``Tensor(a!) x`` is written in place. A result is called ``out`` if it is the only one
            and has no name, several ``out0``, ``out1``...
        grid: blocks: a number, up to three, or a function that returns such. By default as many as
            give each element of the first result a thread.
        block: threads of a block, likewise.
        shared: bytes of dynamic shared memory.
        cluster: blocks of a cluster (Hopper and newer), a number or up to three.
        cooperative: all blocks run at once, as ``cooperative_groups::this_grid().sync()`` requires;
            a grid that is too large for that is an error of the driver.
        name: the kernel's in the source, if it is not the operator's: a source may have several.
        args: parameter -> constant or function. A struct of the source by value gets a mapping, a
            sequence or an object with its members, an array in it a sequence; ``CUtensorMap`` what
            :func:`tensor_map` returns.
        template: template parameter -> constant or function; a type as C++ text or a
            ``torch.dtype``. What is not given follows from the tensors (``T`` of ``const T* x`` by
            x's dtype) or is the argument of its name.
        out: the tensor that the result is like, by name (default: the first), or a function that
            returns the result(s), such as ``lambda x: x.new_empty(x.shape[0])``: it runs on fake
            tensors, too.
        strided: tensors go in with the strides that they have. Otherwise they are made contiguous
            first.
        check: raises for arguments that the kernel cannot take; what it returns is ignored. It and
            ``shapes`` are asked in every call: of the kernel, the reference, fake tensors and under
            ``torch.compile``. So it may look at shapes, dtypes and numbers, not at values of
            tensors, for which the host would wait.
        shapes: by tensor argument, the shape that it must have: ``{"weight": "x[-1]", "residual":
            "x"}``. Parts, separated by commas: ``x`` (all of x's), ``x[-1]``, ``x[:-1]``, a number,
            an int argument; one of them times or divided by a number: ``x[-1] // 2``. ``"as x"``
            broadcasts the tensor to x's shape; nothing else is broadcast.
        reference: plain PyTorch with the schema's arguments: what runs on the CPU, and where no
            kernel can be had; the oracle for tests. Results of another shape or dtype than the
            kernel's are an error.
        backward, setup_context: as for ``torch.library.register_autograd``. Without ``backward``, a
            backward pass that needs the gradient raises, and a call that writes a tensor does where
            one of its tensors requires a gradient: on each device, and under ``torch.compile``.
        jvp: ``(ctx, *tangents of the arguments) -> tangents of the results``, for forward mode
            (``torch.func.jvp``), with what ``setup_context`` keeps by ``ctx.save_for_forward``.
        steps: the kernels of an operator that has several, launched in this order, each a mapping
            with ``name`` and, where they differ from the operator's, ``grid``, ``block``,
            ``shared``, ``cluster``, ``cooperative``, ``args`` and ``template``.
        workspace: tensors of a call that the steps share: name -> function that makes it, such as
            ``lambda x: x.new_empty(132)``. A parameter of the name gets its pointer.
        candidates: launches to choose from, each a mapping with the options in which it differs:
            those of a step, ``defines`` and ``steps``. Measured on a GPU in the first call of each
            kind; the fastest one's number is stored in the cache under the GPU's name. Elsewhere,
            with FLEXOPS_AUTOTUNE=0 and under ``torch.use_deterministic_algorithms`` the first one
            serves.
        key: what makes two calls one kind: a function that returns numbers or text. By default
            dtypes, bools, and sizes and ints rounded up to powers of two.
        candidate: the number of the one that serves every call; nothing is measured.
        constants: arrays in constant memory, of at most 64 KiB: name -> numbers, nested for several
            dimensions, or a tensor of the CPU. Numbers are ``float`` or ``int``.
        defines: macros, as ``-D``.
        include: directories with headers of your own.
        options: further options of NVRTC, such as ``"--use_fast_math"``.

    Raises:
        FlexopsError: source and schema do not fit together; the error says where. Nothing is
            compiled yet.
    """
    parsed = _parsed(schema)
    _check_kinds(
        parsed,
        {
            "args": args or {}, "template": template or {}, "shapes": shapes or {},
            "workspace": workspace or {}, "constants": constants or {}, "defines": defines or {},
            "steps": steps, "candidates": candidates, "include": include, "options": options,
            "check": check, "reference": reference, "backward": backward,
            "setup_context": setup_context, "jvp": jvp, "key": key, "candidate": candidate,
            "cluster": cluster, "shared": shared, "cooperative": cooperative,
        },
    )  # fmt: skip
    if backward and not parsed.functional:
        what = f"flexops.kernel: {parsed.qualname} writes its arguments, which has no gradient here"
        raise FlexopsError(what, fix="a kernel that returns what it makes, or no backward=")
    if setup_context and not (backward or jvp):
        raise FlexopsError(
            f"flexops.kernel: {parsed.qualname} has setup_context without backward",
            required="both: setup_context keeps what backward uses",
            fix="add backward=, or remove setup_context=",
        )
    given = KernelOptions(
        grid, block, shared, cluster, args or {}, template or {}, out, strided, check, shapes or {},
        cooperative, name, defines or {}, constant_arrays(constants or {}), steps, workspace or {},
        candidates, key, candidate,
    )  # fmt: skip
    caller = sys._getframe(1).f_globals.get("__name__", "")
    places = tuple(str(Path(path).absolute()) for path in include)
    made = _code(source, parsed, given, reference, places, tuple(options))
    with _lock:
        registered = _register(parsed, (backward, setup_context, jvp), caller)
        registered.current = made
    return made.public(registered)


_MAPPINGS = ("args", "template", "shapes", "workspace", "constants", "defines")
_FUNCTIONS = ("check", "reference", "backward", "setup_context", "jvp", "key")
_MOST_OF_A_CLUSTER = 16


def _check_kinds(schema: KernelSchema, given: Mapping[str, Any]) -> None:
    """Raise for an option that is of another kind than it must be, by its name."""
    for name, value in given.items():
        a_list = isinstance(value, (list, tuple))
        if name in _MAPPINGS and not isinstance(value, Mapping):
            required = "a mapping of names"
        elif name == "defines" and not all(map(_is_macro, value)):
            required = "a mapping of macros' names"
        elif name in ("steps", "candidates") and not a_list:
            required = "a list of mappings"
        elif name in ("include", "options") and not a_list:
            required = f"a list: [{value!r}]" if isinstance(value, (str, Path)) else "a list"
        elif name in ("include", "options") and not all(isinstance(v, (str, Path)) for v in value):
            required = "a list of paths" if name == "include" else "a list of text"
        elif name == "cooperative" and not isinstance(value, bool):
            required = "True or False"
        elif name in _FUNCTIONS and value is not None and not callable(value):
            required = "a function"
        elif name == "candidate" and value is not None and type(value) is not int:
            required = "a number"
        elif name == "shared" and type(value) is not int and not callable(value):
            required = "a number of bytes, or a function that returns one"
        elif name == "cluster" and value is not None and not _is_cluster(value):
            required = f"one to three numbers, whose product is at most {_MOST_OF_A_CLUSTER}"
        else:
            continue
        raise _odd(schema, f"{name} is {value!r}", required)
    for path in given.get("include", ()):
        if not Path(path).is_dir():
            raise _odd(schema, f"include names {path}", "directories that exist")


def _is_macro(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*(\(.*\))?", name) is not None


def _is_cluster(given: Any) -> bool:
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    whole = all(type(size) is int and size > 0 for size in sizes)
    return whole and 1 <= len(sizes) <= 3 and math.prod(sizes) <= _MOST_OF_A_CLUSTER


_OF_A_STEP = ("name", "grid", "block", "shared", "cluster", "cooperative", "args", "template")
_OF_A_CANDIDATE = (*_OF_A_STEP, "defines", "steps")


def _code(
    source: str,
    schema: KernelSchema,
    options: KernelOptions,
    reference: Callable[..., Any] | None,
    include: tuple[str, ...],
    flags: tuple[str, ...],
) -> KernelCode:
    """The code of a definition: of its candidates, of its steps, or of its one kernel."""
    if options.candidates:
        alone = options._replace(candidates=(), key=None, candidate=None)
        candidates = tuple(
            _code(
                source,
                schema,
                _varied(schema, alone, one, _OF_A_CANDIDATE),
                reference,
                include,
                flags,
            )
            for one in options.candidates
        )
        first = candidates[0]
        bound = binding.bind_candidates(schema, options, first.bound)
        parts = (*first.parts[:3], bound, options, *first.parts[5:])
        made = KernelCode(*parts)
        made.let_choose(candidates)
        return made
    if options.key or options.candidate is not None:
        given = "key" if options.key else "candidate"
        raise _odd(schema, f"{given} without candidates", f"candidates, or no {given}")
    if options.workspace and not options.steps:
        raise _odd(schema, "a workspace without steps", "steps: the kernels that share it")
    taken = {*schema.results, *(one.name for one in schema.arguments)}
    if twice := sorted(taken.intersection(options.workspace)):
        raise _odd(schema, f"a workspace called {twice[0]}", "a name that nothing else has")
    made_flags = (*(f"-D{name}={_define(one)}" for name, one in options.defines.items()), *flags)
    if options.steps:
        inner = binding.step_schema(schema, options)
        steps = tuple(
            _code(source, inner, one, None, include, flags)
            for one in _steps(source, schema, options)
        )
        signatures = [step.signature for step in steps]
        bound = binding.bind_steps(signatures, schema, options, reference)
        return KernelCode(
            source, signatures[0], schema, bound, options, reference, include, made_flags, steps
        )
    signature = _chosen(source, options.name or schema.name, schema.text)
    bound = binding.bind(signature, schema, options, reference, structs(source))
    for one in signature.template:
        constant = options.template.get(one.name, "")
        if not callable(constant):
            try:
                _literal(schema.name, one, constant)
            except TypeError as error:
                raise _odd(schema, str(error), "a template argument of its kind") from None
    return KernelCode(source, signature, schema, bound, options, reference, include, made_flags)


def _steps(source: str, schema: KernelSchema, options: KernelOptions) -> Iterator[KernelOptions]:
    """The options of each step: its own, and those of the operator's that are for its kernel."""
    used: set[str] = set()
    for given in options.steps:
        step = _varied(schema, options, given, _OF_A_STEP)
        if not step.name:
            raise _odd(schema, f"a step with {', '.join(given) or 'nothing'}", "its kernel's name")
        signature = _chosen(source, step.name or "", schema.text)
        own = {one.name for one in signature.parameters} | {one.name for one in signature.template}
        used |= own
        args, template = (
            {name: value for name, value in merged.items() if name in own or name not in everywhere}
            for merged, everywhere in (
                (step.args, options.args),
                (step.template, options.template),
            )
        )
        yield step._replace(
            args=args, template=template, out=None, check=None, shapes={}, steps=(), workspace={}
        )
    if lost := sorted({*options.args, *options.template} - used):
        raise _odd(schema, f"{', '.join(lost)}, which no step has", "parameters of a step's kernel")


def _varied(
    schema: KernelSchema, options: KernelOptions, changes: Mapping[str, Any], allowed: Sequence[str]
) -> KernelOptions:
    if not isinstance(changes, Mapping) or (odd := sorted(set(changes) - set(allowed))):
        found = ", ".join(odd) if isinstance(changes, Mapping) else repr(changes)
        raise _odd(
            schema, f"a step or candidate with {found}", f"a mapping of {', '.join(allowed)}"
        )
    _check_kinds(schema, changes)
    merged = ("args", "template", "defines")
    given: dict[str, Any] = {
        name: {**getattr(options, name), **value} if name in merged else value
        for name, value in changes.items()
    }
    return options._replace(**given)


def _odd(schema: KernelSchema, found: str, required: str) -> FlexopsError:
    what = f"flexops.kernel: {schema.text} has options that do not fit together"
    return FlexopsError(what, found=found, required=required, fix="see docs/kernels.md")


class Kernel:
    """An operator made by :func:`kernel`; call it as its schema says.

    Attributes:
        op: the operator of torch: ``torch.ops.flexops_kernels.<name>.default``.
        source, schema: what it was made of.
        reference: plain PyTorch that does the same, or None.
        differentiable: whether it has a backward.
        candidates: a kernel for each of ``candidates=``; of any other, itself. They serve eager
            calls for tests and measurements.
    """

    differentiable: bool
    op: Any
    source: str
    schema: str
    reference: Callable[..., Any] | None
    candidates: tuple[Kernel, ...]
    _code: KernelCode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # each kernel's class has its own

    def compile(self, *args: Any, arch: str | None = None, **kwargs: Any) -> list[Path]:
        """Compile, into the cache, what a call with these arguments launches; tensors may be on any
        device, ``meta`` too.

        Args:
            arch: the GPUs to compile for, such as ``"8.0;9.0+PTX"``; by default
                ``TORCH_CUDA_ARCH_LIST``, else those here.

        Returns:
            The files of machine code or PTX, one for each architecture.

        Raises:
            CompileError: with the source's line.
            ToolchainError: there is no NVRTC that matches torch.
        """
        found = [one.compiled(text, arch) for one, text in self._code.launched(*args, **kwargs)]
        return [entry.library for entries in found for entry in entries]

    def resources(
        self, *args: Any, arch: str | None = None, **kwargs: Any
    ) -> dict[str, dict[str, int]]:
        """What the kernel of a call with these arguments takes, by architecture: registers of a
        thread, bytes of stack, of spill stores and loads, and of static shared memory, and
        barriers. As for ``compile``; PTX has none. Of several kernels, by architecture and name."""
        launched = self._code.launched(*args, **kwargs)
        return {
            f"{entry.manifest.architectures[0]}{f' {text}' if len(launched) > 1 else ''}": dict(
                entry.manifest.resources
            )
            for one, text in launched
            for entry in one.compiled(text, arch)
        }

    def expression(self, *args: Any, **kwargs: Any) -> str:
        """The kernel that a call with these arguments launches, as C++ names it:
        ``scale<float>``; several are separated by commas, all candidates' among them."""
        return ", ".join(text for _, text in self._code.launched(*args, **kwargs))

    def tune(self, *args: Any, **kwargs: Any) -> tuple[float, ...]:
        """Measure the candidates with these arguments, on a GPU, and store the fastest for calls of
        their kind. What the schema writes is copied before.

        Returns:
            Seconds of each; infinity for one that this GPU cannot launch.

        Raises:
            FlexopsError: the kernel has no candidates, or a tensor is not on a GPU.
        """
        return self._code.tune(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<flexops.kernel {self.schema}>"


class KernelCode:
    """A kernel's source and what calls need of it."""

    def __init__(
        self,
        source: str,
        signature: CudaSignature,
        schema: KernelSchema,
        bound: binding.Bound,
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

    def public(self, registered: _Registered) -> Kernel:
        op = self.names["_op"] = registered.op
        has_backward = registered.backward is not None
        self.names["_transformed"] = registered.transformed
        made: Kernel = type(
            "Kernel", (Kernel,), {"__call__": self.names["__call__"], "__doc__": self.schema.text}
        )()
        made.differentiable = has_backward
        made.op, made.source, made.schema, made.reference, made._code = (
            op,
            self.source,
            self.schema.text,
            self.reference,
            self,
        )
        others = (one.public(registered) for one in self.candidates if one is not self)
        made.candidates = tuple(others) or (made,)
        return made

    def let_choose(self, candidates: tuple[KernelCode, ...]) -> None:
        """Serve each call by one of these."""
        self.candidates = candidates
        fixed = self.options.candidate
        if fixed is not None and not 0 <= fixed < len(candidates):
            raise _odd(self.schema, f"candidate {fixed}", f"0 to {len(candidates) - 1}")
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

    # ---- compiling -------------------------------------------------------------------------------

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
                    one.name: _literal(self.schema.name, one, values[one.name])
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

    # ---- launching -------------------------------------------------------------------------------

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


class _Registered:
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


def _register(
    schema: KernelSchema, gradient: tuple[Callable[..., Any] | None, ...], caller: str
) -> _Registered:
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


def _new(schema: KernelSchema, caller: str) -> _Registered:
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
    made = _Registered(
        schema, library, getattr(getattr(torch.ops, namespace), name).default, caller
    )
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


def _let_differentiate(made: _Registered) -> None:
    """Register the gradient, be it there or not: torch would differentiate the reference on the
    CPU, and leave the gradient out elsewhere."""

    torch.library.register_autograd(
        made.schema.qualname, made.differentiate, setup_context=made.setup, lib=made.library
    )


def _is_dual(value: Any) -> bool:
    dual = torch.autograd.forward_ad.unpack_dual
    return isinstance(value, torch.Tensor) and dual(value).tangent is not None


def _guarded(made: _Registered, *args: Any, **kwargs: Any) -> Any:
    """A kernel that writes its arguments, where autograd would look at it."""
    if _torch.is_grad_enabled() and _torch.any_requires_grad(*args, *kwargs.values()):
        _no_gradient(made)
    with _torch.below_autograd():
        return made.op(*args, **kwargs)


def _no_gradient(made: _Registered) -> NoReturn:
    what = (
        f"{made.schema.qualname} has no gradient: call it under torch.no_grad(), or on detached"
        " tensors"
    )
    raise RuntimeError(
        f"{what}{', or give it one (backward=...)' if made.schema.functional else ''}"
    )


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> KernelSchema:
    if not isinstance(text, str):
        raise TypeError(f"flexops.kernel: schema must be text, got {type(text).__name__}")
    try:
        if odd := next((character for character in text if not character.isascii()), ""):
            raise RuntimeError(f"{odd!a} in {text!a}: names are of ASCII letters, digits and _")
        parsed = _torch.parse_schema(text)
    except (RuntimeError, IndexError) as error:
        said = str(error).strip()
        if isinstance(error, IndexError):  # of a number, that of C++: "stod"
            kind = "double" if said == "stod" else "int64_t"
            said = f"in {text}: a number that no {kind} holds"
        raise FlexopsError(
            "flexops.kernel: the schema cannot be read",
            found=said,
            required="such as: scale(Tensor x, float factor) -> Tensor",
            fix="see docs/kernels.md",
        ) from None
    arguments = tuple(
        KernelArgument(
            one.name,
            str(one.type),
            bool(one.alias_info and one.alias_info.is_write),
            one.kwarg_only,
            (
                one.has_default_value()
                if hasattr(one, "has_default_value")
                else one.default_value is not None
            ),
            one.default_value,
        )
        for one in parsed.arguments
    )
    results = tuple(
        one.name or (f"out{number}" if len(parsed.returns) > 1 else "out")
        for number, one in enumerate(parsed.returns)
    )
    qualname = parsed.name if "::" in parsed.name else f"{NAMESPACE}::{parsed.name}"
    schema = KernelSchema(text, qualname, arguments, results)
    if wrong := _unfit(schema, parsed):
        raise FlexopsError(
            f"flexops.kernel: {text} is no operator that a kernel can be",
            found=wrong[0],
            required=wrong[1],
            fix="see docs/kernels.md",
        )
    return schema


def _unfit(schema: KernelSchema, parsed: Any) -> tuple[str, str] | None:
    if parsed.overload_name:
        return (
            f"an overload: {schema.qualname}.{parsed.overload_name}",
            "a name of its own: without a dot",
        )
    if len(schema.qualname) > _LONGEST_NAME:
        return (
            f"a name of {len(schema.qualname)} characters",
            f"at most {_LONGEST_NAME}: files get it",
        )
    namespace = schema.qualname.partition("::")[0]
    if namespace in TAKEN_NAMESPACES:
        return (
            f"the namespace {namespace}, which is torch's or flexops' own",
            "a namespace of your own: mylib::name(...)",
        )
    for one in schema.arguments:
        if one.name in RESERVED:
            return (
                f"an argument called {one.name}",
                "no word of C++: the kernel's parameter has the argument's name",
            )
        if keyword.iskeyword(one.name) or one.name.startswith("_"):
            return (
                f"an argument called {one.name}",
                "no word of Python, and no name that begins with _",
            )
    if not schema.first and not (schema.device and schema.results and not schema.tensors):
        return (
            "no argument that is a Tensor",
            "one, which determines the device; or, without any, Device device",
        )
    if any(one.alias_info for one in parsed.returns):
        return "a result that is an argument", "-> () : the caller has that tensor already"
    if odd := [str(one.type) for one in parsed.returns if str(one.type) != "Tensor"]:
        return f"a result {odd[0]}", "Tensor"
    if twice := {one.name for one in schema.arguments} & set(schema.results):
        return f"{', '.join(twice)} is an argument and a result", "different names"
    return None


def _chosen(source: str, name: str, schema: str) -> CudaSignature:
    if not isinstance(source, str) or (gap := unclosed(source)):
        raise FlexopsError(
            f"flexops.kernel: the source of {schema} cannot be read",
            found=gap if isinstance(source, str) else type(source).__name__,
            required="C++ text, whose brackets are in pairs",
            fix="correct the source",
        )
    found = kernels(source)
    chosen = [one for one in found if name in (one.name, one.name.rpartition("::")[2])]
    if len(chosen) != 1:
        there = (
            ", ".join(f"{one.name} (line {one.line})" for one in found) or "no __global__ function"
        )
        required = (
            f"one kernel called {name}"
            if not chosen
            else f"one kernel called {name}, not {len(chosen)}"
        )
        raise FlexopsError(
            f"flexops.kernel: {schema} needs one kernel of its name",
            found=there,
            required=required,
            fix="name=<the kernel's name>",
        )
    return chosen[0]


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


def _define(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _literal(kernel_name: str, parameter: TemplateParameter, value: Any) -> str:
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
