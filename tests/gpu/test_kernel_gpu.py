"""``flexops.kernel`` on a GPU: values, graphs, compile, streams, threads, a first call in capture."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
import torch
from torch import Tensor

import flexops

pytestmark = pytest.mark.gpu

SCALE = """
template <typename T> __global__ void scale(const T* x, T* out, float factor, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = T(float(x[i]) * factor);
}"""
ROWS = """
extern __shared__ float part[];
template <typename T, bool mean> __global__ void row_sums(const T* x, T* out, int x_size1) {
  float sum = 0;
  for (int i = threadIdx.x; i < x_size1; i += blockDim.x) sum += x[blockIdx.x * int64_t(x_size1) + i];
  part[threadIdx.x] = sum;
  for (int half = blockDim.x / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = mean ? part[0] / x_size1 : part[0];
}"""


def fresh(source: str) -> str:
    """The same code, changed so that it was not compiled before."""
    return f"{source}\n// {uuid.uuid4()}\n"


def make_scale(name: str, source: str = SCALE, **options: Any) -> flexops.Kernel:
    return flexops.kernel(
        source,
        f"gpu_kernels::{name}(Tensor x, float factor) -> Tensor",
        name="scale",
        reference=lambda x, factor: x * factor,
        **options,
    )


@pytest.fixture(scope="module")
def scale() -> flexops.Kernel:
    return make_scale("scale")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (1000,), (257, 1023), (0, 3)])
def test_values(scale, dtype, shape):
    x = torch.randn(shape, device="cuda").to(dtype)
    assert torch.equal(scale(x, 1.5), (x.float() * 1.5).to(dtype))
    assert torch.equal(scale(x, 1.5), scale.op(x, 1.5))


def test_strides_views_and_more_than_2_to_31_elements(scale, require_gpu_memory):
    x = torch.randn(64, 33, device="cuda").t()
    assert torch.equal(scale(x, 2.0), x * 2)
    y = torch.randn(1001, device="cuda")[1:]  # not aligned to 16 bytes
    assert torch.equal(scale(y, 2.0), y * 2)
    require_gpu_memory(10 * 2**30)
    large = torch.ones(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    assert scale(large, 2.0)[-5:].tolist() == [2.0] * 5


@pytest.mark.parametrize("columns", [1, 100, 4096, 60000])
def test_shared_memory_template_values_and_a_function_for_the_result(columns):
    sums = flexops.kernel(
        ROWS,
        "gpu_kernels::row_sums(Tensor x, bool mean=False) -> Tensor",
        grid=lambda x: x.shape[0],
        block=256,
        shared=lambda x: 4 * max(256, min(x.shape[1], 20000)),
        out=lambda x: x.new_empty(x.shape[0]),
    )
    x = torch.randn(7, columns, device="cuda")
    torch.testing.assert_close(sums(x), x.sum(1), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sums(x, True), x.mean(1), rtol=1e-4, atol=1e-3)


def test_out_arguments_autograd_and_opcheck(scale):
    fill = flexops.kernel("__global__ void fill(float* y, float value, int n) { if (threadIdx.x < n) y[threadIdx.x] = value; }",
                          "gpu_kernels::fill(Tensor(a!) y, float value) -> ()")  # fmt: skip
    y = torch.zeros(7, device="cuda")
    assert fill(y, 3.0) is None
    assert torch.equal(y, torch.full_like(y, 3.0))
    assert torch.equal(
        torch.compile(lambda y: (fill(y, 4.0), y + 1)[1], fullgraph=True)(y),
        torch.full_like(y, 5.0),
    )
    torch.library.opcheck(scale.op, (torch.randn(5, device="cuda"), 2.0))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor, ctx.shape = inputs[1], output.shape

    trained = make_scale(
        "trained",
        backward=lambda ctx, grad: (scale(grad.expand(ctx.shape), ctx.factor), None),
        setup_context=setup,
    )
    x = torch.randn(5, device="cuda", requires_grad=True)
    for call in (trained, torch.compile(trained, fullgraph=True)):
        assert torch.equal(torch.autograd.grad(call(x, 3.0).sum(), x)[0], torch.full_like(x, 3.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_backward_there_is_no_gradient(scale, compiled):
    fill = flexops.kernel(
        "__global__ void set(float* y, float value, int n) { if (threadIdx.x < n) y[threadIdx.x] ="
        " value; }",
        "gpu_kernels::set(Tensor(a!) y, float value) -> ()",
    )

    def filled(x: Tensor) -> Tensor:
        y = x * 2
        fill(y, 5.0)
        return y

    def scaled(x: Tensor) -> Tensor:
        return scale(x, 2.0)

    x = torch.ones(3, device="cuda", requires_grad=True)
    for call in (filled, scaled):
        run = torch.compile(call, fullgraph=True) if compiled else call
        with pytest.raises(Exception, match=r"has no gradient: call it under torch.no_grad"):
            run(x).sum().backward()
        assert x.grad is None
        with torch.no_grad():
            assert torch.equal(run(x), torch.full_like(x, 5.0 if call is filled else 2.0))
    assert torch.equal(scale(x, 2.0), torch.full_like(x, 2.0)), "nothing asks for a gradient"


def test_transforms_and_no_derivative_in_forward_mode():
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor, ctx.shape = inputs[1], output.shape

    trained = make_scale(
        "transformed",
        backward=lambda ctx, grad: (trained(grad.expand(ctx.shape), ctx.factor), None),
        setup_context=setup,
    )
    x = torch.ones(3, 4, device="cuda")
    expected = torch.full_like(x, 8.0)
    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        assert torch.equal(transform(lambda x: trained(x, 2.0).square().sum())(x), expected)
    with pytest.raises(NotImplementedError, match="has no derivative in forward mode"):
        torch.func.jvp(lambda x: trained(x, 2.0), (x,), (x,))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_torch_compile(scale, mode):
    compiled = torch.compile(lambda x: scale(x.relu(), 2.0) + 1, fullgraph=True, mode=mode)
    for _ in range(4):
        x = torch.randn(100, device="cuda")
        torch.testing.assert_close(compiled(x), x.relu() * 2 + 1)


def test_cuda_graphs_and_a_first_call_in_capture():
    new = make_scale("in_capture", fresh(SCALE))
    x, graph = torch.ones(100, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = new(x, 2.0)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out, torch.full_like(x, 2 * value))


def test_streams(scale):
    """A launch on another stream waits for what is queued there, not for the default one's."""
    stream = torch.cuda.Stream()
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        out = scale(x, 2.0)
    stream.synchronize()
    assert torch.equal(out, torch.full_like(x, 6.0))


def test_threads_that_call_first_and_a_thread_without_a_context():
    new = make_scale("on_threads", fresh(SCALE))
    results: list[bool] = []

    def work(factor: float) -> None:
        x = torch.ones(1000, device="cuda")
        for _ in range(300):
            results.append(bool((new(x, factor) == factor).all()))

    threads = [threading.Thread(target=work, args=(float(number + 1),)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert results == [True] * 600
    x = torch.ones(10, device="cuda")
    out = torch.empty_like(x)
    fill = flexops.kernel("__global__ void put(const float* x, float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x] + 1; }",
                          "gpu_kernels::put(Tensor x, Tensor(a!) y) -> ()")  # fmt: skip
    fill.compile(x, out)
    alone = threading.Thread(target=fill, args=(x, out))
    alone.start()
    alone.join(600)
    assert torch.equal(out, x + 1)


@pytest.mark.usefixtures("two_gpus")
def test_another_device(scale):
    x = torch.ones(10, device="cuda:1")
    assert torch.equal(scale(x, 2.0), x * 2)
    assert torch.cuda.current_device() == 0


def test_tensors_of_two_devices_are_refused():
    add = flexops.kernel(
        "__global__ void add(const float* x, const float* y, float* out, int n) {}",
        "gpu_kernels::add(Tensor x, Tensor y) -> Tensor",
    )
    with pytest.raises((ValueError, RuntimeError), match=r"device|CPU|cpu"):
        add(torch.ones(2, device="cuda"), torch.ones(2))


def test_what_the_gpu_refuses_is_said(scale):
    big = make_scale("too_many_threads", block=lambda: 2048)
    with pytest.raises(
        RuntimeError,
        match=r"too_many_threads: CUDA error: .*block \(2048, 1, 1\).* block x from 1 to 1024",
    ):
        big(torch.ones(3, device="cuda"), 1.0)
    bounded = flexops.kernel(
        fresh(SCALE)
        .replace("void scale", "void __launch_bounds__(kMost) scale", 1)
        .replace("template", "constexpr int kMost = 32; template", 1),
        "gpu_tests::bounded(Tensor x, float factor) -> Tensor",
        name="scale",
    )
    with pytest.raises(RuntimeError, match=r"the kernel has __launch_bounds__\(kMost\)"):
        bounded(torch.ones(300, device="cuda"), 1.0)
    x = torch.ones(3, device="cuda")
    assert torch.equal(scale(x, 2.0), x * 2), "the process goes on"
