"""What can be wrong with the matrix. Each fault names the row and the field. The wheel's matrix has
been checked: flexops itself reads it without a question."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexops.compute_capability import ComputeCapability
from flexops.errors import TargetError, ToolchainError
from flexops.targets.loading import MACHINES, merged, target_of
from flexops.targets.model import Target
from flexops.toolchain.compat import Rules
from flexops.toolchain.model import HostCompiler
from flexops.toolchain.version import Version

from . import conda

_VERSION = r"\d+(\.\d+)*"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where (``target cu121-sm89``), the field, and what."""

    where: str
    field: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}, {self.field}: {self.what}"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_range(value: object) -> bool:
    return _is_texts(value) and len(value) == 2  # type: ignore[arg-type]


def _is_version_range(value: object) -> bool:
    return _is_range(value) and all(re.fullmatch(_VERSION, bound) for bound in value)  # type: ignore[attr-defined]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class _Type:
    name: str
    accepts: Callable[[object], bool]


_TEXT = _Type("text", _is_text)
_TEXTS = _Type("a list of texts", _is_texts)
_RANGE = _Type("[oldest, newest], two texts", _is_range)
_VERSION_RANGE = _Type("[oldest, newest], two versions", _is_version_range)
_FLAG = _Type("true or false", _is_flag)
_NUMBER = _Type("a whole number", _is_number)

_TOOLKIT_FIELDS = {
    "accelerator": _TEXT,
    "version": _TEXT,
    "toolkit_source": _TEXTS,
    "torch": _TEXT,
    "index": _TEXT,
    "index_required": _FLAG,
    "python": _TEXT,
    "ninja": _TEXT,
    "machines": _TEXTS,
    "host_compiler": _RANGE,
    "least_driver": _TEXT,
    "build_base": _TEXT,
    "runtime_base": _TEXT,
    "build_digest": _TEXT,
    "runtime_digest": _TEXT,
}
_ROW_FIELDS = {
    "id": _TEXT,
    "toolkit": _TEXT,
    "capabilities": _TEXTS,
    "gpus": _TEXT,
    **_TOOLKIT_FIELDS,
}
_TORCH_FIELDS = {"cuda": _TEXT, "rocm": _TEXT, "python": _VERSION_RANGE, "cxx_standard": _NUMBER}

_REQUIRED = (
    "id",
    "accelerator",
    "capabilities",
    "torch",
    "python",
    "ninja",
    "host_compiler",
    "build_base",
    "runtime_base",
)
_REQUIRED_WITH_GPU = ("version", "toolkit_source", "least_driver")
_ACCELERATORS = ("cpu", "cuda", "rocm")
_SOURCES = ("index", "conda", "image", "system")
_FIRST_CUDA_ON_INDEX = Version((13,))


def check(document: Mapping[str, Any], facts: Rules) -> None:
    """Check a matrix against itself and the ``facts`` about toolkits. Raises one ``TargetError``
    with all that is wrong."""
    faults = structure(document)
    targets = []
    if not faults:  # what a field means can only be judged where it has the right type
        for row in document["target"]:
            whole = merged(document, row)
            absent = missing(whole)
            faults += absent
            if not absent:
                target = target_of(document, whole)
                faults += meaning(target, row["toolkit"], document["torch"], facts)
                targets.append(target)
        faults += _across_rows(targets)
        faults += [Fault(*fault) for fault in conda.faults(document, facts)]
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise TargetError(
            f"the matrix of targets has {count}:\n  " + "\n  ".join(map(str, faults)),
            fix="edit flexops/targets/matrix.toml",
        )


def _across_rows(targets: list[Target]) -> list[Fault]:
    counts = Counter(target.id for target in targets)
    faults = [
        Fault(f"target {name}", "id", f"{count} rows have it")
        for name, count in counts.items()
        if count > 1
    ]
    if targets and not any(target.accelerator == "cpu" for target in targets):
        faults.append(
            Fault("target", "accelerator", "no row is for cpu, which every machine falls back to")
        )
    return faults


def structure(document: Mapping[str, Any]) -> list[Fault]:
    """Unknown tables and fields, and values of the wrong type."""
    faults = [
        Fault("matrix", name, "unknown table")
        for name in document
        if name not in ("defaults", "torch", "toolkit", "gpus", "target", "conda")
    ]
    faults += [
        Fault("matrix", name, "missing")
        for name in ("torch", "toolkit", "target")
        if not document.get(name)
    ]
    rows = document.get("target", [])
    if not (isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows)):
        return [*faults, Fault("matrix", "target", "must be [[target]] tables")]
    tables = [
        name
        for name in ("defaults", "gpus", "torch", "toolkit")
        if not isinstance(document.get(name, {}), Mapping)
    ]
    if tables:
        return [*faults, *(Fault("matrix", name, "must be a table") for name in tables)]
    faults += _fields("defaults", document.get("defaults", {}), _TOOLKIT_FIELDS)
    faults += _fields(
        "gpus", document.get("gpus", {}), dict.fromkeys(document.get("gpus", {}), _TEXT)
    )
    for name, table in document.get("torch", {}).items():
        faults += _fields(f"torch {name}", table, _TORCH_FIELDS)
        faults += [
            Fault(f"torch {name}", field, "missing")
            for field in ("python", "cxx_standard")
            if isinstance(table, Mapping) and field not in table
        ]
    for name, table in document.get("toolkit", {}).items():
        faults += _fields(f"toolkit {name}", table, _TOOLKIT_FIELDS)
    for row in rows:
        faults += _row(row, document.get("toolkit", {}))
    return faults


def _row(row: Mapping[str, Any], toolkits: Mapping[str, Any]) -> list[Fault]:
    where = _name(row)
    faults = _fields(where, row, _ROW_FIELDS)
    name = row.get("toolkit")
    if name is None:
        faults.append(Fault(where, "toolkit", "missing"))
    elif isinstance(name, str) and name not in toolkits:
        faults.append(
            Fault(
                where, "toolkit", f"there is no [toolkit.{name}]; there are {', '.join(toolkits)}"
            )
        )
    return faults


def _name(row: Mapping[str, Any]) -> str:
    return f"target {row.get('id', '(without id)')}"


def _fields(where: str, table: object, known: Mapping[str, _Type]) -> list[Fault]:
    if not isinstance(table, Mapping):
        return [Fault(where, "(itself)", "must be a table")]
    faults = [
        Fault(where, name, f"unknown field; known are {', '.join(known)}")
        for name in table
        if name not in known
    ]
    return faults + [
        Fault(where, name, f"must be {kind.name}, is {table[name]!r}")
        for name, kind in known.items()
        if name in table and not kind.accepts(table[name])
    ]


def missing(row: Mapping[str, Any]) -> list[Fault]:
    """Fields that a row (with its toolkit's filled in) has to have."""
    needed = _REQUIRED if row.get("accelerator") == "cpu" else _REQUIRED + _REQUIRED_WITH_GPU
    return [Fault(_name(row), field, "missing") for field in needed if field not in row]


def meaning(
    target: Target, toolkit_name: str, torches: Mapping[str, Mapping[str, Any]], facts: Rules
) -> list[Fault]:
    """What does not go together in a target whose fields have the right types."""
    where = f"target {target.id}"
    if target.accelerator not in _ACCELERATORS:
        return [
            Fault(
                where,
                "accelerator",
                f"{target.accelerator!r} is none of {', '.join(_ACCELERATORS)}",
            )
        ]
    malformed = [Fault(where, field, what) for field, what in _malformed(target)]
    if malformed:
        return malformed
    checks = [
        *_identity(target, toolkit_name),
        *_torch(target, torches),
        *_images(target),
        *_toolkit(target, facts),
    ]
    return [Fault(where, field, what) for field, what in checks]


Findings = Iterator[tuple[str, str]]


def _malformed(target: Target) -> Findings:
    versions = {
        "torch": target.torch,
        "python": target.python,
        "ninja": target.ninja,
        "version": target.toolkit,
        "least_driver": target.least_driver,
    }
    bounds = [("host_compiler", bound) for bound in target.host_compiler]
    for field, text in [*versions.items(), *bounds]:
        if text and not re.fullmatch(_VERSION, text):
            yield field, f"{text!r} is not a version"
    for machine in target.machines:
        if machine not in MACHINES:
            yield "machines", f"{machine!r} is none of {', '.join(MACHINES)}"
    for source in target.toolkit_source:
        if source not in _SOURCES:
            yield "toolkit_source", f"{source!r} is none of {', '.join(_SOURCES)}"
    if target.accelerator != "cpu":
        form, example = {"cuda": (r"\d+\.\d[af]?", "9.0"), "rocm": (r"gfx[0-9a-f]+", "gfx90a")}[
            target.accelerator
        ]
        for capability in target.capabilities:
            if not re.fullmatch(form, capability):
                yield (
                    "capabilities",
                    f"{capability!r} is not understood for {target.accelerator}: write {example}",
                )


def _identity(target: Target, toolkit_name: str) -> Findings:
    if target.accelerator == "cpu":
        expected = "cpu"
        if target.capabilities:
            yield "capabilities", "must be empty for cpu"
    else:
        prefix = {"cuda": "cu", "rocm": "rocm"}[target.accelerator]
        expected = prefix + target.toolkit_minor.replace(".", "")
        if len(target.capabilities) != 1:
            yield "capabilities", "must be exactly one, for the id names it"
            return
    if toolkit_name != expected:
        yield (
            "toolkit",
            f"[toolkit.{toolkit_name}] is {target.accelerator} {target.toolkit}".rstrip()
            + f", whose name is {expected}",
        )
    wanted = "-".join([expected, *map(_label, target.capabilities)])
    if target.id != wanted:
        yield "id", f"is not that of its contents, which is {wanted}"


def _label(capability: str) -> str:
    return capability if capability.startswith("gfx") else "sm" + capability.replace(".", "")


def _torch(target: Target, torches: Mapping[str, Mapping[str, Any]]) -> Findings:
    known = torches.get(target.torch)
    if known is None:
        yield "torch", f'there is no [torch."{target.torch}"]; there are {", ".join(torches)}'
        return
    built_for = known.get(target.accelerator)
    if target.accelerator != "cpu" and built_for != target.toolkit_minor:
        name = target.accelerator.upper().replace("ROCM", "ROCm")
        yield (
            "torch",
            (
                f"{target.torch} is built for {name} {built_for or '(none)'}, not"
                f" {target.toolkit_minor}"
            ),
        )
    python = Version.parse(target.python)
    oldest, newest = map(Version.parse, target.python_range)
    if not oldest <= python <= newest:
        yield (
            "python",
            f"torch {target.torch} and flexops run on {oldest} to {newest}, not {python}",
        )


def _images(target: Target) -> Findings:
    for field in ("build_base", "runtime_base"):
        image = getattr(target, field)
        if ":" not in image.rpartition("/")[2]:
            yield field, f"{image!r} has no tag"
    for field in ("build_digest", "runtime_digest"):
        digest = getattr(target, field)
        if digest and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            yield field, f"{digest!r} is not sha256: and 64 hexadecimal digits"
    if target.index_required and not target.index:
        yield "index", "missing, though index_required is true"


def _toolkit(target: Target, facts: Rules) -> Findings:
    oldest, newest = target.host_compiler
    if not oldest or (not newest and target.accelerator == "cuda"):
        yield "host_compiler", "needs an oldest GCC, and for cuda a newest one"
        return
    if newest and Version.parse(newest) < Version.parse(oldest):
        yield "host_compiler", f"the newest, {newest}, is older than the oldest, {oldest}"
    if not (reads := facts.compiler_for_standard(_gcc(oldest), target.cxx_standard)):
        yield "host_compiler", reads.reason
    if target.accelerator == "cuda":
        try:
            yield from _cuda(target, facts)
        except ToolchainError as error:
            yield "version", error.what


def _cuda(target: Target, facts: Rules) -> Findings:
    """Raises ``ToolchainError`` for a release that nothing is known of."""
    toolkit = Version.parse(target.toolkit)
    known = facts.facts(toolkit)
    for capability in map(ComputeCapability.parse, target.capabilities):
        if capability not in known.capabilities:
            yield (
                "capabilities",
                (
                    f"CUDA {toolkit} cannot compile for {capability}; it can for"
                    f" {', '.join(map(str, known.capabilities))}"
                ),
            )
    if not (accepted := facts.compiler_for_nvcc(_gcc(target.host_compiler[1]), toolkit)):
        yield "host_compiler", accepted.reason
    if Version.parse(target.least_driver) < known.family_driver.version:
        yield (
            "least_driver",
            (
                f"{target.least_driver} is older than {known.family_driver}, the least for CUDA"
                f" {toolkit.major}.x"
            ),
        )
    if "index" in target.toolkit_source and toolkit < _FIRST_CUDA_ON_INDEX:
        yield (
            "toolkit_source",
            (
                f"the package index has no nvcc {toolkit}; it has one from CUDA"
                f" {_FIRST_CUDA_ON_INDEX} on"
            ),
        )


def _gcc(version: str) -> HostCompiler:
    return HostCompiler(Path(), Version.parse(version), "", "gcc")
