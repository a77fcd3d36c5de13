"""What the tests of this folder share, typed, so that they can name it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from processes import completed

from flexops_tools.channel.place import Place
from flexops_tools.channel.run import child

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class World:
    """A folder with a channel of dependencies and all that comes to be from it; the package cache
    included, so that nothing is left of a run.

    Attributes:
        root: the folder.
        upstream: URL of the miniature channel.
    """

    root: Path
    upstream: str

    @property
    def pins(self) -> Path:
        """Variant values that stand for what the miniature channel has: one Python."""
        path = self.root / "pins.yaml"
        path.write_text(f'python_min: ["{PYTHON}"]\n')
        return path

    def flexops(
        self,
        *arguments: str | Path,
        cuda: str | None = None,
        cwd: Path = ROOT,
        code: int | None = 0,
    ) -> subprocess.CompletedProcess[str]:
        """The command, as a user would run it; the test fails if it exits with another code."""
        # the package's own libraries are searched
        unset = ("CONDA_OVERRIDE_CUDA", "FLEXOPS_AOT_DIR")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        if cuda is not None:
            environment["CONDA_OVERRIDE_CUDA"] = cuda
        command = [sys.executable, "-m", "flexops", *map(str, arguments)]
        return completed(command, cwd=cwd, env=environment, code=code)

    def build(
        self, channel: Path, *arguments: str | Path, variant: str = "cpu", code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        wanted = ("--variant", variant, "--channel", channel, "--from", self.upstream,
            "--variant-config", self.pins)  # fmt: skip
        return self.flexops("channel", "build", *wanted, *arguments, code=code)


@dataclass(frozen=True)
class CpuBuild:
    """The CPU variant, built with its tests; what the command said; the channel it is in."""

    place: Place
    package: Path
    output: str


def copy_of_checkout(target: Path, *only: str) -> Path:
    """What the recipe takes of it; ``only``: with these families alone in the catalogue, because
    compiling all of them takes long."""
    for name in ("csrc", "flexops", "recipe"):
        shutil.copytree(
            ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "_aot")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    if only:
        with (target / "flexops/build/describe/catalog.py").open("a") as catalog:
            catalog.write(f"CATALOG = tuple(find(name) for name in {only})\n")
    return target


def only_empty(folder: Path, python: str = PYTHON) -> str:
    """The URL of dependencies of the CPU package without their files, which take long to unpack; so
    Python can be any."""
    from miniature import Miniature  # needs the bindings

    channel = Miniature(folder / "empty", folder / "staging")
    needs = {
        "pytorch": "2.13.0",
        "ninja": "1.13",
        "typer": "1",
        "rich": "15",
        "tomli": "2.2",
        "libgcc": "15.2.0",
        "libstdcxx": "15.2.0",
    }
    for name, version in {"python": f"{python}.0", **needs}.items():
        channel.empty(name, version)
    child("index", {"channel": str(channel.root)})
    return channel.url
