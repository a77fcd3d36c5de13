"""The parts of flexops.load that need no compiler: flags, plans, include lines, generated text, the
HIP translation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexops.build.compile import ninja as compiler
from flexops.build.describe.cpp_text import own_headers, reaches_first
from flexops.build.load.extension_inline import cpp_text
from flexops.build.plan import cache_key, hipify
from flexops.build.plan.extension_hip import plan_hip_extension
from flexops.build.plan.extension_plan import (
    PythonBuild,
    Request,
    arguments,
    object_names,
    plan_extension,
    precompilable_flags,
)
from flexops.build.plan.plan import BuildPlan
from flexops.compute_capability import Architecture, ComputeCapability
from flexops.errors import ArchitectureError, ToolchainError
from flexops.toolchain.model import (
    CudaToolkit,
    HostCompiler,
    RocmToolkit,
    Tool,
    Toolchain,
    TorchBuild,
    Version,
)

HEADER = "torch/extension.h"
PYTHON = PythonBuild("cpython-311", Path("/py/include/python3.11"))


def toolchain(
    torch_root: Path = Path("/site/torch"),
    *,
    cuda: str | None = None,
    hip: str | None = None,
    version: str = "2.13.0",
) -> Toolchain:
    tool = Tool(Path("/bin/ninja"), Version((1, 11)), "ninja 1.11")
    nvcc, hipcc = (
        Tool(Path("/cuda/bin/nvcc"), Version((13, 0)), "nvcc 13.0"),
        Tool(Path("/rocm/bin/hipcc"), Version((7, 2)), "hipcc 7.2"),
    )
    toolkit = CudaToolkit(
        Path("/cuda"), nvcc.version, nvcc, (Path("/cuda/include"),), (Path("/cuda/lib64"),)
    )
    rocm = RocmToolkit(
        Path("/rocm"), hipcc.version, hipcc, (Path("/rocm/include"),), (Path("/rocm/lib"),)
    )
    return Toolchain(
        torch=TorchBuild(version, cuda, hip, "abcdef0123456789", True, torch_root),
        host=HostCompiler(Path("/usr/bin/g++"), Version((12, 2)), "g++ 12.2", "gcc"),
        cuda=toolkit if cuda else None,
        rocm=rocm if hip else None,
        ninja=tool,
    )


def key(plan: BuildPlan) -> str:
    return cache_key.base_key(plan, {})


def request(**changes: object) -> Request:
    return Request("ext", sources=(Path("/home/u/a.cpp"), Path("/home/u/b.cu")))._replace(**changes)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, ()),
        (["-O2", "-I /a b"], ("-O2", "-I", "/a", "b")),
        (['-DTEXT=\\"x\\"'], ('-DTEXT="x"',)),
        (["-L/lib -lfoo "], ("-L/lib", "-lfoo")),
        (["-Wl,-rpath,\\$$ORIGIN"], ("-Wl,-rpath,$ORIGIN",)),
    ],
)
def test_flags_are_split_as_ninja_and_shell_would(flags, expected):
    assert arguments("extra_cflags", flags) == expected


def test_no_two_objects_have_one_name():
    assert object_names(["/x/a.cpp", "/y/a.cpp", "/x/a.cu", "a_2.cpp"]) == [
        "a.o",
        "a_2.o",
        "a.cuda.o",
        "a_2_2.o",
    ]


def test_a_module_is_compiled_and_linked_as_torch_does():
    plan = plan_extension(
        request(sources=(Path("/home/u/a.cpp"),), cflags=("-O2",), include_dirs=("/home/u/inc",)),
        toolchain(),
        PYTHON,
    )
    compile_step, link = (" ".join(step.command) for step in plan.steps)
    assert (
        "-DTORCH_EXTENSION_NAME=ext -DTORCH_API_INCLUDE_EXTENSION_H -I/home/u/inc -isystem"
        " /site/torch/include" in compile_step
    )
    assert "-fPIC -std=c++20" in compile_step
    assert compile_step.index("-std=c++20") < compile_step.index("-O2")
    assert "-shared -L/site/torch/lib -lc10 -ltorch_cpu -ltorch -ltorch_python -o ext.so" in link
    assert "cuda" not in link


def test_cuda_sources_get_torchs_nvcc_flags():
    hopper = (Architecture(ComputeCapability.parse("9.0"), ptx=True),)
    plan = plan_extension(
        request(with_cuda=True), toolchain(cuda="13.0"), PYTHON, architectures=hopper
    )
    host, device, link = plan.steps
    assert (host.kind, device.kind) == ("host", "device")
    text = " ".join(device.command)
    for flag in (
        "-D__CUDA_NO_HALF_OPERATORS__",
        "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
        "--expt-relaxed-constexpr",
        "code=sm_90",
        "code=compute_90",
    ):
        assert flag in text
    assert device.command[-5:] == ("-std=c++20", "-c", "/home/u/b.cu", "-o", "b.cuda.o")
    assert "-isystem /cuda/include" in " ".join(host.command)
    assert "-lc10_cuda -ltorch_cpu -ltorch_cuda -ltorch -ltorch_python" in " ".join(link.command)
    comma = plan_extension(
        request(with_cuda=True, include_dirs=("/a,b",)),
        toolchain(cuda="13.0"),
        PYTHON,
        architectures=hopper,
    )
    assert "-I/a,b" in comma.steps[0].command
    assert '-I"/a,b"' in comma.steps[1].command
    own = request(with_cuda=True, cuda_cflags=("-arch=sm_80", "-std=c++17", "-ccbin=g++-11"))
    mine = plan_extension(own, toolchain(cuda="13.0"), PYTHON, architectures=hopper)
    text = " ".join(mine.steps[1].command)
    assert "gencode" not in text
    assert "c++20" not in text
    assert "-ccbin /usr" not in text


def test_without_cuda_in_torch_there_is_one_clear_error():
    with pytest.raises(ToolchainError, match="built without CUDA"):
        plan_extension(request(with_cuda=True), toolchain(), PYTHON)


def test_the_key_follows_what_matters_and_nothing_else():
    plan = plan_extension(request(), toolchain(), PYTHON)
    base = key(plan)
    for changed in (
        {"cflags": ("-O2",)},
        {"ldflags": ("-lm",)},
        {"name": "other"},
        {"is_standalone": True},
    ):
        assert key(plan_extension(request(**changed), toolchain(), PYTHON)) != base
    assert key(plan_extension(request(), toolchain(version="2.13.1"), PYTHON)) != base
    assert (
        key(plan_extension(request(), toolchain(), PYTHON._replace(identity="cpython-312"))) != base
    )
    moved = request(sources=(Path("/elsewhere/a.cpp"), Path("/elsewhere/b.cu")))
    assert key(plan_extension(moved, toolchain(Path("/other/torch")), PYTHON)) == base
    faster = plan._replace(
        jobs=8,
        nvcc_threads=4,
        steps=tuple(step._replace(speed=("--param", "x"), launched=False) for step in plan.steps),
    )
    assert key(faster) == base
    # A path in the user's own flag can end up in the binary.
    here, there = request(cflags=('-DD="/home/u"',)), moved._replace(cflags=('-DD="/elsewhere"',))
    assert key(plan_extension(here, toolchain(), PYTHON)) != key(
        plan_extension(there, toolchain(), PYTHON)
    )


def test_what_is_precompiled_is_shared_between_extensions():
    one = precompilable_flags(request(include_dirs=("/a",)), toolchain(), PYTHON)
    assert one == precompilable_flags(request(name="other"), toolchain(), PYTHON)
    assert one != precompilable_flags(request(cflags=("-O2",)), toolchain(), PYTHON)


@pytest.mark.parametrize(("text", "expected"), [
    ("#include <torch/extension.h>\n", "reached"),
    (("// #define X\n/* #define Y */\n#pragma once\n#include <vector>\n#include"
      ' "torch/extension.h"'), "reached"),
    ("#ifndef A_H\n#define A_H\n#include <torch/extension.h>\n#endif\n", "reached"),
    ("using T = int;\n#include <torch/extension.h>", "reached"),
    ('#include "good.h"\n#define X', "reached"),
    ('#include "plain.h"\n#include <torch/extension.h>', "reached"),
    ("#define X\n#include <torch/extension.h>", "unclear"),
    ("#ifdef X\n#include <torch/extension.h>\n#endif", "unclear"),
    ("#include MACRO\n#include <torch/extension.h>", "unclear"),
    ('#include "macro.h"\n#include <torch/extension.h>', "unclear"),
    ("#pragma pack(1)\n#include <torch/extension.h>", "unclear"),
    ("#include <torch/library.h>\n", "not reached"),
    ('#include "loop.h"\n', "not reached"),
])  # fmt: skip
def test_include_lines(tmp_path, text, expected):
    files = {
        "good.h": "#pragma once\n#include <torch/extension.h>\n#define Y\n",
        "plain.h": "#pragma once\nint f();\n",
        "macro.h": "#define Z 1\n",
        "loop.h": '#include "loop.h"\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert reaches_first(HEADER, text, "", [str(tmp_path)]) == expected


def test_own_headers_are_found_in_every_branch(tmp_path):
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "far.h").write_text("")
    (tmp_path / "near.h").write_text("#include <far.h>\n#include <vector>\n")
    found = own_headers(
        '#if 0\n#include "near.h"\n#endif\n', str(tmp_path), [str(tmp_path / "inc")]
    )
    assert found == [str(tmp_path / "near.h"), str(tmp_path / "inc" / "far.h")]


def test_inline_text():
    text = cpp_text("int f();", {"f": 'a "b"\n\\c'})
    assert text.splitlines()[0] == "#include <torch/extension.h>"
    assert 'm.def("f", torch::wrap_pybind_function(f), "a \\"b\\"\\n\\\\c");' in text
    assert 'm.def("f", f, "f");' in cpp_text(
        ["int f();", "int g();"], ["f", "g"], error_handling=False, implicit_headers=False
    )
    assert "PYBIND11" not in cpp_text("int f();", None)
    assert cpp_text("", "f").count("m.def") == 1
    with pytest.raises(ValueError, match="list or a dict"):
        cpp_text("", 3)  # type: ignore[arg-type]


# ---- ROCm: as text, without ROCm ----


def cuda_project(root: Path) -> tuple[Path, Path]:
    (root / "cuda").mkdir(parents=True)
    (root / "include").mkdir()
    kernel = root / "cuda" / "kernel.cu"
    kernel.write_text(
        '#include <ATen/cuda/CUDAContext.h>\n#include "local.cuh"\n#include <shared.h>\n__global__'
        " void k(float* x) { x[0] = scale(x[0]); }\nvoid run(float* x) { k<<<1, 32, 0,"
        " at::cuda::getCurrentCUDAStream()>>>(x); cudaDeviceSynchronize(); }\n"
    )
    (root / "cuda" / "local.cuh").write_text(
        "#include <cuda_fp16.h>\n__device__ inline float scale(float v) { return v; }\n"
    )
    (root / "include" / "shared.h").write_text(
        "inline cudaError_t check() { return cudaSuccess; }\n"
    )
    (root / "bind.cpp").write_text("#include <torch/extension.h>\nvoid run(float* x);\n")
    return kernel, root / "bind.cpp"


def test_hipify_writes_nothing_beside_the_users_files(tmp_path):
    kernel, binding = cuda_project(tmp_path / "project")
    before = sorted((tmp_path / "project").rglob("*"))
    build = tmp_path / "build"
    build.mkdir()
    (build / "text.cu").write_text("__global__ void t() {}\n#include <cuda.h>\n")
    sources = [str(kernel), str(binding), "text.cu"]
    order = hipify.order(
        sources, [str(tmp_path / "project" / "include")], Path(torch.__file__).parent
    )
    subprocess.run(
        [sys.executable, "-I", hipify.__file__, order], cwd=build, check=True, capture_output=True
    )
    assert sorted((tmp_path / "project").rglob("*")) == before
    translated = [
        (build / (build / hipify.wrapper(number, source)).read_text().split('"')[1]).read_text()
        for number, source in enumerate(sources)
    ]
    assert "hipLaunchKernelGGL" in translated[0]
    assert "hipDeviceSynchronize" in translated[0]
    assert "ATen/hip/HIPContext.h" in translated[0]
    assert "<shared_hip.h>" in translated[0]
    assert "void run(float* x);" in translated[1]
    assert "hip/hip_runtime.h" in translated[2]
    (mirror,) = hipify.mirrored([str(tmp_path / "project" / "include")])
    assert "hipError_t" in (build / mirror / "shared_hip.h").read_text()
    reached = cache_key.parse_depfile((build / f"{hipify.STAMP}.d").read_text())
    assert {
        str(tmp_path / "project" / name) for name in ("cuda/local.cuh", "include/shared.h")
    } <= set(reached)
    assert not [path for path in reached if path.startswith(str(build))]


def test_a_rocm_build_translates_first():
    tools = toolchain(hip="7.2", version="2.13.0+rocm7.2")
    plan = plan_hip_extension(
        request(with_cuda=True, include_dirs=("/home/u/inc",)),
        tools,
        PYTHON,
        architectures=("gfx90a",),
    )
    translate, host, device, link = plan.steps
    assert translate.kind == "hipify"
    assert json.loads(translate.command[-1])["sources"] == ["/home/u/a.cpp", "/home/u/b.cu"]
    assert (host.command[0], device.command[0]) == ("/usr/bin/g++", "/rocm/bin/hipcc")
    assert host.inputs == device.inputs == ("hipified.stamp",)
    assert "-DUSE_ROCM=1" in host.command
    assert "-Ihipified/home/u/inc -I/home/u/inc" in " ".join(device.command)
    assert "--offload-arch=gfx90a -fno-gpu-rdc" in " ".join(device.command)
    assert "-lc10_hip -ltorch_cpu -ltorch_hip" in " ".join(link.command)
    assert plan.launcher == ""
    ninja = compiler.render_ninja([plan])
    assert "build hipified_1.hip.o: ext_2 hipified.stamp" in ninja
    with pytest.raises(ArchitectureError, match="AMD"):
        plan_hip_extension(request(with_cuda=True), tools, PYTHON, architectures=())


def test_a_comment_in_a_string_hides_no_include(tmp_path):
    (tmp_path / "own.h").write_text("")
    text = 'const char* begin = "/*";\n#include "own.h"\nconst char* end = "*/";\n'
    assert own_headers(text, str(tmp_path), ()) == [str(tmp_path / "own.h")]
    assert own_headers('/* #include "own.h" */\n', str(tmp_path), ()) == []
    assert own_headers('// a \\\n#include "own.h"\n', str(tmp_path), ()) == []
