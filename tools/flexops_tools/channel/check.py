"""Is a channel any good? Solves for several machines against it, installs what this one gets into a
fresh prefix, and lets doctor look there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexops.errors import ChannelError

from ..targets.conda import Variant
from .place import Place, distribution
from .run import child, last_lines

PACKAGE = "flexops"
_DOCTOR_SECONDS = 900.0


@dataclass(frozen=True)
class Machine:
    """A machine that is solved for.

    Attributes:
        name: for people.
        cuda: the newest CUDA that its driver runs, as ``CONDA_OVERRIDE_CUDA`` says it; empty
            without a GPU.
    """

    name: str
    cuda: str


@dataclass(frozen=True)
class Solved:
    """What a machine gets.

    Attributes:
        variant: the id of the variant that was chosen.
        expected: the one that should have been.
        build: the build string that was chosen.
        torch: version and build string of its torch.
    """

    machine: Machine
    variant: str
    expected: str
    build: str
    torch: str

    @property
    def good(self) -> bool:
        return self.variant == self.expected


@dataclass(frozen=True)
class Installed:
    """An installation and what doctor said there. ``findings`` are doctor's, those that are not
    ok."""

    prefix: Path
    packages: int
    exit_code: int
    findings: tuple[str, ...]


def machines(variants: Sequence[Variant]) -> tuple[Machine, ...]:
    """One without a GPU, and one for each CUDA of the matrix, whose driver runs just that."""
    return (
        Machine("no GPU", ""),
        *(Machine(f"driver for CUDA {one.cuda}", one.cuda) for one in variants if one.cuda),
    )


def expected(machine: Machine, variants: Sequence[Variant], there: Sequence[str]) -> str:
    """The variant, of those that are ``there``, that a machine should get: the newest CUDA whose
    major its driver runs, otherwise cpu."""

    def major(text: str) -> int:
        return int(text.partition(".")[0])

    fitting = [
        one
        for one in variants
        if one.cuda and one.id in there and machine.cuda and major(one.cuda) <= major(machine.cuda)
    ]
    newest = max(fitting, key=lambda one: tuple(map(int, one.cuda.split("."))), default=None)
    return newest.id if newest else "cpu"


def solve(
    place: Place,
    machine: Machine,
    variants: Sequence[Variant],
    *,
    upstream: Sequence[str] = ("conda-forge",),
    specs: Sequence[str] = (PACKAGE,),
    packages: Sequence[Path] | None = None,
) -> Solved:
    """What ``machine`` gets from the channel.

    Args:
        packages: of ours, in the channel; by default those in its folder.

    Raises:
        ChannelError: nothing fits it, or a dependency is missing.
    """
    request = {"channels": [place.url, *upstream], "specs": list(specs)}
    log = place.logs / "check.log"
    try:
        records = child(
            "solve", request, log=log, environment={"CONDA_OVERRIDE_CUDA": machine.cuda}
        )["records"]
    except ChannelError as error:
        raise _failed(error, specs, f"on a machine with {machine.name}", log) from error
    build, torch = _find(records, PACKAGE)[1], " ".join(_find(records, "pytorch"))
    there = sorted(
        {
            distribution(path)[2].partition("_")[0]
            for path in (place.packages(PACKAGE) if packages is None else packages)
        }
    )
    return Solved(
        machine, build.partition("_")[0], expected(machine, variants, there), build, torch
    )


def install(
    place: Place,
    prefix: Path,
    *,
    upstream: Sequence[str] = ("conda-forge",),
    specs: Sequence[str] = (PACKAGE,),
) -> list[list[str]]:
    """Make ``prefix`` hold exactly what ``specs`` call for on this machine: a new prefix is made,
    an old one changed; no specs empty it.

    Raises:
        ChannelError: it cannot be solved, or a package is damaged.
    """
    log = place.logs / "install.log"
    request = {
        "channels": [place.url, *upstream],
        "specs": list(specs),
        "prefix": str(prefix.absolute()),
    }
    try:
        records: list[list[str]] = child("install", request, log=log)["records"]
    except ChannelError as error:
        raise _failed(error, specs, f"into {prefix}", log) from error
    return records


def install_and_examine(
    place: Place,
    *,
    upstream: Sequence[str] = ("conda-forge",),
    prefix: Path | None = None,
    on_phase: Callable[[str], None] = lambda _: None,
) -> Installed:
    """Install into a fresh prefix, run doctor there, and remove it again (unless it was named).

    Raises:
        ChannelError: it cannot be installed, or doctor did not even start.
    """
    where = (prefix or place.work / "check").absolute()
    if prefix is None:
        shutil.rmtree(where, ignore_errors=True)
    elif where.exists() and any(where.iterdir()):
        raise ChannelError(
            "the prefix is not fresh",
            found=str(where),
            required="a folder that is empty or missing",
            fix=f"rm -r {where}",
        )
    try:
        on_phase("installing")
        records = install(place, where, upstream=upstream)
        on_phase("doctor")
        return examine(where, len(records), place)
    finally:
        if prefix is None:
            shutil.rmtree(where, ignore_errors=True)


def examine(prefix: Path, packages: int, place: Place) -> Installed:
    """Doctor's opinion of a prefix, asked there, as a user would who has activated it."""
    command = [str(prefix / "bin" / PACKAGE), "doctor", "--json"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=activated(prefix),
            cwd=prefix,
            timeout=_DOCTOR_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChannelError(
            "doctor does not start in the installed environment",
            found=str(error),
            fix=f"look at {prefix}",
        ) from error
    (place.logs / "doctor.json").write_text(done.stdout, encoding="utf-8")
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise ChannelError(
            "doctor fails in the installed environment",
            found=last_lines(done.stderr or done.stdout),
            log=place.logs / "doctor.json",
        ) from None
    return Installed(prefix, packages, done.returncode, findings(report))


def findings(report: dict[str, Any]) -> tuple[str, ...]:
    """What doctor did not find in order."""
    return tuple(
        f"{one['status']}: {one['id']}: {one['found']}"
        for one in report["findings"]
        if one["status"] != "ok"
    )


def activated(prefix: Path) -> dict[str, str]:
    """This environment, as activating ``prefix`` would leave it; what belongs to the running Python
    is left out."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "FLEXOPS_AOT_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {
        **kept,
        "CONDA_PREFIX": str(prefix),
        "PATH": f"{prefix / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def _find(records: Sequence[Sequence[str]], name: str) -> tuple[str, str]:
    """Version and build string; empty if it is not among them."""
    return next(
        ((version, build) for found, version, build, _ in records if found == name), ("", "")
    )


def _failed(error: ChannelError, specs: Sequence[str], where: str, log: Path) -> ChannelError:
    if error.fix:
        return error
    return ChannelError(
        f"{', '.join(specs) or 'nothing'} cannot be installed {where}",
        found=last_lines(error.found),
        fix="see the log; --from names further channels, CONDA_OVERRIDE_CUDA a driver",
        log=log,
    )
