"""Judging the machine against one row of the matrix."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..facts import GpuFact, LibraryFact, PythonFact, TargetFact, TorchFact
from ..finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from ...targets import Target
    from ...toolchain.model import RocmToolkit, Toolchain
    from ...toolchain.nvrtc import DeviceCompiler


def target(fact: TargetFact) -> Finding:
    """Which row is judged against."""
    if fact.row is not None:
        pins = ", ".join(
            filter(
                None,
                (
                    f"torch {fact.row.torch}",
                    _toolkit_name(fact.row),
                    f"Python {fact.row.python}",
                    fact.row.gpus,
                ),
            )
        )
        return ok("target", f"{fact.row.id}: {pins}")
    if fact.asked is not None:
        what, required, fix = fact.problem
        return fail("target", what, required, fix)
    return ok("target", f"{fact.detected} would be the best for this machine: {fact.reason}")


def _toolkit_name(row: Target) -> str:
    return (
        ""
        if row.accelerator == "cpu"
        else f"{'CUDA' if row.accelerator == 'cuda' else 'ROCm'} {row.toolkit}"
    )


def torch(row: Target, fact: TorchFact) -> Finding:
    """An accelerator or CUDA major other than the row's cannot work; another release is worth a
    warning."""
    from ...toolchain.model import Version

    index = f" --index-url {row.index}" if row.index and row.index_required else ""
    fix = f'{sys.executable} -m pip install "{row.torch_requirement}"{index}'
    required = f"torch {row.torch}" + (f" for {_toolkit_name(row)}" if row.toolkit else "")
    if fact.state != "ok":
        return fail("target-torch", "torch cannot be imported", required, fix)
    built_for = {"cpu": "", "cuda": fact.cuda, "rocm": fact.hip}[row.accelerator]
    found = f"torch {fact.version}" + (
        f" for {row.accelerator.upper()} {built_for}" if built_for else ""
    )
    if row.toolkit and (
        not built_for or Version.parse(built_for).major != Version.parse(row.toolkit).major
    ):
        return fail(
            "target-torch",
            found if built_for else f"{found}, which is not built for {row.accelerator.upper()}",
            required,
            fix,
        )
    if Version.parse(fact.version).parts[:3] != Version.parse(row.torch).parts[:3]:
        return warn("target-torch", found, required, fix)
    return ok("target-torch", found)


def python(row: Target, fact: PythonFact) -> Finding:
    oldest, newest = (
        (int(major), int(minor))
        for major, _, minor in (bound.partition(".") for bound in row.python_range)
    )
    found = ".".join(map(str, fact.version))
    if oldest <= fact.version[:2] <= newest:
        return ok("target-python", found)
    required = (
        f"Python {row.python_range[0]} to {row.python_range[1]}: torch {row.torch} has wheels for"
        " these"
    )
    return fail(
        "target-python",
        found,
        required,
        f"uv venv --python {row.python} .venv   # or: conda create -n flexops python={row.python}",
    )


def toolkit(row: Target, found: DeviceCompiler | RocmToolkit | None, *, compiled: bool) -> Finding:
    """What compiles device code. ``compiled``: every op has a library for this row, so that nothing
    is compiled."""
    from ...toolchain.diagnosis import nvrtc_fix
    from ...toolchain.model import RocmToolkit, Version

    wanted = Version.parse(row.toolkit)
    text = (
        "none"
        if found is None
        else (
            f"ROCm {found.version}, {found.root}"
            if isinstance(found, RocmToolkit)
            else f"{found}, {found.path}"
        )
    )
    if found is not None and found.version.major == wanted.major:
        other = (
            ""
            if found.version.minor == wanted.minor
            else f"; the row has {row.toolkit_minor}, which is as good"
        )
        return ok("target-toolkit", text + other)
    if compiled:
        return ok("target-toolkit", f"{text}; not needed, the operators are compiled")
    if row.accelerator == "rocm":
        return fail("target-toolkit", text, f"ROCm {wanted.major}.x", f"work in {row.build_base}")
    return fail(
        "target-toolkit",
        text,
        f"NVRTC of CUDA {wanted.major}.x, best {row.toolkit_minor}",
        nvrtc_fix(wanted),
    )


def host_compiler(row: Target, tools: Toolchain, *, compiled: bool) -> Finding:
    from ...toolchain.model import Version

    oldest, newest = row.host_compiler
    required = f"GCC {oldest} to {newest}" if newest else f"GCC {oldest} or newer"
    fix = f"apt-get install g++{f'-{newest}' if newest else ''}"
    if tools.host is None:
        return (
            ok("target-compiler", "none; not needed, the operators are compiled")
            if compiled
            else fail("target-compiler", "none", required, fix)
        )
    found = f"{tools.host.kind} {tools.host.version}"
    if tools.host.kind != "gcc":
        return ok("target-compiler", found)
    too_new = newest and tools.host.version.parts[:1] > Version.parse(newest).parts[:1]
    if tools.host.version < Version.parse(oldest) or too_new:
        return (warn if compiled else fail)("target-compiler", found, required, fix)
    return ok("target-compiler", found)


def gpu(row: Target, fact: GpuFact) -> Iterator[Finding]:
    """Driver and GPUs, where there are any: a row can be built for without either."""
    from ...targets.detection import runs_on
    from ...toolchain.model import Version

    if fact.driver is None and row.accelerator == "cuda":
        yield ok(
            "target-driver",
            f"no driver here; where this will run it must be {row.least_driver} or newer",
        )
    elif fact.driver is not None and row.accelerator == "cuda":
        fits = fact.driver.version >= Version.parse(row.least_driver)
        required = f"{row.least_driver} or newer, for {_toolkit_name(row)}"
        fix = "update the driver, or choose a target for it: flexops target detect"
        yield (
            ok("target-driver", str(fact.driver))
            if fits
            else fail("target-driver", str(fact.driver), required, fix)
        )
    for one in dict.fromkeys(fact.gpus):
        if row.accelerator == "cuda":
            fits = one.vendor == "nvidia" and runs_on(row, one.capability)
        else:
            fits = one.capability in row.capabilities
        if not fits:
            found = f"{one.name} ({one.capability}) cannot run code for {row.arch_list}"
            yield warn("target-gpu", found, "a GPU of the target's kind", "flexops target detect")


def architectures(row: Target, asked: str | None) -> Finding:
    """The list that is set, against the row's."""
    from ...compute_capability import ComputeCapability, parse_arch_list, runs_on
    from ...errors import ArchitectureError

    variable = "PYTORCH_ROCM_ARCH" if row.accelerator == "rocm" else "TORCH_CUDA_ARCH_LIST"
    fix = f'export {variable}="{row.arch_list}"'
    if asked is None:
        return ok(
            "target-architectures",
            f"{variable} is not set; `flexops build --target {row.id}` compiles for"
            f" {row.arch_list}",
        )
    if row.accelerator == "rocm":
        covered = set(row.capabilities) <= set(asked.replace(",", ";").split(";"))
    else:
        wanted = [ComputeCapability.parse(one) for one in row.capabilities]
        try:
            # "native" and "all" include the row's own
            compiled = parse_arch_list(asked, native=lambda: wanted, supported=wanted)
        except ArchitectureError as error:
            return fail(
                "target-architectures", f"{variable}={asked}: {error.what}", row.arch_list, fix
            )
        covered = all(runs_on(compiled, one) for one in wanted)
    return (
        ok("target-architectures", f"{variable}={asked}")
        if covered
        else warn("target-architectures", f"{variable}={asked}", row.arch_list, fix)
    )


def compiled_ops(row: Target, facts: Iterable[LibraryFact]) -> set[str]:
    """The ops with a library that is the row's: for its GPUs, its torch, and by its toolkit's
    compiler."""
    from ...compute_capability import ComputeCapability, runs_on
    from ...targets.fit import is_of

    def serves(one: LibraryFact) -> bool:
        if row.accelerator == "cpu":
            return one.device == "cpu" and not one.refusal
        if one.device != "cuda" or not is_of(row, one.torch_abi, one.compiler):
            return False
        if row.accelerator == "rocm":
            return set(row.capabilities) <= set(one.architectures)
        compiled = [name for name in one.architectures if not name.startswith("gfx")]
        return bool(compiled) and all(
            runs_on(compiled, ComputeCapability.parse(capability))
            for capability in row.capabilities
        )

    return {one.op for one in facts if serves(one)}


def libraries(row: Target, facts: Sequence[LibraryFact], ops: Sequence[str]) -> Finding:
    """Whether the ops are compiled for the row."""
    there = compiled_ops(row, facts)
    lacking = [name for name in ops if name not in there]
    where = row.arch_list or "the CPU"
    if not lacking:
        return ok("target-libraries", f"{', '.join(ops)} compiled for {where}")
    return warn(
        "target-libraries",
        f"{', '.join(lacking)} not compiled for {where} yet",
        "compiled before it is needed",
        f"flexops build --target {row.id}",
    )
