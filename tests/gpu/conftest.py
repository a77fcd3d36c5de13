"""Kernels are what the calls reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="module", autouse=True)
def _native(request: pytest.FixtureRequest, native_kernels: Callable[[str, str], None]) -> None:
    """Those of a module's ``FAMILIES``."""
    for family in getattr(request.module, "FAMILIES", ()):
        native_kernels(family, "cuda")
