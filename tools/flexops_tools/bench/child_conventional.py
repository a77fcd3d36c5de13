"""Builds and imports an extension as PyTorch's documentation says, in a process of its own, and
prints how long that took.

Run as a file, so that flexops is not imported here. The one argument is a JSON object: ``mode``
(``load``: ``cpp_extension.load``, which runs ninja; ``setuptools``: ``BuildExtension`` without
ninja), ``sources``, ``directory``, ``cuda_home``, ``library_dir`` (linker names that this machine's
torch or toolkit lacks), ``name`` of the extension. ``processor`` is the processor time, of
compilers too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def _load(cpp_extension: Any, request: dict[str, Any]) -> None:
    cpp_extension.load(
        request["name"],
        request["sources"],
        build_directory=request["directory"],
        extra_ldflags=[f"-L{request['library_dir']}"],
    )


def _setuptools(cpp_extension: Any, request: dict[str, Any]) -> None:
    from setuptools import setup  # type: ignore[import-untyped,unused-ignore]

    name = request["name"]
    extension = cpp_extension.CUDAExtension(
        name, request["sources"], library_dirs=[request["library_dir"]]
    )
    places = [
        "--build-lib",
        request["directory"],
        "--build-temp",
        f"{request['directory']}/objects",
    ]
    setup(
        name=name, ext_modules=[extension], script_args=["--quiet", "build_ext", *places],
        cmdclass={"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=False)},
    )  # fmt: skip
    built = next(Path(request["directory"]).glob(f"{name}*.so"))
    spec = importlib.util.spec_from_file_location(name, built)
    if spec is None or spec.loader is None:
        raise ImportError(f"{built} is not an extension module")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def main() -> None:
    request = json.loads(sys.argv[1])
    import torch  # noqa: F401  what is measured is the build, not the start of torch
    import torch.utils.cpp_extension as cpp_extension

    # a CPU build of torch does not look for a toolkit, but compiles with one just as well
    if cpp_extension.CUDA_HOME is None:
        cpp_extension.CUDA_HOME = request["cuda_home"]
    Path(request["directory"]).mkdir(parents=True, exist_ok=True)
    started, used = time.perf_counter(), os.times()
    (_load if request["mode"] == "load" else _setuptools)(cpp_extension, request)
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - started,
                "processor": sum(os.times()[:4]) - sum(used[:4]),
            }
        )
    )


if __name__ == "__main__":
    main()
