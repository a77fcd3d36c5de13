"""The variants of the conda package: rows of the matrix, what can be wrong with them, and the files
that build tools read them from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexops.compute_capability import ComputeCapability
from flexops.errors import TargetError, ToolchainError
from flexops.targets import Matrix
from flexops.toolchain.compat import Rules
from flexops.toolchain.model import HostCompiler
from flexops.toolchain.version import Version

ALL = "recipe/variants.yaml"
"""Every variant; conda-build and rattler-build read it by themselves, for it lies beside the
recipe."""

NONE = "None"
"""What conda-forge's variants say for a build without CUDA."""

_FIELDS = ("cuda", "compiler", "sysroot", "capabilities")
_VERSION = r"\d+(\.\d+)*"


@dataclass(frozen=True)
class Variant:
    """One build of the conda package.

    Attributes:
        id: ``cpu`` or ``cuda130``; the build string begins with it.
        cuda: ``"13.0"``; empty for cpu.
        compiler: conda-forge's GCC for it.
        sysroot: the oldest glibc that the libraries may meet.
        capabilities: all in one package, the newest one also as PTX; empty for cpu.
    """

    id: str
    cuda: str
    compiler: str
    sysroot: str
    capabilities: tuple[str, ...]

    @property
    def arch_list(self) -> str:
        """The text of ``TORCH_CUDA_ARCH_LIST``: ``"8.0;9.0+PTX"``; empty for cpu."""
        return ";".join(self.capabilities) + "+PTX" if self.capabilities else ""

    @property
    def path(self) -> str:
        """The file that holds this variant alone, for ``-m``; relative to the root."""
        return f"recipe/variants/{self.id}.yaml"

    @property
    def keys(self) -> dict[str, str]:
        """The variant keys whose values go together."""
        return {
            "c_compiler_version": self.compiler,
            "cxx_compiler_version": self.compiler,
            "c_stdlib_version": self.sysroot,
            "cuda_compiler_version": self.cuda or NONE,
            "cuda_arch_list": self.arch_list or NONE,
        }


def find(variants: Sequence[Variant], variant_id: str) -> Variant:
    """The variant called that; raises ``TargetError`` naming the ones there are."""
    for variant in variants:
        if variant.id == variant_id:
            return variant
    raise TargetError(
        f"there is no variant called {variant_id!r}",
        required=", ".join(one.id for one in variants),
        fix="flexops channel build --help",
    )


def faults(document: Mapping[str, Any], facts: Rules) -> Iterator[tuple[str, str, str]]:
    """What is wrong with the ``conda`` table: the row, the field, and what."""
    table = document.get("conda", {})
    if not isinstance(table, Mapping):
        yield "matrix", "conda", "must be a table"
        return
    for name, row in table.items():
        where = f"conda {name}"
        if not isinstance(row, Mapping):
            yield where, "(itself)", "must be a table"
            continue
        malformed = list(_malformed(row))
        for field, what in malformed or _meaning(_variant(name, row), facts):
            yield where, field, what


def variants(matrix: Matrix) -> tuple[Variant, ...]:
    """The variants of the conda package, in the matrix's order."""
    return tuple(_variant(name, row) for name, row in matrix.conda.items())


def files(variants: Sequence[Variant], header: str, least_python: str) -> dict[str, str]:
    """Path relative to the root, and text, of every file that build tools read variants from."""
    if not variants:
        return {}
    return {
        ALL: _text(variants, header, least_python),
        **{one.path: _text([one], header, least_python) for one in variants},
    }


def _variant(name: str, row: Mapping[str, Any]) -> Variant:
    return Variant(
        name,
        row.get("cuda", ""),
        row["compiler"],
        row["sysroot"],
        tuple(row.get("capabilities", ())),
    )


def _malformed(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field in row:
        if field not in _FIELDS:
            yield field, f"unknown field; known are {', '.join(_FIELDS)}"
    for field in ("cuda", "compiler", "sysroot"):
        if field in row and not (
            isinstance(row[field], str) and re.fullmatch(_VERSION, row[field])
        ):
            yield field, f"{row[field]!r} is not a version"
        elif field not in row and field != "cuda":
            yield field, "missing"
    capabilities = row.get("capabilities", [])
    if not (
        isinstance(capabilities, list)
        and all(isinstance(one, str) and re.fullmatch(r"\d+\.\d[af]?", one) for one in capabilities)
    ):
        yield "capabilities", 'must be a list such as ["8.0", "9.0"]'


def _meaning(variant: Variant, facts: Rules) -> Iterator[tuple[str, str]]:
    expected = f"cuda{variant.cuda.replace('.', '')}" if variant.cuda else "cpu"
    if variant.id != expected:
        yield "cuda", f"is {variant.cuda or 'left out'}, so the variant's name is {expected}"
    if bool(variant.cuda) != bool(variant.capabilities):
        yield "capabilities", "are needed with cuda, and only there"
    if variant.cuda:
        try:
            yield from _toolkit(variant, facts)
        except ToolchainError as error:
            yield "cuda", error.what


def _toolkit(variant: Variant, facts: Rules) -> Iterator[tuple[str, str]]:
    """Raises ``ToolchainError`` for a release that nothing is known of."""
    toolkit = Version.parse(variant.cuda)
    known = facts.capabilities(toolkit)
    wanted = list(map(ComputeCapability.parse, variant.capabilities))
    for capability in wanted:
        if capability not in known:
            yield (
                "capabilities",
                (
                    f"CUDA {toolkit} cannot compile for {capability}; it can for"
                    f" {', '.join(map(str, known))}"
                ),
            )
    if wanted != sorted(wanted):
        yield (
            "capabilities",
            "must be in order, for the last is the one that is compiled to PTX too",
        )
    if not (
        accepted := facts.compiler_for_nvcc(
            HostCompiler(Path(), Version.parse(variant.compiler), "", "gcc"), toolkit
        )
    ):
        yield "compiler", accepted.reason


def _text(variants: Sequence[Variant], header: str, least_python: str) -> str:
    """YAML of values that go together by position, and of what is the same for all."""
    keys = list(variants[0].keys)
    fixed = {
        "c_compiler": "gcc",
        "cxx_compiler": "gxx",
        "c_stdlib": "sysroot",
        "python_min": least_python,
    }
    values = {
        **{key: [value] for key, value in fixed.items()},
        **{key: [one.keys[key] for one in variants] for key in keys},
    }
    lines = [
        f"# {header}",
        *(f"{key}: [{', '.join(_quoted(value) for value in row)}]" for key, row in values.items()),
    ]
    return "\n".join([*lines, "zip_keys:", f"  - [{', '.join(keys)}]"]) + "\n"


def _quoted(value: str) -> str:
    return f'"{value}"'
