"""Small plans and real processes for the tests of the builder.

``tiny_plan`` compiles two lines of C++ with the real compiler and ninja, so that a whole build
takes a tenth of a second. ``SQUARE`` is a whole op (the one that doctor builds) that is not in the
catalogue; ``run_child`` runs one of the scripts in ``tests/support/children`` with it.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import completed

from flexops.build.describe.spec import OpSpec
from flexops.build.plan import cache_key
from flexops.build.plan.plan import BuildPlan, Step, plan_op
from flexops.build.store.cache import BuildCache, Entry
from flexops.build.store.manifest import Manifest, file_crc32
from flexops.doctor.trial import small_op
from flexops.toolchain.model import CudaToolkit, HostCompiler, Tool, Toolchain, TorchBuild, Version
from flexops.toolchain.resources import Resources

REPOSITORY = Path(__file__).resolve().parents[2]
CHILDREN = Path(__file__).resolve().parent / "children"
GIB = 2**30
SQUARE = small_op()

ROOM = Resources(cpus=2, memory_bytes=16 * GIB)
TORCH = TorchBuild(
    "2.14.1+cu130", cuda="13.0", hip=None, git_version="abc", cxx11_abi=True, root=Path("/py/torch")
)
OLD_TORCH = TorchBuild(
    "2.4.1+cu121", cuda="12.1", hip=None, git_version="abc", cxx11_abi=False, root=Path("/py/torch")
)
HOST = HostCompiler(Path("/usr/bin/g++"), Version((12, 2)), "gcc 12.2.0 x86_64-linux-gnu", "gcc")
CUDA = CudaToolkit(
    Path("/cuda"),
    Version((13, 0, 88)),
    Tool(Path("/cuda/bin/nvcc"), Version((13, 0, 88)), "nvcc 13.0.88"),
    (Path("/cuda/include"),),
    (Path("/cuda/lib64"),),
)
NINJA = Tool(Path("/usr/bin/ninja"), Version((1, 11)), "ninja 1.11")
CCACHE = Tool(Path("/usr/bin/ccache"), Version((4, 8)), "ccache 4.8")
TOOLS = Toolchain(torch=TORCH, host=HOST, cuda=CUDA, ninja=NINJA, launcher=CCACHE)
"""A toolchain on paper, for pure planning."""


def paper_plan(
    spec: OpSpec,
    device: Any,
    tools: Toolchain = TOOLS,
    *,
    csrc: Path = REPOSITORY / "csrc",
    resources: Resources = ROOM,
    max_jobs: int | None = None,
) -> BuildPlan:
    """A plan that nothing is going to run."""
    return plan_op(spec, device, tools, csrc=csrc, resources=resources, max_jobs=max_jobs)


def ninja_path() -> str:
    """The ninja that discovery picks."""
    from flexops import settings, toolchain

    found = toolchain.discover(settings.current(), device="cpu").ninja
    return str(found.path) if found else "ninja"


def tiny_plan(
    folder: Path,
    *,
    name: str = "tiny-cpu",
    compiler: str = "g++",
    source: str = "",
    header: str = "",
    **changes: Any,
) -> BuildPlan:
    """A plan of one compile and one link, whose ``answer()`` the header decides. Writes its two
    sources unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "tiny.h": (header, "inline int answer_of_header() { return 42; }\n"),
        "tiny.cpp": (
            source,
            '#include "tiny.h"\nextern "C" int answer() { return answer_of_header(); }\n',
        ),
    }
    for file, (given, usual) in texts.items():
        path = folder / file
        if given or not path.exists():
            path.write_text(given or usual)
            # written before the build began, on whatever clock
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 2))
    tiny = str(folder / "tiny.cpp")
    plan = BuildPlan(
        name=name,
        steps=(
            Step("host", "tiny.o", (tiny,), (compiler, "-fPIC", "-c", tiny, "-o", "tiny.o")),
            Step("link", "tiny.so", ("tiny.o",), (compiler, "-shared", "tiny.o", "-o", "tiny.so")),
        ),
        library="tiny.so",
        sources=(folder / "tiny.cpp",),
        anchors=((str(folder), "<tiny>"),),
        identity=(("host compiler", "the test's"), ("torch", "stable-2.11")),
        trusted_roots=(),
        jobs=1,
        nvcc_threads=1,
        device="cpu",
        torch_abi="stable-2.11",
        isa_levels=("baseline",),
        ninja=ninja_path(),
    )
    return plan._replace(**changes)


def made_up_entry(
    cache: BuildCache, plan: BuildPlan, content: bytes = b"library", header: str = "", **fields: Any
) -> Entry:
    """Publish a made-up library for a ``tiny_plan``, as a build that reached its header would."""
    headers = {
        "<tiny>/tiny.h": header or cache_key.file_digest(plan.sources[0].with_name("tiny.h"))
    }
    base = cache_key.base_key(plan, cache_key.source_digests(plan))
    with cache.workspace() as workspace:
        built = workspace / plan.name
        built.mkdir()
        (built / plan.library).write_bytes(content)
        manifest = Manifest(
            name=plan.name,
            key=cache_key.full_key(base, headers),
            base=base,
            device="cpu",
            library=plan.library,
            size=len(content),
            crc32=file_crc32(built / plan.library),
            torch_abi=plan.torch_abi,
            **fields,
        )
        return cache.publish(built, manifest, headers)


def answer(library: Path) -> int:
    """Open a library made from a ``tiny_plan``, in a process of its own, and ask it."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).answer())"
    return int(completed([sys.executable, "-c", code, library]).stdout)


def copy_csrc(folder: Path) -> Path:
    """A ``csrc/`` of the test's own with what ``SQUARE`` needs."""
    root = folder / "csrc"
    for name in ("common", "doctor"):
        shutil.copytree(REPOSITORY / "csrc" / name, root / name)
    return root


def watched_compiler(folder: Path, real: str) -> Path:
    """A compiler that appends ``compile`` or ``link`` to ``<folder>/runs`` and, while
    ``<folder>/hang-<kind>`` exists, waits before it works.

    What it waits for it says by making ``<folder>/waiting-<kind>``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "c++"
    script.write_text(f"""#!/bin/sh
kind=
for word in "$@"; do case "$word" in -c) kind=compile;; -shared) kind=link;; esac; done
if [ -n "$kind" ]; then
  echo "$kind" >> '{folder}/runs'
  if [ -e '{folder}/hang-'"$kind" ]; then
    : > '{folder}/waiting-'"$kind"
    while [ -e '{folder}/hang-'"$kind" ]; do sleep 0.02; done
  fi
fi
exec '{real}' "$@"
""")
    script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return script


def runs(folder: Path) -> list[str]:
    """What a watched compiler was asked to do so far."""
    log = folder / "runs"
    return log.read_text().split() if log.exists() else []


def child_environment(**variables: str | None) -> dict[str, str]:
    """This process's environment with flexops on the path and these variables; None unsets."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
        ),
        "FLEXOPS_LOG": "quiet",
    }
    environment |= {name: value for name, value in variables.items() if value is not None}
    for name in [name for name, value in variables.items() if value is None]:
        environment.pop(name, None)
    return environment


def start_child(
    script: str, request: Mapping[str, Any], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[str]:
    """Start one of ``tests/support/children`` with a request; ``finish_child`` reads its answer."""
    command = [
        *options.pop("prefix", ()),
        sys.executable,
        str(CHILDREN / script),
        json.dumps(request),
    ]
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish_child(process: subprocess.Popen[str], timeout: float = 3600) -> dict[str, Any]:
    """The JSON object that a child printed last; fails with all it said if there is none."""
    try:
        said, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        said, errors = process.communicate()
        raise AssertionError(f"hangs; so far it said\n{said}\n{errors}") from None
    lines = said.strip().splitlines()
    assert process.returncode == 0, f"exit status {process.returncode}\n{said}\n{errors}"
    assert lines, errors
    answer_: dict[str, Any] = json.loads(lines[-1])
    return {**answer_, "stderr": errors}


def run_child(
    script: str, request: Mapping[str, Any], environment: Mapping[str, str], **options: Any
) -> dict[str, Any]:
    """Start one of ``tests/support/children`` and wait for its answer."""
    return finish_child(start_child(script, request, environment, **options))
