"""What is known of an image's contents, as plain values that travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Library:
    """One ahead-of-time library: ``name`` is ``<op>-<device>``; ``refusal`` is why it would not be
    loaded."""

    name: str
    device: str = ""
    cuda_version: str = ""
    architectures: tuple[str, ...] = ()
    glibc: str = ""
    glibcxx: str = ""
    refusal: str = ""
    path: str = ""


@dataclass(frozen=True)
class ImageFacts:
    """The inside of an image.

    Attributes:
        packages: installed Python packages, lower-case name -> version.
        torch_cuda, torch_hip: what torch is built for; empty for neither.
        compilers: the ones on PATH.
        leftovers: places and settings of the build that are still there.
        added_bytes: size of flexops and of what only it needs: what it adds over torch and Python.
    """

    python: str
    packages: Mapping[str, str]
    torch_cuda: str
    torch_hip: str
    libraries: tuple[Library, ...]
    compilers: tuple[str, ...]
    leftovers: tuple[str, ...]
    added_bytes: int
    flexops: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ImageFacts:
        """Raises ``TypeError`` or ``KeyError`` if these are not an image's facts."""
        libraries = tuple(
            Library(**{**one, "architectures": tuple(one["architectures"])})
            for one in values["libraries"]
        )
        return cls(
            **{
                **values,
                "libraries": libraries,
                "compilers": tuple(values["compilers"]),
                "leftovers": tuple(values["leftovers"]),
            }
        )
