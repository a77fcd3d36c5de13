"""Whether an image's contents are what its row of the matrix asks for. Pure: facts in,
findings out."""

from __future__ import annotations

from collections.abc import Iterator

from ...build.describe.catalog import CATALOG
from ...compute_capability import ComputeCapability, runs_on
from ...targets import Target
from ...toolchain.version import Version
from ..finding import Finding, fail, ok, warn
from .facts import ImageFacts, Library

MOST_ADDED_BYTES = 40_000_000


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
    yield from _libraries(row, facts, rebuild)
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


def _libraries(row: Target, facts: ImageFacts, rebuild: str) -> Iterator[Finding]:
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
            "python -m flexops.doctor.image.inside facts   # shows what",
        )
    return ok("image-added", found)
