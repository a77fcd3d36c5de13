"""Where the package keeps its own sources and its ahead-of-time libraries: computed here and
nowhere else."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


def csrc_root() -> Path:
    """The C++/CUDA sources: inside an installed package, or beside it in a checkout."""
    installed = _PACKAGE / "_csrc"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


def example_root() -> Path:
    """The package that ``flexops new`` copies, which is ``examples/scale_lib`` in a checkout."""
    return _PACKAGE / "builder" / "example"


def cmake_root() -> Path:
    """What ``find_package(flexops)`` finds."""
    return _PACKAGE / "cmake"


def recipe_root() -> Path:
    """The modules that decide on commands."""
    return _PACKAGE / "build"


AOT = "_aot"
"""The directory in a package for the libraries that an install compiled in."""


def aot_root() -> Path:
    """flexops' own: ``<root>/<op>-<device>/{manifest.json, lib.so}``; it need not exist."""
    from ... import settings  # import flexops imports this module, and needs none of them

    return settings.current().aot_dir or _PACKAGE / AOT
