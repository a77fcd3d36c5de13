"""Hash-locked requirements: one pair of files for each toolkit, ``envs/requirements/<toolkit>.in``
and ``.lock``.

The ``.in`` follows from the matrix and from what flexops depends on. The ``.lock`` names every
package that comes of it, by version and hash, for every Python from the oldest that the toolkit's
torch and flexops run on; ``write`` asks a package index for it, through ``uv pip compile
--universal``. Both have two parts: what an environment runs, and, below the line ``# build``, what
only building needs.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flexops.errors import TargetError
from flexops.targets.model import Matrix, Target

from .checkout import checkout
from .requirements import (
    BUILD_MARK,
    FOLDER,
    direct,
    entries,
    lock_path,
    lockable,
    name_of,
)

_BESIDE_TORCH = ("numpy",)
"""No requirement of torch's wheel, but without it torch warns at every start."""


def input_path(target: Target) -> str:
    return f"{FOLDER}/{target.toolkit_name}.in"


def inputs(matrix: Matrix, header: str) -> dict[str, str]:
    """Path and text of the ``.in`` files; raises ``TargetError`` if rows of one toolkit differ in
    what is installed."""
    rendered: dict[str, str] = {}
    for target in matrix.targets:
        text = input_text(target, header)
        if rendered.setdefault(input_path(target), text) != text:
            raise TargetError(
                f"target {target.id} installs other packages than the other rows of"
                f" {target.toolkit_name}",
                required="one set of pins for each toolkit",
                fix="give it a [toolkit.*] of its own",
            )
    return rendered


def input_text(target: Target, header: str) -> str:
    """The direct requirements of a target's environment."""
    run, build = direct(checkout())
    pins = (target.torch_requirement, f"ninja=={target.ninja}", *_BESIDE_TORCH)
    pinned = {"torch", "ninja"}
    lines = [*pins, *(one for one in run if name_of(one) not in pinned)]
    tools = [one for one in build if one not in lines] + [
        pin for pin in (target.toolkit_requirement,) if pin
    ]
    return "\n".join([f"# {header}", *lines, BUILD_MARK, *tools]) + "\n"


def choose(matrix: Matrix, names: Sequence[str]) -> tuple[Target, ...]:
    """One target for each toolkit named (none: each that can be locked); raises ``TargetError`` for
    an unknown or unlockable one."""
    toolkits = {target.toolkit_name: target for target in matrix.targets}
    if not names:
        return tuple(target for target in toolkits.values() if lockable(target))
    for name in names:
        if name not in toolkits:
            raise TargetError(
                f"there is no toolkit called {name!r}",
                required=", ".join(toolkits),
                fix="flexops target list",
            )
        if not lockable(toolkits[name]):
            target = toolkits[name]
            what = f"{name} is not locked here: its wheels come from {target.index}"
            raise TargetError(
                what, fix=f"nothing: the image's build of {target.id} locks what it gets"
            )
    return tuple(toolkits[name] for name in names)


def write(target: Target, root: Path) -> Path:
    """Resolve the target's requirements anew on the package index that uv is configured for, and
    write its lock.

    Raises:
        TargetError: there is no uv, or it could not resolve them; its own words are in the error.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise TargetError("locking needs uv", found="no uv on PATH", fix="pip install uv")
    runtime, _, build = (
        (root / input_path(target)).read_text(encoding="utf-8").partition(BUILD_MARK + "\n")
    )
    with tempfile.TemporaryDirectory() as place:
        all_lock = _compile(uv, target, runtime + build, Path(place) / "all", constraints=None)
        run_lock = _compile(
            uv, target, runtime, Path(place) / "runtime", constraints=Path(place) / "all.lock"
        )
    path = root / lock_path(target)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(lock_text(target, run_lock, all_lock), encoding="utf-8")
    temporary.replace(path)
    return path


def lock_text(target: Target, run_lock: str, all_lock: str) -> str:
    """The lock file: of the whole, what the run-time part names, and then the rest. Both are in
    pip's format, an entry being a line and its continuations."""
    running = {entry.partition(" ")[0] for entry in entries(run_lock)}
    run: list[str] = []
    tools: list[str] = []
    for entry in entries(all_lock):
        (run if entry.partition(" ")[0] in running else tools).append(entry)
    oldest, newest = target.python_range
    head = (
        f"# locked by `flexops target lock {target.toolkit_name}`: every package by hash, for"
        f" Python {oldest} to {newest}"
    )
    return "\n".join([head, *run, BUILD_MARK, *tools]) + "\n"


def _compile(
    uv: str, target: Target, requirements: str, place: Path, constraints: Path | None
) -> str:
    wishes, lock = place.with_suffix(".in"), place.with_suffix(".lock")
    wishes.write_text(requirements, encoding="utf-8")
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--generate-hashes",
        "--no-annotate",
        "--no-header",
        "--python-version",
        target.python_range[0],
    ]
    command += ["--constraint", str(constraints)] if constraints else []
    done = subprocess.run(
        [*command, str(wishes), "--output-file", str(lock)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        found = " ".join(done.stderr.split())[:1000]
        fix = "UV_INDEX_URL=<an index that has them>, or try again"
        raise TargetError(
            f"the requirements of {target.toolkit_name} could not be resolved", found=found, fix=fix
        )
    return lock.read_text(encoding="utf-8")
