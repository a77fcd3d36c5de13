"""How a test says which of its parameters the default run leaves out (see CONTRIBUTING.md)."""

from __future__ import annotations

from typing import Any

import pytest


def first_of(*cases: Any) -> list[Any]:
    """Parameters of a test or fixture: the first as it is, the others marked ``extra``."""
    first, *others = cases
    extra = pytest.mark.extra
    return [
        first,
        *(
            pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=extra)
            for one in others
        ),
    ]
