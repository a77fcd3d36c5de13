"""Calls operators' native kernels for CUDA where there is no GPU, in a process that has the
stand-ins, and prints what came of it.

Request: ``program``, Python. Within its ``with OnGpu():`` operators are those kernels, called with
tensors of the CPU, and their results are not computed. What it puts into ``said`` is the answer; an
exception is its ``error``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import flexops
from flexops._torch import TorchDispatchMode
from flexops.build.describe import catalog
from flexops.build.load import loader

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
FAMILY = {op: spec.name for spec in catalog.CATALOG for op in spec.ops}
on_gpu = ctypes.CDLL("libtorch_cuda.so").stand_in_gpu


def native(operator: Any, *arguments: Any, **options: Any) -> Any:
    loader.ensure(FAMILY[operator._schema.name.partition("::")[2]], "cuda")
    return operator.redispatch(CUDA, *arguments, **options)


class OnGpu(TorchDispatchMode):
    """What is called in here of flexops is called on the GPU that is pretended."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.partition("::")[2] in FAMILY:
            return native(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def main() -> None:
    request = json.loads(sys.argv[1])
    said: dict[str, Any] = {}
    names = {
        "torch": torch,
        "flexops": flexops,
        "loader": loader,
        "said": said,
        "native": native,
        "OnGpu": OnGpu,
        "on_gpu": on_gpu,
        "threading": threading,
    }
    try:
        exec(request["program"], names)
    except Exception as error:  # whatever it is, it is the answer
        said |= {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
