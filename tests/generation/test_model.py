"""Generation with our cache: the tokens of plain transformers."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import Tensor
from transformers.generation import configuration_utils

import flexops
from flexops.errors import GenerationError
from flexops.generation import decoder, step
from flexops.generation.sampling import Sampling
from flexops.patching import rope

NAMES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "gpt_oss"]
NEW = 14  # beyond the windows of tiny models


def prompts(padding: str = "", length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {"input_ids": torch.randint(3, 97, (3, length), generator=generator)}
    if padding:
        mask = torch.ones_like(found["input_ids"])
        mask[1, :4] = 0
        mask[2, :1] = 0
        found["input_ids"][mask == 0] = 0
        found["attention_mask"] = mask
    return found


def plain(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    chosen: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW} | options
    with tiny.eagerly(model):
        return model.generate(**inputs, **chosen)


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_transformers(name, padding):
    model, inputs = tiny.model(name).eval(), prompts(padding)
    expected = plain(model, inputs, eos_token_id=None)
    flexops.patch(model)
    assert step.refusal(model) == ""
    found = flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_attention_rotates_in_steps(name, monkeypatch):
    """By tables that have each number twice (Llama) or once (gpt-oss): what is rotated apart from
    it is the prompt's. The logits are those of transformers."""
    model, inputs = tiny.model(name).eval(), prompts("left")
    expected = plain(
        model, inputs, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    flexops.patch(model)
    lengths: list[int] = []
    logits: list[Tensor] = []
    rotated, logits_of = rope.rotary_embedding, step.logits_of

    def rotate(q: Tensor, *args: Any, **options: Any) -> Any:
        lengths.append(q.shape[2])
        return rotated(q, *args, **options)

    def keep(*args: Any) -> Tensor:
        logits.append(logits_of(*args))
        return logits[-1]

    monkeypatch.setattr(rope, "rotary_embedding", rotate)
    monkeypatch.setattr(step, "logits_of", keep)
    found = flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=())
    assert torch.equal(found, expected.sequences)
    assert lengths == [9] * model.config.num_hidden_layers
    wanted = torch.stack(expected.logits[-len(logits) :])
    torch.testing.assert_close(torch.stack(logits).view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_goes_into_transformers_generate(name, patched, beams):
    model, inputs = tiny.model(name).eval(), prompts("left")
    options: dict[str, Any] = {"num_beams": beams, "eos_token_id": None}
    expected = plain(model, inputs, **options)
    if patched:
        flexops.patch(model)
    cache = flexops.KVCache(model.config, max_length=9 + NEW)
    assert torch.equal(plain(model, inputs, past_key_values=cache, **options), expected)
    assert cache.length == 8 + NEW


CAPTURED = [name for name in NAMES if name != "gpt_oss"]


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("name", CAPTURED)
def test_transformers_own_loop_replays_steps(name, padding, graphs):
    model, inputs = tiny.model(name).eval(), prompts(padding)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 9}):
        torch.manual_seed(5)
        expected = plain(model, inputs, eos_token_id=None, **options)
        graphs.made = 0
        report = flexops.patch(model)
        assert [row for row in report.swapped if row.operator.startswith("generation")], report
        torch.manual_seed(5)
        found = plain(model, inputs, eos_token_id=None, **options)
        assert torch.equal(found, expected)
        assert graphs.made == 1
        flexops.unpatch(model)


def test_memory_and_graphs_serve_the_next_call(graphs):
    model, inputs = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    first = plain(model, inputs, eos_token_id=None)
    assert torch.equal(plain(model, inputs, eos_token_id=None), first)
    assert graphs.made == 2  # a step, and a prompt that came again
    flexops.generate(model, **inputs, max_new_tokens=NEW)
    flexops.generate(model, **inputs, max_new_tokens=NEW - 3)
    assert graphs.made == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.randn(97, 64))),
        lambda model: flexops.patch(model, activations=False),
        lambda model: model.train(),
    ],
    ids=["moved", "weights replaced", "patched otherwise", "training"],
)
def test_a_changed_model_is_captured_again(graphs, change):
    model, inputs = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    plain(model, inputs, eos_token_id=None)
    flexops.unpatch(model)
    flexops.patch(model)
    change(model)
    graphs.made = 0
    plain(model, inputs, eos_token_id=None)
    assert graphs.made == 1


def test_a_users_cache_serves_a_changed_model(graphs):
    model, inputs = tiny.model("llama").eval(), prompts()
    cache = flexops.KVCache(model.config, max_length=9 + NEW)
    for made in (1, 2):
        flexops.patch(model, activations=made == 1)
        found = plain(model, inputs, past_key_values=cache, eos_token_id=None)
        assert graphs.made == made
        cache.reset()
        flexops.unpatch(model)
        assert torch.equal(found, plain(model, inputs, eos_token_id=None))


def test_what_a_captured_step_depends_on():
    model = tiny.model("llama").eval()
    layer, config = model.model.layers[0], model.config
    seen = [decoder.fingerprint(model)]
    assert decoder.fingerprint(model) == seen[0]

    def change(where: Any, name: str, value: Any) -> None:
        setattr(where, name, value)
        seen.append(decoder.fingerprint(model))

    weight = layer.mlp.up_proj.weight
    change(layer.mlp.up_proj, "weight", torch.nn.Parameter(weight.detach().clone()))
    weight.data = weight.data.clone()
    change(layer.input_layernorm, "variance_epsilon", 0.5)
    change(layer.mlp, "forward", lambda x: x)
    change(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq.clone())
    change(layer, "names", ["one"])
    layer.names[0] = "two"
    change(layer, "training", True)
    change(layer, "mlp", torch.nn.Identity())
    change(config, "num_hidden_layers", 1)
    assert len(set(seen)) == len(seen)
    last = seen[-1]
    layer.names[0] = "three"
    assert decoder.fingerprint(model) != last


def test_hooks_are_called(graphs):
    model, inputs = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    plain(model, inputs, eos_token_id=None)
    assert (graphs.made, len(calls)) == (0, NEW)
    flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=())
    assert (graphs.made, len(calls)) == (0, 2 * NEW)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("said", [["operation not permitted when stream is capturing"], []])
def test_what_cannot_be_captured_runs_as_before(said, monkeypatch):
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(*said)

    model, inputs = tiny.model("llama").eval(), prompts()
    expected = plain(model, inputs, eos_token_id=None)
    flexops.patch(model)
    monkeypatch.setattr(step, "Graph", fail)
    reason = said[0] if said else "no message"
    with pytest.warns(flexops.FallbackWarning, match=f"capture failed: RuntimeError: {reason}"):
        assert torch.equal(plain(model, inputs, eos_token_id=None), expected)
    found = flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=())
    assert torch.equal(found, expected)


def test_graphs_do_not_travel(graphs):
    # not Llama: where HF's kernels are installed, its attention cannot be pickled
    model, inputs = tiny.model("phi3").eval(), prompts()
    flexops.patch(model)
    expected = plain(model, inputs, eos_token_id=None)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied not in decoder._decoders
        graphs.made = 0
        assert torch.equal(plain(copied, inputs, eos_token_id=None), expected)
        assert graphs.made == 1
    flexops.unpatch(model)
    assert model not in decoder._decoders
    assert "_prepare_cache_for_generation" not in model.__dict__


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("padding", ["", "left"])
def test_the_rest_of_generate_stays_outside(padding):
    model, inputs = tiny.model("llama").eval(), prompts(padding)
    one = {name: x[:1] for name, x in inputs.items()}
    cases: list[tuple[dict[str, Tensor], dict[str, Any]]] = [
        (inputs, {"eos_token_id": 37, "pad_token_id": 0}),
        (inputs, {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}),
        (inputs, {"num_beams": 4, "num_return_sequences": 2}),
        (one, {"prompt_lookup_num_tokens": 3}),
        (inputs, {"prefill_chunk_size": 4}),
        (inputs, {"output_hidden_states": True, "return_dict_in_generate": True}),
    ]
    for given, options in cases:
        expected = plain(model, given, **options)
        flexops.patch(model)
        found = plain(model, given, **options)
        flexops.unpatch(model)
        if "return_dict_in_generate" in options:
            assert len(found.hidden_states) == NEW
            expected, found = expected.sequences, found.sequences
        assert torch.equal(found, expected), options


@pytest.mark.usefixtures("graphs")
def test_a_cache_implementation_that_was_chosen_stays():
    model, inputs = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    for chosen, ours in ((None, True), ("dynamic", False)):
        found = plain(model, inputs, cache_implementation=chosen, return_dict_in_generate=True)
        assert isinstance(found.past_key_values, flexops.KVCache) == ours


def test_the_cache_implementation_has_a_name():
    model, inputs = tiny.model("llama").eval(), prompts()
    expected = plain(model, inputs, eos_token_id=None)
    flexops.patch(model)
    options = {"cache_implementation": "flexops", "return_dict_in_generate": True}
    found = plain(model, inputs, eos_token_id=None, **options)
    assert torch.equal(found.sequences, expected)
    assert isinstance(found.past_key_values, flexops.KVCache)


def test_a_model_that_cannot_be_captured_gets_the_cache_that_was_asked_for():
    model, inputs = tiny.model("llama").eval(), prompts()
    flexops.patch(model, generation=False)
    options = {"cache_implementation": "flexops", "return_dict_in_generate": True}
    found = plain(model, inputs, **options)
    assert isinstance(found.past_key_values, flexops.KVCache)
    assert "generation=False" in step.refusal(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.T5Config(
                d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=97,
                decoder_start_token_id=0,
            ),
            "no keys and values of an encoder",
        ),
        (
            transformers.Qwen3NextConfig(
                **tiny.SIZES, **tiny.WORDS, **tiny.GROUPED, layer_types=["linear_attention"] * 2,
                num_experts=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            ),
            "does not support the layers of Qwen3NextConfig",
        ),
    ],
)  # fmt: skip
def test_a_cache_that_was_asked_for_is_an_error_where_it_does_not_fit(config, message):
    seq2seq = config.is_encoder_decoder
    auto: Any = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    flexops.patch(model)
    with pytest.raises(GenerationError, match=message):
        plain(model, prompts(), cache_implementation="flexops")


def test_a_checkpoint_that_names_the_cache_loads_once_attention_is_registered(
    tmp_path, monkeypatch
):
    module: Any = configuration_utils
    names = module.ALL_CACHE_IMPLEMENTATIONS
    names = tuple(name for name in names if name != "flexops")
    monkeypatch.setattr(module, "ALL_CACHE_IMPLEMENTATIONS", names)
    model = tiny.model("llama").eval()
    flexops.patching.register_attention()
    model.generation_config.cache_implementation = "flexops"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    flexops.patch(loaded)
    found = plain(loaded, prompts(), return_dict_in_generate=True)
    assert isinstance(found.past_key_values, flexops.KVCache)


# ---- flexops.generate ----------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
def test_stop_tokens_and_a_streamer(captured, heard, request):
    if captured:
        request.getfixturevalue("graphs")
    model, inputs = tiny.model("llama").eval(), prompts("left")
    flexops.patch(model)
    free = flexops.generate(model, **inputs, max_new_tokens=30, eos_token_id=())
    ends = [int(free[0, 14]), int(free[1, 20]), int(free[2, 11])]
    found = flexops.generate(
        model, **inputs, max_new_tokens=30, eos_token_id=ends, pad_token_id=96, streamer=heard
    )
    for row, (whole, cut) in enumerate(zip(free, found, strict=True)):
        first = next(i for i in range(9, 39) if int(whole[i]) in ends)
        assert torch.equal(cut[: first + 1], whole[: first + 1]), row
        assert (cut[first + 1 :] == 96).all()
    assert found.shape[1] <= 21
    assert torch.equal(torch.cat(heard.parts, 1), found)
    assert heard.ended


@pytest.mark.usefixtures("graphs")
def test_a_seed_gives_the_same_tokens():
    model, inputs = tiny.model("llama").eval(), prompts()
    flexops.patch(model)
    options: dict[str, Any] = {"do_sample": True, "top_k": 30, "temperature": 1.5}
    one, again, other = (
        flexops.generate(model, **inputs, max_new_tokens=NEW, seed=seed, **options)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.5}],
    ids=str,
)
def test_draws_are_distributed_as_transformers_warpers_say(options):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0)) * 4
    kinds = {
        "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper,
    }  # fmt: skip
    scores = logits
    for name, value in options.items():
        scores = kinds[name](value)(None, scores)
    expected = scores.softmax(-1)[0]
    generator = torch.Generator().manual_seed(1)
    scores, words = Sampling(True, **options).scores(logits.expand(20000, -1), generator)
    draws = scores.argmax(-1)
    draws = draws if words is None else words.gather(-1, draws[:, None]).squeeze(-1)
    found = torch.bincount(draws, minlength=1024) / 20000
    assert (found[expected == 0] == 0).all()
    assert (found - expected).abs().max() < 0.015


# ---- bad input -----------------------------------------------------------------------------------


def keys(batch: int = 2, length: int = 3, heads: int = 2, width: int = 16) -> Tensor:
    return torch.randn(batch, heads, length, width)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (keys(length=6), "the KV cache is full.*3 tokens in it and 6 new.*at most 8"),
        (keys(batch=3), "of 3 sequences, for a cache of 2"),
        (keys(heads=1), "keys of 1 heads of 16.*2 heads of 16"),
        (keys().double(), "float64.*float32"),
        (keys().to("meta"), "meta.*moved or changed"),
    ],
    ids=["full", "batch", "heads", "dtype", "device"],
)
def test_what_does_not_fit_a_cache_is_rejected(changed, message):
    cache = flexops.KVCache(tiny.config("llama"), max_length=8)
    first = keys()
    cache.update(first, first, 0)
    with pytest.raises(GenerationError, match=f"(?s){message}"):
        cache.update(changed, changed, 0)
    kept, _ = cache.update(first, first, 0)
    assert torch.equal(kept, torch.cat([first, first], 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"top_p": 0.0, "do_sample": True}, "top_p=0.0"),
        ({"temperature": 0.0, "do_sample": True}, "temperature=0.0"),
        ({"top_k": -1, "do_sample": True}, "top_k=-1"),
        ({"input_ids": torch.zeros(3)}, r"input_ids.*Tensor torch.Size\(\[3\]\)"),
        ({"input_ids": torch.zeros(3, 9)}, "float32.*int64"),
        ({"attention_mask": torch.ones(3, 8)}, r"attention_mask.*\[3, 9\]"),
        ({"attention_mask": torch.eye(9)[:3]}, "hides tokens behind others"),
        ({"seed": 1, "generator": torch.Generator()}, "exclude"),
        ({"seed": "1"}, "no such seed.*'1'"),
        ({"seed": 2**70}, "no such seed"),
        ({"pad_token_id": "<pad>"}, "no such pad_token_id.*<pad>"),
        ({"generator": 1}, "no such generator"),
        ({"streamer": 3}, "no such streamer.*with put and end"),
        ({"eos_token_id": ["</s>"]}, "no such eos_token_id.*</s>"),
        ({"cache": "static"}, "no such cache.*str.*flexops.KVCache"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
def test_wrong_arguments_are_named(changes, message):
    model = tiny.model("llama").eval()
    flexops.patch(model)
    with pytest.raises(GenerationError, match=f"(?s){message}"):
        flexops.generate(model, **(prompts() | changes))


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_what_is_no_number_is_named(name):
    with pytest.raises(TypeError, match=f"^flexops.generate: {name} must be a number, got '1'"):
        flexops.generate(tiny.model("llama"), **prompts(), do_sample=True, **{name: "1"})


def test_a_cache_must_be_empty_and_long_enough():
    model, inputs = tiny.model("llama").eval(), prompts()
    cache = flexops.KVCache(model.config, max_length=12)
    with pytest.raises(GenerationError, match=r"(?s)0 tokens in a cache of 12.*max_length=29"):
        flexops.generate(model, **inputs, cache=cache)
    found = flexops.generate(model, **inputs, cache=cache, max_new_tokens=3, eos_token_id=())
    assert (found.shape[1], cache.length) == (12, 11)
    with pytest.raises(GenerationError, match="11 tokens in a cache of 12"):
        flexops.generate(model, **inputs, cache=cache, max_new_tokens=3)


def test_other_caches_are_named():
    config = tiny.config("llama")
    config.num_hidden_layers = 1
    cache = flexops.KVCache(config, max_length=64)
    with pytest.raises(GenerationError, match=r"(?s)layer 1, for a cache of 1.*model\.config"):
        tiny.model("llama").eval()(**prompts(), past_key_values=cache)
    with pytest.raises(GenerationError, match="bits=3"):
        flexops.KVCache(tiny.config("llama"), max_length=8, bits=3)
    with pytest.raises(GenerationError, match=r"(?s)LlamaForCausalLM.*model\.config"):
        flexops.KVCache(tiny.model("llama"), max_length=8)
    with pytest.raises(GenerationError, match="max_length=0"):
        flexops.KVCache(tiny.config("llama"), max_length=0)
    config = tiny.config("llama")
    for kinds in (["hybrid_sliding", "full_attention"], ["linear_attention"]):
        config.layer_types = kinds
        with pytest.raises(GenerationError, match=kinds[0]):
            flexops.KVCache(config, max_length=8)


def test_a_cache_is_copied_cropped_and_selected_from():
    cache = flexops.KVCache(tiny.config("llama"), max_length=8)
    first, more = keys(), keys()
    for layer in range(2):
        cache.update(first, more, layer)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(copied.layers[1].values, more)
        copied.update(first, first, 0)
        assert (copied.length, cache.length) == (6, 3)
    cache.crop(-1)
    assert torch.equal(cache.layers[0].keys, first[:, :, :2])
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    assert torch.equal(cache.layers[0].keys, first[[1, 1, 1], :, :2])
    assert cache.batch_size == 3
    cache.crop(-9)
    assert cache.get_seq_length() == 0
    cache.update(first[[1, 1, 1]], more[[1, 1, 1]], 0)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_layer_that_scales_what_it_adds_computes_its_own_code_in_steps():
    config = transformers.GraniteConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, residual_multiplier=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GraniteForCausalLM(config).eval()
    inputs = prompts("")
    expected = plain(model, inputs, eos_token_id=None)
    flexops.patch(model)
    found = flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("loss", [True, False])
def test_a_models_forward_keeps_its_signature(loss):
    """By it ``generate`` decides whether positions are passed, and trainers which columns are."""
    model = tiny.model("llama")
    before = set(inspect.signature(model.forward).parameters)
    flexops.patch(model, loss=loss)
    after = set(inspect.signature(model.forward).parameters)
    assert after - before == ({"skip_logits"} if loss else set())
    assert before <= after


@pytest.mark.parametrize("padding", ["", "left"])
def test_absolute_positions_leave_padding_out(padding):
    config = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=2)
    model, inputs = transformers.GPT2LMHeadModel(config).eval(), prompts(padding)
    flexops.patch(model)
    found = flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=())
    assert torch.equal(found, plain(model, inputs, eos_token_id=None))


def test_left_padding_is_rejected_where_a_model_takes_no_positions():
    model = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=2)
    ).eval()
    with pytest.raises(GenerationError, match="left padding changes the positions"):
        flexops.generate(model, **prompts("left"), max_new_tokens=3)
