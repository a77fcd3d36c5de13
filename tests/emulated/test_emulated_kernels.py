"""Kernels for CUDA, run where there is no GPU: the tests of operators (tests/ops), on NVRTC's code
for 8.0 or 9.0a, translated to C++ (flexops/testing/emulator), a thread of a block being a fiber.

What is shown: that bindings, launchers and kernels together compute what reference and float64 do,
on a GPU of capability 8.0, products of a few rows and chains of them also on one of 9.0; that no
thread touches memory which is not the call's, at an address that is not aligned, or shared memory
that was not written; that threads come to the same barriers, and wait for bulk copies. What is not:
anything of timing, of the memory model's weakness, of ptxas, of tensor maps, wgmma and clusters
(most of Hopper's kernels); and races only in so far as they show when threads run one after the
other, in order or reversed. ``approx`` instructions are exact here, sums of ``mma`` rounded once.

Some of them run always, the others with ``-m slow``: those of a family are an argument of pytest's
``-k``.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import stand_in_driver
import torch
from builds import REPOSITORY, child_environment
from processes import c_library, completed

import flexops
from flexops import settings
from flexops.testing import emulate
from flexops.toolchain.model import HostCompiler

HERE = Path(__file__).resolve().parent
# By selection: tests whose results depend on kernels alone. Others ask for compilers of torch's
# own, for levels of the CPU's instructions, for a second device.
RESULTS = (
    "cpu and not (compile or opcheck or another_device or autocast or torch_func or large or isa)"
)


@pytest.fixture(scope="module")
def machine(host_compiler: HostCompiler) -> dict[str, str]:
    """The environment of a process whose GPU is emulated."""
    return {"CXX": str(host_compiler.path)}


def emulated(machine: dict[str, str], *selection: str, **variables: str) -> int:
    """How many of these tests passed; all others of the selection are skipped ones."""
    found = re.search(r"(\d+) passed", output_of(machine, *selection, **variables))
    return int(found[1]) if found else 0


def output_of(machine: dict[str, str], *selection: str, **variables: str) -> str:
    """What pytest prints of these tests, at the end the kernels that ran. What a kernel did wrong
    is in the output of the test that failed."""
    environment = child_environment(
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(HERE)]),
        FLEXOPS_TEST_CACHE=str(settings.current().cache_dir),
        **(machine | variables),
    )
    plugins = ["-p", "emulated_gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", *selection]
    done = completed(command, cwd=REPOSITORY, env=environment)
    assert re.search(r"[1-9]\d* kernels ran", done.stdout), "no kernel ran"
    return done.stdout


# ---- a header of which other projects' kernels are made ----


@pytest.mark.extra
@pytest.mark.usefixtures("host_compiler")
def test_elements_of_any_number_at_any_address_are_mapped():
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    names = {f32: "float", bf16: "flexops::bf16", f16: "flexops::f16"}
    kernel = flexops.kernel(
        """
        #include "common/map_elements.cuh"
        template <typename A, typename B, typename T>
        __global__ void mapped(const A* a, const B* b, T* out, int64_t n) {
          flexops::map_elements(out, n, [](float a, float b) { return a + 2 * b; }, a, b);
        }""",
        "emulated::mapped(Tensor a, Tensor b, Tensor(a!) out) -> ()",
        template={
            "A": lambda a: names[a.dtype],
            "B": lambda b: names[b.dtype],
            "T": lambda out: names[out.dtype],
        },
        args={"n": lambda out: out.numel()},
        block=32,
    )
    for types in ((f32,) * 3, (bf16,) * 3, (f32, bf16, f16)):
        for count, shift in itertools.product((1, 7, 8, 64, 259, 512), (0, 1, 4)):
            a, b = (torch.randn(count + shift).to(dtype)[shift:] for dtype in types[:2])
            whole = torch.full((count + shift + 9,), 99.0, dtype=types[2])
            out = whole[shift : shift + count]
            emulate(kernel, a, b, out)
            assert torch.equal(out, (a.float() + 2 * b.float()).to(types[2]))
            assert (whole[shift + count :] == 99).all()
            assert (whole[:shift] == 99).all()


# ---- operators ----

QUICK = (
    ("tests/ops/test_norm.py", "tests/ops/test_lion.py", "tests/emulated/attention_forward.py"),
    (
        "native_is_what and rms_norm-cpu-float32 and not add or formula_in_float64 and cpu or"
        " grouped_heads"
    ),
)
STEPS = ("adagrad", "adam", "adam8bit", "grad_norm", "lamb", "lion", "narrow_states")
FUNCTIONS = (
    "activation",
    "attention",
    "causal_conv1d",
    "cross_entropy",
    "few_rows",
    "gated_norm",
    "logprobs",
    "norm",
    "quant",
    "fp8",
    "rope",
    "softmax",
)


def test_a_few_kernels(machine):
    """Loops over elements and multi-tensor lists; shuffles and reductions; products of matrices."""
    files, selection = QUICK
    assert emulated(machine, *files, "-k", selection) == len(files)


# of tests of GPUs, with tensors of the CPU; each with how many there are
GROUPED = (
    "test_grouped_linear and (shape0 or shape2) and not dtype2 and (sizes0 or sizes3) or test_order"
    " and not 5000 and not 3000 or test_gated_experts and (1-2-8 or 200-1-4) or do_not_match"
    " or do_not_exist or spread_and_combine or test_routes and (4-4 or 130)"
)
CODES = "4-64-128-plain or 8-64-128-window or 4-64-64-modified or 4-32-64-plain"
OPERANDS = "bfloat16 and (bits and (17-48 or 129-272) or gated_rows and 1-16 and silu)"
NO_MULTIPLE_OF_8 = "no_multiple_of_8 and sm_80 and (60 or 36)"
FOUR_BITS = "96 and not 32-torch and not symmetric"
GROUPED_FOUR_BITS = "-32-96 and not symmetric or -64-272 and mxfp4"
PARTS = {
    "attention of head dims that are no multiple of 8":
        ("emulated/attention_forward.py", "multiple_of_8", 4),
    "products with 4-bit weights":
        ("emulated/int4_linear.py", "bfloat16 and (1-40 or 20-100 or exactly) or None-3", 4),
    "experts of few tokens":
        ("gpu/test_few_experts_gpu.py", f"float64s and bfloat16 and (72 or {FOUR_BITS})", 6),
    "grouped products with 4-bit weights by mma.sync":
        ("gpu/test_int4_grouped_gpu.py", f"float64s and bfloat16 and ({GROUPED_FOUR_BITS})", 4),
    "operands of fp8 products": ("gpu/test_fp8_linear_gpu.py", OPERANDS, 3),
    "attention over a cache: it appends, rotates, looks up pages and attends":
        ("gpu/test_kvcache_attention_gpu.py", "small_cases and (several_tokens or a_token)", 2),
    "recurrences whose state is a matrix":
        ("gpu/test_state_scan_gpu.py", "float64s and (1x1x2x8x8-2- or 64x72-17) and bfloat16", 4),
    "recurrences by chunks":
        ("gpu/test_state_scan_gpu.py", "chunks and 1x2x4x64x72-200 and not gradients", 5),
    "gradients of recurrences by chunks":
        ("gpu/test_state_scan_gpu.py", "gradients and (1x2x4x64x72-64-3 or mamba2 and 72-64)", 2),
    "the choice of tokens":
        ("ops/test_next_token.py", "cpu and not (600 or 128256 or torch.float16)", 27),
}  # fmt: skip
LARGE_PARTS = {
    "all products with 4-bit weights": ("emulated/int4_linear.py", "", 31),
    "attention over a cache of many kinds":
        ("gpu/test_kvcache_attention_gpu.py", "small_cases", 5),
    "attention over codes": ("gpu/test_kvcache_codes_gpu.py", f"attend_as and ({CODES})", 4),
    "score modifiers of attention":
        ("gpu/test_attention_gpu.py", "score_modifiers and not hopper and not flex_attention", 1),
    "functions of flex_attention":
        ("gpu/test_attention_gpu.py", "score_modifiers_of_flex_attention", 51),
    "gradients of attention with head dims of any number":
        ("gpu/test_attention_gpu.py", NO_MULTIPLE_OF_8, 6),
    "gradients of attention whose query heads share key heads":
        ("gpu/test_attention_gpu.py", "share_a_key_head and sm_80 and 64", 2),
    "mixtures of experts: products by mma.sync, order, routes":
        ("gpu/test_experts_gpu.py", GROUPED, 41),
}  # fmt: skip


@pytest.mark.extra
def test_parts_of_other_tests(machine):
    """In one process, because each imports torch and collects tests for seconds."""
    files = [f"tests/{file}" for file, _, _ in PARTS.values()]
    selections = [
        f"{file.partition('/')[2]} and ({selection})" for file, selection, _ in PARTS.values()
    ]
    output = output_of(machine, *files, "-vv", "-k", " or ".join(selections))
    for part, (file, _, least) in PARTS.items():
        assert len(re.findall(rf"^tests/{file}::.* PASSED", output, re.MULTILINE)) >= least, part


@pytest.mark.slow
@pytest.mark.parametrize("part", LARGE_PARTS)
def test_a_part_of_other_tests(machine, part):
    file, selection, least = LARGE_PARTS[part]
    assert emulated(machine, f"tests/{file}", "-k", selection) >= least


HALF = "(520 or 3080 or gelu_tanh or widths6)"  # each kind of kernel, two of four in a gated form


@pytest.mark.parametrize(
    ("shapes", "dtype", "part"),
    [
        pytest.param(HALF, "bfloat16", 2, marks=pytest.mark.extra, id="half"),
        pytest.param("small", "bfloat16", 1, marks=pytest.mark.slow, id="bfloat16"),
        pytest.param("small", "float16", 1, marks=pytest.mark.slow, id="float16"),
    ],
)
@pytest.mark.parametrize(
    ("gpu", "kernel", "count"), [("80", "7productI", 16), ("90", "product_by_fma_hopperI", 24)]
)
def test_products_of_one_and_two_rows(machine, gpu, kernel, count, shapes, dtype, part):
    """Launchers choose other kernels on 9.0, without tensor cores."""
    selection = f"small and {shapes} and torch.{dtype} and not 3-torch"
    output = output_of(
        machine, "tests/gpu/test_few_rows_gpu.py", "-k", selection, STAND_IN_GPUS=gpu
    )
    assert output.count(kernel) == count // part


CHAINS = "tests/gpu/test_few_rows_chain_gpu.py"
A_CHAIN = (
    f"{CHAINS}::test_each_phase_is_float64s"
    "[((512, 1280, (512, 128, 112)), 64, 0, False, 1)-torch.bfloat16-1]"
)


ATTENTION = f"{CHAINS}::test_attention_is_float64s"
AN_ATTENTION = f"{ATTENTION}[(5, 1, 32, 450, 449, 32, -1, True)-torch.bfloat16]"


@pytest.mark.parametrize(
    ("selection", "order", "processors", "count"),
    [
        ([A_CHAIN], "forward", 3, 1),
        ([AN_ATTENTION], "forward", 13, 1),  # of two splits
        pytest.param([A_CHAIN], "reversed", 3, 1, marks=pytest.mark.extra),
        pytest.param([AN_ATTENTION], "reversed", 7, 1, marks=pytest.mark.extra),  # of one
        pytest.param(
            [CHAINS, "-k", "112 or 4480 or 8512"], "forward", 3, 32, marks=pytest.mark.slow
        ),
        pytest.param([CHAINS, "-k", "112 and bfloat16"], "reversed", 3, 12, marks=pytest.mark.slow),
        pytest.param([ATTENTION, "-k", "not 33"], "reversed", 34, 18, marks=pytest.mark.slow),
    ],
)
def test_chains(machine, selection, order, processors, count):
    """Blocks that wait for each other, and bulk copies to a ring of stages, of which partial ones
    are read whole. In the reversed order the newest copy arrives first."""
    gpu = {"STAND_IN_GPUS": "90", "STAND_IN_SMS": str(processors), "STAND_IN_UNWRITTEN": "nan"}
    assert emulated(machine, *selection, STAND_IN_ORDER=order, **gpu) == count


SELECTIONS = dict.fromkeys(STEPS, RESULTS) | dict.fromkeys(
    FUNCTIONS, f"{RESULTS} and (native_is_what or gradients_are_float64s)"
)
SELECTIONS["attention"] += " and not float32"  # plain PyTorch on a GPU
for of_logits in ("cross_entropy", "logprobs"):  # 16-bit products into float32 need a GPU
    SELECTIONS[of_logits] += " and not (linear and float16)"
SELECTIONS["quant"] = (  # but what dequantizes memory of numpy's, which the driver does not know
    "half_a_step and not any_shape or native_gives_the_references_bits or begin_anywhere and cpu or"
    " not_finite or comes_back_exactly or span"
)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["forward", "reversed"])
@pytest.mark.parametrize("family", SELECTIONS)
def test_every_result_of_a_family(machine, family, order):
    assert emulated(
        machine, f"tests/ops/test_{family}.py", "-k", SELECTIONS[family], STAND_IN_ORDER=order
    )


@pytest.mark.slow
def test_gradients_of_attention_in_99_kilobytes_of_shared_memory(machine):
    """Tilings that GPUs of 8.6, 8.9 and 12.x take."""
    assert emulated(
        machine,
        "tests/ops/test_attention.py",
        "-k",
        "any_head_dim and (192 or 256) and not reference and not dtype0",
        STAND_IN_GPUS="86",
    )


@pytest.mark.slow
def test_chunks_of_recurrences_in_99_kilobytes_of_shared_memory(machine):
    """The next chunk is copied when this one has been computed."""
    selection = "chunks and 200 and not many_states"
    assert emulated(
        machine, "tests/gpu/test_state_scan_gpu.py", "-k", selection, STAND_IN_GPUS="86"
    )


# ---- people's own sources ----

SOURCE = r"""
#include <torch/extension.h>
template <typename scalar_t>
__device__ __forceinline__ scalar_t sigmoid(scalar_t z) { return 1.0 / (1.0 + exp(-z)); }
namespace {
template <typename scalar_t>
__global__ void __launch_bounds__(256) gate_kernel(const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> x, scalar_t* out, int64_t cols) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y;
  if (col < cols) out[row * cols + col] = x[row][col] * sigmoid(x[row][col]);
}
template <typename scalar_t>
__global__ void sum_kernel(const scalar_t* __restrict__ x, float* out, int cols) {
  __shared__ float part[8];
  float sum = 0;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += static_cast<float>(x[int64_t(blockIdx.x) * cols + i]);
  for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) for (int warp = 0; warp < 8; ++warp) out[blockIdx.x] += part[warp];
}
}  // namespace
torch::Tensor gate(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const dim3 grid((x.size(1) + 255) / 256, x.size(0));
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "gate", ([&] {
    gate_kernel<scalar_t><<<grid, 256>>>(x.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(), out.data_ptr<scalar_t>(), x.size(1));
  }));
  return out;
}
torch::Tensor sums(torch::Tensor x) {
  auto out = torch::zeros({x.size(0)}, torch::kFloat);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "sums", [&] {
    sum_kernel<scalar_t><<<x.size(0), 256>>>(x.data_ptr<scalar_t>(), out.data_ptr<float>(), x.size(1));
  });
  return out;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("gate", &gate); m.def("sums", &sums); }
"""
CALLS = """
import os
from functools import partial
from flexops.build.load import provider
provider.compiler_for = partial(provider.compiler_for, asked="compute_80")
provider.machine_code = lambda _: iter(())
torch.version.cuda = torch.version.cuda or "13.0"  # a torch for CPUs compiles just as well
module = flexops.load("people", [os.environ["FOLDER"] + "/people.cu"], device_compiler="nvrtc", extra_ldflags=["-L" + os.environ["FOLDER"]])
for dtype in (torch.float32, torch.float64):
    x = torch.randn(5, 333, dtype=dtype)
    torch.testing.assert_close(module.gate(x), x * x.sigmoid())
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    x = torch.randn(5, 333).to(dtype)
    torch.testing.assert_close(module.sums(x), x.double().sum(1).float(), rtol=1e-5, atol=1e-5)
said["right"] = True
"""


@pytest.mark.slow
# for the headers of CUDA's runtime, which a torch for CPUs does not bring
@pytest.mark.usefixtures("nvcc_toolkit")
def test_a_source_with_torchs_headers_computes_without_nvcc(tmp_path, host_compiler):
    """Split for g++ and NVRTC: accessors and halves of torch's, shuffles and shared memory, an
    anonymous namespace's kernels."""
    (tmp_path / "people.cu").write_text(SOURCE)
    c_library(host_compiler.path, tmp_path / "libc10_cuda.so", "/dev/null")
    stand_in_driver.build(tmp_path, host_compiler)
    made = tmp_path / "emulated"
    made.mkdir()
    ptx = str(REPOSITORY / "flexops/testing/emulator/ptx.py")
    known = {
        "STAND_IN_GPUS": "80",
        "STAND_IN_SMS": "108",
        "STAND_IN_TRANSLATOR": shlex.join([sys.executable, "-S", "-E", ptx, str(made)]),
        "CXX": str(host_compiler.path),
        "FOLDER": str(tmp_path),
        "TORCH_CUDA_ARCH_LIST": "8.0",
        "FLEXOPS_PCH": "0",
        "FLEXOPS_CACHE_DIR": str(tmp_path / "cache"),
    }
    answer = stand_in_driver.run(tmp_path, CALLS, PYTHONPATH=str(REPOSITORY), **known)
    assert answer.said == {"right": True}, f"{answer.said}{answer.errors}"
    assert len([one for one in answer.launches if one.status == 0]) == 6
