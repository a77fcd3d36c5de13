"""``flexops build``: compile operators ahead of time."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .. import settings, targets, toolchain
from ..build.compile import progress
from ..build.compile.building import Result
from ..build.compile.device_code import KernelResult
from ..build.deliver import aot
from ..build.describe import catalog
from ..build.describe.spec import DeviceType
from ..builder import registered
from ..compute_capability import parse_arch_list
from ..errors import ArchitectureError, FlexopsError
from ..targets.fit import unfit

_INNER = ("_backward", "_plain", "_forward")
NAMES = "; ".join(
    f"{spec.name} ({', '.join(op for op in spec.ops if not op.endswith(_INNER)) or 'gradients'})"
    for spec in catalog.CATALOG
)


_HELP = (
    "Families or operators to build, or another project's library (mylib, mylib.scale); all of"
    f" flexops' if none is named: {NAMES}."
)


class Device(str, Enum):
    """The device types, as choices of an option."""

    cpu = "cpu"
    cuda = "cuda"


def build(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help=_HELP)] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help=(
                "Build for this row of the matrix (see `flexops target list`), with its torch and"
                " compiler."
            )
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help='Build for these GPU architectures, such as "8.9;9.0+PTX", with what is here.'
        ),
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Build for this device type only.")] = None,
    rare: Annotated[
        bool,
        typer.Option(
            "--rare",
            help=(
                "Also kernels of dtypes, shapes and options that few calls have, which else are"
                " compiled at their first launch."
            ),
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also copy the libraries and their manifests here.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers in parallel.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Compile operators ahead of time, also for GPUs that are not in this machine."""
    if target and arch:
        raise ArchitectureError(
            "--target and --arch both name architectures",
            required="one of them",
            fix="omit --arch",
        )
    chosen = settings.current()
    devices: tuple[DeviceType, ...] | None = None
    if target:
        row = targets.load().find(target)
        require_fit(row, chosen)
        devices = ("cpu",) if row.accelerator == "cpu" else ("cpu", "cuda")
        chosen = (
            chosen._replace(rocm_arch_list=row.arch_list) if row.accelerator == "rocm" else chosen
        )
        arch = row.arch_list if row.accelerator == "cuda" else None
    elif arch:
        devices = ("cpu", "cuda")
    if device:
        devices = (device.value,)
    chosen = chosen._replace(max_jobs=jobs or chosen.max_jobs)
    registered.load_for(tuple(ops or ()))
    with progress.shown("operators", "quiet" if as_json else chosen.log) as report:
        results = aot.build(
            tuple(ops or ()),
            chosen,
            devices=devices,
            arch_list=arch,
            rare=rare,
            out=out,
            progress=report,
        )
    if as_json:
        typer.echo(json.dumps([_as_dict(result) for result in results], indent=1))
    else:
        for result in results:
            typer.echo(_line(result))
    for note in dict.fromkeys(note for result in results for note in result.notes):
        typer.echo(f"note: {note}", err=True)
    failed = [result.error for result in results if result.error]
    if failed:
        raise typer.Exit(failed[0].exit_code)


def require_fit(row: targets.Target, chosen: settings.Settings) -> None:
    """Raises ``ToolchainError`` unless this environment's torch and device compiler are the row's
    own."""
    compiler = None
    if row.accelerator == "cuda" and (choice := toolchain.device_compiler(chosen)).value:
        compiler = choice.value.version
    elif row.accelerator == "rocm" and (rocm := toolchain.discover(chosen, device="cuda").rocm):
        compiler = rocm.version
    if error := unfit(row, toolchain.torch_build(), compiler):
        raise error


def _line(result: Result) -> str:
    if result.error:
        return f"{result.plan.name:<14} FAILED  {result.error}"
    entry = result.require()
    what = ", ".join(entry.manifest.architectures or entry.manifest.isa_levels)
    if result.architectures:
        served = {kernel.plan.architecture.capability.base for kernel in result.kernels}
        kept = [
            name
            for name in result.architectures
            if parse_arch_list(name)[0].capability.base in served
        ]
        left = [name for name in result.architectures if name not in kept]
        made = sum(not kernel.cached for kernel in result.kernels)
        what = (
            f"{len(result.kernels)} kernels"
            + (f" for {', '.join(kept)}" if kept else "")
            + (f", {made} compiled now" if made else "")
        )
        what += f"; none run on {', '.join(left)}, plain PyTorch does" if left else ""
    # in one run with the others, whose time the line above reports
    how = "was there" if result.cached else "compiled"
    return (
        f"{result.plan.name:<14} {how:<10} {entry.library.stat().st_size / 1024:.0f} KiB "
        f" {what}\n{'':<14} {entry.library}"
    )


def _as_dict(result: Result) -> dict[str, object]:
    error: FlexopsError | None = result.error
    manifest = result.entry.manifest if result.entry else None
    return {
        "name": result.plan.name,
        "device": result.plan.device,
        "library": str(result.entry.library) if result.entry else None,
        "architectures": list(result.architectures or (manifest.architectures if manifest else ())),
        "kernels": [_kernel_as_dict(kernel) for kernel in result.kernels],
        "isa_levels": list(manifest.isa_levels) if manifest else [],
        "cached": result.cached,
        "seconds": round(result.seconds, 3),
        "error": (
            None
            if error is None
            else {
                "what": error.what,
                "found": error.found,
                "required": error.required,
                "fix": error.fix,
            }
        ),
    }


def _kernel_as_dict(result: KernelResult) -> dict[str, object]:
    code = str(result.entry.library) if result.entry else None
    return {
        "kernel": result.plan.expression,
        "architecture": str(result.plan.architecture),
        "code": code,
        "cached": result.cached,
    }
