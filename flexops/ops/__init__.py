"""The operators: each module has its operators' functions (reference, gradient), and public ones.

``import flexops`` registers the operators with torch (``_declared.py``). A module is imported when
something of it is first used; none needs to be listed.
"""

from importlib import import_module as _import_module
from pkgutil import iter_modules as _iter_modules
from typing import Any as _Any


def __getattr__(name: str) -> _Any:
    if name not in {module.name for module in _iter_modules(__path__)}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f"{__name__}.{name}")
