"""``flexops inspect`` and ``flexops target prove``, on kernels that are compiled here. Needs no
GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import flexops_command
from processes import completed

from flexops import settings, targets
from flexops.build.describe import catalog, layout
from flexops.build.describe.schema import declare
from flexops.build.describe.spec import OpSpec, Project
from flexops.errors import TargetError
from flexops.inspection import mix
from flexops.toolchain import nvrtc
from flexops.toolchain.context import Search
from flexops_tools.proving import baseline_file
from flexops_tools.proving import kernels as proving
from flexops_tools.targets import proven

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("host_compiler")


def run(*arguments: str) -> str:
    done = flexops_command(*arguments, catch_exceptions=True)
    assert done.exit_code == 0, done.output
    return done.output


def test_resources_of_a_family():
    found = json.loads(run("inspect", "lion", "--arch", "8.0;9.0", "--json"))
    assert {one["architecture"] for one in found} == {"8.0", "9.0"}
    assert all(
        one["registers"] > 0 and one["bytes"] > 1000 and 0 < one["occupancy"] <= 1 for one in found
    )
    table = run("inspect", "lion", "--arch", "8.0;9.0")
    assert all(one["kernel"] in table for one in found)


def test_code_and_instructions_of_one_kernel():
    name = json.loads(run("inspect", "lion", "--arch", "9.0", "--json"))[0]["kernel"]
    assert ".entry" in run("inspect", "lion", "--arch", "9.0", "--kernel", name, "--ptx")
    text = run("inspect", "lion", "--arch", "9.0", "--kernel", name, "--mix")
    assert "global memory" in text
    done = flexops_command(
        "inspect", "lion", "--arch", "9.0", "--kernel", name, "--sass", catch_exceptions=True
    )
    if mix.find_tool("nvdisasm") or mix.find_tool("cuobjdump"):
        assert "EXIT" in done.output
    else:
        assert "pip install nvidia-cuda-cuobjdump" in str(done.exception)
    done = flexops_command(
        "inspect", "lion", "--kernel", "nothing_of_that_name", catch_exceptions=True
    )
    assert "no kernel with 'nothing_of_that_name' in its name" in str(done.exception)


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own with lion's kernels, committed."""
    csrc = tmp_path / "checkout" / "csrc"
    for name in ("common", "lion"):
        shutil.copytree(REPOSITORY / "csrc" / name, csrc / name)
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "as it was"],
    ):
        subprocess.run(["git", "-C", str(csrc.parent), *command], check=True)
    monkeypatch.setattr(layout, "csrc_root", lambda: csrc)
    return csrc


def test_what_an_edit_changed(edited):
    assert "0 with other resources, 0 with the same resources and other code" in run(
        "inspect", "lion", "--arch", "9.0", "--diff", "HEAD"
    )
    header = edited / "lion" / "lion.cuh"
    text, run_it = header.read_text(), "  multi::run(launch);\n"
    assert run_it in text
    ballast = (
        "  __shared__ float ballast[256];\n  ballast[threadIdx.x % 256] = blockIdx.x;\n "
        " __syncthreads();\n"
    )
    ballast += "  if (ballast[(threadIdx.x + 1) % 256] < 0) return;\n"
    header.write_text(text.replace(run_it, ballast + run_it))
    changes: list[dict[str, Any]] = json.loads(
        run("inspect", "lion", "--arch", "9.0", "--diff", "HEAD", "--json")
    )
    assert changes
    assert all(change["worse"] for change in changes)
    assert " -> 1024" in run("inspect", "lion", "--arch", "9.0", "--diff", "HEAD")
    done = flexops_command("inspect", "lion", "--diff", "no-such-commit", catch_exceptions=True)
    assert "the sources of no-such-commit are missing" in str(done.exception)


def test_another_projects_kernels_and_what_an_edit_changed_there(tmp_path, monkeypatch):
    shutil.copytree(REPOSITORY / "flexops/builder/example/mylib", tmp_path / "mylib")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "as it was"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    signatures = (declare("scale(Tensor x, float factor) -> Tensor"),)
    spec = OpSpec("scale", project=Project("mylib", tmp_path / "mylib"), signatures=signatures)
    monkeypatch.setattr(catalog, "select", lambda _: (spec,))
    found = json.loads(run("inspect", "mylib", "--arch", "9.0", "--json"))
    # for float, bfloat16 and float16
    assert [(one["family"], one["spill_stores"]) for one in found] == 3 * [("mylib.scale", 0)]
    header = tmp_path / "mylib/csrc/scale/scale.cuh"
    kernel = re.search(r"__global__ void[^{]*\{", header.read_text())
    assert kernel
    ballast = (
        "\n  __shared__ float ballast[64];\n  ballast[threadIdx.x % 64] = blockIdx.x;\n "
        " __syncthreads();\n"
    )
    ballast += "  if (ballast[(threadIdx.x + 1) % 64] < 0) return;\n"
    header.write_text(header.read_text().replace(kernel[0], kernel[0] + ballast))
    assert "shared 0 -> 256  WORSE" in run("inspect", "mylib", "--arch", "9.0", "--diff", "HEAD")


@pytest.mark.extra
def test_a_library_of_this_directory_is_found_by_name(tmp_path):
    """In a process of its own, as people type it: nothing has imported the library there."""
    shutil.copytree(REPOSITORY / "flexops/builder/example", tmp_path, dirs_exist_ok=True)
    (tmp_path / "compute-sanitizer").write_text(
        '#!/bin/sh\necho "$@"\necho "========= ERROR SUMMARY: 0 errors"\n'
    )
    (tmp_path / "compute-sanitizer").chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }

    def typed(*arguments: str) -> str:
        command = [sys.executable, "-c", "from flexops.cli import main; main()", *arguments]
        done = completed(command, cwd=tmp_path, env=environment, code=None)
        return done.stdout + done.stderr

    assert "mylib::scale_kernel<float>" in typed("inspect", "mylib.scale", "--arch", "9.0")
    assert "no op called 'mylib.scal'" in (said := typed("inspect", "mylib.scal"))
    assert "did you mean mylib.scale" in said
    said = typed("sanitize", "mylib.scale")
    assert "kns=mylib" in said, "kernels of the project, not flexops': else nothing is looked at"
    assert "tests/test_scale.py" in said
    said = typed("profile", "mylib.scale", "--device", "cpu")
    assert "mylib::scale" in said
    assert "benchmarks/scale.py, by torch.profiler" in said


@pytest.mark.extra
def test_no_kernel_takes_more_than_the_baseline_says():
    """The quick form, of the families that compile fastest; a worse one is fixed, or taken by
    `flexops target prove --update`."""
    done = flexops_command(
        "target",
        "prove",
        "--quick",
        *(part for name in ("lion", "adam", "rope", "fp8") for part in ("--op", name)),
        catch_exceptions=True,
    )
    assert done.exit_code == 0, done.output
    assert " 0 worse than the baseline" in done.output


def test_rows_name_compiler_and_gpus_and_one_that_is_not_here_is_rejected(require):
    done = flexops_command(
        "target",
        "prove",
        "cu121-sm89",
        "cu130-sm90",
        "--op",
        "lion",
        "--json",
        catch_exceptions=True,
    )
    require(
        done.exit_code in (0, 1),
        "NVRTC 12.1 and 13.0",
        "run scripts/run_tests.sh, which installs them",
    )
    places = {(one["compiler"], one["architecture"]) for one in json.loads(done.stdout)["kernels"]}
    assert places == {("NVRTC 12.1", "8.9"), ("NVRTC 13.0", "9.0")}
    done = flexops_command("target", "prove", "cu128-sm90", catch_exceptions=True)
    assert "the kernels of cu128-sm90 cannot be compiled here" in str(done.exception)
    fix = getattr(done.exception, "fix", "")
    assert "--target .flexops/nvrtc-12.8 'nvidia-cuda-nvrtc-cu12==12.8.*'" in fix
    assert "CUDA_HOME=$PWD/.flexops/nvrtc-12.8/nvidia/cuda_nvrtc flexops target prove" in fix


@pytest.mark.parametrize("row", targets.load().targets, ids=lambda row: row.id)
def test_a_row_without_its_nvrtc_names_the_wheel_that_has_it(row, monkeypatch):
    monkeypatch.setattr(nvrtc, "find", lambda _: Search((), ()))
    with pytest.raises(TargetError) as caught:
        list(proving.places([row.id], settings.current()))
    name = "nvidia-cuda-nvrtc-cu12" if row.toolkit.startswith("12.") else "nvidia-cuda-nvrtc"
    wanted = f"'{name}=={row.toolkit_minor}.*'" if row.accelerator == "cuda" else "target list"
    assert wanted in caught.value.fix


@pytest.mark.parametrize("arguments", [["--update"], ["--update", "--op", "nothing"], []])
def test_proving_that_compiles_nothing_fails(arguments, monkeypatch):
    """It printed "0 kernels: 0 worse", and exited 0."""
    written: list[object] = []
    monkeypatch.setattr(baseline_file, "write", lambda *_: written.append("baseline"))
    monkeypatch.setattr(proven, "write", lambda *_: written.append("facts"))
    monkeypatch.setattr(catalog, "select", lambda _: ())
    done = flexops_command("target", "prove", *arguments, catch_exceptions=True)
    assert isinstance(done.exception, TargetError), done.output
    assert "no kernel was compiled" in str(done.exception)
    monkeypatch.undo()
    monkeypatch.setattr(nvrtc, "find", lambda _: Search((), ()))
    monkeypatch.setattr(baseline_file, "write", lambda *_: written.append("baseline"))
    done = flexops_command("target", "prove", *arguments[:1], catch_exceptions=True)
    assert "no kernels can be compiled here" in str(done.exception), done.output
    assert "pip install" in getattr(done.exception, "fix", "")
    assert written == []
