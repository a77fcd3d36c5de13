"""Every type of transformers' text and vision-language models: patched, it computes what it did.

The default tests take one type of each structure, the slow ones all."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from test_apply import distance
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexops

STRUCTURES = (
    "bart", "bert", "cohere", "deepseek_v3", "distilbert", "exaone4", "falcon", "gemma3", "glm4",
    "gpt2", "gpt_oss", "granite", "llama4_text", "mixtral", "modernbert", "mpt", "olmo2", "opt",
    "paligemma", "phi", "qwen2_vl", "qwen3_5_text", "roberta", "starcoder2", "t5",
)  # fmt: skip
"""One type of each structure: of norms, blocks, rotary embedding, layers, wrappers, losses."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def reference(model: Any) -> Iterator[None]:
    """torch's attention omits soft caps; transformers' eager one has them."""
    capped = [
        one
        for one in zoo.configs(model.config)
        if getattr(one, "attn_logit_softcapping", None) and one._attn_implementation == "sdpa"
    ]
    for one in capped:
        one._attn_implementation_internal = "eager"
    yield
    for one in capped:
        one._attn_implementation_internal = "sdpa"


def results(model: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Loss, logits or hidden states where there is no padding, and all gradients."""
    model.zero_grad()
    torch.manual_seed(0)  # routers of some experts sample
    output = model(**inputs, **options)
    seen = inputs.get("attention_mask", torch.ones(3, 12)).bool()
    logits = output.get("logits") if "labels" in inputs else output.last_hidden_state
    if logits is not None and logits.shape[:2] == seen.shape:
        logits = logits[seen]
    loss = output.loss if "labels" in inputs else logits.float().square().mean()
    loss.backward()
    named = model.named_parameters()
    found = {name: one.grad.float() for name, one in named if one.grad is not None}
    found["loss"] = loss.detach()
    return found if logits is None else {**found, "logits": logits.detach().float()}


def works(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        return False
    return True


def tokens(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    asked = {key: one for key, one in inputs.items() if key != "labels"}
    asked |= {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}  # type: ignore[dict-item]
    made = model.generate(**asked, output_scores=True, return_dict_in_generate=True)
    return made.sequences, torch.stack(made.scores)


def rounding(model: Any, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far results move if weights move by a rounding: the gradients of small softmaxes are
    differences of almost equal numbers."""
    kept = [one.detach().clone() for one in model.parameters()]
    for one in model.parameters():
        one.data.mul_(1 + 1e-7)
    found = max(distance(results(model, inputs), expected).values())
    for one, before in zip(model.parameters(), kept, strict=True):
        one.data.copy_(before)
    return found


def check(name: str) -> None:
    model = zoo.tiny(name)
    flexops.patch(model)  # what is probed is probed once
    flexops.unpatch(model)
    for padded in (False, True):
        inputs = zoo.batch(model, padded)
        with reference(model):
            expected = results(model, inputs)
        before = results(model, inputs)
        report = flexops.patch(model)
        fused = any(row.operator == "linear_cross_entropy" for row in report.swapped)
        actual = results(model, inputs, **({"skip_logits": False} if fused else {}))
        far = distance(actual, expected)
        if fused:
            actual = results(model, inputs)
            assert "logits" not in actual
            actual.pop("logits", None)
            far |= {
                f"fused {key}": one
                for key, one in distance(
                    actual, {key: one for key, one in expected.items() if key != "logits"}
                ).items()
            }
        flexops.unpatch(model)
        worst = max(far, key=far.get)  # type: ignore[arg-type]
        assert far[worst] < max(1e-4, 3 * rounding(model, inputs, before)), (padded, worst)
        after = results(model, inputs)
        assert all(after[key].equal(one) for key, one in before.items())
    if not model.can_generate():
        return
    model.eval()
    with reference(model):
        sequences, scores = tokens(model, inputs)
    flexops.patch(model)
    made, ours = tokens(model, inputs)
    assert made.equal(sequences)
    torch.testing.assert_close(ours, scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "hunyuan_v1_dense", "laguna"])
def test_decode_steps_compute_what_stands_around_attention(name: str) -> None:
    """Hunyuan's norms read what is rotated, Laguna's gate what q, k and v are projected from."""
    model = zoo.tiny(name).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn_like(one) * 0.4 if one.dim() == 1 else 0)
    prompt = zoo.batch(model, False)["input_ids"]
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    flexops.patch(model)
    assert flexops.generate(model, prompt, max_new_tokens=12, eos_token_id=()).equal(expected)


@pytest.mark.parametrize("name", ["diffllama", "doge"])
def test_attention_that_changes_what_it_reads_from_a_cache_has_no_decode_steps(name: str) -> None:
    report = flexops.patch(zoo.tiny(name))
    (row,) = [row for row in report.rows if row.operator.startswith("generation")]
    assert "Attention changes what it reads from a cache, or its mask" in row.reason


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified"])
def test_the_tokens_of_a_picture_attend_to_each_other(name):
    model = zoo.tiny(name).eval()
    model.config.text_config.use_bidirectional_attention = "vision"
    tokens = zoo.batch(model, False)["input_ids"]
    kinds = torch.zeros_like(tokens)
    kinds[:, 2:6] = 1
    expected, without = (
        model(tokens, mm_token_type_ids=one).logits for one in (kinds, torch.zeros_like(kinds))
    )
    assert (expected - without).norm() > 0.1
    report = flexops.patch(model)
    assert any(row.operator == "attention" for row in report.swapped)
    torch.testing.assert_close(model(tokens, mm_token_type_ids=kinds).logits, expected)


@pytest.mark.parametrize("name", [*STRUCTURES, "bamba", "blip", "blip-2", "nllb-moe"])
def test_a_type_of_each_structure_computes_the_same(name: str) -> None:
    check(name)


@pytest.mark.extra
@pytest.mark.parametrize(
    "name", ["exaone4", "gemma3", "gemma4_text", "gpt_oss", "llama4_text", "mistral", "modernbert"]
)
def test_windows_without_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernels skip what lies outside of a window: more tokens than its size."""
    monkeypatch.setattr("flexops.patching.attention._has_kernels", lambda _: True)
    check(name)


class Choices(TorchDispatchMode):
    """The experts that routers choose."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.found.append(result[1].sort(-1).values)
        return result


def in_bfloat16(name: str, seed: int = 0, device: str = "cpu") -> tuple[float, float, bool]:
    """How far a model in bfloat16 is from the truth, patched and plain, and whether both choose the
    experts of the truth."""
    model = zoo.tiny(name, seed).to(device)
    inputs = {key: one.to(device) for key, one in zoo.batch(model, False).items()}
    with reference(model), Choices() as expected:
        truth = results(model, inputs)
    inputs = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}
    model = zoo.tiny(name, seed).to(device).bfloat16()
    with reference(model), Choices() as of_plain:
        plain = distance(results(model, inputs), truth, 0.1)
    report = flexops.patch(model)
    fused = any(row.operator == "linear_cross_entropy" for row in report.swapped)
    with Choices() as chosen:
        patched = results(model, inputs, **({"skip_logits": False} if fused else {}))
    same = all(
        a.equal(b)
        for one in (of_plain, chosen)
        for a, b in zip(one.found, expected.found, strict=True)
    )
    return sum(distance(patched, truth, 0.1).values()), sum(plain.values()), same


@pytest.mark.parametrize("name", STRUCTURES)
def test_in_bfloat16_it_is_no_further_from_the_truth(name):
    """But for what is exact in the plain model, and rounding that is as large as gradients are."""
    patched, plain, _ = in_bfloat16(name)
    assert patched < 1.2 * plain


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(zoo.TYPES) - {*zoo.UNTESTED, "fnet", "mra"}))
def test_nor_by_a_gpus_kernels(name):
    """Three models in which no rounding changes the choice of an expert, patched or plain. (The
    plain code of FNet and MRA does not run in bfloat16.)"""
    errors = (in_bfloat16(name, seed, "cuda") for seed in range(12))
    found = list(itertools.islice((one for one in errors if one[2]), 3))
    assert found
    assert sum(one[0] for one in found) < 1.3 * sum(one[1] for one in found)


@pytest.mark.parametrize("name", STRUCTURES)
def test_copies_checkpoints_and_new_embeddings(name: str) -> None:
    """A copy and a pickle are patched, layers may be checkpointed, the state dict is the plain
    one, and a model whose embeddings were resized has its fused loss."""
    model = zoo.tiny(name)
    inputs, keys = zoo.batch(model, False), [*model.state_dict()]
    expected, pickles = results(model, inputs), works(lambda: pickle.dumps(model))
    expected.pop("logits")
    flexops.patch(model)
    assert [*model.state_dict()] == keys
    others = [copy.deepcopy(model)]
    if pickles:  # functions that HF's kernels make of transformers' do not
        others.append(pickle.loads(pickle.dumps(model)))
    if model.supports_gradient_checkpointing:
        others[0].gradient_checkpointing_enable()
    for other in others:
        far = distance(results(other, inputs), expected)
        assert max(far.values()) < 1e-4, max(far, key=far.get)  # type: ignore[arg-type]
    model.resize_token_embeddings(103, mean_resizing=False)
    assert "logits" not in results(model, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("in_graphs", [False, True])
def test_each_structure_compiles_to_one_graph(name: str, in_graphs: bool) -> None:
    """Where the plain model does."""
    model = zoo.tiny(name)
    inputs = zoo.batch(model, False)

    def compiled() -> dict[str, Tensor]:
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = results(call, inputs)
        return {name.removeprefix("_orig_mod."): one for name, one in found.items()}

    if not works(compiled):
        return
    expected = results(model, inputs)
    expected.pop("logits")
    flexops.patch(model, in_graphs=in_graphs)
    actual = compiled()
    actual.pop("logits", None)
    far = distance(actual, expected)
    assert max(far.values()) < 1e-4, max(far, key=far.get)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(zoo.TYPES) - zoo.UNTESTED.keys() - set(STRUCTURES)))
def test_every_type_computes_the_same(name: str) -> None:
    check(name)


@pytest.mark.slow
def test_the_table_is_that_of_this_transformers() -> None:
    """``python tests/patching/zoo.py`` writes it."""
    assert zoo.table() in zoo.PAGE.read_text()
