"""People's `.cu` without nvcc: g++'s and NVRTC's real code, launched on a driver that runs nothing
(stand_in/libcuda.c), and compared with nvcc's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from extension_tools import ROOT, environment
from processes import c_library, completed, printed

from flexops import settings, toolchain
from flexops.build.compile.kernel_compiler import Worker
from flexops.build.describe import cuda_source, layout
from flexops.build.load import extension, extension_nvrtc, provider
from flexops.build.plan.extension_plan import Request, plan_extension
from flexops.build.plan.program import Program
from flexops.compute_capability import Architecture, ComputeCapability
from flexops.errors import ToolchainError
from flexops.toolchain import device_headers, runtime_headers
from flexops.toolchain.model import CudaToolkit, HostCompiler, Toolchain

HEADER = """
#pragma once
#ifdef __CUDACC__
#define HD __host__ __device__
#else
#define HD
#endif
#include <limits>
#define CUDA_LOOP(i, n) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += blockDim.x * gridDim.x)
struct Options {
  int at;
  double factor;
  HD Options(int at_, double factor_) : at{at_}, factor(factor_) {}
  __device__ float twice() const { return __fmul_rn(2.f, factor); }
};
HD inline float weight_of(int i) { return 1.f / (1 + i); }
template <typename T>
__device__ T limit() { return std::numeric_limits<T>::max(); }
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffff, value, lanes);
  return value;
}
inline int blocks_of(int n) { return (n + 255) / 256; }
"""
KERNELS = """
#include "points.cuh"
template <typename T, int kStep>
__global__ void __launch_bounds__(256) gather_kernel(const T* __restrict__ x, const int* __restrict__ index, T* __restrict__ out, const int n) {
  extern __shared__ float cache[];
  CUDA_LOOP(i, n) {
    cache[threadIdx.x] = float(x[index[i]]) * weight_of(i) + limit<T>();
    __syncthreads();
    out[i] = static_cast<T>(warp_sum(cache[threadIdx.x] * kStep));
  }
}
__device__ int calls;
extern "C" __global__ void count_kernel(int* out) {
  if (threadIdx.x == 0) out[0] = atomicAdd(&calls, 1);
}
namespace {
namespace inner {
template <typename... A>
__global__ void last_kernel(float* out, Options options, A... more) {
  out[options.at] = calls + (int(more) + ... + 0) + pow(out[1], 3) * rsqrtf(options.twice()) + exp(options.at) + fmax(out[2], 0.0);
}
}
static __global__ void plain(int2 pair, char letter = 'x') { calls = pair.x + letter; }
}
"""
LAUNCHES = """
#define LAUNCH(T, n, stream) gather_kernel<T, 2><<<blocks_of(n), 256, 256 * sizeof(float), stream>>>((T*)0x10, (int*)0x20, (T*)0x30, n)
static int2 pair_of() {
  count_kernel<<<1, 64>>>((int*)0x60);
  return make_int2(1, 2);
}
static void gather(cudaStream_t stream, int n) {
  if (n > 0) LAUNCH(float, n, stream); else LAUNCH(long, 7, stream);
  cudaFuncSetAttribute(gather_kernel<float, 4>, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024);
  gather_kernel<float, 4><<<dim3(2, 3, 4), dim3(32, 2), 64 * 1024, stream>>>(nullptr, nullptr, nullptr, n);
  count_kernel<<<1, 32>>>((int*)0x40);
  auto last = inner::last_kernel<short, double>;
  last<<<1, 1>>>((float*)0x50, Options{3, 0.5}, 7, 0.25);
  plain<<<1, 1>>>(pair_of(), 'y');
}
"""
MODULE = """
#include <Python.h>
#include <stdexcept>
static PyObject* call(PyObject*, PyObject* args) {
  int n;
  if (!PyArg_ParseTuple(args, "i", &n)) return nullptr;
  try {
    gather(reinterpret_cast<cudaStream_t>(0x77), n);
  } catch (const std::exception& error) { return PyErr_SetString(PyExc_RuntimeError, error.what()), nullptr; }
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"gather", call, METH_VARARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "points", nullptr, -1, methods};
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
torch.version.cuda = torch.version.cuda or "13.0"  # a torch for CPUs compiles just as well
import flexops
folder = Path(os.environ["FOLDER"])
said = {}
def load(name="points", **options):
    try:
        return flexops.load(name, [folder / "points.cu"], extra_ldflags=[f"-L{os.environ['LIBRARIES']}"], **{"device_compiler": "nvrtc", **options})
    except Exception as error:
        said["error"], said["kind"] = str(error), type(error).__name__
def edit(old, new, name="points.cu"):
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
def log():
    return Path(os.environ["STAND_IN_LOG"]).read_text().splitlines() if Path(os.environ["STAND_IN_LOG"]).exists() else []
"""

Run = Callable[..., dict[str, Any]]


class World(NamedTuple):
    folder: Path
    cache: Path
    run: Run

    def entries(self, name: str) -> list[dict[str, Any]]:
        return [
            json.loads(path.read_text())
            for path in sorted(self.cache.glob(f"{name}/*/manifest.json"))
        ]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory, host_compiler: HostCompiler) -> Path:
    """The driver that runs nothing; and libraries of torch's names for the linker, which a torch
    for CPUs lacks."""
    folder = tmp_path_factory.mktemp("libraries")
    source = ROOT / "tests" / "support" / "stand_in" / "libcuda.c"
    for name, code in (
        ("libcuda.so.1", str(source)),
        ("libc10_cuda.so", "/dev/null"),
        ("libtorch_cuda.so", "/dev/null"),
    ):
        c_library(host_compiler.path, folder / name, code, "-O1", f"-Wl,-soname,{name}")
    return folder


@pytest.fixture
def world(tmp_path: Path, libraries: Path) -> World:
    """A folder with the sources, and programs that load them on a machine with one H100."""
    (tmp_path / "points.cuh").write_text(HEADER)
    (tmp_path / "points.cu").write_text(KERNELS + LAUNCHES + MODULE)

    def run(program: str, **more: str) -> dict[str, Any]:
        known = {
            "FOLDER": str(tmp_path),
            "LIBRARIES": str(libraries),
            "LD_LIBRARY_PATH": str(libraries),
            "STAND_IN_LOG": str(tmp_path / "log"),
        }
        known |= {
            "STAND_IN_PARAMETERS": "1",
            "TORCH_CUDA_ARCH_LIST": "9.0",
            "FLEXOPS_COMPILER_LAUNCHER": "none",
            **more,
        }
        code = f"{PROGRAM}{program}\nprint(json.dumps(said))"
        output, errors = printed(code, environment(tmp_path / "cache", **known))
        return {**json.loads(output.splitlines()[-1]), "stderr": errors}

    return World(tmp_path, tmp_path / "cache", run)


def test_launches_arrive_and_edits_are_new_code(world):
    said = world.run("""
first = load()
if first: first.gather(1000); first.gather(-1)
said["log"] = log()
edit("* kStep", "* kStep + 1")
second = load()
second.gather(1000)
first.gather(1000)
said["again"] = log()[len(said["log"]):]
said["same"] = first is second, load() is second
edit("* kStep + 1", "* kStep")
said["back"] = load() is first
edit("return value;", "return value * 2;", "points.cuh")
third = load()
said["header"] = third is not first
edit("out[i] =", "out[i] = missing +")
load()
""")
    calls = re.findall(
        r"launch (\S+) grid (.*?) block (.*?) shared (\d+) .*? status (\d)", "\n".join(said["log"])
    )
    unnamed = r"_ZN\d+_GLOBAL__N_\w+?"
    expected = [
        (r"_Z13gather_kernelIfLi2EEvPKT_PKiPS0_i", "4 1 1", "256 1", "1024"),
        (r"_Z13gather_kernelIfLi4EEvPKT_PKiPS0_i", "2 3 4", "32 2", "65536"),
        ("count_kernel", "1 1 1", "32 1", "0"),
        (unnamed + r"5inner11last_kernelIJsdEEEvPf7OptionsDpT_", "1 1 1", "1 1", "0"),
        ("count_kernel", "1 1 1", "64 1", "0"),  # launched for an argument of the next one
        (unnamed + r"5plainE4int2c", "1 1 1", "1 1", "0"),
        (r"_Z13gather_kernelIlLi2EEvPKT_PKiPS0_i", "1 1 1", "256 1", "1024"),
    ]
    assert len(calls) == 12
    for (symbol, *rest, status), wanted in zip(calls, expected, strict=False):
        assert re.fullmatch(wanted[0], symbol)
        assert (*rest, status) == (*wanted[1:], "0")
    parameters = [line.split()[2:] for line in said["log"] if line.startswith("parameters")]
    assert parameters[0] == ["1000000000000000", "2000000000000000", "3000000000000000", "e8030000"]
    assert parameters[3] == [
        "5000000000000000",
        "0300000000000000000000000000e03f",
        "0700",
        "000000000000d03f",
    ], "a struct with its padding, a pack"
    assert parameters[5] == ["0100000002000000", "79"]
    assert [line for line in said["log"] if line.startswith("load")] == ["load cubin 90"], (
        "kernels of one source are one module: they share its variables"
    )
    assert [line for line in said["again"] if line.startswith("load")] == ["load cubin 90"], (
        "of the edit; the first module keeps its own"
    )
    assert (said["same"], said["back"], said["header"]) == ([False, True], True, True)
    assert len(world.entries("points")) == 1, (
        "the host's code was compiled once: no edit was of its"
    )
    assert len(world.entries("points.cu-sm_90-*")) == 3
    assert said["kind"] == "ExtensionBuildError"
    line = (
        KERNELS.splitlines().index(
            "    out[i] = static_cast<T>(warp_sum(cache[threadIdx.x] * kStep));"
        )
        + 1
    )
    assert (
        f'{world.folder}/points.cu({line}): error: identifier "missing" is undefined'
        in said["error"]
    )
    assert "NVRTC" in said["error"]


@pytest.mark.extra  # above, an error of the device's half; by test_extension.py, a warm start
def test_a_host_error_is_the_users_line_and_a_warm_start_compiles_nothing(world):
    said = world.run("""
edit("count_kernel<<<1, 32>>>((int*)0x40);", "count_kernel<<<1, 32>>>((float*)0x40);")
load()
edit("count_kernel<<<1, 32>>>((float*)0x40);", "count_kernel<<<1, 2048>>>((int*)0x40);")
try:
    load("other").gather(3)
except RuntimeError as error:
    said["launch"] = str(error)
edit("<<<1, 2048>>>", "<<<1, 32>>>")
load()
edit("static __global__ void plain", "static void plain")
try:
    load("third").gather(3)
except RuntimeError as error:
    said["no kernel"] = str(error)
edit("static void plain", "static __global__ void plain")
""")
    assert (
        "what it calls is no kernel that flexops has read: it ran on the host" in said["no kernel"]
    )
    assert "could not be launched: invalid argument" in said["launch"]
    assert "count_kernel" in said["launch"]
    line = (KERNELS + LAUNCHES).splitlines().index("  count_kernel<<<1, 32>>>((int*)0x40);") + 1
    assert re.search(
        rf"{world.folder}/points.cu:{line}:\d+: error: .*float\*.*int\*", said["error"]
    )
    said = world.run(
        "load().gather(3)\nsaid['launches'] = len(log())\nedit('* kStep', '* kStep + 2')\nload()",
        FLEXOPS_JIT="0",
        FLEXOPS_LOG="info",
    )
    assert "compiles" not in said["stderr"]
    assert said["launches"] > 10
    assert "FLEXOPS_JIT=0 rules out compiling" in said["error"]


# ---- when it is taken ----


@pytest.fixture
def without_nvcc(nvcc_toolkit: CudaToolkit) -> Toolchain:
    """What a machine has where nvcc is not installed, and a torch for CUDA is."""
    tools = toolchain.discover(settings.current(), device="cuda")
    assert tools.torch
    return tools._replace(
        cuda=None, torch=tools.torch._replace(cuda=str(nvcc_toolkit.version), hip=None)
    )


def _request(path: Path, text: str, **more: Any) -> Request:
    (path / "one.cu").write_text(text)
    return Request("one", (path / "one.cu",), with_cuda=True, **more)


def test_it_is_taken_where_there_is_no_nvcc_and_where_it_is_asked_for(
    tmp_path, without_nvcc, nvcc_toolkit
):
    request, chosen = (
        _request(tmp_path, KERNELS.replace('#include "points.cuh"', HEADER)),
        settings.Settings.from_environ({}),
    )
    prepared = extension._without_nvcc(request, without_nvcc, chosen)
    assert prepared
    assert prepared.tools.cuda
    assert [program.source for program in prepared.programs] == [str(tmp_path / "one.cu")]
    with_nvcc = without_nvcc._replace(cuda=nvcc_toolkit)
    assert extension._without_nvcc(request, with_nvcc, chosen), "where there is an nvcc, too"
    assert extension._without_nvcc(
        request, with_nvcc, settings.Settings.from_environ({"FLEXOPS_DEVICE_COMPILER": "nvrtc"})
    )
    assert extension._without_nvcc(request._replace(device_compiler="nvrtc"), with_nvcc, chosen)
    assert (
        extension._without_nvcc(request._replace(device_compiler="nvcc"), without_nvcc, chosen)
        is None
    )
    _request(tmp_path, KERNELS.replace('#include "points.cuh"', HEADER))
    with pytest.raises(ValueError, match="device_compiler"):
        extension._without_nvcc(request._replace(device_compiler="gcc"), without_nvcc, chosen)


NAMES = ("taken", "placed", "refused", "uncompilable")
AUTO = """
def auto(name):
    before = len(log())
    module = load(name, device_compiler="auto")
    if module is not None:
        module.gather(3)
        said[name] = len(log()) - before  # launches by the driver's own call, as NVRTC's are
"""


@pytest.mark.extra
@pytest.mark.usefixtures("nvcc_toolkit")
def test_where_both_are_nvrtc_compiles_what_it_takes_and_nvcc_the_rest(world):
    """What the splitter rejects, what g++ does not compile, what does not open, and what belongs
    elsewhere: nvcc's, by a line that says why."""
    said = world.run(
        AUTO
        + """
auto("taken")
Path(os.environ["STAND_IN_LOG"]).unlink()
load("placed", device_compiler="auto", build_directory=str(folder / "placed"))
edit("__device__ int calls;", "__device__ int calls;\\n__constant__ float table[4];")
load("refused", device_compiler="auto")
edit("__device__ int calls;", "__device__ float deep() { return 1; }\\n__device__ int calls;")
edit("__constant__ float table[4];", "static float root = rsqrtf(4.f);")
load("uncompilable", device_compiler="auto")
""",
        FLEXOPS_LOG="info",
        FLEXOPS_PCH="0",
    )
    assert "error" not in said, said["error"]
    assert said["taken"] > 5
    told = {
        name: [
            line
            for line in said["stderr"].splitlines()
            if f"nvcc compiles extension {name}, NVRTC does not: " in line
        ]
        for name in NAMES
    }
    line = KERNELS.splitlines().index("__device__ int calls;") + 2
    assert not told["taken"]
    assert not told["placed"]
    assert (
        f"points.cu, line {line}, needs nvcc: a variable in constant or managed memory"
        " (__constant__)" in told["refused"][0]
    )
    assert f"points.cu:{line + 1}:" in told["uncompilable"][0]
    assert "rsqrtf" in told["uncompilable"][0]
    assert [len(lines) for lines in told.values()] == [0, 0, 1, 1]
    said = world.run(
        'load("uncompilable", device_compiler="auto")', FLEXOPS_LOG="info", FLEXOPS_JIT="0"
    )
    assert "error" not in said, "what nvcc has compiled is in the cache"
    assert "compiles" not in said["stderr"]
    said = world.run(
        """
edit("static float root = rsqrtf(4.f);", "__host__ __device__ float both() { return deep(); }")
load("unopened", device_compiler="auto")
""",
        FLEXOPS_LOG="info",
        FLEXOPS_PCH="0",
    )
    assert "nvcc compiles extension unopened, NVRTC does not: deep()" in said["stderr"]
    assert 'calling a __device__ function("deep()")' in said["error"], (
        "an error of the user's own is nvcc's to report"
    )


@pytest.mark.extra
@pytest.mark.parametrize(
    ("listed", "flags"), [("9.0a", []), ("9.0", ["-gencode=arch=compute_90a,code=sm_90a"])]
)
def test_code_for_one_gpu_alone_stays_so_when_it_is_compiled_again(world, listed, flags):
    program = f"""
import shutil
wanted = '''#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error without its own instructions
#endif
__device__ int calls;'''
edit("__device__ int calls;", wanted)
module = load(extra_cuda_cflags={flags})
for path in Path(os.environ["FLEXOPS_CACHE_DIR"]).glob("points.cu-*"):
    said["was"] = path.name
    shutil.rmtree(path)
if module: module.gather(1)
"""
    said = world.run(program, TORCH_CUDA_ARCH_LIST=listed)
    assert "error" not in said, said["error"]
    assert "points.cu-sm_90a-" in said["was"]
    assert world.entries("points.cu-sm_90a-*")
    assert not world.entries("points.cu-sm_90-*")


def test_what_only_nvcc_compiles_is_named_with_its_line_and_the_fix(tmp_path, without_nvcc):
    request = _request(tmp_path, "\n__constant__ float table[4];\n")
    with pytest.raises(ToolchainError) as caught:
        extension._without_nvcc(request, without_nvcc, settings.Settings.from_environ({}))
    error = caught.value
    assert (
        error.what
        == "extension one: one.cu, line 2, needs nvcc: a variable in constant or managed memory"
        " (__constant__)"
    )
    assert error.found.startswith("no nvcc")
    assert "cuda-toolkit[nvcc" in error.fix or "cuda-nvcc" in error.fix
    flagged = without_nvcc._replace(environment=(("NVCC_APPEND_FLAGS", "-use_fast_math"),))
    with pytest.raises(ToolchainError, match="NVCC_APPEND_FLAGS"):
        extension._without_nvcc(
            _request(tmp_path, "__global__ void k() {}"),
            flagged,
            settings.Settings.from_environ({}),
        )
    for wrong in (
        {"cuda_cflags": ("-rdc=true",)},
        {"is_standalone": True, "is_python_module": False},
    ):
        with pytest.raises(ToolchainError):
            extension._without_nvcc(
                _request(tmp_path, "__global__ void k() {}", **wrong),
                without_nvcc,
                settings.Settings.from_environ({}),
            )


def test_the_runtimes_headers_are_found_beside_torch_without_a_toolkit(
    tmp_path, host_compiler, without_nvcc
):
    """And are enough: CUDA 13's wheel of them has no crt/, which comes with nvcc's."""
    assert without_nvcc.torch
    found = runtime_headers.find(settings.current(), without_nvcc.torch)
    assert found
    include = tmp_path / "include"
    include.mkdir()
    for name in found.include_dirs[0].iterdir():
        if name.name != "crt":
            (include / name.name).symlink_to(name)
    (tmp_path / "one.cpp").write_text(
        "#include <common/extension_launch.h>\n__global__ void __launch_bounds__(32) k(float4 x);\n"
    )
    include_flags = ("-isystem", str(include), "-idirafter", str(layout.csrc_root()))
    subprocess.run(
        [
            str(host_compiler.path),
            "-fsyntax-only",
            "-std=c++17",
            *include_flags,
            str(tmp_path / "one.cpp"),
        ],
        check=True,
    )


def test_cpp_beside_a_cu_includes_cudas_headers_as_torch_has_them(tmp_path, without_nvcc):
    """The runtime's wheel has neither crt/ nor nv/, which its headers include."""
    assert without_nvcc.torch
    known = runtime_headers.find(settings.current(), without_nvcc.torch)
    assert known
    include = tmp_path / "include"
    include.mkdir()
    for name in known.include_dirs[0].iterdir():
        if name.name not in ("crt", "nv"):
            (include / name.name).symlink_to(name)
    request = _request(tmp_path, "__global__ void k() {}\nvoid f() { k<<<1, 1>>>(); }\n")
    source = tmp_path / "two.cpp"
    source.write_text(
        "#include <cuda_runtime.h>\nfloat4 two() { return make_float4(1, 2, 3, 4); }\n"
    )
    request = request._replace(sources=(*request.sources, source))
    cuda = known._replace(include_dirs=(include,))
    prepared = extension_nvrtc.prepare(request, without_nvcc, without_nvcc.torch, cuda)
    plan = plan_extension(prepared.request, prepared.tools, extension.python_build())
    (step,) = [step for step in plan.steps if str(source) in step.inputs]
    subprocess.run([*step.command, "-fsyntax-only"], cwd=tmp_path, check=True)


def test_nvcc_finds_torchs_headers_that_its_toolkit_lacks(
    tmp_path, nvcc_toolkit, without_nvcc, monkeypatch
):
    assert without_nvcc.torch
    own, sparse = tmp_path / "own", tmp_path / "nvidia" / "cusparse" / "include"
    own.mkdir()
    sparse.mkdir(parents=True)
    (sparse / "cusparse.h").touch()
    toolkit = nvcc_toolkit._replace(include_dirs=(own,))
    found = nvcc_toolkit._replace(include_dirs=(own, sparse))
    monkeypatch.setattr(runtime_headers, "find", lambda *_: found)
    whole = runtime_headers.complete(toolkit, settings.current(), without_nvcc.torch)
    assert whole.include_dirs == (own, sparse)
    (own / "cusparse.h").touch()
    alone = runtime_headers.complete(toolkit, settings.current(), without_nvcc.torch)
    assert alone.include_dirs == (own,)
    (own / "cusparse.h").unlink()
    torch = without_nvcc.torch
    tools = without_nvcc._replace(cuda=toolkit, torch=torch)
    seen = []

    def built(request: Request, tools: Toolchain, *_: Any, **__: Any) -> None:
        assert request
        assert tools.cuda
        seen.append(tools.cuda.include_dirs)

    monkeypatch.setattr(toolchain, "discover", lambda *_, **__: tools)
    monkeypatch.setattr(extension, "_built", built)
    extension.obtain(_request(tmp_path, "", device_compiler="nvcc"), settings.current())
    assert seen == [(own, sparse)]


# ---- the code ----


def _plain(ptx: str) -> str:
    """PTX without what names its compiler, and without the names of what stands in an unnamed
    namespace."""
    ptx = re.sub(r"//.*|\.file.*|\.loc.*", "", ptx)
    for _number in range(2):
        ptx = re.sub(r"\d+_GLOBAL__N_\w*?(?=5inner|5plain)", "_GLOBAL_", ptx)
    return "\n".join(line.strip() for line in ptx.splitlines() if line.strip())


def _functions(ptx: str) -> dict[str, list[str]]:
    """Of each kernel the instructions that compute, load, store, wait and branch, with their
    immediate numbers. Not how addresses are worked out: NVRTC has them of 64 bits in shared memory,
    too."""
    found = re.findall(r"\.entry (\w+)\((.*?)\n\}", _plain(ptx), re.DOTALL)
    counted = r"(?m)^(?:@!?%p\d+\s+)?((?:[a-z]+\.)*(?:rn|f16|bf16|f16x2|f32|f64|sync|shared|global|nc|param|atom|bra|ret|call)[\w.]*)\s(.*)$"
    return {
        name: [
            f"{op} {' '.join(re.findall('0[fd][0-9A-F]+', rest))}"
            for op, rest in re.findall(counted, body)
        ]
        for name, body in found
    }


def _program(
    tmp_path: Path,
    text: str,
    nvcc_toolkit: CudaToolkit,
    expressions: tuple[str, ...],
    symbols: tuple[str, ...],
) -> Program:
    tools = toolchain.discover(settings.current(), device="cuda")
    assert tools.torch
    torch = tools.torch._replace(cuda=str(nvcc_toolkit.version), hip=None)
    request = _request(tmp_path, text)
    (program,) = extension_nvrtc.prepare(request, tools, torch, nvcc_toolkit).programs
    return program._replace(expressions=expressions, symbols=symbols)


def _compiled(program: Program, output: Path) -> str:
    choice = provider.compiler_for(settings.current(), (), asked="9.0")
    worker = Worker(choice.compiler)
    try:
        return worker.compile(
            program.plan(
                Architecture(ComputeCapability(9, 0), ptx=True, sass=False), choice.compiler
            ),
            output,
            100,
        )[0]
    finally:
        worker.stop()


def _nvcc(source: Path, output: Path, toolkit: CudaToolkit, *more: str) -> str:
    command = [
        str(toolkit.nvcc.path),
        "-ptx",
        "-arch=sm_90",
        "-std=c++20",
        "--expt-relaxed-constexpr",
        *more,
        "-o",
        str(output),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return output.read_text()


def test_the_code_is_nvccs(tmp_path, nvcc_toolkit):
    """The same kernels under the same names, and the same PTX, of the same CUDA version."""
    tools = toolchain.discover(settings.current(), device="cuda")
    nvrtc = toolchain.device_compiler(settings.current()).value
    assert nvrtc
    assert tools.torch
    (tmp_path / "points.cuh").write_text(HEADER)
    text = KERNELS + LAUNCHES.replace("static void", "void")
    expressions = (
        "gather_kernel<float, 2>",
        "gather_kernel<float, 4>",
        "gather_kernel<long, 2>",
        "count_kernel",
        "inner::last_kernel<short, double>",
        "plain",
    )
    symbols = tuple(f"_Z13gather_kernelI{one}EEvPKT_PKiPS0_i" for one in ("fLi2", "fLi4", "lLi2"))
    symbols += (
        "count_kernel",
        "_ZN12_GLOBAL__N_15inner11last_kernelIJsdEEEvPf7OptionsDpT_",
        "_ZN12_GLOBAL__N_15plainE4int2c",
    )
    program = _program(tmp_path, text, nvcc_toolkit, expressions, symbols)
    _compiled(program, tmp_path / "nvrtc.ptx")
    mine, theirs = (
        _functions((tmp_path / "nvrtc.ptx").read_text()),
        _functions(_nvcc(tmp_path / "one.cu", tmp_path / "nvcc.ptx", nvcc_toolkit)),
    )
    assert len(mine) == len(expressions)
    assert all(len(instructions) > 3 for name, instructions in mine.items() if "plain" not in name)
    assert mine.keys() == theirs.keys()
    if nvrtc.version == nvcc_toolkit.version:
        assert mine == theirs


def test_torchs_halves_are_torchs_own(tmp_path, nvcc_toolkit):
    """at::Half and at::BFloat16 in kernels: the same names, and with one CUDA version the same
    code, as where nvcc reads torch's headers."""
    text = """#include <c10/util/Half.h>
#include <c10/util/BFloat16.h>
namespace at { using c10::Half; using c10::BFloat16; }
template <typename T>
__global__ void halves(const T* x, T* y, float factor) {
  const T one = x[threadIdx.x] * T(factor) + x[0];
  y[threadIdx.x] = one > x[1] ? one / x[2] : static_cast<T>(exp(one)) - std::numeric_limits<T>::lowest();
}
__global__ void cuda_half(const __half* x, at::Half* y) { y[0] = __hadd(x[0], x[1]); }
void f() { halves<at::Half><<<1, 1>>>(nullptr, nullptr, 1.f); halves<at::BFloat16><<<1, 1>>>(nullptr, nullptr, 1.f); }
"""
    symbols = (
        "_Z6halvesIN3c104HalfEEvPKT_PS2_f",
        "_Z6halvesIN3c108BFloat16EEvPKT_PS2_f",
        "_Z9cuda_halfPK6__halfPN3c104HalfE",
    )
    tools = toolchain.discover(settings.current(), device="cuda")
    nvrtc = toolchain.device_compiler(settings.current()).value
    assert nvrtc
    assert tools.torch
    program = _program(
        tmp_path,
        text,
        nvcc_toolkit,
        ("halves<c10::Half>", "halves<c10::BFloat16>", "cuda_half"),
        symbols,
    )
    assert _compiled(program, tmp_path / "nvrtc.ptx").split("\n") == list(symbols)
    flags = [*extension_nvrtc.NVCC_DEFINES, *(f"-I{path}" for path in tools.torch.include_dirs)]
    theirs = _functions(_nvcc(tmp_path / "one.cu", tmp_path / "nvcc.ptx", nvcc_toolkit, *flags))
    mine = _functions((tmp_path / "nvrtc.ptx").read_text())
    assert mine.keys() == theirs.keys()
    if nvrtc.version == nvcc_toolkit.version:
        assert mine == theirs


def test_what_mathematics_gives_has_the_type_that_it_has_under_nvcc(tmp_path, nvcc_toolkit):
    """pow(float, int) is a double in C++, of whole numbers all are: NVRTC alone knows neither."""
    one = ["acos", "cbrt", "ceil", "cos", "erf", "exp", "exp2", "fabs", "floor", "log", "log10",
        "log2", "rint", "round", "sin", "sqrt", "tan", "tanh"]  # fmt: skip
    # of whole numbers, too: nvcc has them for host code
    one += ["isnan", "isinf", "isfinite", "signbit"]
    two = ["atan2", "copysign", "fmax", "fmin", "fmod", "hypot", "pow"]
    calls = [f"{name}({x})" for name in one for x in "fdil"] + [
        f"{name}({x}, {y})" for name in two for x in "fdil" for y in "fdil"
    ]
    calls += [f"{name}({x}, {x})" for name in ("min", "max") for x in "fdil"]
    body = "".join(f"  out[{number}] = sizeof({call});\n" for number, call in enumerate(calls))
    text = (
        "#include <cmath>\n__global__ void types(int* out, float f, double d, int i, long l)"
        f" {{\n{body}}}\n"
    )
    program = _program(tmp_path, text, nvcc_toolkit, ("types",), ("_Z5typesPifdil",))
    _compiled(program, tmp_path / "nvrtc.ptx")
    theirs = _nvcc(tmp_path / "one.cu", tmp_path / "nvcc.ptx", nvcc_toolkit)
    stored = [
        re.findall(r"st\.global|mov\.[ub]\d+\s.*", ptx)
        for ptx in ((tmp_path / "nvrtc.ptx").read_text(), theirs)
    ]
    assert stored[0].count("st.global") == len(calls)
    assert stored[0] == stored[1]


def test_mathematics_on_the_host_is_nvccs(tmp_path, nvcc_toolkit, host_compiler):
    """Outside of std: exp(float) is a float to nvcc, and min and max are there."""
    one = ["ceil", "exp", "exp10", "floor", "j0", "log", "round", "sqrt", "tanh", "y1", "isnan",
        "signbit", "abs"]  # fmt: skip
    calls = [f"{name}({x})" for name in one for x in "fd"] + [
        f"{name}({x}, {y})" for name in ("pow", "fmod", "hypot") for x in "fd" for y in "fdi"
    ]
    pairs = ["f, f", "d, d", "f, d", "d, f", "i, i", "u, u", "i, u", "u, i", "l, l", "l, 7ul",
        "7ul, l", "7ll, -3ll", "7ull, -3ll", "NAN, f", "f, NAN"]  # fmt: skip
    calls += [f"{name}({pair})" for name in ("min", "max") for pair in pairs]
    printed = "".join(
        f'  std::printf("%zu %.17g\\n", sizeof({call}), double({call}));\n' for call in calls
    )
    variables = (
        "  float f = 0.7f;\n  double d = 1.3;\n  int i = -3;\n  unsigned u = 7;\n  long l = -5;\n"
    )
    text = f"#include <cmath>\n#include <cstdio>\nint main() {{\n{variables}{printed}}}\n"
    (tmp_path / "host.cpp").write_text(f"#include <common/extension_launch.h>\n{text}")
    (tmp_path / "host.cu").write_text(text)
    flags = [
        *(f"-I{path}" for path in nvcc_toolkit.include_dirs),
        f"-I{layout.csrc_root()}",
        "-std=c++17",
    ]
    libraries = [
        str(
            next(
                path
                for folder in nvcc_toolkit.library_dirs
                for path in folder.glob("libcudart_static.a")
            )
        ),
        "-ldl",
        "-lrt",
        "-lpthread",
    ]
    commands = {
        "host": [str(host_compiler.path), *flags, str(tmp_path / "host.cpp"), *libraries],
        "nvcc": [str(nvcc_toolkit.nvcc.path), "-ccbin", str(host_compiler.path), "-std=c++17",
            "-cudart=none", str(tmp_path / "host.cu"), *libraries],
    }  # fmt: skip
    said = {}
    for name, command in commands.items():
        subprocess.run([*command, "-o", str(tmp_path / name)], check=True, capture_output=True)
        said[name] = completed([str(tmp_path / name)]).stdout.splitlines()
    assert len(said["host"]) == len(calls)
    assert dict(zip(calls, said["host"], strict=True)) == dict(
        zip(calls, said["nvcc"], strict=True)
    )


def test_two_compilers_that_do_not_mean_the_same_kernel_are_found_out(tmp_path, nvcc_toolkit):
    program = _program(
        tmp_path,
        "template <typename T> __global__ void k(T* x) {}",
        nvcc_toolkit,
        ("k<float>",),
        ("_Z1kIfEvPKT_",),
    )
    with pytest.raises(
        Exception, match="the kernel k<float> is not one and the same to both compilers"
    ):
        _compiled(program, tmp_path / "nvrtc.ptx")


def test_the_key_covers_text_options_kernels_and_compiler(tmp_path, nvcc_toolkit):
    program = _program(tmp_path, "__global__ void k(int* x) {}", nvcc_toolkit, ("k",), ("_Z1kPi",))
    compiler = toolchain.device_compiler(settings.current()).value
    assert compiler
    csrc = tmp_path / "csrc"  # flexops' own headers, of which one is another
    (csrc / "common").mkdir(parents=True)
    for header in ("extension_device.cuh", "extension_accessors.cuh"):
        (csrc / "common" / header).write_text(
            (layout.csrc_root() / "common" / header).read_text()
            + "\n" * (header == "extension_accessors.cuh")
        )
    others = [
        program,
        program._replace(text=program.text + " "),
        program._replace(options=("-DA",)),
        program._replace(expressions=("k", "j"), symbols=("_Z1kPi", "_Z1jPi")),
        program._replace(torch="another"),
        program._replace(roots=(("<csrc>", csrc), *program.roots[1:])),
    ]
    one = Architecture(ComputeCapability(9, 0))
    keys = [other.plan(one, compiler).key for other in others]
    keys += [
        program.plan(one, compiler._replace(identity="NVRTC 99")).key,
        program.plan(Architecture(ComputeCapability(8, 0)), compiler).key,
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
@pytest.mark.usefixtures("nvcc_toolkit")
def test_sources_in_the_manner_of_torchs_tutorial(tmp_path, libraries):
    """torch/extension.h, AT_DISPATCH, accessors of torch's as parameters, a pybind11 module: built,
    and its launches shown."""
    (tmp_path / "points.cu").write_text("""#include <torch/extension.h>
#include <vector>
namespace {
template <typename scalar_t>
__device__ __forceinline__ scalar_t sigmoid(scalar_t z) { return 1.0 / (1.0 + exp(-z)); }
template <typename scalar_t>
__global__ void cell_kernel(const torch::PackedTensorAccessor32<scalar_t, 3, torch::RestrictPtrTraits> gates,
                            torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> out) {
  const int n = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < gates.size(2)) out[n][c] = sigmoid(gates[n][0][c]) * gates[n][1][c];
}
template <typename T>
__global__ void scale_kernel(T* x, float factor, int64_t n) { if (threadIdx.x < n) x[threadIdx.x] = T(float(x[threadIdx.x]) * factor); }
}  // namespace
std::vector<torch::Tensor> cell(torch::Tensor gates) {
  auto out = torch::zeros({gates.size(0), gates.size(2)}, gates.options());
  const dim3 blocks((gates.size(2) + 1023) / 1024, gates.size(0));
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "cell", ([&] {
    cell_kernel<scalar_t><<<blocks, 1024>>>(gates.packed_accessor32<scalar_t, 3, torch::RestrictPtrTraits>(),
                                            out.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>());
  }));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "scale", [&] {
    scale_kernel<scalar_t><<<1, 32>>>(out.data_ptr<scalar_t>(), 0.5f, out.numel());
  });
  return {out};
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("cell", &cell); }
""")
    world_ = {
        "FOLDER": str(tmp_path),
        "LIBRARIES": str(libraries),
        "LD_LIBRARY_PATH": str(libraries),
        "STAND_IN_LOG": str(tmp_path / "log"),
    }
    program = "x = torch.ones(2, 3, 5)\nmodule = load()\nmodule and module.cell(x)\n"
    program += "said['pointer'] = x.data_ptr()\nsaid['log'] = log()\nprint(json.dumps(said))"
    env = environment(
        tmp_path / "cache", **world_, STAND_IN_PARAMETERS="1", TORCH_CUDA_ARCH_LIST="9.0"
    )
    done = completed([sys.executable, "-c", PROGRAM + program], env=env)
    said = json.loads(done.stdout.splitlines()[-1])
    assert "error" not in said, said
    accessors, scale = [line.split()[2:] for line in said["log"] if line.startswith("parameters")]
    assert accessors[0][:16] == said["pointer"].to_bytes(8, "little").hex()
    assert (
        accessors[0][16:64] == b"".join(n.to_bytes(4, "little") for n in (2, 3, 5, 15, 5, 1)).hex()
    ), "sizes and strides"
    assert scale[1:] == ["0000003f", "0a00000000000000"]
    names = [
        json.loads(path.read_text())["symbol"]
        for path in (tmp_path / "cache").glob("points.cu-sm_90-*/*/manifest.json")
    ]
    assert len(names[0].split("\n")) == 6, "two types of one kernel, four of the other"


NV_TARGET = """
#include <nv/target>
#include <memory>
int either() { NV_IF_ELSE_TARGET(NV_IS_DEVICE, (return 0;), (int one = 1; return one;)) }
int plain() { NV_IF_ELSE_TARGET(NV_IS_HOST, return 1; , int none = 0; return none;) }
int only() { NV_IF_TARGET(NV_PROVIDES_SM_90, (return 0;)) NV_IF_TARGET(NV_IS_HOST, (return 1;)) return 0; }
int old() { NV_IF_ELSE_TARGET(NV_PROVIDES_SM_35, return 1; int none = 0; , return 0;) }
int nested() { NV_IF_ELSE_TARGET(NV_IS_DEVICE, return 0; , NV_IF_ELSE_TARGET(NV_PROVIDES_SM_80, return 0;, return 1;)) }
int main() { return either() + plain() + only() + nested() + old() == 4 ? 0 : 1; }
"""


def test_headers_that_a_cuda_torch_does_not_bring_mean_the_host(tmp_path, host_compiler):
    """CUDA 13's runtime wheel has neither crt/ nor nv/, which cuda_fp16.h and, by it,
    ATen/cuda/CUDAContext.h include."""
    (tmp_path / "halves.cpp").write_text("#include <crt/host_defines.h>\n" + NV_TARGET)
    built = tmp_path / "halves"
    subprocess.run(
        [
            str(host_compiler.path),
            "-std=c++17",
            str(tmp_path / "halves.cpp"),
            "-idirafter",
            str(layout.csrc_root()),
            "-o",
            str(built),
        ],
        check=True,
    )
    assert subprocess.run([str(built)], check=False).returncode == 0


WITH_ATEN = """#include <torch/extension.h>
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAException.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <ATen/cuda/detail/IndexUtils.cuh>
#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>

#define CHECK_CUDA(x) TORCH_CHECK(x.is_cuda(), #x " must be a CUDA tensor")
constexpr int kThreads = 256;

using namespace cooperative_groups;
struct Last {
  static __host__ __device__ int of(const at::cuda::detail::TensorInfo<float, int>& info) {
    return info.sizes[info.dims - 1];
  }
};
namespace {
__device__ float shuffled(float x, int k, int width = warpSize) {
  return __shfl_xor_sync(0xffffffff, x, k, width);
}
template <typename scalar_t>
__device__ __noinline__ scalar_t sigmoid(scalar_t z) { return 1.0 / (1.0 + exp(-z)); }

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    gate_forward(const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> x, scalar_t* __restrict__ out, int64_t cols) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y;
  if (col < cols) out[row * cols + col] = x[row][col] * sigmoid(x[row][col]);
}

template <typename scalar_t>
__global__ void row_sum(const scalar_t* __restrict__ x, float* out, int cols) {
  __shared__ float part[32];
  float sum = 0;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += static_cast<float>(x[int64_t(blockIdx.x) * cols + i]);
  for (int k = 16; k > 0; k >>= 1) sum += shuffled(sum, k);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) { float t = 0; for (int i = 0; i < blockDim.x / 32; ++i) t += part[i]; out[blockIdx.x] = t; }
}
}  // namespace

at::Tensor gate(at::Tensor x) {
  CHECK_CUDA(x);
  const at::cuda::OptionalCUDAGuard guard(device_of(x));
  auto out = at::empty_like(x);
  const dim3 grid((x.size(1) + kThreads - 1) / kThreads, x.size(0));
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "gate", ([&] {
    gate_forward<scalar_t><<<grid, kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(), out.data_ptr<scalar_t>(), x.size(1));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }));
  return out;
}
at::Tensor sums(at::Tensor x) {
  auto out = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "sums", [&] {
    row_sum<scalar_t><<<x.size(0), 256, 0, at::cuda::getCurrentCUDAStream()>>>(x.data_ptr<scalar_t>(), out.data_ptr<float>(), x.size(1));
  });
  AT_CUDA_CHECK(cudaGetLastError());
  return out;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("gate", &gate); m.def("sums", &sums); }
"""


def test_a_source_with_atens_cuda_headers(tmp_path):
    """ATen/cuda, c10/cuda, CUDA's own headers, torch's checks after launches: a CUDA torch's,
    without a toolkit's; and right, where there is a GPU."""
    import torch

    if not torch.version.cuda:
        pytest.skip("needs a torch for CUDA (scripts/prove_target.sh has one for each row)")
    (tmp_path / "soft.cu").write_text(WITH_ATEN)
    program = (
        "import torch, flexops\nmodule = flexops.load('soft', ['soft.cu'],"
        " device_compiler='nvrtc')\n"
    )
    program += (
        "if torch.cuda.is_available():\n    for dtype in (torch.float32, torch.float64):\n        x"
        " = torch.randn(37, 1001, device='cuda', dtype=dtype)\n"
    )
    program += "        torch.testing.assert_close(module.gate(x), x * x.sigmoid())\n"
    program += (
        "    for dtype in (torch.float32, torch.float16, torch.bfloat16):\n        x ="
        " torch.randn(37, 1001, device='cuda').to(dtype)\n"
    )
    program += (
        "        torch.testing.assert_close(module.sums(x), x.float().sum(1), rtol=1e-4,"
        " atol=1e-3)\n"
    )
    env = environment(
        tmp_path / "cache", TORCH_CUDA_ARCH_LIST="" if torch.cuda.is_available() else "9.0"
    )
    completed([sys.executable, "-c", program], cwd=tmp_path, env=env)
    assert list((tmp_path / "cache").glob("soft.cu-*/*/manifest.json")), "NVRTC's kernels"


@pytest.mark.parametrize(
    ("headers", "parameters", "body", "expressions", "symbol"),
    [
        (
            "#include <ATen/cuda/CUDAApplyUtils.cuh>",
            "template <typename T> __global__ void k(T* out, const T* x)",
            "gpuAtomicAdd(out + at::cuda::ATenCeilDiv(2, 4), x[threadIdx.x]);",
            ["k<float>", "k<c10::Half>"],
            "_Z1kIN3c104HalfEEvPT_PKS2_",
        ),
        pytest.param(
            "#include <ATen/cuda/detail/IndexUtils.cuh>",
            "__global__ void k(at::cuda::detail::TensorInfo<int64_t, int> info, int* out)",
            "out[0] = at::cuda::detail::IndexToOffset<int64_t, int, -1>::get(threadIdx.x, info);",
            ["k"],
            "_Z1kN2at4cuda6detail10TensorInfoIliEEPi",
            marks=pytest.mark.extra,
        ),
        pytest.param(
            "#include <cub/cub.cuh>\n#include <cuda_bf16.h>\n#include <cmath>",
            "__global__ void k(const __nv_bfloat16* x, float* out, int64_t n)",
            """using Reduce = cub::BlockReduce<float, 256>;
            __shared__ typename Reduce::TempStorage storage;
            const float sum = Reduce(storage).Sum(std::abs(__bfloat162float(x[n])) + pow(2.f, 2));
            if (!isnan(sum)) out[0] = sum;""",
            ["k"],
            "_Z1kPK13__nv_bfloat16Pfl",
            marks=pytest.mark.extra,
        ),
        pytest.param(
            "#include <cuda_pipeline_primitives.h>",
            "__global__ void k(const uint64_t* x, float* out, int64_t n)",
            "__shared__ uint64_t copy[1]; __pipeline_memcpy_async(copy, x + n, 8);"
            " __pipeline_commit(); __pipeline_wait_prior(0); out[0] = copy[0];",
            ["k"],
            "_Z1kPKmPfl",
            id="pipeline",
        ),
    ],
)
def test_cuda_headers_of_torch_and_cccl_compile_without_nvcc(
    tmp_path, headers, parameters, body, expressions, symbol
):
    text = f"#include <torch/extension.h>\n{headers}\n{parameters} {{ {body} }}\n"
    halves = cuda_source.split("mine.cu", text, [], 0)
    compiler = toolchain.device_compiler(settings.current()).value
    assert compiler is not None
    found = device_headers.roots(compiler)
    roots = (
        ("<csrc>", layout.csrc_root()),
        ("<torch>", Path(torch.__file__).parent / "include"),
        ("<cuda 0>", found[0].path),
    )
    options = ("--std=c++20", "--device-as-default-execution-space")
    program = Program(
        "mine", 0, "mine.cu", halves.device, options, roots, halves.words, "", tuple(expressions)
    )
    plan = program.plan(Architecture(ComputeCapability(9, 0)), compiler)
    worker = Worker(compiler)
    try:
        symbols, _ = worker.compile(plan, tmp_path / "kernel.cubin", 300)
    finally:
        worker.stop()
    assert symbols.split("\n")[-1] == symbol
