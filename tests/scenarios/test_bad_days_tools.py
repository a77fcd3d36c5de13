"""Bad days: compilers that are absent or crash; sources that do not compile; another torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builds import child_environment, copy_csrc, run_child

SQUARED = [1.0, 4.0, 9.0]


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    return copy_csrc(tmp_path)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return child_environment(FLEXOPS_CACHE_DIR=str(tmp_path / "cache"))


def build(
    csrc: Path, environment: dict[str, str], device: str = "cpu", **request: Any
) -> dict[str, Any]:
    return run_child("obtain.py", {"csrc": str(csrc), "device": device, **request}, environment)


def call(csrc: Path, environment: dict[str, str], **request: Any) -> dict[str, Any]:
    return run_child("call.py", {"csrc": str(csrc), **request}, environment)


def assert_reference(result: dict[str, Any], *reasons: str) -> None:
    """The op runs as plain PyTorch, says so once, and says why and what to do."""
    assert result["values"] == SQUARED
    assert result["backend"] == "reference"
    assert len(result["warnings"]) == 1
    for reason in reasons:
        assert reason in result["reason"]
        assert reason in result["warnings"][0]
    assert result["fix"]
    assert result["fix"] in result["warnings"][0]


# ---- compilers ----


def test_no_compiler_at_all(csrc, environment, tmp_path):
    (tmp_path / "empty").mkdir()
    bare = {**environment, "PATH": str(tmp_path / "empty")}
    for name in ("CXX", "CC", "CONDA_PREFIX"):
        bare.pop(name, None)
    assert_reference(call(csrc, bare), "compiler")
    result = build(csrc, bare)
    assert result["kind"] == "ToolchainError"
    assert result["fix"]


def test_a_machine_without_compilers_uses_what_is_in_the_cache(
    csrc, environment, tmp_path, host_compiler
):
    assert host_compiler
    library = build(csrc, environment)["library"]
    (tmp_path / "empty").mkdir()
    result = call(
        csrc, {**environment, "PATH": str(tmp_path / "empty"), "FLEXOPS_FALLBACK": "forbid"}
    )
    assert result["values"] == SQUARED
    assert (result["backend"], result["path"]) == ("jit", library)


def test_a_compiler_that_crashes(csrc, environment, tmp_path, host_compiler):
    broken = tmp_path / "g++"
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) kill -9 $$;; esac\nexec "{host_compiler.path}" "$@"\n'
    )
    broken.chmod(0o755)
    result = build(csrc, {**environment, "CXX": str(broken), "FLEXOPS_COMPILER_LAUNCHER": "none"})
    assert result["kind"] == "CompileError"
    assert result["fix"]
    assert Path(result["log"]).exists()


# ---- architectures ----


def test_no_list_and_no_gpu(csrc, environment, nvcc_toolkit):
    """torch's cpp_extension raises IndexError here. We compile for what people have."""
    assert nvcc_toolkit
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = build(csrc, environment, "cuda")
    assert "error" not in result, result["error"]
    assert len(result["architectures"]) >= 5
    assert "9.0" in result["architectures"]
    assert result["architectures"][-1].endswith("+PTX")


# ---- sources ----


def test_a_source_with_an_error(csrc, environment, host_compiler):
    assert host_compiler
    source = csrc / "doctor" / "doctor_cpu.cpp"
    good = source.read_text()
    source.write_text(good + "\nint wrong = nothing_of_that_name;\n")
    result = build(csrc, environment)
    assert result["kind"] == "CompileError"
    assert f"doctor_cpu.cpp:{len(good.splitlines()) + 2}" in result["error"]
    assert "nothing_of_that_name" in result["error"]
    assert result["fix"]
    assert "nothing_of_that_name" in Path(result["log"]).read_text()
    assert_reference(call(csrc, environment), "doctor_cpu.cpp", "nothing_of_that_name")
    forbidden = call(csrc, {**environment, "FLEXOPS_FALLBACK": "forbid"})
    assert forbidden["kind"] == "NativeUnavailableError"
    assert "nothing_of_that_name" in forbidden["error"]
    source.write_text(good)
    fixed = call(csrc, environment)
    assert (fixed["values"], fixed["backend"]) == (SQUARED, "jit")


# ---- another torch ----


def test_torch_changes_under_the_cache(csrc, environment, host_compiler):
    """A library of the stable ABI serves the next torch; for a torch without it, it is rejected by
    its manifest, not by an undefined symbol."""
    assert host_compiler
    library = build(csrc, environment)["library"]
    environment |= {"FLEXOPS_JIT": "0"}
    later = call(csrc, environment, abi="2.99.0")
    assert (later["values"], later["backend"], later["path"]) == (SQUARED, "jit", library)
    assert_reference(call(csrc, environment, abi="2.10.0"), "torch ABI stable-2.11", "torch-2.10")


def test_a_source_that_is_gone(csrc, environment):
    (csrc / "doctor" / "doctor_cpu.cpp").unlink()
    result = call(csrc, environment)
    assert result["values"] == SQUARED
    assert "doctor_cpu.cpp" in result["reason"]
