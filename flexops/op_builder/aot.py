"""Builds libraries ahead of time: for an install, an image, or a GPU that this machine has not got."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import distribution, toolchain
from ..errors import CacheError, ToolchainError
from ..settings import Settings
from . import builder, catalog, layout, loader
from .builder import Result
from .compiler import Progress
from .manifest import FILE_NAME
from .spec import DeviceType


def build(
    names: tuple[str, ...],
    chosen: Settings,
    *,
    devices: Sequence[DeviceType] | None = None,
    arch_list: str | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Build the libraries of the ops called ``names`` (none: all), together.

    Args:
        devices: device types to build for; by default ``cpu``, and ``cuda`` where there is a toolkit that matches torch.
        arch_list: what ``TORCH_CUDA_ARCH_LIST`` would say; it need not be this machine's GPU.
        out: also copy each library and its manifest to ``<out>/<op>-<device>/``.

    Raises:
        ToolchainError, ArchitectureError: a build was asked for that cannot be planned. Failed compiles are in the results.
    """
    if arch_list is not None:
        chosen = replace(chosen, arch_list=arch_list)
    wanted = tuple(devices) if devices is not None else default_devices(chosen)
    specs = catalog.select(names)
    plans = [loader.local_plan(spec, device, chosen) for device in wanted for spec in specs if device in spec.devices]
    results = builder.obtain(plans, loader.open_cache(chosen), progress=progress, debug=chosen.log == "debug")
    if out is not None:
        for result in results:
            if result.entry:
                install(result, out)
    return results


def default_devices(chosen: Settings) -> tuple[DeviceType, ...]:
    """What can be built here: the CPU always, CUDA (or ROCm) where a toolkit matches torch."""
    tools = toolchain.discover(chosen, device="cuda")
    return ("cpu", "cuda") if tools.cuda or (tools.rocm and tools.torch and tools.torch.hip) else ("cpu",)


def install(result: Result, out: Path) -> Path:
    """Copy a built library and its manifest to ``<out>/<op>-<device>/``, replacing what is there; returns that directory.

    Raises:
        CacheError: the directory cannot be written.
    """
    entry = result.require()
    target = out / result.plan.name
    staged = out / f".{result.plan.name}.new"
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        for name in (entry.manifest.library, FILE_NAME):
            shutil.copy2(entry.directory / name, staged / name)
        shutil.rmtree(target, ignore_errors=True)
        staged.rename(target)
    except OSError as error:
        raise CacheError("a library cannot be stored", found=f"{target}: {error.strerror}", required="a writable directory with free space") from error
    return target


def build_into_package(names: tuple[str, ...], chosen: Settings, package: Path, progress: Progress | None = None) -> list[Path]:
    """Compile ops into a package that is being built, as ``FLEXOPS_AOT`` asks; every one of them must succeed.

    Raises:
        FlexopsError: the diagnosis of the first op that cannot be built.
    """
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
            required=f"an environment without it: it and {distribution.NAME} would overwrite each other's modules",
            fix="pip uninstall --yes flexops   # or install this one into another environment",
        )
    results = build(names, chosen, devices=chosen.aot_devices or None, out=package / layout.aot_root().name, progress=progress)
    for result in results:
        if result.error:
            raise result.error
    return [package / layout.aot_root().name / result.plan.name for result in results]

