"""flexops.attention_with_kvcache on a GPU: kernels against the oracle, over flash-attn's parameter
space; nothing waits for the GPU, and a captured call follows lengths on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flexops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from test_kvcache_attention import (
    Config,
    Problem,
    configs,
    verify,
    verify_that_backward_passes_notice_writes,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", range(16))
def test_the_parameter_space_of_flash_attn(part, dtype):
    for number, config in enumerate(configs(16, dtype, 10 + part)):
        problem = Problem(config, "cuda", number)
        try:
            verify(problem)
        except AssertionError as error:
            raise AssertionError(f"{config}\n{error}") from error


SMALL = {
    "a_token": Config(
        1,
        339,
        64,
        2,
        1,
        True,
        rotary=1.0,
        interleaved=False,
        indexed=True,
        leftpad=True,
        from_leftpad=True,
    ),
    "short_sequences": Config(1, 40, 128, 1, 1, True, rotary=0.5, splits=3),
    "several_tokens": Config(5, 300, 80, 2, 3, True, (100, -1), 0.5, page=48, splits=2, sinks=True),
    "many_tiles": Config(70, 200, 64, 1, 70, True, page=32, leftpad=True, rotary=1.0),
    "no_new_tokens": Config(3, 150, 256, 6, 0, False, (20, 3), softcap=15.0, alibi=True),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_cases(name):
    for seed in range(2):
        verify(Problem(SMALL[name]._replace(dtype=torch.bfloat16), "cuda", seed))


@pytest.mark.parametrize("capacity", [20000, 128 * 1024])
@pytest.mark.parametrize("queries", [1, 16])
def test_long_caches(queries, capacity):
    verify(Problem(Config(queries, capacity, 128, 2, queries, True, dtype=torch.bfloat16), "cuda"))


def test_other_head_dims_and_dtypes_run_as_plain_pytorch():
    verify(Problem(Config(3, 300, 59, 2, 3, True, dtype=torch.bfloat16), "cuda"))
    verify(Problem(Config(3, 300, 64, 2, 3, True, dtype=torch.float32), "cuda"))


def test_a_captured_call_appends_and_attends_where_lengths_on_the_device_say():
    config = Config(1, 700, 128, 2, 1, True, rotary=1.0, page=64, dtype=torch.bfloat16)
    problem = Problem(config, "cuda")
    problem.lengths.fill_(3)
    problem.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = problem.call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for lengths in ([0, 1, 2], [127, 128, 400], [699, 12, 64]):
        problem.lengths.copy_(torch.tensor(lengths))
        expected = problem.expected()
        graph.replay()
        actual = (out.double(), lse.double(), problem.k_cache, problem.v_cache)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_what_the_device_says_wrongly_reaches_no_foreign_memory():
    q, k, v = (torch.ones(2, 1, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    caches = torch.zeros(2, 4, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
    lengths, wrong = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([64, 99], [7, -2])
    )
    out, lse = flexops.attention_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, cache_batch_idx=wrong, return_softmax_lse=True
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (caches == 0).all()
    out = flexops.attention_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)
    assert (caches == 0).all(), "tokens past the capacity are dropped"
    table = torch.tensor([[99], [-3]], dtype=torch.int32, device="cuda")
    lengths.fill_(5)
    out = flexops.attention_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, block_table=table)
    assert (caches == 0).all()
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["kernels", "plain"])
def test_a_backward_pass_notices_that_a_cache_was_written(dtype):
    verify_that_backward_passes_notice_writes("cuda", dtype)
