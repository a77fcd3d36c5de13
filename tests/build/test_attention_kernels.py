"""Attention's kernels through NVRTC, those among them that are compiled at their first launch only: a sample of all tilings, and that all can be named."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from flexops import settings, toolchain
from flexops.compute_capability import parse_arch_list
from flexops.op_builder import device_code, layout
from flexops.op_builder.cache import BuildCache
from flexops.toolchain import nvrtc
from flexops.toolchain.context import SearchContext
from flexops.toolchain.installed_torch import package_dirs

CSRC = layout.csrc_root()
HOPPER, AMPERE = ("9.0a",), ("8.0", "8.9")
PLAIN, MODIFIED = "flexops::attention::Plain", "flexops::attention::Modified<true, true, true>"
KERNELS = {
    "forward_hopper": (
        HOPPER,
        *(f"bf16, {tile}, {PLAIN}" for tile in ("64, 64, 3, 128", "96, 96, 2, 128", "128, 128, 2, 128", "128, 128, 2, 176", "256, 256, 2, 80")),
        f"f16, 192, 128, 2, 128, {MODIFIED}",
    ),
    "backward_hopper": (HOPPER, f"bf16, 64, 64, 64, {PLAIN}", f"bf16, 128, 128, 64, {PLAIN}", f"f16, 128, 128, 64, {MODIFIED}"),
    "forward": (AMPERE, f"bf16, 128, 128, 2, 64, {PLAIN}", f"f16, 256, 256, 1, 64, {MODIFIED}"),
    "backward": (AMPERE, f"bf16, 128, 128, 64, 128, 2, {PLAIN}", f"f16, 256, 256, 64, 64, 1, {MODIFIED}"),
    "backward_before": (AMPERE[:1], "bf16, 128"),
    "backward_after": (HOPPER, "bf16, 128, 64"),
    "backward_after_mma": (AMPERE[:1], "f16, 128, 64"),
}


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    """A source that reaches all of the family's headers, as its launcher will."""
    source = tmp_path / "attention_cuda.cpp"
    source.write_text("".join(f'#include "attention/{header.name}"\n' for header in sorted((CSRC / "attention").glob("*.cuh"))))
    return str(source)


@pytest.mark.parametrize("version", [(12, 1), (13, 0)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_compiles(kernel: str, version: tuple[int, int], launcher: str, tmp_path: Path, require: Any) -> None:
    found = {(one.value.version.major, one.value.version.minor): one.value for one in nvrtc.find(SearchContext(site_dirs=package_dirs(()))).usable}
    require(version in found, f"NVRTC {version[0]}.{version[1]}", "run scripts/run_tests.sh, which installs it")
    architectures, *instantiations = KERNELS[kernel]
    plans = [
        device_code.plan_kernel(
            "attention", (launcher,), f"flexops::attention::{kernel}<flexops::{arguments}>", parse_arch_list(architecture)[0], found[version], CSRC
        )
        for architecture in architectures
        for arguments in instantiations
    ]
    jobs = device_code.choose_jobs(toolchain.resources.detect(), settings.current().max_jobs)
    for result in device_code.obtain(plans, BuildCache(tmp_path / "cache"), jobs=jobs, time_limit=120):
        entry = result.require()
        assert f".text.{entry.manifest.symbol}\0".encode() in entry.library.read_bytes()


def test_a_launcher_can_name_them(launcher: str, host_compiler: Any) -> None:
    named = [f"&flexops::attention::{kernel}<flexops::{arguments}>" for kernel, (_, *instantiations) in KERNELS.items() for arguments in instantiations]
    source = Path(launcher)
    source.write_text(source.read_text() + "".join(f"auto* kernel{i} = {name};\n" for i, name in enumerate(named)))
    command = [host_compiler.path, "-std=c++17", "-fsyntax-only", f"-I{CSRC}", launcher]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
