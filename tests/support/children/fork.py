"""Forks while a thread compiles an op, and says what the child that asks for the same op got.

Request: ``csrc``; ``how``: ``os.fork``, ``starting`` (while ninja is being started), ``process``,
``dataloader`` or ``orphan`` (the parent is killed meanwhile); ``watched``: the folder of a
``watched_compiler`` that hangs; ``answer``: a file for the child's answer.
"""

# ruff: noqa: E402 - paths and stand-ins come before the imports that need them
from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of what is done here

import torch

request: dict[str, Any] = json.loads(sys.argv[1])
watched, answer = Path(request["watched"]), Path(request["answer"])


def square() -> list[float]:
    values: list[float] = torch.ops.flexops.doctor_square(torch.tensor([1.0, -2.0, 3.0])).tolist()
    import flexops

    backend = next(
        status.backend
        for status in flexops.status()
        if status.op == "doctor" and status.device == "cpu"
    )
    draft = answer.with_suffix(".draft")
    draft.write_text(json.dumps({"values": values, "backend": backend, "pid": os.getpid()}))
    draft.replace(answer)
    return values


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(square())


def release_later() -> None:
    time.sleep(0.7)  # the child comes to its wait meanwhile
    (watched / "hang-compile").unlink()


def fork() -> None:
    child = os.fork()
    if child == 0:
        square()
        os._exit(0)
    os.waitpid(child, 0)


def orphan() -> None:
    if os.fork() == 0:
        square()
        os._exit(0)
    time.sleep(0.7)
    (watched / "hang-compile").unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def start_slowly() -> None:
    """Be long at that moment of starting ninja at which its pipes are there and it is not."""
    import subprocess

    place = subprocess if hasattr(subprocess, "_fork_exec") else subprocess._posixsubprocess  # type: ignore[attr-defined]
    name = "_fork_exec" if hasattr(subprocess, "_fork_exec") else "fork_exec"
    real = getattr(place, name)

    def slow(*arguments: Any) -> Any:
        if b"-C" in map(os.fsencode, arguments[0]):  # not where it is asked for its version
            (watched / "waiting-compile").touch()
            time.sleep(1)
        return real(*arguments)

    setattr(place, name, slow)


def main() -> None:
    import call  # the op, defined as a real one is

    call.request = request
    call.define()
    if request["how"] == "starting":
        start_slowly()
    compiling = threading.Thread(
        target=torch.ops.flexops.doctor_square, args=(torch.ones(3),), daemon=True
    )
    compiling.start()
    while not (watched / "waiting-compile").exists():
        time.sleep(0.01)
    how = request["how"]
    if how != "orphan":
        threading.Thread(target=release_later).start()
    context = multiprocessing.get_context("fork")
    if how in ("os.fork", "starting"):
        fork()
    elif how == "orphan":
        orphan()
    elif how == "process":
        process = context.Process(target=square)
        process.start()
        process.join()
    else:
        list(torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context=context))
    compiling.join()
    print(json.dumps({"pid": os.getpid()}))


if __name__ == "__main__":
    main()
