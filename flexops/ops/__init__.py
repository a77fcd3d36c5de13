"""The operators: each module defines its torch ops (reference, gradient) and its public functions.

Every module here is imported, which registers its operators; none needs to be listed.
"""

from importlib import import_module as _import_module
from pkgutil import iter_modules as _iter_modules

for _module in _iter_modules(__path__):
    if not _module.name.startswith("_"):
        _import_module(f"{__name__}.{_module.name}")
