"""Experts of mixtures with weights of 4 bits: in memory, while loading, in checkpoints."""

from __future__ import annotations

import copy
import json
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_checkpoints import compressed, load, logits, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import flexops
from flexops.errors import PatchError
from flexops.int4 import expert_layers
from flexops.nn import Int4Experts, Int4Linear, expert_parts
from flexops.patching import Int4Config

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "pad_token_id": 0,
}  # fmt: skip
COUNTS = {"Qwen3Moe": "num_experts", "Mixtral": "num_local_experts", "GptOss": "num_local_experts"}
EXPERTS = 4
SETTINGS = [{"group_size": 32}, {"group_size": 64, "symmetric": True}]


def make(name: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | {COUNTS[name]: EXPERTS} | sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for key, parameter in model.named_parameters():
        if not key.endswith("norm.weight"):
            nn.init.normal_(parameter, std=0.1)
    return model


def of_experts(model: nn.Module) -> dict[str, Int4Experts]:
    return {name: one for name, one in model.named_modules() if isinstance(one, Int4Experts)}


def own_experts(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def dequantized(model: Any, name: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """The plain model with the weights that codes stand for."""
    plain = make(name, dtype, **sizes)
    state = {key: one for key, one in model.state_dict().items() if key in plain.state_dict()}
    for path, one in model.named_modules():
        if isinstance(one, Int4Linear):
            state[f"{path}.weight"] = flexops.unpack_int4(one.weight, dtype)
        elif isinstance(one, Int4Experts):
            for part, weight in (("gate_up_proj", one.gate_up), ("down_proj", one.down)):
                dense = flexops.unpack_int4(weight, dtype).view(one.num_experts, -1, weight.k)
                transposed = plain.get_submodule(path).is_transposed
                state[f"{path}.{part}"] = dense.transpose(1, 2) if transposed else dense
    plain.load_state_dict(state)
    return plain


# ---- the module ----


class Classes(nn.Module):
    """Experts of any flags, as transformers' decorator makes them."""

    def __init__(self, gate: bool, bias: bool, transposed: bool, act: nn.Module | None) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = gate, bias, transposed
        self.is_concatenated, self.act_fn = True, act or nn.SiLU()
        first = "gate_up_proj" if gate else "up_proj"
        shapes = {first: (EXPERTS, 64 if gate else 32, 96), "down_proj": (EXPERTS, 96, 32)}
        for name, (count, rows, columns) in shapes.items():
            shape = (count, columns, rows) if transposed else (count, rows, columns)
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 8))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(count, rows)))
        self.config = types.SimpleNamespace(_experts_implementation=None)


def reference(
    module: Any, made: Int4Experts, x: Tensor, choices: Tensor, weights: Tensor
) -> Tensor:
    """In float32, of the dequantized weights."""
    first, last = (
        flexops.unpack_int4(one, torch.float32).view(EXPERTS, -1, one.k)
        for one in (made.gate_up, made.down)
    )
    biases = [0 if one is None else one.float() for one in made.biases]
    out = torch.zeros(x.shape)
    for token, row in enumerate(choices.tolist()):
        for slot, expert in enumerate(row):
            if expert == EXPERTS:
                continue
            packed = first[expert] @ x[token].float() + (
                biases[0][expert] if made.bias_names else 0
            )
            if module.has_gate:
                gate, up = packed.chunk(2)
                packed = module.act_fn(gate) * up
            else:
                packed = module.act_fn(packed)
            row_out = last[expert] @ packed + (biases[1][expert] if made.bias_names else 0)
            out[token] += weights[token, slot].float() * row_out
    return out


INPUT = torch.tensor([[0, 3], [1, EXPERTS], [3, 0], [2, 1], [0, 2]])


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.ReLU()], ids=["silu", "gelu", "relu"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_every_flag(gate, bias, transposed, act):
    torch.manual_seed(0)
    module = Classes(gate, bias, transposed, act)
    made = Int4Experts.from_experts(module, group_size=32)
    assert made.has_gate == gate
    x, weights = torch.randn(5, 96), torch.rand(5, 2)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        given = x.to(dtype).requires_grad_(), INPUT, weights.to(dtype).requires_grad_()
        found = made(*given)
        expected = reference(module, made, *given)
        assert found.dtype == dtype
        assert (found - expected).abs().max() <= limit * expected.abs().max()
        wanted = torch.autograd.grad(expected.square().sum(), (given[0], given[2]))
        grads = torch.autograd.grad(found.float().square().sum(), (given[0], given[2]))
        for one, other in zip(grads, wanted, strict=True):
            assert (one - other).abs().max() <= 5 * limit * other.abs().max()


@pytest.mark.parametrize("symmetric", [False, True])
def test_values_are_those_of_single_experts(symmetric):
    module = Classes(True, False, True, None)
    made = Int4Experts.from_experts(module, 32, symmetric)
    for expert in range(EXPERTS):
        one = flexops.quantize_int4(module.down_proj[expert].t(), 32, symmetric)
        whole = flexops.unpack_int4(made.down).view(EXPERTS, 96, 32)
        assert torch.equal(whole[expert], flexops.unpack_int4(one))
    assert (made.down_zeros is None) == symmetric


def test_copies_dtypes_and_state_dicts():
    module = Classes(True, True, False, None)
    made = Int4Experts.from_experts(module, 32)
    given = torch.randn(5, 96), INPUT, torch.rand(5, 2)
    expected = made(*given)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(*given), expected)
    other = Int4Experts.from_experts(Classes(True, True, False, None), 32)
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(*given), expected)
    half = copy.deepcopy(made).to(torch.bfloat16)
    assert torch.equal(half.gate_up_scales, made.gate_up_scales)
    assert torch.equal(half.down_zeros, made.down_zeros)
    assert half.down_proj_bias.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"down_proj is not packed(.|\n)*from_experts"):
        made.load_state_dict(module.state_dict())
    assert torch.equal(made(*given), expected)
    assert "experts=4, hidden=96, rows=64, inner=32, bias=True, group_size=32" in repr(made)


def test_the_gate_of_gpt_oss_is_found_while_16_bits_are_the_default():
    """As from_pretrained builds models."""
    experts = own_experts(make("GptOss"))
    expert_parts._is_clamped.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = expert_parts.few_options(experts)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found is not None
    assert found["activation"] == "clamped"


def test_choices_that_are_no_experts_are_rejected():
    made = Int4Experts.from_experts(Classes(True, False, False, None), 32)
    with pytest.raises(ValueError, match="choices must be experts' numbers"):
        made(torch.randn(5, 96), INPUT + 2, torch.rand(5, 2))


def test_sizes_that_do_not_fit_are_rejected():
    made = Int4Experts.from_experts(Classes(True, False, False, None), 32)
    with pytest.raises(ValueError, match="multiple of 16 rows for each of 3 experts"):
        Int4Experts(made.gate_up, made.down, 3)
    with pytest.raises(ValueError, match="down must have 32 rows"):
        Int4Experts(made.down, made.gate_up, EXPERTS)


def _norm(one: Any) -> None:
    one.has_post_expert_norm = True


def _hook(one: Any) -> None:
    one.register_forward_hook(lambda *_: None)


def _odd_rows(one: Any) -> None:
    one.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 40, 96))


def _more_experts(one: Any) -> None:
    one.gate_up_proj = nn.Parameter(torch.randn(EXPERTS + 1, 64, 96))


def _no_flags(one: Any) -> None:
    del one.has_bias


@pytest.mark.parametrize(
    ("change", "group_size", "reason"),
    [
        (lambda _: None, 64, "its 96 inputs are not a multiple of group_size=64"),
        (_odd_rows, 32, "its 40 outputs are not a multiple of 16"),
        (_norm, 32, "a norm follows"),
        (_hook, 32, "hooks"),
        (_more_experts, 32, "no down_proj"),
        (_no_flags, 32, "does not go through"),
        (lambda one: one.double(), 32, "16 or 32 bits"),
    ],
)
def test_what_cannot_be_quantized_says_why(change, group_size, reason):
    module = Classes(True, False, False, None)
    change(module)
    with pytest.raises(ValueError, match=reason):
        Int4Experts.from_experts(module, group_size)
    model = nn.Sequential(nn.Linear(96, 96), module)
    weights = Int4Config(group_size=group_size)
    report = flexops.patch(model, weights=weights)
    assert any(reason in row.reason for row in report.not_swapped), report
    assert model[1] is module


# ---- models in memory ----


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", COUNTS)
def test_a_model_computes_and_generates_as_with_dequantized_weights(name, settings):
    model = make(name)
    report = flexops.patch(model, weights=Int4Config(**settings))
    assert len(of_experts(model)) == 2
    rows = [row for row in report.swapped if row.operator == "int4_grouped_linear"]
    assert [row.count for row in rows] == [2], report
    assert not any("Experts" in row.module for row in report.not_swapped), report
    plain = dequantized(model, name)
    assert torch.allclose(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    ids = torch.randint(3, 60, (2, 5))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    wanted = plain.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), wanted)
    assert torch.equal(flexops.generate(model, ids, max_new_tokens=8, eos_token_id=()), wanted)


def test_patching_again_and_unpatching_keep_the_experts():
    model = make("GptOss")
    flexops.patch(model)  # whose experts' forward is replaced
    flexops.patch(model, weights="int4")
    before = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), before)
    report = flexops.patch(model)
    assert any(row.module == "Int4Experts" and row.swapped for row in report.rows)
    assert not any("Experts" in row.module for row in report.not_swapped), report
    flexops.unpatch(model)
    assert len(of_experts(model)) == 2
    assert torch.allclose(logits(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", ["experts", ["model.layers.0.mlp.experts"]])
def test_experts_that_are_named_keep_16_bits(names, tmp_path):
    model = make("Qwen3Moe")
    model.save_pretrained(tmp_path)
    report = flexops.patch(model, weights=Int4Config(modules_to_not_convert=names))
    assert len(of_experts(model)) == (0 if names == "experts" else 1)
    assert any("named in modules_to_not_convert" in row.reason for row in report.rows)
    assert len(of_experts(load(tmp_path, modules_to_not_convert=names))) == len(of_experts(model))


def test_an_error_leaves_the_experts(monkeypatch):
    from flexops.patching import apply

    model = make("Mixtral")
    before = logits(model)
    monkeypatch.setattr(apply, "_optimizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        flexops.patch(model, weights="int4")
    assert not of_experts(model)
    assert torch.equal(logits(model), before)


def test_adapters_beside_the_experts_train():
    import peft

    model = make("Qwen3Moe")
    flexops.patch(model, weights="int4")
    plain = dequantized(model, "Qwen3Moe")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    found: list[list[Tensor]] = []
    adapters: dict[str, Tensor] = {}
    for one in (model, plain):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(one, settings).train()
        adapted.load_state_dict(adapters, strict=False)  # the second has those of the first
        adapters = {key: each for key, each in adapted.state_dict().items() if "lora" in key}
        ids = torch.arange(12)[None] * 7 % 61
        adapted(ids, labels=ids).loss.backward()
        found.append([each.grad for each in adapted.parameters() if each.grad is not None])
    assert len(found[0]) == len(found[1]) == 4
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * other.abs().max())


# ---- 16-bit checkpoints ----


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", COUNTS)
def test_quantized_while_loading_saved_and_loaded_again(name, settings, tmp_path):
    make(name, torch.bfloat16).save_pretrained(tmp_path / "16")
    loaded = load(tmp_path / "16", **settings)
    memory = AutoModelForCausalLM.from_pretrained(tmp_path / "16")
    flexops.patch(memory, weights=Int4Config(**settings))
    flexops.patch(loaded)
    assert len(of_experts(loaded)) == 2
    assert torch.equal(logits(loaded), logits(memory))
    for index, model in enumerate((loaded, memory)):
        model.save_pretrained(tmp_path / str(index), max_shard_size="20KB")
        again = load(tmp_path / str(index))
        flexops.patch(again)
        assert of_experts(again).keys() == of_experts(model).keys()
        assert torch.equal(logits(again), logits(model))
    config = json.loads((tmp_path / "0/config.json").read_text())["quantization_config"]
    own = "flexops_int4" if name == "GptOss" else "compressed-tensors"
    assert config["quant_method"] == own
    router = {"Mixtral": "block_sparse_moe.gate", "GptOss": "mlp.router"}.get(name, "mlp.gate")
    assert f"model.layers.1.{router}" in config["ignore"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [("Qwen3Moe", "mlp.experts.3.up_proj"), ("Mixtral", "block_sparse_moe.experts.3.w3")],
)
def test_transformers_reads_what_was_saved(name, layer, tmp_path):
    model = make(name, torch.bfloat16)
    flexops.patch(model, weights=Int4Config(symmetric=True))
    model.save_pretrained(tmp_path)
    assert f"model.layers.1.{layer}.weight_packed" in load_file(tmp_path / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    for path, one in of_experts(model).items():
        plain = theirs.get_submodule(path)
        for mine, their in ((one.gate_up, plain.gate_up_proj), (one.down, plain.down_proj)):
            assert torch.equal(flexops.unpack_int4(mine).view_as(their), their)


def test_experts_that_do_not_fit_keep_16_bits_with_a_warning(tmp_path):
    model = make("Qwen3Moe", moe_intermediate_size=96)
    model.save_pretrained(tmp_path / "16")
    with pytest.warns(UserWarning, match=r"2 modules of experts keep 16 bits(.|\n)*96 inputs"):
        loaded = load(tmp_path / "16")
    assert not of_experts(loaded)
    loaded.save_pretrained(tmp_path / "4")
    ignored = json.loads((tmp_path / "4/config.json").read_text())["quantization_config"]["ignore"]
    assert r"re:model\.layers\.1\.mlp\.experts\..*" in ignored
    again = load(tmp_path / "4")
    assert torch.equal(logits(again), logits(loaded))


def test_a_weight_of_experts_that_is_missing_is_named(tmp_path):
    make("GptOss").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.down_proj")
    save(tmp_path, tensors)
    with pytest.raises(PatchError, match=r"layers.1.mlp.experts.down_proj is missing"):
        load(tmp_path)


def test_two_schemes_are_two_groups(tmp_path):
    model = make("Qwen3Moe", torch.bfloat16)
    flexops.patch(model, weights=Int4Config(modules_to_not_convert="experts"))
    for layer in model.model.layers:
        layer.mlp.experts = Int4Experts.from_experts(layer.mlp.experts, 32, symmetric=True)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    targets = [one["targets"] for one in config["config_groups"].values()]
    assert [r"re:model\.layers\.0\.mlp\.experts\..*" in one for one in targets] == [True, False]
    flexops.patch(again := load(tmp_path))
    assert torch.equal(logits(again), logits(model))


# ---- 4-bit checkpoints ----

NAMES = {"Qwen3Moe": ("gate_proj", "up_proj", "down_proj"), "Mixtral": ("w1", "w3", "w2")}


def unfused(name: str, dtype: torch.dtype) -> Any:
    """The model with a linear layer for each product of each expert, as checkpoints have them."""
    model = make(name, dtype)
    for layer in model.model.layers:
        experts, tree = layer.mlp.experts, nn.Module()
        for expert in range(EXPERTS):
            gate, up = experts.gate_up_proj[expert].chunk(2)
            for own, weight in zip(NAMES[name], (gate, up, experts.down_proj[expert]), strict=True):
                linear = nn.Linear(*weight.t().shape, bias=False, dtype=dtype)
                linear.weight.data = weight.detach().clone()
                expert_layers.put(tree, f"{expert}.{own}", linear)
        layer.mlp.experts = tree
    return model


def in_a_checkpoint(name: str, key: str) -> str:
    return key.replace(".mlp.", ".block_sparse_moe.") if name == "Mixtral" else key


def written(
    name: str, folder: Path, symmetric: bool, strategy: str, size: Any
) -> dict[str, Tensor]:
    """A checkpoint by compressed-tensors; its own dequantized weights."""
    found = compressed(unfused(name, torch.bfloat16), folder, symmetric, strategy, size)
    tensors = load_file(folder / "model.safetensors")
    save(folder, {in_a_checkpoint(name, key): one for key, one in tensors.items()})
    return found


def assert_has(model: Any, name: str, expected: dict[str, Tensor]) -> None:
    """The values of each layer, bit for bit."""
    assert len(of_experts(model)) == 2
    for path, one in of_experts(model).items():
        first = flexops.unpack_int4(one.gate_up).view(EXPERTS, 2, -1, 64)
        last = flexops.unpack_int4(one.down).view(EXPERTS, -1, 64)
        for expert in range(EXPERTS):
            gate, up, down = (expected[f"{path}.{expert}.{own}"] for own in NAMES[name])
            assert torch.equal(first[expert], torch.stack([gate, up]))
            assert torch.equal(last[expert], down)


@pytest.mark.parametrize(
    ("symmetric", "strategy", "size"),
    [(True, "group", 32), (False, "group", 64), (False, "channel", None)],
)
@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_has_the_values_of_the_library(
    name, symmetric, strategy, size, tmp_path, monkeypatch
):
    expected = written(name, tmp_path / "model", symmetric, strategy, size)
    monkeypatch.setattr(Int4Experts, "from_experts", None)
    model = load(tmp_path / "model")
    assert_has(model, name, expected)
    flexops.patch(model)
    exact = logits(dequantized(model, name))
    rounded = (logits(dequantized(model, name, torch.bfloat16)) - exact).abs().max()
    assert (logits(model) - exact).abs().max() <= 2 * rounded
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert_has(again, name, expected)


def words(numbers: Tensor, order: tuple[int, ...]) -> Tensor:
    """Eight numbers of 4 bits of each row to an int32, the one at ``order[i]`` at bits 4 i."""
    made = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        made |= numbers[:, column::8].long() << 4 * place
    return made.to(torch.int32)


def published(kind: str, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """Of a layer ``[N, K]``: GPTQ and AWQ as their papers' code stores it."""
    in_order, of_awq = tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)
    if kind == "gptq":
        qweight, qzeros = words(codes, in_order).t(), words((zeros.t() - 1) & 15, in_order)
    else:
        qweight, qzeros = words(codes.t(), of_awq), words(zeros.t(), of_awq)
    return {"qweight": qweight.contiguous(), "qzeros": qzeros, "scales": scales.t().contiguous()}


@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize("name", NAMES)
def test_gptq_and_awq_have_the_values_of_their_formula(name, kind, tmp_path):
    model = unfused(name, torch.float16)
    state, expected, generator = model.state_dict(), {}, torch.Generator().manual_seed(0)
    for path, one in model.named_modules():
        if isinstance(one, nn.Linear) and path != "lm_head":
            n, k = one.weight.shape
            codes = torch.randint(16, (n, k), generator=generator)
            zeros = torch.randint(1, 16, (n, k // 32), generator=generator)
            scales = (torch.rand(n, k // 32, generator=generator) / 50 + 0.001).half()
            values = codes - zeros.repeat_interleave(32, 1)
            expected[path] = (values * scales.float().repeat_interleave(32, 1)).half()
            state.pop(f"{path}.weight")
            state |= {f"{path}.{key}": each for key, each in
                      published(kind, codes, scales, zeros).items()}  # fmt: skip
    save(tmp_path, {in_a_checkpoint(name, key): one.contiguous() for key, one in state.items()})
    config = {"quant_method": kind, "bits": 4, "group_size": 32, "version": "gemm"}
    model.config.quantization_config = config | {"sym": False, "desc_act": False}
    model.config.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert_has(loaded, name, expected)
    assert torch.isfinite(logits(loaded)).all()


Change = Callable[[dict[str, Tensor]], Any]
ONE = "model.layers.1.mlp.experts.2"


def _all_of(stem: str) -> Change:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith(stem)]


def _put(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_all_of(f"{ONE}.up_proj."), f"{ONE}.up_proj.weight_packed is missing"),
        (_all_of(f"{ONE}.gate_proj.weight_packed"), f"there is no {ONE}.gate_proj.weight_packed"),
        (_all_of(f"{ONE}.down_proj.weight_scale"), "required: weight_scale"),
        (_put(f"{ONE}.down_proj.weight_scale", lambda one: one[1:]), "down_proj.weight_scale does"),
        (_put(f"{ONE}.gate_proj.weight_packed", lambda one: one[:, 1:]), "weight_packed does not"),
        (
            _put(f"{ONE}.up_proj.weight_scale", lambda one: one.float()),
            "experts whose scales or zero points differ",
        ),
        (
            _put(f"{ONE}.up_proj.weight_scale", lambda one: one * torch.nan),
            f"{ONE}.up_proj.weight_scale has numbers that are not finite",
        ),
        (
            lambda tensors: tensors.update({f"{ONE}.up_proj.bias": torch.zeros(64)}),
            f"cannot place {ONE}.up_proj.bias",
        ),
        (
            lambda tensors: tensors.update({
                f"{ONE[:-1]}9.up_proj.{part}": tensors[f"{ONE}.up_proj.{part}"].clone()
                for part in ("weight_packed", "weight_scale")
            }),
            "experts.9.up_proj is no linear layer of this model",
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_rejected(change, message, tmp_path):
    written("Qwen3Moe", tmp_path / "model", True, "group", 32)
    tensors = load_file(tmp_path / "model/model.safetensors")
    change(tensors)
    save(tmp_path / "model", tensors)
    with pytest.raises(PatchError) as caught:
        load(tmp_path / "model")
    assert message in str(caught.value)
    assert "fix:" in str(caught.value)


def test_a_group_size_without_a_kernel_is_rejected(tmp_path):
    written("Qwen3Moe", tmp_path / "model", True, "group", 16)
    with pytest.raises(PatchError, match="no kernel of flexops has this group size"):
        load(tmp_path / "model")


def test_experts_of_16_bits_beside_layers_of_4(tmp_path):
    """As a checkpoint that ignores them has them."""
    compressed(make("Qwen3Moe", torch.bfloat16), tmp_path / "model", True, "group", 32)
    tensors = load_file(tmp_path / "model/model.safetensors")
    plain = make("Qwen3Moe", torch.bfloat16)
    plain.save_pretrained(tmp_path / "16")
    theirs = load_file(tmp_path / "16/model.safetensors")
    tensors = {key: one for key, one in tensors.items() if ".experts." not in key}
    save(
        tmp_path / "model",
        tensors | {key: one for key, one in theirs.items() if ".experts." in key},
    )
    model = load(tmp_path / "model")
    assert not of_experts(model)
    assert torch.equal(own_experts(model).down_proj, own_experts(plain).down_proj)
