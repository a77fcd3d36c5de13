"""Finding the headers and the library of CUDA's runtime without a toolkit: every CUDA torch from a
package index brings them, for itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..settings import Settings
from .model import CudaToolkit, Tool, TorchBuild, Version

_VERSION = re.compile(r"^#define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)


def find(settings: Settings, torch: TorchBuild) -> CudaToolkit | None:
    """What host code for CUDA needs, of torch's own major, beside torch; as a toolkit whose nvcc is
    not there."""
    from .discovery import search_context

    wanted = Version.parse(torch.cuda or "0").major
    for site in search_context(settings).site_dirs:
        folders = [f"{site}/nvidia/{name}" for name in _names(f"{site}/nvidia")]
        for folder in folders:
            if found := _read(folder, wanted):
                others = [
                    f"{one}/include"
                    for one in folders
                    if one != folder
                    and not re.search(r"/cu\d+$", one)
                    and os.path.isdir(f"{one}/include")
                ]
                return found._replace(include_dirs=(*found.include_dirs, *map(Path, others)))
    return None


def complete(cuda: CudaToolkit, settings: Settings, torch: TorchBuild) -> CudaToolkit:
    """A toolkit with, behind its own headers, those of torch's that it lacks: an index's nvcc has
    no cusparse.h beside it, which ATen/cuda includes."""
    if any(os.path.exists(path / "cusparse.h") for path in cuda.include_dirs):
        return cuda
    found = find(settings, torch)
    more = [path for path in found.include_dirs if path not in cuda.include_dirs] if found else []
    return cuda._replace(include_dirs=(*cuda.include_dirs, *more))


def _read(folder: str, major: int) -> CudaToolkit | None:
    include, library = f"{folder}/include", f"{folder}/lib"
    try:
        with open(f"{include}/cuda_runtime_api.h", encoding="utf-8", errors="replace") as stream:
            number = _VERSION.search(stream.read())
    except OSError:
        return None
    if number is None or not os.path.exists(f"{library}/libcudart.so.{major}"):
        return None
    version = Version((int(number[1]) // 1000, int(number[1]) % 1000 // 10))
    if version.major != major:
        return None
    nvcc = Tool(Path(folder, "bin", "nvcc"), version, f"no nvcc, headers of CUDA {version}")
    return CudaToolkit(Path(folder), version, nvcc, (Path(include),), (Path(library),))


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
