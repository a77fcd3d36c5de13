"""Finding what compiles device code: NVRTC, which every CUDA torch brings in exactly its own
version; where there is none, an nvcc.

NVRTC is a library of CUDA's (libnvrtc) and needs another one beside it (libnvrtc-builtins), whose
name also has the version to the minor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from .compat import Rules
from .context import Search, SearchContext, Step, run
from .model import CudaToolkit, Found, Rejected, TorchBuild, Version
from .select import CUDA_WISH, Choice

# PyTorch's own index has had wheels with a digest in the name
_LIBRARY = re.compile(r"libnvrtc(?:-[0-9a-f]+)?\.so[.\d]*")
_BUILTINS = re.compile(r"libnvrtc-builtins(?:-[0-9a-f]+)?\.so\.(\d+)\.(\d+)[.\d]*")


class DeviceCompiler(NamedTuple):
    """What makes a cubin of a kernel.

    Attributes:
        kind: ``nvrtc``, or ``nvcc`` where there is no NVRTC.
        path: libnvrtc, or nvcc.
        version: the CUDA version whose code it makes.
        identity: what enters cache keys; never a path.
        builtins: libnvrtc-builtins; has to be opened first, by its path, because the other one
            looks for it by its name alone.
    """

    kind: Literal["nvrtc", "nvcc"]
    path: Path
    version: Version
    identity: str
    builtins: Path | None = None

    def __str__(self) -> str:
        return f"{'NVRTC' if self.kind == 'nvrtc' else 'nvcc'} {self.version}"


def _explicit(context: SearchContext) -> Iterator[str]:
    if context.cuda_home:
        yield from _libraries_of(context.cuda_home, context)


def _wheels(context: SearchContext) -> Iterator[str]:
    for site in context.site_dirs:
        names = sorted(
            name
            for name in _names(f"{site}/nvidia")
            if name == "cuda_nvrtc" or re.fullmatch(r"cu\d+", name)
        )
        yield from (f"{site}/nvidia/{name}/lib" for name in reversed(names))
        yield f"{site}/torch/lib"


def _conda(context: SearchContext) -> Iterator[str]:
    for prefix in filter(None, (context.conda_prefix, context.prefix)):
        if os.path.exists(f"{prefix}/conda-meta") or prefix == context.conda_prefix:
            yield from _libraries_of(prefix, context)


def _usr_local(context: SearchContext) -> Iterator[str]:
    for name in sorted(_names(f"{context.root}/usr/local"), reverse=True):
        if name.startswith("cuda"):
            yield from _libraries_of(f"{context.root}/usr/local/{name}", context)


STEPS: tuple[Step, ...] = (
    Step(CUDA_WISH, "the environment variables CUDA_HOME and CUDA_PATH", _explicit),
    Step("site-packages", "beside torch: nvidia/cuda_nvrtc, nvidia/cu*, torch/lib", _wheels),
    Step("conda", "the active conda environment", _conda),
    Step("/usr/local", "/usr/local/cuda*", _usr_local),
)


def find(context: SearchContext) -> Search[DeviceCompiler]:
    """Every NVRTC here, and the incomplete ones with what they lack. Runs and opens nothing."""
    return run(STEPS, context, read)


def read(directory: str, _: SearchContext) -> DeviceCompiler | Rejected | None:
    """The NVRTC in a directory of libraries; why it is none; None when there is no trace of one."""
    names = sorted(_names(directory), key=len)  # libnvrtc.so.13 before libnvrtc.so.13.0.88
    library = next((name for name in names if _LIBRARY.fullmatch(name)), None)
    if library is None:
        return None
    path = Path(directory, library)
    every = [match for name in names if (match := _BUILTINS.fullmatch(name))]
    major = library.partition(".so.")[2].partition(".")[0]
    builtins = max(
        (match for match in every if match[1] == (major or match[1])),
        key=lambda match: (int(match[2]), -len(match[0])),
        default=None,
    )
    if builtins is None:
        others = f", only {every[0][0]}, which is another version's" if every else ""
        return Rejected("NVRTC", path, f"libnvrtc-builtins is not beside it{others}")
    version = Version((int(builtins[1]), int(builtins[2])))
    try:
        size = path.stat().st_size
    except OSError as error:
        return Rejected("NVRTC", path, f"it cannot be read: {error.strerror}")
    return DeviceCompiler(
        "nvrtc", path, version, f"NVRTC {version} of {size} bytes", Path(directory, builtins[0])
    )


def choose(
    found: Sequence[Found[DeviceCompiler]], torch: TorchBuild | None, known: Rules
) -> Choice[DeviceCompiler]:
    """The NVRTC of torch's own CUDA version; else one of the same major, the nearest minor; a torch
    without CUDA takes the newest."""
    cuda = Version.parse(torch.cuda) if torch and torch.cuda else None
    judged = [(one, known.toolkit_for_torch(one.value.version, cuda)) for one in found]
    rejected = tuple(
        Rejected("NVRTC", one.value.path, verdict.reason) for one, verdict in judged if not verdict
    )
    fitting = [(one, verdict) for one, verdict in judged if verdict]
    if not fitting:
        return Choice(None, rejected)

    def rank(item: tuple[Found[DeviceCompiler], object]) -> tuple[int, bool, int, int]:
        version = item[0].value.version
        distance = abs(version.minor - cuda.minor) if cuda else 0
        return (distance, item[0].found_via != CUDA_WISH, -version.major, -version.minor)

    taken, verdict = min(fitting, key=rank)
    version = taken.value.version
    if cuda:
        better = (
            f"{version} is"
            f" {'of the same minor as torch' if version.minor == cuda.minor else 'nearer to torch'}"
        )
    else:
        better = (
            f"CUDA_HOME has {version}" if taken.found_via == CUDA_WISH else f"{version} is newer"
        )
    rejected += tuple(
        Rejected("NVRTC", one.value.path, f"CUDA {one.value.version} would do; {better}")
        for one, _ in fitting
        if one.value.version != version
    )
    return Choice(taken, rejected, (verdict.reason,) if verdict.reason else ())


def from_nvcc(toolkit: CudaToolkit) -> DeviceCompiler:
    """The second provider of the same cubins, where there is no NVRTC."""
    return DeviceCompiler(
        "nvcc", toolkit.nvcc.path, toolkit.version, f"nvcc {toolkit.nvcc.identity}"
    )


def _libraries_of(root: str, context: SearchContext) -> Iterator[str]:
    target = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(
        context.machine, f"{context.machine}-linux"
    )
    yield from (f"{root}/lib64", f"{root}/lib", f"{root}/targets/{target}/lib")


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
