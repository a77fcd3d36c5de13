"""4-bit checkpoints on a GPU: loaded there, moved there, generated with and saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import test_mxfp4
import torch
from test_checkpoints import (
    GOLDEN,
    X,
    assert_no_worse_than_rounding,
    layers,
    llama,
    load,
    logits,
)
from test_expert_layers import make, of_experts
from transformers import AutoModelForCausalLM

import flexops
from flexops.nn import Int4Linear
from flexops.ops import few_rows_chain
from flexops.patching import Int4Config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("transformers_models")]
KINDS = ("gptq", "awq", "written", "quantized")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = llama()
    model.save_pretrained(folder / "16")
    flexops.patch(model, weights=Int4Config(group_size=32, symmetric=True))
    model.save_pretrained(folder / "written")
    return {
        "gptq": GOLDEN / "gptq",
        "awq": GOLDEN / "awq",
        "written": folder / "written",
        "quantized": folder / "16",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_on_the_gpu_it_computes_and_generates(kind, folders):
    model: Any = AutoModelForCausalLM.from_pretrained(
        folders[kind], quantization_config=Int4Config(), device_map="cuda"
    )
    assert all(one.packed.device.type == "cuda" for one in layers(model).values())
    assert_no_worse_than_rounding(model, model.dtype)
    flexops.patch(model)
    assert_no_worse_than_rounding(model, model.dtype)
    tokens = model.generate(X.cuda(), max_new_tokens=8, do_sample=False)
    assert tokens.shape == (1, X.shape[1] + 8)
    steps = "few_rows_chain" if few_rows_chain.runs_on(model.device) else "int4_few_rows"
    status = {one.op: one.backend for one in flexops.status() if one.device == "cuda"}
    assert {status[steps], status["int4_linear"]} <= {"aot", "jit"}, status


@pytest.mark.parametrize("kind", KINDS)
def test_moved_after_patching_it_computes_the_same(kind, folders):
    direct: Any = AutoModelForCausalLM.from_pretrained(
        folders[kind], quantization_config=Int4Config(), device_map="cuda"
    )
    moved = load(folders[kind])
    for model in (direct, moved):
        flexops.patch(model)
    before = logits(moved)
    moved.cuda()
    for name, one in layers(moved).items():
        theirs = layers(direct)[name]
        # a scale may be rounded in another way where it is computed on the GPU
        same = (flexops.unpack_int4(one.weight) - flexops.unpack_int4(theirs.weight)).abs()
        assert same.max() <= (0 if kind != "quantized" else 2 * theirs.scales.abs().max())
    if kind != "quantized":
        assert torch.equal(logits(moved), logits(direct))
    assert torch.equal(logits(moved.cpu()), before)


def test_saved_from_the_gpu_it_is_the_same(tmp_path):
    model = llama().cuda()
    flexops.patch(model, weights="int4")
    model.save_pretrained(tmp_path)
    again = load(tmp_path).cuda()
    flexops.patch(again)
    assert torch.equal(logits(again), logits(model))


def test_an_input_on_another_device_is_named():
    layer = Int4Linear.from_linear(torch.nn.Linear(64, 32)).cuda()
    with pytest.raises((ValueError, RuntimeError), match="cpu"):
        layer(torch.ones(2, 64))


def test_the_gradient_of_the_input_is_that_of_the_dequantized_weight():
    layer = Int4Linear.from_linear(torch.nn.Linear(128, 64, dtype=torch.bfloat16)).cuda()
    x = torch.randn(3, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    layer(x).backward(grad)
    assert x.grad is not None
    expected = grad.double() @ flexops.unpack_int4(layer.weight, torch.float32).double()
    assert (x.grad.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_copies_share_nothing():
    model = load(GOLDEN / "awq").cuda()
    other = copy.deepcopy(model)
    before = logits(model)
    for one in layers(other).values():
        one.scales.zero_()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_a_mixture_decodes_in_graphs(name):
    model = make(name, torch.bfloat16)
    report = flexops.patch(model, weights="int4")
    assert any(row.operator == "generation: one graph per token" for row in report.swapped)
    one = next(iter(of_experts(model).values()))
    x, choices = torch.randn(6, 64).bfloat16(), torch.randint(4, (6, 2))
    weights = torch.rand(6, 2)
    expected = one(x, choices, weights).float()
    model.cuda()
    actual = one(x.cuda(), choices.cuda(), weights.cuda()).float().cpu()
    assert (actual - expected).abs().max() <= 0.02 * expected.abs().max()
    ids = torch.randint(3, 60, (2, 5), device="cuda")
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    found = flexops.generate(model, ids, max_new_tokens=8, eos_token_id=())
    assert torch.equal(found, wanted)


def test_experts_in_mxfp4_decode_in_graphs_and_are_saved(tmp_path):
    test_mxfp4.write(tmp_path)
    plain = logits(test_mxfp4.theirs(tmp_path, torch.float32))
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Int4Config(), device_map="cuda"
    )
    report = flexops.patch(model)
    assert any(row.operator == "generation: one graph per token" for row in report.swapped)
    assert (logits(model).cpu() - plain).norm() <= 0.1 * plain.norm()
    ids = torch.randint(3, 60, (2, 5), device="cuda")
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    found = flexops.generate(model, ids, max_new_tokens=8, eos_token_id=())
    assert torch.equal(found, wanted)
    status = {one.op: one.backend for one in flexops.status() if one.device == "cuda"}
    assert status["few_experts"] in ("aot", "jit"), status
    model.save_pretrained(tmp_path / "again")
    test_mxfp4.assert_same_files(tmp_path, tmp_path / "again")
