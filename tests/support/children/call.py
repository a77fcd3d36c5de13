"""Calls an op as a user does, in a process of its own, and prints what happened.

The op is doctor's ``small_op``, defined and catalogued here as a real one is. Request: ``csrc``;
``watch``: true to report everything that the audit hook sees between importing torch and the end of
the first call; ``abi``: pretend that torch has this version.
"""

# ruff: noqa: E402 - paths and stand-ins come before the imports that need them
from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

request: dict[str, Any] = json.loads(sys.argv[1])
events: list[str] = []
watching = False

import torch

_MUTATIONS = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.utime",
    "tempfile.mkstemp",
    "tempfile.mkdtemp",
)
_PROCESSES = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
_LOCKS = ("fcntl.flock", "fcntl.lockf")


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not watching:
        return
    if event in (*_MUTATIONS, *_PROCESSES, *_LOCKS):
        events.append(f"{event} {arguments}")
    elif event == "open" and isinstance(arguments[0], (str, bytes)):
        path, mode, flags = arguments
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & 0o3):
            events.append(f"open for writing {path!r}")


def define() -> None:
    """What ``flexops/ops/<op>.py`` and the catalogue do for a real op."""
    from flexops.build.describe import catalog, layout
    from flexops.doctor.trial import small_op
    from flexops.ops import _register

    layout.csrc_root = lambda: Path(request["csrc"])
    catalog.CATALOG = (*catalog.CATALOG, small_op())
    _register.define(
        "doctor", "doctor_square(Tensor x) -> Tensor", lambda x: x * x, torch.empty_like
    )


def call() -> dict[str, Any]:
    import flexops
    from flexops.errors import FlexopsError

    said: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):  # a warning, and the search, happen once
                said["values"] = torch.ops.flexops.doctor_square(
                    torch.tensor([1.0, -2.0, 3.0])
                ).tolist()
        except FlexopsError as error:
            said |= {"error": str(error), "kind": type(error).__name__}
    status = next(
        status for status in flexops.status() if status.op == "doctor" and status.device == "cpu"
    )
    said |= {
        "backend": status.backend,
        "reason": status.reason,
        "fix": status.fix,
        "path": str(status.path or ""),
    }
    return said | {
        "warnings": [str(one.message) for one in caught if one.category is flexops.FallbackWarning]
    }


def main() -> None:
    global watching
    if request.get("abi"):
        torch.__version__ = request["abi"]
    if request.get("watch"):
        sys.dont_write_bytecode = True
        sys.addaudithook(watch)
        watching = True
    import flexops  # noqa: F401

    during_import = list(events)
    watching = False
    define()
    watching = bool(request.get("watch"))
    events.clear()
    os.path.exists("/flexops/begin")  # for those who watch from outside
    said = call()
    os.path.exists("/flexops/end")
    watching = False
    print(
        json.dumps(
            {
                **said,
                "import_events": during_import,
                "call_events": events,
                "cuda": torch.cuda.is_initialized(),
                "modules": [name for name in sys.modules if name.startswith("flexops.")],
            }
        )
    )


if __name__ == "__main__":
    main()
