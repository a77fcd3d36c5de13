"""Modules are recognised by structure; what only looks like one of ours is left alone, with the
reason in the report."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import textwrap
import types
from typing import Any

import pytest
import tiny
import torch
import transformers
import zoo
from test_apply import distance, results
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama as llama

import flexops
from flexops.patching import classes, rope

OTHER = "on a small input it computes something else than the replacement"


class Scale(nn.Module):
    """An RMS norm under no known name, with a factor of its own."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.tiny_eps = nn.Parameter(torch.rand(16) + 0.5), 1e-4

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.tiny_eps)
        return y * self.weight * self.factor


class NearScale(Scale):
    factor = 1.0004


class Block(nn.Module):
    """A gated block with names of its own."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * nn.functional.silu(self.b(x))) * self.factor


class NearBlock(Block):
    factor = 1.0004


def row_of(module: nn.Module) -> Any:
    (row,) = flexops.patch(module).rows
    return row


@pytest.mark.parametrize(("kind", "operator"), [(Scale, "rms_norm"), (Block, "swiglu_linear")])
def test_a_name_says_nothing(kind: type[nn.Module], operator: str) -> None:
    module, x = kind(), torch.randn(3, 16)
    expected = module(x)
    row = row_of(module)
    assert (row.operator, row.swapped) == (operator, True)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(("act", "bias", "operator"), [
    ("quick_gelu", True, "bias_gelu"), ("relu2", False, "bias_relu2"), ("relu2", True, "bias_relu2"),
])  # fmt: skip
def test_plain_blocks(act: str, bias: bool, operator: str) -> None:
    """CLIP's, and Nemotron's, which has no bias; results and gradients."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 24, bias), nn.Linear(24, 16, bias)
            self.act = ACT2FN[act]

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.act(self.first(x)))

    module, x = Plain(), torch.randn(3, 16, requires_grad=True)
    inputs = [x, *module.parameters()]
    expected = module(x)
    gradients = torch.autograd.grad(expected.square().sum(), inputs)
    assert (row_of(module).operator, row_of(module).swapped) == (operator, True)
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(torch.autograd.grad(module(x).square().sum(), inputs), gradients)


@pytest.mark.parametrize(("act", "bias", "reason"), [
    ("relu", False, "its first layer has no bias, so that there is nothing to fuse"),
    ("relu", True, "its activation, ReLU, is not one of silu, gelu and relu2"),
])  # fmt: skip
def test_a_plain_block_that_is_left_alone(act, bias, reason):
    """T5's, in which torch's activation is one pass over memory, too."""
    config = transformers.T5Config(d_model=16, d_ff=24, dense_act_fn=act)
    module = transformers.models.t5.modeling_t5.T5DenseActDense(config)
    if bias:
        module.wi = nn.Linear(16, 24)
    assert row_of(module).reason == reason


def test_a_packed_block_a_quarter_as_wide_as_its_input():
    """Granite MoE Hybrid's: half of its packed width is no half of anything else."""
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

    module = granite.GraniteMoeHybridMLP(
        transformers.GraniteMoeHybridConfig(
            hidden_size=32, shared_intermediate_size=8, mamba_n_heads=4
        )
    )
    x = torch.randn(2, 3, 32)
    expected = module(x)
    assert (row_of(module).operator, row_of(module).swapped) == ("swiglu_linear", True)
    torch.testing.assert_close(module(x), expected)


def test_a_gated_block_that_widens():
    """Idefics 2's, between the widths of two models."""
    module = transformers.models.idefics2.modeling_idefics2.Idefics2MLP(16, 24, 32, "silu")
    x = torch.randn(2, 3, 16)
    expected = module(x)
    assert (row_of(module).operator, row_of(module).swapped) == ("swiglu_linear", True)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", ["cpmant", "falcon_mamba"])
def test_norms_whose_width_is_a_number_or_a_buffer(name):
    report = flexops.patch(zoo.tiny(name))
    assert all(row.swapped for row in report.rows if "Norm" in row.module)


@pytest.mark.parametrize("name", ["florence2", "modernbert", "phi4_multimodal"])
def test_attention_and_statistics_are_no_blocks_and_no_norms(name):
    rows = flexops.patch(zoo.on_meta(name)).rows
    wrong = "Attention.*bias_|MeanVariance.*norm"
    assert not [row for row in rows if re.search(wrong, f"{row.module} {row.operator}")]


@pytest.mark.parametrize("kind", [NearScale, NearBlock])
def test_a_difference_in_the_fourth_digit_is_seen(kind: type[nn.Module]) -> None:
    row = row_of(kind())
    assert not row.swapped
    assert row.reason == OTHER


def _queries(factor):
    def rotate(*args, original=llama.apply_rotary_pos_emb, **kwargs):
        q, k = original(*args, **kwargs)
        return q * factor, k

    return rotate


def _doubled(original):
    def forward(*args, **kwargs):
        out, *rest = original(*args, **kwargs)
        return out * 2, *rest

    return forward


def _copied():
    """The code of attention as a library may copy it, with a factor."""
    code = inspect.getsource(llama.LlamaAttention.forward)
    made = {}
    text = textwrap.dedent(code.replace("self.o_proj(attn_output)", "2 * self.o_proj(attn_output)"))
    exec("from __future__ import annotations\n" + text, vars(llama), made)
    return made["forward"]


REPLACED = {
    "rotary": (llama, "apply_rotary_pos_emb", _queries(2)),
    "rotary, in the fourth digit": (llama, "apply_rotary_pos_emb", _queries(1.0004)),
    "eager": (llama, "eager_attention_forward", _doubled(llama.eager_attention_forward)),
    "copied": (llama.LlamaAttention, "forward", _copied()),
    "wrapped": (llama.LlamaAttention, "forward", _doubled(llama.LlamaAttention.forward)),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("what", REPLACED)
def test_what_others_replace_in_transformers_counts(what, before, monkeypatch):
    """Also if a model of the class was patched before, and if this one was."""
    model, plain = zoo.tiny("llama"), zoo.tiny("llama")
    if what == "eager":
        for one in (model, plain):
            one.set_attn_implementation("eager")
    inputs = zoo.batch(model, False)
    flexops.patch(model)
    former = results(model, inputs, skip_logits=False)
    if before:
        flexops.unpatch(model)
    monkeypatch.setattr(*REPLACED[what])
    if before:
        flexops.patch(model)
    found, expected = results(model, inputs, skip_logits=False), results(plain, inputs)
    assert max(distance(former, expected).values()) > 2e-4
    assert max(distance(found, expected).values()) < 1e-4


@pytest.mark.parametrize("what", ["attention or mask, sdpa", "mask", "experts, grouped_mm"])
def test_a_function_that_was_registered_under_transformers_name_stays(what, monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as experts
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attention

    name = "grouped_mm" if "experts" in what else "sdpa"
    known = experts if "experts" in what else masks if what == "mask" else attention
    original = known[name]

    def mine(*args, **kwargs):
        out = original(*args, **kwargs)
        if what == "mask":
            return torch.ones(12, 12, dtype=torch.bool)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    monkeypatch.setitem(known._global_mapping, name, mine)
    model = zoo.tiny("mixtral")
    inputs = zoo.batch(model, False)
    expected = model(**inputs).logits
    reasons = [row.reason for row in flexops.patch(model).rows]
    start = "another function was registered as its "
    assert [one for one in reasons if one.startswith(start)] == [
        start + ("attention or mask, sdpa" if what == "mask" else what)
    ]
    torch.testing.assert_close(model(**inputs, skip_logits=False).logits, expected)


def test_attention_requires_transformers_5(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    rows = {row.operator: row for row in flexops.patch(zoo.tiny("qwen2_vl")).rows}
    reason = "it requires transformers 5, and 4.57.6 is installed"
    assert rows["attention"].reason == reason
    assert rows["rotary_embedding"].swapped


def test_another_epsilon_is_seen() -> None:
    """One that is no attribute."""

    class Fixed(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3e-4) * self.weight

    assert row_of(Fixed()).reason == OTHER


def test_a_subclass_that_overrides_half_is_left_alone() -> None:
    """A method that the forward pass calls, a forward pass around the inherited one, and a method
    of one instance, beside others of its class that are replaced."""

    class Half(Gemma2RMSNorm):
        def _norm(self, x: Tensor) -> Tensor:
            return super()._norm(x) * 1.5

    class Around(llama.LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states).abs()

    class Attributes(llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    for module in (Half(16), Around(16), Attributes(tiny.config("llama"))):
        report = flexops.patch(module)
        assert [row.reason for row in report.rows if row.module == type(module).__name__] == [OTHER]
    plain, own = Gemma2RMSNorm(16), Gemma2RMSNorm(16)
    own._norm = types.MethodType(Half._norm, own)
    report = flexops.patch(nn.ModuleList([plain, own]))
    assert [(row.count, row.swapped) for row in report.rows] == [(1, True), (1, False)]


def test_a_layer_that_does_not_run_is_tried_once_for_each_kind_of_input():
    """What its parts give, which it has not called yet, changes nothing: 12 of 324 calls."""
    calls = []

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(16)
            for name in "abcd":
                setattr(self, name, Block())

        def forward(self, x):
            calls.append(1)
            y, _ = self.a(self.norm(x))
            return x + y.missing

    (row,) = [one for one in flexops.patch(Layer()).rows if one.module == "Layer"]
    assert "no attribute 'missing'" in row.reason
    assert len(calls) == 12


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_function_for_dropout_is_seen(rate: float) -> None:
    """Its rate may be the module's, or the config's."""

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), self.rate, self.training)

    class Shared(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), self.config.rate, self.training)

    own, shared = Own(), Shared()
    own.rate, shared.config = rate, types.SimpleNamespace(rate=rate)  # type: ignore[assignment]

    class Mapped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), self.config["rate"], self.training)

    mapped, odd = Mapped(), Block()
    mapped.config, odd.config = {"rate": rate}, (rate,)  # type: ignore[assignment]
    assert row_of(odd).swapped
    for module in (own, shared, mapped):
        row = row_of(module)
        assert row.swapped == (not rate)
        assert bool(row.reason) == bool(rate)


def test_code_that_the_probe_cannot_run_is_named() -> None:
    class Needs(Scale):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(f"a group of {x.dim()} processes is required")

    assert row_of(Needs()).reason == (
        "its code did not run on a small input: ValueError: a group of 3 processes is required"
    )

    class Exits(Scale):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(f"{x.dim()}: not for you")

    assert row_of(Exits()).reason == (
        "its code did not run on a small input: SystemExit: 3: not for you"
    )


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("transformers_modules.owner.modeling", "its code came with the model (trust_remote_code)"),
        ("liger_kernel.transformers", "Liger has replaced it before"),
    ],
)
def test_remote_code_and_ligers_are_left_alone(
    package: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes of theirs; and a class of transformers whose forward Liger has replaced."""
    model, inputs = tiny.model("llama"), tiny.batch("llama")
    expected = results(model, inputs)
    classes = (llama.LlamaRMSNorm, llama.LlamaMLP, llama.LlamaAttention, llama.LlamaDecoderLayer)
    for cls in (*classes, llama.LlamaModel, llama.LlamaForCausalLM):
        monkeypatch.setattr(cls, "__module__", package)
    report = flexops.patch(model, generation=False)
    assert report.swapped == ()
    reasons = {row.reason for row in report.not_swapped}
    assert reasons == {reason, "generation=False"}
    assert {row.module for row in report.rows} >= {cls.__name__ for cls in classes[:3]}
    actual = results(model, inputs)
    assert all(actual[key].equal(one) for key, one in expected.items())
    monkeypatch.undo()

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    forward.__module__ = package
    monkeypatch.setattr(llama.LlamaMLP, "forward", forward)
    report = flexops.patch(model)
    assert [row.reason for row in report.not_swapped] == [reason]


def test_a_module_that_liger_patched_is_left_alone() -> None:
    """It binds methods to modules."""
    model = tiny.model("llama")
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(type(layer.mlp).forward, layer.mlp)
    report = flexops.patch(model)
    assert [(row.module, row.count, row.reason) for row in report.not_swapped] == [
        ("LlamaMLP", 2, "its forward was replaced before, by something else")
    ]


@pytest.mark.parametrize(
    ("name", "module", "swapped"),
    [
        ("gpt2", "GPT2LMHeadModel", True),
        ("roberta", "RobertaForMaskedLM", True),
        ("llava", "LlavaForConditionalGeneration", True),
        ("t5", "T5ForConditionalGeneration", True),
        ("mixtral", "MixtralExperts", True),
        ("fsmt", "FSMTForConditionalGeneration", False),
    ],
)
def test_models_and_experts_have_a_row(name: str, module: str, swapped: bool) -> None:
    report = flexops.patch(zoo.on_meta(name))
    (row,) = [
        one for one in report.rows if one.module == module and "generation" not in one.operator
    ]
    assert row.swapped == swapped
    assert swapped or row.reason


@pytest.mark.parametrize("name", zoo.TYPES)
def test_every_type_is_a_name(name: str) -> None:
    assert classes.is_architecture(name)


def test_a_name_patches_models_as_they_are_made() -> None:
    """Of any type of transformers."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    flexops.patch("mixtral")
    try:
        config = zoo.tiny_config(MixtralConfig, "mixtral")
        model = AutoModelForCausalLM.from_config(config).train()
    finally:
        assert flexops.unpatch("mixtral") > 0
    inputs = zoo.batch(model, False)
    actual = results(model, inputs)
    assert "logits" not in actual
    flexops.unpatch(model)
    expected = results(model, inputs)
    del expected["logits"]
    assert max(distance(actual, expected).values()) < 2e-5


def test_a_loss_that_does_arithmetic_of_its_own_gets_logits() -> None:
    """What is done to logits that have not been computed is what is done to tensors."""
    from flexops.patching.loss import Logits, head

    torch.manual_seed(0)
    layer, x, bias = nn.Linear(8, 5), torch.randn(2, 3, 8), torch.randn(5)
    layer.__dict__["forward"] = functools.partial(head, layer)
    logits, plain = Logits(layer, x, torch.float32), layer(x)
    assert len(logits) == 2
    for call in (
        lambda y: y - 1.0,
        lambda y: 1.0 - y,
        lambda y: 2.0 + y,
        lambda y: -y,
        lambda y: y**2,
        lambda y: 1.0 / y,
        lambda y: y / 0,
        lambda y: (y > 0).float(),
        lambda y: y.softmax(-1),
        lambda y: torch.stack(list(y)),
        lambda y: y.to(torch.float64),
        lambda y: y[..., :3],
        lambda y: y.reshape(-1),
        lambda y: y + bias + bias - 0,
        lambda y: y * 2.0 + bias - 0,
        lambda y: (y + bias) * 2.0 - 0,
        lambda y: (y / 3.0).tanh() * 3.0 + bias - 0,
    ):
        torch.testing.assert_close(call(logits), call(plain))
    assert logits.shape == plain.shape
    target = torch.tensor([0, 4, 1, -100, 2, 3])
    expected = nn.functional.cross_entropy((plain + bias).view(-1, 5), target)
    found = nn.functional.cross_entropy((logits + bias).view(-1, 5), target)
    torch.testing.assert_close(found, expected)
    for cast in (lambda y: y.bfloat16(), lambda y: y.to(torch.bfloat16), lambda y: y.half()):
        assert cast(logits).dtype == cast(plain).dtype
        torch.testing.assert_close(cast(logits) - 0, cast(plain))


ROTARY = {
    "half": ("llama", ""),
    "neighbours": ("cohere", ""),
    "neighbours of halves": ("glm", ""),
    "sorted": ("deepseek_v3", "_interleave"),
    "short": ("gpt_oss", ""),
    "backward": ("nanochat", ""),
    "trailing": ("deepseek_v4", ""),
    "flat": ("qwen2_vl", "_vision"),
}


@pytest.mark.parametrize("kind", ROTARY)
def test_each_kind_of_rotary_embedding_is_recognized(kind: str) -> None:
    """One that ours does not compute keeps its code: no model's results would show it."""
    folder, suffix = ROTARY[kind]
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    assert rope.kind_of(getattr(modeling, f"apply_rotary_pos_emb{suffix}")) == kind


def test_a_rotary_function_may_get_queries_only() -> None:
    """Qwen 4's rotates keys if there are some."""

    def rotate(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        def turn(x):
            a, b = x.chunk(2, -1)
            at = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return x * at[0] + torch.cat([-b, a], -1) * at[1]

        return turn(q) if k is None else (turn(q), turn(k))

    kind = rope.kind_of(rotate)
    assert kind == "half"
    q, angles = torch.randn(2, 4, 5, 8), torch.rand(2, 5, 4).repeat(1, 1, 2)
    tables = {"cos": angles.cos(), "sin": angles.sin()}
    torch.testing.assert_close(rope.replaced(rotate, kind)(q, **tables), rotate(q, **tables))


def test_sections_that_the_function_is_given():
    """Qwen2-VL's in transformers 4.45 to 4.57; later its tables have them applied."""

    def rotate(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        cos, sin = (
            torch.cat([one[i % 3] for i, one in enumerate(table.split(mrope_section * 2, -1))], -1)
            for table in (cos, sin)
        )
        return llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    assert rope.kind_of(rotate) == "half"
    ours = rope.replaced(rotate, "half")
    q, k, angles = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.rand(3, 2, 5, 8)
    tables = [f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin)]
    expected = rotate(q, k, *tables, [2, 3, 3])
    torch.testing.assert_close(ours(q, k, *tables, [2, 3, 3]), expected)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    last = ours(q, k, *tables, mrope_section=[2, 3, 3], unsqueeze_dim=2)
    torch.testing.assert_close([x.transpose(1, 2) for x in last], list(expected))

    def changed(q, k, cos, sin, mrope_section):
        return rotate(q, k, cos, sin, mrope_section[::-1])

    assert rope.kind_of(changed) is None


@pytest.mark.parametrize(("name", "rates"), [
    ("seed_oss", {"residual_dropout": 0.5}),
    ("prophetnet", {"activation_dropout": 0.6, "dropout": 0.3}),
    ("gpt2", {"dropout": 0.5}),
    ("t5gemma", {"dropout": 0.5}),
])  # fmt: skip
def test_blocks_drop_what_their_class_does(monkeypatch, name, rates):
    """Within a block, behind it, or both; by a part, or a rate. The class's own code is not run."""
    torch.manual_seed(0)
    model = zoo.tiny(name)
    block = next(one for one in model.modules() if re.search("MLP|FeedFor", type(one).__name__))
    for key, rate in rates.items():
        part = getattr(block, key)
        setattr(*((part, "p") if isinstance(part, nn.Module) else (block, key)), rate)
    plain, x = copy.deepcopy(block), torch.randn(2, 5, 64)

    def computed(one):
        torch.manual_seed(0)
        y = one(x)
        return y, *torch.autograd.grad(y.square().sum(), [*one.parameters()]), one.eval()(x)

    expected = computed(plain)
    assert (plain.train()(x) == plain(x)).float().mean() < 0.5
    row = row_of(block)
    assert row.swapped, row.reason
    monkeypatch.delattr(type(block), "forward")
    torch.testing.assert_close(computed(block), expected)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_block_that_drops_its_input_is_left_alone(factor):
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
            self.act, self.dropout = nn.SiLU(), 0.0

        def forward(self, x: Tensor) -> Tensor:
            if factor == 1.0:
                x = nn.functional.dropout(x, self.dropout, self.training)
            return factor * self.down(self.act(self.gate(x)) * self.up(x))

    row = row_of(Drops())
    assert not row.swapped
    assert ("in training it drops something" in row.reason) == (factor == 1.0)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_gated_norms_of_groups_with_a_size(size):
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    torch.manual_seed(0)
    norm = Zamba2RMSNormGated(64, size)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 3, 5, 64)
    expected = norm(x, gate)
    (row,) = flexops.patch(norm).rows
    assert (row.operator, row.swapped) == ("gated_rms_norm", True)
    torch.testing.assert_close(norm(x, gate), expected)


def test_a_layer_that_adds_nothing_has_no_residual():
    """Its code needs two tensors, which are joined."""
    from transformers import ZambaConfig
    from transformers.models.zamba.modeling_zamba import ZambaAttentionDecoderLayer

    layer = ZambaAttentionDecoderLayer(ZambaConfig(hidden_size=16, intermediate_size=24))
    (row,) = (row for row in flexops.patch(layer).rows if row.operator.startswith("add_"))
    assert row.reason == "no norm reads a sum that it makes"
