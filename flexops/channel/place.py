"""Where things are: computed here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".conda", ".tar.bz2")
SUBDIRS = ("linux-64", "linux-aarch64", "noarch")
DEFAULT = Path("dist/channel")


@dataclass(frozen=True)
class Place:
    """A channel, and what is kept beside it and never published.

    Attributes:
        channel: the folder that is published: ``<subdir>/*.conda`` and the index.
    """

    channel: Path

    @property
    def url(self) -> str:
        return self.channel.absolute().as_uri()

    @property
    def logs(self) -> Path:
        return self.channel.with_name(f"{self.channel.name}-logs").absolute()

    @property
    def work(self) -> Path:
        """Builds in progress, and what failed ones left to look at."""
        return self.channel.with_name(f"{self.channel.name}-work").absolute()

    def packages(self, name: str = "") -> list[Path]:
        """Package files in the channel, those called ``name`` if one is given, in order of their names."""
        return sorted(
            path
            for subdir in SUBDIRS
            for path in (self.channel / subdir).glob(f"{name}-*" if name else "*")
            if path.name.endswith(SUFFIXES) and (not name or distribution(path)[0] == name)
        )


def distribution(path: Path) -> tuple[str, str, str]:
    """Name, version and build string, as a package's file name holds them."""
    stem = path.name
    for suffix in SUFFIXES:
        stem = stem.removesuffix(suffix)
    name, version, build = (*stem.rsplit("-", 2), "", "")[:3]
    return name, version, build
