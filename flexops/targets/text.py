"""Targets as text for a terminal or a script; ``cli/target.py`` prints it."""

from __future__ import annotations

import json

from .detection import Detection
from .model import Matrix, Target


def listing(matrix: Matrix, as_json: bool = False) -> str:
    """All targets, one line each."""
    if as_json:
        return json.dumps([target.to_dict() for target in matrix.targets], indent=1)
    width = max(map(len, matrix.ids))
    return "\n".join(
        f"{target.id:<{width}}  {_toolkit(target):<12}  torch {target.torch:<7}"
        f"  {target.gpus}".rstrip()
        for target in matrix.targets
    )


def details(target: Target, as_json: bool = False) -> str:
    """Every field of one target, a line each."""
    if as_json:
        return json.dumps(target.to_dict(), indent=1)
    return "\n".join(
        f"{name:<15} {_plain(value)}".rstrip() for name, value in target.to_dict().items()
    )


def detection(found: Detection, as_json: bool = False) -> str:
    """The target's id on a line of its own, then the reason, then the notes."""
    if as_json:
        return json.dumps(found.to_dict(), indent=1)
    return "\n".join([found.target.id, found.reason, *(f"note: {note}" for note in found.notes)])


def _toolkit(target: Target) -> str:
    return {
        "cpu": "no toolkit",
        "cuda": f"CUDA {target.toolkit}",
        "rocm": f"ROCm {target.toolkit}",
    }[target.accelerator]


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
