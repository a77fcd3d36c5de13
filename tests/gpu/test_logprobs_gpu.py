"""Log-probabilities on a GPU: the kernels against the reference; the memory that chunks save."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flexops

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))
from logprobs_cases import CLASSES, check_draw

pytestmark = pytest.mark.gpu
FAMILIES = ("logprobs",)
MANY = (16384, 16391, 32000, 50257, 65537, 128256, 151936, 200001, 262144)


@pytest.mark.parametrize("classes", [CLASSES, MANY], ids=["few", "many"])
@pytest.mark.parametrize("block", range(4))
def test_cuda_gives_what_the_reference_gives(block, classes):
    for seed in range(block * 60, block * 60 + 60):
        check_draw(seed, "cuda", classes)


def test_the_peak_is_two_chunks_of_logits():
    x = torch.randn(8192, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(50000, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target = torch.randint(0, 50000, (8192,), device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        result, entropy = flexops.linear_logprobs(
            x, weight, target, return_entropy=True, chunk_size=1024
        )
        return torch.autograd.grad((result * entropy).sum(), (x, weight))

    step()  # allocates the workspace of cuBLAS
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = step()
    chunk, made = 1024 * 50000 * 2, sum(each.nbytes for each in gradients)
    # besides the gradients: the weight's float32 sum, of eight chunks
    assert torch.cuda.max_memory_allocated() - before < 2.5 * chunk + made + 4 * weight.numel()


def test_a_cuda_graph_of_forward_and_backward_pass():
    x = torch.randn(512, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(1000, 64, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(0, 1000, (512,), device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        inputs = (x.detach().requires_grad_(), weight.detach().requires_grad_())
        result, entropy = flexops.linear_logprobs(
            *inputs, target, return_entropy=True, chunk_size=200
        )
        return (result.detach(), *torch.autograd.grad((result * entropy).sum(), inputs))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    graph.replay()
    torch.cuda.synchronize()
    for actual, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
