"""Finding CUDA toolkits: index wheels, conda, CUDA_HOME, PATH, /usr/local. Which one is taken is
decided in ``select``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .context import Search, SearchContext, Step, run
from .model import CudaToolkit, Rejected, Tool, Version

_HEADERS = ("cuda_runtime_api.h", "crt/host_config.h")
_STATIC_RUNTIME = "libcudart_static.a"


def _explicit(context: SearchContext) -> Iterator[str]:
    if context.cuda_home:
        yield context.cuda_home


def _wheels(context: SearchContext) -> Iterator[str]:
    for site in context.site_dirs:
        nvidia = f"{site}/nvidia"
        for name in reversed(context.listing(nvidia)):
            if name == "cuda_nvcc" or name[2:].isdigit():
                yield f"{nvidia}/{name}"


def _conda(context: SearchContext) -> Iterator[str]:
    for prefix in filter(None, (context.conda_prefix, context.prefix)):
        if os.path.exists(f"{prefix}/conda-meta") or prefix == context.conda_prefix:
            yield prefix


def _path(context: SearchContext) -> Iterator[str]:
    for nvcc in context.on_path("nvcc"):
        yield _root_of(nvcc, context)


def _usr_local(context: SearchContext) -> Iterator[str]:
    base = f"{context.root}/usr/local"
    for name in sorted(context.listing(base), key=_version_key, reverse=True):
        if name.startswith("cuda"):
            yield f"{base}/{name}"


STEPS: tuple[Step, ...] = (
    Step("CUDA_HOME", "the environment variables CUDA_HOME and CUDA_PATH", _explicit),
    Step("site-packages", "nvidia/cu* beside the installed Python packages", _wheels),
    Step("conda", "the active conda environment", _conda),
    Step("PATH", "nvcc on PATH", _path),
    Step("/usr/local", "/usr/local/cuda*", _usr_local),
)


def find(context: SearchContext) -> Search[CudaToolkit]:
    """All complete CUDA toolkits here, and the incomplete ones with what they lack."""
    return run(STEPS, context, read)


def read(root: str, context: SearchContext) -> CudaToolkit | Rejected | None:
    """The toolkit in ``root``; why it is not one; None when there is no trace of one (an ordinary
    conda prefix)."""
    nvcc = f"{root}/bin/nvcc"
    if not os.path.exists(nvcc):
        return _without_nvcc(root, context)
    include, library = include_dir(root, context), _library_dir(root, context)
    lacking = [
        what
        for what, there in (("the CUDA headers", include), (_STATIC_RUNTIME, library))
        if not there
    ]
    if lacking:
        return Rejected("CUDA toolkit", Path(root), f"incomplete: it lacks {' and '.join(lacking)}")
    try:
        version, identity = context.ask("nvcc", nvcc)
    except (OSError, ValueError) as error:
        return Rejected("CUDA toolkit", Path(root), f"its nvcc cannot be used: {error}")
    includes = tuple(
        Path(directory) for directory in (include, f"{include}/cccl") if os.path.isdir(directory)
    )
    release = Version((version.major, version.minor))
    return CudaToolkit(
        Path(root), release, Tool(Path(nvcc), version, identity), includes, (Path(library),)
    )


def _without_nvcc(root: str, context: SearchContext) -> Rejected | None:
    if root == context.cuda_home:
        return Rejected(
            "CUDA toolkit", Path(root), "CUDA_HOME points here, but there is no bin/nvcc"
        )
    if os.path.basename(root) == "cuda_nvcc":
        return Rejected(
            "CUDA toolkit",
            Path(root),
            "the 12.x compiler packages of the index hold ptxas but no nvcc",
        )
    if os.path.basename(os.path.dirname(root)) == "nvidia":
        return Rejected("CUDA toolkit", Path(root), "libraries only: no bin/nvcc")
    return None


def _target(context: SearchContext) -> str:
    return {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(
        context.machine, f"{context.machine}-linux"
    )


def include_dir(root: str, context: SearchContext) -> str:
    """The directory of a toolkit's headers; "" if they are incomplete."""
    candidates = (f"{root}/include", f"{root}/targets/{_target(context)}/include")
    return next(
        (
            directory
            for directory in candidates
            if all(os.path.exists(f"{directory}/{header}") for header in _HEADERS)
        ),
        "",
    )


def _library_dir(root: str, context: SearchContext) -> str:
    candidates = [
        f"{root}/lib64",
        f"{root}/lib",
        f"{root}/targets/{_target(context)}/lib",
        f"{root}/lib/{context.machine}-linux-gnu",
    ]
    return next(
        (directory for directory in candidates if os.path.exists(f"{directory}/{_STATIC_RUNTIME}")),
        "",
    )


def _root_of(nvcc: str, context: SearchContext) -> str:
    """The toolkit that an nvcc on PATH belongs to: two levels up, unless it is a wrapper for one
    elsewhere (Debian's, or an own script)."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
    if include_dir(root, context) and _library_dir(root, context):
        return root
    return _told_root(nvcc, context) or root


def _told_root(nvcc: str, context: SearchContext) -> str:
    from .probe import nvcc_root

    def ask(path: str) -> str:
        told = nvcc_root(path)
        return os.path.normpath(told) if told else ""

    try:
        told: str = context.memo.recall("nvcc-root", nvcc, ask) if context.memo else ask(nvcc)
    except (OSError, ValueError):
        return ""
    return told


def _version_key(name: str) -> tuple[int, ...]:
    return tuple(int(piece) for piece in name.partition("-")[2].split(".") if piece.isdigit())
