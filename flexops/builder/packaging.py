"""A project's libraries in its wheel: ``setup(ext_modules=builder.extensions("mylib"),
cmdclass=builder.commands())``.

The libraries need no Python symbols, so one wheel serves every Python: ``py3-none-<platform>``.
What is built for what, ``[tool.flexops]`` in pyproject.toml says: ``devices`` (``cpu``, ``cuda``;
both by default, and ``FLEXOPS_AOT_DEVICES`` comes first) and ``architectures``, for which kernels
are compiled too (none by default; ``TORCH_CUDA_ARCH_LIST`` comes first). Sources go along: kernels
for other GPUs are compiled at their first launch.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Extension
from setuptools.command.build_ext import build_ext

from .. import _toml, settings, toolchain
from ..build.deliver import aot
from ..build.describe import catalog
from ..build.describe.layout import AOT
from ..build.describe.spec import DeviceType, OpSpec
from ..errors import FlexopsError
from ..toolchain import zig
from . import registered

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # without isolation pip does not install what [build-system] requires
    _OLD = FlexopsError(
        f"setuptools {setuptools.__version__} is too old",
        required="77 or newer",
        fix="pip install 'setuptools>=77'",
    )
    raise SystemExit(f"\nflexops: {_OLD}\n") from None

_MARK = f".{AOT}."


def extensions(name: str, *, where: str | Path = ".") -> list[Extension]:
    """One for each folder of the package's ``csrc`` that has launchers; imports nothing.

    Args:
        name: the package, which is the library's namespace.
        where: the directory that the package is in: ``src``, say.
    """
    csrc = Path(where, name, "csrc")
    families = sorted({path.parent for path in registered.sources_in(Path(where, name))})
    if not families:
        required, fix = (
            "folders with *_cpu.cpp or *_cuda.cpp",
            f"builder.extensions({name!r}, where=...), the directory that the package is in",
        )
        what = f"{csrc.absolute()} has nothing to build"
        raise SystemExit(f"\nflexops: {FlexopsError(what, required=required, fix=fix)}\n")
    found = []
    for folder in families:
        sources = [
            str(path)
            for pattern in ("*_cpu.cpp", "*_cuda.cpp")
            for path in sorted(folder.glob(pattern))
        ]
        extension = Extension(f"{name}{_MARK}{folder.name}", sources)
        extension.flexops_where = Path(where).absolute()  # type: ignore[attr-defined]
        found.append(extension)
    return found


def commands() -> dict[str, type[Any]]:
    """The setuptools commands that build such extensions, and tag the wheel."""
    return {"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel}


class BuildLibraries(build_ext):
    """Builds all families together, so that their compile steps share the processors. An editable
    install compiles at first use."""

    def run(self) -> None:
        self._built: list[Path] = []
        names = dict.fromkeys(extension.name.partition(_MARK)[0] for extension in self.extensions)
        points = str(
            (getattr(self.distribution, "entry_points", None) or {}).get(registered.GROUP, "")
        )
        for name in names:
            if not re.search(rf"=\s*{name}\b", points):
                point = f'[project.entry-points."{registered.GROUP}"] {name} = "{name}"'
                self.warn(
                    f"flexops: {name} registers no library, so flexops doctor does not try it; add"
                    f" to pyproject.toml: {point}"
                )
        if self.inplace or getattr(self, "editable_mode", False):
            return
        try:
            for name in names:
                own = [
                    extension
                    for extension in self.extensions
                    if extension.name.startswith(f"{name}{_MARK}")
                ]
                self._built += self._build(
                    name,
                    [extension.name.partition(_MARK)[2] for extension in own],
                    own[0].flexops_where,
                )
        except FlexopsError as error:
            raise SystemExit(f"\nflexops: {error}\n") from error

    def _build(self, name: str, families: list[str], where: Path) -> list[Path]:
        package = Path(self.build_lib) / name
        specs = declared(name, families, where)
        chosen, devices = _choices()
        if chosen.wheel:
            results = aot.build_portable(specs, devices, chosen)
        else:
            results = aot.build_specs(specs, devices, chosen, kernels=bool(chosen.arch_list))
        shutil.copytree(where / name / "csrc", package / "csrc", dirs_exist_ok=True)
        aot.install_all(results, package / AOT)
        return sorted(
            path
            for folder in (package / "csrc", package / AOT)
            for path in folder.rglob("*")
            if path.is_file()
        )

    def get_outputs(self) -> list[str]:
        return [str(path) for path in getattr(self, "_built", ())]

    def get_source_files(self) -> list[str]:
        """What a source distribution needs."""
        return [
            str(path)
            for extension in self.extensions
            for path in sorted(Path(extension.sources[0]).parent.rglob("*"))
            if path.is_file()
        ]


class PlatformWheel(bdist_wheel):
    """Tags a wheel with compiled operators for this platform and any Python 3."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not self.distribution.ext_modules

    def get_tag(self) -> tuple[str, str, str]:
        machine = settings.current().wheel
        platform = zig.platform_tag(machine) if machine else super().get_tag()[2]
        return ("py3", "none", platform if self.distribution.ext_modules else "any")


def declared(name: str, families: list[str], where: Path) -> list[OpSpec]:
    """A project's specs, from its own declarations: the package is imported.

    Raises:
        FlexopsError: it cannot be imported, or does not declare what its folders have.
    """
    sys.path.insert(0, str(where))
    try:
        importlib.import_module(name)
    except FlexopsError:
        raise
    except (Exception, SystemExit) as error:  # whatever its modules raise
        found = f"{type(error).__name__}: {error}"
        fix = (
            "add what it imports to [build-system] requires, or build without isolation: pip wheel"
            " --no-build-isolation ."
        )
        raise FlexopsError(
            f"{name} cannot be imported, so its declarations cannot be read", found=found, fix=fix
        ) from error
    finally:
        sys.path.remove(str(where))
    specs = [spec for spec in catalog.specs() if spec.project.name == name]
    if lacking := sorted(set(families) - {spec.family for spec in specs}):
        found = f"{', '.join(spec.family for spec in specs) or 'none'}"
        required = f"operators of the family {', '.join(lacking)}, whose launchers are in csrc"
        raise FlexopsError(
            f"{name} does not declare what it has sources of",
            found=found,
            required=required,
            fix="@lib.op(..., family=...)",
        )
    return specs


def _choices() -> tuple[settings.Settings, tuple[DeviceType, ...]]:
    chosen = settings.current()
    try:
        table = _toml.load(Path("pyproject.toml")).get("tool", {}).get("flexops", {})
    except FileNotFoundError:
        table = {}
    if unknown := sorted(set(table) - {"devices", "architectures"}):
        raise FlexopsError(
            f"[tool.flexops] has {', '.join(unknown)}",
            required="devices, architectures",
            fix="correct pyproject.toml",
        )
    for name, form in (
        ("devices", 'devices = ["cpu", "cuda"]'),
        ("architectures", 'architectures = "8.0;9.0"'),
    ):
        if name in table and not isinstance(table[name], list if name == "devices" else str):
            raise FlexopsError(
                f"[tool.flexops] {name} is {table[name]!r}",
                required=form,
                fix="correct pyproject.toml",
            )
    asked = chosen.aot_devices or tuple(table.get("devices", ())) or ("cpu", "cuda")
    if wrong := [device for device in asked if device not in ("cpu", "cuda")]:
        raise FlexopsError(
            f"[tool.flexops] devices has {', '.join(map(str, wrong))}",
            required="cpu, cuda",
            fix="correct pyproject.toml",
        )
    if toolchain.torch_build() is None and not chosen.wheel:
        fix = "pip install torch, or build with isolation, where flexops-torch brings it"
        raise FlexopsError(
            "this build sees no torch", required="the torch that the libraries are for", fix=fix
        )
    return chosen._replace(arch_list=chosen.arch_list or table.get("architectures") or None), asked
