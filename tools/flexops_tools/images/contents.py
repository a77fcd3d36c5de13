"""An image's contents: what is in it, and whether that is what its row of the matrix asks for.

This file alone runs in an image, with the image's flexops and the standard library:
``contents.py facts`` and, as a stage of the build, ``contents.py check TARGET``, which fails if the
image is not what the row asks for. Both print JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexops import __version__, distribution, targets, toolchain
from flexops.build.describe import layout
from flexops.build.describe.catalog import CATALOG
from flexops.build.store import manifest
from flexops.build.store.cache import read_entry
from flexops.compute_capability import ComputeCapability, runs_on
from flexops.doctor.examination import examine
from flexops.doctor.finding import DoctorReport, Finding, fail, ok, warn, worst
from flexops.targets import Target
from flexops.toolchain.version import Version

MOST_ADDED_BYTES = 40_000_000
_COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "hipcc", "ccache")
_BUILD_PLACES = (
    "/opt/wheelhouse",
    "/opt/toolkit",
    "/opt/build",
    "/opt/kernels",
    "/opt/ccache",
    "/usr/local/cuda",
    "/opt/docker/ca-certificates",
)
_PIP_SETTINGS = (
    "/etc/pip.conf",
    "/etc/xdg/pip/pip.conf",
    "/opt/flexops/pip.conf",
    "~/.pip/pip.conf",
    "~/.config/pip/pip.conf",
)


@dataclass(frozen=True)
class Library:
    """One ahead-of-time library: ``name`` is ``<op>-<device>``; ``refusal`` is why it would not be
    loaded."""

    name: str
    device: str = ""
    cuda_version: str = ""
    architectures: tuple[str, ...] = ()
    glibc: str = ""
    glibcxx: str = ""
    refusal: str = ""
    path: str = ""


@dataclass(frozen=True)
class ImageFacts:
    """The inside of an image.

    Attributes:
        packages: installed Python packages, lower-case name -> version.
        torch_cuda, torch_hip: what torch is built for; empty for neither.
        compilers: the ones on PATH.
        leftovers: places and settings of the build that are still there.
        added_bytes: size of flexops and of what only it needs: what it adds over torch and Python.
    """

    python: str
    packages: Mapping[str, str]
    torch_cuda: str
    torch_hip: str
    libraries: tuple[Library, ...]
    compilers: tuple[str, ...]
    leftovers: tuple[str, ...]
    added_bytes: int
    flexops: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ImageFacts:
        """Raises ``TypeError`` or ``KeyError`` if these are not an image's facts."""
        libraries = tuple(
            Library(**{**one, "architectures": tuple(one["architectures"])})
            for one in values["libraries"]
        )
        return cls(
            **{
                **values,
                "libraries": libraries,
                "compilers": tuple(values["compilers"]),
                "leftovers": tuple(values["leftovers"]),
            }
        )


def facts() -> ImageFacts:
    """Versions, libraries, sizes and left-overs of the image that this runs in."""
    torch = toolchain.torch_build()
    return ImageFacts(
        python=".".join(map(str, sys.version_info[:3])),
        packages={
            dist.metadata["Name"].lower(): dist.version
            for dist in importlib.metadata.distributions()
        },
        torch_cuda=(torch.cuda or "") if torch else "",
        torch_hip=(torch.hip or "") if torch else "",
        libraries=tuple(_libraries(torch)),
        compilers=tuple(name for name in _COMPILERS if shutil.which(name)),
        leftovers=tuple(_leftovers()),
        added_bytes=sum(map(_size, _own_packages())),
        flexops=__version__,
    )


def _libraries(torch: Any) -> Iterable[Library]:
    root = layout.aot_root()
    for directory in sorted(root.iterdir()) if root.is_dir() else ():
        entry, damage = read_entry(directory)
        if entry is None:
            yield Library(directory.name, refusal=damage.reason if damage else "no library")
            continue
        # device code, which the driver opens, and no torch; the library's manifest says what it is
        # for
        if entry.manifest.kernel:
            continue
        refusal = manifest.judge(entry.manifest, torch) if torch else None
        known = entry.manifest
        yield Library(
            directory.name,
            known.device,
            known.cuda_version,
            tuple(known.architectures),
            known.glibc,
            known.glibcxx,
            refusal.reason if refusal else "",
            str(entry.library),
        )


def _leftovers() -> Iterable[str]:
    """What the build used and no user should see: its places, and settings of package
    indexes."""
    yield from (
        place
        for place in (*_BUILD_PLACES, *_PIP_SETTINGS)
        if os.path.exists(os.path.expanduser(place))
    )
    yield from (
        name
        for name in os.environ
        if name.startswith("PIP_") or name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    )


def _own_packages() -> set[str]:
    """flexops and what it needs, without torch and what torch needs."""
    return _closure(distribution.NAME, stop="torch") - _closure("torch")


def _closure(name: str, stop: str = "") -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        one = re.split(r"[^A-Za-z0-9._-]", ahead.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if one in found or one == stop:
            continue
        try:
            requirements = importlib.metadata.requires(one) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(one)
        ahead += [requirement for requirement in requirements if "extra ==" not in requirement]
    return found


def _size(name: str) -> int:
    files = importlib.metadata.files(name) or []
    return sum(
        path.stat().st_size
        for path in {Path(str(file.locate())) for file in files}
        if path.is_file()
    )


def check(target_id: str) -> tuple[DoctorReport, list[Finding], ImageFacts]:
    """Doctor's report, the judgement of the image, and the facts; every library is opened, which
    needs no GPU."""
    row = targets.load().find(target_id)
    known = facts()
    return examine(target_id), [*judge(row, known, strict_base=False), *_opened(known)], known


def _opened(known: ImageFacts) -> Iterable[Finding]:
    """Each library for a GPU, opened by torch in this process, which needs none; those for the CPU
    doctor has opened, and run."""
    libraries = [library for library in known.libraries if library.device != "cpu" and library.path]
    if not libraries:
        return
    import torch

    from flexops import ops as _ops  # noqa: F401  (defines what the libraries implement)

    for library in libraries:
        try:
            torch.ops.load_library(library.path)  # type: ignore[no-untyped-call, unused-ignore]
            yield ok(f"open-{library.name}", library.path)
        except (OSError, RuntimeError) as error:
            yield fail(
                f"open-{library.name}",
                str(error),
                "a library that torch can open",
                "flexops image build --no-cache <target>",
            )


def judge(
    row: Target, facts: ImageFacts, *, strict_base: bool, runtime: bool = True
) -> Iterator[Finding]:
    """Everything about the contents.

    Args:
        strict_base: the image stands on the row's own base, so that its Python must be the row's.
        runtime: it is the runtime stage, in which no compiler and nothing of the build may be.
    """
    rebuild = f"flexops image build {row.id}"
    yield _python(row, facts, strict_base, rebuild)
    yield from _packages(row, facts, rebuild)
    yield from _judged_libraries(row, facts, rebuild)
    if runtime:
        yield _clean(facts)
        yield _small(facts)


def _python(row: Target, facts: ImageFacts, strict_base: bool, rebuild: str) -> Finding:
    minor = ".".join(facts.python.split(".")[:2])
    if minor == row.python:
        return ok("image-python", facts.python)
    oldest, newest = map(Version.parse, row.python_range)
    if strict_base or not oldest <= Version.parse(minor) <= newest:
        return fail("image-python", facts.python, f"Python {row.python}", rebuild)
    return warn(
        "image-python",
        f"{facts.python}, the base image's",
        f"Python {row.python}, which the row's base has",
        f"{rebuild}   # without another base",
    )


def _packages(row: Target, facts: ImageFacts, rebuild: str) -> Iterator[Finding]:
    for name, wanted in (("torch", row.torch), ("ninja", row.ninja)):
        found = facts.packages.get(name, "none")
        fits = found.partition("+")[0] == wanted
        yield ok(f"image-{name}", found) if fits else fail(f"image-{name}", found, wanted, rebuild)
    built_for = {"cuda": facts.torch_cuda, "rocm": facts.torch_hip}.get(row.accelerator, "")
    if row.accelerator == "cpu":
        yield _cpu_torch(facts, rebuild)
        return
    fits = built_for.split(".")[:2] == row.toolkit.split(".")[:2]
    what = f"torch for {row.accelerator.upper()} {built_for or 'nothing'}"
    yield (
        ok("image-torch-build", what)
        if fits
        else fail(
            "image-torch-build", what, f"{row.accelerator.upper()} {row.toolkit_minor}", rebuild
        )
    )


def _cpu_torch(facts: ImageFacts, rebuild: str) -> Finding:
    """A torch for a GPU runs on the CPU, too: the build took it with ``--accept-other-torch``."""
    found = torch_build(facts)
    if found == "cpu":
        return ok("image-torch-build", "torch for the CPU")
    fix = f"{rebuild}   # where the row's own index answers, without --accept-other-torch"
    return warn("image-torch-build", f"torch for {found}", "torch for the CPU", fix)


def torch_build(facts: ImageFacts) -> str:
    """What torch is built for: ``cpu``, ``cuda13.0`` or ``rocm7.2.4``."""
    if facts.torch_hip:
        return f"rocm{facts.torch_hip}"
    return f"cuda{facts.torch_cuda}" if facts.torch_cuda else "cpu"


def _judged_libraries(row: Target, facts: ImageFacts, rebuild: str) -> Iterator[Finding]:
    """One for each op, on the CPU and on what the row is for; and one for whatever else is damaged:
    kernels, above all."""
    there = {library.name: library for library in facts.libraries}
    devices = ("cpu",) if row.accelerator == "cpu" else ("cpu", "cuda")
    for spec in CATALOG:
        for device in (device for device in devices if device in spec.devices):
            library = there.pop(f"{spec.name}-{device}", None) or Library(
                f"{spec.name}-{device}", refusal="is missing"
            )
            yield _library(row, library, device, rebuild)
    for other in there.values():
        if other.refusal:
            yield fail(f"image-{other.name}", other.refusal, "nothing damaged", rebuild)


def _library(row: Target, library: Library, device: str, rebuild: str) -> Finding:
    name = f"image-{library.name}"
    needs = ", ".join(
        part
        for part in (
            f"glibc {library.glibc}" * bool(library.glibc),
            f"GLIBCXX {library.glibcxx}" * bool(library.glibcxx),
        )
        if part
    )
    if library.refusal:
        return fail(name, library.refusal, "a library that can be loaded here", rebuild)
    if device == "cpu":
        return ok(name, f"compiled, needs {needs or 'nothing special'}")
    compiled = ", ".join(library.architectures) or "no architecture"
    lacking = [one for one in row.capabilities if not _covers(row, library, one)]
    if row.accelerator == "cuda" and library.cuda_version != row.toolkit_minor:
        return fail(
            name,
            f"compiled with CUDA {library.cuda_version or 'unknown'}",
            f"CUDA {row.toolkit_minor}",
            rebuild,
        )
    if lacking:
        return fail(name, f"compiled for {compiled}", f"code for {', '.join(lacking)}", rebuild)
    return ok(name, f"compiled for {compiled}, needs {needs or 'nothing special'}")


def _covers(row: Target, library: Library, capability: str) -> bool:
    if row.accelerator == "rocm":
        return capability in library.architectures
    return runs_on(library.architectures, ComputeCapability.parse(capability))


def _clean(facts: ImageFacts) -> Finding:
    if facts.leftovers:
        return fail(
            "image-clean",
            f"left over from the build: {', '.join(facts.leftovers)}",
            "nothing of the build",
            "report it with the build's log",
        )
    if facts.compilers:
        return warn(
            "image-clean",
            f"compilers: {', '.join(facts.compilers)}",
            "none in the runtime stage",
            "a base without: --runtime-base ubuntu:24.04",
        )
    return ok("image-clean", "no toolkit, compiler, wheelhouse or index setting")


def _small(facts: ImageFacts) -> Finding:
    found = f"flexops adds {facts.added_bytes / 1e6:.1f} MB over torch and Python"
    if facts.added_bytes > MOST_ADDED_BYTES:
        return warn(
            "image-added",
            found,
            f"at most {MOST_ADDED_BYTES / 1e6:.0f} MB",
            "flexops image check --json   # shows what",
        )
    return ok("image-added", found)


def main(arguments: list[str]) -> int:
    """``facts`` | ``check TARGET``. Returns 1 if the check found a fault, which goes to standard
    error for the build's log."""
    if arguments[0] == "facts":
        print(json.dumps(facts().as_dict(), indent=1))
        return 0
    report, findings, known = check(arguments[1])
    found = [*findings, *report.findings]
    print(
        json.dumps(
            {
                "target": arguments[1],
                "status": worst(found),
                "findings": [one.as_dict() for one in found],
                "image": known.as_dict(),
            },
            indent=1,
        )
    )
    faults = [one for one in found if one.status == "fail"]
    for one in faults:
        print(
            f"flexops: the image is not in order: {one.id}: {one.found}\n  required:"
            f" {one.required}\n  fix: {one.fix}",
            file=sys.stderr,
        )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
