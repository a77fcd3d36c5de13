"""The operators: each module has its operators' functions (reference, gradient), and public ones.

``import flexops`` registers the operators with torch (``_declared.py``). A module is imported when
something of it is first used; none needs to be listed.
"""

from importlib import import_module as _import_module
from typing import Any as _Any


def __getattr__(name: str) -> _Any:
    module = f"{__name__}.{name}"
    try:
        return _import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
