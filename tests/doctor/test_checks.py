"""The judgements of doctor, as pure functions of explicit facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexops import targets
from flexops.compute_capability import ComputeCapability
from flexops.doctor.checks import build, machine, target, tools
from flexops.doctor.facts import (
    BuildTrial,
    CacheFact,
    Facts,
    Gpu,
    GpuFact,
    LibraryFact,
    LoadedLibrary,
    LockFile,
    OpTrial,
    PlatformFact,
    PythonFact,
    SettingsFact,
    TargetFact,
    TorchFact,
    Unknown,
)
from flexops.doctor.finding import Finding
from flexops.settings import Settings
from flexops.toolchain.driver import DriverCuda, DriverRelease
from flexops.toolchain.model import (
    CudaToolkit,
    Found,
    HostCompiler,
    Rejected,
    Tool,
    Toolchain,
    TorchBuild,
    Version,
)
from flexops.toolchain.nvrtc import DeviceCompiler
from flexops.toolchain.resources import Resources
from flexops.toolchain.select import Choice

GIB = 2**30
LINUX = PlatformFact(
    "Linux", "6.1", "x86_64", "Debian 12", "glibc 2.36", "", "sudo apt-get install -y"
)
DOCKER = replace(LINUX, container="docker")
CPU_TORCH = TorchFact("ok", version="2.13.0+cpu", import_seconds=2.0)
CUDA_TORCH = TorchFact("ok", version="2.14.1+cu130", cuda="13.0", gpu_count=1, import_seconds=2.0)
H200 = Gpu("NVIDIA H200", "9.0", 141 * GIB)
A100 = Gpu("NVIDIA A100", "8.0", 40 * GIB)
WITH_GPU = GpuFact((H200,), DriverRelease.parse("580.65.06"), DriverCuda(Version.parse("13.0")))
NO_GPU = GpuFact()
GCC = HostCompiler(Path("/usr/bin/g++"), Version.parse("12.2.0"), "gcc 12.2.0", "gcc")
NVCC = CudaToolkit(
    Path("/usr/local/cuda-13.0"),
    Version.parse("13.0"),
    Tool(Path("/usr/local/cuda-13.0/bin/nvcc"), Version.parse("13.0.88"), "nvcc"),
    (),
    (),
)
NINJA = Tool(Path("/usr/bin/ninja"), Version.parse("1.11.1"), "ninja 1.11.1")
CCACHE = Tool(Path("/usr/bin/ccache"), Version.parse("4.7.5"), "ccache 4.7.5")
BUILT_FOR = TorchBuild("2.14.1+cu130", "13.0", None, "", True, Path("/torch"))
WHOLE = Toolchain(
    torch=BUILT_FOR,
    host=GCC,
    cuda=NVCC,
    ninja=NINJA,
    launcher=CCACHE,
    found_via=(("cuda", "/usr/local"),),
)
BARE = Toolchain(torch=BUILT_FOR)
OPS = ("adam", "quant")


def settings(**environ: str) -> Settings:
    return Settings.from_environ({"HOME": "/home/user", **environ})


def one(found: Finding | object) -> Finding:
    return found if isinstance(found, Finding) else next(iter(found))  # type: ignore[call-overload]


def is_(finding: Finding, status: str, *words: str) -> None:
    """The status is right, the words are in it, and whatever is not ok says what is required and
    how to fix it."""
    assert finding.status == status, finding
    text = f"{finding.found} {finding.required} {finding.fix}"
    for word in words:
        assert word in text, (word, text)
    if finding.status != "ok":
        assert finding.required, finding
        assert finding.fix, finding


# ---- machine ----


def test_platform():
    is_(machine.platform(LINUX), "ok", "Debian 12", "glibc 2.36")
    is_(machine.platform(DOCKER), "ok", "container (docker)")
    is_(machine.platform(replace(LINUX, system="Darwin")), "fail", "Linux")
    is_(machine.platform(replace(LINUX, libc="")), "warn", "glibc")


def test_python():
    fact = PythonFact((3, 12, 1), "/venv/bin/python", "venv", True)
    is_(machine.python(fact, True, ""), "ok", "3.12.1", "venv")
    is_(machine.python(replace(fact, version=(3, 9, 2)), True, ""), "fail", "3.10")
    is_(
        machine.python(replace(fact, headers=False), True, "sudo apt-get install -y"),
        "warn",
        "sudo apt-get install -y python3.12-dev",
    )
    is_(
        machine.python(
            replace(fact, headers=False, origin="conda"), True, "sudo apt-get install -y"
        ),
        "warn",
        "conda install --force-reinstall python=3.12",
    )
    is_(
        machine.python(
            replace(fact, headers=False, origin="other"), True, "sudo apt-get install -y"
        ),
        "warn",
        "uv venv --managed-python --python 3.12",
    )
    is_(machine.python(replace(fact, headers=False), False, ""), "ok")


def test_another_project_of_our_import_name():
    fact = PythonFact((3, 12, 1), "/venv/bin/python", "venv", True)
    assert list(machine.package(fact)) == []
    fact = replace(fact, namesake="flexops 3.2.0 in /venv/lib")
    is_(
        one(machine.package(fact)),
        "fail",
        "flexops 3.2.0 in /venv/lib",
        "flexops-torch",
        "/venv/bin/python -m pip uninstall --yes flexops",
    )


def test_settings_that_are_not_understood_fail_each():
    problems = (
        ("MAX_JOBS is not a number", "many", "1, 2", "unset MAX_JOBS"),
        ("FLEXOPS_LOG is not understood", "x", "quiet", "unset FLEXOPS_LOG"),
    )
    fact = SettingsFact(settings(), problems)
    findings = list(machine.settings(fact))
    assert [finding.status for finding in findings] == ["fail", "fail"]
    is_(findings[0], "fail", "many", "unset MAX_JOBS")
    is_(one(machine.settings(SettingsFact(settings()))), "ok")


def test_a_misspelled_setting_is_a_warning():
    fact = SettingsFact(settings(), misspelled=(("FLEXOPS_FALBACK", "FLEXOPS_FALLBACK"),))
    is_(
        one(machine.settings(fact)),
        "warn",
        "FLEXOPS_FALBACK is no setting of flexops",
        'export FLEXOPS_FALLBACK="$FLEXOPS_FALBACK"; unset FLEXOPS_FALBACK',
    )


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, "ok"),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "ok"),
        ({"LD_PRELOAD": "/opt/spy.so"}, "warn"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warn"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "ok"),
    ],
)
def test_environment(variables, status):
    is_(one(machine.environment(variables)), status)


def unusable(maker: str) -> GpuFact:
    return GpuFact(unusable=(f"{maker} GPU at 0000:01:00.0",))


KUBERNETES = replace(DOCKER, container="kubernetes")
FOR_CPU, IN_DOCKER = {"torch": CPU_TORCH}, {"where": DOCKER}
NOTHING_VISIBLE = {"CUDA_VISIBLE_DEVICES": ""}
SLICED = "NVIDIA A100 (8.0, 40 GiB, MIG with 7 slices)"


@pytest.mark.parametrize(
    ("fact", "changes", "status", "word"),
    [
        (WITH_GPU, {}, "ok", "NVIDIA H200 (9.0, 141 GiB)"),
        (GpuFact((H200, H200)), {}, "ok", "2 x NVIDIA H200"),
        (NO_GPU, FOR_CPU, "ok", "none"),
        (NO_GPU, {}, "ok", "none"),  # the default index's wheel on a machine without a GPU
        (NO_GPU, IN_DOCKER, "warn", "--gpus all"),
        (NO_GPU, {"where": KUBERNETES}, "warn", "nvidia.com/gpu"),
        (NO_GPU, FOR_CPU | IN_DOCKER, "ok", "none"),
        (NO_GPU, {"accelerator": "cuda"}, "warn", "nothing is needed"),
        (NO_GPU, FOR_CPU | IN_DOCKER | {"accelerator": "rocm"}, "warn", "/dev/kfd"),
        (unusable("NVIDIA"), FOR_CPU, "warn", "nvidia-driver"),
        (unusable("NVIDIA"), FOR_CPU | IN_DOCKER, "warn", "--gpus all"),
        (unusable("AMD"), FOR_CPU, "warn", "amdgpu-dkms"),
        (GpuFact(problem="Driver/library version mismatch"), {}, "fail", "reboot"),
        (WITH_GPU, {"variables": NOTHING_VISIBLE}, "warn", "unset CUDA_VISIBLE_DEVICES"),
        (GpuFact((replace(A100, slices=7),)), {}, "ok", SLICED),
        (GpuFact((replace(A100, slices=0),)), {}, "fail", "nvidia-smi mig -cgi"),
        (GpuFact((replace(A100, slices=0), H200)), {}, "ok", "MIG with 0 slices"),
    ],
)
def test_gpu(fact, changes, status, word):
    given = {"torch": CUDA_TORCH, "where": LINUX, "variables": {}, "accelerator": ""} | changes
    is_(machine.gpu(fact, *given.values()), status, word)


@pytest.mark.parametrize(
    ("release", "torch", "status", "word"),
    [
        ("580.65.06", CUDA_TORCH, "ok", "NVIDIA 580.65.06"),
        ("570.86.10", CUDA_TORCH, "fail", "580"),
        ("570.86.10", CPU_TORCH, "ok", "570"),
        ("525.60.13", replace(CUDA_TORCH, cuda="12.1"), "ok", "PTX"),
    ],
)
def test_driver(release, torch, status, word):
    is_(machine.driver(GpuFact((H200,), DriverRelease.parse(release)), torch), status, word)


def test_no_driver():
    is_(machine.driver(NO_GPU, CUDA_TORCH), "ok", "no NVIDIA driver")


@pytest.mark.parametrize(
    ("fact", "status", "words"),
    [
        (CPU_TORCH, "ok", ("2.13.0+cpu", "CPU only")),
        (CUDA_TORCH, "ok", ("CUDA 13.0",)),
        (replace(CPU_TORCH, version="2.1.2"), "fail", ("2.4", "--upgrade")),
        (TorchFact("absent"), "fail", ("pip install torch",)),
        (TorchFact("hangs", "no answer within 120 s"), "fail", ("120 s", "faulthandler")),
        (
            TorchFact("broken", "the process that imported torch was killed by SIGILL"),
            "fail",
            ("another processor",),
        ),
        (
            TorchFact("broken", "ImportError: libcudnn.so.9: cannot open shared object file"),
            "fail",
            ("libcudnn.so.9", "LD_LIBRARY_PATH"),
        ),
        (
            TorchFact("broken", "ImportError: numpy.core.multiarray failed to import"),
            "fail",
            ("--upgrade numpy",),
        ),
        (TorchFact("broken", "SyntaxError: invalid syntax"), "fail", ("--force-reinstall",)),
    ],
)
def test_torch(fact, status, words):
    is_(machine.torch(fact), status, *words)


def blind(error: str) -> TorchFact:
    return replace(CUDA_TORCH, gpu_count=0, gpu_error=error)


NONE_SHOWN = blind("No CUDA GPUs are available")
OLD_DRIVER = blind("The NVIDIA driver on your system is too old")


@pytest.mark.parametrize(
    ("fact", "gpus", "visible", "status", "word"),
    [
        (CUDA_TORCH, WITH_GPU, None, "ok", "torch can use 1 GPU "),
        (replace(CUDA_TORCH, gpu_count=2), WITH_GPU, None, "ok", "torch can use 2 GPUs "),
        (CUDA_TORCH, NO_GPU, None, "ok", "no GPU"),
        (TorchFact("broken"), WITH_GPU, None, "ok", "cannot be imported"),
        (CPU_TORCH, WITH_GPU, None, "warn", "CPU build"),
        (replace(CPU_TORCH, hip="7.2"), WITH_GPU, None, "warn", "another maker"),
        (blind("Error 803: unsupported display driver"), WITH_GPU, None, "fail", "ldconfig"),
        (OLD_DRIVER, WITH_GPU, None, "fail", "update the NVIDIA driver"),
        (blind(""), WITH_GPU, "-1", "warn", "unset CUDA_VISIBLE_DEVICES"),
        (NONE_SHOWN, WITH_GPU, "MIG-gone", "fail", "MIG-gone names none"),
        (NONE_SHOWN, WITH_GPU, None, "fail", "the driver must work first"),
    ],
)
def test_torch_gpu(fact, gpus, visible, status, word):
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    is_(machine.torch_gpu(fact, gpus, variables), status, word)


# ---- tools ----

OTHER_MAJOR = BARE._replace(
    host=GCC,
    ninja=NINJA,
    rejected=(
        Rejected("CUDA toolkit", Path("/usr/local/cuda-12.1"), "CUDA 12.1 is of another major"),
    ),
)


ROCM_TORCH = replace(CPU_TORCH, version="2.13.0+rocm7.2", hip="7.2")
NVRTC = DeviceCompiler(
    "nvrtc", Path("/py/nvidia/cu13/lib/libnvrtc.so.13"), Version((13, 0)), "NVRTC 13.0 of 1 bytes"
)
FOUND = Choice(Found(NVRTC, "site-packages"))
OTHER_NVRTC = Choice[DeviceCompiler](
    None,
    (
        Rejected(
            "NVRTC",
            Path("/py/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
            "CUDA 12.1 is of another major",
        ),
    ),
)


PASSED_OVER = Choice(FOUND.taken, OTHER_NVRTC.rejected, ("a torch of another minor",))


@pytest.mark.parametrize(
    ("choice", "torch", "changes", "status", "words"),
    [
        (FOUND, CUDA_TORCH, {}, "ok", ("NVRTC 13.0", "found via site-packages")),
        (PASSED_OVER, CUDA_TORCH, {}, "ok", ("not taken", "minor")),
        (Choice(), CPU_TORCH, {"gpu": False}, "ok", ("none is needed",)),
        (Choice(), CUDA_TORCH, {"needed": False}, "ok", ("compiled already",)),
        (OTHER_NVRTC, CUDA_TORCH, {}, "fail", ("another major", "nvidia-cuda-nvrtc")),
        (OTHER_NVRTC, CUDA_TORCH, {"jit": False}, "warn", ("nvidia-cuda-nvrtc",)),
        (OTHER_NVRTC, CUDA_TORCH, {"gpu": False}, "warn", ("nvidia-cuda-nvrtc",)),
    ],
)
def test_device_compiler(choice, torch, changes, status, words):
    given = {"gpu": True, "needed": True, "jit": True} | changes
    is_(tools.device_compiler(choice, torch, **given), status, *words)


FOR_ROCM = BARE._replace(torch=BUILT_FOR._replace(cuda=None, hip="7.2"))


@pytest.mark.parametrize(
    ("found", "torch", "changes", "status", "words"),
    [
        (WHOLE, CUDA_TORCH, {}, "ok", ("CUDA 13.0", "/usr/local/cuda-13.0")),
        (WHOLE, CPU_TORCH, {"gpu": False}, "ok", ("CUDA 13.0",)),
        (BARE, CPU_TORCH, {"gpu": False}, "ok", ("CPU build",)),
        (BARE, CUDA_TORCH, {}, "ok", ("your own .cu sources",)),
        (BARE, ROCM_TORCH, {"gpu": False}, "ok", ("no GPU is here",)),
        (BARE, ROCM_TORCH, {"needed": False}, "ok", ("compiled already",)),
        (FOR_ROCM, ROCM_TORCH, {}, "fail", ("rocm-hip-sdk",)),
        (FOR_ROCM, ROCM_TORCH, {"jit": False}, "warn", ("rocm-hip-sdk",)),
    ],
)
def test_toolkit(found, torch, changes, status, words):
    given = {"gpu": True, "needed": True, "jit": True} | changes
    is_(tools.toolkit(found, torch, **given), status, *words)


def test_toolkit_says_what_was_not_taken():
    found = WHOLE._replace(rejected=OTHER_MAJOR.rejected)
    is_(
        tools.toolkit(found, CUDA_TORCH, gpu=True, needed=True, jit=True),
        "ok",
        "not taken: /usr/local/cuda-12.1",
    )


TOO_NEW = WHOLE._replace(
    host=None,
    rejected=(
        Rejected(
            "C++ compiler",
            Path("/usr/bin/g++-16"),
            "gcc 16.1 is newer than nvcc 13.0 accepts (gcc 15 at most)",
        ),
    ),
)
OLDER = HostCompiler(Path("/usr/bin/g++-11"), Version.parse("11.4.0"), "gcc 11.4.0", "gcc")


@pytest.mark.parametrize(
    ("cpu", "cuda", "needed", "jit", "status", "words"),
    [
        (WHOLE, WHOLE, True, True, "ok", ("gcc 12.2.0", "nvcc 13.0 accepts")),
        (WHOLE, BARE, True, True, "ok", ("gcc 12.2.0",)),
        (WHOLE, WHOLE._replace(host=OLDER), True, True, "ok", ("for nvcc 13.0 gcc 11.4.0",)),
        (WHOLE, TOO_NEW, True, True, "warn", ("newer than nvcc 13.0 accepts", "g++-15")),
        (BARE, BARE, True, True, "fail", ("no C++ compiler", "apt-get install g++")),
        (BARE, BARE, True, False, "warn", ("apt-get install g++",)),
        # an image with libraries and without a compiler
        (BARE, BARE, False, True, "ok", ("compiled already",)),
    ],
)
def test_host_compiler(cpu, cuda, needed, jit, status, words):
    is_(tools.host_compiler(cpu, cuda, needed=needed, jit=jit), status, *words)


def test_ninja():
    is_(tools.ninja(WHOLE, needed=True, jit=True), "ok", "1.11.1")
    is_(tools.ninja(WHOLE._replace(ninja=None), needed=True, jit=True), "fail", "pip install ninja")
    is_(
        tools.ninja(WHOLE._replace(ninja=None), needed=True, jit=False), "warn", "pip install ninja"
    )
    is_(tools.ninja(BARE, needed=False, jit=True), "ok")


@pytest.mark.parametrize(
    ("found", "wish", "status", "word"),
    [
        (WHOLE, None, "ok", "ccache 4.7.5"),
        (WHOLE._replace(launcher=None), None, "ok", "sudo apt-get install -y ccache"),
        (WHOLE._replace(launcher=None), "none", "ok", "FLEXOPS_COMPILER_LAUNCHER"),
        (WHOLE._replace(launcher=None), "sccache", "warn", "sccache"),
        (BARE, None, "ok", "nothing is compiled"),
    ],
)
def test_launcher(found, wish, status, word):
    is_(tools.launcher(found, LINUX.installer, wish), status, word)


OWN = "/site/nvidia/cu13/lib/libcudart.so.13"
SYSTEM = "/usr/local/cuda/lib64/libcudart.so.13.0.96"


@pytest.mark.parametrize(
    ("loaded", "variables", "status", "words"),
    [
        ((), {}, "ok", ("none loaded",)),
        ((LoadedLibrary("libcudart.so.13", OWN),), {}, "ok", ("1 loaded",)),
        ((LoadedLibrary("libstdc++.so.6", "/usr/lib/libstdc++.so.6"),), {}, "ok", ("none loaded",)),
        ((LoadedLibrary("shim.so", "/x/shim.so"),), {}, "ok", ("1 loaded",)),
        (
            (LoadedLibrary("libcudart.so.13.0.96", SYSTEM),),
            {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"},
            "warn",
            (SYSTEM, "unset LD_LIBRARY_PATH"),
        ),
        ((LoadedLibrary("libcudart.so.13.0.96", SYSTEM),), {}, "warn", ("--force-reinstall",)),
        (
            (
                LoadedLibrary("libcudart.so.13", OWN),
                LoadedLibrary("libcudart.so.12", "/x/libcudart.so.12"),
            ),
            {},
            "warn",
            ("two versions", "/x/"),
        ),
        (
            (LoadedLibrary("libcudart.so.12", "/x/libcudart.so.12"),),
            {},
            "warn",
            ("built for CUDA 13.0", "libcudart.so.13"),
        ),
    ],
)
def test_cuda_libraries(loaded, variables, status, words):
    is_(
        tools.cuda_libraries(replace(CUDA_TORCH, loaded=loaded, installed=(OWN,)), variables),
        status,
        *words,
    )


def test_an_op_counts_as_compiled_only_if_its_library_would_be_loaded():
    facts = [
        LibraryFact("adam", "cpu", "aot"),
        LibraryFact("quant", "cpu", "aot", refusal="built for another torch"),
    ]
    assert not tools.has_library(facts, "cpu", OPS)
    assert tools.has_library([*facts, LibraryFact("quant", "cpu", "cache")], "cpu", OPS)
    assert not tools.has_library(facts, "cuda", OPS)


# ---- building ----

CACHE = CacheFact(
    Path("/home/user/.cache/flexops"),
    True,
    free_bytes=50 * GIB,
    entries=3,
    size=2**20,
    max_size=5 * GIB,
)


@pytest.mark.parametrize(("fact", "needed", "status", "word"), [
    (CACHE, True, "ok", "3 entries"),
    (replace(CACHE, exists=False), True, "ok", "made at the first build"),
    (replace(CACHE, problem="it belongs to user id 1234"), False, "fail", "FLEXOPS_CACHE_SHARED=1"),
    (replace(CACHE, unwritable="read-only file system"), True, "fail", "FLEXOPS_CACHE_DIR"),
    (replace(CACHE, unwritable="read-only file system"), False, "warn", "FLEXOPS_CACHE_DIR"),
    (replace(CACHE, noexec=True), False, "fail", "noexec"),
    (replace(CACHE, free_bytes=2**20), True, "warn", "flexops cache prune"),
])  # fmt: skip
def test_cache(fact, needed, status, word):
    is_(build.cache(fact, needed=needed), status, word)


def test_damaged_entries():
    is_(
        build.quarantine(replace(CACHE, quarantined=2)),
        "warn",
        "put aside: 2",
        "flexops cache clear",
    )
    is_(build.quarantine(CACHE), "ok")


@pytest.mark.parametrize(
    ("locks", "status", "word"),
    [
        ((), "ok", ""),
        ((LockFile("/x/my ext/lock", 3600.0, False),), "warn", "rm '/x/my ext/lock'"),
        ((LockFile("/x/lock", 3600.0, None),), "warn", "rm /x/lock"),
        ((LockFile("/x/lock", 3600.0, True),), "ok", ""),  # a long build that is alive
        ((LockFile("/x/lock", 5.0, False),), "ok", ""),  # its maker may be between two steps
    ],
)
def test_stale_locks(locks, status, word):
    is_(build.stale_locks(locks), status, word)


@pytest.mark.parametrize(
    ("asked", "compiler", "gpus", "builds", "status", "words"),
    [
        (None, NVRTC, (H200,), True, "ok", ("9.0", "GPU's own")),
        # a builder without a GPU
        (None, NVRTC, (), True, "warn", ("not set", "IndexError", "export TORCH_CUDA_ARCH_LIST")),
        (None, NVRTC, (), False, "ok", ("not set",)),
        (None, None, (), True, "ok", ("no NVRTC",)),
        ("9.0", NVRTC, (H200,), True, "ok", ("covers the GPU",)),
        (
            "8.0",
            NVRTC,
            (H200,),
            True,
            "fail",
            ("no code for the GPU here (9.0)", 'TORCH_CUDA_ARCH_LIST="9.0"'),
        ),
        ("8.0+PTX", NVRTC, (H200,), True, "ok", ()),
        ("8.0;9.0", NVRTC, (H200, Gpu("B200", "10.0")), True, "warn", ("10.0",)),
        (
            "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX",
            NVRTC,
            (H200,),
            True,
            "warn",
            ("7 architectures", 'TORCH_CUDA_ARCH_LIST="9.0"'),
        ),
        # what a builder for others wants
        ("7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX", NVRTC, (), True, "ok", ()),
        ("7.0;9.0", NVRTC, (H200,), True, "warn", ("7.0", "left out")),
        ("7.0", NVRTC, (), True, "fail", ("CUDA 13.0 cannot compile for 7.0",)),
        ("nonsense", NVRTC, (), True, "fail", ("not understood",)),
        ("nonsense", None, (), False, "warn", ("not understood",)),
        ("native", NVRTC, (), True, "fail", ("native",)),
    ],
)
def test_architectures(asked, compiler, gpus, builds, status, words):
    chosen = settings(TORCH_CUDA_ARCH_LIST=asked or "")
    is_(build.architectures(chosen, compiler, gpus, builds=builds), status, *words)


@pytest.mark.parametrize(("tools", "status"), [(WHOLE, "warn"), (BARE, "ok")])
def test_where_nothing_can_be_built_no_architectures_are_asked_for(tools, status):
    """BARE: an image without a compiler, on a machine without a GPU."""
    from flexops.doctor.judgement import judge

    unknown = Unknown("not looked at")
    facts = Facts(*[unknown] * 15)  # type: ignore[arg-type]
    facts = replace(
        facts,
        settings=SettingsFact(settings()),
        gpu=NO_GPU,
        torch=CUDA_TORCH,
        cpu_tools=tools,
        device_compiler=Choice(Found(NVRTC, "torch")),
    )
    (found,) = [
        finding
        for section in judge(facts)
        for finding in section.findings
        if finding.id == "architectures"
    ]
    is_(found, status, "not set")


def test_architectures_suggests_those_of_the_target():
    is_(
        build.architectures(settings(), NVRTC, (), builds=True, suggested="8.9"),
        "warn",
        'TORCH_CUDA_ARCH_LIST="8.9"',
    )


@pytest.mark.parametrize(
    ("environ", "cpus", "memory", "status", "word"),
    [
        ({}, 8, 64 * GIB, "ok", "not set"),
        ({"MAX_JOBS": "4"}, 8, 64 * GIB, "ok", "MAX_JOBS=4"),
        ({"MAX_JOBS": "16"}, 8, 64 * GIB, "warn", "export MAX_JOBS=8"),
        ({"MAX_JOBS": "8"}, 8, 8 * GIB, "warn", "export MAX_JOBS=2"),
        ({"MAX_JOBS": "1"}, 8, GIB, "ok", "MAX_JOBS=1"),
        ({"MAX_JOBS": "8", "NVCC_THREADS": "4"}, 8, 64 * GIB, "warn", "unset NVCC_THREADS"),
        ({"MAX_JOBS": "8"}, 8, 0, "ok", "MAX_JOBS=8"),  # memory that is not known is not judged
    ],
)
def test_jobs(environ, cpus, memory, status, word):
    is_(build.jobs(settings(**environ), Resources(cpus, memory)), status, word)


def test_libraries():
    ready = LibraryFact("adam", "cpu", "aot")
    stale = LibraryFact(
        "adam", "cuda", "aot", ("8.0",), "compiled for 8.0, the GPU is 9.0", "flexops build"
    )
    is_(one(build.libraries([ready], OPS, jit=True)), "ok", "adam-cpu", "compiled at install")
    is_(one(build.libraries([], OPS, jit=True)), "ok", "compiled at first use")
    is_(one(build.libraries([], OPS, jit=False)), "warn", "FLEXOPS_JIT=0", "flexops build")
    findings = list(build.libraries([ready, stale], OPS, jit=True))
    assert len(findings) == 1
    is_(findings[0], "warn", "adam-cuda", "the GPU is 9.0")


def built(**changes: Any) -> BuildTrial:
    return BuildTrial("cpu", **{"build_seconds": 0.7, "load_seconds": 0.002, **changes})


ON_GPU = BuildTrial("cuda", build_seconds=1.2, load_seconds=0.003, architectures=("9.0",))
OUT_OF_MEMORY = BuildTrial("cpu", error="the compiler ran out of memory", fix="MAX_JOBS=1")
UNLOADABLE = built(load_seconds=None, error="OSError: undefined symbol")


@pytest.mark.parametrize(
    ("fact", "status", "words"),
    [
        (built(max_error=0.0), "ok", ("0.70 s", "2.0 ms", "right result")),
        (ON_GPU, "ok", ("for 9.0", "not run")),
        (BuildTrial("cpu", skipped="no C++ compiler was found"), "ok", ("not tried",)),
        (OUT_OF_MEMORY, "fail", ("out of memory", "MAX_JOBS=1")),
        (UNLOADABLE, "fail", ("cannot be loaded", "undefined symbol")),
        (built(max_error=3.0), "fail", ("off by 3",)),
        (built(max_error=float("nan")), "fail", ("off by nan",)),
    ],
)
def test_build_trial(fact, status, words):
    is_(build.build_trial(fact), status, *words)


def trial(device: str = "cpu", backend: str = "jit", *more: Any, **changes: Any) -> OpTrial:
    return OpTrial("adam", device, backend, *more, **changes)


PLAIN = trial("cpu", "reference", "no C++ compiler", "apt-get install g++", 0.0)


@pytest.mark.parametrize(
    ("fact", "fallback", "status", "words"),
    [
        (trial("cpu", "jit", "in the cache", max_error=1e-7), "warn", "ok", ("1e-07", "in the c")),
        (trial("cuda:0", "aot", max_error=0.0), "warn", "ok", ("compiled at install",)),
        (PLAIN, "warn", "warn", ("plain PyTorch", "apt-get install g++")),
        (PLAIN, "forbid", "fail", ("plain PyTorch",)),
        (trial(max_error=0.5), "warn", "fail", ("0.5", "at most 0.001")),
        (trial(max_error=float("nan")), "warn", "fail", ("nan",)),
        (trial(error="its process was killed by SIGSEGV"), "warn", "fail", ("SIGSEGV",)),
    ],
)
def test_op_trial(fact, fallback, status, words):
    finding = build.op_trial(fact, fallback)
    is_(finding, status, *words)
    assert finding.id == f"op-adam-{fact.device.replace(':', '-')}"


# ---- target ----

ROW = targets.load().find("cu130-sm90")
PINNED = replace(CUDA_TORCH, version=f"{ROW.torch}+cu130")


def test_target_names_the_row_or_says_that_there_is_none():
    is_(target.target(TargetFact("cu130-sm90", ROW)), "ok", "cu130-sm90", ROW.torch)
    is_(
        target.target(
            TargetFact(
                "cu999",
                None,
                ("there is no target called 'cu999'", "cpu, cu130-sm90", "flexops target list"),
            )
        ),
        "fail",
        "cu999",
    )
    is_(
        target.target(TargetFact(None, None, detected="cpu", reason="no GPU was found")),
        "ok",
        "cpu",
    )


@pytest.mark.parametrize(
    ("row", "fact", "status", "word"),
    [
        (ROW, PINNED, "ok", ROW.torch),
        (ROW, replace(PINNED, version="2.12.0+cu130"), "warn", f"torch=={ROW.torch}"),
        (ROW, replace(PINNED, version="2.10.0+cu128", cuda="12.8"), "fail", f"torch=={ROW.torch}"),
        (ROW, CPU_TORCH, "fail", "not built for CUDA"),
        (ROW, TorchFact("absent"), "fail", f"torch=={ROW.torch}"),
        # any wheel of that release runs on a CPU
        (
            targets.load().cpu,
            replace(PINNED, version=f"{targets.load().cpu.torch}+cu130"),
            "ok",
            "",
        ),
    ],
)
def test_target_torch(row, fact, status, word):
    is_(target.torch(row, fact), status, word)


def test_target_python():
    is_(target.python(ROW, PythonFact((3, 12, 0), "", "venv", True)), "ok")
    is_(target.python(ROW, PythonFact((3, 9, 0), "", "venv", True)), "fail", ROW.python)


def test_target_toolkit():
    is_(target.toolkit(ROW, NVRTC, compiled=False), "ok", "NVRTC 13.0")
    is_(
        target.toolkit(ROW, NVRTC._replace(version=Version.parse("13.2")), compiled=False),
        "ok",
        "as good",
    )
    is_(
        target.toolkit(ROW, NVRTC._replace(version=Version.parse("12.1")), compiled=False),
        "fail",
        "12.1",
        "nvidia-cuda-nvrtc==13.0",
    )
    is_(target.toolkit(ROW, None, compiled=False), "fail", "none")
    is_(target.toolkit(ROW, None, compiled=True), "ok", "not needed")
    is_(
        target.toolkit(targets.load().find("cu121-sm80"), None, compiled=False),
        "fail",
        "nvidia-cuda-nvrtc-cu12==12.1",
    )
    is_(
        target.toolkit(targets.load().find("rocm72-gfx942"), None, compiled=False),
        "fail",
        "rocm/dev-ubuntu",
    )


def test_target_compiler():
    is_(target.host_compiler(ROW, WHOLE, compiled=False), "ok", "gcc 12.2.0")
    is_(
        target.host_compiler(
            ROW, WHOLE._replace(host=GCC._replace(version=Version.parse("16.1"))), compiled=False
        ),
        "fail",
        "gcc 16.1",
    )
    is_(
        target.host_compiler(
            ROW, WHOLE._replace(host=GCC._replace(version=Version.parse("9.4"))), compiled=True
        ),
        "warn",
        "gcc 9.4",
    )
    is_(target.host_compiler(ROW, BARE, compiled=True), "ok", "not needed")
    is_(target.host_compiler(ROW, BARE, compiled=False), "fail", "none")


def test_target_gpu():
    assert [finding.status for finding in target.gpu(ROW, WITH_GPU)] == ["ok"]
    is_(one(target.gpu(ROW, NO_GPU)), "ok", ROW.least_driver)
    old = list(target.gpu(ROW, GpuFact((Gpu("A100", "8.0"),), DriverRelease.parse("550.54.14"))))
    is_(old[0], "fail", "550.54.14")
    is_(old[1], "warn", "A100", "9.0")


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (None, "ok"),
        ("9.0", "ok"),
        ("8.0+PTX", "ok"),
        ("native", "ok"),
        ("8.0", "warn"),
        ("nonsense", "fail"),
    ],
)
def test_target_architectures(asked, status):
    is_(target.architectures(ROW, asked), status, "9.0" if status != "ok" else "")


def test_target_libraries():
    compiled = [
        LibraryFact(name, "cuda", "aot", ("9.0",), torch_abi="stable-2.11", compiler="13.0")
        for name in OPS
    ]
    is_(target.libraries(ROW, compiled, OPS), "ok", "compiled for 9.0")
    is_(
        target.libraries(ROW, compiled[:1], OPS),
        "warn",
        "quant",
        "flexops build --target cu130-sm90",
    )
    is_(
        target.libraries(ROW, [replace(one_, architectures=("8.0",)) for one_ in compiled], OPS),
        "warn",
        "adam, quant",
    )
    # A library of another row's torch or toolkit is not this one's, whatever its architectures.
    is_(
        target.libraries(ROW, [replace(one_, compiler="12.1") for one_ in compiled], OPS),
        "warn",
        "adam, quant",
    )
    is_(
        target.libraries(
            ROW, [replace(one_, torch_abi="torch-2.4-cxx11abi0-cu12.1") for one_ in compiled], OPS
        ),
        "warn",
        "adam, quant",
    )
    is_(target.libraries(targets.load().find("cu121-sm90"), compiled, OPS), "warn", "adam, quant")
    # A rejection for this machine's GPU says nothing about the target's.
    is_(
        target.libraries(ROW, [replace(one_, refusal="the GPU is 8.0") for one_ in compiled], OPS),
        "ok",
    )
    is_(
        target.libraries(
            targets.load().cpu, [LibraryFact(name, "cpu", "cache") for name in OPS], OPS
        ),
        "ok",
        "the CPU",
    )


def test_facts_use_capabilities_as_gpus_report_them():
    assert ComputeCapability.parse(H200.capability) == ComputeCapability(9, 0)


def test_an_op_without_kernels_for_a_device_lacks_nothing_there(monkeypatch):
    from flexops.build.describe import catalog
    from flexops.build.describe.spec import OpSpec
    from flexops.doctor import judgement

    monkeypatch.setattr(
        catalog,
        "CATALOG",
        (
            OpSpec("both", files=("x_cpu.cpp", "x_cuda.cpp")),
            OpSpec("gpu-only", files=("y_cuda.cpp",)),
        ),
    )
    assert (judgement._ops("cpu"), judgement._ops("cuda"), judgement._ops()) == (
        ("both",),
        ("both", "gpu-only"),
        ("both", "gpu-only"),
    )
