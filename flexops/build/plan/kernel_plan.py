"""What one kernel's code is made of: everything that decides it, worked out from the headers' text
and a kernel's name."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...compute_capability import Architecture, ComputeCapability
from ...errors import CompileError
from ..describe import cpp_text
from ..describe.spec import OpSpec
from . import cache_key, device_library
from .cache_key import Digests
from .kernel_names import artifact_name, fitted

if TYPE_CHECKING:
    from ...toolchain.nvrtc import DeviceCompiler

# 177: declared and not used, in instantiations that need it not. -v: what
# kernel_compiler.resources_in() reads.
OPTIONS = ("--ptxas-options=-v", "--std=c++17", "-diag-suppress=177")
Roots = tuple[tuple[str, Path], ...]


class KernelPlan(NamedTuple):
    """One kernel for one architecture: everything that decides what its code will be.

    Attributes:
        name: the cache directory's: ``rope-sm_90-`` and a digest of the expression.
        key: of the entry.
        expression: the kernel as C++ names it: ``flexops::rope::rotate<float>``.
        source: the whole program: includes.
        architecture: machine code or PTX, not both.
        compiler: what compiles it.
        roots: what includes are relative to, with their names.
        files: the headers that it reaches, relocatable name -> sha256.
        options: of this kernel alone, as NVRTC spells them.
        expressions, symbols: of a program with several kernels, as C++ names them and as the host
            compiler mangled them; ``expression`` then names the program.
        texts: headers by name that are given as text.
    """

    name: str
    key: str
    expression: str
    source: str
    architecture: Architecture
    compiler: DeviceCompiler
    roots: Roots
    files: Digests
    options: tuple[str, ...] = ()
    expressions: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()

    @property
    def file_name(self) -> str:
        return "kernel.cubin" if self.architecture.sass else "kernel.ptx"


def plan_kernel(
    family: str,
    sources: Sequence[str],
    expression: str,
    architecture: Architecture,
    compiler: DeviceCompiler,
    csrc: Path,
    *,
    roots: Roots = (),
    text: str = "",
) -> KernelPlan:
    """The plan of one kernel.

    Args:
        sources: the family's launchers, relative to the first root: the kernel is in a header that
            one of them reaches.
        architecture: where it shall run; see ``fitted``.
        csrc: flexops' sources.
        roots: where includes are looked for, each with its name, if that is not ``csrc`` alone.
        text: what comes before the header in the program; see ``provider_texts``.

    Raises:
        CompileError: no such header defines it.
    """
    namespace, _, kernel = expression.partition("<")[0].rpartition("::")
    architecture = fitted(expression, architecture) or architecture
    roots = roots or (("<csrc>", csrc),)
    header = defining_header(tuple(sources), kernel, roots)
    if not header:
        raise CompileError(
            f"no header of {family} defines the kernel {expression}",
            found=", ".join(sources),
            fix="flexops doctor",
        )
    # g++ writes a kernel's arguments so
    source = (
        text
        + f'#include "{header.partition(">/")[2]}"\n'
        + (f"using namespace {namespace};\n" if namespace else "")
    )
    reached, missing = _reached(header, roots)
    library = device_library.needed((), set(missing) - device_library.STANDARD, compiler)
    files = {name: cache_key.file_digest(place_of(name, roots)) for name in (header, *reached)}
    key = _key(
        [("kernel", expression), ("source", source), *_identity(library)],
        architecture,
        compiler,
        files,
    )
    return KernelPlan(
        artifact_name(family, architecture.code, text + expression),
        key,
        expression,
        source,
        architecture,
        compiler,
        device_library.searched(roots, library),
        files,
        library.options,
        texts=library.texts,
    )


def _identity(library: device_library.Library) -> list[tuple[str, str]]:
    return [("headers", library.identity)] if library.identity else []


def _key(
    kernel: list[tuple[str, str]],
    architecture: Architecture,
    compiler: DeviceCompiler,
    files: Digests,
) -> str:
    how = [
        ("architecture", architecture.code),
        ("compiler", compiler.identity),
        ("options", " ".join(OPTIONS)),
    ]
    return cache_key.digest_fields([*kernel, *how, *sorted(files.items())])


class TextKernel(NamedTuple):
    """A kernel in a source text of a user, which may include our headers, and those of the
    directories ``include``.

    ``options`` are NVRTC's.
    """

    family: str
    text: str
    expression: str
    csrc: Path
    include: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def spec(self) -> OpSpec:
        """Where its artifacts are, and whose headers can have changed: flexops' own."""
        return OpSpec(self.family, files=())

    def name(self, architecture: str) -> str:
        return artifact_name(self.family, architecture, self._digest(self._reached()))

    def plan(self, architecture: Architecture, compiler: DeviceCompiler) -> KernelPlan:
        missing = dict[str, None]()
        reached, roots = self._reached(missing), self._roots()
        nested = {
            name
            for path in reached
            if not path.startswith(f"{self.csrc}/")
            for name in cpp_text.included(Path(path).read_text("utf-8", "replace"))
        }
        library = device_library.needed(
            [name for name in cpp_text.included(self.text) if name in missing],
            nested & missing.keys(),
            compiler,
            names_std="std::" in self.text,
        )
        files = {
            name_under(path, roots): digest
            for path, digest in reached.items()
            if not os.path.isabs(name_under(path, roots))
        }
        digest = self._digest(reached)
        name = artifact_name(self.family, architecture.code, digest)
        key = _key([("text", digest), *_identity(library)], architecture, compiler, files)
        return KernelPlan(
            name,
            key,
            self.expression,
            library.prelude + self.text,
            architecture,
            compiler,
            device_library.searched(roots, library),
            files,
            (*library.options, *self.options),
            texts=library.texts,
        )

    def fix_for(self, _: ComputeCapability) -> str:
        return "unset FLEXOPS_JIT"

    def _roots(self) -> Roots:
        """The compiler itself looks where it runs for what stands in quotes."""
        own = (
            (f"<include {number}>", Path(path))
            for number, path in enumerate((*self.include, os.getcwd()))
        )
        return (*own, ("<csrc>", self.csrc))

    def _reached(self, missing: dict[str, None] | None = None) -> Digests:
        roots = [str(root) for _, root in self._roots()]
        return {
            path: cache_key.file_digest(path)
            for path in cpp_text.own_headers(self.text, os.getcwd(), roots, missing=missing)
        }

    def _digest(self, reached: Digests) -> str:
        """Of all but the compiler and the headers of this package: what is found under a name made
        of it is of this text, whichever process compiled it."""
        own = [
            ("header", digest)
            for path, digest in reached.items()
            if not path.startswith(f"{self.csrc}/")
        ]
        return cache_key.digest_fields(
            [
                ("kernel", self.expression),
                ("source", self.text),
                ("options", "\0".join(self.options)),
                *own,
            ]
        )


@functools.cache
def defining_header(sources: tuple[str, ...], kernel: str, roots: Roots) -> str:
    """The header that defines a kernel, by its relocatable name; "" if none does that the sources
    reach."""
    for source in sources:
        for header in _reached(f"{roots[0][0]}/{source}", roots)[0]:
            with open(place_of(header, roots), encoding="utf-8") as stream:
                if re.search(rf"__global__\s[^;{{]*\b{kernel}\s*(?:<\w+>)?\(", stream.read()):
                    return header
    return ""


@functools.cache
def _reached(source: str, roots: Roots) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The headers that a file reaches, by their relocatable names; and the names that are in no
    root."""
    path, missing = place_of(source, roots), dict[str, None]()
    with open(path, encoding="utf-8") as stream:
        found = cpp_text.own_headers(
            stream.read(),
            os.path.dirname(path),
            [str(root) for _, root in roots],
            missing=missing,
        )
    return tuple(name_under(reached, roots) for reached in found), tuple(missing)


def name_under(path: str, roots: Roots) -> str:
    """``<root>/folder/name`` of a path, by the innermost root; the path itself if it is under
    none."""
    name, root = max(
        (one for one in roots if path.startswith(f"{one[1]}/")),
        key=lambda one: len(str(one[1])),
        default=("", ""),
    )
    return f"{name}{path[len(str(root)) :]}"


def place_of(name: str, roots: Roots) -> str:
    """The path of a file called ``<root>/folder/name``."""
    anchor, _, rest = name.partition(">/")
    return next(os.path.join(root, rest) for known, root in roots if known == f"{anchor}>")
