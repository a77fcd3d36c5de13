"""``experts_implementation="flexops"``, and experts in ``flexops.patch``."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import Tensor

import flexops
import flexops.patching
from flexops.nn import expert_parts
from flexops.ops import few_experts
from flexops.patching import experts
from flexops.patching.probe import disagreement

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5}, "gated_experts"),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 6, "mlp_only_layers": []}, "gated_experts"),
    "gpt_oss": ("GptOss", {"num_local_experts": 4}, "grouped_linear"),
}
LENGTH = 9


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    short, more, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{short}Config")(**SIZES, **more)
    model = getattr(transformers, f"{short}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model.to(dtype).eval()


def results(model: Any) -> list[Tensor]:
    tokens = torch.randint(3, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    logits = model(tokens).logits
    logits.float().square().sum().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [logits.detach(), *(one.clone() for one in gradients)]


def assert_same(actual: list[Tensor], expected: list[Tensor], limit: float = 1e-4) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).float().norm() <= limit * other.float().norm() + 1e-6


def decorated() -> Iterator[tuple[str, str]]:
    """Modules and names of the classes that go through transformers' experts interface."""
    folder = Path(transformers.__path__[0]) / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(r"@use_experts_implementation(?:\(.*\))?\nclass (\w+)", text):
            yield f"transformers.models.{path.parent.name}.{path.stem}", found[1]


def built(module: Any, cls: type) -> Any:
    """By the first of the module's configs that it can be made of; None if there is none."""
    for config in vars(module).values():
        if isinstance(config, type) and issubclass(config, transformers.PretrainedConfig):
            with contextlib.suppress(Exception), torch.device("meta"):
                return cls(config())
    return None


@pytest.mark.slow
def test_every_class() -> None:
    made, skipped = 0, {}
    for path, name in decorated():
        module = importlib.import_module(path)
        one = built(module, getattr(module, name))
        if one is not None:
            made += 1
            why = experts.refuse(one) or disagreement(
                functools.partial(experts.miniature, one),
                lambda tiny: [(tiny, functools.partial(experts.experts, tiny))],
            )
            skipped |= {name: why} if why else {}
    assert not skipped
    assert made > 45


def experts_of(model: Any) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "is_transposed")]


@pytest.mark.parametrize("name", MODELS)
def test_implementation(name: str) -> None:
    flexops.patching.register_experts()
    model = make(name)
    model.set_experts_implementation("eager")
    expected = results(model)
    model.set_experts_implementation("flexops")
    assert_same(results(model), expected)


@pytest.mark.parametrize("name", MODELS)
def test_patch(name: str) -> None:
    model = make(name)
    expected = results(model)
    report = flexops.patch(model)
    rows = [row for row in report.rows if row.module == type(experts_of(model)[0]).__name__]
    assert [(row.count, row.operator, row.swapped) for row in rows] == [(2, MODELS[name][2], True)]
    assert_same(results(model), expected)
    assert_same(results(copy.deepcopy(model)), expected)
    flexops.unpatch(model)
    assert all(torch.equal(a, b) for a, b in zip(results(model), expected, strict=True))


def test_patch_without_experts() -> None:
    model = make("mixtral")
    report = flexops.patch(model, experts=False)
    (row,) = (row for row in report.rows if row.module == "MixtralExperts")
    assert not row.swapped
    assert row.reason == "experts=False"
    assert "forward" not in experts_of(model)[0].__dict__


def test_experts_that_were_chosen_stay() -> None:
    model = make("mixtral")
    model.config._experts_implementation = "sonicmoe"
    assert "the model was told to use sonicmoe" in str(flexops.patch(model))


@pytest.mark.parametrize("first", ["lora", "patch"])
def test_lora_of_the_weights(first: str) -> None:
    """PEFT's LoRA of 3-D parameters, before and after patching."""
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["gate_up_proj", "down_proj"],
        init_lora_weights=False,
    )  # fmt: skip

    def build(patched: bool) -> Any:
        model = make("mixtral")
        if patched and first == "patch":
            flexops.patch(model)
        torch.manual_seed(2)
        model = peft.get_peft_model(model, config).eval()
        if patched and first == "lora":
            flexops.patch(model)
        return model

    expected, found = results(build(False)), results(build(True))
    assert_same(found, expected)


def test_checkpointing_and_compile() -> None:
    model = make("qwen3_moe")
    expected = results(model)
    flexops.patch(model)
    model.gradient_checkpointing_enable()
    model.train()
    assert_same(results(model), expected)
    module = experts_of(model)[0]
    args = (
        torch.randn(7, 32),
        torch.randint(0, 6, (7, 2)),
        torch.rand(7, 2),
    )
    compiled = torch.compile(lambda *args: module(*args), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*args), module(*args))


@pytest.mark.parametrize("chosen", [1, 2])
def test_blocks_that_give_every_token_to_every_expert(chosen: int) -> None:
    """Llama 4's: each token's own expert is computed alone, with the same results and gradients;
    several experts for a token are left alone."""
    config = transformers.Llama4TextConfig(
        hidden_size=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=chosen
    )
    torch.manual_seed(0)
    block = transformers.models.llama4.modeling_llama4.Llama4TextMoe(config)
    with torch.no_grad():
        for one in block.parameters():
            one.normal_(0, 0.3)
    x = torch.randn(2, 9, 16, requires_grad=True)

    def results() -> list[Tensor]:
        out, logits = block(x)
        total = out.square().sum() + logits.sum()
        return [out, logits, *torch.autograd.grad(total, [x, *block.parameters()])]

    expected = results()
    rows = [row for row in flexops.patch(block).rows if "grouped_linear" in row.operator]
    assert [row.swapped for row in rows] == [chosen == 1]
    torch.testing.assert_close(results(), expected, rtol=1e-4, atol=1e-5)
    if chosen > 1:
        assert rows[0].reason == "its tokens have several experts each"


@pytest.mark.parametrize("name", ["aria", "jetmoe"])
def test_one_product_of_each_expert(name):
    """Weights as they are stored and transposed, sizes in a tensor and in a list, no rows for an
    expert; results and gradients; float64 runs the class's own code."""
    torch.manual_seed(0)
    if name == "aria":
        module = transformers.models.aria.modeling_aria.AriaGroupedExpertsGemm(8, 6, 4)
        sizes = torch.tensor([3, 0, 5, 1])
    else:
        module = transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts(4, 8, 6)
        sizes = [3, 0, 5, 1]
    torch.nn.init.normal_(module.weight)
    x = torch.randn(9, 8, requires_grad=True)

    def results():
        out = module(x, sizes)
        return [out, *torch.autograd.grad(out.square().sum(), (x, module.weight))]

    expected = results()
    (row,) = flexops.patch(module).rows
    assert (row.operator, row.swapped) == ("grouped_linear", True)
    torch.testing.assert_close(results(), expected)
    if name == "jetmoe":
        with pytest.raises(RuntimeError, match="sum exactly to 9"):
            module(x, [3, 0, 5])
    module.double()
    assert module(x.double(), sizes).equal(type(module).forward(module, x.double(), sizes))


def of_no_interface(name):
    """Experts whose class goes from one to the next, with arguments for them."""
    sizes = {"hidden_size": 16, "moe_intermediate_size": 24, "hidden_act": "silu"}
    models = transformers.models
    args = torch.randn(18, 16), torch.randint(0, 4, (18, 2)), torch.rand(18, 2)
    if name == "step3p7":
        config = types.SimpleNamespace(num_local_experts=5, **sizes)
        return models.step3p7.modeling_step3p7.Step3p7Experts(config, 0.3), args
    config = types.SimpleNamespace(
        expert_ffn_hidden_size=24, n_routed_experts=3, zero_expert_num=2, **sizes
    )
    return models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts(config), args


@pytest.mark.parametrize("name", ["longcat_flash", "step3p7"])
def test_experts_of_no_interface(name):
    """Experts that return what they read; a gate of their own. Results, gradients, no expert's
    number."""
    torch.manual_seed(0)
    module, args = of_no_interface(name)
    with torch.no_grad():
        for one in module.parameters():
            one.normal_(0, 0.3)
    sources = [one.requires_grad_() for one in args if one.is_floating_point()]

    def found():
        out = module(*args)
        return [out, *torch.autograd.grad(out.square().sum(), [*sources, *module.parameters()])]

    expected = found()
    report = flexops.patch(module)
    (row,) = (row for row in report.rows if row.module == type(module).__name__)
    assert row.swapped
    assert module.__dict__["forward"].func is experts.experts
    torch.testing.assert_close(found(), expected, rtol=1e-4, atol=1e-5)
    module.double()
    wide = [one.double() if one.is_floating_point() else one for one in args]
    torch.testing.assert_close(module(*wide), type(module).forward(module, *wide))
    args[1][0, 0] = 7
    with pytest.raises(ValueError, match="choices must be experts' numbers"):
        module.float()(*args)


def test_rows_of_each_expert_in_one_graph():
    """JetMoE's list of sizes has numbers that a graph does not know."""
    model = zoo.tiny("jetmoe").eval()
    tokens = zoo.batch(model, False)["input_ids"]
    expected = model(tokens).logits
    flexops.patch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens).logits, expected)


def test_experts_with_weights_of_their_own():
    config = transformers.SwitchTransformersConfig(d_model=16, d_ff=24, num_experts=2)
    modeling = transformers.models.switch_transformers.modeling_switch_transformers
    (row,) = (
        row
        for row in flexops.patch(modeling.SwitchTransformersExperts(config)).rows
        if row.module == "SwitchTransformersExperts"
    )
    assert "grouped products require one tensor" in row.reason


def test_experts_of_no_interface_with_lora():
    """PEFT makes properties of the weights."""
    import peft

    def build():
        torch.manual_seed(0)
        module, args = of_no_interface("longcat_flash")
        with torch.no_grad():
            for one in module.parameters():
                one.normal_(0, 0.3)
        config = peft.LoraConfig(
            r=2, target_modules=[], target_parameters=["gate_up_proj", "down_proj"],
            init_lora_weights=False,
        )  # fmt: skip
        torch.manual_seed(1)
        return peft.inject_adapter_in_model(config, torch.nn.ModuleDict({"one": module})), args

    model, args = build()
    expected = model["one"](*args)
    assert any(row.swapped for row in flexops.patch(model).rows)
    torch.testing.assert_close(model["one"](*args), expected, rtol=1e-4, atol=1e-5)


def test_how_few_tokens_are_computed():
    """Which options the kernels for few tokens have, of what the classes' own code computes."""
    silu = {"activation": "silu"}
    assert [expert_parts.few_options(built_experts(name)) for name in ("mixtral", "qwen3_moe")] == [
        silu, silu,
    ]  # fmt: skip
    own = built_experts("gpt_oss")
    clamped = {"activation": "clamped", "interleaved": True, "alpha": 1.702, "limit": 7.0}
    assert expert_parts.few_options(own) == clamped

    class Other(type(own)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return super()._apply_gate(gate_up) * 2

    class Unusual(type(own)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return super()._apply_gate(gate_up * self.hidden_size)

    for kind in (Other, Unusual):
        own.__class__ = kind
        assert expert_parts.few_options(own) is None


def built_experts(name: str) -> Any:
    return next(one for one in make(name).modules() if type(one).__name__.endswith("Experts"))


def test_few_tokens_of_experts_by_columns(monkeypatch):
    """gpt-oss's experts without a gradient, as a GPU computes those of few tokens."""
    calls: list[int] = []

    def run(*args: Any, **options: Any) -> Tensor:
        calls.append(len(args[1]))
        return few_experts.few_experts(*args, **options)

    monkeypatch.setattr(experts, "few_experts", run)
    monkeypatch.setattr(experts, "fits", lambda *_: True)
    own = built_experts("gpt_oss").bfloat16()
    x, choices = torch.randn(3, 32).bfloat16(), torch.tensor([[0, 3], [1, 2], [3, 1]])
    weights = torch.rand(3, 2)
    with torch.no_grad():
        found = experts.experts(own, x, choices, weights)
        expected = own(x, choices, weights)
    assert calls == [3]
    assert (found - expected).float().norm() < 0.02 * expected.float().norm()
    experts.experts(own, x, choices, weights)  # with gradients of the experts
    assert calls == [3]
