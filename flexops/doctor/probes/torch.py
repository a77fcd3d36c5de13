"""torch, asked in another process: whether it can be imported, what it is, which libraries come
with it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator

from .. import children
from ..children import Child
from ..facts import LoadedLibrary, TorchFact

SECONDS = 120.0
_LIBRARIES = (
    r"cudart|cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|cupti|nvrtc|nvJitLink|nccl|amdhip64"
    r"|stdc\+\+|gomp"
)
_SONAME = re.compile(rf"lib(?:{_LIBRARIES})[\w.+-]*\.so(?:\.\d+)*")
_ABSENT = "ModuleNotFoundError: No module named 'torch'"


def torch(timeout: float = SECONDS) -> TorchFact:
    """Import torch in a child; that it crashes, hangs or raises is an answer too."""
    return read(children.run(["-m", __name__], timeout=timeout), timeout)


def read(child: Child, timeout: float = SECONDS) -> TorchFact:
    """What the child's end means."""
    reply = child.messages[0] if child.messages else None
    if reply is not None and "version" in reply:
        loaded = tuple(LoadedLibrary(*pair) for pair in reply.pop("loaded"))
        return TorchFact(
            state="ok", loaded=loaded, installed=tuple(reply.pop("installed")), **reply
        )
    if reply is not None:
        error = str(reply["error"])
        return TorchFact(state="absent" if error == _ABSENT else "broken", detail=error)
    if child.returncode is None:
        return TorchFact(
            state="hangs", detail=f"`import torch` gave no answer within {timeout:.0f} s"
        )
    noise = f" ({child.last_line})" if child.last_line and child.returncode < 0 else ""
    return TorchFact(
        state="broken", detail=f"the process that imported torch {child.failure}{noise}"
    )


def main() -> None:
    """In the child."""
    import time

    started = time.perf_counter()
    try:
        import torch
    except Exception as error:  # whatever it is, it is the finding
        text = " ".join(str(error).split())
        children.say({"error": f"{type(error).__name__}: {text}"[:600]})
        return
    seconds = time.perf_counter() - started
    count, gpu_error = _gpus(torch)
    root = os.path.dirname(os.path.abspath(torch.__file__))
    children.say(
        {
            "version": str(torch.__version__),
            "cuda": torch.version.cuda or "",
            "hip": getattr(torch.version, "hip", None) or "",
            "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
            "root": root,
            "import_seconds": round(seconds, 2),
            "gpu_count": count,
            "gpu_error": gpu_error,
            "loaded": loaded(_mapped()),
            "installed": sorted(installed(root)),
        }
    )


def _gpus(torch: object) -> tuple[int, str]:
    """How many GPUs torch can use; why none, if it is built for one."""
    cuda, version = torch.cuda, torch.version  # type: ignore[attr-defined]
    if not (version.cuda or getattr(version, "hip", None)):
        return 0, ""
    try:
        if cuda.is_available():
            return int(cuda.device_count()), ""
        cuda.init()
        return 0, "torch.cuda.is_available() is False"
    except Exception as error:  # AssertionError, RuntimeError and others, by version
        return 0, " ".join(str(error).split())[:300]


def loaded(paths: Iterable[str]) -> list[tuple[str, str]]:
    """The CUDA and C++ runtime libraries among the files a process has mapped, without the driver's
    own: (soname, path)."""
    names = {path: os.path.basename(path) for path in paths}
    return sorted((name, path) for path, name in names.items() if _SONAME.fullmatch(name))


def installed(torch_root: str) -> Iterator[str]:
    """The libraries that torch was installed with: in its own lib/, and in the packages of its CUDA
    beside it."""
    site = os.path.dirname(torch_root)
    for base in (os.path.join(torch_root, "lib"), os.path.join(site, "nvidia")):
        for folder, _, names in os.walk(base):
            yield from (os.path.join(folder, name) for name in names if _SONAME.fullmatch(name))


def _mapped() -> set[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            fields = (line.split(maxsplit=5) for line in maps)
            return {
                parts[5].strip() for parts in fields if len(parts) == 6 and parts[5].startswith("/")
            }
    except OSError:
        return set()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's teardown is no part of the question
