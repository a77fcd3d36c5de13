"""``flexops.patch`` on transformers' own models: what a patched model computes is what the plain
one computes."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import zoo
from torch import Tensor, nn

import flexops
from flexops.build.load import loader
from flexops.errors import PatchError
from flexops.nn import linears


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def results(model: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Loss, logits if there are any, and the gradient of every parameter."""
    model.zero_grad()
    with tiny.eagerly(model):
        output = model(**inputs, **options)
        output.loss.backward()
    found = {
        name: value.grad.float()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    found["loss"] = output.loss.detach().float()
    if output.logits is not None:
        found["logits"] = output.logits.detach().float()
    return found


def distance(
    actual: dict[str, Tensor], expected: dict[str, Tensor], least: float = 0.001
) -> dict[str, float]:
    """Of each tensor, relative to its size; or to a part of the largest's, for those that are 0 but
    for rounding (the bias of keys)."""
    assert actual.keys() == expected.keys()
    least *= max(
        value.norm().item() for name, value in expected.items() if name not in ("loss", "logits")
    )
    return {
        name: ((actual[name] - value).norm() / value.norm().clamp(min=least)).item()
        for name, value in expected.items()
    }


def visible(found: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the logits of padding, which mean nothing."""
    if "attention_mask" in inputs and "logits" in found:
        found["logits"] = found["logits"][inputs["attention_mask"].bool()]
    return found


def logits_too(name: str) -> dict[str, Any]:
    return {"skip_logits": False} if name != "vit" else {}


@pytest.mark.parametrize("name", tiny.ALL)
@pytest.mark.parametrize("padding", ["", "left", "right"])
def test_a_patched_model_computes_the_same(name: str, padding: str) -> None:
    if name == "vit" and padding:
        return  # there is no padding among pictures
    model = tiny.model(name)
    inputs = tiny.batch(name, padding=padding)
    expected = visible(results(model, inputs), inputs)
    flexops.patch(model)
    actual = visible(results(model, inputs, **logits_too(name)), inputs)
    differences = distance(actual, expected)
    assert max(differences.values()) < 2e-5, differences


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", tiny.ALL)
def test_in_bfloat16_it_is_no_further_from_the_truth(name: str, device: str) -> None:
    truth = {
        key: value.to(device) for key, value in results(tiny.model(name), tiny.batch(name)).items()
    }
    model, inputs = (
        tiny.model(name, torch.bfloat16).to(device),
        {key: value.to(device) for key, value in tiny.batch(name, torch.bfloat16).items()},
    )
    plain = distance(results(model, inputs), truth, 0.1)
    flexops.patch(model)
    patched = distance(results(model, inputs, **logits_too(name)), truth, 0.1)
    assert max(patched.values()) < 1.5 * max(plain.values()), (patched, plain)
    assert sum(patched.values()) < 1.2 * sum(plain.values()), (patched, plain)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_under_autocast_the_last_norm_gives_float32(name):
    """It reads a sum in float32, which no linear layer reads next."""
    model = zoo.tiny(name).base_model.eval()
    tokens = torch.arange(3, 21).view(2, 9)
    with torch.no_grad():
        truth = model(tokens).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16):
            plain = model(tokens).last_hidden_state
            flexops.patch(model)
            patched = model(tokens).last_hidden_state
    assert patched.dtype == plain.dtype == torch.float32
    assert (patched - truth).norm() < 1.2 * (plain - truth).norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layer_norms_that_autocast_widens(device, monkeypatch):
    """ELECTRA's layers read a linear layer's result, so that torch's layer norms alone, on a GPU,
    make the residual float32."""
    if device == "cpu":
        monkeypatch.setattr(
            "flexops.patching.forwards.widens_layer_norm",
            lambda x: x.dtype == torch.bfloat16 and torch.is_autocast_enabled("cpu"),
        )
    model = zoo.tiny("electra").electra.eval().to(device)
    tokens = torch.arange(3, 21, device=device).view(2, 9)
    with torch.no_grad():
        truth = model(tokens).last_hidden_state
        with torch.autocast(device, torch.bfloat16):
            plain = model(tokens).last_hidden_state
            flexops.patch(model)
            patched = model(tokens).last_hidden_state
    assert patched.dtype == torch.float32
    if device == "cuda":
        assert plain.dtype == torch.float32
    assert (patched - truth).norm() < 1.1 * (plain - truth).norm()


@pytest.mark.parametrize("label", [97, -1])
def test_a_label_that_is_no_word_is_an_error_as_in_torch(label):
    model, inputs = tiny.model("llama"), tiny.batch("llama")
    label = tiny.WORDS["vocab_size"] if label > 0 else label
    inputs["labels"][1, 3] = label
    for _ in range(2):
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            model(**inputs)
        flexops.patch(model)
    inputs["labels"][1, 3] = 5
    assert model(**inputs).loss.isfinite()


@pytest.mark.parametrize("name", [*tiny.CAUSAL, "bert"])
def test_in_training_the_loss_needs_no_logits(name: str) -> None:
    model, inputs = tiny.model(name), tiny.batch(name, padding="right")
    expected = results(model, inputs)
    report = flexops.patch(model)
    assert [
        row.operator
        for row in report.swapped
        if row.module.endswith(("ForCausalLM", "ForMaskedLM"))
    ] != [], report
    actual = results(model, inputs)
    assert "logits" not in actual
    del expected["logits"]
    differences = distance(actual, expected)
    assert max(differences.values()) < 2e-5, differences


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": torch.tensor(50)},
        {"num_items_in_batch": 7},
        {"ignore_index": 5},
        {"shift_labels": ...},
    ],
    ids=str,
)
def test_the_loss_has_transformers_options(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They reach attention, too, which stays ours."""
    model, inputs = tiny.model("llama"), tiny.batch("llama")
    if "shift_labels" in options:
        options = {"shift_labels": inputs["labels"].roll(2, 1)}
    inputs["labels"] = inputs["labels"].clamp(min=5)
    expected = results(model, inputs, **options)
    del expected["logits"]
    flexops.patch(model)
    declined: list[Any] = []
    monkeypatch.setattr(loader, "decline", lambda *said: declined.append(said))
    differences = distance(results(model, inputs, **options), expected)
    assert max(differences.values()) < 2e-5, differences
    assert declined == []


def test_logits_come_where_they_are_asked_for() -> None:
    model, inputs = tiny.model("llama"), tiny.batch("llama")
    flexops.patch(model)
    assert model(**inputs).logits is None
    assert model(**inputs, skip_logits=False).logits.shape[1] == tiny.LENGTH
    assert model(**inputs, logits_to_keep=tiny.LENGTH).logits.shape[1] == tiny.LENGTH
    assert model(inputs["input_ids"]).logits.shape[1] == tiny.LENGTH
    assert model(**inputs, return_dict=False)[0].dim() == 0
    model.eval()
    assert model(**inputs).logits is not None
    assert model(**inputs, skip_logits=True).logits is None
    model.loss_function = lambda logits, labels, vocab_size, **_: (
        logits.float().mean() + labels.float().mean() * 0 + vocab_size * 0
    )
    model.train()
    assert model(**inputs).loss == model(**inputs).logits.float().mean(), (
        "a loss function of somebody's own gets logits"
    )


def attention_row(report: flexops.patching.Report) -> flexops.patching.Row:
    return next(row for row in report.rows if row.operator == "attention")


def test_eager_attention_that_was_chosen_stays() -> None:
    model = tiny.model("llama", attn_implementation="eager").eval()
    row = attention_row(flexops.patch(model))
    assert not row.swapped
    assert 'attn_implementation="eager"' in row.reason
    assert model.config._attn_implementation == "eager"
    weights = model(**tiny.batch("llama"), output_attentions=True).attentions
    assert weights[0].shape[-1] == tiny.LENGTH
    for chosen in ("sdpa", None):  # the default, written out or not
        assert attention_row(flexops.patch(tiny.model("llama", attn_implementation=chosen))).swapped
    model = tiny.model("llama")
    flexops.patch(model)
    model.set_attn_implementation("eager")
    flexops.unpatch(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("name", tiny.ALL)
def test_weights_of_attention_are_transformers_own(name: str, padding: str) -> None:
    if name == "vit" and padding:
        return  # there is no padding among pictures
    model, inputs = tiny.model(name).eval(), tiny.batch(name, padding=padding)
    with tiny.eagerly(model), torch.no_grad():
        expected = model(**inputs, output_attentions=True)
    assert attention_row(flexops.patch(model)).swapped
    with torch.no_grad():
        actual = model(**inputs, output_attentions=True)
    assert len(actual.attentions) == len(expected.attentions) == 2
    seen = inputs["attention_mask"].bool() if padding else torch.ones(3, 1, dtype=torch.bool)
    for ours, theirs in zip(actual.attentions, expected.attentions, strict=True):
        ours, theirs = (x.transpose(1, 2)[seen.expand(3, x.shape[2])] for x in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert model(**inputs).attentions is None


def test_assisted_generation_with_weights() -> None:
    model, helper = (tiny.model("llama").eval() for _ in range(2))
    inputs = tiny.batch("llama")
    asked: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    asked |= {"output_attentions": True, "assistant_model": helper, "return_dict_in_generate": True}
    tokens = inputs["input_ids"][:1]
    with tiny.eagerly(model), tiny.eagerly(helper):
        expected = model.generate(tokens, **asked)
    flexops.patch(model)
    actual = model.generate(tokens, **asked)
    assert actual.sequences.equal(expected.sequences)
    assert len(actual.attentions) == len(expected.attentions)
    for ours, theirs in zip(actual.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)


def test_a_head_whose_weight_alone_was_resized_has_the_fused_loss():
    """Marian ties the resized weight to a head that keeps its number of outputs."""
    model = zoo.tiny("marian")
    inputs = zoo.batch(model, False)
    flexops.patch(model)
    model.resize_token_embeddings(103, mean_resizing=False)
    output = model(**inputs)
    assert output.logits is None
    expected = model(**inputs, skip_logits=False)
    assert expected.logits.shape[-1] == 103
    torch.testing.assert_close(output.loss, expected.loss)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_checkpointing_of_every_kind(name: str, reentrant: bool, wrapped: bool) -> None:
    """By transformers, which tells its layers, and by torch's wrapper, of which they know nothing:
    a layer that runs twice sees the same both times."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

    model, inputs = tiny.model(name, use_cache=False), tiny.batch(name)
    expected = results(model, inputs)
    flexops.patch(model)
    if wrapped:
        kind = torchs.CheckpointImpl.REENTRANT if reentrant else torchs.CheckpointImpl.NO_REENTRANT
        model.model.layers = nn.ModuleList(
            torchs.checkpoint_wrapper(layer, checkpoint_impl=kind) for layer in model.model.layers
        )
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = {
        key.replace("_checkpoint_wrapped_module.", ""): value
        for key, value in results(model, inputs, **logits_too(name)).items()
    }
    differences = distance(actual, expected)
    assert max(differences.values()) < 2e-5, differences


def test_a_norms_epsilon_is_that_of_the_moment_when_it_was_patched() -> None:
    """As docs/models.md says; patched anew, it is the new one."""
    model, inputs = tiny.model("llama"), tiny.batch("llama")
    model.eval()
    with torch.no_grad():
        flexops.patch(model)
        before = model(**inputs).logits
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1.0
        assert torch.equal(model(**inputs).logits, before)
        flexops.unpatch(model)
        plain = model(**inputs).logits
        flexops.patch(model)
        torch.testing.assert_close(model(**inputs).logits, plain, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(plain, before, atol=1e-3)


@pytest.mark.parametrize("name", tiny.ALL)
def test_unpatch_restores_every_bit(name: str) -> None:
    model, inputs = tiny.model(name), tiny.batch(name)
    before = [
        {key: value for key, value in vars(part).items() if not key.startswith("_")}
        for part in model.modules()
    ]
    names = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    classes = [type(part) for part in model.modules()]
    expected = results(model, inputs)
    flexops.patch(model)
    assert [(key, tuple(value.shape)) for key, value in model.state_dict().items()] == names
    assert [type(part) for part in model.modules()] == classes
    assert flexops.unpatch(model) > 0
    assert [
        {key: value for key, value in vars(part).items() if not key.startswith("_")}
        for part in model.modules()
    ] == before
    actual = results(model, inputs)
    assert all(actual[key].equal(value) for key, value in expected.items())
    assert flexops.unpatch(model) == 0


def test_copies_and_pickles_are_patched_and_their_own() -> None:
    # not Llama: where HF's kernels are installed, its attention cannot be pickled
    model, inputs = tiny.model("phi3"), tiny.batch("phi3")
    flexops.patch(model)
    expected = results(model, inputs)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stored, weights_only=False),
    ):
        assert other(**inputs).logits is None
        assert all(value.equal(expected[key]) for key, value in results(other, inputs).items())
        with torch.no_grad():
            other.model.norm.weight.zero_()
            other.model.layers[0].input_layernorm.weight.zero_()
        assert results(other, inputs)["loss"] != expected["loss"]
        flexops.unpatch(other)
        assert other(**inputs).logits is not None
    assert results(model, inputs)["loss"] == expected["loss"]


def test_hooks_see_what_they_saw() -> None:
    """Also those of transformers, which collect hidden states: the sums of layers, not what is
    fused with them."""
    model, inputs = tiny.model("llama"), tiny.batch("llama")
    expected = model(**inputs, output_hidden_states=True).hidden_states
    flexops.patch(model)
    seen: list[Tensor] = []
    handle = model.model.layers[1].input_layernorm.register_forward_hook(
        lambda _, __, output: seen.append(output.detach())
    )
    actual = model(**inputs, output_hidden_states=True).hidden_states
    handle.remove()
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert len(seen) == 1
    flexops.unpatch(model)
    torch.testing.assert_close(
        seen[0], model.model.layers[1].input_layernorm(expected[1]), atol=1e-5, rtol=1e-5
    )


def test_hooks_on_what_is_not_called_any_more() -> None:
    """On the last layer, of whose logits the loss is made without them, and on an activation, which
    is part of a product: also where they come later."""
    for late in (False, True):
        found = []
        for patched in (False, True):
            model, inputs = tiny.model("llama").train(), tiny.batch("llama")
            if patched and late:
                flexops.patch(model)
                results(model, inputs)
            model.lm_head.register_forward_hook(lambda _, __, logits: logits * 1.1)
            model.model.layers[0].mlp.act_fn.register_forward_hook(
                lambda _, __, output: output * 1.2
            )
            model.model.layers[1].mlp.act_fn = nn.GELU()
            if patched and not late:
                flexops.patch(model)
            found.append(visible(results(model, inputs), inputs))
        assert max(distance(found[1], found[0]).values()) < 1e-4


def test_hooks_hear_nothing_while_a_model_is_patched() -> None:
    """What replacements are tried with is no call of the model's."""
    model, heard = tiny.model("llama"), []
    for part in model.modules():
        part.register_forward_hook(lambda module, _, __: heard.append(type(module).__name__))
    flexops.patch(model)
    assert heard == []


@pytest.mark.parametrize(
    "name", ["self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
)
def test_an_adapter_may_take_a_linear_layers_place_later(name: str) -> None:
    """A module of one's own, which has no weight: its call is what counts."""

    class Adapter(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 1.5 * self.inner(x)

    found = []
    for patched in (False, True):
        model, inputs = tiny.model("llama").train(), tiny.batch("llama")
        if patched:
            flexops.patch(model)
        place, _, last = name.rpartition(".")
        part = model.model.layers[0].get_submodule(place)
        setattr(part, last, Adapter(getattr(part, last)))
        found.append(
            visible(results(model, inputs, **(logits_too("llama") if patched else {})), inputs)
        )
    assert max(distance(found[1], found[0]).values()) < 1e-4


def test_the_next_norm_is_computed_with_the_sum() -> None:
    """That the layers are fused at all: but for the first, no layer's first norm is computed by
    itself, nor is the last."""
    from flexops.patching import forwards

    model, inputs = tiny.model("llama"), tiny.batch("llama")
    report = flexops.patch(model)
    layers = [row.operator for row in report.swapped if row.module == "LlamaDecoderLayer"]
    assert layers == ["add_rms_norm"]
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_rms_norm", "add_rms_norm"):
            original = getattr(forwards, name)
            patched.setattr(
                forwards,
                name,
                lambda *args, name=name, original=original, **options: (
                    calls.append(name),
                    original(*args, **options),
                )[1],
            )
        model(**inputs)
    assert calls == ["_rms_norm", *["add_rms_norm"] * 4]


def test_hooks_on_gradients_see_all_of_them() -> None:
    model, inputs = tiny.model("llama"), tiny.batch("llama")

    def seen() -> list[Tensor]:
        found: list[Tensor] = []
        handles = [
            layer.register_full_backward_hook(lambda _, __, out: found.append(out[0].clone()))
            for layer in model.model.layers
        ]
        results(model, inputs)
        for handle in handles:
            handle.remove()
        return found

    expected = seen()
    flexops.patch(model)
    actual = seen()
    assert len(actual) == len(expected) == 2
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_a_sum_that_was_written_over_is_normalized_anew() -> None:
    model, inputs = tiny.model("llama"), tiny.batch("llama")
    doubled = model.model.layers[0].register_forward_hook(lambda _, __, output: output.mul_(2))
    with torch.no_grad():
        expected = model.eval()(inputs["input_ids"]).logits
        flexops.patch(model)
        torch.testing.assert_close(
            model(inputs["input_ids"]).logits, expected, atol=1e-4, rtol=1e-4
        )
    doubled.remove()


# ---- what is not swapped -------------------------------------------------------------------------


def test_switches_turn_parts_off() -> None:
    model = tiny.model("llama")
    report = flexops.patch(
        model,
        norms=False,
        rope=False,
        activations=False,
        loss=False,
        attention=False,
        projections=False,
    )
    assert report.swapped == ()
    parts = ("norms", "residuals", "rope", "activations", "loss", "projections")
    assert {row.reason for row in report.not_swapped} >= {f"{part}=False" for part in parts}
    assert flexops.unpatch(model) == 0


def test_the_default_dtype_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a model is made in bfloat16 by ``torch.set_default_dtype``."""
    from flexops.patching import probe

    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(probe, "_known", {})
        torch.set_default_dtype(dtype)
        try:
            report = flexops.patch(tiny.model("gemma3").to(dtype))
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(torch.float32)
        rows.append([(row.operator, row.swapped, row.reason) for row in report.rows])
    assert rows[0] == rows[1]


def test_code_that_computes_something_else_stays_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another release of transformers, say: same names, another formula."""
    from transformers.models.qwen2 import modeling_qwen2

    from flexops.patching import probe

    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(
        modeling_qwen2.Qwen2MLP,
        "forward",
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x)),
    )
    monkeypatch.setattr(
        modeling_qwen2.Qwen2DecoderLayer,
        "forward",
        lambda _, hidden_states, cache, **__: hidden_states + cache,
    )
    model = tiny.model("qwen2")
    report = flexops.patch(model)
    reasons = {row.module: row.reason for row in report.not_swapped}
    assert reasons["Qwen2MLP"] == "on a small input it computes something else than the replacement"
    assert "no norm reads a sum" in reasons["Qwen2DecoderLayer"]
    assert "Qwen2MLP" in str(report)
    assert "forward" not in vars(model.model.layers[0].mlp)
    assert {row.module for row in report.swapped} >= {"Qwen2RMSNorm"}


def test_an_error_on_the_way_leaves_everything_as_it_was() -> None:
    """A property that raises, in a module behind others that are patched before it."""

    class Broken(nn.Module):
        @property
        def q_proj(self) -> nn.Module:
            raise RuntimeError("not loaded yet")

    model = tiny.model("llama")
    model.add_module("last", Broken())
    for before in (False, True):  # also of a model that was patched before
        with pytest.raises(RuntimeError, match="not loaded yet"):
            flexops.patch(model)
        patched = [part for part in model.modules() if "forward" in part.__dict__]
        assert bool(patched) == before
        assert (model.config._attn_implementation == "flexops") == before
        assert bool(model.model._forward_pre_hooks) == before
        last = model.last
        del model.last
        flexops.patch(model)
        model.add_module("last", last)


def test_an_optimizer_that_fails_leaves_everything_as_it_was() -> None:
    model = tiny.model("llama").requires_grad_(False)
    with pytest.raises(ValueError, match="empty parameter list"):
        flexops.patch(model, optimizer=True)
    assert flexops.unpatch(model) == 0


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_gated_block_may_have_a_dropout(rate: float) -> None:
    """T5Gemma's, whatever its rate."""
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaMLP, T5GemmaModuleConfig

    config = T5GemmaModuleConfig(hidden_size=16, intermediate_size=24, dropout_rate=rate)
    module, x = T5GemmaMLP(config), torch.randn(2, 3, 16)
    plain = copy.deepcopy(module)
    (row,) = [one for one in flexops.patch(module).rows if one.module == "T5GemmaMLP"]
    assert row.swapped, row.reason
    assert row.operator == "geglu_linear"
    for training in (False, True):
        found = []
        for one in (module, plain):
            torch.manual_seed(0)
            found.append(one.train(training)(x))
        torch.testing.assert_close(*found)


def test_unknown_classes_are_named() -> None:
    class HouseRMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    report = flexops.patch(nn.Sequential(HouseRMSNorm(), nn.LayerNorm((4, 8)), nn.Linear(3, 3)))
    reasons = {row.module: row.reason for row in report.not_swapped}
    assert "computes something else" in reasons["HouseRMSNorm"]
    assert "normalizes over 2 dimensions" in reasons["LayerNorm"]
    assert report.swapped == ()


def test_a_forward_that_somebody_else_replaced_stays() -> None:
    model = tiny.model("llama")
    model.model.norm.forward = lambda x: x
    report = flexops.patch(model)
    assert [
        (row.module, row.count) for row in report.not_swapped if "by something else" in row.reason
    ] == [("LlamaRMSNorm", 1)]
    assert model.model.norm(3) == 3


def chain(module: Any) -> list[Any]:
    """What a module's ``forward`` calls, from without."""
    found, forward = [], module.__dict__.get("forward")
    while forward is not None:
        found.append(getattr(forward, "func", forward))
        forward = getattr(forward, "keywords", {}).get("inner")
    return found


def test_unpatch_gives_a_forward_back_that_somebody_else_replaced():
    """Of a model that generates, and of parts whose results are added to the residual: Liger's and
    accelerate's are wrapped."""
    model = tiny.model("llama")
    parts = (model, model.model.layers[0].mlp, model.model.layers[1].self_attn, model.model.norm)
    given = [types.MethodType(type(one).forward, one) for one in parts]
    for one, forward in zip(parts, given, strict=True):
        one.forward = forward
    found = []
    for _ in range(2):
        flexops.patch(model)
        found.append([chain(one) for one in model.modules()])
    assert found[0] == found[1]
    chains = [chain(one) for one in parts]
    assert [one[-1] for one in chains] == given
    assert [len(one) for one in chains] == [2, 2, 2, 1]
    assert flexops.unpatch(model) > 10
    assert all(
        one.__dict__["forward"] is forward for one, forward in zip(parts, given, strict=True)
    )
    assert sum("forward" in one.__dict__ for one in model.modules()) == len(parts)


def test_data_parallel_is_an_error():
    """What ``torch.nn.parallel.replicate`` calls first."""
    model = tiny.model("llama")
    before = model._replicate_for_data_parallel
    flexops.patch(model)
    with pytest.raises(PatchError, match=r"DataParallel cannot copy.*\n.*\n.*torchrun"):
        copy.deepcopy(model)._replicate_for_data_parallel()
    flexops.unpatch(model)
    assert model._replicate_for_data_parallel == before


def test_no_model_is_refused() -> None:
    with pytest.raises(flexops.errors.PatchError, match="takes a module"):
        flexops.patch(3)
    with pytest.raises(flexops.errors.PatchError, match="unpatch takes a module"):
        flexops.unpatch(3)
    with pytest.raises(flexops.errors.PatchError, match=r"one of .*llama"):
        flexops.patch("lama")
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(32), torch.nn.Linear(32, 32))
    for options in ({}, {"fp8": "rowwise"}, {"weights": "int4"}):
        with pytest.raises(flexops.errors.PatchError, match="run the model once before"):
            flexops.patch(lazy, **options)
    assert flexops.unpatch(lazy) == 0
    lazy(torch.randn(1, 64))
    assert flexops.patch(lazy, weights="int4").rows
    with pytest.raises(flexops.errors.PatchError, match="a module of TorchScript"):
        flexops.patch(torch.nn.Sequential(torch.jit.script(torch.nn.Linear(4, 4))))


def test_a_model_in_float64_runs_its_own_code() -> None:
    model = tiny.model("llama").eval().double()
    ids = tiny.batch("llama")["input_ids"]
    expected = model(ids).logits
    report = flexops.patch(model)
    assert any(row.operator == "rotary_embedding" for row in report.swapped)
    assert torch.equal(model(ids).logits, expected)


def test_the_report_is_a_table_and_json() -> None:
    report = flexops.patch(tiny.model("gpt_neox"))
    text = json.loads(report.json())
    assert text["model"] == "GPTNeoXForCausalLM"
    assert {row["module"]: row["swapped"] for row in text["rows"]}["LayerNorm"] is True
    assert all(row["reason"] for row in text["rows"] if not row["swapped"])
    assert "GPTNeoXLayer" in str(report)


def test_patching_compiles_nothing(tmp_path: Path) -> None:
    """In a process that has no kernels: what is probed runs as plain PyTorch, without a word."""
    program = (
        "import flexops; from flexops.patching import from_config; from_config.report('llama');"
        " print({one.backend for one in flexops.status()})"
    )
    environment = {
        **os.environ,
        "FLEXOPS_CACHE_DIR": str(tmp_path),
        "FLEXOPS_FALLBACK": "forbid",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.stdout == "{'unasked'}\n", done.stderr
    assert "flexops" not in done.stderr


def test_a_billion_parameters_take_no_longer_than_the_classes_do() -> None:
    """What is probed is one small module of each class, whatever the model's size, and nothing of
    the model is computed: it may be on meta."""
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=2048,
                num_hidden_layers=16,
                num_key_value_heads=8,
                intermediate_size=8192,
            )
        )
    report = flexops.patch(model)
    assert {row.module: row.count for row in report.swapped}["LlamaRMSNorm"] == 33
    assert report.not_swapped == ()


@pytest.mark.parametrize("name", ["mistral", "deepseek_ocr2"])
def test_random_numbers_are_not_used_up(name, monkeypatch):
    """Nor are a GPU's generators seeded anew."""
    from flexops.patching import probe

    probe._known.clear()
    model = zoo.tiny(name)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("seeded"))
    flexops.patch(model)
    assert torch.rand(3).equal(expected)


def test_a_default_device_changes_nothing():
    """What is probed is on the CPU: the norms of SAM's pictures, too."""
    from flexops.patching import probe

    model, other = zoo.tiny("deepseek_ocr2"), zoo.tiny("deepseek_ocr2")
    probe._known.clear()
    with torch.device("meta"):
        found = flexops.patch(other).rows
    probe._known.clear()
    assert found == flexops.patch(model).rows


# ---- torch's own modules -------------------------------------------------------------------------


class Block(nn.Module):
    """What people write themselves."""

    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(16, 24),
            nn.Linear(16, 24),
            nn.Linear(24, 16),
        )
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(16),
        lambda: nn.LayerNorm(16, elementwise_affine=False),
        lambda: nn.LayerNorm(16, bias=False),
        lambda: nn.RMSNorm(16),
        lambda: nn.RMSNorm(16, eps=1e-3),
        lambda: Block(nn.SiLU()),
        lambda: Block(nn.GELU()),
        lambda: Block(nn.GELU(approximate="tanh")),
    ],
)
def test_torchs_own_modules(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make())
    x = torch.randn(5, 16, requires_grad=True)
    expected = model(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    assert len(flexops.patch(model).swapped) == 1
    actual = model(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), x)[0], expected_grad, atol=1e-5, rtol=1e-4
    )
    assert model(x.double().float()).dtype == torch.float32
    torch.testing.assert_close(model.double()(x.double()), expected.double(), atol=1e-5, rtol=1e-4)


def test_another_activation_stays() -> None:
    report = flexops.patch(Block(nn.ReLU()))
    assert [row.reason for row in report.rows] == [
        "its activation, ReLU, is not one of silu, gelu and relu2"
    ]


# ---- projections ---------------------------------------------------------------------------------


def products_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each joined product has."""
    products: list[int] = []
    apply = linears._Products.apply

    def counted(x: Tensor, dtype: Any, count: int, joined: bool, *parts: Tensor) -> Any:
        products.extend([count] * joined)
        return apply(x, dtype, count, joined, *parts)

    monkeypatch.setattr(linears._Products, "apply", counted)
    return products


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("case", ["", "bfloat16 by autocast", "frozen", "checkpoints"])
def test_projections_by_one_product(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexops.nn.linears._LEAST_ROWS", 1)
    products = products_of(monkeypatch)
    model, inputs = tiny.model(name), tiny.batch(name)
    if case == "frozen":
        model.requires_grad_(False)
        model.get_input_embeddings().weight.requires_grad_()
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_()
    if case == "checkpoints":
        model.gradient_checkpointing_enable()
    with torch.autocast("cpu", enabled=case.startswith("bfloat16")):
        report = flexops.patch(model, projections=False)
        expected = results(model, inputs)
        assert {row.reason for row in report.rows if "one product" in row.operator} == {
            "projections=False"
        }
        assert not products
        flexops.patch(model)
        differences = distance(results(model, inputs), expected)
    assert products == [3] * (4 if case == "checkpoints" else 2)
    assert max(differences.values()) < (2e-2 if case.startswith("bfloat16") else 2e-5), differences
    assert not any("_flexops_projected" in part.__dict__ for part in model.modules())
    assert all(value.grad is None for value in model.parameters() if not value.requires_grad)
    flexops.unpatch(model)
    model(**inputs)
    assert len(products) == (4 if case == "checkpoints" else 2)


def test_a_gradient_penalty_behind_projections_is_rejected(monkeypatch) -> None:
    monkeypatch.setattr("flexops.nn.linears._LEAST_ROWS", 1)
    products = products_of(monkeypatch)
    model = tiny.model("llama")
    flexops.patch(model)
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 8, attention.q_proj.in_features, requires_grad=True)
    loss = sum(one(x).sum() for one in (attention.q_proj, attention.k_proj, attention.v_proj))
    (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
    assert products == [3]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + of_x.square().sum()).backward()


def test_projections_stay_apart_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation, where one has a hook, where they are called with different tensors, and for
    what are no linear layers."""
    monkeypatch.setattr("flexops.nn.linears._LEAST_ROWS", 1)
    products = products_of(monkeypatch)

    class Odd(nn.Module):
        def __init__(self, values: type[nn.Module] = nn.Linear) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), values(8, 4)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return torch.cat([self.q_proj(x), self.k_proj(other), self.v_proj(x)], -1)

    class Other(nn.Linear):
        pass

    x, other = torch.randn(5, 8), torch.randn(5, 8)
    module = Odd()
    expected = module(x, other)
    assert [row.swapped for row in flexops.patch(module).rows] == [True]
    torch.testing.assert_close(module(x, other), expected)
    assert products == [3]
    torch.testing.assert_close(
        module(other, x)[:, 8:12], expected[:, 8:12] - module.k_proj(other) + module.k_proj(x)
    )
    with torch.no_grad():
        torch.testing.assert_close(module(x, other), expected)
    products.clear()
    handle = module.k_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(module(x, other), expected)
    handle.remove()
    x += 1  # what was made of it before is not what it is now
    torch.testing.assert_close(
        torch.compile(module, backend="eager")(x, other), type(module).forward(module, x, other)
    )
    assert "projections are no plain linear layers" in str(flexops.patch(Odd(Other)))


# ---- torch's own modules -------------------------------------------------------------------------


def alike(module: nn.Module, calls: list[Callable[[nn.Module], Tensor]]) -> None:
    """Results and gradients of a module are those of a copy that is patched."""
    other = copy.deepcopy(module)
    flexops.patch(other)
    for call in calls:
        found = []
        for each in (module, other):
            each.zero_grad()
            result = call(each)
            result.square().sum().backward()
            found.append(
                [
                    result.detach(),
                    *(value.grad for value in each.parameters() if value.grad is not None),
                ]
            )
        for one, expected in zip(*reversed(found), strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


def test_gelu_and_silu_of_torch() -> None:
    x = torch.randn(4, 8)
    module = nn.Sequential(
        nn.Linear(8, 12),
        nn.GELU("tanh"),
        nn.Dropout(0.0),
        nn.Linear(12, 12),
        nn.SiLU(),
        nn.LayerNorm(12),
        nn.GELU(),
        nn.Linear(12, 8),
    )
    report = flexops.patch(module)
    rows = {(row.module, row.operator, row.swapped) for row in report.rows}
    assert rows == {
        ("Sequential", "bias_gelu / bias_silu", True),
        ("LayerNorm", "layer_norm", True),
        ("GELU", "-", False),
    }
    assert "one pass over memory" in str(report)
    assert flexops.unpatch(module) == 2
    alike(module, [lambda each: each(x)])
    heard: list[Tensor] = []
    flexops.patch(module)
    module[1].register_forward_hook(lambda *args: heard.append(args[2]))
    module(x)
    torch.testing.assert_close(heard[0], torch.nn.functional.gelu(module[0](x), approximate="tanh"))
    assert flexops.patch(nn.Sequential(nn.Linear(8, 8), nn.ReLU())).rows == ()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_multihead_attention_of_torch(batch_first: bool, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(2, length, 16, generator=generator) for length in (6, 9))
    x, other = (x, other) if batch_first else (x.transpose(0, 1), other.transpose(0, 1))
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    each_head = torch.randn(8, 6, 6, generator=generator)
    module = nn.MultiheadAttention(16, 4, bias=bias, batch_first=batch_first)
    assert [row.swapped for row in flexops.patch(copy.deepcopy(module)).rows] == [True]
    cases: list[dict[str, Any]] = [
        {},
        {"attn_mask": hidden},
        {"attn_mask": hidden, "is_causal": True},
        {"key_padding_mask": padding},
        {"attn_mask": each_head},
        {"attn_mask": hidden, "key_padding_mask": padding},
        {"attn_mask": each_head, "key_padding_mask": padding},
        {"need_weights": True},
    ]
    calls = [
        lambda each, case=case: each(x, x, x, **{"need_weights": False, **case})[0]
        for case in cases
    ]
    alike(
        module,
        [
            *calls,
            lambda each: each(x, other, other, need_weights=False)[0],
            lambda each: each(x[0], x[0], x[0], need_weights=False)[0],
        ],
    )
    flexops.patch(module)
    assert module(x, x, x)[1].shape == (2, 6, 6)
    with pytest.raises(RuntimeError, match="is_causal"):
        module(x, x, x, need_weights=False, is_causal=True)
    assert "keys or values are of another width" in str(
        flexops.patch(nn.MultiheadAttention(16, 4, kdim=8))
    )
    assert "keys and values of its own" in str(
        flexops.patch(nn.MultiheadAttention(16, 4, add_bias_kv=True))
    )


def test_multihead_attention_that_computes_otherwise_stays(monkeypatch):
    """Of another torch, or with a function that somebody replaced."""
    real = torch.nn.functional.multi_head_attention_forward

    def doubled(*args: Any, **named: Any) -> Any:
        out, weights = real(*args, **named)
        return out * 2, weights

    monkeypatch.setattr(torch.nn.functional, "multi_head_attention_forward", doubled)
    fresh = type("Fresh", (nn.MultiheadAttention,), {})  # without a verdict of an earlier call
    assert [row.swapped for row in flexops.patch(fresh(16, 4)).rows] == [False]


def test_a_transformer_of_torch() -> None:
    """Its layers call what they hold."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu", batch_first=True)
    x = torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    alike(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        [lambda each: each(x), lambda each: each(x, mask)],
    )
