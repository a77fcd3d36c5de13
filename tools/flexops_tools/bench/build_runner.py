"""Runs the rungs of the build ladder, each in processes and directories of its own."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from flexops.errors import CompileError, ToolchainError
from flexops.toolchain.model import CudaToolkit, HostCompiler, Toolchain, TorchBuild

OP = "adam"
WARM_STARTS = 7
_HERE = Path(__file__).resolve().parent
EDITS = 2
EDITED = {"cpp": _HERE / "data" / "rows_edited.cpp", "cu": _HERE / "data" / "scale_edited.cu"}
SOURCES = (_HERE / "data" / "adam_conventional.cpp", _HERE / "data" / "adam_conventional_kernel.cu")


class Spent(NamedTuple):
    """What a build took: of processors, and by the clock."""

    processor: float
    clock: float

    def __str__(self) -> str:
        return f"{self.processor:.2f} s, {self.clock:.2f} s by the clock"


_Environment = Mapping[str, "str | None"]
"""Variables for a child; None unsets."""


class Runner:
    """Runs single rungs in a scratch directory, with one toolchain. ``only``: the rungs that are
    asked for, if not all."""

    only: Sequence[str] = ()

    def __init__(self, tools: Toolchain, scratch: Path, one: str, everything: str) -> None:
        if tools.host is None or tools.torch is None:
            raise ToolchainError(
                "the build ladder needs torch and a C++ compiler", fix="flexops doctor"
            )
        self.cuda = tools.cuda
        self.host = tools.host
        self.ninja = tools.ninja
        self.launcher = tools.launcher
        self.scratch = scratch
        self.one, self.all = one, everything
        self.library_dir = scratch / "linker-names"
        if tools.cuda is not None:
            _linker_names(tools.cuda, tools.host, tools.torch, self.library_dir)
        self._runs = 0
        self._edited: dict[str, dict[str, list[Spent]]] = {}

    def measure(self, rung_id: str) -> tuple[float, str]:
        """Seconds for one rung, and what else is to be said of it."""
        if side_and_kind := re.fullmatch(r"(torch|flexops|nvrtc)-edit-(cpp|cu|cu-host)", rung_id):
            return self.edit(*side_and_kind.groups())
        seconds = {
            "torch-baseline": lambda: self.conventional("setuptools", self.all, jobs=1),
            "torch-ninja": lambda: self.conventional("load", self.all, jobs=1),
            "torch-one-arch": lambda: self.conventional("load", self.one, jobs=1),
            "torch-all-jobs": lambda: self.conventional("load", self.one, directory="torch-kept"),
            "torch-ccache": self.conventional_ccache,
            "torch-warm": self.conventional_warm,
            "flexops-all-archs": lambda: self.flexops(self.all),
            "flexops-cold": lambda: self.flexops(self.one, cache="flexops-kept"),
            "flexops-ccache": self.flexops_ccache,
            "flexops-first-use": self.flexops_first_use,
            "flexops-warm": lambda: self.flexops_warm("seconds"),
            "flexops-aot": lambda: float(
                self._flexops_child({"aot": True}, self.one, self._fresh("cache"))["seconds"]
            ),
            "flexops-import": lambda: self.flexops_warm("import_seconds"),
        }[rung_id]()
        return seconds, ""

    # ---- the conventional side ----

    def conventional(
        self,
        mode: str,
        arch: str,
        *,
        jobs: int | None = None,
        directory: str = "",
        environment: _Environment | None = None,
    ) -> float:
        assert self.cuda is not None
        place = self.scratch / directory if directory else self._fresh("torch")
        request = {
            "mode": mode,
            "sources": [str(source) for source in SOURCES],
            "directory": str(place),
            "name": "adam_conventional",
            "cuda_home": str(self.cuda.root),
            "library_dir": str(self.library_dir),
        }
        return float(self._conventional_child(request, arch, jobs, environment)["seconds"])

    def _conventional_child(
        self,
        request: dict[str, Any],
        arch: str,
        jobs: int | None = None,
        environment: _Environment | None = None,
    ) -> dict[str, Any]:
        assert self.cuda is not None
        variables = {
            "TORCH_CUDA_ARCH_LIST": arch,
            "CUDA_HOME": str(self.cuda.root),
            "CXX": str(self.host.path),
            "CC": str(self.host.path),
            "TORCH_NO_COMPILER_WRAPPER": "1",
            "CCACHE_DISABLE": "1",
            "LD_LIBRARY_PATH": _joined(self.library_dir, os.environ.get("LD_LIBRARY_PATH")),
            "MAX_JOBS": str(jobs) if jobs else None,
        }
        return self._child("child_conventional.py", request, {**variables, **(environment or {})})

    def conventional_ccache(self) -> float:
        """The second of two builds that share a compiler cache."""
        assert self.launcher is not None
        assert self.cuda is not None
        wrappers = self._fresh("wrappers")
        wrappers.mkdir()
        for name, compiler in (("c++", self.host.path), ("nvcc", self.cuda.nvcc.path)):
            (wrappers / name).write_text(
                f'#!/bin/sh\nexec "{self.launcher.path}" "{compiler}" "$@"\n', encoding="utf-8"
            )
            (wrappers / name).chmod(0o755)
        environment = {
            "CXX": str(wrappers / "c++"),
            "PYTORCH_NVCC": str(wrappers / "nvcc"),
            **self._launcher_environment("torch-ccache"),
        }
        # the same place twice, as in a rebuild: the directory enters ccache's hash
        place = self._fresh("torch")
        self.conventional("load", self.one, directory=place.name, environment=environment)
        place.rename(self._fresh("torch"))
        return self.conventional("load", self.one, directory=place.name, environment=environment)

    def conventional_warm(self) -> float:
        # the rung that leaves it was not climbed in this run
        if not (self.scratch / "torch-kept").exists():
            self.conventional("load", self.one, directory="torch-kept")
        return statistics.median(
            self.conventional("load", self.one, directory="torch-kept") for _ in range(WARM_STARTS)
        )

    # ---- flexops ----

    def flexops(
        self, arch: str, *, op: str = OP, cache: str = "", environment: _Environment | None = None
    ) -> float:
        """Seconds from the sources of a family's library for CUDA to having it, with every kernel
        for the architectures."""
        place = self.scratch / cache if cache else self._fresh("cache")
        return float(self._flexops_child({"family": op}, arch, place, environment)["seconds"])

    def flexops_first_use(self) -> float:
        """What a first call adds where the library is there, as from the wheel: it is opened, and
        the one kernel that is launched is compiled."""
        place = self._fresh("cache")
        self._flexops_child({"op": OP, "device": "cuda"}, self.one, place)
        return float(
            self._flexops_child({"op": OP, "device": "cuda", "kernel": self.one}, self.one, place)[
                "seconds"
            ]
        )

    def family(self, name: str) -> float:
        """Seconds from the sources of one family's CUDA library and kernels, for one architecture,
        to having them."""
        return self.flexops(self.one, op=name)

    def flexops_ccache(self) -> float:
        assert self.launcher is not None
        environment = {
            "FLEXOPS_COMPILER_LAUNCHER": str(self.launcher.path),
            **self._launcher_environment("flexops-ccache"),
        }
        self.flexops(self.one, environment=environment)
        return self.flexops(self.one, environment=environment)

    def flexops_warm(self, what: str) -> float:
        """The median of several warm starts; ``what`` names the figure of the child that counts."""
        if not (self.scratch / "flexops-kept").exists():
            self.flexops(self.one, cache="flexops-kept")
        request = {"op": OP, "device": "cuda"}
        return statistics.median(
            float(self._flexops_child(request, self.one, self.scratch / "flexops-kept")[what])
            for _ in range(WARM_STARTS)
        )

    def _flexops_child(
        self,
        request: dict[str, Any],
        arch: str,
        cache: Path,
        environment: _Environment | None = None,
    ) -> dict[str, Any]:
        variables = {
            "TORCH_CUDA_ARCH_LIST": arch,
            "FLEXOPS_CACHE_DIR": str(cache),
            "FLEXOPS_COMPILER_LAUNCHER": "none",
            "FLEXOPS_FALLBACK": "allow",
            "FLEXOPS_JIT": "1",
            "FLEXOPS_LOG": "quiet",
            "MAX_JOBS": None,
            "PYTHONPATH": _joined(_HERE.parents[1], os.environ.get("PYTHONPATH")),
        }
        return self._child("child_flexops.py", request, {**variables, **(environment or {})})

    # ---- edits of people's own sources, both sides in turns ----

    def edit(self, side: str, kind: str) -> tuple[float, str]:
        """Processor time of building anew after an edit, of both by turns: the machine may have
        other work, so the clock on the wall says less, and is reported."""
        if kind not in self._edited:
            sides = [
                one
                for one in ("torch", "flexops", "nvrtc")
                if not self.only or f"{one}-edit-{kind}" in self.only
            ]
            takes = {
                "cpp": ("torch", "flexops"),
                "cu": ("torch", "flexops", "nvrtc"),
                "cu-host": ("nvrtc",),
            }[kind]
            self._edited[kind] = {
                one: [] for one in takes if one in sides and (one != "torch" or self.cuda)
            }
            # the first is the first build, which for flexops precompiles torch's headers as well
            for number in range(EDITS + 1):
                for one, measured in self._edited[kind].items():
                    measured.append(self._edit(one, kind, number))
        first, *edits = self._edited[kind][side]
        median = Spent(*(statistics.median(numbers) for numbers in zip(*edits, strict=True)))
        return median.processor, f"{median.clock:.2f} s by the clock; first build {first}"

    def _edit(self, side: str, kind: str, number: int) -> Spent:
        place = self.scratch / f"{side}-edit-{kind}"
        place.mkdir(exist_ok=True)
        edited = EDITED[kind.partition("-")[0]]
        source, text = place / edited.name, edited.read_text(encoding="utf-8")
        if kind == "cu-host":  # an edit of what is not the kernel
            text = text.replace("EDITED", "0").replace(
                "<float>(factor)", f"<float>(factor + {number})"
            )
        source.write_text(text.replace("EDITED", str(number)), encoding="utf-8")
        request = {
            "name": source.stem,
            "sources": [str(source)],
            "directory": str(place),
            "library_dir": str(self.library_dir),
        }
        if side == "torch":
            assert self.cuda is not None
            done = self._conventional_child(
                {**request, "mode": "load", "cuda_home": str(self.cuda.root)}, self.one
            )
            return Spent(done["processor"], done["seconds"])
        cache, request["cuda"] = (
            self.scratch / "flexops-edits",
            self.cuda.version.major_minor if self.cuda else "",
        )
        # the default, which has no use for nvcc here
        request["device_compiler"] = "auto" if side == "nvrtc" else "nvcc"
        done = self._flexops_child(
            request,
            self.one,
            cache,
            {"FLEXOPS_PCH": "auto" if (side, kind) == ("flexops", "cu") else "1"},
        )
        return Spent(done["processor"], done["seconds"])

    # ---- both ----

    def _launcher_environment(self, name: str) -> _Environment:
        place = str(self.scratch / name)
        return {
            "CCACHE_DIR": place,
            "SCCACHE_DIR": place,
            "CCACHE_DISABLE": None,
            "CCACHE_NOHASHDIR": "1",
        }

    def _fresh(self, kind: str) -> Path:
        self._runs += 1
        return self.scratch / f"{kind}-{self._runs}"

    def _child(
        self, script: str, request: dict[str, Any], variables: _Environment
    ) -> dict[str, Any]:
        """Run one of the child scripts; what it printed last is its result. A variable that is None
        is unset."""
        environment = {
            **os.environ,
            **{name: value for name, value in variables.items() if value is not None},
        }
        # an installed package has bytecode
        for name in (
            "PYTHONDONTWRITEBYTECODE",
            *(name for name, value in variables.items() if value is None),
        ):
            environment.pop(name, None)
        if self.ninja:
            environment["PATH"] = _joined(self.ninja.path.parent, environment.get("PATH"))
        done = subprocess.run(
            [sys.executable, str(_HERE / script), json.dumps(request)],
            env=environment,
            cwd=self.scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        try:
            result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            result = {"error": "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])}
        if error := result.get("error"):
            raise CompileError(
                f"a rung of the ladder failed ({script}, {request.get('mode', 'flexops')})",
                found=str(error),
                fix="flexops doctor",
            )
        return result


def _joined(first: Path, rest: str | None) -> str:
    return os.pathsep.join(filter(None, (str(first), rest)))


def _linker_names(
    cuda: CudaToolkit, host: HostCompiler, torch: TorchBuild, directory: Path
) -> None:
    """What cpp_extension links with and may not be here under that name, so that the conventional
    side builds wherever flexops does.

    The toolkits from the package index hold libcudart.so.13 but no libcudart.so; a CPU build of
    torch has no CUDA libraries: empty ones stand in.
    """
    directory.mkdir()
    for library in [
        path for place in cuda.library_dirs for path in sorted(place.glob("libcudart.so*"))
    ]:
        for name in ("libcudart.so", library.name):
            with suppress(FileExistsError):
                (directory / name).symlink_to(library)
    for name in ("libc10_cuda.so", "libtorch_cuda.so"):
        if not (torch.library_dir / name).exists():
            subprocess.run(
                [str(host.path), "-shared", "-x", "c++", "/dev/null", "-o", str(directory / name)],
                check=True,
                stdin=subprocess.DEVNULL,
            )
