"""Builds published CUDA extensions as they are, with ``torch.utils.cpp_extension.load`` and with
``flexops.load``, and writes a table: which compiler each took, and the processor seconds of both.

    python -m flexops_tools.bench.published SOURCES TABLE.md [--limit 300] [NAME ...]

SOURCES has a checkout of each project in ``published.toml``, as ``owner+name``, at the commit that
the list names, with its submodules. What to compile is read from the project's own setup.py, run
with a ``setup()`` that only records its extensions. Kernels are compiled for
``TORCH_CUDA_ARCH_LIST`` (default 9.0), without any cache. Each row is written as it is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flexops import _toml

_LIST = Path(__file__).with_suffix(".toml")
_HEAD = """\
| extension | commit | sources | torch, CPU s | flexops, CPU s | compiled by | reason |
| --- | --- | ---: | ---: | ---: | --- | --- |
"""
_LONGEST = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--limit", type=int, default=300, help="seconds for one project")
    parser.add_argument("--jobs", type=int, default=1, help="projects at once")
    parser.add_argument("names", nargs="*", help="only projects whose name has one of these")
    given = parser.parse_intermixed_args()
    given.table.write_text(_HEAD, encoding="utf-8")
    projects = _toml.load(_LIST)["project"]
    with ThreadPoolExecutor(given.jobs) as pool:
        for done in [pool.submit(_rows, project, given) for project in projects]:
            done.result()


def _rows(project: dict[str, Any], given: Any) -> None:
    """Writes a project's rows, each when it is finished."""
    label = f"{project['name']} {project.get('folder', '')}".strip()
    if given.names and not any(name in label for name in given.names):
        return
    folder = given.sources / project["name"].replace("/", "+") / project.get("folder", "")
    rows: Iterable[dict[str, Any]] = [{"name": label, "by": "no checkout"}]
    if folder.is_dir():
        rows = _project(folder.resolve(), project, given)
    for row in rows:
        with given.table.open("a", encoding="utf-8") as stream:
            stream.write(f"{_line(label, project['commit'][:9], row)}\n")


def _line(label: str, commit: str, row: dict[str, Any]) -> str:
    name = label if row["name"] in label else f"{label}: {row['name']}"
    reason = re.sub(r"\s+", " ", row.get("reason", "")).replace("|", "/")
    reason = re.sub(r"^.*? found: |(?:/[^\s/]+)+/(?=[^\s/]+)", "", reason)[:_LONGEST]
    cells = [row.get("sources", ""), row.get("torch", ""), row.get("seconds", ""), row["by"]]
    return "| " + " | ".join(str(cell) for cell in (name, commit, *cells, reason)) + " |"


def _project(folder: Path, project: dict[str, Any], given: Any) -> Iterator[dict[str, Any]]:
    """Rows for a project's extensions, each built by a process of its own."""
    if patterns := project.get("sources"):
        found = [str(path) for pattern in patterns for path in sorted(folder.glob(pattern))]
        name = Path(patterns[0]).name.partition("*")[0].partition(".")[0]
        extensions = [{"name": name, "sources": found}]
    else:
        said, _ = _child(_RECORD, {}, folder, given)
        if isinstance(said, str):
            yield {"name": "setup.py", "by": "no result", "reason": said}
            return
        extensions = [one for one in said if any(path.endswith(".cu") for path in one["sources"])]
    for one in extensions:
        by_torch, torch_seconds = _built(_TORCH, one, folder, given)
        by_flexops, seconds = _built(_BUILD, one, folder, given)
        failed = by_torch["reason"]
        yield {
            "name": one["name"],
            "sources": len(one["sources"]),
            "torch": f"{torch_seconds:.0f}{' (fails)' if failed else ''}",
            "seconds": f"{seconds:.0f}",
            "by": by_flexops["by"],
            "reason": f"{by_flexops['reason']} {failed and f'torch: {failed}'}".strip(),
        }


def _built(code: str, extension: dict[str, Any], folder: Path, given: Any) -> tuple[Any, float]:
    said, seconds = _child(code, extension, folder, given)
    return ({"by": "fails", "reason": said} if isinstance(said, str) else said), seconds


def _child(code: str, extension: dict[str, Any], folder: Path, given: Any) -> tuple[Any, float]:
    """What a child process answers (a text if it failed), and the processor seconds that it and
    its compilers took."""
    environment = {
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "FORCE_CUDA": "1",
        "MAMBA_KEEP_CUDA_BUILD": "TRUE",
        "MAX_JOBS": "2",
        "FLEXOPS_PCH": "0",
        **os.environ,
        "EXTENSION": json.dumps(extension),
    }
    command = [sys.executable, "-c", f"{_COMMON}{code}"]
    with (
        tempfile.TemporaryDirectory() as cache,
        tempfile.TemporaryFile("w+", errors="replace") as said,
    ):
        environment["FLEXOPS_CACHE_DIR"] = cache
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        end, done = time.monotonic() + given.limit, 0
        while not done and time.monotonic() < end:
            time.sleep(0.2)
            done, _, used = os.wait4(process.pid, os.WNOHANG)
        if not done:
            os.killpg(process.pid, 9)
            _, _, used = os.wait4(process.pid, 0)
        said.seek(0)
        output = said.read() if done else f"stopped after {given.limit} s"
    seconds = used.ru_utime + used.ru_stime
    lines = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    return (json.loads(lines[-1][7:]) if lines else output.strip()[-_LONGEST:]), seconds


_COMMON = """
import json, os, sys
import torch
if not torch.cuda.is_available():  # a machine without a GPU compiles just as well
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
def answer(value):
    print("ANSWER " + json.dumps(value), flush=True)
    os._exit(0)
def failure(problem):  # none, if it was built: a library for torch.ops.load_library, no module
    text = f"{type(problem).__name__}: {problem}"
    return "" if "not define module export function" in text else text
"""
_RECORD = """
import runpy, setuptools
from torch.utils import cpp_extension
def record(name, sources, *args, **more):
    flags = more.get("extra_compile_args") or {}
    if not isinstance(flags, dict):
        flags = {"cxx": flags, "nvcc": flags}
    macros = [f"-D{key}" + ("" if value is None else f"={value}")
              for key, value in more.get("define_macros") or ()]
    return {"name": name, "sources": [os.path.abspath(str(one)) for one in sources],
            "cflags": [*macros, *flags.get("cxx", ())], "cuda": [*macros, *flags.get("nvcc", ())],
            "include": [os.path.abspath(str(one)) for one in more.get("include_dirs") or ()]}
cpp_extension.CUDAExtension = cpp_extension.CppExtension = record
from flexops import settings, toolchain
nvcc = toolchain.discover(settings.current()).cuda
cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = str(nvcc.root if nvcc else sys.prefix)
def setup(*args, **more):
    answer([one for one in more.get("ext_modules") or () if isinstance(one, dict)])
setuptools.setup = setup
import distutils.core
distutils.core.setup = setup
sys.argv = ["setup.py", "build_ext"]
sys.path.insert(0, os.getcwd())
runpy.run_path("setup.py", run_name="__main__")
"""
_TORCH = """
from torch.utils import cpp_extension
one = json.loads(os.environ["EXTENSION"])
error = ""
try:
    cpp_extension.load(one["name"].rpartition(".")[2], one["sources"],
                       extra_cflags=one.get("cflags"), extra_cuda_cflags=one.get("cuda"),
                       extra_include_paths=one.get("include"),
                       build_directory=os.environ["FLEXOPS_CACHE_DIR"])
except Exception as problem:
    lines = failure(problem).splitlines()
    error = next((line for line in lines if "error:" in line), (lines or [""])[0])
answer({"reason": error})
"""
_BUILD = """
import contextlib, io
import flexops
one = json.loads(os.environ["EXTENSION"])
name = one["name"].rpartition(".")[2]
notes = io.StringIO()
error = ""
with contextlib.redirect_stderr(notes):
    try:
        flexops.load(name, one["sources"], extra_cflags=one.get("cflags"),
                     extra_cuda_cflags=one.get("cuda"), extra_include_paths=one.get("include"))
    except Exception as problem:
        error = failure(problem)
said = notes.getvalue()
why = next((line for line in said.splitlines() if "nvcc compiles extension" in line), "")
by = "fails" if error else "nvcc" if why else "NVRTC"
answer({"by": by, "reason": error or why.partition("NVRTC does not: ")[2]})
"""


if __name__ == "__main__":
    main()
