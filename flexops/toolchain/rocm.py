"""Finding ROCm: ROCM_HOME, PATH, /opt/rocm*, and Debian's packages under /usr."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .context import Search, SearchContext, Step, run
from .model import Rejected, RocmToolkit, Tool


def _explicit(context: SearchContext) -> Iterator[str]:
    if context.rocm_home:
        yield context.rocm_home


def _path(context: SearchContext) -> Iterator[str]:
    for hipcc in context.on_path("hipcc"):
        yield os.path.dirname(os.path.dirname(os.path.realpath(hipcc)))


def _opt(context: SearchContext) -> Iterator[str]:
    base = f"{context.root}/opt"
    for name in reversed(context.listing(base)):
        if name.startswith("rocm"):
            yield f"{base}/{name}"


def _distribution(context: SearchContext) -> Iterator[str]:
    yield f"{context.root}/usr"


STEPS: tuple[Step, ...] = (
    Step("ROCM_HOME", "the environment variables ROCM_HOME and ROCM_PATH", _explicit),
    Step("PATH", "hipcc on PATH", _path),
    Step("/opt/rocm", "/opt/rocm*", _opt),
    Step("/usr", "the distribution's own hipcc", _distribution),
)


def find(context: SearchContext) -> Search[RocmToolkit]:
    """All ROCm installations here that can compile."""
    return run(STEPS, context, read)


def read(root: str, context: SearchContext) -> RocmToolkit | Rejected | None:
    """The installation in ``root``; why it is not one; None when there is no trace of one."""
    hipcc = f"{root}/bin/hipcc"
    if not os.path.exists(hipcc):
        return (
            Rejected("ROCm", Path(root), "ROCM_HOME points here, but there is no bin/hipcc")
            if root == context.rocm_home
            else None
        )
    include = f"{root}/include"
    library = next(
        (
            path
            for path in (f"{root}/lib", f"{root}/lib/{context.machine}-linux-gnu")
            if os.path.exists(f"{path}/libamdhip64.so")
        ),
        "",
    )
    has_headers = os.path.exists(f"{include}/hip/hip_runtime.h")
    lacking = [
        what
        for what, there in (("the HIP headers", has_headers), ("libamdhip64.so", library))
        if not there
    ]
    if lacking:
        return Rejected("ROCm", Path(root), f"incomplete: it lacks {' and '.join(lacking)}")
    try:
        version, identity = context.ask("hipcc", hipcc)
    except (OSError, ValueError) as error:
        return Rejected("ROCm", Path(root), f"its hipcc cannot be used: {error}")
    return RocmToolkit(
        Path(root),
        version,
        Tool(Path(hipcc), version, identity),
        (Path(include),),
        (Path(library),),
    )
