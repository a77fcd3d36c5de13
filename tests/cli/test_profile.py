"""``flexops bench run``, ``profile`` and ``sanitize``: real runs on the CPU; NVIDIA's tools stood
in for by scripts that answer in their format."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import flexops_command

from flexops.bench import own, timing
from flexops.bench.profile_child import kernel
from flexops.errors import FlexopsError, ToolchainError

CASES = """
import torch
from flexops.bench import case

def cases(setup):
    x = torch.randn(1000)
    yield case("scale float32 1000", {"twice": lambda: x * 2, "sum": lambda: x + x}, bytes=2 * x.nbytes)
    a = torch.randn(64, 64)
    yield case("product 64", {"matmul": lambda: a @ a}, flops=2 * 64**3, measure="call")
"""


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "scale_cases.py"
    file.write_text(CASES)
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(own, "MATRIX_SIZE", {"cpu": 128})
    return file


def run(*arguments: str) -> str:
    done = flexops_command(*arguments, catch_exceptions=True)
    assert done.exit_code == 0, f"{done.output}\n{done.exception}"
    return done.stdout


def test_own_cases_as_fractions_of_the_same_runs_copy_and_product(cases):
    found: list[dict[str, Any]] = json.loads(
        run("bench", "run", str(cases), "--device", "cpu", "--json")
    )
    assert [(one["case"], one["contender"]) for one in found] == [
        ("scale float32 1000", "twice"),
        ("scale float32 1000", "sum"),
        ("product 64", "matmul"),
    ]
    assert found[0]["against_first"] == 1
    assert found[0]["bandwidth"] == pytest.approx(8000 / found[0]["seconds"])
    assert found[0]["of_copy"] > 0
    assert found[0]["of_matrix"] is None
    assert found[2]["flops"] == pytest.approx(2 * 64**3 / found[2]["seconds"])
    assert found[2]["of_copy"] is None
    table = run("bench", "run", str(cases), "--device", "cpu", "--case", "product")
    assert "matmul" in table
    assert "twice" not in table


@pytest.mark.parametrize(("text", "said"), [
    ("x = 1\n", "no function cases"),
    ("def cases(setup):\n    return iter(())\n", "no case"),
    ("def cases(setup):\n    yield 3\n", "cases(setup) yields 3"),
    ("from flexops.bench import case\ndef cases(setup):\n    yield case('empty', {})\n", "0 calls"),
    (("from flexops.bench import case\ndef cases(setup):\n    yield case('odd', {'a':"
      " print}, measure='slowly')\n"), "measure='slowly'"),
])  # fmt: skip
def test_what_cannot_be_measured_is_said(tmp_path, text, said):
    (tmp_path / "bad.py").write_text(text)
    done = flexops_command(
        "bench", "run", str(tmp_path / "bad.py"), "--device", "cpu", catch_exceptions=True
    )
    assert isinstance(done.exception, FlexopsError)
    assert said in str(done.exception)
    done = flexops_command("bench", "run", "no_such_module_here", catch_exceptions=True)
    assert "no_such_module_here has no cases" in str(done.exception)


def test_torchs_profiler_where_there_is_no_gpu(cases):
    found = json.loads(run("profile", str(cases), "--case", "product", "--device", "cpu", "--json"))
    assert "aten::mm" in {one["kernel"] for one in found}
    done = flexops_command(
        "profile", str(cases), "--case", "no such case", "--device", "cpu", catch_exceptions=True
    )
    assert "no case with 'no such case'" in str(done.exception)


def test_what_torchs_profiler_tells_of_a_kernel():
    event = {
        "name": "scale",
        "dur": 3.5,
        "args": {
            "registers per thread": 32,
            "grid": [4, 1, 1],
            "est. achieved occupancy %": 87,
            "stream": 7,
        },
    }
    assert kernel(event) == {
        "kernel": "scale",
        "time": "3.5 us",
        "registers": "32",
        "grid": "[4, 1, 1]",
        "occupancy, %": "87",
    }


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


NCU = """echo '==PROF== Connected to process 1'
echo '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","1","scale<float>(const float *, float *)","gpu__time_duration.sum","us","3.5"'
echo '"0","1","scale<float>(const float *, float *)","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","91.2"'
echo '"1","1","other","launch__registers_per_thread","register/thread","32"'
echo "$@" > ncu.arguments"""


def test_ncus_counters(cases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program(tmp_path, "ncu", NCU)
    found = json.loads(run("profile", str(cases), "--by", "ncu", "--device", "cpu", "--json"))
    assert found == [
        {
            "kernel": "scale<float>(const float *, float *)",
            "time": "3.5 us",
            "memory, % of peak": "91.2",
            "device": "cpu",
        },
        {"kernel": "other", "registers": "32 register/thread", "device": "cpu"},
    ]
    assert "--profile-from-start off" in (tmp_path / "ncu.arguments").read_text()
    program(
        tmp_path,
        "ncu",
        "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1",
    )
    done = flexops_command(
        "profile", str(cases), "--by", "ncu", "--device", "cpu", catch_exceptions=True
    )
    assert "run as root" in str(done.exception)


def test_sanitizing_runs_the_command_and_counts_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program(
        tmp_path,
        "compute-sanitizer",
        'echo "$@"; echo "$PYTORCH_NO_CUDA_MEMORY_CACHING"; echo "========= ERROR SUMMARY: 2'
        ' errors"; exit 99',
    )
    done = flexops_command(
        "sanitize",
        "rope",
        "--tool",
        "racecheck",
        "--",
        "pytest",
        "-k",
        "rope",
        catch_exceptions=True,
    )
    assert done.exit_code == 1
    assert (
        "--tool racecheck --target-processes all --error-exitcode 99 pytest -k rope\n1\n"
        in done.output
    )
    assert "racecheck: 2 errors" in done.output
    program(tmp_path, "compute-sanitizer", 'echo "$@"; echo "========= ERROR SUMMARY: 0 errors"')
    assert "test_rope_gpu.py -k (cuda or gpu) and not graph" in (
        said := run("sanitize", "rotary_embedding")
    )
    assert "memcheck: no errors" in said
    assert "--kernel-name kns=flexops" in said
    # the tests made for this alone
    assert "tests/gpu/test_attention_sanitized_gpu.py -k (cuda or gpu) and not graph" in run(
        "sanitize", "attention"
    )
    monkeypatch.chdir(tmp_path)
    assert "no tests of rope are here" in str(
        flexops_command("sanitize", "rope", catch_exceptions=True).exception
    )


def test_tools_that_are_not_there_are_named(tmp_path, cases, monkeypatch):
    from flexops.inspection import mix

    monkeypatch.setattr(mix, "find_tool", lambda _: None)
    for arguments in (["profile", str(cases), "--by", "ncu"], ["sanitize", "rope"]):
        done = flexops_command(*arguments, catch_exceptions=True)
        assert isinstance(done.exception, ToolchainError)
    assert "pip install nvidia-cuda-sanitizer-api" in str(done.exception)
    assert tmp_path.is_dir()


@pytest.mark.gpu
def test_a_profile_on_a_gpu(cases):
    cases.write_text(CASES.replace("torch.randn(1000)", "torch.randn(1000, device=setup.device)"))
    rows = json.loads(run("profile", str(cases), "--by", "torch", "--case", "scale", "--json"))
    assert rows
    assert all("us" in row["time"] for row in rows)
    assert torch.cuda.is_available()
