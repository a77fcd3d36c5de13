"""Native kernels for CUDA where there is no GPU: flexops' real bindings, launchers and provider,
NVRTC's real code, and a driver that runs nothing.

``stand_in/libcuda.c`` rejects what the real driver would reject (code for another GPU, PTX of a
newer CUDA, a grid, block, cluster or shared memory that no GPU has, a call without a context), and
writes down what it is asked for. To libraries of flexops' the CPU's tensors are on a GPU
(``stand_in/libtorch_cuda.c``). So what is shown here is all that happens before a kernel runs; that
it is right, tests/gpu shows.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import stand_in_driver
from marks import first_of
from processes import c_library
from stand_in_driver import Answer

from flexops import settings, toolchain
from flexops.build.store.manifest import Manifest
from flexops.doctor.checks import machine as checks
from flexops.doctor.facts import PlatformFact, TorchFact
from flexops.doctor.probes import machine as probes
from flexops.toolchain import capabilities as capabilities_module
from flexops.toolchain import gpus
from flexops.toolchain.model import HostCompiler, Version

Run = Callable[..., Answer]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory, host_compiler: HostCompiler) -> Path:
    """The folder of the libraries."""
    return stand_in_driver.build(tmp_path_factory.mktemp("stand-in"), host_compiler)


@pytest.fixture(scope="module")
def run(stand_ins: Path) -> Run:
    """``run(program, STAND_IN_GPUS="80")``: the program (see ``stand_in/launch.py``) on a machine
    with such GPUs."""
    return functools.partial(stand_in_driver.run, stand_ins)


# ---- what the driver answers ----

ATTEMPTS = """
import os
def attempt(name, dtype=torch.float32, gpu=0, **driver):
    os.environ.update(driver)
    try:
        on_gpu(gpu)
        with OnGpu():
            flexops.rms_norm(torch.ones(5, 1000).to(dtype), None)
        said[name] = "fine"
    except RuntimeError as error:
        said[name] = str(error)
    for setting in driver:
        del os.environ[setting]
def on_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@pytest.fixture(scope="module")
def attempts(run: Run) -> Answer:
    """Calls of one operator, one after the other: what the driver has against each, and the calls
    after it."""
    return run(
        f"""{ATTEMPTS}
attempt("first")
attempt("crash", STAND_IN_REFUSE="cuLaunchKernelEx=719")
attempt("unknown", STAND_IN_REFUSE="cuLaunchKernelEx=987")
attempt("after both")
attempt("load", torch.bfloat16, STAND_IN_REFUSE="cuLibraryLoadData=2")
attempt("symbol", torch.bfloat16, STAND_IN_REFUSE="cuLibraryGetKernel=500")
attempt("after those", torch.bfloat16)
on_a_thread(lambda: [attempt("no context", STAND_IN_REFUSE="cuDevicePrimaryCtxRetain=2"), attempt("a context")])
attempt("old driver", torch.float16, STAND_IN_CUDA="12040")
attempt("updated driver", torch.float16)
on_a_thread(lambda: [attempt("an A100", gpu=1), attempt("an A100 again", gpu=1)])
on_a_thread(lambda: [attempt("old driver, new GPU", gpu=2, STAND_IN_CUDA="12080"), attempt("new GPU", gpu=2)])
attempt("the first again")
os.environ["STAND_IN_REFUSE"] = "cuLaunchKernelEx=719@1"
lists = [[torch.ones(4)] for _ in range(4)]
for again in range(2):
    try:
        with OnGpu():
            flexops.adam_(*lists, [], [torch.zeros(())], lr=0.1)
        said["Adam again"] = "fine"
    except RuntimeError as error:
        said["Adam"] = str(error)
""",
        STAND_IN_GPUS="90,80,150",
    )


def test_an_error_of_the_drivers_is_said_once_and_leaves_nothing_behind(attempts):
    said = attempts.said
    fine = [
        "first",
        "after both",
        "after those",
        "a context",
        "updated driver",
        "an A100",
        "an A100 again",
        "new GPU",
        "the first again",
        "Adam again",
    ]
    assert [name for name, text in said.items() if text == "fine"] == fine
    assert said["crash"] == "flexops::rms_norm: CUDA error: unspecified launch failure"
    assert "error 987, which this driver has no text for" in said["unknown"]
    assert "out of memory (error 2 of a driver for CUDA 13.0)" in said["load"]
    assert "forward_held<flexops::bf16" in said["load"]
    assert "named symbol not found (error 500" in said["symbol"]
    assert "unload" in attempts.log
    assert said["no context"].endswith("out of memory")


def test_what_follows_a_kernel_that_failed_is_not_launched(attempts):
    """Adam's step would be divided by a count of steps that was not raised."""
    assert attempts.said["Adam"].endswith("unspecified launch failure")
    assert attempts.said["Adam again"] == "fine"
    symbols = [
        one.symbol
        for one in attempts.launches
        if "4adam" in one.symbol or "step_kernel" in one.symbol
    ]
    assert ["step_kernel" in one for one in symbols] == [True, False], "of the second call"


def test_a_driver_that_is_too_old_for_the_code(attempts):
    """The error names what is required, what was found, and the fix."""
    for name, version in (("old driver", "12.4"), ("old driver, new GPU", "12.8")):
        assert (
            "is of CUDA 13.0, which needs the NVIDIA driver 580 or newer; this one runs CUDA"
            f" {version}" in attempts.said[name]
        )
        assert "fix: update the driver, or take a torch of an older CUDA" in attempts.said[name]


def test_each_gpu_gets_code_that_it_runs_and_one_newer_than_the_compiler_ptx(attempts):
    newest = max(one.base for one in toolchain.compat.rules().capabilities(Version((13, 0))))
    assert [one for one in attempts.loads if one != "cubin 90"] == [
        "cubin 80",
        f"ptx {newest.major}{newest.minor}",
    ]
    assert [one.gpu for one in attempts.launches if one.gpu] == [1, 1, 2]
    assert "the driver will compile it from PTX" in attempts.errors


def test_many_threads_launch_a_kernel_first_and_it_is_loaded_once(run):
    """On a slice of an A100: threads without a context, of a driver whose GPU has few
    multiprocessors."""
    answer = run(
        f"""{ATTEMPTS}
start = threading.Barrier(8)
def one(number):
    start.wait()
    attempt(number)
threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
x = torch.empty(100_000, 64, requires_grad=True)
with OnGpu():
    flexops.rms_norm(x, None).backward(x)
""",
        STAND_IN_GPUS="80", STAND_IN_SMS="14",
    )  # fmt: skip
    assert set(answer.said.values()) == {"fine"}
    assert answer.loads == ["cubin 80"] * 2
    assert answer.log.count("context 0") == 9
    assert [one.status for one in answer.launches] == [0] * 10
    assert answer.launches[-1].grid[0] <= 14 * 32, "as many blocks as the slice runs at once"


@pytest.mark.extra
def test_a_driver_before_525(run, tmp_path, host_compiler):
    (tmp_path / "old.c").write_text("int cuLaunchKernel(void) { return 0; }\n")
    c_library(host_compiler.path, tmp_path / "libcuda.so.1", tmp_path / "old.c")
    answer = run(f"{ATTEMPTS}attempt('call')", LD_LIBRARY_PATH=str(tmp_path))
    assert "the CUDA driver (libcuda.so.1) is missing or older than 525" in answer.said["call"]


@pytest.mark.parametrize(
    ("gpus", "starts", "said"),
    first_of(("none", 0, "invalid device ordinal"), ("", 100, "initialization error")),
)
def test_a_driver_without_a_device(run, gpus, starts, said):
    """Operators run on the CPU; should a call for a GPU come all the same, what the driver says is
    said, and what to do."""
    on_the_cpu = run(
        """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
said["driver"] = [driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count)), count.value]
x = torch.randn(5, 8)
said["right"] = torch.allclose(flexops.rms_norm(x, None), torch.nn.functional.rms_norm(x, [8], eps=1e-6))
said["backends"] = {one.device: one.backend for one in flexops.status() if one.op == "norm"}
""",
        STAND_IN_GPUS=gpus, LD_PRELOAD="",
    )  # fmt: skip
    assert on_the_cpu.said == {
        "driver": [0, 0, 0] if gpus else [starts, 3, -1],
        "right": True,
        "backends": {"cpu": "jit", "cuda": "unasked"},
    }
    answer = run(f"{ATTEMPTS}attempt('call')", STAND_IN_GPUS=gpus)
    assert said in answer.said["call"]
    assert "fix: " in answer.said["call"]
    assert not answer.launches


def test_a_child_that_is_forked_after_a_launch(run):
    """What its parent has of the driver it lacks: the error says so, with the fix; the parent goes
    on."""
    answer = run(f"""{ATTEMPTS}
import json
attempt("first")
read, write = os.pipe()
child = os.fork()
if not child:
    attempt("the same kernel")
    attempt("another kernel", torch.bfloat16)
    os.write(write, json.dumps(said).encode())
    os._exit(0)
os.waitpid(child, 0)
said["child"] = json.loads(os.read(read, 10000))
attempt("afterwards")
attempt("another kernel", torch.bfloat16)
""")
    child = answer.said.pop("child")
    assert answer.said == {"first": "fine", "afterwards": "fine", "another kernel": "fine"}
    for name in ("the same kernel", "another kernel"):
        assert "initialization error" in child[name]
        assert "spawn" in child[name]


# ---- code that is not available ----


def copy_of_cache(cache: Path, *patterns: str) -> None:
    cache.mkdir(mode=0o700)
    for path in [
        path for pattern in patterns for path in settings.current().cache_dir.glob(pattern)
    ]:
        shutil.copytree(path, cache / path.name)


HELD = "flexops::norm::forward_held<{}, false, true, 8>"


@pytest.mark.usefixtures("attempts")
def test_code_that_is_damaged_or_another_gpus_or_cannot_be_made(run, tmp_path, obedient):
    """In the middle of a run: it goes on, or says what is wrong, and goes on once that is
    fixed."""
    cache = tmp_path / "cache"
    copy_of_cache(cache, "norm-cuda", "norm-sm_90-*", "norm-sm_80-*")

    def entries(dtype: str, target: str) -> list[Path]:
        """Several, if another test compiled the kernel with another NVRTC."""
        found = [
            path.parent
            for path in cache.glob(f"norm-{target}-*/*/manifest.json")
            if json.loads(path.read_text())["kernel"] == HELD.format(dtype)
        ]
        assert found
        return found

    other = entries("float", "sm_80")[0] / "kernel.cubin"
    theirs = Manifest.from_json((other.parent / "manifest.json").read_text())
    for mixed in entries("flexops::bf16", "sm_90"):
        shutil.copy(other, mixed / "kernel.cubin")
        ours = Manifest.from_json((mixed / "manifest.json").read_text())
        (mixed / "manifest.json").write_text(
            ours._replace(size=theirs.size, crc32=theirs.crc32, sha256=theirs.sha256).to_json()
        )
    for whole in entries("float", "sm_90"):
        (whole / "kernel.cubin").write_bytes((whole / "kernel.cubin").read_bytes()[:1000])
    for entry in entries("flexops::f16", "sm_90"):
        shutil.rmtree(entry.parent, ignore_errors=True)
    answer = run(
        f"""{ATTEMPTS}
import pathlib, resource
from flexops import toolchain
from flexops.toolchain.select import Choice
attempt("damaged")
attempt("another GPU's", torch.bfloat16)
found, toolchain.device_compiler = toolchain.device_compiler, lambda _: Choice(None)
attempt("no NVRTC", torch.float16)
toolchain.device_compiler = found
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
attempt("full", torch.float16)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
directories = [pathlib.Path({str(cache)!r}), *(path for path in pathlib.Path({str(cache)!r}).rglob("*") if path.is_dir())]
[path.chmod(0o500) for path in directories]
attempt("read-only", torch.float16)
attempt("of what it holds")
[path.chmod(0o700) for path in directories]
attempt("fixed", torch.float16)
""",
        prefix=obedient, FLEXOPS_CACHE_DIR=str(cache),
    )  # fmt: skip
    said = answer.said
    assert [name for name, text in said.items() if text == "fine"] == [
        "damaged", "another GPU's", "of what it holds", "fixed"
    ], said  # fmt: skip
    aside = [path.read_bytes() for path in cache.glob(".quarantine/*/kernel.cubin")]
    assert other.read_bytes() in aside, "what the driver refused was put aside, and compiled"
    for name, found, fix in (
        (
            "no NVRTC",
            "no NVRTC and no nvcc was found",
            "fix: PYTHON -m pip install --force-reinstall",
        ),
        ("full", "File", "fix: "),
        ("read-only", "the build cache cannot be written", "fix: export FLEXOPS_CACHE_DIR="),
    ):
        assert HELD.format("flexops::f16") in said[name]
        assert found in said[name]
        assert fix.replace("PYTHON", sys.executable) in said[name]


@pytest.mark.extra
@pytest.mark.usefixtures("attempts")
def test_two_processes_with_different_nvrtcs_share_a_cache(run, tmp_path, nvrtc_of):
    """The second one's driver does not take what the first has made."""
    copy_of_cache(tmp_path / "cache", "norm-cuda")
    common = {"FLEXOPS_CACHE_DIR": str(tmp_path / "cache"), "STAND_IN_GPUS": "80"}
    older, newer = {**common, "STAND_IN_CUDA": "12010"}, {**common, "STAND_IN_CUDA": "13000"}
    for version, machine in (((13, 0), newer), ((12, 1), older)):
        home = str(nvrtc_of(version).path.parents[1])
        assert run(f"{ATTEMPTS}attempt('call')", CUDA_HOME=home, **machine).said == {"call": "fine"}
    made = [
        json.loads(path.read_text())["compiler"]
        for path in (tmp_path / "cache").glob("norm-sm_*/*/manifest.json")
    ]
    assert sorted(made) == ["NVRTC 12.1", "NVRTC 13.0"]


# ---- every family ----


@pytest.mark.extra
def test_every_family_asks_for_nothing_that_a_gpu_rejects(run):
    """Of doctor's calls of each, and of some of enormous tensors, whose memory is not touched."""
    answer = run("""
import os
from flexops import ops
from flexops.build.describe import catalog
def launched():
    return sum(line.startswith("launch") for line in open(os.environ["STAND_IN_LOG"]))
with OnGpu():
    for spec in catalog.CATALOG:
        before = launched()
        if spec.name == "kvcache_attention":  # on what says it is a CPU, its function calls attention
            continue
        if spec.name == "attention":
            q = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16, requires_grad=True)
            flexops.attention(q, q, q).backward(torch.empty_like(q))
        elif spec.name == "int4_linear":  # its function chooses between operators
            weight = flexops.quantize_int4(torch.randn(40, 192).bfloat16())
            x = torch.randn(5, 192).bfloat16()
            torch.ops.flexops.int4_product(x, *weight[:3], None, *weight[3:], 0)
        elif spec.name == "fp8_linear":  # its function computes what says it is a CPU otherwise
            torch.ops.flexops.fp8_rows(torch.randn(48, 64).bfloat16(), [], 48)
        else:
            getattr(ops, spec.name).self_check("cpu")
        said[spec.name] = launched() - before
    huge = torch.empty(2**31 + 2**12, 2, dtype=torch.bfloat16)
    flexops.swiglu(huge, huge)
    flexops.rms_norm(huge, None)
    flexops.rms_norm(huge.view(-1, 1024), None)
    flexops.layer_norm(torch.empty(3, 65536, dtype=torch.bfloat16), None, None)
    flexops.causal_softmax(torch.empty(2**15 + 1, 1, 256, 256, dtype=torch.bfloat16))
    flexops.rotary_embedding(torch.empty(70_000, 1, 256, 64), None, torch.empty(256, 32), torch.empty(256, 32))
""")
    assert "error" not in answer.said, answer.said
    assert [name for name, launches in answer.said.items() if not launches] == []
    assert [one for one in answer.launches if one.status] == []
    assert any(one.cluster > 1 for one in answer.launches)
    assert any(one.shared > 48 * 1024 for one in answer.launches)


@pytest.mark.extra
def test_a_rare_kernel_that_is_not_available_gives_way_to_the_next_best(run, tmp_path):
    """Rows for clusters, whose kernel is not compiled where nothing may be: as on a GPU that runs
    none, from the first call on."""
    program = """
with OnGpu():
    for _ in range(2):
        flexops.layer_norm(torch.empty(3, 65536, dtype=torch.bfloat16), None, None)
"""
    without_clusters = run(program, STAND_IN_CLUSTERS="0")
    cache = tmp_path / "cache"
    known = settings.current().cache_dir

    def unwanted(folder: str, names: list[str]) -> list[str]:
        top = (
            [name for name in names if not re.fullmatch(r"norm-(cuda|sm_90a?-\w+)", name)]
            if Path(folder) == known
            else []
        )
        manifests = [Path(folder, name, "manifest.json") for name in names]
        return top + [
            one.parent.name
            for one in manifests
            if one.is_file() and "_ring" in str(json.loads(one.read_text())["kernel"])
        ]

    shutil.copytree(known, cache, ignore=unwanted)
    answer = run(program, FLEXOPS_CACHE_DIR=str(cache), FLEXOPS_JIT="0", FLEXOPS_FALLBACK="forbid")
    assert "error" not in answer.said, answer.said
    assert [one.symbol for one in answer.launches] == [
        one.symbol for one in without_clusters.launches
    ]
    assert all("_ring" not in one.symbol for one in answer.launches)


def test_where_nothing_may_be_compiled_an_optimizer_steps_as_plain_pytorch(run, tmp_path):
    """With its library there and none of its kernels: ``step`` computes, and the reason is reported."""
    optimizers = {
        "AdamW": "adam",
        "Adagrad": "adagrad",
        "Lion": "lion",
        "LAMB": "lamb",
        "AdamW8bit": "adam8bit",
    }
    assert (
        "error"
        not in run(
            "".join(f"loader.ensure({family!r}, 'cuda')\n" for family in optimizers.values())
        ).said
    )
    copy_of_cache(tmp_path / "cache", *(f"{family}-cuda" for family in optimizers.values()))
    program = f"""
from flexops import toolchain
from flexops.compute_capability import ComputeCapability
toolchain.local_capabilities = lambda: (ComputeCapability(9, 0),)  # as torch reports, once a tensor is on a GPU
for name in {sorted(optimizers)}:
    said[name] = []
    for dtype in torch.float32, torch.float16:
        param = torch.nn.Parameter(torch.ones(5000, dtype=dtype))
        param.grad = torch.ones_like(param)
        with OnGpu():
            getattr(flexops.optim, name)([param], lr=0.5).step()
        said[name].append(param[0].item())
said["status"] = {{one.op: [one.backend, one.reason] for one in flexops.status() if one.device == "cuda" and one.backend != "unasked"}}
"""
    answer = run(
        program,
        FLEXOPS_CACHE_DIR=str(tmp_path / "cache"),
        FLEXOPS_JIT="0",
        FLEXOPS_FALLBACK="allow",
    )
    assert "error" not in answer.said, answer.said
    status = answer.said.pop("status")
    assert answer.launches == []
    assert all(value < 1 for values in answer.said.values() for value in values)
    assert {family: backend for family, (backend, _) in status.items()} == dict.fromkeys(
        optimizers.values(), "reference"
    )
    assert all("FLEXOPS_JIT=0" in reason for _, reason in status.values())


# ---- which GPUs there are ----


def test_nvml_tells_of_mig_slices(stand_ins, monkeypatch):
    """Through ctypes, from a library with NVML's entry points: a sliced GPU, three of whose seven
    slices are there, and one that knows no MIG."""
    monkeypatch.setattr(gpus, "_NVML", (str(stand_ins / "libnvidia-ml.so.1"),))
    found = gpus._from_nvml()
    assert found
    assert [(gpu.name, str(gpu.capability), gpu.slices) for gpu in found.gpus] == [
        ("NVIDIA A100", "8.0", ("MIG-0", "MIG-3", "MIG-6")),
        ("NVIDIA L40S", "8.9", None),
    ]
    assert found.gpus[0].memory_bytes == 0
    for devices, capabilities in (
        ("MIG-3", ["8.0"]),
        ("MIG-1", []),
        ("", []),
        (None, ["8.0", "8.9"]),
    ):
        (
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
            if devices is not None
            else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        )
        monkeypatch.setattr(capabilities_module, "has_device_node", lambda: True)
        monkeypatch.setattr(gpus, "machine", lambda: found)
        settings.current.cache_clear()
        assert [str(one) for one in capabilities_module.local_capabilities()] == capabilities
    settings.current.cache_clear()


def test_nvml_tells_of_a_driver_without_a_gpu(stand_ins, monkeypatch):
    """No reason to fail: operators run on the CPU."""
    monkeypatch.setattr(gpus, "_NVML", (str(stand_ins / "libnvidia-ml.so.1"),))
    monkeypatch.setenv("STAND_IN_GPUS", "none")
    found = gpus._from_nvml()
    assert found
    assert (str(found.driver and found.driver.release), found.gpus) == ("580.65.06", ())
    monkeypatch.setattr(gpus, "machine", lambda _="": found)
    fact, torch = probes.gpus(), TorchFact("ok", version="2.14.1+cu130", cuda="13.0")
    findings = [
        checks.gpu(fact, torch, PlatformFact("Linux", "6.1", "x86_64"), {}, ""),
        checks.driver(fact, torch),
    ]
    assert [one.status for one in findings] == ["ok", "ok"]
    assert "operators run on the CPU" in findings[0].found
    assert "580.65.06" in findings[1].found
