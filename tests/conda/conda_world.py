"""What the tests of this folder share, typed, so that they can name it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from flexops.channel.place import Place

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class World:
    """A folder with a channel of dependencies and all that comes to be from it; the package cache included, so that nothing is left of a run.

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
        path.write_text(f'python_min: ["{sys.version_info[0]}.{sys.version_info[1]}"]\n')
        return path

    def flexops(self, *arguments: str | Path, cuda: str | None = None) -> subprocess.CompletedProcess[str]:
        """The command, as a user would run it."""
        environment = {name: value for name, value in os.environ.items() if name != "CONDA_OVERRIDE_CUDA"}
        if cuda is not None:
            environment["CONDA_OVERRIDE_CUDA"] = cuda
        command = [sys.executable, "-m", "flexops", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)

    def build(self, channel: Path, *arguments: str | Path, variant: str = "cpu") -> subprocess.CompletedProcess[str]:
        wanted = ("--variant", variant, "--channel", channel, "--from", self.upstream, "--variant-config", self.pins)
        return self.flexops("channel", "build", *wanted, *arguments)


@dataclass(frozen=True)
class CpuBuild:
    """The CPU variant, built with its tests; what the command said; the channel it is in."""

    place: Place
    package: Path
    output: str
