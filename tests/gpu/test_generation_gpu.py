"""Generation on a GPU: steps as CUDA graphs, what they compute, and of how many kernels."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import Counter
from typing import Any

import pictured
import pytest
import tiny
import torch
import zoo
from torch import Tensor

import flexops
from flexops.generation import decoder, step
from flexops.ops import few_rows_chain
from flexops.patching import Int4Config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("transformers_models")]
NAMES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3"]
NEW = 40
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def made(name: str = "llama", **changes: Any) -> Any:
    """Logits of random models are close to each other: these are further apart than bfloat16."""
    model = tiny.model(name, **changes).eval()
    model.get_output_embeddings().weight.data.mul_(8)
    return model.to("cuda", torch.bfloat16)


def prompts(padding: bool = False, rows: int = 3) -> dict[str, Tensor]:
    tokens = torch.randint(3, 97, (rows, 9), generator=torch.Generator().manual_seed(3)).cuda()
    mask = torch.ones_like(tokens)
    if padding:
        mask[-1, :4] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    asked = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None} | options
    return model.generate(**inputs, **asked)


def graphs(model: Any) -> list[Any]:
    return [key for _, store in decoder.decoder_of(model)._free for key in store.graphs]


def logits(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    whole = torch.cat([mask, mask.new_ones(len(mask), tokens.shape[1] - mask.shape[1])], 1)
    with torch.no_grad():
        return model(tokens, attention_mask=whole, use_cache=False).logits.float()


def assert_likely(model: Any, tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    """Each new token is the plain model's likeliest, or one that rounding cannot tell from it."""
    start = inputs["input_ids"].shape[1]
    scores = logits(model, tokens, inputs["attention_mask"])[:, start - 1 : -1]
    chosen = scores.gather(-1, tokens[:, start:, None]).squeeze(-1)
    behind = scores.max(-1).values - chosen
    assert (behind <= 0.06 * scores.abs().amax(-1)).all(), behind.max()


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_give_likely_tokens(name, padding):
    model, inputs = made(name), prompts(padding)
    flexops.patch(model)
    found = (
        generate(model, inputs),
        flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=()),
    )
    assert {key[0] for key in graphs(model)} == {"prompt", "step", "tokens"}
    assert not decoder.decoder_of(model).refused
    flexops.unpatch(model)
    for tokens in found:
        assert_likely(model, tokens, inputs)


@pytest.mark.parametrize("name", pictured.TYPES)
def test_steps_behind_pictures_are_captured(name):
    """Those behind the first token's; logits are the plain model's for the same tokens."""
    model = pictured.small(name)
    given = {
        key: x.cuda().bfloat16() if x.is_floating_point() else x.cuda()
        for key, x in pictured.inputs(model).items()
    }
    model = model.to("cuda", torch.bfloat16)
    options = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    flexops.patch(model)
    found = []
    for _ in range(2):
        made = generate(model, given, **options)
        found.append((made.sequences, made.logits))
        del made  # its cache has the graphs
    assert torch.equal(found[0][0], found[1][0])
    assert {key[0] for key in graphs(model)} == {"step"}
    assert not decoder.decoder_of(model).refused
    flexops.unpatch(model)
    start = given["input_ids"].shape[1]
    tokens, scores = found[1]

    def force(ids: Tensor, made: Tensor) -> Tensor:
        return torch.full_like(made, -1e4).scatter(1, tokens[:, ids.shape[1], None], 0.0)

    expected = generate(model, given, logits_processor=[force], **options)
    assert torch.equal(expected.sequences, tokens)
    assert tokens.shape[1] == start + NEW
    for one, two in zip(scores, expected.logits, strict=True):
        assert (one - two).abs().max() <= 0.05 * two.abs().max()


STATEFUL = [
    "qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2_moe", "bamba", "falcon_h1", "zamba2",
]  # fmt: skip


@pytest.mark.parametrize("name", [*STATEFUL, "jamba"])
def test_steps_of_layers_with_states_are_captured(name):
    model = zoo.tiny(name).eval()
    model.get_output_embeddings().weight.data.mul_(8)
    model, inputs = model.to("cuda", torch.bfloat16), prompts(padding=True)
    flexops.patch(model)
    for _ in range(2):
        found = (
            generate(model, inputs),
            flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=()),
        )
    filled = set() if name == "jamba" else {"prompt"}
    assert {key[0] for key in graphs(model)} == {"step", "tokens"} | filled
    assert not decoder.decoder_of(model).refused
    flexops.unpatch(model)
    for tokens in found:
        assert_likely(model, tokens, inputs)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", ""),
        ("hunyuan_v1_dense", ""),
        ("hunyuan_v1_moe", ""),
        ("laguna", ""),
        ("diffllama", "changes what it reads from a cache"),
        ("doge", "changes what it reads from a cache"),
        ("gemma4_text", "heads of 512 columns"),
    ],
)
def test_what_stands_around_attention(name, reason):
    """Norms of what is rotated, gates, experts; types without captured steps, and why."""
    model = zoo.tiny(name).eval()
    model.get_output_embeddings().weight.data.mul_(8)
    # doge's step does not compute what the whole sequence does: its tokens are the plain model's
    exact = name == "doge"
    model, inputs = model.to("cuda", torch.float32 if exact else torch.bfloat16), prompts()
    expected = generate(model, inputs)
    report = flexops.patch(model)
    (row,) = [row for row in report.rows if row.operator.startswith("generation")]
    assert row.swapped is not bool(reason)
    assert reason in row.reason
    found = (
        generate(model, inputs),
        flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=()),
    )
    captured = set() if reason else {"prompt", "step", "tokens"}
    assert {key[0] for key in graphs(model)} == captured
    assert not decoder.decoder_of(model).refused
    flexops.unpatch(model)
    for tokens in found:
        if exact:
            assert torch.equal(tokens, expected)
        else:
            assert_likely(model, tokens, inputs)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("length", [9, 32, 300])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_prompts_are_filled_up_and_captured(name, length, padding):
    """The graph gives what the first prompt of that length got, and the plain model's logits."""
    model = made(name, max_position_embeddings=512)
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(1)).cuda()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, :padding] = 0
    expected = logits(model, ids, inputs["attention_mask"])[:, -1]
    flexops.patch(model)
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    first, captured, again = (generate(model, inputs, **options).logits for _ in range(3))
    assert {key[0] for key in graphs(model)} == {"prompt", "step"}
    for one, two, three in zip(first, captured, again, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(two, three)
    assert (first[0] - expected).abs().max() <= 0.03 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("length", [40, 130, 300])
def test_prompts_into_compressed_caches_are_captured(bits, length):
    """The graph leaves what the first prompt of that length has left, and what a call of the model
    leaves but for rounding."""
    model = made(max_position_embeddings=512, **WIDE)
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(1)).cuda()
    options: dict[str, Any] = {"bits": bits, "group_size": 64, "residual_length": 64}
    caches = [flexops.KVCache(model.config, 512, **options) for _ in range(2)]
    model(ids, past_key_values=caches[0], use_cache=True)
    flexops.patch(model)
    found = []
    for _ in range(3):
        caches[1].crop_to(0)
        flexops.generate(model, ids, max_new_tokens=1, eos_token_id=(), cache=caches[1])
        assert caches[1].length == length
        found.append([x.clone() for one in caches[1].layers for x in (one.keys, one.values)])
    assert {key[0] for key in caches[1].store.graphs} == {"prompt"}
    known = [x for one in caches[0].layers for x in (one.keys, one.values)]
    for one, two, three, wanted in zip(*found, known, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(two, three)
        assert (one - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_goes_on(name):
    """Turns of few and of many tokens behind those of a cache, twice: the second time by graphs."""
    model = made(name, max_position_embeddings=2048)
    generator = torch.Generator().manual_seed(1)
    turns = [torch.randint(3, 97, (1, n), generator=generator).cuda() for n in (20, 3, 70, 11, 150)]
    flexops.patch(model)
    found: list[Tensor] = []
    for _ in range(2):
        cache = decoder.decoder_of(model).borrow(model, 1, 512)
        ids = turns[0][:, :0]
        for turn in turns:
            ids = torch.cat([ids, turn], 1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            ids = generate(model, inputs, past_key_values=cache, max_new_tokens=8)
        found.append(ids)
        del cache, inputs
    assert {key[0] for key in graphs(model)} == {"prompt", "step", "chunk"}
    assert not decoder.decoder_of(model).refused
    assert torch.equal(*found)
    assert_turns_likely(model, found[0], turns)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_conversation_of_layers_with_states_goes_on(name):
    """Turns are filled up, and tokens behind them change no state."""
    model = zoo.tiny(name).eval()
    model.get_output_embeddings().weight.data.mul_(8)
    model = model.to("cuda", torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    turns = [torch.randint(3, 60, (1, n), generator=generator).cuda() for n in (20, 3, 40)]
    flexops.patch(model)
    cache = flexops.KVCache(model.config, 128)
    for _ in range(2):
        cache.reset()
        ids = turns[0][:, :0]
        for turn in turns:
            ids = torch.cat([ids, turn], 1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            ids = generate(model, inputs, past_key_values=cache, max_new_tokens=8)
    assert {key[0] for key in cache.store.graphs} == {"prompt", "step", "chunk"}
    assert_turns_likely(model, ids, turns)


def assert_turns_likely(model: Any, found: Tensor, turns: list[Tensor]) -> None:
    """Of a conversation with eight tokens behind each turn."""
    flexops.unpatch(model)
    begin = 0
    scores = logits(model, found, torch.ones_like(found))
    for turn in turns:
        begin += turn.shape[1]
        new = found[:, begin : begin + 8]
        behind = scores[:, begin - 1 : begin + 7]
        missing = behind.max(-1).values - behind.gather(-1, new[..., None]).squeeze(-1)
        assert (missing <= 0.06 * behind.abs().amax(-1)).all(), missing.max()
        begin += 8


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_beams_and_candidates(options):
    model, inputs = made(), prompts(rows=1)
    expected = generate(model, inputs, **options)
    flexops.patch(model)
    found = generate(model, inputs, **options)
    assert (found == expected).float().mean() > 0.6  # rounding may choose another beam


def test_an_assistants_steps_are_captured():
    """Its cache grows: the first call asks for room for a few tokens."""
    (model, assistant), inputs = (made(), made()), prompts(rows=1)
    assistant.generation_config.assistant_confidence_threshold = 0
    flexops.patch(model)
    flexops.patch(assistant)
    new = {"max_new_tokens": 600}
    found = generate(model, inputs, assistant_model=assistant, **new)
    assert {key[0] for key in graphs(model)} == {"chunk"}
    assert {key[0] for key in graphs(assistant)} == {"step", "chunk"}
    assert decoder.decoder_of(assistant)._free[0][1].max_length > 256
    flexops.unpatch(model)
    assert_likely(model, found, inputs)


@pytest.mark.parametrize("tries", [1, 4, 20])
@pytest.mark.parametrize("name", NAMES)
def test_candidates_are_tried_on_the_device(name, tries):
    model, inputs = made(name), prompts(padding=True)
    flexops.patch(model)
    options = {"max_new_tokens": NEW, "eos_token_id": (), "prompt_lookup_num_tokens": tries}
    found = [flexops.generate(model, **inputs, **options) for _ in range(2)]
    assert torch.equal(*found)
    assert {key[0] for key in graphs(model)} == {"prompt", "lookup"}
    flexops.unpatch(model)
    assert_likely(model, found[0], inputs)


def test_the_end_of_a_graph_does_not_disturb_a_capture():
    """A model of before is garbage, which Python may collect at any time."""
    x = torch.zeros(9, device="cuda")
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(10**9)
    garbage: list[Any] = [step.Graph(lambda: x + 1, (x,))]
    garbage.append(garbage)
    ended = weakref.ref(garbage[0])
    del garbage

    alive: list[bool] = []

    def compute() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            gc.set_threshold(1)
        made = [[x + 1] for _ in range(50)]
        alive.append(ended() is not None)
        return made[-1][0]

    try:
        graph = step.Graph(compute, (x,))
    finally:
        gc.set_threshold(*thresholds)
    assert torch.equal(graph.replay(), x + 1)
    assert alive == [True, True]
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize("own", [False, True])
def test_a_capture_that_fails_leaves_random_numbers_and_others_alone(own):
    generator = torch.Generator("cuda").manual_seed(1) if own else None
    model, inputs = made(), prompts()
    flexops.patch(model)
    attention = model.model.layers[1].self_attn
    rotate, waits = attention.forward, [True]

    def wait(*args: Any, **named: Any) -> Any:
        if waits[0] and named["hidden_states"].shape[1] == 1:
            named["hidden_states"].sum().item()
        return rotate(*args, **named)

    attention.forward = wait
    options = {"max_new_tokens": 9, "eos_token_id": (), "do_sample": True, "generator": generator}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flexops.FallbackWarning)
        flexops.generate(model, **inputs, **options)
    assert decoder.decoder_of(model).refused.startswith("capture failed")
    assert torch.rand(3, device="cuda", generator=generator).std() > 0
    waits[0] = False
    other = made("qwen3")
    flexops.patch(other)
    flexops.generate(other, **inputs, **options)
    assert {key[0] for key in graphs(other)} == {"tokens"}


def test_weights_may_change_in_place():
    model, inputs = made(), prompts()
    flexops.patch(model)
    generate(model, inputs)
    before = generate(model, inputs)
    count = len(graphs(model))
    other = made(initializer_range=0.5)
    model.load_state_dict(other.state_dict())
    found = generate(model, inputs)
    assert len(graphs(model)) == count == 2
    assert not torch.equal(found, before)
    flexops.patch(other)
    assert torch.equal(found, generate(other, inputs))


def test_a_model_that_moved_is_captured_again():
    model, inputs = made(), prompts()
    flexops.patch(model)
    expected = generate(model, inputs)
    model.cpu()
    model.cuda()
    junk = [torch.randn(2**20, device="cuda") for _ in range(20)]
    assert torch.equal(generate(model, inputs), expected)
    del junk


def test_a_cache_is_the_users():
    model, inputs = made(), prompts()
    flexops.patch(model)
    first, second = (generate(model, inputs, return_dict_in_generate=True) for _ in range(2))
    kept = first.past_key_values.layers[0].keys.clone()
    generate(model, prompts(padding=True))
    assert torch.equal(first.past_key_values.layers[0].keys, kept)
    assert torch.equal(first.sequences, second.sequences)


def test_memory_comes_back():
    model, inputs = made(), prompts()
    flexops.patch(model)
    generate(model, inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        generate(model, inputs)
    assert torch.cuda.memory_allocated() <= before + 2**16
    flexops.unpatch(model)
    assert torch.cuda.memory_allocated() < before


def test_seeds_and_the_default_generator():
    model, inputs = made(), prompts()
    flexops.patch(model)
    options: dict[str, Any] = {"do_sample": True, "top_k": 40, "max_new_tokens": NEW}
    found = [flexops.generate(model, **inputs, seed=seed, **options) for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append(flexops.generate(model, **inputs, **options))
    assert torch.equal(*drawn)


def test_threads_have_graphs_of_their_own():
    model, inputs = made(), prompts()
    flexops.patch(model)
    expected = generate(model, inputs)
    found: list[Tensor] = []

    def call() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                found.append(generate(model, inputs))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 9
    assert all(torch.equal(one, expected) for one in found)


def kernels_of_a_layer(rows: int = 1, **options: Any) -> dict[str, float]:
    """In a step, by name: the difference of two models, of two and six layers."""

    def counts(layers: int) -> Counter[str]:
        model = made(num_hidden_layers=layers, **WIDE)
        flexops.patch(model, **options)
        inputs = prompts(rows=rows)
        calls = []
        for tokens in (9, 17):
            flexops.generate(model, **inputs, max_new_tokens=tokens, eos_token_id=())
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                flexops.generate(model, **inputs, max_new_tokens=tokens, eos_token_id=())
                torch.cuda.synchronize()
            on_device = torch.autograd.DeviceType.CUDA
            calls.append(Counter(e.name for e in seen.events() if e.device_type == on_device))
        return calls[1] - calls[0]

    few, many = counts(2), counts(6)
    return {name: (many[name] - few[name]) / 8 / 4 for name in many | few}


@pytest.mark.parametrize(
    ("rows", "options"),
    [(1, {}), (16, {}), (4, {"weights": Int4Config()}), (16, {"weights": Int4Config()})],
)
def test_a_layer_is_seven_kernels_or_fewer(rows, options):
    layer = kernels_of_a_layer(rows, **options)
    assert 5 <= sum(layer.values()) <= 7, layer


def test_several_layers_of_4_bits_are_one_kernel():
    """Six take a launch more than two."""
    if not few_rows_chain.runs_on(torch.device("cuda")):
        pytest.skip("runs on 9.0 and newer")
    layer = kernels_of_a_layer(weights=Int4Config(group_size=64))
    assert sum(layer.values()) == 1 / 4, layer


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("padding", [False, True])
def test_steps_of_4_bits_give_likely_tokens(rows, padding):
    """Of one sequence attention is in the same kernel as the products."""
    model, inputs = made(**WIDE), prompts(padding, rows)
    flexops.patch(model, weights=Int4Config(group_size=64))
    tokens = flexops.generate(model, **inputs, max_new_tokens=NEW, eos_token_id=())
    assert not decoder.decoder_of(model).refused
    assert_likely(model, tokens, inputs)
