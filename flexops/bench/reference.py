"""Running the references of flexops' operators where native kernels are loaded: to time them, and
to test the kernels against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch import TorchDispatchMode
from ..ops import _register


class OnReference(TorchDispatchMode):
    """Inside, operators of flexops run their references, backward passes included."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _register.references.get(func.name(), func)(*args, **(kwargs or {}))


def on_reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run on references."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with OnReference():
            return function(*args, **kwargs)

    return call
