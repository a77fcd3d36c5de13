"""Packaging beyond pyproject.toml: ``FLEXOPS_AOT=all`` (or op names) compiles the operators into
the wheel, for the torch and the machine here; ``FLEXOPS_WHEEL=x86_64`` (or ``aarch64``) their host
code, for every torch with the stable ABI.

Each op is handed to setuptools as an ``Extension``, so ``build_ext``, ``develop`` and
``bdist_wheel`` know of it; how it is built is the business of ``flexops.build``. The libraries need
no Python symbols, so one wheel serves every Python: ``py3-none-<platform>``.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NOTICES = "THIRD_PARTY_NOTICES.txt"
sys.path.insert(0, str(ROOT))
# building needs no operators, whose torch would be imported by each of pip's hooks
sys.modules["flexops.ops._declared"] = types.ModuleType("flexops.ops._declared")
vars(sys.modules["flexops.ops._declared"])["declare_all"] = lambda: None

from flexops import settings, toolchain  # noqa: E402
from flexops.build.deliver import aot  # noqa: E402
from flexops.build.describe import catalog  # noqa: E402
from flexops.builder.packaging import PlatformWheel  # noqa: E402
from flexops.errors import FlexopsError  # noqa: E402
from flexops.toolchain import zig  # noqa: E402

EXAMPLE = [f"builder/example/{part}" for part in ("**", ".github/**", ".gitignore")]
DATA = {
    "flexops": [
        "py.typed",
        "targets/*.toml",
        "toolchain/*.toml",
        "inspection/*.toml",
        "cmake/*.cmake",
        "testing/emulator/*.h",
        *EXAMPLE,
    ]
}


def source_packages() -> list[str]:
    """``csrc/`` and its folders, which travel as data, so that an installed flexops can compile at
    run time."""
    return [
        "flexops._csrc",
        *(
            f"flexops._csrc.{path.name}"
            for path in sorted((ROOT / "csrc").iterdir())
            if path.is_dir()
        ),
    ]


def extensions() -> list[Extension]:
    """One for each op that ``FLEXOPS_AOT`` names; by default none, and all with
    ``FLEXOPS_WHEEL``."""
    names = settings.current().aot or (("all",) if settings.current().wheel else ())
    specs = catalog.select(names) if names else ()
    return [
        Extension(
            f"flexops._aot.{spec.name}",
            [f"csrc/{source}" for source in (spec.binding, *spec.cpu_sources, *spec.cuda_sources)],
        )
        for spec in specs
    ]


class Package(Distribution):
    """Requires the torch that the compiled libraries inside are for, not pyproject.toml's least."""

    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        if not extensions():
            return
        torch = zig.TORCH if settings.current().wheel else toolchain.torch_build()
        if torch:
            package: Any = self  # setuptools does not declare these
            others = [one for one in package.install_requires if not re.match(r"torch\b", one)]
            requires = [torch.requirement, *others]
            package.install_requires = package.metadata.install_requires = requires


class Wheel(PlatformWheel):
    """With what zig puts into the libraries: its notices, and an SBOM (PEP 770)."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        if not settings.current().wheel:
            return
        for folder in ("licenses", "sboms"):
            Path(distinfo_path, folder).mkdir(exist_ok=True)
        shutil.copy(ROOT / NOTICES, Path(distinfo_path, "licenses"))
        name, version = self.distribution.get_name(), self.distribution.get_version()
        text = json.dumps(sbom(name, version), indent=1) + "\n"
        Path(distinfo_path, "sboms", "flexops.cdx.json").write_text(text, encoding="utf-8")


def sbom(name: str, version: str) -> dict[str, Any]:
    """The wheel's contents as a CycloneDX document."""
    zig_name, _, zig_version = zig.REQUIREMENT.partition("==")
    components = [
        ("zig", zig_version, {"license": {"id": "MIT"}}),
        ("libc++", f"of zig {zig_version}", {"expression": "Apache-2.0 WITH LLVM-exception"}),
    ]
    own = {"type": "library", "name": name, "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {**own, "licenses": [{"license": {"id": "Apache-2.0"}}]},
            "tools": {"components": [{"type": "application", "name": zig_name}]},
        },
        "components": [
            {"type": "library", "name": part, "version": release, "licenses": [terms]}
            for part, release, terms in components
        ],
    }


class BuildOps(build_ext):
    """Builds all ops together, so that their compile steps share the processors."""

    def run(self) -> None:
        if not self.extensions:
            return
        package = ROOT / "flexops" if self.inplace else Path(self.build_lib) / "flexops"
        try:
            self._built = aot.build_into_package(
                tuple(item.name.rpartition(".")[2] for item in self.extensions),
                settings.current(),
                package,
            )
        except FlexopsError as error:
            raise SystemExit(f"\nflexops: {error}\n") from error

    def get_outputs(self) -> list[str]:
        return [
            str(path)
            for directory in getattr(self, "_built", ())
            for path in sorted(directory.iterdir())
        ]

    def get_source_files(self) -> list[str]:
        return []  # csrc/ is package data already


setup(
    packages=[*find_packages(include=["flexops", "flexops.*"]), *source_packages()],
    package_dir={"flexops._csrc": "csrc"},
    include_package_data=False,  # setuptools would warn of each folder of data
    package_data=DATA | {name: ["*"] for name in source_packages()},
    ext_modules=extensions(),
    # pip and build install them into the build's environment
    setup_requires=[zig.REQUIREMENT, "ninja"] if settings.current().wheel else [],
    distclass=Package,
    cmdclass={"build_ext": BuildOps, "bdist_wheel": Wheel},
)
