"""Which facts doctor's checks get, and what becomes of those that are not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flexops import targets
from flexops.build.describe.catalog import CATALOG
from flexops.doctor.facts import (
    CacheFact,
    Facts,
    Gpu,
    GpuFact,
    LibraryFact,
    OpTrial,
    PythonFact,
    SettingsFact,
    TargetFact,
    TorchFact,
    Unknown,
)
from flexops.doctor.finding import Finding
from flexops.doctor.judgement import judge
from flexops.settings import Settings
from flexops.toolchain.model import Toolchain
from flexops.toolchain.select import Choice

UNKNOWN = Unknown("not looked at")
NOTHING = Facts(*[UNKNOWN] * 15, builds=UNKNOWN, ops=UNKNOWN)  # type: ignore[arg-type, misc]
NO_TOOLS = Toolchain(torch=None)
CPU_TORCH = TorchFact("ok", version="2.13.0+cpu")
CUDA_TORCH = TorchFact("ok", version="2.14.1+cu130", cuda="13.0", gpu_count=1)
HIP_TORCH = TorchFact("ok", version="2.13.0+rocm7.2", hip="7.2")
NVIDIA, AMD = Gpu("NVIDIA H200", "9.0"), Gpu("AMD MI300X", "gfx942", vendor="amd")
OF_CPU, OF_CUDA = (
    tuple(LibraryFact(one.name, device, "aot") for one in CATALOG if device in one.devices)
    for device in ("cpu", "cuda")
)


def chosen(**environ: str) -> SettingsFact:
    return SettingsFact(Settings.from_environ({"HOME": "/home/user", **environ}))


def finding(name: str, **changes: object) -> Finding:
    """The first of that name."""
    facts = replace(NOTHING, **changes)  # type: ignore[arg-type]
    return next(
        one for section in judge(facts) for one in section.findings if one.id.startswith(name)
    )


@pytest.mark.parametrize(
    ("name", "status"),
    [("torch", "fail"), ("build", "fail"), ("op", "fail"), ("cache", "warn"), ("ninja", "warn")],
)
def test_what_is_not_known_is_a_failure_where_it_decides(name, status):
    found = finding(name)
    assert (found.id, found.status) == (name, status)
    assert found.found == "could not be looked at: not looked at"
    assert f"the {name} check of flexops" in found.fix


def test_sections_have_their_order_and_none_is_empty():
    titles = [section.title for section in judge(NOTHING)]
    assert titles == ["machine", "torch", "tools", "building", "operators", "target"]
    nothing_asked = replace(NOTHING, target=TargetFact(None), unregistered=(), ops=(), builds=())
    assert all(section.findings for section in judge(nothing_asked))
    assert "operators" not in [section.title for section in judge(nothing_asked)]


@pytest.mark.parametrize(
    ("libraries", "gpus", "torch", "needed"),
    [
        (OF_CPU, (), CPU_TORCH, False),
        (OF_CPU[1:], (), CPU_TORCH, True),
        ((replace(OF_CPU[0], refusal="another torch's"), *OF_CPU[1:]), (), CPU_TORCH, True),
        (UNKNOWN, (), CPU_TORCH, True),
        (OF_CPU, (NVIDIA,), CUDA_TORCH, True),
        (OF_CPU + OF_CUDA, (NVIDIA,), CUDA_TORCH, False),
        (OF_CPU, (AMD,), HIP_TORCH, True),
        # torch reaches no such GPU
        (OF_CPU, (NVIDIA,), CPU_TORCH, False),
        (OF_CPU, (AMD,), CUDA_TORCH, False),
        (OF_CPU, (NVIDIA,), HIP_TORCH, False),
        (OF_CPU, (NVIDIA,), UNKNOWN, False),
    ],
)
def test_tools_are_required_where_something_has_to_be_compiled(libraries, gpus, torch, needed):
    facts = {
        "libraries": libraries, "gpu": GpuFact(gpus), "torch": torch, "cpu_tools": NO_TOOLS,
        "cuda_tools": NO_TOOLS,
    }  # fmt: skip
    cache = CacheFact(Path("/cache"), True, unwritable="read-only")
    for name in ("host-compiler", "ninja"):
        here = finding(name, **facts, settings=chosen())
        assert here.status == ("fail" if needed else "ok"), name
        here = finding(name, **facts, settings=chosen(FLEXOPS_JIT="0"))
        assert here.status == ("warn" if needed else "ok"), name
    here = finding("cache", **facts, settings=chosen(), cache=cache)
    assert here.status == ("fail" if needed else "warn")
    here = finding("cache", **facts, settings=chosen(FLEXOPS_JIT="0"), cache=cache)
    assert here.status == "warn"


def test_what_an_operator_does_is_judged_by_the_fallback_that_is_set():
    trial = OpTrial("adam", "cpu", "reference", reason="no compiler", fix="apt-get install g++")
    assert finding("op-adam", ops=(trial,)).status == "warn"
    assert finding("op-adam", ops=(trial,), settings=chosen()).status == "warn"
    forbidden = chosen(FLEXOPS_FALLBACK="forbid")
    assert finding("op-adam", ops=(trial,), settings=forbidden).status == "fail"


@pytest.mark.parametrize(
    ("row", "pins"),
    [
        ("cpu", ["torch", "python", "compiler", "libraries"]),
        (
            "cu130-sm90",
            ["torch", "python", "toolkit", "compiler", "driver", "architectures", "libraries"],
        ),
        (
            "rocm72-gfx942",
            ["torch", "python", "toolkit", "compiler", "architectures", "libraries"],
        ),
    ],
)
def test_a_rows_pins_are_judged_where_one_was_asked_for(row, pins):
    asked = TargetFact(row, targets.load().find(row))
    facts = replace(
        NOTHING, target=asked, torch=CPU_TORCH, libraries=OF_CPU, cpu_tools=NO_TOOLS,
        cuda_tools=NO_TOOLS, gpu=GpuFact(),
        settings=chosen(TORCH_CUDA_ARCH_LIST="8.9", PYTORCH_ROCM_ARCH="gfx90a"),
        device_compiler=Choice(None, (), (), ()),
    )  # fmt: skip
    python = PythonFact((3, 12, 1), "/venv/bin/python", "venv", True)
    found = judge(replace(facts, python=python))[-1].findings
    assert [one.id for one in found] == ["target", *(f"target-{one}" for one in pins)]
    said = {one.id: one.found for one in found}
    asked_for = {"cu": "TORCH_CUDA_ARCH_LIST=8.9", "ro": "PYTORCH_ROCM_ARCH=gfx90a"}
    assert said.get("target-architectures") == asked_for.get(row[:2])
    assert ("are compiled" in said["target-compiler"]) == (row == "cpu")
    assert ("muon" in said["target-libraries"]) == (row != "cpu"), "which has no kernels for CPUs"
    found = judge(facts)[-1].findings
    assert [one.id for one in found] == ["target", "target-pins"]
    assert found[1].found.startswith("could not be looked at")
    nothing = replace(facts, target=TargetFact(None))
    assert [one.id for one in judge(nothing)[-1].findings] == ["target"]
