"""Has flexops provide operators in a process of its own, and prints how long that took.

Run as a file. The one argument is a JSON object: ``op`` and ``device`` to load as a first call would, or ``aot``: true to build everything ahead of time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def _load(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    if request["device"] == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # as it is when an op is first called: its arguments are on the GPU

    started = time.perf_counter()
    import flexops

    imported = time.perf_counter()
    from flexops.op_builder import loader

    native = loader.ensure(request["op"], request["device"])
    seconds = time.perf_counter() - imported
    status = next(status for status in flexops.status() if (status.op, status.device) == (request["op"], request["device"]))
    return {"seconds": seconds, "import_seconds": imported - started, "error": "" if native else status.reason}


def _build_all() -> dict[str, Any]:
    from flexops import settings
    from flexops.op_builder import aot

    started = time.perf_counter()
    results = aot.build((), settings.current(), devices=("cpu", "cuda"))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "libraries": len(results), "error": "; ".join(str(result.error) for result in results if result.error)}


def main() -> None:
    request = json.loads(sys.argv[1])
    print(json.dumps(_build_all() if request.get("aot") else _load(request)))


if __name__ == "__main__":
    main()
