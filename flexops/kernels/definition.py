"""``flexops.kernel``: an operator of torch made of device code in a string."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import FlexopsError
from . import binding
from .code import KernelCode, literal
from .options import OF_A_CANDIDATE, KernelOptions, check_kinds, steps_of, unfit_options, varied
from .registration import Registered, defining, register
from .schema import KernelSchema, parse_schema
from .signature import the_kernel
from .structs import constant_arrays, structs


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
    parsed = parse_schema(schema)
    check_kinds(
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
    with defining:
        registered = register(parsed, (backward, setup_context, jvp), caller)
        registered.current = made
    return _public(made, registered)


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
                varied(schema, alone, one, OF_A_CANDIDATE),
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
        raise unfit_options(schema, f"{given} without candidates", f"candidates, or no {given}")
    if options.workspace and not options.steps:
        raise unfit_options(schema, "a workspace without steps", "steps: the kernels that share it")
    taken = {*schema.results, *(one.name for one in schema.arguments)}
    if twice := sorted(taken.intersection(options.workspace)):
        raise unfit_options(
            schema, f"a workspace called {twice[0]}", "a name that nothing else has"
        )
    made_flags = (*(f"-D{name}={_define(one)}" for name, one in options.defines.items()), *flags)
    if options.steps:
        inner = binding.step_schema(schema, options)
        steps = tuple(
            _code(source, inner, one, None, include, flags)
            for one in steps_of(source, schema, options)
        )
        signatures = [step.signature for step in steps]
        bound = binding.bind_steps(signatures, schema, options, reference)
        return KernelCode(
            source, signatures[0], schema, bound, options, reference, include, made_flags, steps
        )
    signature = the_kernel(source, options.name or schema.name, schema.text)
    bound = binding.bind(signature, schema, options, reference, structs(source))
    for one in signature.template:
        constant = options.template.get(one.name, "")
        if not callable(constant):
            try:
                literal(schema.name, one, constant)
            except TypeError as error:
                raise unfit_options(schema, str(error), "a template argument of its kind") from None
    return KernelCode(source, signature, schema, bound, options, reference, include, made_flags)


def _define(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _public(code: KernelCode, registered: Registered) -> Kernel:
    """The kernel that users get; of candidates, with one for each."""
    op = code.names["_op"] = registered.op
    code.names["_transformed"] = registered.transformed
    members = {"__call__": code.names["__call__"], "__doc__": code.schema.text}
    made: Kernel = type("Kernel", (Kernel,), members)()
    made.op, made._code = op, code
    made.source, made.schema, made.reference = code.source, code.schema.text, code.reference
    made.differentiable = registered.backward is not None
    others = (_public(one, registered) for one in code.candidates if one is not code)
    made.candidates = tuple(others) or (made,)
    return made
