"""``flexops.patch(model, fp8=...)``: what is replaced, and that the model trains as before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sharded import run_ranks
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import flexops
from flexops import _torch
from flexops.errors import PatchError
from flexops.generation import products
from flexops.patching import fp8

IDS = torch.arange(48).view(2, 24) * 7 % 61


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fp8, "LEAST_SIZE", 12)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=61,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).train()


def gradients(model: Any, times: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    for _ in range(times):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def distance(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert actual.keys() == wanted.keys()
    return max(((actual[one] - wanted[one]).norm() / wanted[one].norm()).item() for one in wanted)


@pytest.mark.parametrize(
    "recipe", ["rowwise", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.extra)]
)
def test_a_patched_model_trains(model, recipe):
    plain, wanted = gradients(model)
    before = {name: one.data_ptr() for name, one in model.state_dict().items()}
    report = flexops.patch(model, fp8=recipe)
    rows = {
        (row.swapped, row.reason): row.count for row in report.rows if row.operator == "fp8_linear"
    }
    head = "an output layer or a shared weight: its products stay 16-bit"
    assert rows == {(True, ""): 14, (False, head): 1}
    assert "fp8_linear" in report.families()
    loss, found = gradients(model)
    assert 0 < abs(loss - plain) < 0.02 * plain
    assert 1e-3 < distance(found, wanted) < 0.2
    assert distance(gradients(model, 2)[1], {name: 2 * one for name, one in found.items()}) < 1e-6
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable()
    assert distance(gradients(again)[1], found) < 1e-6
    assert {name: one.data_ptr() for name, one in model.state_dict().items()} == before
    flexops.unpatch(model)
    assert distance(gradients(model)[1], wanted) == 0


def test_layers_that_read_one_tensor_are_one_product(model, monkeypatch):
    flexops.patch(model, fp8="rowwise")
    joined, wanted = gradients(model)
    called: list[int] = []
    whole = fp8.fp8_linears

    def count(x: Tensor, weights: Any, *args: Any, **kwargs: Any) -> Tensor:
        called.append(len(weights))
        return whole(x, weights, *args, **kwargs)

    monkeypatch.setattr(fp8, "fp8_linears", count)
    gradients(model)
    assert called == [3, 1] * 2  # q, k and v; o; feed-forward blocks are one function
    monkeypatch.setattr(fp8, "shared", lambda *_: None)
    monkeypatch.setattr(fp8, "gated_mlp", lambda *_: None)
    apart, found = gradients(model)
    assert torch.allclose(apart, joined, rtol=1e-3)
    assert distance(found, wanted) < 0.1


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_in_inference_mode_it_computes_the_same(model, recipe):
    """Of whose tensors no changes in place are counted."""
    flexops.patch(model, fp8=recipe)
    with torch.no_grad():
        expected = model(IDS).logits
    with torch.inference_mode():
        assert (model(IDS).logits - expected).norm() < 0.03 * expected.norm()


def test_few_rows_and_other_inputs_keep_16_bits(model, monkeypatch):
    plain, wanted = gradients(model)
    flexops.patch(model, fp8="rowwise")
    monkeypatch.setattr(fp8, "LEAST_SIZE", 20)
    loss, found = gradients(model)
    assert torch.allclose(loss, plain)
    assert distance(found, wanted) < 1e-3


def test_adapters_stay_16_bit_and_frozen_weights_have_no_gradient(model):
    peft = pytest.importorskip("peft", reason="peft is a requirement of the tests")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    _, wanted = gradients(adapted)
    flexops.patch(adapted, fp8="rowwise")
    patched = {name for name, one in adapted.named_modules() if fp8.recipe_of(one)}
    assert any(name.endswith("q_proj.base_layer") for name in patched)
    assert not any("lora" in name for name in patched)
    _, found = gradients(adapted)
    assert all("lora" in name for name in found)
    assert distance(found, wanted) < 0.3


def test_norms_behind_sums_quantize_their_results(model, monkeypatch):
    flexops.patch(model, fp8="rowwise")
    made: list[Any] = []
    known: list[bool] = []
    norm, mlp, linears = fp8.fp8_add_rms_norm, fp8.fp8_gated_mlp, fp8.fp8_linears

    def count(function: Any) -> Any:
        def counted(*args: Any, codes: Any = None, **kwargs: Any) -> Any:
            known.append(codes is not None)
            return function(*args, codes=codes, **kwargs)

        return counted

    monkeypatch.setattr(fp8, "fp8_add_rms_norm", lambda *args: made.append(norm(*args)) or made[-1])
    monkeypatch.setattr(fp8, "fp8_gated_mlp", count(mlp))
    monkeypatch.setattr(fp8, "fp8_linears", count(linears))
    loss, found = gradients(model)
    # q, k and v, o, and the block: the first norm has no sum before it, o is not behind a norm
    assert known == [False, False, True, True, False, True]
    assert len(made) == 3
    monkeypatch.setattr(fp8, "fp8_add_rms_norm", lambda *_: None)
    apart, wanted = gradients(model)
    torch.testing.assert_close(loss, apart)
    assert distance(found, wanted) < 1e-3
    flexops.unpatch(model)
    assert all("forward" not in one.__dict__ for one in model.modules())


@pytest.mark.extra
def test_codes_of_a_result_that_was_written_over_are_not_used():
    y = torch.ones(2)
    setattr(y, fp8._CODES, ("codes", y._version))
    assert fp8._codes_of(y) == "codes"
    y.add_(1)
    assert fp8._codes_of(y) is None


def test_two_processes_have_the_losses_of_one(tmp_path):
    worker = Path(__file__).with_name("fp8_worker.py")
    run_ranks(2, "cpu", tmp_path / "store", timeout=1200, worker=worker)


def test_decode_steps_are_those_of_a_model_without_fp8(model, monkeypatch):
    """Products of few rows with the norm before and the sum behind them."""
    called: list[int] = []
    product = products.product

    def count(x: Tensor, linears: Any, *args: Any, **kwargs: Any) -> Tensor:
        called.append(len(linears))
        return product(x, linears, *args, **kwargs)

    monkeypatch.setattr(products, "product", count)
    found = []
    for recipe in (None, "rowwise"):
        flexops.patch(model.eval(), fp8=recipe)
        found.append((flexops.generate(model, IDS[:1, :4], max_new_tokens=4), tuple(called)))
        flexops.unpatch(model)
        called.clear()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1][:4] == (3, 1, 2, 1)


@pytest.mark.extra
def test_a_graph_without_a_break_is_of_fp8(model):
    flexops.patch(model, fp8="rowwise")
    loss, _ = gradients(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = compiled(input_ids=IDS, labels=IDS, use_cache=False).loss
    assert torch.allclose(found, loss, rtol=1e-2)
    parts = [one for one in graphs[0].modules() if isinstance(one, torch.fx.GraphModule)]
    assert "float8_e4m3fn" in "".join(one.code for one in parts)


@pytest.mark.parametrize("found", ["8.0", "2.0", "rows"])
def test_a_gpu_without_such_products_keeps_16_bits(model, monkeypatch, found):
    def without_rows(*_: Any) -> Any:
        raise RuntimeError("scales of rows are not implemented")

    capability = (8, 0) if found == "8.0" else (8, 9)
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        gpu.setattr(_torch, "scaled_product", without_rows)
        if found == "2.0":
            gpu.delattr(torch, "_scaled_mm")
        reason = _torch._try_scaled_product(torch.device("cpu"))
    parts = {"8.0": "8.9, this GPU has 8.0", "2.0": "has no fp8 products", "rows": "scales of rows"}
    assert parts[found] in reason
    expected = gradients(model)
    monkeypatch.setattr(fp8, "fp8_refusal", lambda _: reason)
    rows = [one for one in flexops.patch(model, fp8="rowwise").rows if one.operator == "fp8_linear"]
    assert {one.reason for one in rows if "shared weight" not in one.reason} >= {reason}
    assert not any(one.swapped for one in rows)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-3, atol=1e-4)


def test_sizes_and_recipes(model, monkeypatch):
    model.model.layers[0].mlp.gate_proj = torch.nn.Linear(32, 72, bias=False)
    model.model.layers[1].self_attn.o_proj.double()
    report = flexops.patch(model, fp8="rowwise")
    assert any(row.reason == "its weight is float64" for row in report.not_swapped)
    model.float()
    assert any("72 x 32, is not a multiple of 16" in row.reason for row in report.not_swapped)
    again = flexops.patch(model, fp8="rowwise_with_gw_hp").not_swapped
    assert any(
        "replaced before, with fp8='rowwise': flexops.unpatch" in row.reason for row in again
    )
    monkeypatch.setattr(fp8, "LEAST_SIZE", 18)  # 64 x 32 alone pays, k's 16 x 32 with q and v
    flexops.unpatch(model)
    reasons = {row.reason: row.count for row in flexops.patch(model, fp8="rowwise").rows}
    assert reasons["fp8 would be slower for 32 x 32 weights"] == 2  # o_proj
    with pytest.raises(PatchError, match="no such fp8 recipe"):
        flexops.patch(model, fp8="tensorwise")
