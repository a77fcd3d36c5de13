"""``attn_implementation="flexops"`` in transformers' own models, against their eager attention:
every option that generation has."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils import TransformersKwargs

import flexops
from flexops.build.load import loader
from flexops.errors import PatchError
from flexops.patching import attention

NEW = 9  # tokens, more than a window is long
GENERATIONS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "dynamic cache, left": {},
    "static cache, left": {"cache_implementation": "static"},
    "without a cache": {"use_cache": False},
    "beams, left": {"num_beams": 3},
}
"""``left``: one sequence of the batch is padded there."""


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_model_is_loaded_with_it(tmp_path):
    """As the guide has it; what is saved says nothing of flexops, so that it can be loaded
    without."""
    flexops.patching.register_attention()
    tiny.model("llama").save_pretrained(tmp_path)
    model, plain = (
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=one).eval()
        for one in (attention.NAME, "eager")
    )
    inputs = tiny.batch("llama")
    torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert "flexops" not in (tmp_path / "config.json").read_text()


def named(name: str, implementation: str, **changes: Any) -> Any:
    attention.register_attention()
    model = tiny.model(name, **changes).eval()
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("how", GENERATIONS)
# gemma2: a soft cap, and a window in every other layer
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_it_generates_the_tokens_of_eager_attention(name, how):
    inputs = {
        key: value
        for key, value in tiny.batch(name, padding="left" if "left" in how else "").items()
        if key != "labels"
    }
    asked = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
        **GENERATIONS[how],
    }
    eager, ours = (
        named(name, implementation).generate(**inputs, **asked)
        for implementation in ("eager", attention.NAME)
    )
    assert ours.sequences.shape[1] == tiny.LENGTH + NEW
    assert torch.equal(ours.sequences, eager.sequences)
    for actual, expected in zip(ours.scores, eager.scores, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_is_filled_in_pieces(kind):
    """A prompt handed over in parts of several tokens: queries that are fewer than keys, and not
    one, which see all that came before them."""
    tokens = tiny.batch("gemma2")["input_ids"]
    whole = named("gemma2", "eager")(tokens).logits
    model = named("gemma2", attention.NAME)
    cache = (
        kind(config=model.config)
        if kind is DynamicCache
        else kind(config=model.config, max_cache_len=tiny.LENGTH)
    )
    pieces = [
        model(part, past_key_values=cache, use_cache=True).logits
        for part in tokens.split((5, 4, 3), 1)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_it_is_the_operator_that_computes(name):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        named(name, attention.NAME)(**tiny.batch(name))
    assert torch.ops.flexops.attention in counter.get_flop_counts()["Global"]


# ---- attention sinks, windows and chunks -------------------------------------------------------

PATTERNS = [*tiny.SINKS, *tiny.CHUNKS, "mistral", "gemma2", "gemma3"]


@pytest.fixture(params=[False, True], ids=["masks for windows", "windows without masks"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU makes no mask for a window. Here the CPU makes none either."""
    monkeypatch.setattr(attention, "_has_kernels", lambda _: request.param)


def outcome(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits of what is no padding, and the gradient of every parameter."""
    inputs = {key: value for key, value in inputs.items() if key != "labels"}
    logits = model(**inputs, use_cache=False).logits
    seen = logits[inputs["attention_mask"].bool()] if "attention_mask" in inputs else logits
    (seen.float() * torch.linspace(-1, 1, seen.numel()).view(seen.shape)).sum().backward()
    found = {key: x.grad.float() for key, x in model.named_parameters() if x.grad is not None}
    return found | {"logits": seen.detach().float()}


def distances(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor, relative to its size, or to a part of the largest gradient's."""
    assert actual.keys() == expected.keys()
    least = 1e-3 * max(x.norm().item() for key, x in expected.items() if key != "logits")
    return {
        key: ((actual[key] - x).norm() / x.norm().clamp(min=least)).item()
        for key, x in expected.items()
    }


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("name", PATTERNS)
def test_it_computes_what_eager_attention_does(name, padding):
    inputs = tiny.batch(name, padding=padding)
    eager, ours = (outcome(named(name, one), inputs) for one in ("eager", attention.NAME))
    if name in tiny.SINKS:
        assert any(key.endswith("sinks") and x.norm() > 0 for key, x in eager.items())
    assert max(distances(ours, eager).values()) < 1e-4, distances(ours, eager)


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("name", [*tiny.SINKS, *tiny.CHUNKS, "mistral"])
def test_it_generates_with_every_pattern(name):
    test_it_generates_the_tokens_of_eager_attention(name, "dynamic cache, left")


def test_a_window_whose_size_is_not_passed_gets_a_mask(monkeypatch):
    """Qwen2 MoE makes masks for its windows, and does not pass these to attention."""
    monkeypatch.setattr(attention, "_has_kernels", lambda _: True)
    attention.register_attention()
    config = transformers.Qwen2MoeConfig(
        **tiny.SIZES, **tiny.WORDS, **tiny.GROUPED, **tiny.WINDOW, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        use_sliding_window=True, layer_types=["sliding_attention"] * 2,
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    found = []
    for one in ("eager", attention.NAME):
        model.set_attn_implementation(one)
        found.append(model(tiny.batch("llama")["input_ids"]).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


# ---- keywords that attention functions are called with -----------------------------------------


_CALLED = "ALL_ATTENTION_FUNCTIONS"


class _Model:
    """What a file of transformers says about its attention, read without importing it."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent.name
        text = path.read_text(encoding="utf-8")
        self.lines, tree = text.splitlines(), ast.parse(text)
        self.keywords: dict[str, set[str]] = {}
        self.changes_mask: set[str] = set()
        self.of_eager: set[str] = set()
        self.of_module: set[str] = set()
        for part in tree.body:
            if isinstance(part, ast.FunctionDef) and part.name.endswith("eager_attention_forward"):
                arguments = [*part.args.args[5:], *part.args.kwonlyargs]
                self.of_eager |= {one.arg for one in arguments}
                self.of_module |= _attributes_of_module(part)
            elif isinstance(part, ast.ClassDef):
                self._read(part)

    def _read(self, part: ast.ClassDef) -> None:
        for function in part.body:
            written = "".join(self.lines[function.lineno - 1 : function.end_lineno])
            if not isinstance(function, ast.FunctionDef) or _CALLED not in written:
                continue
            if _CALLED not in ast.unparse(function):  # only a comment has it
                continue
            nodes = list(ast.walk(function))
            calls = [one for one in nodes if isinstance(one, ast.Call)]
            called = [one for one in calls if ast.unparse(one.func) == "attention_interface"]
            assert called, f"{self.folder}: {part.name} calls attention by another name"
            found = {one.arg for call in called for one in call.keywords if one.arg is not None}
            self.keywords[part.name] = found
            names = [one for one in nodes if isinstance(one, ast.Name)]
            if any(x.id == "attention_mask" and isinstance(x.ctx, ast.Store) for x in names):
                self.changes_mask.add(part.name)


def _attributes_of_module(function: ast.FunctionDef) -> set[str]:
    found = {one for one in ast.walk(function) if isinstance(one, ast.Attribute)}
    return {x.attr for x in found if isinstance(x.value, ast.Name) and x.value.id == "module"}


@functools.cache
def _models() -> dict[str, _Model]:
    """Of every model that this transformers has."""
    folder = Path(transformers.__file__).parent / "models"
    files = sorted(folder.glob("*/modeling_*.py"))
    texts = ((path, path.read_text(encoding="utf-8")) for path in files)
    return {path.stem: _Model(path) for path, text in texts if _CALLED in text}


NO_EFFECT = frozenset(
    (
        "cu_seq_lens_k", "cu_seq_lens_q", "cu_seqlens", "deterministic", "ignore_index", "labels",
        "max_length_k", "max_length_q", "max_seqlen", "cache_params", "cache_position",
        "encoder_attention_mask", "encoder_hidden_states", "input_ids", "logits_to_keep",
        "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits",
        "past_key_values", "position_embeddings", "position_ids", "return_dict", "seq_idx",
        "shift_labels", "token_type_ids", "use_cache",
    )
)  # fmt: skip
"""Keywords that reach attention functions and change nothing of what eager attention computes:
lengths of packed sequences are in the mask, ``deterministic`` is flash-attn's, the rest is read
by other parts of a model."""

BY_TRANSFORMERS = ("output_attentions", "position_bias")


def _supported() -> set[str]:
    return set(inspect.signature(attention.attention).parameters) - {"others"}


@pytest.mark.extra
def test_every_keyword_of_every_model_is_known():
    """A new one changes the result, as selected keys do, or does not: then it is listed here."""
    known = _supported().union(NO_EFFECT, attention.REJECTED, BY_TRANSFORMERS)
    assert sum(len(one.keywords) for one in _models().values()) > 300
    unknown = {
        f"{model}.{name}": sorted(keywords - known)
        for model, one in _models().items()
        for name, keywords in one.keywords.items()
        if keywords - known
    }
    assert not unknown
    passed_on = {*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
    assert not passed_on - known
    assert not {f"{model}: {x}" for model, one in _models().items() for x in one.of_eager - known}


def test_eager_attention_reads_nothing_of_a_module_that_ours_does_not():
    known = {"num_key_value_groups", "head_dim", "training"}
    for model, one in _models().items():
        passed = set().union(*one.keywords.values())
        of_sinks = {"sinks"} if "s_aux" in passed else set()
        assert not one.of_module - known - of_sinks, model


def test_models_in_the_table_of_windows_pass_them():
    found = {one.folder: one for one in _models().values()}
    for folder in attention.WINDOW_KEYWORD:
        one = found[folder]
        passing = {name for name, keywords in one.keywords.items() if "sliding_window" in keywords}
        assert passing, folder
        assert not passing & one.changes_mask, folder
        assert all("Vision" in x or "Audio" in x for x in one.keywords.keys() - passing), folder


class Attending(nn.Module):
    """An attention module of transformers' kind, and its eager attention."""

    num_key_value_groups = 2
    is_causal = True

    def forward(self, function: Any, *tensors: Tensor, **keywords: Any) -> Any:
        function = function or text_eager_attention_forward
        return function(self, *tensors, None, dropout=0.0, scaling=0.3, **keywords)


def text_eager_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, extra: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    weights = (scores if extra is None else scores + extra).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def reading_eager_attention_forward(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    factor = options.pop("factor")
    return tuple(factor * x for x in text_eager_attention_forward(*given, **options))  # type: ignore[return-value]


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)


@pytest.fixture
def declined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reasons: list[str] = []
    monkeypatch.setattr(loader, "decline", lambda *said: reasons.append(said[2]))
    return reasons


def test_an_unknown_keyword_goes_to_the_models_own_attention(declined):
    part, tensors, extra = Attending(), drawn(), torch.randn(2, 4, 7, 7)
    hidden = torch.full((7, 7), torch.finfo(torch.float32).min).triu(1)
    expected = part(None, *tensors, extra=extra + hidden)
    torch.testing.assert_close(part(attention.attention, *tensors, extra=extra), expected)
    assert declined == ["Attending was called with extra: transformers' eager attention"]
    for nothing in (None, False):  # what is not given is not asked for
        assert part(attention.attention, *tensors, extra=nothing)[1] is None
    assert len(declined) == 1


def test_keywords_without_effect_stay_ours(declined):
    given = dict.fromkeys((*NO_EFFECT, "any_other"), torch.ones(1))
    assert Attending()(attention.attention, *drawn(), **given)[1] is None
    assert declined == []


def test_eager_attention_that_reads_any_keyword_computes(declined):
    class Reading(Attending):
        def forward(self, function: Any, *tensors: Tensor, **keywords: Any) -> Any:
            function = function or reading_eager_attention_forward
            return function(self, *tensors, None, dropout=0.0, scaling=0.3, **keywords)

    part, tensors = Reading(), drawn()
    doubled = part(attention.attention, *tensors, factor=2.0)
    torch.testing.assert_close(doubled[1], part(attention.attention, *tensors, factor=1.0)[1] * 2)
    assert declined == ["Reading was called with factor: transformers' eager attention"] * 2


@pytest.mark.parametrize("name", sorted(attention.REJECTED))
def test_keys_that_a_model_selects_are_an_error(name):
    with pytest.raises(PatchError, match=r"(?s)keys that Attending selects.*fix: model\.set_attn"):
        Attending()(attention.attention, *drawn(), **{name: torch.zeros(1, dtype=torch.int64)})


def test_a_class_without_eager_attention_is_named():
    part = nn.Identity()
    with pytest.raises(PatchError, match="eager attention of Identity"):
        attention.attention(part, *drawn(), None, output_attentions=True)


@pytest.mark.parametrize("padding", ["", "right"])
def test_position_bias_is_added(padding):
    """T5's is a keyword, with a gradient."""
    attention.register_attention()
    inputs, found = tiny.batch("llama", padding=padding), []
    for one in ("eager", attention.NAME):
        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=97,
            dropout_rate=0.0, decoder_start_token_id=0, attn_implementation=one,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config)
        assert model.encoder.config._attn_implementation == one
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, nn.Embedding):
                    part.weight.mul_(3)
        output = model(**inputs)
        output.loss.backward()
        grads = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        found.append(grads | {"logits": output.logits.detach()})
    assert any("relative_attention_bias" in key for key in found[0])
    assert max(distances(found[1], found[0]).values()) < 1e-4, distances(found[1], found[0])


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_dropout_beside_a_cap_or_sinks_is_the_models_own(name):
    found = []
    for one in ("eager", attention.NAME):
        model = named(name, one).train()
        for part in model.modules():
            if hasattr(part, "attention_dropout"):
                part.attention_dropout = 0.4
        torch.manual_seed(3)
        found.append(model(tiny.batch(name)["input_ids"]).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[0], named(name, "eager")(tiny.batch(name)["input_ids"]).logits)
