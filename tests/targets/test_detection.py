"""Detection: the decision over explicit machines, and what is taken of this one."""

from __future__ import annotations

import pytest

from flexops import targets
from flexops.compute_capability import ComputeCapability
from flexops.targets import Machine, choose, probe
from flexops.toolchain import gpus
from flexops.toolchain.driver import DriverRelease

MATRIX = targets.load()


@pytest.mark.parametrize(("machine", "expected", "reason"), [
    (Machine(), "cpu", "no GPU was found"),
    (Machine(capabilities=("9.0",), driver="580.65.06"), "cu132-sm90",
     "carries CUDA 13.2 (it needs 580)"),
    (Machine(capabilities=("9.0",), driver="595.45.04"), "cu132-sm90", "driver 595.45.04"),
    (Machine(capabilities=("9.0",), driver="580.65.06", python="3.10"), "cu130-sm90", "CUDA 13.0"),
    (Machine(capabilities=("8.9",) * 4, driver="550.54.14"), "cu128-sm89",
     "GPU of capability 8.9; driver 550.54.14 carries CUDA 12.8 (it needs 525)"),
    (Machine(capabilities=("8.0",), driver="525.60.13"), "cu128-sm80", "525"),
    (Machine(capabilities=("8.6",), driver="580.65.06"), "cu132-sm80",
     "no target is for 8.6 itself, and code for 8.0 runs on it"),
    (Machine(capabilities=("10.3",), driver="580.65.06"), "cu132-sm100",
     "code for 10.0 runs on it"),
    (Machine(capabilities=("12.1",), driver="580.65.06"), "cu132-sm120", "code for 12.0"),
    (Machine(capabilities=("8.0", "8.9"), driver="580.65.06"), "cu132-sm80",
     "no target is for 8.9 itself"),
    (Machine(capabilities=("8.0", "9.0"), driver="580.65.06"), "cu132-sm90", "capability 9.0"),
    (Machine(capabilities=("9.0", "8.0", "8.6"), driver="580.65.06"), "cu132-sm80", "8.0, 8.6"),
    (Machine(capabilities=("9.0",)), "cu128-sm90", "the driver is unknown, so it is taken for 525"),
    (Machine(capabilities=("9.0",), driver="470.82.01"), "cpu", "470.82.01 is older than 525"),
    (Machine(capabilities=("7.0",), driver="580.65.06"), "cpu",
     '7.0 (there are 8.0, 8.9, 9.0, 7.5, 10.0, 12.0); `flexops build --arch "7.0"`'),
    (Machine(capabilities=("13.0",), driver="700.10"), "cpu", "capability 13.0"),
    (Machine(capabilities=("[N/A]",), driver="580.65.06"), "cpu", "(none understood)"),
    (Machine(capabilities=("9.0",), driver="580.65.06", python="3.16"), "cpu",
     "has a torch for Python 3.16"),
    (Machine(capabilities=("9.0",), driver="580.65.06", architecture="aarch64"), "cu132-sm90",
     "carries CUDA 13.2"),
    (Machine(capabilities=("9.0",), driver="550.54.14", architecture="aarch64"), "cpu",
     "550.54.14 is older than 580"),
    (Machine(capabilities=("8.0",), driver="580.65.06", architecture="aarch64"), "cpu",
     "there are 9.0, 10.0"),
    (Machine(capabilities=("9.0",), driver="580.65.06", architecture="ppc64le"), "cpu",
     "Linux on x86_64 or aarch64, and this is Linux on ppc64le"),
    (Machine(capabilities=("7.5",), driver="580.65.06"), "cu130-sm75", "GPU of capability 7.5"),
    (Machine(capabilities=("7.5", "8.6"), driver="535.10"), "cu128-sm80", "8.6"),
    (Machine(rocm=("gfx90a", "gfx90a")), "rocm72-gfx90a", "AMD GPU of architecture gfx90a"),
    (Machine(rocm=("gfx90a", "gfx942", "gfx942")), "rocm72-gfx942", "gfx942"),
    (Machine(rocm=("gfx950",)), "cpu", "no target is for an AMD GPU of architecture gfx950"),
    (Machine(rocm=("gfx942",), python="3.9"), "cpu", "has a torch for Python 3.9"),
    (Machine(rocm=("gfx942",), capabilities=("9.0",), driver="580.65"), "cu132-sm90", "9.0"),
    (Machine(rocm=("gfx942",), capabilities=("6.1",), driver="580.65"), "rocm72-gfx942", "gfx942"),
])  # fmt: skip
def test_choice(machine, expected, reason):
    found = choose(MATRIX, machine)
    assert (found.target.id, reason in found.reason) == (expected, True), found.reason


def test_a_newer_target_that_this_python_rules_out_is_named():
    found = choose(MATRIX, Machine(capabilities=("9.0",), driver="595.45.04", python="3.10"))
    assert found.notes == (
        "cu132-sm90 would be newer, but its torch 2.15.0 is for Python 3.11 to 3.15, not 3.10",
    )


def test_gpus_left_out_are_named():
    found = choose(MATRIX, Machine(capabilities=("8.0", "9.0"), driver="595.45.04"))
    assert "GPUs of capability 8.0 are not served by it" in found.notes[0]


def test_problems_of_the_probes_are_passed_on():
    assert choose(MATRIX, Machine(problems=("nvidia-smi is ill",))).notes == ("nvidia-smi is ill",)


def test_every_gpu_target_is_best_for_its_own_gpu_with_some_machine():
    for target in MATRIX.targets:
        if target.accelerator == "cuda":
            only = targets.Matrix((MATRIX.cpu, target))
            machine = Machine(
                capabilities=target.capabilities, driver=target.least_driver, python=target.python
            )
            assert choose(only, machine).target == target


def test_this_machine_is_looked_at_by_the_toolchain(monkeypatch):
    gpu = gpus.Gpu(0, "GPU-a", "NVIDIA L4", ComputeCapability(8, 9), 0)
    here = gpus.Machine(gpus.Driver(DriverRelease.parse("550.54.14"), None), (gpu,))
    monkeypatch.setattr(gpus, "machine", lambda: here)
    monkeypatch.setattr(gpus, "local_gfx_targets", lambda: ("gfx90a",))
    seen = probe.machine("3.12")
    assert (seen.driver, seen.capabilities, seen.rocm) == ("550.54.14", ("8.9",), ("gfx90a",))
    assert (seen.python, seen.problems) == ("3.12", ())
    assert targets.detect(python="3.12").target.id == "cu128-sm89"


def test_a_driver_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr(gpus, "machine", gpus.Machine)
    monkeypatch.setattr(probe, "has_device_node", lambda: True)
    assert "does not answer: nvidia-smi" in targets.detect().notes[0]
