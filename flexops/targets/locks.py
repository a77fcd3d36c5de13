"""Hash-locked requirements: one pair of files for each toolkit, ``envs/requirements/<toolkit>.in``
and ``.lock``.

The ``.in`` follows from the matrix and from what flexops depends on. The ``.lock`` names every
package that comes of it, by version and hash, for every Python from the oldest that the toolkit's
torch and flexops run on; ``write`` asks a package index for it, through ``uv pip compile
--universal``. Both have two parts: what an environment runs, and, below the line ``# build``, what
only building needs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import _toml
from ..errors import TargetError
from .checkout import checkout
from .model import Matrix, Target

BUILD_MARK = "# build"
_FOLDER = "envs/requirements"
_BESIDE_TORCH = ("numpy",)
"""No requirement of torch's wheel, but without it torch warns at every start."""


def input_path(target: Target) -> str:
    return f"{_FOLDER}/{target.toolkit_name}.in"


def lock_path(target: Target) -> str:
    return f"{_FOLDER}/{target.toolkit_name}.lock"


def lockable(target: Target) -> bool:
    """Whether the default index serves every wheel. Where another index is better or the only one,
    what comes is locked by the image's build."""
    return not target.index


def inputs(matrix: Matrix, header: str) -> dict[str, str]:
    """Path and text of the ``.in`` files; raises ``TargetError`` if rows of one toolkit differ in
    what is installed."""
    rendered: dict[str, str] = {}
    for target in matrix.targets:
        text = input_text(target, header)
        if rendered.setdefault(input_path(target), text) != text:
            raise TargetError(
                f"target {target.id} installs something else than the other rows of"
                f" {target.toolkit_name}",
                required="one set of pins for each toolkit",
                fix="give it a [toolkit.*] of its own",
            )
    return rendered


def input_text(target: Target, header: str) -> str:
    """The direct requirements of a target's environment."""
    run, build = _package_requirements()
    pins = (target.torch_requirement, f"ninja=={target.ninja}", *_BESIDE_TORCH)
    pinned = {"torch", "ninja"}
    lines = [*pins, *(one for one in run if _name(one) not in pinned)]
    tools = [one for one in build if one not in lines] + [
        pin for pin in (target.toolkit_requirement,) if pin
    ]
    return "\n".join([f"# {header}", *lines, BUILD_MARK, *tools]) + "\n"


def _package_requirements() -> tuple[list[str], list[str]]:
    """What flexops needs to run and to be built, as its pyproject.toml says."""
    document = _toml.load(checkout() / "pyproject.toml")
    return document["project"]["dependencies"], document["build-system"]["requires"]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0].lower().replace("_", "-") if match else ""


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


def installed(target: Target, root: Path, *, toolkit: bool) -> str:
    """What pip installs, every package by hash, for an environment that builds flexops: all of the
    lock, or all but the compiler of the package index.

    Raises:
        TargetError: the target's wheels are not locked; ``what`` says why.
    """
    if not lockable(target):
        raise TargetError(
            f"the wheels of {target.id} are not locked: they come from {target.index}, or from the"
            " default index where that does not answer"
        )
    try:
        text = (root / lock_path(target)).read_text(encoding="utf-8")
    except OSError as error:
        raise TargetError(
            f"{lock_path(target)} cannot be read",
            found=error.strerror or "",
            fix=f"flexops target lock {target.toolkit_name}",
        ) from error
    if toolkit:
        return "\n".join(entries(text)) + "\n"
    run, _, build = text.partition(BUILD_MARK + "\n")
    needed = {_name(one) for one in _package_requirements()[1]}
    return (
        "\n".join([*entries(run), *(one for one in entries(build) if _name(one) in needed)]) + "\n"
    )


def entries(text: str) -> list[str]:
    """The entries of a requirements file, comments left out."""
    lines = [
        line.rstrip()
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", "\\\0")
    return [entry.replace("\\\0", "\\\n") for entry in joined.split("\n") if entry]


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
