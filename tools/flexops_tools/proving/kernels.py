"""Which compilers and architectures stand for which rows of the matrix, and the report of what was
measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from flexops import targets
from flexops.build.describe import catalog
from flexops.compute_capability import parse_arch_list
from flexops.errors import TargetError
from flexops.inspection.baseline import Baseline, Change, compare
from flexops.inspection.measuring import Measured, Progress, measure
from flexops.settings import Settings
from flexops.toolchain import discovery, nvrtc
from flexops.toolchain.nvrtc import DeviceCompiler

from ..targets import proven
from . import hip_proof

ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0")
QUICK = ("9.0",)
_USUAL = "cu130-sm90"
"""The row whose NVRTC is proposed where there is none."""
_RULE = "| --- | --- | --- | --- | --- | --- | --- |"


def places(
    ids: Sequence[str], chosen: Settings, *, quick: bool = False
) -> Iterator[tuple[DeviceCompiler, list[str]]]:
    """Each NVRTC that is here with the architectures to compile for: those of the rows that are
    named, or ``ARCHITECTURES``.

    Raises:
        TargetError: a row is named whose NVRTC is not here, or there is none at all.
    """
    here: dict[str, DeviceCompiler] = {}
    for one in nvrtc.find(discovery.search_context(chosen)).usable:
        here.setdefault(one.value.version.major_minor, one.value)
    if not ids:
        if not here:
            version = targets.load().find(_USUAL).toolkit_minor
            raise TargetError(
                "no kernels can be compiled here",
                found="no NVRTC",
                required="an NVRTC of any version",
                fix=install_nvrtc(version, ""),
            )
        for version in sorted(here, reverse=True):
            yield here[version], list(QUICK if quick else ARCHITECTURES)
        return
    wanted: dict[str, list[str]] = defaultdict(list)
    for name in ids:
        row = targets.load().find(name)
        if row.accelerator != "cuda":
            what = f"{name} has no kernels to compile"
            raise TargetError(what, required="a row for GPUs", fix="flexops target list")
        version = row.toolkit_minor
        if version not in here:
            raise TargetError(
                f"the kernels of {name} cannot be compiled here",
                found=f"NVRTC {', '.join(sorted(here))}" if here else "no NVRTC",
                required=f"NVRTC {version}", fix=install_nvrtc(version, name),
            )  # fmt: skip
        wanted[version] += [one for one in row.capabilities if one not in wanted[version]]
    for version, architectures in wanted.items():
        yield here[version], architectures


def install_nvrtc(version: str, target_id: str) -> str:
    """The command that installs the package index's NVRTC ``version``, and proves a row with it.

    It goes into a folder of its own: wheels of one CUDA major share their files, so that another
    one beside torch would replace torch's.
    """
    major = version.partition(".")[0]
    old = int(major) < 13  # from CUDA 13 on, the names have no suffix and the files one folder
    wheel = f"nvidia-cuda-nvrtc{f'-cu{major}' if old else ''}=={version}.*"
    place = f".flexops/nvrtc-{version}"
    home = f"$PWD/{place}/nvidia/{'cuda_nvrtc' if old else f'cu{major}'}"
    install = f"pip install --no-deps --target {place} '{wheel}'"
    return f"{install} && CUDA_HOME={home} flexops target prove {target_id}".rstrip()


def prove(
    ids: Sequence[str],
    families: Sequence[str],
    known: Baseline,
    chosen: Settings,
    *,
    quick: bool = False,
    progress: Progress | None = None,
) -> tuple[list[Measured], list[Change]]:
    """Compile flexops' own kernels by the NVRTCs that ``places`` gives; what each takes, and how
    that differs from the baseline."""
    specs = [spec for spec in catalog.select(tuple(families)) if spec.project.own]
    measured: list[Measured] = []
    for compiler, architectures in places(ids, chosen, quick=quick):
        measured += measure(
            specs, parse_arch_list(";".join(architectures)), compiler, chosen, progress=progress
        )
    return measured, compare(known, measured)


def facts(
    measured: Iterable[Measured], amd: Iterable[hip_proof.Compiled], date: str
) -> list[proven.Fact]:
    """What compiled, for the table "tested with": a fact for each toolkit and architecture."""
    families: dict[tuple[str, str], set[str]] = defaultdict(set)
    for one in measured:
        toolkit = f"CUDA {one.compiler.rpartition(' ')[2]}"
        families[toolkit, str(one.architecture.capability.base)].add(one.family)
    matrix = targets.load()
    toolkits = {name: proven.toolkit_of(row) for row in matrix.targets for name in row.capabilities}
    for compiled in amd:
        subject = f"{compiled.architecture} by {compiled.compiler}"
        families[toolkits.get(compiled.architecture, "ROCm"), subject].add(compiled.family)
    own = sum(spec.project.own for spec in catalog.select(()))
    found = []
    for (toolkit, subject), held in sorted(families.items()):
        outcome = "" if len(held) == own else f"{len(held)} of {own} families"
        torch = proven.torch_of(matrix, toolkit)
        found.append(proven.Fact(toolkit, torch, proven.KERNELS, subject, outcome, date))
    return found


def report(measured: Sequence[Measured], amd: Sequence[hip_proof.Compiled] = ()) -> str:
    """Markdown: for each family, compiler and architecture how many kernels, the most registers,
    and every kernel that spills or has a stack."""
    groups: dict[tuple[str, str, str], list[Measured]] = defaultdict(list)
    for one in measured:
        groups[one.family, one.compiler, one.architecture.capability.base.sm].append(one)
    lines = [
        (
            "| family | compiler | for | kernels | registers: least, median, most | with a stack or"
            " spills | KiB of machine code |"
        ),
        _RULE,
    ]
    for (family, compiler, architecture), kernels in sorted(groups.items()):
        registers = sorted(one.resources.get("registers", 0) for one in kernels)
        spilling = sum(
            bool(one.resources.get("stack") or one.resources.get("spill_stores")) for one in kernels
        )
        size = sum(one.code.stat().st_size for one in kernels) / 1024
        middle = registers[len(registers) // 2]
        lines.append(
            f"| {family} | {compiler} | {architecture} | {len(kernels)} | {registers[0]}, {middle},"
            f" {registers[-1]} | {spilling or ''} | {size:.0f} |"
        )
    lines += [
        f"| {one.family} | {one.compiler} | {one.architecture} | {len(one.kernels)} | | | |"
        for one in amd
    ]
    odd = sorted(
        {
            (one.kernel, one.compiler, one.architecture.capability.sm, *_spills(one))
            for one in measured
            if any(_spills(one))
        }
    )
    if odd:
        lines += [
            "",
            "| kernel | compiler | for | bytes of stack | spilled: stores, loads |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| `{kernel}` | {compiler} | {sm} | {stack} | {stores}, {loads} |"
            for kernel, compiler, sm, stack, stores, loads in odd
        ]
    return "\n".join(lines) + "\n"


def _spills(one: Measured) -> tuple[int, int, int]:
    return tuple(one.resources.get(name, 0) for name in ("stack", "spill_stores", "spill_loads"))  # type: ignore[return-value]
