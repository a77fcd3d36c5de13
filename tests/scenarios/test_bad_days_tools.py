"""Bad days: compilers that are absent, of the wrong version, or asked for what they cannot do;
sources that do not compile; another torch."""

from __future__ import annotations

import json
import os
import shutil
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


# ---- compilers -----------------------------------------------------------------------------------


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


def fake_toolkit(folder: Path, version: str) -> Path:
    """A directory with an nvcc that says it is of that version, and does nothing else."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    release = version.rpartition(".")[0]
    said = (
        f"nvcc: NVIDIA (R) Cuda compiler driver\\nCuda compilation tools, release {release},"
        f" V{version}\\nBuild cuda_{release}.r{release}/compiler.1_0"
    )
    nvcc.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) printf "{said}\\n"; exit 0;; *dryrun*) echo "#$'
        f' TOP={folder}" >&2; exit 0;; esac\nexit 99\n'
    )
    nvcc.chmod(0o755)
    for name in (
        "include/cuda_runtime.h",
        "include/cuda_runtime_api.h",
        "lib64/libcudart_static.a",
        "lib64/libcudart.so",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def pretended_torch(folder: Path, cuda: str) -> Path:
    """A site directory whose torch is this environment's, but says that it was built for that
    CUDA."""
    import importlib.util

    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    real, mine = Path(found.origin).parent, folder / "torch"
    mine.mkdir(parents=True)
    for name in ("include", "lib"):
        (mine / name).symlink_to(real / name)
    version = next(
        line
        for line in (real / "version.py").read_text().splitlines()
        if line.startswith("__version__")
    )
    (mine / "version.py").write_text(f"{version}\ncuda = '{cuda}'\nhip = None\ngit_version = 'x'\n")
    return folder


@pytest.mark.parametrize("how", ["PATH", "CUDA_HOME"])
def test_an_nvcc_of_another_major_comes_first(csrc, environment, tmp_path, nvcc_toolkit, how):
    other = fake_toolkit(tmp_path / "cuda-11.8", "11.8.89")
    site = pretended_torch(tmp_path / "site", nvcc_toolkit.version.major_minor)
    environment["PYTHONPATH"] = os.pathsep.join([str(site), environment["PYTHONPATH"]])
    if how == "PATH":
        environment["PATH"] = os.pathsep.join([str(other / "bin"), environment["PATH"]])
    else:
        environment["CUDA_HOME"] = str(other)
    result = build(csrc, environment, "cuda", arch="9.0")
    assert "error" not in result, result["error"]
    assert result["compilers"] == [f"NVRTC {nvcc_toolkit.version.major_minor}"]


def test_only_an_nvcc_of_another_major(csrc, environment, tmp_path):
    """What was found and why it was rejected is said, and where the right one comes from."""
    site = pretended_torch(tmp_path / "site", "99.0")
    environment["PYTHONPATH"] = os.pathsep.join([str(site), environment["PYTHONPATH"]])
    other = fake_toolkit(tmp_path / "cuda-11.8", "11.8.89")
    environment["PATH"] = os.pathsep.join([str(other / "bin"), environment["PATH"]])
    result = build(csrc, environment, "cuda", arch="9.0")
    assert result["kind"] == "ToolchainError"
    assert str(other) in result["error"]
    assert "99" in result["error"]
    assert result["fix"]


# ---- architectures -------------------------------------------------------------------------------


def test_architectures_that_this_compiler_cannot_emit(csrc, environment, nvcc_toolkit):
    too_old = build(
        csrc, environment, "cuda", arch="5.2" if nvcc_toolkit.version.major >= 13 else "3.0"
    )
    assert too_old["kind"] == "ArchitectureError"
    assert "TORCH_CUDA_ARCH_LIST" in too_old["fix"]
    # the CUDA version, most likely; silently it would be PTX of something else
    no_gpu = build(csrc, environment, "cuda", arch="13.0")
    assert no_gpu["kind"] == "ArchitectureError"
    assert "no GPU of capability 13.0" in no_gpu["error"]


def test_some_of_the_architectures_asked_for(csrc, environment, nvcc_toolkit):
    assert nvcc_toolkit
    environment["TORCH_CUDA_ARCH_LIST"] = "3.5;9.0;"
    assert build(csrc, environment, "cuda")["architectures"] == ["9.0"]


def test_nonsense_in_the_list(csrc, environment, nvcc_toolkit):
    assert nvcc_toolkit
    result = build(csrc, environment, "cuda", arch="9.0;hoper")
    assert result["kind"] == "ArchitectureError"
    assert "hoper" in result["error"]


def test_no_list_and_no_gpu(csrc, environment, nvcc_toolkit):
    """torch's cpp_extension raises IndexError here. We compile for what people have."""
    assert nvcc_toolkit
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = build(csrc, environment, "cuda")
    assert "error" not in result, result["error"]
    assert len(result["architectures"]) >= 5
    assert "9.0" in result["architectures"]
    assert result["architectures"][-1].endswith("+PTX")


# ---- sources -------------------------------------------------------------------------------------


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


def test_a_header_edit_is_noticed(csrc, environment, host_compiler):
    assert host_compiler
    first = build(csrc, environment)
    assert "<csrc>/common/tensor_view.h" in first["headers"]
    header = csrc / "common" / "tensor_view.h"
    original = header.read_text()
    header.write_text(original + "// edited\n")
    os.utime(header, (1, 1))  # by its content, not its date
    second = build(csrc, environment)
    assert not second["cached"]
    assert second["library"] != first["library"]
    header.write_text(original)
    third = build(csrc, environment)
    assert third["cached"]
    assert third["library"] == first["library"]


def test_a_moved_checkout_hits(csrc, environment, tmp_path, host_compiler):
    assert host_compiler
    first = build(csrc, environment)
    shutil.move(csrc, tmp_path / "elsewhere")
    assert build(tmp_path / "elsewhere", environment) == {**first, "cached": True}


# ---- another torch -------------------------------------------------------------------------------


def test_torch_changes_under_the_cache(csrc, environment, host_compiler):
    """A library of the stable ABI serves the next torch; for a torch without it, it is rejected by
    its manifest, not by an undefined symbol."""
    assert host_compiler
    library = build(csrc, environment)["library"]
    environment |= {"FLEXOPS_JIT": "0"}
    later = call(csrc, environment, abi="2.99.0")
    assert (later["values"], later["backend"], later["path"]) == (SQUARED, "jit", library)
    assert_reference(call(csrc, environment, abi="2.10.0"), "torch ABI stable-2.11", "torch-2.10")


def test_a_library_of_an_older_torch_is_not_opened(csrc, environment, host_compiler):
    assert host_compiler
    library = Path(build(csrc, environment)["library"])
    manifest = json.loads(library.with_name("manifest.json").read_text())
    library.with_name("manifest.json").write_text(
        json.dumps({**manifest, "torch_abi": "torch-2.4-cxx11abi0-cpu"})
    )
    result = call(csrc, {**environment, "FLEXOPS_JIT": "0"})
    assert_reference(result, "torch-2.4-cxx11abi0-cpu")
    built = call(csrc, environment)
    assert (built["values"], built["backend"]) == (SQUARED, "jit")


def test_a_source_that_is_gone(csrc, environment):
    (csrc / "doctor" / "doctor_cpu.cpp").unlink()
    result = call(csrc, environment)
    assert result["values"] == SQUARED
    assert "doctor_cpu.cpp" in result["reason"]
