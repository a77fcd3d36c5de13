"""What a program for NVRTC includes besides its own headers: CUDA's, from the directories of
``toolchain.device_headers``, and C++'s, in whose place ``DEVICE_HEADER`` stands."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..describe import cpp_text

if TYPE_CHECKING:
    from ...toolchain.nvrtc import DeviceCompiler

CUDA_ROOT = "<cuda headers"
"""What the names of directories of CUDA's headers begin with."""
DEVICE_HEADER = "common/extension_device.cuh"
_WITHOUT_MATHEMATICS = "#define FLEXOPS_NO_MATHEMATICS\n"
_INTEGERS = ("cstddef", "cstdint", "stddef.h", "stdint.h")
STANDARD = frozenset(
    (
        *_INTEGERS,
        "algorithm",
        "array",
        "assert.h",
        "bit",
        "cassert",
        "cfloat",
        "climits",
        "cmath",
        "cstdio",
        "cstdlib",
        "cstring",
        "float.h",
        "functional",
        "initializer_list",
        "iosfwd",
        "iostream",
        "istream",
        "iterator",
        "limits",
        "limits.h",
        "math.h",
        "memory",
        "numeric",
        "ostream",
        "sstream",
        "stdexcept",
        "stdio.h",
        "stdlib.h",
        "string",
        "string.h",
        "tuple",
        "type_traits",
        "utility",
        "vector",
    )
)
"""Headers that have nothing in them for device code, in whose place ``DEVICE_HEADER`` stands."""
_LIBRARY = re.compile(r"(?:cub|cuda|nv)/.+|cooperative_groups(?:\.h|/.+)")
"""Headers of CCCL, and those that include some. They are read before ``DEVICE_HEADER``, whose
macros replace functions of theirs."""
# long is what 64 bits are to the host's compiler, which mangles a kernel's name too
_WIDE = (("unsigned long long", "unsigned long"), ("signed long long", "long"), ("LLONG", "LONG"))


_CSTDINT = "cuda/std/cstdint"
_OF_RUNTIME = ("cuda_awbarrier_helpers.h", "cuda_pipeline_helpers.h")
Roots = tuple[tuple[str, Path], ...]


class Library(NamedTuple):
    """What a program needs of others' headers.

    Attributes:
        roots: directories that are searched after the program's own, each with its name.
        texts: headers by name that are given as text.
        options: of NVRTC.
        prelude: what the program begins with.
        identity: what enters cache keys in the place of the headers' contents.
    """

    roots: Roots = ()
    texts: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    prelude: str = ""
    identity: str = ""


def needed(
    own: Sequence[str], nested: Iterable[str], compiler: DeviceCompiler, *, names_std: bool = False
) -> Library:
    """What a program of ours needs, or one in a string.

    Args:
        own: the names in its ``#include`` lines that are no headers of its own, in their order.
        nested: those in the headers of its own.
        names_std: whether its text names ``std::``.
    """
    nested = set(nested)
    standard = sorted(STANDARD & {*own, *nested})
    roots = _with({*own, *nested} - STANDARD, compiler)
    prelude = ""
    # a header of the program's own may include CCCL later, whose functions must keep their names
    if standard and (names_std or not set(standard) <= set(_INTEGERS)):
        prelude = "".join(f"#include <{name}>\n" for name in first(own))
        if any(first(nested)):
            prelude += _WITHOUT_MATHEMATICS
        prelude += f"#include <{DEVICE_HEADER}>\n"
    elif standard:
        prelude = "#include <common/integers.cuh>\n"
    return _library(roots, standard, prelude, compiler)


def of_program(
    text: str, roots: Roots, texts: Mapping[str, str], compiler: DeviceCompiler
) -> Library:
    """What the device code of a `.cu` needs besides what is in ``roots``; ``texts`` are headers by
    name that are given as text."""
    own = list(cpp_text.included(text))
    missing = {name for name in own if not _found(name, roots)}
    # those of CCCL may be found there, and include what is not
    found = _with({*missing, *first(own)} - STANDARD, compiler)
    library = _library(found, sorted(STANDARD), "", compiler)
    more = {**dict(library.texts), **texts, **dict(_rewritten((*found, *roots)))}
    return library._replace(texts=tuple(more.items()))


def searched(own: Roots, library: Library) -> Roots:
    """A program's own directories with those of a library. Ours come last: csrc/nv and csrc/crt
    stand in for what a machine lacks."""
    ours = tuple(root for root in own if root[0] == "<csrc>")
    return (*(root for root in own if root not in ours), *library.roots, *ours)


def first(names: Iterable[str]) -> list[str]:
    """Those that a program includes before ``DEVICE_HEADER``."""
    return [name for name in names if _LIBRARY.fullmatch(name)]


def _with(names: Iterable[str], compiler: DeviceCompiler) -> Roots:
    """The directories of CUDA's headers, if they have one of these."""
    roots = roots_of(compiler) if names else ()
    return roots if any(_found(name, roots) for name in names) else ()


def _library(roots: Roots, empty: Iterable[str], prelude: str, compiler: DeviceCompiler) -> Library:
    texts = (*((name, "") for name in empty), *_rewritten(roots))
    options = ("--device-as-default-execution-space",) if roots or prelude else ()
    identity = ", ".join(_identities(compiler)) if roots else ""
    return Library(roots, texts, options, prelude, identity)


def roots_of(compiler: DeviceCompiler) -> Roots:
    """The directories of CUDA's headers, with names."""
    from ...toolchain import device_headers

    found = device_headers.roots(compiler)
    return tuple((f"{CUDA_ROOT} {number}>", one.path) for number, one in enumerate(found))


def _identities(compiler: DeviceCompiler) -> list[str]:
    from ...toolchain import device_headers

    return [one.identity for one in device_headers.roots(compiler)]


def _found(name: str, roots: Roots) -> bool:
    return any(os.path.isfile(root / name) for _, root in roots)


@functools.cache
def _rewritten(roots: Roots) -> tuple[tuple[str, str], ...]:
    """Headers that NVRTC gets otherwise than they are: those that define integers, with the host
    compiler's types of 64 bits, and all of CUB without what the host launches."""
    texts = []
    for name in (_CSTDINT, *_OF_RUNTIME):
        if found := next((root / name for _, root in roots if (root / name).is_file()), None):
            text = found.read_text(encoding="utf-8")
            for theirs, ours in _WIDE:
                text = text.replace(theirs, ours)
            texts.append((name, text))
    root = next((root for _, root in roots if (root / _CSTDINT).is_file()), None)
    if root is None:
        return tuple(texts)
    parts = [
        f"#include <{path.relative_to(root)}>\n"
        for folder in ("block", "iterator", "thread", "warp")
        for path in sorted((root / "cub" / folder).glob("*.cuh"))
    ]
    return (*texts, ("cub/cub.cuh", "".join(parts)))
