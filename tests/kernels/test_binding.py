"""Several kernels in one operator, factories and constant arrays: as the documentation has them,
and what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flexops
from flexops.errors import FlexopsError
from flexops.kernels.structs import constant_arrays
from flexops.testing import check_kernel, emulate

PAGE = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
SUM = """
__global__ void weigh(const float* x, float* part, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) part[i] = x[i] * kWeights[i % 3];
}
__global__ void finish(const float* part, float* out, int part_numel, float scale) {
  float sum = 0;
  for (int i = 0; i < part_numel; ++i) sum += part[i];
  *out = sum * scale;
}"""
OPTIONS: dict[str, Any] = {
    "out": lambda x: x.new_empty(()),
    "workspace": {"part": lambda x: x.new_empty(x.numel())},
    "args": {"n": lambda x: x.numel()},
    "constants": {"kWeights": [1.0, 2.0, 0.5]},
    "steps": [
        {"name": "weigh", "block": 64, "grid": lambda part: -(-part.numel() // 64)},
        {"name": "finish", "grid": 1, "block": 1},
    ],
}


def weighted(x: torch.Tensor, scale: float) -> torch.Tensor:
    weights = x.new_tensor([1.0, 2.0, 0.5]).repeat(x.numel())[: x.numel()]
    return (x.flatten() * weights).sum() * scale


def define(**changes: Any) -> flexops.Kernel:
    schema = "steps::weighted(Tensor x, float scale) -> Tensor"
    return flexops.kernel(SUM, schema, reference=weighted, **{**OPTIONS, **changes})


def documented(name: str) -> flexops.Kernel:
    """The kernel of that name on the page."""
    code = next(one for one in PAGE.split("```python\n") if one.startswith(f"{name} = "))
    names: dict[str, Any] = {"flexops": flexops, "torch": torch, "__name__": "a_page"}
    exec(code.partition("```")[0], names)
    kernel: flexops.Kernel = names[name]
    return kernel


@pytest.mark.usefixtures("host_compiler")
def test_steps_share_a_workspace_and_constants():
    kernel = define()
    x = torch.randn(7, 30).t()
    torch.testing.assert_close(emulate(kernel, x, 2.0), weighted(x, 2.0))
    assert kernel(x, 2.0).shape == ()
    assert kernel.expression(x, 2.0) == "weigh, finish"
    assert set(kernel.resources(x, 2.0, arch="9.0")) == {"9.0 weigh", "9.0 finish"}
    assert kernel(torch.empty(3, device="meta"), 1.0).shape == ()


@pytest.mark.extra
@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("softmax", [(torch.randn(3, 20),), (torch.randn(2, 301),)]),
        ("ramp", [(9, 0.5, torch.float32, "cpu"), (300, 0.5, torch.bfloat16, "cpu")]),
    ],
)
def test_what_is_documented_passes_its_checks(name, cases):
    check_kernel(documented(name), cases)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": ()}, "a workspace without steps"),
        ({"args": {"m": 1, "n": 2}}, "m, which no step has"),
        ({"steps": [{"name": "weigh", "defines": {}}]}, "a step or candidate with defines"),
        ({"steps": [{"name": "weight"}]}, "one kernel called weight"),
        ({"workspace": {"parts": lambda x: x}}, "nothing says what the parameter part"),
        ({"workspace": {"part": lambda z: z}}, "for workspace of part asks for z"),
        ({"constants": {"kWeights": [float("nan")]}}, "constants cannot hold kWeights"),
        ({"constants": {"kWeights": torch.ones(3, dtype=torch.bfloat16)}}, "cannot hold kWeights"),
        ({"constants": {"kWeights": torch.ones(3) * 1j}}, "cannot hold kWeights"),
        ({"constants": {"kWeights": ["a"]}}, "constants cannot hold kWeights"),
        ({"constants": {"kWeights": torch.ones(2**15)}}, "131072 bytes"),
        ({"constants": {"kWeights": 3}}, "constants cannot hold kWeights"),
    ],
)
def test_steps_and_constants_that_do_not_fit(changes, said):
    with pytest.raises(FlexopsError, match=said):
        define(**changes)


def test_constants_in_cpp():
    made = constant_arrays(
        {"a": [[1, 2], [3, 4]], "b": [1, 0.25], "c": [True], "d": torch.ones(1).double()}
    )
    assert made.splitlines() == [
        "__constant__ int32_t a[2][2] = {{1, 2}, {3, 4}};",
        "__constant__ float b[2] = {1.0f, 0.25f};",
        "__constant__ bool c[1] = {true};",
        "__constant__ double d[1] = {1.0};",
    ]


def test_a_factory_is_where_its_device_says():
    schema = "steps::ones(int count, *, ScalarType dtype, Device? device=None) -> Tensor"
    source = """
    template <typename T> __global__ void ones(T* out, int64_t n) {
      const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
      if (i < n) out[i] = T(1);
    }"""

    def reference(count: int, *, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
        return torch.ones(count, dtype=dtype, device=device)

    ones = flexops.kernel(source, schema, reference=reference,
                          out=lambda count, dtype, device: torch.empty(count, dtype=dtype, device=device))  # fmt: skip
    assert torch.equal(ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32))
    assert ones(3, dtype=torch.half, device="meta").device.type == "meta"
    assert ones.expression(3, dtype=torch.bfloat16) == "ones<bfloat16>"
    torch.library.opcheck(ones.op, (3,), {"dtype": torch.float32, "device": torch.device("cpu")})
    compiled = torch.compile(
        lambda x: ones(x.shape[0], dtype=x.dtype, device=x.device) + x,
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    with torch.device("meta"):
        assert ones(3, dtype=torch.half).device.type == "meta"


def test_a_derivative_in_forward_mode():
    source = """
    template <typename T> __global__ void square(const T* x, T* out, int64_t n) {
      const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
      if (i < n) out[i] = x[i] * x[i];
    }"""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def tangent(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dx

    square = flexops.kernel(source, "steps::square(Tensor x) -> Tensor", reference=lambda x: x * x,
                            backward=tangent, jvp=tangent, setup_context=setup)  # fmt: skip
    x, dx = torch.randn(4), torch.randn(4)
    value, derivative = torch.func.jvp(square, (x,), (dx,))
    torch.testing.assert_close((value, derivative), (x * x, 2 * x * dx))
    torch.testing.assert_close(torch.func.jacfwd(square)(x), torch.diag(2 * x))
    torch.testing.assert_close(torch.func.hessian(lambda x: square(x).sum())(x), 2 * torch.eye(4))
    with torch.autograd.forward_ad.dual_level():
        dual = square(torch.autograd.forward_ad.make_dual(x, dx))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, 2 * x * dx)
