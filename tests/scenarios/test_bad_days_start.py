"""Bad days at the start of a program: a fallback that should have been said, a warm start that
writes, an import that does too much, a broken torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builds import CHILDREN, REPOSITORY, child_environment, copy_csrc, run_child
from processes import completed

from flexops.errors import TorchUnavailableError
from flexops.toolchain.model import HostCompiler

SQUARED = [1.0, 4.0, 9.0]


class Warm:
    """A cache that holds the small op, built beforehand."""

    def __init__(self, folder: Path) -> None:
        self.csrc = copy_csrc(folder)
        self.cache = folder / "cache"
        self.environment = child_environment(FLEXOPS_CACHE_DIR=str(self.cache))
        built = run_child("obtain.py", {"csrc": str(self.csrc), "device": "cpu"}, self.environment)
        assert "error" not in built, built["error"]
        self.library = built["library"]

    def call(self, environment: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
        return run_child(
            "call.py",
            {"csrc": str(self.csrc), "watch": True},
            environment or self.environment,
            **options,
        )


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, host_compiler: HostCompiler) -> Warm:
    assert host_compiler
    return Warm(tmp_path_factory.mktemp("warm"))


# ---- the fallback ----


@pytest.fixture(scope="module")
def no_native(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Calls the op where nothing is cached and nothing may be compiled, under a
    FLEXOPS_FALLBACK."""
    folder = tmp_path_factory.mktemp("cold")
    csrc = copy_csrc(folder)

    def call(fallback: str) -> dict[str, Any]:
        environment = child_environment(
            FLEXOPS_CACHE_DIR=str(folder / "cache"), FLEXOPS_JIT="0", FLEXOPS_FALLBACK=fallback
        )
        result = run_child("call.py", {"csrc": str(csrc)}, environment)
        assert result["backend"] == "reference"
        assert "FLEXOPS_JIT=0" in result["reason"]
        assert result["fix"] == "flexops build doctor"
        assert not (folder / "cache").exists(), "FLEXOPS_JIT=0 makes nothing"
        return result

    return call


def test_fallback_warns_once_by_default(no_native):
    result = no_native("")
    assert result["values"] == SQUARED
    assert len(result["warnings"]) == 1
    for words in (
        "plain PyTorch",
        "FLEXOPS_JIT=0",
        "flexops build doctor",
        "FLEXOPS_FALLBACK=allow",
    ):
        assert words in result["warnings"][0]


def test_fallback_allowed_is_silent(no_native):
    result = no_native("allow")
    assert (result["values"], result["warnings"]) == (SQUARED, [])


def test_fallback_forbidden_raises_with_reason_and_fix(no_native):
    result = no_native("forbid")
    assert result["kind"] == "NativeUnavailableError"
    assert "values" not in result
    for words in ("FLEXOPS_FALLBACK=forbid", "FLEXOPS_JIT=0", "flexops build doctor"):
        assert words in result["error"]


# ---- the warm start ----


def test_a_warm_start_starts_nothing_locks_nothing_and_writes_nothing(warm):
    """Seen by Python's audit hook. The import of flexops likewise, and it leaves CUDA alone.

    What plans, compiles and supplies kernels of a GPU is not even imported.
    """
    before = {path: path.stat().st_mtime_ns for path in warm.cache.rglob("*")}
    result = warm.call({**warm.environment, "FLEXOPS_FALLBACK": "forbid"})
    assert (result["values"], result["backend"], result["path"]) == (SQUARED, "jit", warm.library)
    assert result["call_events"] == []
    assert result["import_events"] == []
    assert result["cuda"] is False
    stages = tuple(f"flexops.build.{one}." for one in ("plan", "compile", "load"))
    assert sorted(name for name in result["modules"] if name.startswith(stages)) == [
        "flexops.build.load.freshness",
        "flexops.build.load.loader",
        "flexops.build.plan.cache_key",
    ]
    assert {path: path.stat().st_mtime_ns for path in warm.cache.rglob("*")} == before


def test_a_warm_start_as_the_kernel_sees_it(warm, tmp_path, require):
    usable = (
        shutil.which("strace")
        and subprocess.run(
            ["strace", "-o", "/dev/null", "true"], capture_output=True, check=False
        ).returncode
        == 0
    )
    require(usable, "strace (and the right to trace)", "apt-get install strace")
    log = tmp_path / "strace.log"
    calls = "trace=%process,%file,flock,fcntl,ftruncate,fsync,fdatasync,fallocate"
    warm.call(prefix=("strace", "-f", "-qq", "-s", "300", "-o", str(log), "-e", calls))
    traced = log.read_text(errors="replace")
    between = traced.partition("/flexops/begin")[2].partition("/flexops/end")[0].splitlines()
    assert any(warm.library in line for line in between), "the library was opened in between"
    assert [line for line in between if not harmless(line)] == []


def harmless(line: str) -> bool:
    """Whether a system call starts no process, takes no lock and changes no file."""
    match = re.search(r"(\w+)\(", line)
    if match is None:
        return True
    name = match[1]
    if name in ("open", "openat", "openat2"):
        return not re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC", line)
    if name in ("clone", "clone3"):
        return "CLONE_THREAD" in line
    if name == "fcntl":
        return not re.search(r"F_(OFD_)?SETLKW?", line)
    looking = ("stat", "fstat", "lstat", "newfstatat", "statx", "statfs", "access", "faccessat",
        "faccessat2", "readlink", "readlinkat", "getcwd")  # fmt: skip
    return name in (*looking, "exit", "exit_group", "getxattr", "chdir")


def test_a_warm_start_from_a_read_only_directory(warm, tmp_path, require):
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")
        require(shutil.which("setpriv"), "setpriv", "apt-get install util-linux")
    copy = tmp_path / "cache"
    shutil.copytree(warm.cache, copy)
    directories = [copy, *(path for path in copy.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o555)
    try:
        result = warm.call({**warm.environment, "FLEXOPS_CACHE_DIR": str(copy)}, prefix=prefix)
        assert (result["values"], result["backend"]) == (SQUARED, "jit")
        assert result["path"].startswith(str(copy))
        assert result["call_events"] == []
    finally:
        for path in directories:
            path.chmod(0o755)


def test_fork_after_import(warm):
    """Data loaders fork. What importing flexops did must survive that, and the child may be the
    first to call an op."""
    code = """
import os, sys, json
sys.path.insert(0, sys.argv[2])
sys.argv[1] = json.dumps({"csrc": sys.argv[1]})
import call, torch, flexops
call.define()
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if call.call()["values"] == [1.0, 4.0, 9.0] else 1)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
assert call.call()["backend"] == "jit"
"""
    children = str(CHILDREN)
    done = run(warm.environment, "-c", code, str(warm.csrc), children)
    assert done.returncode == 0, done.stderr


# ---- a broken torch ----

BROKEN = {
    "missing library": (
        "raise ImportError('libcudart.so.12: cannot open shared object file: No such file or"
        " directory')"
    ),
    "library that does not match": "raise OSError('/x/libc10.so: undefined symbol: _ZN3c10')",
    "half an upgrade": "raise AttributeError(\"module 'torch' has no attribute '_C'\")",
    "no torch": "",
}


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """An environment whose torch cannot be imported."""
    text = BROKEN[request.param]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        text or "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    return child_environment(PYTHONPATH=path, FLEXOPS_CACHE_DIR=str(tmp_path / "cache"))


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, *arguments], env=environment, code=None)


def test_flexops_imports_and_says_what_is_wrong_when_it_is_used(broken):
    code = """
import flexops
print(flexops.__version__, flexops.status()[0].backend)
for use in (lambda: flexops.adam_, lambda: flexops.optim, lambda: flexops.quantize):
    try:
        use()
    except flexops.errors.TorchUnavailableError as error:
        assert isinstance(error, ImportError)
        print(str(error))
"""
    done = run(broken, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("flexops doctor") == 3
    assert "Traceback" not in done.stderr


def test_a_fault_of_flexops_is_not_blamed_on_torch(tmp_path):
    code = """
import sys
sys.modules["flexops.ops._declared"] = None
import flexops
"""
    done = run(child_environment(FLEXOPS_CACHE_DIR=str(tmp_path)), "-c", code)
    assert done.returncode != 0
    assert "flexops.ops._declared" in done.stderr


def test_the_command_line_works_without_torch(broken):
    done = run(broken, "-m", "flexops", "cache", "info", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["entries"] == 0
    assert run(broken, "-m", "flexops", "target", "list").returncode == 0


@pytest.mark.parametrize("command", ["patch llama", "profile norm", "bench run cases.py"])
def test_a_command_that_needs_torch_says_so(broken, command):
    done = run(broken, "-m", "flexops", *command.split())
    assert done.returncode == TorchUnavailableError.exit_code, done.stderr
    assert done.stderr.startswith("flexops: this command needs torch, which cannot be imported")
    assert "fix: flexops doctor" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_reports_a_broken_torch(broken):
    done = run(broken, "-m", "flexops", "doctor", "--json")
    report = json.loads(done.stdout)
    assert report["status"] == "fail"
    assert done.returncode == 1
    wrong = [
        finding
        for finding in report["findings"]
        if "torch" in finding["id"] and finding["status"] == "fail"
    ]
    assert wrong
    assert all(finding["fix"] for finding in wrong)
