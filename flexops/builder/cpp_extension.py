"""A drop-in for setup.py: ``CppExtension``, ``CUDAExtension`` and ``BuildExtension`` with the
arguments of ``torch.utils.cpp_extension``.

    from flexops.builder import BuildExtension, CUDAExtension

A ``.cu`` is built as by ``flexops.load``: split for the host compiler and NVRTC, whose machine code
goes into the wheel beside the library; or by nvcc, where it has constructs that NVRTC does not
support. ``TORCH_CUDA_ARCH_LIST`` selects the architectures.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import setuptools
from setuptools.command.build_ext import build_ext

from .. import settings
from ..build.deliver import aot
from ..build.describe import layout
from ..build.load import extension, extension_installed, extension_nvrtc
from ..build.plan.extension_plan import Request, arguments
from ..build.plan.kernel_plan import KernelPlan
from ..build.plan.program import Program
from ..build.store.cache import BuildCache
from ..build.store.opening import open_cache
from ..errors import FlexopsError


def CppExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> setuptools.Extension:
    """A ``setuptools.Extension`` of C++ with torch's headers; arguments as in torch."""
    return _extension(name, sources, False, *args, **kwargs)


def CUDAExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> setuptools.Extension:
    """A ``setuptools.Extension`` of C++ and CUDA; arguments as in torch. Building it requires no
    nvcc if ``flexops.load`` requires none (docs/splitting.md), and no GPU."""
    return _extension(name, sources, True, *args, **kwargs)


def _extension(
    name: str, sources: list[str], with_cuda: bool, *args: Any, **kwargs: Any
) -> setuptools.Extension:
    kwargs.pop("dlink", None)
    if kwargs.pop("dlink_libraries", None):
        raise FlexopsError(
            f"extension {name} has dlink_libraries",
            required="no relocatable device code",
            fix="build it by torch.utils.cpp_extension",
        )
    flags = kwargs.pop("extra_compile_args", None) or []
    made = setuptools.Extension(name, sources, *args, **{"language": "c++"} | kwargs)
    made.extra_compile_args = flags  # a list, or one each for cxx and nvcc
    made.flexops_with_cuda = with_cuda  # type: ignore[attr-defined]
    return made


class BuildExtension(build_ext):
    """The command that builds them: ``cmdclass={"build_ext": BuildExtension}``. Other extensions
    are built by setuptools."""

    _python_suffix = True

    @classmethod
    def with_options(cls, **options: Any) -> type[BuildExtension]:
        """As in torch. ``no_python_abi_suffix``: the library is called ``<name>.so``; ``use_ninja``
        has no effect."""
        suffix = not options.get("no_python_abi_suffix", False)
        return type("BuildExtension", (cls,), {"_python_suffix": suffix})

    def finalize_options(self) -> None:
        super().finalize_options()
        self._kernels: list[Path] = []

    def build_extension(self, ext: setuptools.Extension) -> None:
        if not hasattr(ext, "flexops_with_cuda"):
            super().build_extension(ext)
            return
        chosen = settings.Settings.from_environ(os.environ)
        try:
            entry, programs = extension.obtain(_request(ext), chosen)
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(entry.library, target)
            plans = extension_nvrtc.kernel_plans(programs, chosen) if programs else []
            self._kernels += _store(target, programs, plans, open_cache(chosen))
        except FlexopsError as error:
            raise SystemExit(f"\nflexops: {error}\n") from error

    def get_ext_filename(self, fullname: str) -> str:
        name = str(super().get_ext_filename(fullname))  # type: ignore[no-untyped-call]
        if self._python_suffix:
            return name
        return f"{name.partition('.')[0]}.so"

    def copy_extensions_to_source(self) -> None:
        """For an editable install."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            places = [
                Path(folder, os.path.basename(self.get_ext_filename(ext.name)))
                for folder in (
                    os.path.dirname(os.path.join(self.build_lib, *ext.name.split("."))),
                    os.path.dirname(self.get_ext_fullpath(ext.name)),
                )
            ]
            built, own = map(extension_installed.folder_of, places)
            if built.is_dir():
                shutil.rmtree(own, ignore_errors=True)
                shutil.copytree(built, own)

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), *map(str, getattr(self, "_kernels", ()))]


def _request(ext: setuptools.Extension) -> Request:
    flags: Any = ext.extra_compile_args or []
    each = flags if isinstance(flags, dict) else {"cxx": flags, "nvcc": flags}
    macros = [
        f"-D{name}" + ("" if value is None else f"={value}")
        for name, value in ext.define_macros or ()
    ]
    macros += [f"-U{name}" for name in ext.undef_macros or ()]
    link = [
        *(os.path.abspath(path) for path in ext.extra_objects or ()),
        *(f"-L{os.path.abspath(path)}" for path in ext.library_dirs or ()),
        *(f"-Wl,-rpath,{path}" for path in ext.runtime_library_dirs or ()),
        *(f"-l{name}" for name in ext.libraries or ()),
    ]
    return Request(
        name=ext.name.rpartition(".")[2],
        sources=tuple(Path(os.path.abspath(source)) for source in ext.sources),
        cflags=(*macros, *arguments("extra_compile_args['cxx']", each.get("cxx"))),
        cuda_cflags=(*macros, *arguments("extra_compile_args['nvcc']", each.get("nvcc"))),
        ldflags=(*link, *arguments("extra_link_args", ext.extra_link_args)),
        include_dirs=tuple(os.path.abspath(path) for path in ext.include_dirs or ()),
        with_cuda=bool(ext.flexops_with_cuda),  # type: ignore[attr-defined]
        is_python_module=not getattr(ext, "py_limited_api", False),
    )


def _store(
    library: Path, programs: Sequence[Program], plans: Sequence[KernelPlan], cache: BuildCache
) -> list[Path]:
    """Put the programs and their compiled code beside a library; returns the files."""
    folder = extension_installed.folder_of(library)
    shutil.rmtree(folder, ignore_errors=True)
    if not programs:
        return []
    (folder / layout.AOT).mkdir(parents=True)
    for plan in plans:
        entry = cache.read(plan.name, plan.key)
        assert entry is not None, plan.name  # it has just been compiled
        aot.copy_entry(entry, folder / layout.AOT)
    kept = [
        one._replace(source=Path(one.source).name, roots=(), words=frozenset())._asdict()
        | {"words": sorted(one.words), "digest": one.digest}
        for one in programs
    ]
    (folder / extension_installed.PROGRAMS).write_text(json.dumps(kept), encoding="utf-8")
    return sorted(path for path in folder.rglob("*") if path.is_file())
