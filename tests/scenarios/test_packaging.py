"""``pip wheel`` without and with compiled operators, and ``flexops build``: what they hold, what
they are called, how they fail."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builds import REPOSITORY, child_environment
from marks import first_of
from processes import completed

from flexops.build.plan import kernel_names
from flexops.build.store import manifest as manifests
from flexops.build.store.cache import read_entry
from flexops.build.store.manifest import judge
from flexops.builder import new
from flexops.errors import CompileError

Done = subprocess.CompletedProcess


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a source distribution holds, so that building leaves nothing behind in the
    checkout."""
    root = tmp_path_factory.mktemp("source") / "flexops"
    root.mkdir()
    for name in ("flexops", "csrc"):
        shutil.copytree(
            REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "_aot")
        )
    for path in REPOSITORY.iterdir():
        if path.is_file():
            shutil.copy(path, root)
    return root


def wheel(source: Path, out: Path, *options: str, **variables: str) -> Done[str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--wheel-dir",
        str(out),
        *options,
        str(source),
    ]
    environment = child_environment(PIP_DISABLE_PIP_VERSION_CHECK="1", **variables)
    return completed(command, env=environment, code=None)


@pytest.fixture(scope="module")
def can_build(require: Callable[..., None]) -> None:
    """setuptools of the version that pyproject.toml asks for, without build isolation (which would
    fetch it)."""
    there = (
        importlib.util.find_spec("pip") is not None
        and importlib.util.find_spec("setuptools") is not None
    )
    require(
        there and int(importlib.metadata.version("setuptools").split(".")[0]) >= 77,
        "pip and setuptools 77",
        "pip install -U pip setuptools",
    )


@pytest.mark.usefixtures("can_build")
def test_a_plain_wheel_holds_no_compiled_code(source, tmp_path):
    done = wheel(source, tmp_path, "--no-build-isolation")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.whl")
    assert file.name.startswith("flexops_torch-"), (
        "on package indexes, flexops is another project's"
    )
    assert file.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(file).namelist())
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    expected = {
        "flexops/targets/matrix.toml",
        "flexops/toolchain/compat.toml",
        "flexops/py.typed",
        "flexops/_csrc/common/binding.h",
        "flexops/_csrc/adam/adam.cuh",
        "flexops/_csrc/quant/quant_host.h",
    }
    assert expected <= names
    packaged = {
        name.removeprefix("flexops/_csrc/") for name in names if name.startswith("flexops/_csrc/")
    }
    sources = {
        str(path.relative_to(REPOSITORY / "csrc"))
        for path in (REPOSITORY / "csrc").rglob("*")
        if path.is_file()
    }
    assert packaged == sources, "every source travels"
    assert all(name.startswith(("flexops/", "flexops_torch-")) for name in names), "no tools"
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "flexops").rglob("*.py")}
    assert modules <= names, "every module travels"
    (tmp_path / "new").mkdir()
    files = new.write("mylib", "scale", tmp_path / "new")
    example = {
        f"flexops/builder/example/{path.relative_to(tmp_path / 'new/mylib')}" for path in files
    }
    assert "flexops/builder/example/.gitignore" in example
    assert example <= names, "what `flexops new` copies travels"


@pytest.mark.usefixtures("can_build")
def test_a_wheel_with_compiled_operators(source, tmp_path, host_compiler):
    assert host_compiler
    done = wheel(
        source,
        tmp_path,
        "--no-build-isolation",
        FLEXOPS_AOT="adam",  # from the tests' cache, which tests of optimizers have filled
        TORCH_CUDA_ARCH_LIST="9.0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux" in file.name, (
        "libraries need no Python symbols: one wheel serves every Python"
    )
    names = set(zipfile.ZipFile(file).namelist())
    assert {
        "flexops/_aot/adam-cpu/flexops_adam_cpu.so",
        "flexops/_aot/adam-cpu/manifest.json",
    } <= names
    assert not [name for name in names if name.startswith("flexops/_aot/quant")]

    site = tmp_path / "site"
    zipfile.ZipFile(file).extractall(site)
    code = """
import json, torch, flexops
parameter = torch.nn.Parameter(torch.ones(8))
parameter.grad = torch.ones(8)
flexops.optim.AdamW([parameter], lr=0.1).step()
status = next(status for status in flexops.status() if (status.op, status.device) == ("adam", "cpu"))
print(json.dumps({"backend": status.backend, "path": str(status.path), "reason": status.reason, "value": parameter[0].item()}))
"""
    environment = child_environment(
        PYTHONPATH=str(site), FLEXOPS_JIT="0", FLEXOPS_FALLBACK="forbid", FLEXOPS_AOT_DIR=None,
        FLEXOPS_CACHE_DIR=str(tmp_path / "no-cache"),
    )  # fmt: skip
    used = completed([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    told = json.loads(used.stdout)
    assert told["backend"] == "aot", told
    assert told["path"].startswith(str(site))
    assert told["value"] == pytest.approx(0.899, abs=1e-3)
    assert not (tmp_path / "no-cache").exists()


METADATA = """
import sys
from pathlib import Path
from setuptools import build_meta
out = sys.argv[1]  # which setuptools replaces
print(Path(out, build_meta.prepare_metadata_for_build_wheel(out), "METADATA").read_text())
"""


@pytest.mark.usefixtures("can_build")
@pytest.mark.parametrize(
    ("variables", "torch", "required"),
    [
        ({}, "2.13.0", "torch>=2.4"),
        ({"FLEXOPS_WHEEL": "x86_64"}, "", "torch>=2.11"),
        ({"FLEXOPS_WHEEL": "aarch64"}, "2.4.1", "torch>=2.11"),
        ({"FLEXOPS_AOT": "lion"}, "2.13.0", "torch>=2.11"),
        ({"FLEXOPS_AOT": "lion"}, "2.4.1", "torch==2.4.*"),
    ],
    ids=["nothing-compiled", "wheel", "wheel-elsewhere", "stable-abi", "one-minor"],
)
def test_a_wheel_requires_the_torch_that_its_libraries_run_with(
    source, tmp_path, variables, torch, required
):
    """Of a torch only the files are read: those of a folder on the path stand in for one."""
    fake = tmp_path / "site" / "torch"
    for name in ("__init__.py", "version.py", "lib/libtorch_cpu.so") if torch else ():
        (fake / name).parent.mkdir(parents=True, exist_ok=True)
        (fake / name).write_text(f"__version__ = '{torch}'\ncuda = None\nhip = None\n")
    environment = child_environment(PYTHONPATH=str(tmp_path / "site"), **variables)
    command = [sys.executable, "-c", METADATA, str(tmp_path)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, cwd=source, env=environment, **options)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^Requires-Dist: (.*)$", done.stdout, re.MULTILINE)
    assert [one for one in found if re.match(r"torch\b", one)] == [required]
    assert {"ninja", "typer>=0.12"} <= set(found)


@pytest.mark.extra
@pytest.mark.usefixtures("can_build")
def test_an_op_that_cannot_be_built_fails_the_install_with_the_diagnosis(
    source, tmp_path, host_compiler
):
    assert host_compiler
    broken = tmp_path / "source"
    shutil.copytree(source, broken, ignore=shutil.ignore_patterns("*.egg-info"))
    shutil.rmtree(broken / "build", ignore_errors=True)
    with open(broken / "csrc" / "quant" / "quant_host.h", "a") as file:
        file.write("\nint wrong = nothing_of_that_name;\n")
    done = wheel(
        broken,
        tmp_path,
        "--no-build-isolation",
        FLEXOPS_AOT="quant",
        FLEXOPS_CACHE_DIR=str(tmp_path / "cache"),
        TORCH_CUDA_ARCH_LIST="9.0",
    )
    assert done.returncode != 0
    said = done.stdout + done.stderr
    for words in (
        "quant-cpu could not be built",
        "nothing_of_that_name",
        "quant_host.h",
        "fix:",
        "log:",
    ):
        assert words in said
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.usefixtures("can_build")
@pytest.mark.parametrize(
    ("variables", "said"),
    first_of(
        ({"FLEXOPS_AOT": "nothing_of_that_name"}, "no op called"),
        ({"FLEXOPS_AOT": "all", "TORCH_CUDA_ARCH_LIST": "hoper"}, "hoper"),
    ),
)
def test_a_wish_that_is_not_understood_fails_the_install(
    source, tmp_path, variables, said, nvcc_toolkit
):
    assert nvcc_toolkit
    done = wheel(
        source,
        tmp_path,
        "--no-build-isolation",
        FLEXOPS_CACHE_DIR=str(tmp_path / "cache"),
        **variables,
    )
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("can_build")
def test_a_wheel_under_build_isolation(source, tmp_path):
    """pip makes an environment with setuptools from the package index; torch is not in it, and is
    not needed."""
    done = wheel(source, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [file.name.endswith("-py3-none-any.whl") for file in tmp_path.glob("*.whl")] == [True]


# ---- flexops build ----

FAMILY = "rope"  # of few kernels


def memory_of_tree(pid: int) -> int:
    """Bytes of memory that a process and all below it use now, shared pages counted once."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(
                memory_of_tree(int(child)) for child in (task / "children").read_text().split()
            )
    except OSError:
        pass
    return total


def test_build_ahead_of_time_for_gpus_that_are_not_here(tmp_path, nvcc_toolkit):
    """Two architectures into a directory: libraries that their manifests describe, judged for GPUs
    that are not here; within the memory estimated."""

    from flexops import settings, toolchain
    from flexops.build.describe import catalog
    from flexops.build.load import loader

    assert nvcc_toolkit
    environment = child_environment(
        FLEXOPS_CACHE_DIR=str(tmp_path / "cache"),
        FLEXOPS_COMPILER_LAUNCHER="none",
        FLEXOPS_LOG="quiet",
    )
    command = [sys.executable, "-m", "flexops", "build", FAMILY, "--arch", "8.0;9.0", "--out",
        str(tmp_path / "out"), "--jobs", "2", "--json"]  # fmt: skip
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of_tree(process.pid))
        time.sleep(0.02)
    said, errors = process.communicate()
    assert process.returncode == 0, said + errors

    results = {result["name"]: result for result in json.loads(said)}
    assert results[f"{FAMILY}-cuda"]["architectures"] == ["8.0", "9.0"]
    assert results[f"{FAMILY}-cpu"]["isa_levels"] == ["baseline", "avx2", "avx512"]
    torch = toolchain.torch_build()
    assert torch is not None
    entry, refusal = read_entry(tmp_path / "out" / f"{FAMILY}-cuda")
    assert refusal is None
    assert entry is not None
    assert judge(entry.manifest, torch) is None
    assert entry.manifest.architectures == ("8.0", "9.0")
    names = kernel_names.names_in(entry.library)
    code = [
        read_entry(tmp_path / "out" / kernel_names.artifact_name(FAMILY, architecture, name))[0]
        for architecture in ("sm_80", "sm_90")
        for name in names
    ]
    assert len(names) > 2
    assert [one.manifest.kernel if one else None for one in code] == 2 * names
    assert all(
        one
        and one.library.read_bytes()[:4] == b"\x7fELF"
        and one.manifest.symbol.encode() in one.library.read_bytes()
        for one in code
    )
    assert manifests.needed_versions(entry.library)[0] == entry.manifest.glibc
    assert sorted(path.name for path in (tmp_path / "out" / f"{FAMILY}-cuda").iterdir()) == sorted(
        ["manifest.json", entry.manifest.library]
    )

    chosen = settings.current()._replace(arch_list="8.0;9.0", max_jobs=2)
    plans = [loader.local_plan(catalog.find(FAMILY), device, chosen) for device in ("cpu", "cuda")]
    steps = sorted((step.memory_bytes for plan in plans for step in plan.steps), reverse=True)
    assert 0 < peak < sum(steps[: min(plan.jobs for plan in plans)])


@pytest.mark.extra
def test_build_says_which_op_failed_and_builds_the_others(source, tmp_path, host_compiler):
    assert host_compiler
    broken = tmp_path / "source"
    shutil.copytree(source, broken)
    with open(broken / "csrc" / "quant" / "quant_cpu.cpp", "a") as file:
        file.write("\nint wrong = nothing_of_that_name;\n")
    environment = child_environment(
        PYTHONPATH=str(broken), FLEXOPS_CACHE_DIR=str(tmp_path / "cache"), FLEXOPS_LOG="info"
    )
    command = [sys.executable, "-m", "flexops", "build", "lion", "quant", "rope", "--device", "cpu"]
    done = completed(command, env=environment, cwd=tmp_path, code=None)
    assert done.returncode == CompileError.exit_code, done.stdout + done.stderr
    built = re.findall(r"^(\w+)-cpu .* baseline, avx2, avx512", done.stdout, re.MULTILINE)
    assert built == ["lion", "rope"]
    assert "quant-cpu could not be built" in done.stdout
    assert "nothing_of_that_name" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nothing_of_that_name",), 2, "no op called"),
        (("--target", "cu999-sm1"), 3, "cu999-sm1"),
        (("--target", "cpu", "--arch", "9.0"), 4, "one of them"),
        (("--arch", "9.x"), 4, "9.x"),
        (("adam", "--device", "cpu", "--out", "/proc/flexops"), 7, "/proc/flexops"),
        (
            ("adam", "--target", "rocm72-gfx942"),
            5,
            "scripts/setup_cuda_dev_environment.sh --target rocm72-gfx942",
        ),
    ],
)
def test_build_errors_are_said_in_one_piece(arguments, code, said, nvcc_toolkit):
    assert nvcc_toolkit
    done = completed(
        [sys.executable, "-m", "flexops", "build", *arguments], env=child_environment(), code=None
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
