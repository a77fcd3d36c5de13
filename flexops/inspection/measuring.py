"""A family's kernels compiled, with what ptxas reports of each."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from .. import toolchain
from ..build.compile import building, device_code
from ..build.describe import layout
from ..build.describe.spec import OpSpec
from ..build.load import loader
from ..build.plan import kernel_names, kernel_plan
from ..build.plan.plan import plan_op
from ..compute_capability import Architecture
from ..errors import FlexopsError
from ..settings import Settings
from ..toolchain import proc
from ..toolchain.nvrtc import DeviceCompiler
from . import cubin
from .occupancy import occupancy

Progress = Callable[[int, int, str], None]


class Measured(NamedTuple):
    """One kernel for one architecture.

    Attributes:
        resources: registers of a thread; bytes of stack, spill stores and loads; bytes of static
            shared memory; barriers.
        threads: the most of a block that its launch bounds allow; 0 if it has none.
        code: the cubin.
    """

    family: str
    kernel: str
    architecture: Architecture
    compiler: str
    resources: dict[str, int]
    threads: int
    code: Path

    @property
    def occupancy(self) -> float | None:
        """Of a block with as many threads as its launch bounds allow, without dynamic shared
        memory."""
        return occupancy(
            self.architecture.capability,
            self.resources.get("registers", 0),
            self.resources.get("shared", 0),
            self.threads,
        )

    def as_dict(self) -> dict[str, object]:
        size = self.code.stat().st_size
        return {
            "family": self.family,
            "kernel": self.kernel,
            "architecture": str(self.architecture),
            "compiler": self.compiler,
            **self.resources,
            "threads": self.threads,
            "occupancy": self.occupancy,
            "bytes": size,
            "code": str(self.code),
        }


def measure(
    specs: Sequence[OpSpec],
    architectures: Sequence[Architecture],
    compiler: DeviceCompiler,
    chosen: Settings,
    *,
    csrc: Path | None = None,
    kernel: str = "",
    progress: Progress | None = None,
) -> list[Measured]:
    """Compile the kernels of families, as their libraries name them, and report what each takes;
    what was compiled before is not again.

    Args:
        csrc: a folder ``csrc`` with the families' sources, if they are not to be read where they
            are.
        kernel: only those whose name has this in it.

    Raises:
        CompileError: a library or a kernel does not compile.
    """
    own = csrc is not None and all(spec.project.own for spec in specs)
    specs = [_read_from(spec, csrc) if csrc else spec for spec in specs if "cuda" in spec.devices]
    csrc = csrc if csrc and own else layout.csrc_root()
    cache = loader.open_cache(chosen)
    tools = toolchain.discover(chosen, device="cpu")
    resources = toolchain.resources.detect()
    libraries = building.obtain(
        [
            plan_op(spec, "cuda", tools, csrc=csrc, resources=resources, max_jobs=chosen.max_jobs)
            for spec in specs
        ],
        cache,
    )
    plans = [
        (
            spec.name,
            name,
            kernel_plan.plan_kernel(
                spec.name,
                spec.cuda_sources,
                name,
                fit,
                compiler,
                csrc,
                roots=spec.project.roots(csrc),
            ),
        )
        for spec, library in zip(specs, libraries, strict=True)
        for name in kernel_names.names_in(library.require().library)
        if kernel in name
        for one in architectures
        if spec.runs_on(one.capability)
        and (fit := kernel_names.fitted(name, one._replace(ptx=False)))
    ]
    jobs = device_code.choose_jobs(resources, chosen.max_jobs)
    results = device_code.obtain(
        [plan for _, _, plan in plans],
        cache,
        jobs=jobs,
        time_limit=chosen.compile_timeout,
        progress=progress,
    )
    measured = []
    for (family, name, plan), result in zip(plans, results, strict=True):
        entry = result.require()
        threads = cubin.most_threads(entry.library.read_bytes(), entry.manifest.symbol)
        measured.append(
            Measured(
                family,
                name,
                plan.architecture,
                str(compiler),
                entry.manifest.resources,
                threads,
                entry.library,
            )
        )
    return measured


@contextmanager
def sources_of(revision: str, csrc: Path) -> Iterator[Path]:
    """A folder of sources as it was in a commit, in a folder called ``csrc``.

    Raises:
        FlexopsError: it is in no checkout, or there is no such commit.
    """
    with TemporaryDirectory(prefix="flexops-inspect-") as folder:
        there, packed = Path(folder, "csrc"), Path(folder, "csrc.tar")
        command = ["git", "-C", str(csrc), "archive", "--output", str(packed), revision, "."]
        done = proc.run(command, seconds=120)
        if done.status != 0:
            raise FlexopsError(
                f"the sources of {revision} are missing",
                found=done.output.strip(),
                required="a commit of this checkout",
            )
        with tarfile.open(packed) as archive:
            (
                archive.extractall(there, filter="data")
                if hasattr(tarfile, "data_filter")
                else archive.extractall(there)
            )
        yield there


def _read_from(spec: OpSpec, csrc: Path) -> OpSpec:
    """The spec with the files that its folder has in these sources; those of another's project are
    looked for there, too."""
    folder = csrc / spec.family
    files = tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()
    project = spec.project if spec.project.own else spec.project._replace(package=csrc.parent)
    return spec._replace(files=files, project=project)
