"""The matrix of targets: what flexops is built for, with every pin. Imports neither torch nor
anything else outside the standard library."""

from __future__ import annotations

from .detection import Detection, Machine, choose
from .loading import load
from .model import Accelerator, Matrix, Target

__all__ = ["Accelerator", "Detection", "Machine", "Matrix", "Target", "choose", "detect", "load"]


def detect(matrix: Matrix | None = None, *, python: str | None = None) -> Detection:
    """The best target for this machine, and why. Looks at the GPUs, at nothing else.

    Args:
        matrix: default the one that ships with flexops.
        python: version of the environment's Python, ``"3.12"``; None is the running one, ``""``
            means that any is available (conda).
    """
    from .probe import machine  # starts processes, so it is not even imported before it is needed

    return choose(matrix or load(), machine(python))
