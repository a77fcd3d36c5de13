"""Running the references of flexops' operators where native kernels are loaded: to time them, and
to test the kernels against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ops._self_check import OnReference as OnReference


def on_reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run on references."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with OnReference():
            return function(*args, **kwargs)

    return call
