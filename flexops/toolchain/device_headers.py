"""Finds CUDA's own headers for device code: those of CUDA's runtime (``cuda_fp16.h``,
``cooperative_groups.h``) and of CCCL (libcu++ and CUB)."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .model import Version

if TYPE_CHECKING:
    from .context import SearchContext
    from .nvrtc import DeviceCompiler

_BUNDLE = Version((13, 3))
"""The first NVRTC that can write the headers of its toolkit into a directory."""
_SECONDS = 300  # to write the bundled headers: 20 MB
_PARTS = {
    "CUDA's runtime": "cuda_fp16.h",
    "its compiler": "crt/mma.h",
    "CCCL": "cuda/std/version",
    "cuRAND": "curand_kernel.h",
}
"""What there is to find, each by a header of its own."""
_NUMBERS = (
    ("cuda_runtime_api.h", re.compile(r"^#define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)),
    ("cuda/std/__cccl/version.h", re.compile(r"^#define\s+CCCL_VERSION\s+(\d+)", re.MULTILINE)),
    ("cuda/std/detail/__config", re.compile(r"define\s+_?LIBCUDACXX\w*_VERSION\s+(\d+)")),
)


class HeaderRoot(NamedTuple):
    """A directory of headers.

    Attributes:
        path: the directory.
        origin: where it comes from, for reports.
        parts: what it is used for: keys of ``_PARTS``.
        identity: what enters cache keys in place of the headers' contents: the versions that they
            state. Never a path.
    """

    path: Path
    origin: str
    parts: tuple[str, ...]
    identity: str

    def __str__(self) -> str:
        return f"{' and '.join(self.parts)}: {self.path} ({self.origin})"


@functools.cache
def roots(compiler: DeviceCompiler) -> tuple[HeaderRoot, ...]:
    """``find`` on this machine. Nothing for nvcc, which has its own."""
    from ..settings import current
    from .discovery import search_context

    if compiler.kind != "nvrtc":
        return ()
    context = search_context(current())
    found = find(context, compiler, current().cache_dir)
    if context.memo:
        context.memo.save()
    return found


def find(context: SearchContext, compiler: DeviceCompiler, cache: Path) -> tuple[HeaderRoot, ...]:
    """The directories that together have the headers, in the order in which they are searched:
    torch's packages, what NVRTC bundles (written into ``cache``), a package of CCCL, a toolkit. A
    part is taken from the first of them that has it, of the compiler's CUDA major."""
    found: list[HeaderRoot] = []
    wanted = dict(_PARTS)
    for origin, directory in _candidates(context, compiler, cache):
        parts = tuple(
            part for part, header in wanted.items() if os.path.isfile(f"{directory}/{header}")
        )
        if parts and _major(directory) in (0, compiler.version.major):
            found.append(HeaderRoot(Path(directory), origin, parts, _identity(directory)))
            for part in parts:
                del wanted[part]
        if not wanted:
            break
    return tuple(found)


def fix_for(header: str, cuda: str) -> str:
    """How to get a header that is missing, for a CUDA such as ``"13.0"``; "" if it is none of
    these."""
    major = cuda.partition(".")[0]
    suffix = "" if int(major) > 12 else f"-cu{major}"
    if re.match(r"(?:cub|cuda|thrust|nv)/", header):
        return f'pip install "nvidia-cuda-cccl{suffix}=={cuda}.*"'
    if re.match(r"cuda\w*\.h|cooperative_groups|cuComplex\.h|math_constants\.h", header):
        return f'pip install "nvidia-cuda-runtime{suffix}=={cuda}.*"'
    if re.match(r"(?:cute|cutlass)/", header):
        return "include=[<the include directory of CUTLASS>]"
    if re.match(r"(?:torch|ATen|c10|pybind11)/|Python\.h", header):
        return "remove the include, of which device code uses nothing (flexops.load compiles it)"
    if re.fullmatch(r"\w+", header):
        return f"do without <{header}>, a header of C++ for code of the host"
    return ""


def _candidates(
    context: SearchContext, compiler: DeviceCompiler, cache: Path
) -> Iterator[tuple[str, str]]:
    from . import cuda

    for site in context.site_dirs:
        nvidia = f"{site}/nvidia"
        for name in sorted(os.listdir(nvidia)) if os.path.isdir(nvidia) else ():
            for folder in ("include", "include/cccl"):
                yield "a package beside torch", f"{nvidia}/{name}/{folder}"
    if compiler.version >= _BUNDLE:
        bundle = cache / f"nvrtc-headers-{compiler.version}"
        if _unpacked(compiler, bundle):
            yield f"bundled in {compiler}", str(bundle)
            yield f"bundled in {compiler}", f"{bundle}/cccl"
    for site in context.site_dirs:
        yield "the package cuda-cccl", f"{site}/cuda/cccl/headers/include"
    for step in cuda.STEPS:
        for root in step.find(context):
            if include := cuda.include_dir(root, context):
                yield f"a CUDA toolkit of {step.name}", include
                yield f"a CUDA toolkit of {step.name}", f"{include}/cccl"


def _unpacked(compiler: DeviceCompiler, folder: Path) -> bool:
    """Whether NVRTC has written its headers into ``folder``, now or earlier: in a child process, as
    it compiles in one."""
    from . import proc

    if (folder / ".nvrtc_headers_version").exists():
        return True
    code = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)\n"
        "install = ctypes.CDLL(sys.argv[2]).nvrtcInstallBundledHeaders\n"
        "sys.exit(install(sys.argv[3].encode(), 0, None))\n"
    )
    libraries = (str(compiler.builtins), str(compiler.path))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", "-S", "-c", code, *libraries, str(folder)]
        return proc.run(command, seconds=_SECONDS).status == 0
    except OSError:
        return False


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def _identity(directory: str) -> str:
    numbers = [
        f"{name} {match[1]}"
        for name, pattern in _NUMBERS
        if (match := pattern.search(_text(f"{directory}/{name}")))
    ]
    return ", ".join(numbers) or "unversioned"


def _major(directory: str) -> int:
    """Of the CUDA that a directory's runtime headers are of; 0 where there are none. CCCL supports
    several, so the headers around it decide."""
    name, pattern = _NUMBERS[0]
    around = os.path.dirname(directory) if directory.endswith("/cccl") else directory
    match = pattern.search(_text(f"{around}/{name}"))
    return int(match[1]) // 1000 if match else 0
