"""Builds something in a process of its own, without torch, and prints what came of it.

Request: ``folder`` (of a ``tiny_plan``) or ``csrc`` and ``device`` (the small op); ``compiler``;
``die``: ``before-publish`` or ``after-publish``, for a SIGKILL there; ``signals``: ``restart`` or
``elsewhere``, for how the process takes a SIGINT.
"""

# ruff: noqa: E402 - paths and stand-ins come before the imports that need them
from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]  # builds need torch's files, not torch
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builds import SQUARE, tiny_plan

from flexops import settings
from flexops.build.compile import building
from flexops.build.deliver import aot
from flexops.build.describe import layout
from flexops.build.load import loader
from flexops.build.store.cache import BuildCache
from flexops.errors import FlexopsError


def build(request: dict[str, Any]) -> building.Result:
    if "folder" in request:
        plan = tiny_plan(Path(request["folder"]), compiler=request.get("compiler", "g++"))
        return building.obtain([plan], loader.open_cache(settings.current()))[0]
    layout.csrc_root = lambda: Path(request["csrc"])
    chosen = settings.current()
    return aot.build_specs(
        (SQUARE,),
        (request["device"],),
        chosen._replace(arch_list=request.get("arch") or chosen.arch_list),
    )[0]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prepare_death(moment: str) -> None:
    original = BuildCache._place

    def place(self: BuildCache, *arguments: Any) -> Any:
        if moment == "before-publish":
            die()
        original(self, *arguments)
        die()

    BuildCache._place = place  # type: ignore[method-assign]


def prepare_signals(how: str) -> None:
    """As in large processes: a library has put its own handler before Python's, without
    interrupting system calls; or another thread takes the signal."""
    if how == "restart":
        signal.siginterrupt(signal.SIGINT, False)
    else:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in this thread


def main() -> None:
    request = json.loads(sys.argv[1])
    if request.get("signals"):
        prepare_signals(request["signals"])
    if request.get("die"):
        prepare_death(request["die"])
    try:
        result = build(request)
        entry = result.require()
        said: dict[str, Any] = {
            "library": str(entry.library),
            "cached": result.cached,
            "architectures": result.architectures,
            "memory": result.plan.memory_bytes,
            "headers": sorted(entry.manifest.files),
            "kernels": [str(kernel.require().library) for kernel in result.kernels],
            "compilers": sorted({kernel.require().manifest.compiler for kernel in result.kernels}),
        }
    except FlexopsError as error:
        said = {
            "error": str(error),
            "kind": type(error).__name__,
            "fix": error.fix,
            "log": str(getattr(error, "log", None) or ""),
        }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
