"""Our declarations of torch's C ABI against torch's own: a C++ compiler refuses two that differ, because functions with C linkage have no overloads."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from flexops import settings
from flexops.op_builder import layout
from flexops.op_builder.plan import binding_flags
from flexops.toolchain import discovery
from flexops.toolchain.installed_torch import TorchBuild
from flexops.toolchain.model import HostCompiler

OURS = "common/torch_abi.h"
TORCHS = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")


@pytest.fixture
def torch(require: Any) -> TorchBuild:
    found = discovery.discover(settings.current(), device="cpu").torch
    assert found is not None
    require(found.stable_abi, "a torch with the stable ABI", "pip install torch==2.13.0", "bindings use this torch's C++ headers")
    return found


def compile_both(compiler: HostCompiler, torch: TorchBuild, csrc: Path, source: Path) -> subprocess.CompletedProcess[str]:
    source.write_text("".join(f"#include <{header}>\n" for header in (OURS, *TORCHS)))
    command = [compiler.path, *binding_flags(torch), f"-std=c++{torch.cxx_standard}", f"-I{csrc}", "-fsyntax-only", source]
    return subprocess.run(command, text=True, capture_output=True, check=False)


def test_our_declarations_are_torchs(host_compiler: HostCompiler, torch: TorchBuild, tmp_path: Path) -> None:
    result = compile_both(host_compiler, torch, layout.csrc_root(), tmp_path / "both.cpp")
    assert result.returncode == 0, result.stderr


def test_another_declaration_is_refused(host_compiler: HostCompiler, torch: TorchBuild, tmp_path: Path) -> None:
    changed = tmp_path / OURS
    changed.parent.mkdir()
    text = (layout.csrc_root() / OURS).read_text()
    assert text.count("int32_t non_blocking") == 1
    changed.write_text(text.replace("int32_t non_blocking", "int64_t non_blocking"))
    result = compile_both(host_compiler, torch, tmp_path, tmp_path / "both.cpp")
    assert result.returncode != 0
    assert "aoti_torch_copy_" in result.stderr
