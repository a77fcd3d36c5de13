"""Has flexops provide operators in a process of its own, and prints how long that took.

Run as a file. The one argument is a JSON object: ``op`` and ``device`` to load as a first call
would, with ``kernel``, an architecture, also one of its kernels; ``family`` to build with all of
its kernels; ``sources`` for ``flexops.load``, under ``name``, whose processor time is reported; or
``aot``: true to build everything ahead of time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Literal


def _load(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    if request["device"] == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # as it is when an op is first called: its arguments are on the GPU

    started = time.perf_counter()
    import flexops

    imported = time.perf_counter()
    from flexops.build.load import loader

    native = loader.ensure(request["op"], request["device"])
    if native and request.get("kernel"):
        _compile_one(request["op"], request["kernel"])
    seconds = time.perf_counter() - imported
    status = next(
        status
        for status in flexops.status()
        if (status.op, status.device) == (request["op"], request["device"])
    )
    return {
        "seconds": seconds,
        "import_seconds": imported - started,
        "error": "" if native else status.reason,
    }


def _compile_one(family: str, architecture: str) -> None:
    """The first of the kernels that a library names, as its first launch on such a GPU would have
    it."""
    from flexops import settings
    from flexops.build.compile import building, device_code
    from flexops.build.describe import catalog
    from flexops.build.load import loader, provider
    from flexops.build.plan import kernel_names
    from flexops.compute_capability import parse_arch_list

    (spec,) = catalog.select((family,))
    chosen = settings.current()
    (wanted,) = parse_arch_list(architecture)
    cache = loader.open_cache(chosen)
    # which loading it left there
    (built,) = building.obtain([loader.local_plan(spec, "cuda", chosen)], cache)
    compiler = provider.compiler_for(chosen, (wanted.capability,)).compiler
    kernel = provider.plan_kernel(
        spec, kernel_names.names_in(built.require().library)[0], wanted, compiler
    )
    (result,) = device_code.obtain([kernel], cache)
    assert not result.cached
    result.require()


def _build(names: tuple[str, ...], devices: tuple[Literal["cpu", "cuda"], ...]) -> dict[str, Any]:
    from flexops import settings
    from flexops.build.deliver import aot

    started = time.perf_counter()
    results = aot.build(names, settings.current(), devices=devices)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "libraries": len(results),
        "error": "; ".join(str(result.error) for result in results if result.error),
    }


def _load_sources(request: dict[str, Any]) -> dict[str, Any]:
    import torch  # what is measured is the build

    # a CPU build of torch compiles with a toolkit just as well
    if request["sources"][0].endswith(".cu") and torch.version.cuda is None:
        torch.version.cuda = request["cuda"]
    import flexops

    started, used = time.perf_counter(), os.times()
    flexops.load(
        request["name"],
        request["sources"],
        extra_ldflags=[f"-L{request['library_dir']}"],
        device_compiler=request["device_compiler"],
    )
    return {
        "seconds": time.perf_counter() - started,
        "processor": sum(os.times()[:4]) - sum(used[:4]),
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    if request.get("aot"):
        result = _build((), ("cpu", "cuda"))
    elif request.get("sources"):
        result = _load_sources(request)
    elif family := request.get("family"):
        result = _build((family,), ("cuda",))
    else:
        result = _load(request)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
