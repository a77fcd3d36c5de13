"""The public door to flexops' builder: other projects have their kernels built, loaded, checked and
packaged as flexops has its own. See docs/builder.md.

    from flexops import builder

    lib = builder.Library("mylib", root=__file__)

    @lib.op("scale(Tensor x, float factor) -> Tensor", family="scale")
    def scale(x, factor):
        return x * factor
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..build.describe.declaration import Output as Output
    from ..build.describe.declaration import Rows as Rows
    from ..build.describe.schema import FLOATS as FLOATS
    from .cpp_extension import BuildExtension as BuildExtension
    from .cpp_extension import CppExtension as CppExtension
    from .cpp_extension import CUDAExtension as CUDAExtension
    from .library import Library as Library
    from .library import Op as Op
    from .packaging import commands as commands
    from .packaging import extensions as extensions

_PUBLIC = {
    "BuildExtension": "flexops.builder.cpp_extension",
    "CUDAExtension": "flexops.builder.cpp_extension",
    "CppExtension": "flexops.builder.cpp_extension",
    "FLOATS": "flexops.build.describe.schema",
    "Library": "flexops.builder.library",
    "Op": "flexops.builder.library",
    "Output": "flexops.build.describe.declaration",
    "Rows": "flexops.build.describe.declaration",
    "commands": "flexops.builder.packaging",
    "extensions": "flexops.builder.packaging",
}

__all__ = [
    "FLOATS",
    "BuildExtension",
    "CUDAExtension",
    "CppExtension",
    "Library",
    "Op",
    "Output",
    "Rows",
    "commands",
    "extensions",
]


def __getattr__(name: str) -> Any:
    """Resolve a public name at its first use: a setup script needs no torch, a library no
    setuptools."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flexops.builder' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
