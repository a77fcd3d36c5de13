"""doctor as people run it: real processes, real compilers, and machines on which something is
missing."""

from __future__ import annotations

import json
import os
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from processes import completed

import flexops
from flexops.build.describe import catalog

HOME = str(Path(flexops.__file__).parents[1])


def doctor(
    *arguments: str, python: str = sys.executable, **environment: str
) -> tuple[int, dict[str, Any]]:
    """Run ``python -m flexops.doctor --json``; the exit status and the document."""
    variables = {**os.environ, "PYTHONPATH": HOME, **environment}
    done = completed(
        [python, "-m", "flexops.doctor", "--json", *arguments], env=variables, code=None
    )
    document = json.loads(done.stdout)
    assert list(document) == ["status", "target", "findings", "ops"], done.stderr
    return done.returncode, document


def finding(document: dict[str, Any], name: str) -> dict[str, str]:
    return next(one for one in document["findings"] if one["id"] == name)


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python with nothing but the standard library: no torch, no rich, no typer."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return str(tmp_path / "bare" / "bin" / "python")


@pytest.mark.extra
@pytest.mark.usefixtures("host_compiler")
def test_a_machine_that_works(cache_dir):
    status, document = doctor("--target", "cpu")
    assert (status, document["target"]) == (0, "cpu"), document
    trial = finding(document, "build-cpu")
    assert trial["status"] == "ok"
    assert "built in" in trial["found"]
    assert "loaded again in" in trial["found"]
    on_cpu = [op for op in document["ops"] if op["device"] == "cpu"]
    assert [op["name"] for op in on_cpu] == [
        spec.name for spec in catalog.CATALOG if "cpu" in spec.devices
    ]
    assert all(op["backend"] == "jit" and op["max_error"] < 1e-4 for op in on_cpu), on_cpu
    assert finding(document, "target-libraries")["status"] in ("ok", "warn")
    assert not list((cache_dir / ".tmp").glob("doctor-*"))  # it tidies up


def test_without_torch_everything_else_is_reported(bare_python, tmp_path):
    status, document = doctor(python=bare_python, FLEXOPS_CACHE_DIR=str(tmp_path / "cache"))
    assert (status, document["status"], document["ops"]) == (1, "fail", [])
    torch = finding(document, "torch")
    assert (torch["status"], "pip install torch" in torch["fix"]) == ("fail", True)
    assert finding(document, "platform")["status"] == "ok"
    assert finding(document, "cache")["status"] == "ok"
    assert "torch cannot be imported" in finding(document, "build-cpu")["found"]


def test_text_without_torch_and_rich(bare_python, tmp_path):
    environment = {
        "PYTHONPATH": HOME,
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "LC_ALL": "C",
    }
    done = completed([bare_python, "-m", "flexops.doctor"], env=environment, code=1)
    assert done.stdout.splitlines()[-1].startswith("fail: ")
    assert "fix: " in done.stdout
    assert done.stderr == ""


def test_a_torch_that_crashes_on_import(bare_python, tmp_path):
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text(
        "import os; os.kill(os.getpid(), 11)"
    )
    status, document = doctor(
        python=bare_python,
        PYTHONPATH=f"{HOME}{os.pathsep}{tmp_path / 'broken'}",
        FLEXOPS_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert status == 1
    assert "SIGSEGV" in finding(document, "torch")["found"]


def test_no_compiler_and_no_libraries(tmp_path):
    status, document = doctor(PATH=str(tmp_path), FLEXOPS_CACHE_DIR=str(tmp_path / "cache"), CXX="")
    compiler = finding(document, "host-compiler")
    assert (status, compiler["status"]) == (1, "fail")
    assert compiler["fix"]
    assert all(op["backend"] == "reference" and op["max_error"] == 0.0 for op in document["ops"])
    assert finding(document, "op-adam-cpu")["status"] == "warn"
    assert "not tried" in finding(document, "build-cpu")["found"]


@pytest.mark.extra  # tests/doctor/test_checks.py judges such a fact
@pytest.mark.usefixtures("host_compiler")
def test_a_compiler_that_fails_is_a_finding_with_cause_and_fix(tmp_path):
    """It answers when it is asked for its version, and has no memory when it compiles."""
    fake = tmp_path / "bin" / "g++"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\ncase "$*" in -v*) exec /usr/bin/g++ -v;; esac\necho "virtual memory exhausted:'
        ' Cannot allocate memory" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    status, document = doctor(
        CXX=str(fake), FLEXOPS_CACHE_DIR=str(tmp_path / "cache"), FLEXOPS_COMPILER_LAUNCHER="none"
    )
    trial = finding(document, "build-cpu")
    assert (status, trial["status"]) == (1, "fail")
    assert "ran out of memory" in trial["found"]
    assert trial["fix"] == "export MAX_JOBS=1"


@pytest.mark.extra
def test_a_setting_that_is_not_understood(tmp_path):
    status, document = doctor(
        FLEXOPS_FALLBACK="perhaps", FLEXOPS_JIT="0", FLEXOPS_CACHE_DIR=str(tmp_path / "cache")
    )
    assert status == 1
    assert "FLEXOPS_FALLBACK" in finding(document, "settings")["found"]
    assert finding(document, "platform")["status"] == "ok"


def test_an_unknown_target(bare_python, tmp_path):
    status, document = doctor(
        "--target", "cu999", python=bare_python, FLEXOPS_CACHE_DIR=str(tmp_path / "cache")
    )
    assert (status, document["target"]) == (1, "cu999")
    assert "flexops target list" in finding(document, "target")["fix"]
