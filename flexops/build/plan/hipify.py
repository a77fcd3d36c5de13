"""Translates a user's CUDA sources to HIP, privately: originals are read, everything written goes
into the build directory.

torch's own translator does the work (``torch/utils/hipify``, which every torch wheel has); torch
itself is not imported. It writes beside what it reads, so the sources and the user's headers that
they reach are first copied:

    hipified/...                     the copies, with their relative paths, and the translations
    hipified_<number>.hip, .cpp      what is compiled: includes the translation of one source
    hipified.stamp(.d)               that it is done, and from which files

A step of a build: run by its path in a process of its own, ``python -I hipify.py '{...}'``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "hipified"
STAMP = f"{FOLDER}.stamp"
# sources that came as text are no files of the user's; they get a directory of their own among the
# copies
_TEXTS = "texts"


def wrapper(number: int, source: str) -> str:
    """What is compiled for the source of that number."""
    device = os.path.splitext(source)[1] in (".cu", ".cuh", ".hip")
    return f"{FOLDER}_{number}{'.hip' if device else '.cpp'}"


def order(sources: Sequence[str], include_dirs: Sequence[str], torch_root: Path) -> str:
    """The argument of this script.

    Args:
        sources: absolute paths, or names of files in the build directory.
        include_dirs: the user's include path.
    """
    return json.dumps(
        {"sources": list(sources), "include_dirs": list(include_dirs), "torch": str(torch_root)}
    )


def mirrored(include_dirs: Sequence[str]) -> tuple[str, ...]:
    """Where the copies of include directories are, relative to the build directory."""
    return tuple(f"{FOLDER}{directory}" for directory in include_dirs)


def translate(
    sources: Sequence[str], include_dirs: Sequence[str], torch_root: Path, directory: Path
) -> None:
    """Translate into ``directory``, the build directory."""
    own_headers = _module(
        "flexops_cpp_text", Path(__file__).parents[1] / "describe/cpp_text.py"
    ).own_headers
    originals: dict[str, Path] = {}  # file -> its copy
    for source in sources:
        path = directory / source
        copies = [(str(path), _copy_of(source, directory))]
        headers = own_headers(
            path.read_text(encoding="utf-8", errors="replace"), str(path.parent), include_dirs
        )
        copies += [(header, _copy_of(header, directory)) for header in headers]
        for original, copy in copies:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, copy)
            originals[original] = copy
    results = _hipify(
        torch_root, directory / FOLDER, [str(directory / place) for place in mirrored(include_dirs)]
    )
    for number, source in enumerate(sources):
        copy = originals[str(directory / source)]
        translated = os.path.relpath(_translation(results, copy), directory)
        (directory / wrapper(number, source)).write_text(
            f'#include "{translated}"\n', encoding="utf-8"
        )
    read = " ".join(
        path.replace("$", "$$").replace(" ", "\\ ")
        for path in originals
        if not path.startswith(f"{directory}/")
    )
    (directory / f"{STAMP}.d").write_text(f"{STAMP}: {read}\n", encoding="utf-8")
    (directory / STAMP).write_text("", encoding="utf-8")


def _copy_of(source: str, directory: Path) -> Path:
    return Path(
        f"{directory / FOLDER}{source}"
        if os.path.isabs(source)
        else directory / FOLDER / _TEXTS / source
    )


def _hipify(torch_root: Path, tree: Path, include_dirs: Sequence[str]) -> Mapping[str, Any]:
    package = torch_root / "utils" / "hipify"
    _module("flexops_hipify", package / "__init__.py", package)
    translator = importlib.import_module("flexops_hipify.hipify_python")
    results: Mapping[str, Any] = translator.hipify(
        project_directory=str(tree),
        output_directory=str(tree),
        header_include_dirs=[place for place in include_dirs if os.path.isdir(place)],
        includes=[f"{tree}/*"],
        show_progress=False,
        is_pytorch_extension=True,
    )
    return results


def _translation(results: Mapping[str, Any], copy: Path) -> str:
    result = results.get(str(copy))
    return str(getattr(result, "hipified_path", None) or copy)


def _module(name: str, path: Path, package: Path | None = None) -> ModuleType:
    """Import a file under a name of our own."""
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(package)] if package else None
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    translate(asked["sources"], asked["include_dirs"], Path(asked["torch"]), Path.cwd())
