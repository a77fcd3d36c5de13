"""Artifacts become operators and kernels of this process; the fallback to plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

when_lacking: Callable[[str], None] | None = None
"""Called once for a family that is loaded for CUDA, of whose rare kernels some are not compiled,
where none can be compiled. (It is here because ``import flexops`` sets it, and leaves the loader to
the first call of an operator.)"""
