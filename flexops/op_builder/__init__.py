"""The former name of ``flexops.build``. It is removed after one release.

``import flexops.op_builder.loader`` gives the module that ``flexops.build`` has under that name.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .. import build

warnings.warn(
    "flexops.op_builder is now flexops.build; the old name is removed after one release",
    DeprecationWarning,
    stacklevel=2,
)

_RENAMED = {"builder": "building", "compiler": "ninja"}
_TOOLCHAIN = ("children", "json_child")  # both are proc today


def _places() -> dict[str, str]:
    """Today's full name of each module, by its last part."""
    found = pkgutil.walk_packages(build.__path__, "flexops.build.")
    names = {one.name.rpartition(".")[2]: one.name for one in found if not one.ispkg}
    names |= {old: names[new] for old, new in _RENAMED.items()}
    return names | dict.fromkeys(_TOOLCHAIN, "flexops.toolchain.proc")


class _Alias(MetaPathFinder, Loader):
    def find_spec(
        self,
        fullname: str,
        path: Any = None,  # noqa: ARG002 (the protocol of sys.meta_path)
        target: Any = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == __name__ and name in _places() else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_places()[spec.name.rpartition(".")[2]])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # its own; the import system has set ours


sys.meta_path.append(_Alias())


def __getattr__(name: str) -> ModuleType:
    if name in _places():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
