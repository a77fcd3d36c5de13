"""What pip installs for a target: its pins, and everything by hash where the target is locked.

``envs/requirements/<toolkit>.lock`` has two parts: what an environment runs, and, below the line
``# build``, what only building requires. `flexops target lock` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

from flexops import _toml
from flexops.errors import TargetError
from flexops.targets.model import Target

FOLDER = "envs/requirements"
HEADER = "generated from flexops/targets/matrix.toml by `flexops target render`"
BUILD_MARK = "# build"


def requirements(target: Target) -> str:
    """The pip pins: torch, ninja and, where the package index has it, the toolkit."""
    for_gpus = f" ({target.gpus})" if target.gpus else ""
    lines = [
        f"# {HEADER}",
        f"# {target.id}{for_gpus}: pip install -r {FOLDER}/{target.id}.txt",
        *(f"# {line}" for line in _requirement_notes(target)),
        *([f"--extra-index-url {target.index}"] if target.index_required else []),
        *target.requirements,
    ]
    return "\n".join(lines) + "\n"


def lock_path(target: Target) -> str:
    return f"{FOLDER}/{target.toolkit_name}.lock"


def lockable(target: Target) -> bool:
    """Whether the default index serves every wheel. Where another index is better or the only one,
    what comes is locked by the image's build."""
    return not target.index


def installed(target: Target, root: Path, *, toolkit: bool) -> str:
    """What pip installs, every package by hash, for an environment that builds flexops: all of the
    lock, or all but the compiler of the package index.

    Raises:
        TargetError: the target's wheels are not locked; ``what`` says why.
    """
    if not lockable(target):
        raise TargetError(
            f"the wheels of {target.id} are not locked: they come from {target.index}, or from the"
            " default index where that does not answer"
        )
    try:
        text = (root / lock_path(target)).read_text(encoding="utf-8")
    except OSError as error:
        raise TargetError(
            f"{lock_path(target)} cannot be read",
            found=error.strerror or "",
            fix=f"flexops target lock {target.toolkit_name}",
        ) from error
    if toolkit:
        return "\n".join(entries(text)) + "\n"
    run, _, build = text.partition(BUILD_MARK + "\n")
    needed = {name_of(one) for one in direct(root)[1]}
    return (
        "\n".join([*entries(run), *(one for one in entries(build) if name_of(one) in needed)])
        + "\n"
    )


def entries(text: str) -> list[str]:
    """The entries of a requirements file, comments left out."""
    lines = [
        line.rstrip()
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", "\\\0")
    return [entry.replace("\\\0", "\\\n") for entry in joined.split("\n") if entry]


def direct(root: Path) -> tuple[list[str], list[str]]:
    """What flexops requires to run and to be built, from the checkout's pyproject.toml."""
    document = _toml.load(root / "pyproject.toml")
    return document["project"]["dependencies"], document["build-system"]["requires"]


def name_of(requirement: str) -> str:
    """The name in a requirement, as package indexes write it."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0].lower().replace("_", "-") if match else ""


def _requirement_notes(target: Target) -> list[str]:
    if target.accelerator == "cuda" and not target.toolkit_requirement:
        return [
            (
                "Kernels are compiled by the NVRTC that torch brings. Only your own .cu sources"
                " need an nvcc, and the package index has none of"
            ),
            (
                f"CUDA {target.toolkit_minor}: conda has (envs/{target.id}.yml), or an installation"
                " of the system is used."
            ),
        ]
    if target.accelerator == "rocm":
        return [
            f"The compiler comes with ROCm {target.toolkit_minor} itself: the image"
            f" {target.build_base}, or the system's."
        ]
    if target.index:
        return [
            "Where PyTorch's own index is reached, this takes smaller wheels, without CUDA:",
            f"  --extra-index-url {target.index}",
        ]
    return []
