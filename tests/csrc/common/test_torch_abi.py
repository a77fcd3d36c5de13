"""Our declarations of torch's C ABI against torch's own: a C++ compiler rejects two that differ,
because functions with C linkage have no overloads.

And the library made of them, which bindings are linked against: all that it offers must be in
torch's, and what it has not is an error.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import completed

from flexops import settings
from flexops.build.describe import catalog, layout
from flexops.build.plan.plan import TORCH_LIBRARY, TORCH_STUB, binding_flags, plan_op
from flexops.toolchain import discovery
from flexops.toolchain.installed_torch import TorchBuild
from flexops.toolchain.model import HostCompiler
from flexops.toolchain.resources import Resources

OURS = "common/torch_abi.h"
TORCHS = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")


@pytest.fixture
def torch(require: Any) -> TorchBuild:
    found = discovery.discover(settings.current(), device="cpu").torch
    assert found is not None
    require(
        found.stable_abi,
        "a torch with the stable ABI",
        "pip install torch==2.13.0",
        "bindings use this torch's C++ headers",
    )
    return found


def compile_both(
    compiler: HostCompiler, torch: TorchBuild, csrc: Path, source: Path
) -> subprocess.CompletedProcess[str]:
    source.write_text("".join(f"#include <{header}>\n" for header in (OURS, *TORCHS)))
    torchs = [
        *(f"-isystem{path}" for path in torch.include_dirs),
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
    ]
    command = [
        compiler.path,
        *binding_flags(torch),
        *torchs,
        f"-std=c++{torch.cxx_standard}",
        f"-I{csrc}",
        "-fsyntax-only",
        source,
    ]
    return completed(command, code=None)


def test_our_declarations_are_torchs(host_compiler, torch, tmp_path):
    result = compile_both(host_compiler, torch, layout.csrc_root(), tmp_path / "both.cpp")
    assert result.returncode == 0, result.stderr


def test_another_declaration_is_rejected(host_compiler, torch, tmp_path):
    changed = tmp_path / OURS
    changed.parent.mkdir()
    text = (layout.csrc_root() / OURS).read_text()
    assert text.count("int32_t non_blocking") == 1
    changed.write_text(text.replace("int32_t non_blocking", "int64_t non_blocking"))
    result = compile_both(host_compiler, torch, tmp_path, tmp_path / "both.cpp")
    assert result.returncode != 0
    assert "aoti_torch_copy_" in result.stderr


def compile_stub(compiler: HostCompiler, directory: Path) -> str:
    """The plan's own step, run in the directory; returns what it is called there."""
    plan = plan_op(
        catalog.find("lion"),
        "cpu",
        discovery.discover(settings.current(), device="cpu"),
        csrc=layout.csrc_root(),
        resources=Resources(1, 2**34),
    )
    (step,) = (step for step in plan.steps if step.output == TORCH_STUB)
    subprocess.run([compiler.path, *step.command[1:]], cwd=directory, check=True)
    return step.output


def link(
    compiler: HostCompiler, directory: Path, function: str, stub: str
) -> subprocess.CompletedProcess[str]:
    (directory / "one.cpp").write_text(
        f'extern "C" int {function}(); int call() {{ return {function}(); }}\n'
    )
    command = [compiler.path, "-shared", "-fPIC", "one.cpp", stub, "-Wl,-z,defs", "-o", "one.so"]
    return completed(command, cwd=directory, code=None)


def test_all_of_the_stub_is_in_torchs_library(host_compiler, torch, tmp_path):
    stub, real = (
        ctypes.CDLL(str(tmp_path / compile_stub(host_compiler, tmp_path))),
        ctypes.CDLL(str(torch.library_dir / TORCH_LIBRARY)),
    )
    names = re.findall(r"\b(\w*torch_\w+)\(", (layout.csrc_root() / OURS).read_text())
    assert len(names) > 30
    assert [name for name in names if not hasattr(stub, name)] == []
    assert [name for name in names if not hasattr(real, name)] == []


@pytest.mark.usefixtures("torch")
def test_an_undeclared_function_is_found_by_the_linker(host_compiler, tmp_path):
    stub = compile_stub(host_compiler, tmp_path)
    assert link(host_compiler, tmp_path, "aoti_torch_copy_", stub).returncode == 0
    assert "libtorch_cpu.so" in (tmp_path / "one.so").read_bytes().decode("latin-1")
    refused = link(host_compiler, tmp_path, "aoti_torch_no_such_function", stub)
    assert refused.returncode != 0
    assert "aoti_torch_no_such_function" in refused.stderr
