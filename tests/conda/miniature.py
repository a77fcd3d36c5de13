"""A conda channel made of what this machine has, so that real tools can build, solve and install
with no network.

What is in it is real where the tests run it: this environment's Python, torch, pip, setuptools and
the packages they need, each as a conda package of its files; ninja; the system's C++ compiler
behind the name that conda gives it. What only takes part in solving (torch for CUDA,
``cuda-version``, the sysroot) is a package without files. The version of a wrapped compiler is the
one that the recipe's variants ask for, not its own.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rattler_build import assemble_package

PLATFORM = "linux-64"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SITE = f"lib/python{PYTHON}/site-packages"
DISTRIBUTIONS = (
    "pip",
    "setuptools",
    "wheel",
    "typer",
    "rich",
    "filelock",
    "typing_extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
)
"""Besides torch. What they need in turn is added."""

_LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "config-*",
    "*.a",
)


@dataclass
class Package:
    """One conda package in the making: its files are linked into ``root``."""

    name: str
    version: str
    root: Path
    build: str = "0"
    depends: list[str] = field(default_factory=list)
    number: int = 0
    run_exports: dict[str, list[str]] = field(default_factory=dict)

    def write(self, path: str, text: str, mode: int = 0o644) -> Package:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)
        return self

    def link(self, source: Path, path: str) -> Package:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(str(source), str(target))
        return self

    def tree(self, source: Path, path: str, *left_out: str) -> Package:
        shutil.copytree(
            source,
            self.root / path,
            copy_function=_link,
            ignore=shutil.ignore_patterns(*left_out),
            dirs_exist_ok=True,
        )
        return self


class Miniature:
    """A channel in ``root``, filled package by package."""

    def __init__(self, root: Path, staging: Path) -> None:
        self.root = root
        self._staging = staging
        (root / PLATFORM).mkdir(parents=True, exist_ok=True)
        (root / "noarch").mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def new(
        self,
        name: str,
        version: str,
        build: str = "0",
        depends: Sequence[str] = (),
        number: int = 0,
    ) -> Package:
        staged = self._staging / f"{name}-{version}-{build}"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        return Package(name, version, staged, build, list(depends), number)

    def add(self, package: Package) -> Path:
        """Pack it; quickly, not small."""
        made = assemble_package(
            package.name,
            package.version,
            PLATFORM,
            package.build,
            self.root / PLATFORM,
            files_dir=package.root,
            depends=package.depends,
            build_number=package.number,
            compression_level=1,
            detect_prefix=False,
            license="LicenseRef-test",
        )
        shutil.rmtree(package.root)
        if package.run_exports:
            add_to_info(made.path, "run_exports.json", json.dumps(package.run_exports))
        return made.path

    def empty(
        self,
        name: str,
        version: str,
        build: str = "0",
        depends: Sequence[str] = (),
        number: int = 0,
        **run_exports: list[str],
    ) -> Path:
        """A package that only takes part in solving."""
        package = self.new(name, version, build, depends, number).write(
            f"share/{name}-{build}.txt", "nothing\n"
        )
        package.run_exports = run_exports
        return self.add(package)

    # ---- what this machine has ----

    def add_python(self) -> None:
        package = self.new("python", ".".join(map(str, sys.version_info[:3])))
        executable = Path(sys.executable).resolve()
        package.link(executable, f"bin/python{PYTHON}")
        for name in ("python", "python3"):
            (package.root / "bin" / name).symlink_to(f"python{PYTHON}")
        shared = Path(sysconfig.get_config_var("LIBDIR") or "") / (
            sysconfig.get_config_var("INSTSONAME") or ""
        )
        if shared.suffix != ".a" and shared.is_file():
            package.link(shared.resolve(), f"lib/{shared.name}")
        package.tree(Path(sysconfig.get_path("stdlib")), f"lib/python{PYTHON}", *_LEFT_OUT)
        package.tree(Path(sysconfig.get_path("include")), f"include/python{PYTHON}")
        package.write(f"{SITE}/README.txt", "packages\n")
        abi = f"python_abi {PYTHON}.* *_cp{PYTHON.replace('.', '')}"
        package.run_exports = {"weak": [abi], "noarch": ["python"]}
        self.empty("python_abi", PYTHON, f"0_cp{PYTHON.replace('.', '')}")
        self.add(package)

    def add_distributions(self) -> None:
        for name in sorted(_closure(DISTRIBUTIONS)):
            self.add_distribution(name)

    def add_distribution(self, name: str) -> None:
        distribution = importlib.metadata.distribution(name)
        package = self.new(
            _conda_name(distribution.name),
            distribution.version,
            depends=["python", *map(_conda_name, _needs(distribution))],
        )
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if not {"..", "tests"} & set(file.parts) and source.is_file():
                package.link(source, f"{SITE}/{file}")
        for script in distribution.entry_points.select(group="console_scripts"):
            module, _, attribute = script.value.partition(":")
            package.write(
                f"bin/{script.name}",
                f"#!/usr/bin/env python\nimport sys\nfrom {module} import"
                f" {attribute}\nsys.exit({attribute}())\n",
                0o755,
            )
        self.add(package)

    def add_torch(self) -> None:
        """The CPU torch of this environment, without its tests, its programs and the headers
        outside the stable ABI; and torch for CUDA, which solves only."""
        distribution = importlib.metadata.distribution("torch")
        site = Path(str(distribution.locate_file("")))
        release = distribution.version.partition("+")[0]
        needs = [f"python {PYTHON}.*", *map(_conda_name, _needs(distribution))]
        package = self.new("pytorch", release, "cpu_generic_0", needs)
        package.tree(site / "torch", f"{SITE}/torch", "test", "bin", "include", "*.a")
        package.link(site / "torch/bin/torch_shm_manager", f"{SITE}/torch/bin/torch_shm_manager")
        for headers in ("headeronly", "csrc/stable", "csrc/inductor"):
            package.tree(
                site / "torch/include/torch" / headers, f"{SITE}/torch/include/torch/{headers}"
            )
        for name in ("torchgen", "functorch"):
            if (site / name).is_dir():
                package.tree(site / name, f"{SITE}/{name}")
        metadata = (
            Path(str(distribution.locate_file(""))) / f"torch-{distribution.version}.dist-info"
        )
        package.tree(metadata, f"{SITE}/{metadata.name}")
        package.run_exports = torch_exports(release)
        self.add(package)
        for cuda in ("12.9", "13.0"):
            self.add_cuda_torch(cuda, release, needs)
        # before the stable ABI: nothing of ours fits it
        self.empty("pytorch", "2.5.1", "cpu_generic_0", [f"python {PYTHON}.*"])

    def add_cuda_torch(
        self, cuda: str, release: str, needs: Sequence[str], site: Path | None = None
    ) -> None:
        """torch for CUDA: a package without files or, with ``site``, of links to the one that is
        installed there, which takes gigabytes."""
        major = cuda.partition(".")[0]
        depends = [*needs, f"cuda-version >={cuda},<{int(major) + 1}", f"__cuda >={major}"]
        package = self.new(
            "pytorch", release, f"cuda{cuda.replace('.', '')}_generic_200", depends, number=200
        )
        package.write(f"share/pytorch-{cuda}.txt", "torch for CUDA\n")
        package.write(
            f"{SITE}/torch-{release}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: torch\nVersion: {release}\n",
        )
        for name in ("torch", "torchgen", "functorch") if site else ():
            (package.root / SITE / name).symlink_to(site / name)
        package.run_exports = torch_exports(release)
        self.add(package)

    def add_nvrtc(self, version: str, libraries: Path | None = None) -> None:
        """What compiles kernels, where conda-forge has it; without libraries, its name. It is
        bounded by its major release."""
        package = self.new("cuda-nvrtc-dev", version, depends=[f"cuda-version {version}.*"])
        for library in libraries.glob("libnvrtc*.so.*") if libraries else ():
            package.link(library, f"targets/x86_64-linux/lib/{library.name}")
        package.write("share/cuda-nvrtc.txt", "NVRTC\n")
        package.run_exports = {
            "weak": [f"cuda-nvrtc >={version}.1,<{int(version.partition('.')[0]) + 1}.0a0"]
        }
        self.add(package)

    def add_cuda_versions(self) -> None:
        for version in ("12.9", "13.0"):
            self.empty("cuda-version", version)

    def add_ninja(self) -> None:
        """The program without the metadata of the wheel, as conda-forge has it."""
        found = shutil.which(
            "ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )
        assert found, "the tests' environment has ninja"
        self.add(
            self.new("ninja", importlib.metadata.version("ninja").partition(".post")[0]).link(
                Path(found).resolve(), "bin/ninja"
            )
        )

    def add_tomli(self) -> None:
        """From inside pip, where every environment has it."""
        package = self.new("tomli", "2.2.1", depends=["python"])
        pip = Path(str(importlib.metadata.distribution("pip").locate_file("pip")))
        (
            package.tree(pip / "_vendor" / "tomli", f"{SITE}/tomli")
            if (pip / "_vendor" / "tomli").is_dir()
            else package.write("share/tomli.txt", "no\n")
        )
        self.add(package)

    def add_compiler(self, versions: Sequence[str], sysroots: Sequence[str]) -> None:
        """The system's g++ under conda's name, with the activation that conda's has."""
        found = shutil.which("g++")
        assert found, "the tests need a C++ compiler"
        for version in versions:
            package = self.new(f"gxx_{PLATFORM}", version)
            package.write(
                "bin/x86_64-conda-linux-gnu-c++", f'#!/bin/sh\nexec {found} "$@"\n', 0o755
            )
            package.write(
                "etc/conda/activate.d/gxx.sh",
                'export CXX="$CONDA_PREFIX/bin/x86_64-conda-linux-gnu-c++"\n',
            )
            package.run_exports = {"strong": [f"libstdcxx >={version}", f"libgcc >={version}"]}
            self.add(package)
        for name in ("libstdcxx", "libgcc"):
            self.empty(name, "15.2.0")
        for version in sysroots:
            self.empty(f"sysroot_{PLATFORM}", version, strong=[f"__glibc >={version},<3.0.a0"])


def complete(root: Path, staging: Path, compilers: Sequence[str], sysroots: Sequence[str]) -> None:
    """A channel with all that building, solving and running the CPU variant needs, and solving the
    CUDA variants."""
    channel = Miniature(root, staging)
    channel.add_python()
    channel.add_distributions()
    channel.add_torch()
    channel.add_cuda_versions()
    channel.add_ninja()
    channel.add_tomli()
    channel.add_compiler(compilers, sysroots)


def toolkits(root: Path, staging: Path, versions: Sequence[str]) -> None:
    """A channel of toolkits that compile nothing: what the recipe asks for, by name, and what that
    exports."""
    channel = Miniature(root, staging)
    for version in versions:
        channel.add_nvrtc(version)


def torch_exports(release: str) -> dict[str, list[str]]:
    """conda-forge's torch is an exact minor for what links to it."""
    bound = f">={release},<{release.rpartition('.')[0]}.99"
    return {"weak": [f"libtorch {bound}", f"pytorch {bound}"]}


def add_to_info(package: Path, name: str, text: str) -> None:
    """Add a file to those about a package, which the bindings cannot be told of; what it installs
    is copied as it is."""
    import zstandard

    whole = package.with_suffix(".new")
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(whole, "w") as new:
        for member in old.namelist():
            if member.startswith("info-"):
                packed = io.BytesIO(
                    zstandard.ZstdDecompressor().decompressobj().decompress(old.read(member))
                )
                with tarfile.open(fileobj=packed, mode="a:") as info:
                    entry = tarfile.TarInfo(f"info/{name}")
                    entry.size, entry.mode = len(text), 0o644
                    info.addfile(entry, io.BytesIO(text.encode()))
                new.writestr(member, zstandard.compress(packed.getvalue()))
            else:
                with old.open(member) as source, new.open(member, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, 1 << 22)
    whole.replace(package)


def _link(source: str, target: str) -> None:
    if source.endswith(".pyc"):
        _unchecked(source, target)
        return
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _unchecked(source: str, target: str) -> None:
    """Byte code that counts whatever the time stamp of its source, which packing changes (PEP 552);
    conda-forge's packages hold it too."""
    code = Path(source).read_bytes()
    Path(target).write_bytes(code[:4] + (1).to_bytes(4, "little") + bytes(8) + code[16:])


def _closure(names: Sequence[str]) -> set[str]:
    known: set[str] = set()
    waiting = list(names)
    while waiting:
        name = _conda_name(waiting.pop())
        if name not in known:
            known.add(name)
            waiting += _needs(importlib.metadata.distribution(name))
    return known


def _needs(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """Names of what it requires here and now; extras, and what is made by hand, left out."""
    for requirement in distribution.requires or ():
        name, marker = re.match(r"[\w.-]+", requirement), requirement.partition(";")[2]
        if (
            name
            and "extra" not in marker
            and _installed(name[0])
            and name[0] not in ("torch", "ninja")
        ):
            yield name[0]


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.distribution(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _conda_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    # In a process of its own, which ends without the interpreter's shutdown: the bindings' threads
    # have been seen to crash in it.
    complete(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4].split(","))
    sys.stdout.flush()
    os._exit(0)
