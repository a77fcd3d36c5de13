"""Builds libraries ahead of time: for an install, an image, or a GPU that this machine has not
got."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ... import distribution, toolchain
from ...errors import CacheError, ToolchainError
from ...settings import Settings
from ..compile import building, device_code
from ..compile.building import Result
from ..compile.ninja import Progress
from ..describe import catalog, layout
from ..describe.spec import DeviceType, OpSpec
from ..load import loader, provider
from ..plan import kernel_names, kernel_plan, plan
from ..store.cache import Entry
from ..store.manifest import FILE_NAME, Manifest


def build(
    names: tuple[str, ...],
    chosen: Settings,
    *,
    devices: Sequence[DeviceType] | None = None,
    arch_list: str | None = None,
    rare: bool = False,
    out: Path | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Build the libraries of the ops called ``names`` (none: all), together.

    Args:
        devices: device types to build for; by default ``cpu``, and ``cuda`` where there is an NVRTC
            that matches torch.
        arch_list: what ``TORCH_CUDA_ARCH_LIST`` would say; it need not be this machine's GPU.
        rare: also kernels of dtypes, shapes and options that few calls have, which else are
            compiled when they are first launched.
        out: also copy each library and its manifest to ``<out>/<op>-<device>/``.

    Raises:
        ToolchainError, ArchitectureError: a build was asked for that cannot be planned. Failed
            compiles are in the results.
        CacheError: ``out`` cannot be written.
    """
    if arch_list is not None:
        chosen = chosen._replace(arch_list=arch_list)
    if out is not None:  # before the compilers' minutes
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unstorable(out, error) from error
    results = build_specs(
        catalog.select(names),
        devices if devices is not None else default_devices(chosen),
        chosen,
        rare=rare,
        progress=progress,
    )
    if out is not None:
        for result in results:
            if result.entry:
                install(result, out)
    return results


def build_specs(
    specs: Sequence[OpSpec],
    devices: Sequence[DeviceType],
    chosen: Settings,
    *,
    progress: Progress | None = None,
    kernels: bool = True,
    rare: bool = False,
) -> list[Result]:
    """The libraries of these specs, together; with those for CUDA also their kernels (unless not
    ``kernels``), for ``chosen.arch_list`` or the GPUs here.

    Raises:
        ToolchainError, ArchitectureError: a build was asked for that cannot be planned. Failed
            compiles are in the results.
    """
    torch = toolchain.torch_build()
    hip = bool(torch and torch.hip)
    pairs = [
        (spec, device)
        for device in devices
        for spec in specs
        if device in spec.devices and (spec.hip or not hip or device == "cpu")
    ]
    choice = None
    if kernels and any(device == "cuda" for _, device in pairs) and not hip:
        choice = provider.compiler_for(
            chosen, toolchain.local_capabilities(), asked=chosen.arch_list
        )
    plans = [loader.local_plan(spec, device, chosen) for spec, device in pairs]
    cache = loader.open_cache(chosen)
    results = building.obtain(plans, cache, progress=progress, debug=chosen.log == "debug")
    for (spec, device), result in zip(pairs, results, strict=True):
        loader.share(spec, device, cache, result.entry if not result.cached else None)
    return _with_kernels(pairs, results, choice, chosen, rare, progress) if choice else results


def _with_kernels(
    pairs: Sequence[tuple[OpSpec, DeviceType]],
    results: list[Result],
    choice: provider.CompilerChoice,
    chosen: Settings,
    rare: bool,
    progress: Progress | None,
) -> list[Result]:
    """The results with the kernels that their libraries name; a kernel that fails fails its
    library."""
    plans: dict[int, list[kernel_plan.KernelPlan]] = {}
    for number, ((spec, device), result) in enumerate(zip(pairs, results, strict=True)):
        if device == "cuda" and result.entry:
            names = kernel_names.names_in(result.entry.library)
            others = kernel_names.rare_names_in(result.entry.library)
            each = [
                one
                for one in kernel_names.single(choice.architectures)
                if spec.runs_on(one.capability)
            ]
            every = [
                (name, one)
                for one in each
                for name in (*names, *others)
                if kernel_names.fitted(name, one)
            ]
            wanted = (
                every
                if rare
                else [(name, one) for one in each for name in kernel_names.ahead(names, one)]
            )
            plans[number] = [
                provider.plan_kernel(spec, name, one, choice.compiler) for name, one in wanted
            ]
    jobs = device_code.choose_jobs(toolchain.resources.detect(), chosen.max_jobs)
    together = [plan for own in plans.values() for plan in own]
    made = iter(
        device_code.obtain(
            together,
            loader.open_cache(chosen),
            jobs=jobs,
            time_limit=chosen.compile_timeout,
            progress=progress,
        )
    )
    complete = list(results)
    for number, own in plans.items():
        kernels = tuple(next(made) for _ in own)
        error = next((kernel.error for kernel in kernels if kernel.error), None)
        complete[number] = replace(
            results[number],
            kernels=kernels,
            architectures=tuple(map(str, choice.architectures)),
            notes=choice.notes,
            error=error,
        )
    return complete


def default_devices(chosen: Settings) -> tuple[DeviceType, ...]:
    """What can be built here: the CPU always, CUDA where there is an NVRTC (or nvcc) that matches
    torch, ROCm where there is one that does."""
    torch = toolchain.torch_build()
    if torch and torch.hip:
        return ("cpu", "cuda") if toolchain.discover(chosen, device="cuda").rocm else ("cpu",)
    return ("cpu", "cuda") if toolchain.device_compiler(chosen).taken else ("cpu",)


def install(result: Result, out: Path) -> Path:
    """Copy a built library with its kernels to ``<out>/<op>-<device>/`` and
    ``<out>/<op>-<architecture>-<kernel>/``, each with its manifest, replacing what is there;
    returns the library's directory.

    Raises:
        CacheError: the directory cannot be written.
    """
    for kernel in result.kernels:
        copy_entry(kernel.require(), out)
    entry = result.require()
    if not result.kernels:
        return copy_entry(entry, out)
    made_by = result.kernels[0].plan.compiler.version.major_minor
    return copy_entry(
        entry,
        out,
        entry.manifest._replace(architectures=result.architectures, cuda_version=made_by),
    )


def install_all(results: Sequence[Result], out: Path) -> list[Path]:
    """Every library and kernel, or none: raises the first one's error. Returns their
    directories."""
    for result in results:
        result.require()
    for result in results:
        install(result, out)
    return [
        out / entry.manifest.name
        for result in results
        for entry in (result.require(), *(kernel.require() for kernel in result.kernels))
    ]


def copy_entry(entry: Entry, out: Path, manifest: Manifest | None = None) -> Path:
    """Put a finished artifact into a folder of a package."""
    target = out / entry.manifest.name
    staged = out / f".{entry.manifest.name}.new"
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        shutil.copy2(entry.library, staged / entry.manifest.library)
        (staged / FILE_NAME).write_text((manifest or entry.manifest).to_json(), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        staged.rename(target)
    except OSError as error:
        raise _unstorable(target, error) from error
    return target


def _unstorable(target: Path, error: OSError) -> CacheError:
    return CacheError(
        "a library cannot be stored",
        found=f"{target}: {error.strerror}",
        required="a writable directory with free space",
    )


def build_portable(
    specs: Sequence[OpSpec],
    devices: Sequence[DeviceType],
    chosen: Settings,
    progress: Progress | None = None,
) -> list[Result]:
    """The libraries of a wheel that needs no compiler where it is installed: host code, for every
    torch with the stable ABI."""
    from ...toolchain import zig

    tools, resources = zig.toolchain_for(chosen), toolchain.resources.detect()
    pairs = [(spec, device) for spec in specs for device in spec.devices if device in devices]
    plans = [
        plan.plan_op(
            spec,
            device,
            tools,
            csrc=layout.csrc_root(),
            resources=resources,
            max_jobs=chosen.max_jobs,
        )._replace(timeout=chosen.compile_timeout)
        for spec, device in pairs
    ]
    return building.obtain(
        plans, loader.open_cache(chosen), progress=progress, debug=chosen.log == "debug"
    )


def build_into_package(
    names: tuple[str, ...], chosen: Settings, package: Path, progress: Progress | None = None
) -> list[Path]:
    """Compile ops into a package that is being built, as ``FLEXOPS_AOT`` or ``FLEXOPS_WHEEL`` asks;
    every one of them must succeed.

    Raises:
        FlexopsError: the diagnosis of the first op that cannot be built.
    """
    if chosen.wheel:
        results = build_portable(
            catalog.select(names), chosen.aot_devices or ("cpu", "cuda"), chosen, progress
        )
        return install_all(results, package / layout.AOT)
    if toolchain.torch_build() is None:
        raise ToolchainError(
            "FLEXOPS_AOT asks for compiled operators, but this build sees no torch",
            found="no torch in the environment that runs the build (build isolation hides it)",
            required="the torch that flexops will be used with",
            fix="pip install torch ninja && FLEXOPS_AOT=all pip install --no-build-isolation .",
        )
    if namesake := distribution.namesake():
        raise ToolchainError(
            "another project's distribution has the import name flexops here",
            found=namesake,
            required=(
                f"an environment without it: it and {distribution.NAME} would overwrite each"
                " other's modules"
            ),
            fix="pip uninstall --yes flexops   # or install this one into another environment",
        )
    results = build(names, chosen, devices=chosen.aot_devices or None, progress=progress)
    return install_all(results, package / layout.AOT)
