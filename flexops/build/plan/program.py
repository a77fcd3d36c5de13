"""The device code of a user's `.cu`, as NVRTC gets it: a whole program, whose kernels
are one module of the driver's, as nvcc makes one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..describe import cpp_text
from ..describe.cuda_names import ACCESSORS
from ..describe.spec import OpSpec
from . import cache_key, device_library
from .device_library import DEVICE_HEADER
from .kernel_names import artifact_name
from .kernel_plan import KernelPlan

if TYPE_CHECKING:
    from ...compute_capability import Architecture, ComputeCapability
    from ...toolchain.nvrtc import DeviceCompiler

_ACCESSORS = "common/extension_accessors.cuh"
# What device code finds in the place of headers of torch's: nothing where extension_accessors.cuh
# does without, and what Atomic.cuh and host functions of TensorInfo.cuh name.
_TORCH = {
    "torch/headeronly/util/Exception.h": "",
    "torch/headeronly/util/HeaderOnlyArrayRef.h": "",
    "c10/util/ArrayRef.h": "",
    "c10/util/Deprecated.h": "",
    "c10/util/Exception.h": "#define TORCH_CHECK(...)\n#define TORCH_INTERNAL_ASSERT(...)\n",
    "c10/util/irange.h": "",
    "ATen/NumericUtils.h": (
        "namespace at { template <class T> __device__ bool _isnan(T x) {\n"
        "return double(x) != double(x); } }\n"
        "namespace c10 {\n"
        "template <class T> struct alignas(2 * sizeof(T)) complex { T real_, imag_; };\n"
        "}\n"
    ),
    "ATen/CollapseDims.h": (
        "#include <c10/util/Exception.h>\n"
        "namespace at { template <class... A> int collapse_dims(A...); }\n"
        "namespace std { template <int, class T> int get(T); }\n"
    ),
}
_CUDA_HALF = re.compile(r"(?:__)?(?:nv_)?(?:half|bfloat16)2?(?:_raw)?")
TORCH_TYPES = re.compile(r"\b(?:c10|at|torch)::(?:headeronly::)?(\w+)")


class Program(NamedTuple):
    """The device code of one source: a module of the driver's, as nvcc makes one.

    Attributes:
        extension, number, source: whose it is: the extension's name, the source's number in it and
            its path.
        text, words: the device's half, and the words in it.
        options: NVRTC's.
        roots: where includes are looked for, each with its name.
        torch: which one it is compiled for.
        expressions, symbols: the kernels that are wanted of it, as C++ names them and as the host
            compiler mangles them.
        own: architectures that are compiled with their suffix (90a), whose instructions no other
            GPU has.
    """

    extension: str
    number: int
    source: str
    text: str
    options: tuple[str, ...]
    roots: tuple[tuple[str, Path], ...]
    words: frozenset[str]
    torch: str
    expressions: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    @property
    def expression(self) -> str:
        return os.path.basename(self.source)

    @property
    def spec(self) -> OpSpec:
        return OpSpec(f"{self.extension}.cu", files=())

    def name(self, architecture: str) -> str:
        return artifact_name(self.spec.family, architecture, self.digest)

    def plan(self, architecture: Architecture, compiler: DeviceCompiler) -> KernelPlan:
        if f"{architecture.capability.number}a" in self.own:
            own = architecture.capability._replace(suffix="a")
            architecture = architecture._replace(capability=own)
        digest, files = self.digest, self._files()
        library = device_library.of_program(self.text, self.roots, _TORCH, compiler)
        key = cache_key.digest_fields(
            [
                ("program", digest),
                ("headers", library.identity),
                ("architecture", architecture.code),
                ("compiler", compiler.identity),
                *sorted(files.items()),
            ]
        )
        name = artifact_name(self.spec.family, architecture.code, digest)
        return KernelPlan(
            name,
            key,
            self.expression,
            self._program(),
            architecture,
            compiler,
            device_library.searched(self.roots, library),
            files,
            self.options,
            self.expressions,
            self.symbols,
            library.texts,
        )

    def fix_for(self, _: ComputeCapability) -> str:
        return "unset FLEXOPS_JIT"

    def _program(self) -> str:
        return "".join(f"#include <{header}>\n" for header in self._headers()) + self.text

    def _headers(self) -> Iterator[str]:
        """What the program includes first: what torch's and CUDA's headers would have brought, as
        far as it is used."""
        yield from device_library.first(cpp_text.included(self.text))
        yield DEVICE_HEADER
        types = {match for one in self.expressions for match in TORCH_TYPES.findall(one)}
        if ACCESSORS & (types | self.words):
            yield _ACCESSORS
        if any(word.startswith("C10_") or word == "CUDA_KERNEL_ASSERT" for word in self.words):
            yield self._torch("macros/Macros.h")
        for half, header in (("Half", "cuda_fp16.h"), ("BFloat16", "cuda_bf16.h")):
            if half in types | self.words:
                yield self._torch(f"util/{half}.h")
            elif any(
                _CUDA_HALF.fullmatch(word) and (word.find("bfloat") >= 0) == (half == "BFloat16")
                for word in self.words
            ):
                yield header

    def _torch(self, header: str) -> str:
        include = dict(self.roots)["<torch>"]
        return (
            f"torch/headeronly/{header}"
            if (include / "torch" / "headeronly" / header).exists()
            else f"c10/{header}"
        )

    def _files(self) -> cache_key.Digests:
        """Of what the compiler's identity and torch's do not cover: our own header, and CUDA's,
        which a package has besides."""
        found = {}
        for name, root in self.roots:
            for header in (
                DEVICE_HEADER,
                "common/integers.cuh",
                _ACCESSORS,
                "cuda_fp16.h",
                "cuda_fp16.hpp",
                "cuda_bf16.h",
                "cuda_bf16.hpp",
            ):
                if name != "<torch>" and (root / header).is_file():
                    found[f"{name}/{header}"] = cache_key.file_digest(root / header)
        return found

    @property
    def digest(self) -> str:
        """Of all that decides the code, but for the compiler and the architecture."""
        kernels, options = "\0".join((*self.expressions, *self.symbols)), "\0".join(self.options)
        headers = [item for item in self._files().items() if not item[0].startswith("<csrc>")]
        return cache_key.digest_fields(
            [
                *headers,
                ("source", self._program()),
                ("kernels", kernels),
                ("options", options),
                ("torch", self.torch),
            ]
        )
