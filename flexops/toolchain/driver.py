"""The NVIDIA driver's two numbers. Two types, so that they are never compared with each other, or
either with a toolkit's version."""

from __future__ import annotations

from dataclasses import dataclass

from .version import Version


@dataclass(frozen=True)
class DriverRelease:
    """The NVIDIA driver's own release, for example 580.65.06. Not a CUDA version, and a type of its
    own so that code never compares the two."""

    version: Version

    @classmethod
    def parse(cls, text: str) -> DriverRelease:
        return cls(Version.parse(text))

    def __str__(self) -> str:
        return ".".join(
            str(part) if index != 2 else f"{part:02d}"
            for index, part in enumerate(self.version.parts)
        )


@dataclass(frozen=True)
class DriverCuda:
    """The newest CUDA version that the driver supports natively, as ``nvidia-smi`` shows it."""

    version: Version

    def __str__(self) -> str:
        return str(self.version)
