"""Detection: the decision over explicit machines, and the readers of what the probes say."""

from __future__ import annotations

import json

import pytest

from flexops import targets
from flexops.targets import Machine, __main__, choose, probe

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


def test_nvidia_smi_is_read_line_by_line():
    assert probe.read_smi("8.9, 580.65.06\n9.0, 580.65.06\n") == ("580.65.06", ("8.9", "9.0"), ())
    driver, capabilities, problems = probe.read_smi("[N/A], 580.65.06\n8.0, 580.65.06\n")
    assert (driver, capabilities) == ("580.65.06", ("8.0",))
    assert problems == ("nvidia-smi says '[N/A], 580.65.06'",)


def test_the_kernel_s_view_of_amd_gpus():
    node = "simd_count {}\ngfx_target_version {}\nvendor_id 4098\n"
    assert probe.read_kfd(node.format(304, version) for version in (0, 90010, 90402, 110000)) == (
        "gfx90a",
        "gfx942",
        "gfx1100",
    )
    assert probe.read_kfd(["", "nonsense"]) == ()


@pytest.mark.parametrize(
    ("script", "driver", "capabilities", "problem"),
    [
        ("echo 8.9, 580.65.06", "580.65.06", ("8.9",), ""),
        ("echo No devices were found; exit 6", "", (), "gives no answer"),
        ("echo NVIDIA-SMI has failed; exit 9", "", (), "NVIDIA-SMI has failed"),
    ],
)
def test_a_real_nvidia_smi_process(tmp_path, monkeypatch, script, driver, capabilities, problem):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probe, "_DRIVER_FILE", str(tmp_path / "absent"))
    found = probe.nvidia()
    assert found[:2] == (driver, capabilities)
    assert problem in "".join(found[2])


def test_a_driver_without_nvidia_smi_is_said(tmp_path, monkeypatch):
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probe, "_SMI_PLACES", ())
    monkeypatch.setattr(probe, "_DRIVER_FILE", str(version))
    assert probe.nvidia() == (
        "535.129.03",
        (),
        ("an NVIDIA driver is loaded, but nvidia-smi, which names the GPUs, is not found",),
    )


def _fake(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(probe, "machine", lambda _python: machine)


def test_scripts_get_the_id_first(monkeypatch, capsys):
    _fake(monkeypatch, Machine(capabilities=("8.9",), driver="550.1", problems=("odd",)))
    assert __main__.main(["detect"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cu128-sm89"
    assert lines[2] == "note: odd"
    assert __main__.main(["detect", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "cu128-sm89"


def test_scripts_get_requirements_and_fields(capsys):
    assert __main__.main(["requirements", "cu130-sm90"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == list(MATRIX.find("cu130-sm90").requirements)
    assert __main__.main(["show", "cu130-sm90", "--field", "host_compiler"]) == 0
    assert capsys.readouterr().out == "11.3 15\n"
    assert __main__.main(["show", "nothing"]) == 3
    assert "there is no target called 'nothing'" in capsys.readouterr().err
    assert __main__.main(["show", "cpu", "--field", "colour"]) == 3
    assert "has no field 'colour'" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "python"), [("3.11.7", "3.11"), ("3.12", "3.12"), ("", "")])
def test_the_python_of_the_environment(monkeypatch, text, python):
    asked: list[str | None] = []

    def machine(python: str | None) -> Machine:
        asked.append(python)
        return Machine()

    monkeypatch.setattr(probe, "machine", machine)
    assert __main__.main(["detect", "--python", text]) == 0
    assert asked == [python]


def test_a_python_that_is_no_version_is_rejected(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["detect", "--python", "new"])
    assert "'new' is not a version such as 3.12" in capsys.readouterr().err
