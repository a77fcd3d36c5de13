"""What kernels are called: by the C++ expressions that a family's library holds, and as artifacts;
and for which architectures each is compiled.

A library for CUDA holds no device code. It holds the names of the kernels that its launchers name
(``csrc/common/launch.h``), and ``names_in`` reads them from its file: that is the only list of
instantiations.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...compute_capability import Architecture, ComputeCapability

# As g++ writes a function template's argument, and as compilers mangle the type that has it; see
# kernel_name() in csrc/common/launch.h.
_NAME = re.compile(
    rb"(?:(?P<rare>rare)|kernel)_name\(\) \[with auto function = (?P<expression>[^\]\0]+)\]"
    rb"|(?P<mangled>N7flexops6detail(?:6NameOf|(?P<rare_type>10RareNameOf))I\w+E)\0"
)
HOPPER = ComputeCapability(9, 0, "a")


def names_in(library: Path) -> list[str]:
    """The kernels that a library launches, as C++ names them, sorted; without those that are
    compiled at their first launch only (``rare_kernel``)."""
    return sorted(_common_and_rare(library)[0])


def rare_names_in(library: Path) -> list[str]:
    """The others: kernels of dtypes, shapes and options that few calls have."""
    common, rare = _common_and_rare(library)
    return sorted(rare - common)


def _common_and_rare(library: Path) -> tuple[set[str], set[str]]:
    found: tuple[set[str], set[str]] = set(), set()
    for match in _NAME.finditer(library.read_bytes()):
        found[bool(match["rare"] or match["rare_type"])].add(_expression(match))
    return found


def expression_of(name: bytes) -> str:
    """A kernel's expression from the name that its library has for it.

    Raises:
        ValueError: it is no such name.
    """
    match = _NAME.search(name + b"\0")
    if match is None:
        raise ValueError(f"{name!r} is no kernel's name")
    return _expression(match)


def _expression(match: re.Match[bytes]) -> str:
    return (
        match["expression"].decode()
        if match["expression"]
        else _demangled(match["mangled"].decode())
    )


@functools.cache
def _demangled(mangled: str) -> str:
    """The function that a ``NameOf`` is of: ``flexops::detail::NameOf<&(void
    flexops::rope::rotate<float>(flexops::rope::Params))>``; of a function that is no template's,
    the name alone."""
    name = demangled(mangled).partition("NameOf<&")[2].removesuffix(">")
    if name and not name.startswith("("):
        return name
    name = name[1:-1].removeprefix("void ")
    depth = 0
    for position in range(len(name) - 1, -1, -1):  # the arguments' types are the last parenthesis
        depth += {")": 1, "(": -1}.get(name[position], 0)
        if depth == 0:
            return name[:position]
    raise ValueError(f"{mangled} is no kernel's name")


def demangled(mangled: str) -> str:
    """A C++ name or type as it was written, by the demangler of the libstdc++ that torch brings;
    itself where it is none, or nothing here can tell."""
    import ctypes

    try:
        demangle, free = ctypes.CDLL("libstdc++.so.6").__cxa_demangle, ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return mangled
    demangle.restype, free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    found = demangle(mangled.encode(), None, None, None)
    if not found:
        return mangled
    try:
        return ctypes.string_at(found).decode("utf-8", "replace")
    finally:
        free(found)


def alike(symbol: str) -> str:
    """A symbol without what compilers call unnamed namespaces and internal linkage, which is theirs
    alone."""
    found: list[str] = []
    position = 0
    while position < len(symbol):
        number = re.match(r"\d+", symbol[position:])
        if number and symbol[position + number.end() :].startswith("_GLOBAL__N_"):
            found.append("_GLOBAL_")
            position += number.end() + int(number[0])
        elif symbol[position] == "L" and symbol[position + 1 : position + 2].isdigit():
            position += 1
        else:
            found.append(symbol[position])
            position += 1
    return "".join(found)


def fitted(expression: str, architecture: Architecture) -> Architecture | None:
    """The architecture that a kernel is compiled for, to run where ``architecture`` does; None if
    it does not run there.

    Kernels called ``..._hopper`` use instructions that are Hopper's own, which 9.0a is the name
    for.
    """
    if not expression.partition("<")[0].endswith("_hopper"):
        return architecture
    return (
        architecture._replace(capability=HOPPER, ptx=False)
        if architecture.sass and architecture.capability.base == HOPPER.base
        else None
    )


def ahead(names: Sequence[str], architecture: Architecture) -> list[str]:
    """Those of a library's kernels that builds ahead of time make for an architecture.

    On Hopper, ``name_hopper<T, a, b, ...>`` takes the place of ``name<T, a, b, ...>`` in all but
    odd calls, whose kernel is compiled when it is launched.
    """
    fitting = [name for name in names if fitted(name, architecture)]
    replaced = {_tiling(name) for name in fitting if "_hopper<" in name}
    return [name for name in fitting if "_hopper<" in name or _tiling(name) not in replaced]


def _tiling(expression: str) -> tuple[str, ...]:
    kernel, _, arguments = expression.partition("<")
    return kernel.removesuffix("_hopper"), *arguments.split(", ")[:3]


def artifact_name(family: str, architecture: str, expression: str) -> str:
    """The directory of a kernel's code: ``architecture`` is ``sm_90`` or ``compute_90``."""
    return f"{family}-{architecture}-{hashlib.sha256(expression.encode()).hexdigest()[:12]}"


def single(architectures: Sequence[Architecture]) -> Iterator[Architecture]:
    """Each architecture's machine code and its PTX as architectures of their own."""
    for one in architectures:
        if one.sass:
            yield one._replace(ptx=False)
        if one.ptx:
            yield one._replace(sass=False)
