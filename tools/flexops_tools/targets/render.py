"""From the matrix to the text of every file that follows from it, and the comparison of that with
what is there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from flexops.errors import TargetError
from flexops.targets.loading import LEAST_PYTHON
from flexops.targets.model import Matrix, Target

from . import conda, container_files, image_files, locks, proven
from .checkout import checkout as checkout
from .requirements import FOLDER, HEADER, requirements

TABLE = "docs/targets.md"
"""The page with the table of all targets."""
BEGIN, END = "<!-- targets:begin -->", "<!-- targets:end -->"
TESTED_BEGIN, TESTED_END = "<!-- tested-with:begin -->", "<!-- tested-with:end -->"
_TESTED = (TABLE, "README.md")
"""The pages with the table "tested with", between the markers."""
_TESTED_HEADER = f"generated from {proven.RECORD} by `flexops target render`"
_OWNED = "envs"
_SEARCHED = (_OWNED, "recipe", ".devcontainer")
"""The folders whose stray generated files are removed."""

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_CONDA_TOOLKIT = ("cuda-nvcc", "cuda-cudart-dev", "cuda-cudart-static", "cuda-cccl")


@dataclass(frozen=True)
class Differences:
    """How a checkout differs from the matrix; paths relative to its root."""

    missing: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.differing or self.stray)

    def lines(self) -> list[str]:
        """One line a file, for people."""
        kinds = (("missing", self.missing), ("differs", self.differing), ("stray", self.stray))
        return [f"{kind:<8} {path}" for kind, paths in kinds for path in paths]


def files(matrix: Matrix) -> dict[str, str]:
    """Every file that is generated whole: path relative to the root, and text."""
    rendered: dict[str, str] = {}
    for target in matrix.targets:
        rendered[environment_path(target)] = environment(target)
        rendered[requirements_path(target)] = requirements(target)
    containers = {**image_files.files(matrix, HEADER), **container_files.files(matrix, HEADER)}
    return {
        **rendered,
        **locks.inputs(matrix, HEADER),
        **containers,
        **conda.files(conda.variants(matrix), HEADER, LEAST_PYTHON),
    }


def environment_path(target: Target) -> str:
    return f"{_OWNED}/{target.id}.yml"


def requirements_path(target: Target) -> str:
    return f"{FOLDER}/{target.id}.txt"


def environment(target: Target) -> str:
    """The conda development environment. torch comes from pip, because conda-forge carries only two
    CUDA releases of it."""
    pip = [f"--extra-index-url {target.index}"] if target.index_required else []
    return _fill(
        "environment.yml.in",
        target,
        compiler=_conda_compiler(target),
        toolkit="".join(f"  - {package}\n" for package in _conda_toolkit(target)),
        pip="\n".join(f"      - {line}" for line in [*pip, *_pip_beside_conda(target)]),
    )


def table(matrix: Matrix) -> str:
    """The table of all targets, markers included."""
    head = ["target", "GPUs", "toolkit", "torch", "Python", "GCC", "driver", "processor"]
    rows = [head, ["---"] * len(head), *map(_cells, matrix.targets)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([BEGIN, f"<!-- {HEADER} -->", *lines, END])


def page(matrix: Matrix, text: str | None) -> str:
    """``text`` of the page (None: there is none) with the table between its markers; raises
    ``TargetError`` if it has none."""
    if text is None:
        return f"# Targets\n\n{table(matrix)}\n"
    start, end = text.find(BEGIN), text.find(END)
    if start < 0 or end < start or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise TargetError(
            f"{TABLE} has no place for the table of targets",
            required=f"one line {BEGIN} and, after it, one line {END}",
            fix=f"edit {TABLE}",
        )
    return text[:start] + table(matrix) + text[end + len(END) :]


def compare(matrix: Matrix, root: Path) -> Differences:
    """What ``write`` would change. Reads only."""
    wanted = _wanted(matrix, root)
    present = {path: _read(root / path) for path in wanted}
    return Differences(
        missing=tuple(path for path, text in present.items() if text is None),
        differing=tuple(
            path for path, text in present.items() if text is not None and text != wanted[path]
        ),
        stray=tuple(_generated(root) - set(wanted)),
    )


def write(matrix: Matrix, root: Path) -> Differences:
    """Make the checkout follow the matrix; returns what was changed. Removes only files that say
    they were generated."""
    wanted, changes = _wanted(matrix, root), compare(matrix, root)
    for path in (*changes.missing, *changes.differing):
        _replace(root / path, wanted[path])
    for path in changes.stray:
        (root / path).unlink()
    return changes


def _wanted(matrix: Matrix, root: Path) -> Mapping[str, str]:
    wanted = {**files(matrix), TABLE: page(matrix, _read(root / TABLE))}
    tested = proven.table(matrix, proven.read(root / proven.RECORD))
    body = "\n".join([TESTED_BEGIN, f"<!-- {_TESTED_HEADER} -->", *tested, TESTED_END])
    for path in _TESTED:
        text = wanted.get(path) or _read(root / path)
        if text and TESTED_BEGIN in text:
            before, _, rest = text.partition(TESTED_BEGIN)
            wanted[path] = before + body + rest.partition(TESTED_END)[2]
    return wanted


def _generated(root: Path) -> set[str]:
    """Files under our folder whose first line says that they are generated."""
    candidates = (
        path for folder in _SEARCHED for path in (root / folder).rglob("*") if path.is_file()
    )
    return {
        str(path.relative_to(root))
        for path in candidates
        if HEADER in (_read(path) or "").partition("\n")[0]
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return ""  # not a text, so nothing of ours


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _fill(template: str, target: Target, **values: str) -> str:
    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    for_gpus = f" ({target.gpus})" if target.gpus else ""
    return Template(text).substitute(
        values,
        header=HEADER,
        id=target.id,
        for_gpus=for_gpus,
        python=target.python,
        ninja=target.ninja,
    )


def _conda_compiler(target: Target) -> str:
    """The newest GCC that the toolkit takes. conda-forge's gxx also brings the sysroot."""
    oldest, newest = target.host_compiler
    return f"gxx={newest}" if newest else f"gxx>={oldest}"


def _conda_toolkit(target: Target) -> list[str]:
    if target.accelerator != "cuda" or target.toolkit_requirement:
        return []
    return [
        f"cuda-version={target.toolkit_minor}",
        *(f"{package}={target.toolkit_minor}" for package in _CONDA_TOOLKIT),
    ]


def _pip_beside_conda(target: Target) -> list[str]:
    return [pin for pin in target.requirements if not pin.startswith("ninja==")]


def _cells(target: Target) -> list[str]:
    toolkit = {"cpu": "none", "cuda": f"CUDA {target.toolkit}", "rocm": f"ROCm {target.toolkit}"}[
        target.accelerator
    ]
    oldest, newest = target.host_compiler
    driver = {
        "cpu": "",
        "cuda": f">= {target.least_driver}",
        "rocm": f"amdgpu {target.least_driver}",
    }[target.accelerator]
    return [
        f"`{target.id}`",
        target.gpus or "none needed",
        toolkit,
        target.torch,
        " - ".join(target.python_range),
        f"{oldest} - {newest}" if newest else f">= {oldest}",
        driver or "-",
        ", ".join(target.machines),
    ]
