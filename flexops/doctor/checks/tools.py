"""Judging what builds are done with: toolkit, host compiler, ninja, launcher, and the libraries
that are loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..facts import LibraryFact, LoadedLibrary, TorchFact
from ..finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from ...toolchain.model import Toolchain
    from ...toolchain.nvrtc import DeviceCompiler
    from ...toolchain.select import Choice

_FAMILY = re.compile(r"(lib[A-Za-z]+(?:[A-Z]\w*)?(?:\+\+)?)[\w.-]*?\.so(?:\.(\d+))?")


def has_library(op_libraries: Iterable[LibraryFact], device: str, ops: Iterable[str]) -> bool:
    """Whether every op has a library for that device type that would be loaded: then nothing has to
    be compiled here."""
    usable = {one.op for one in op_libraries if one.device == device and not one.refusal}
    return set(ops) <= usable


def device_compiler(
    choice: Choice[DeviceCompiler], torch: TorchFact, *, gpu: bool, needed: bool, jit: bool
) -> Finding:
    """NVRTC, or the nvcc that takes its place.

    Args:
        gpu: there is a GPU here that torch's build is for.
        needed: some op has kernels that are not compiled yet.
        jit: compiling at run time is allowed.
    """
    refused = [f"not taken: {one.path} ({one.reason})" for one in choice.rejected]
    if choice.taken:
        found = (
            f"{choice.taken.value}, {choice.taken.value.path} (found via {choice.taken.found_via})"
        )
        return ok("device-compiler", "; ".join([found, *choice.notes, *refused]))
    if not torch.cuda:
        return ok("device-compiler", "none; torch is not built for CUDA, so none is needed")
    from ...toolchain.diagnosis import no_device_compiler
    from ...toolchain.installed_torch import torch_build

    error = no_device_compiler(choice, torch_build())
    if not needed:
        return ok("device-compiler", "none; every operator is compiled already")
    judge = fail if gpu and jit else warn
    return judge("device-compiler", error.reason, error.required, error.fix)


def toolkit(tools: Toolchain, torch: TorchFact, *, gpu: bool, needed: bool, jit: bool) -> Finding:
    """The CUDA toolkit, which only people's own ``.cu`` sources need, or ROCm, which the operators
    need on an AMD GPU. Arguments as above."""
    from ...toolchain import missing

    found = tools.rocm or tools.cuda
    if found:
        name = "ROCm" if tools.rocm else "CUDA"
        via = dict(tools.found_via).get("rocm" if tools.rocm else "cuda", "")
        notes = [note for note in tools.notes if "CUDA" in note or "ROCm" in note]
        return ok(
            "toolkit",
            "; ".join(
                [
                    f"{name} {found.version}, {found.root} (found via {via})",
                    *notes,
                    *_refused(tools, ("CUDA toolkit", "ROCm")),
                ]
            ),
        )
    if not (torch.cuda or torch.hip):
        return ok("toolkit", "none; torch is a CPU build, which needs none")
    error = missing(tools, "cuda")
    what, required, fix = (
        (error.what, error.required, error.fix)
        if error
        else ("no toolkit was found", "ROCm", "flexops target detect")
    )
    if not torch.hip:
        return ok(
            "toolkit",
            "none; flexops.load compiles your own .cu sources with NVRTC, but for what needs nvcc"
            " (docs/splitting.md)",
            f"{required}: {fix}",
        )
    details = f"{what}; {error.found}" if error and error.found else what
    if not needed:
        return ok("toolkit", "none; every operator is compiled already")
    if gpu and jit:
        return fail("toolkit", details, required, fix)
    if gpu or _refused(tools, ("CUDA toolkit", "ROCm")):
        return warn("toolkit", details, required, fix)
    return ok("toolkit", "none; no GPU is here, so none is needed", required)


def _refused(tools: Toolchain, kinds: Sequence[str]) -> list[str]:
    return [f"not taken: {one.path} ({one.reason})" for one in tools.rejected if one.what in kinds]


def host_compiler(cpu: Toolchain, cuda: Toolchain, *, needed: bool, jit: bool) -> Finding:
    """The C++ compiler: for host code, and the one that nvcc accepts, for people's own ``.cu``
    sources. ``needed``: some op must be compiled here."""
    from ...toolchain import missing

    if cpu.host is None:
        error = missing(cpu, "cpu")
        compiler_error = error if error and "compiler" in error.what else None
        found = compiler_error.reason if compiler_error else "no C++ compiler was found"
        required = compiler_error.required if compiler_error else "g++ 11.3 or newer"
        fix = compiler_error.fix if compiler_error else "apt-get install g++"
        if not needed:
            return ok("host-compiler", "none; every operator is compiled already")
        return (fail if jit else warn)("host-compiler", found, required, fix)
    text = f"{cpu.host.kind} {cpu.host.version}, {cpu.host.path}"
    if cuda.cuda is None:
        return ok("host-compiler", text)
    if cuda.host is None:
        reasons = "; ".join(
            f"{one.path}: {one.reason}" for one in cuda.rejected if one.what == "C++ compiler"
        )
        error = missing(cuda, "cuda")
        required, fix = (
            (error.required, error.fix)
            if error
            else ("a compiler that nvcc accepts", "apt-get install g++-12")
        )
        return warn(
            "host-compiler",
            f"{text}; nvcc {cuda.cuda.version} accepts none: {reasons}",
            required,
            fix,
        )
    if cuda.host.path != cpu.host.path:
        return ok(
            "host-compiler",
            f"{text}; for nvcc {cuda.cuda.version} {cuda.host.kind} {cuda.host.version},"
            f" {cuda.host.path}",
        )
    return ok("host-compiler", f"{text}, which nvcc {cuda.cuda.version} accepts")


def ninja(tools: Toolchain, *, needed: bool, jit: bool) -> Finding:
    from ...toolchain import missing

    if tools.ninja:
        return ok("ninja", f"{tools.ninja.version}, {tools.ninja.path}")
    if not needed:
        return ok("ninja", "none; every operator is compiled already")
    error = missing(tools, "cpu")
    fix = error.fix if error and "ninja" in error.what else "pip install ninja"
    return (fail if jit else warn)("ninja", "not found", "ninja 1.10 or newer", fix)


def launcher(tools: Toolchain, installer: str, wish: str | None) -> Finding:
    """ccache or sccache."""
    if tools.launcher is None:
        if tools.host is None:
            return ok("launcher", "none; nothing is compiled here")
        if wish and wish.lower() == "none":
            return ok("launcher", "none, as FLEXOPS_COMPILER_LAUNCHER says")
        fix = f"{installer or 'apt-get install -y'} ccache"
        if wish:
            return warn(
                "launcher",
                f"{wish}, which FLEXOPS_COMPILER_LAUNCHER names, cannot be used",
                "a compiler cache that can",
                fix,
            )
        return ok(
            "launcher", f"none; with ccache, repeated builds take a fraction of the time: {fix}"
        )
    text = f"{tools.launcher.path.name} {tools.launcher.version}, {tools.launcher.path}"
    return ok("launcher", text)


def cuda_libraries(torch: TorchFact, variables: Mapping[str, str]) -> Finding:
    """The libraries that a process with torch has loaded, against those that torch was installed
    with."""
    cuda = [one for one in torch.loaded if not one.soname.startswith(("libstdc++", "libgomp"))]
    if torch.state != "ok":
        return ok("cuda-libraries", "not looked at: torch cannot be imported")
    if not cuda:
        return ok(
            "cuda-libraries",
            "none loaded; torch is a CPU build" if not (torch.cuda or torch.hip) else "none loaded",
        )
    if twice := _two_versions(cuda):
        return warn(
            "cuda-libraries", f"two versions loaded: {twice}", "one", _search_path_fix(variables)
        )
    if shadowed := _shadowed(cuda, torch.installed):
        return warn(
            "cuda-libraries",
            f"not the ones installed with torch: {', '.join(shadowed)}",
            "torch's own libraries",
            _search_path_fix(variables),
        )
    runtime = next((one for one in cuda if one.soname.startswith("libcudart")), cuda[0])
    major = _key(runtime.soname)[1]
    if (
        torch.cuda
        and runtime.soname.startswith("libcudart")
        and major not in ("", torch.cuda.split(".")[0])
    ):
        found = f"{runtime.path}, torch is built for CUDA {torch.cuda}"
        return warn(
            "cuda-libraries",
            found,
            f"libcudart.so.{torch.cuda.split('.')[0]}",
            _search_path_fix(variables),
        )
    return ok(
        "cuda-libraries",
        f"{len(cuda)} loaded, all as installed with torch ({os.path.dirname(runtime.path)})",
    )


def _key(name: str) -> tuple[str, str]:
    """(family, major version) of a library's file name: ``libcudart.so.13.0.96`` and
    ``libcudart-0a1b2c3d.so.13`` are one."""
    match = _FAMILY.match(name)
    return (match[1], match[2] or "") if match else (name, "")


def _two_versions(libraries: Iterable[LoadedLibrary]) -> str:
    paths: dict[str, set[str]] = {}
    for one in libraries:
        paths.setdefault(_key(one.soname)[0], set()).add(one.path)
    doubled = [
        sorted(found) for family, found in paths.items() if family == "libcudart" and len(found) > 1
    ]
    return ", ".join(doubled[0]) if doubled else ""


def _shadowed(libraries: Iterable[LoadedLibrary], installed: Iterable[str]) -> list[str]:
    own: dict[tuple[str, str], set[str]] = {}
    for path in installed:
        own.setdefault(_key(os.path.basename(path)), set()).add(os.path.realpath(path))
    return [
        one.path
        for one in libraries
        if (mine := own.get(_key(one.soname))) and os.path.realpath(one.path) not in mine
    ]


def _search_path_fix(variables: Mapping[str, str]) -> str:
    if variables.get("LD_LIBRARY_PATH"):
        return f"unset LD_LIBRARY_PATH   # it is {variables['LD_LIBRARY_PATH']}"
    return "pip install --force-reinstall torch"
