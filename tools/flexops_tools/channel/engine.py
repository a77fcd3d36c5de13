"""The two programs that build a recipe: conda-build where it is installed, otherwise the
rattler-build that Python has."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexops.errors import ChannelError
from flexops.toolchain.version import Version

from .run import OnLine, child, logged

Wish = Literal["auto", "conda-build", "rattler-build"]
LEAST_CONDA_BUILD = Version((26,))
"""The first that builds recipes of format v1."""


@dataclass(frozen=True)
class Job:
    """One variant to build.

    Attributes:
        recipe: the folder of ``recipe.yaml``.
        variants: variant files; a later one overrides an earlier one.
        channels: where dependencies come from, best first.
        output: a folder of this job's own; the package is in one of its sub-folders afterwards.
        test: run the recipe's tests too.
        environment: for the program.
    """

    recipe: Path
    variants: Sequence[Path]
    channels: Sequence[str]
    output: Path
    test: bool
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Engine:
    """A program that builds. ``command`` is empty for the bindings."""

    name: str
    command: tuple[str, ...] = ()

    def build(self, job: Job, log: Path, on_line: OnLine) -> None:
        """Raises ``ChannelError`` with what the program said last."""
        if not self.command:
            recipe, variants = str(job.recipe / "recipe.yaml"), list(map(str, job.variants))
            request = {
                "recipe": recipe,
                "variants": variants,
                "channels": list(job.channels),
                "output": str(job.output),
                "test": job.test,
            }
            child("build", request, log=log, on_line=on_line, environment=job.environment)
            return
        errors: list[str] = []

        def listen(line: str) -> None:
            errors[:] = [*errors[-20:], line]
            on_line(line)

        if logged(conda_build_command(self.command, job), log, listen, environment=job.environment):
            raise ChannelError("conda-build failed", found="\n".join(errors), log=log)


def conda_build_command(command: Sequence[str], job: Job) -> list[str]:
    """conda-build's own options for the job."""
    variants = [word for path in job.variants for word in ("-m", str(path))]
    channels = [word for channel in job.channels for word in ("-c", channel)]
    tests = [] if job.test else ["--no-test"]
    form = ["--package-format", "2", "--no-include-recipe"]
    return [
        *command,
        str(job.recipe),
        *variants,
        *channels,
        "--override-channels",
        "--output-folder",
        str(job.output),
        *form,
        *tests,
    ]


def choose(wish: Wish) -> Engine:
    """conda-build if it is there and new enough, else rattler-build; or the one that was asked for.

    Raises:
        ChannelError: the one asked for is missing, or too old.
    """
    if wish == "rattler-build":
        return Engine("rattler-build")
    found = _conda_build()
    if isinstance(found, Engine):
        return found
    if wish == "auto":
        return Engine("rattler-build")
    fix = f"conda install -n base 'conda-build>={LEAST_CONDA_BUILD}'"
    raise ChannelError(
        "conda-build cannot be used",
        found=found,
        required=f"conda-build {LEAST_CONDA_BUILD} or newer",
        fix=fix,
    )


def _conda_build() -> Engine | str:
    path = shutil.which("conda-build")
    if path is None:
        return "no conda-build on PATH"
    try:
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=120, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}: {error}"
    release = re.search(r"(\d+)\.(\d+)", shown)
    if release is None or Version((int(release[1]), int(release[2]))) < LEAST_CONDA_BUILD:
        return f"{path}: {shown.strip() or 'says no version'}"
    return Engine("conda-build", (path,))
