"""Writes a package to start from: the repository's ``examples/scale_lib``, under another name."""

from __future__ import annotations

import keyword
import re
import sys
import tempfile
from pathlib import Path

from ..build.describe import layout
from ..build.describe.schema import RESERVED, TAKEN_NAMESPACES
from ..errors import FlexopsError, SettingsError

_NAME, _FAMILY = "mylib", "scale"
INSTALL = "pip install 'setuptools>=77' pytest && pip install --no-build-isolation -e ."
"""Without isolation pip installs nothing that a build requires, and an environment of Python 3.12
or newer has no setuptools."""


def write(name: str, family: str, where: Path) -> list[Path]:
    """Write the package ``name`` with one family into ``where/name``, whole or not at all; returns
    its files.

    Raises:
        FlexopsError: a name is none, there is something already, or nothing can be written.
    """
    for what, given in (("a package", name), ("a family", family)):
        fits = re.fullmatch(r"[a-z][a-z0-9_]{,79}", given)
        if not fits or given in RESERVED or keyword.iskeyword(given):
            required = "lower-case letters, digits and _, at most 80, no word of C++ or Python"
            raise SettingsError(
                f"{what} cannot be called {given!r}", required=required, fix="give it another name"
            )
    if name in TAKEN_NAMESPACES or name in sys.stdlib_module_names:
        raise SettingsError(
            f"a package cannot be called {name!r}",
            found="Python, torch or flexops has this name",
            required="a name of your own",
            fix="give it another name",
        )
    root = where / name
    if root.exists():
        raise FlexopsError(
            f"{root} is there already",
            required="a directory that does not exist yet",
            fix="give the package another name, or remove it",
        )
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=where) as folder:
            made = Path(folder, name)
            files = _write_files(made, name, family)
            made.rename(root)
    except OSError as error:
        raise FlexopsError(
            f"{root} cannot be written",
            found=str(error),
            required="a directory in which directories can be made",
            fix="run it in another directory",
        ) from None
    return [root / file for file in files]


def _write_files(root: Path, name: str, family: str) -> list[str]:
    """Returns them relative to ``root``."""
    template = layout.example_root()
    written = []
    for path in sorted(template.rglob("*")):
        relative = path.relative_to(template)
        if (
            path.is_file()
            and not {"__pycache__", "_aot", "build"}.intersection(relative.parts)
            and path.suffix != ".pyc"
        ):
            file = _renamed(str(relative), name, family)
            target = root / file
            target.parent.mkdir(parents=True, exist_ok=True)
            text = _renamed(path.read_text(encoding="utf-8"), name, family)
            target.write_text(text, encoding="utf-8")
            written.append(file)
    return written


def _renamed(text: str, name: str, family: str) -> str:
    renamed = {_NAME: name, _FAMILY: family, _FAMILY.title(): family.title().replace("_", "")}
    return re.sub("|".join(renamed), lambda match: renamed[match[0]], text)
