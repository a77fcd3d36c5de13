"""4-bit checkpoints: read, written, quantized while loading, trained with adapters, and rejected.

``tests/golden/int4`` holds tiny models that auto-gptq and autoawq packed, with the hashes of what
these libraries dequantize them to; compressed-tensors packs and dequantizes here itself.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

import flexops
from flexops.errors import PatchError
from flexops.int4 import checkpoints, formats
from flexops.nn import Int4Linear
from flexops.ops import few_rows
from flexops.patching import Int4Config, from_config, register_int4

GOLDEN = Path(__file__).parents[1] / "golden/int4"
X = torch.arange(12)[None] * 7 % 17
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


def llama(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    torch.manual_seed(0)
    # .to(dtype) would round the frequencies of positions, too
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | sizes), dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            nn.init.normal_(parameter, std=0.1)
    return model


def load(folder: Path | str, **config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Int4Config(**config))


def layers(model: nn.Module) -> dict[str, Int4Linear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, Int4Linear)}


def dequantized(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model with plain linear layers of the same weights."""
    model = flexops_free(model)
    for name, one in layers(model).items():
        plain = nn.Linear(one.in_features, one.out_features, bias=one.bias is not None)
        plain.weight.data = flexops.unpack_int4(one.weight, dtype)
        if one.bias is not None:
            plain.bias.data = one.bias.data
        model.set_submodule(name, plain)
    return nn.Module.float(model) if dtype == torch.float32 else model


def flexops_free(model: Any) -> Any:
    model = copy.deepcopy(model)
    flexops.unpatch(model)
    model.is_quantized = False
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(X.to(model.device)).logits.float()
    return found


def assert_no_worse_than_rounding(model: Any, dtype: torch.dtype) -> None:
    """Logits of 4-bit layers, and of the same weights dequantized to 16 bits, against float32."""
    exact = logits(dequantized(model, torch.float32))
    rounded = (logits(dequantized(model, dtype)) - exact).abs().max()
    assert (logits(model) - exact).abs().max() <= 1.5 * rounded + 1e-6


# ---- the formats ----


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_golden_checkpoint_has_the_values_of_the_library(kind):
    model = load(GOLDEN / kind)
    hashes = json.loads((GOLDEN / kind / "hashes.json").read_text())
    assert set(layers(model)) == set(hashes)
    for name, one in layers(model).items():
        values = flexops.unpack_int4(one.weight, torch.float16).numpy().tobytes()
        assert hashlib.sha256(values).hexdigest() == hashes[name]
    assert_no_worse_than_rounding(model, torch.float16)
    report = flexops.patch(model)
    assert any(row.operator == "int4_linear" and row.count == 7 for row in report.swapped)
    assert_no_worse_than_rounding(model, torch.float16)


def golden(kind: str, tmp_path: Path, **settings: Any) -> tuple[Path, dict[str, Tensor]]:
    """A copy to change: its folder and its tensors."""
    folder = tmp_path / kind
    shutil.copytree(GOLDEN / kind, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder, load_file(folder / "model.safetensors")


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_version_2_of_gptq_stores_zero_points_as_they_are(tmp_path):
    folder, tensors = golden("gptq", tmp_path, checkpoint_format="gptq_v2")
    for name in tensors:
        if name.endswith("qzeros"):
            tensors[name] = tensors[name] + 0x11111111
    save(folder, tensors)
    assert torch.equal(logits(load(folder)), logits(load(GOLDEN / "gptq")))


def test_a_group_of_all_inputs_is_cut_into_groups_of_kernels(tmp_path):
    folder, tensors = golden("gptq", tmp_path, group_size=-1)
    for name in tensors:
        if name.endswith(("qzeros", "scales")):
            tensors[name] = tensors[name][:1].contiguous()
        if name.endswith("g_idx"):
            tensors[name] = torch.zeros_like(tensors[name])
    save(folder, tensors)
    model = load(folder)
    assert {one.group_size for one in layers(model).values()} == {32, 128}
    name = "model.layers.0.mlp.down_proj"
    weight = flexops.unpack_int4(layers(model)[name].weight, torch.float32)
    words, scales, zeros = (tensors[f"{name}.{part}"] for part in ("qweight", "scales", "qzeros"))
    for row, column in ((0, 0), (7, 127), (31, 64)):
        code = int(words[column // 8, row]) >> 4 * (column % 8) & 15
        zero = (int(zeros[0, row // 8]) >> 4 * (row % 8)) + 1 & 15
        assert weight[row, column] == (code - zero) * scales[0, row].float()


def compressed(
    model: Any, folder: Path, symmetric: bool, strategy: str, group_size: int | None, bits: int = 4
) -> dict[str, Tensor]:
    """Write a checkpoint by compressed-tensors; returns its own dequantized weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    arguments = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group_size
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format="pack-quantized"
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.float().unflatten(1, (module.weight_scale.shape[1], -1))
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            span = (
                (high - low) / 15
                if not symmetric
                else torch.maximum(-low, high) / (2**bits / 2 - 0.5)
            )
            module.weight_scale.data.copy_(span)
            if not symmetric:
                module.weight_zero_point.data.copy_((-low / span - 8).round().clamp(-8, 7))
    compressor = ModelCompressor.from_pretrained_model(model, "pack-quantized")
    compressor.compress_model(model)
    state = {name: one.detach().contiguous() for name, one in model.state_dict().items()}
    folder.mkdir()
    save(folder, state)
    model.config.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return {
        name: module.weight.detach()
        for name, module in model.named_modules()
        if hasattr(module, "weight_scale")
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("symmetric", "strategy", "group_size"),
    [
        (True, "group", 32),
        (False, "group", 64),
        (True, "channel", None),
        (False, "channel", None),
    ],
)
def test_compressed_tensors_has_the_values_of_the_library(
    dtype, symmetric, strategy, group_size, tmp_path
):
    expected = compressed(llama(dtype), tmp_path / "model", symmetric, strategy, group_size)
    ours = load(tmp_path / "model")
    assert layers(ours).keys() == expected.keys()
    for name, one in layers(ours).items():
        assert torch.equal(flexops.unpack_int4(one.weight), expected[name])
        assert one.scales.dtype == dtype
    assert_no_worse_than_rounding(ours, dtype)

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    report = flexops.patch(theirs)
    assert layers(theirs).keys() == expected.keys(), report
    flexops.patch(ours)
    assert torch.equal(logits(theirs), logits(ours))
    assert layers(theirs).keys() == expected.keys()  # no hook has decompressed them
    theirs.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    flexops.patch(again)
    assert torch.equal(logits(again), logits(ours))


def test_loading_in_another_dtype_keeps_the_scales():
    model = AutoModelForCausalLM.from_pretrained(
        GOLDEN / "awq", quantization_config=Int4Config(), dtype=torch.bfloat16
    )
    one = layers(model)["model.layers.0.self_attn.q_proj"]
    assert one.scales.dtype == torch.float16
    assert one.bias is not None
    assert one.bias.dtype == torch.bfloat16
    assert_no_worse_than_rounding(model, torch.bfloat16)


class _Largest(TorchDispatchMode):
    """The most elements of a matrix of floats that an operator returned."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor) and one.is_floating_point() and one.device.type != "meta":
                self.found = max(self.found, one.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_no_16_bit_weight_exists_while_a_checkpoint_is_read(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    folder, tensors = golden(kind, tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 7}
    (folder / "config.json").write_text(json.dumps(config))
    name = "model.embed_tokens.weight"
    save(folder, tensors | {name: tensors[name][:7].contiguous()})
    with _Largest() as largest:
        model = load(folder)
    weights = [2 * one.in_features * one.out_features for one in layers(model).values()]
    rotary = 2048  # bytes; tables of positions are no weights
    assert largest.found <= max(rotary, min(weights) // 2)


def test_tensors_of_a_checkpoint_are_freed_layer_by_layer(tmp_path, monkeypatch):
    model = llama()
    flexops.patch(model, weights="int4")
    model.save_pretrained(tmp_path)
    read: list[weakref.ref[Tensor]] = []
    freed = []
    weight_of = checkpoints.weight_of

    def watched(where: str, form: Any, tensors: dict[str, Tensor], *rest: Any) -> Any:
        freed.append(sum(one() is None for one in read))
        read.append(weakref.ref(tensors["weight_packed"]))
        return weight_of(where, form, tensors, *rest)

    monkeypatch.setattr(checkpoints, "weight_of", watched)
    load(tmp_path)
    assert len(freed) == 14
    assert freed[-1] >= 12


# ---- quantized by flexops ----


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({}, False),
        ({"group_size": 32, "symmetric": True}, True),
        ({"group_size": 32, "head": True}, False),
        ({"group_size": 32, "head": True}, True),
    ],
)
def test_quantized_while_loading_and_in_memory_are_the_same(settings, tied, tmp_path):
    llama(tie_word_embeddings=tied, attention_bias=tied).save_pretrained(tmp_path / "16")
    loaded = load(tmp_path / "16", **settings)
    memory = AutoModelForCausalLM.from_pretrained(tmp_path / "16")
    weights = Int4Config(**settings) if settings else "int4"
    report = flexops.patch(memory, weights=weights)
    flexops.patch(loaded)
    assert len(layers(loaded)) == len(layers(memory)) == 14 + bool(settings.get("head"))
    assert torch.equal(logits(loaded), logits(memory)), report
    assert isinstance(loaded.lm_head, Int4Linear) == bool(settings.get("head"))
    assert loaded.model.embed_tokens.weight.dtype == torch.bfloat16
    for index, model in enumerate((loaded, memory)):
        model.save_pretrained(tmp_path / str(index))
        flexops.patch(again := load(tmp_path / str(index)))
        assert torch.equal(logits(again), logits(loaded))
        # other software reads it
        flexops.patch(theirs := AutoModelForCausalLM.from_pretrained(tmp_path / str(index)))
        assert torch.equal(logits(theirs), logits(loaded))


def test_zero_points_between_codes_are_saved_in_flexops_own_format(tmp_path):
    model = llama()
    flexops.patch(model, weights=Int4Config(modules_to_not_convert=["down_proj"]))
    model.model.layers[1].mlp.down_proj = Int4Linear.from_linear(
        model.model.layers[1].mlp.down_proj, 128
    )
    model.save_pretrained(tmp_path / "own")
    config = json.loads((tmp_path / "own/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "flexops_int4"
    stored = load_file(tmp_path / "own/model.safetensors")
    assert "model.layers.1.mlp.down_proj.weight_zero_point" in stored
    for again in (load(tmp_path / "own"), AutoModelForCausalLM.from_pretrained(tmp_path / "own")):
        flexops.patch(again)
        assert torch.equal(logits(again), logits(model))
        assert layers(again).keys() == layers(model).keys()


def test_quantizing_is_as_near_as_unrounded_zero_points():
    torch.manual_seed(0)
    linear = nn.Linear(256, 64)
    model = nn.Sequential(copy.deepcopy(linear))
    flexops.patch(model, weights="int4")
    ours = flexops.unpack_int4(model[0].weight)
    free = flexops.unpack_int4(flexops.quantize_int4(linear.weight))
    errors = [(one - linear.weight).square().mean().sqrt() for one in (ours, free)]
    assert errors[0] <= 1.05 * errors[1]


def test_weights_are_quantized_one_at_a_time(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    read: list[weakref.ref[Tensor]] = []
    alive = []
    quantized = checkpoints.quantized_weight

    def watched(weight: Tensor, settings: Any) -> Any:
        read.append(weakref.ref(weight))
        alive.append(sum(one() is not None for one in read))
        return quantized(weight, settings)

    monkeypatch.setattr(checkpoints, "quantized_weight", watched)
    load(tmp_path)
    assert len(read) == 14
    assert max(alive) <= 2


def test_layers_that_do_not_fit_keep_16_bits(tmp_path):
    model = llama(intermediate_size=96)
    model.save_pretrained(tmp_path / "16")
    report = flexops.patch(model, weights="int4")
    reason = "its 96 inputs are not a multiple of group_size=64"
    assert any(row.reason == reason and row.count == 2 for row in report.not_swapped)
    with pytest.warns(UserWarning, match="2 linear layers keep 16 bits, such as .*down_proj"):
        loaded = load(tmp_path / "16")
    flexops.patch(loaded)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "4")
    flexops.patch(again := load(tmp_path / "4"))
    assert torch.equal(logits(again), logits(model))


def test_a_checkpoint_in_shards_and_generation(tmp_path):
    model = llama()
    flexops.patch(model, weights="int4")
    expected = model.generate(X, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path / "4", max_shard_size="20KB")
    assert len(list((tmp_path / "4").glob("*.safetensors"))) > 2
    again = load(tmp_path / "4")
    flexops.patch(again)
    assert torch.equal(again.generate(X, max_new_tokens=5, do_sample=False), expected)


def test_unpatch_keeps_the_weights_and_a_copy_computes_the_same():
    model = llama()
    flexops.patch(model, weights="int4")
    before = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), before)
    flexops.unpatch(model)
    assert len(layers(model)) == 14
    assert (logits(model) - before).abs().max() < 0.1
    report = flexops.patch(model)
    assert any("before" in row.reason for row in report.swapped)
    assert torch.equal(logits(model), before)


def test_registered_as_the_default(tmp_path):
    register_int4()
    try:
        model = AutoModelForCausalLM.from_pretrained(GOLDEN / "gptq")
        plain = llama()
        plain.save_pretrained(tmp_path / "16")
        assert not layers(AutoModelForCausalLM.from_pretrained(tmp_path / "16"))
    finally:
        register_int4(False)
    assert torch.equal(logits(model), logits(load(GOLDEN / "gptq")))


@pytest.mark.parametrize("name", [*tiny.ALL, *tiny.SINKS, *tiny.CHUNKS])
def test_every_architecture_computes_with_4_bits(name):
    model = tiny.model(name).eval()
    report = flexops.patch(model, weights=Int4Config(group_size=32))
    assert layers(model)
    several = {type(one).__name__ for one in model.modules() if "Experts" in type(one).__name__}
    assert several <= {"Int4Experts", "Llama4TextExperts"}, report
    inputs = {key: one for key, one in tiny.batch(name).items() if key != "labels"}
    plain = flexops_free(model)
    with torch.no_grad():
        found, expected = (one(**inputs)[0] for one in (model, plain))
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max())


def test_the_loss_of_a_head_with_a_part_of_4_bits_needs_no_logits():
    """BERT's has a linear layer of its own, which is tried with small sizes."""
    for weights in (Int4Config(group_size=32), None):
        report = flexops.patch(tiny.model("bert"), weights=weights)
        assert "linear_cross_entropy" in [row.operator for row in report.swapped], report


def test_routers_keep_16_bits():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.gate_proj = nn.Linear(64, 8), nn.Linear(64, 64)

    model = Mixture()
    flexops.patch(model, weights="int4")
    assert list(layers(model)) == ["gate_proj"]


# ---- modules of other libraries ----


def hosted(module: str, name: str, kind: str) -> Any:
    """The golden model with layers of a class of this name, as the library builds them."""
    tensors = load_file(GOLDEN / kind / "model.safetensors")
    sizes = json.loads((GOLDEN / kind / "config.json").read_text())
    model = llama(
        torch.float16,
        **{name: sizes[name] for name in (*SIZES, "attention_bias", "tie_word_embeddings")},
    )
    names = {key.rpartition(".")[0] for key in tensors if key.endswith("qweight")}
    for where in names:
        linear: Any = model.get_submodule(where)
        host: Any = type(name, (nn.Module,), {"__module__": module})()
        host.in_features, host.out_features = linear.in_features, linear.out_features
        host.bias = None
        model.set_submodule(where, host)
    for key, one in tensors.items():
        where, _, part = key.rpartition(".")
        if where in names:
            host = model.get_submodule(where)
            host.__dict__.pop(part, None)
            host.register_buffer(part, one)
        else:
            model.get_submodule(where).weight.data = one
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("awq.modules.linear.gemm", "WQLinear_GEMM", "awq"),
        ("gptqmodel.nn_modules.qlinear.torch_awq", "AwqTorchLinear", "awq"),
        ("auto_gptq.nn_modules.qlinear.qlinear_cuda_old", "QuantLinear", "gptq"),
        ("gptqmodel.nn_modules.qlinear.torch", "TorchLinear", "gptq"),
    ],
)
def test_layers_of_other_libraries_are_converted(module, name, kind):
    model = hosted(module, name, kind)
    flexops.patch(model)
    expected = load(GOLDEN / kind)
    flexops.patch(expected)
    assert torch.equal(logits(model), logits(expected))


def test_gptqmodel_may_have_brought_zero_points_to_version_2():
    model = hosted("gptqmodel.nn_modules.qlinear.torch", "TorchLinear", "gptq")
    for one in model.modules():
        if hasattr(one, "qzeros"):
            one.qzeros += 0x11111111
            one.__dict__["qzero_format"] = lambda: 2
    flexops.patch(model)
    expected = load(GOLDEN / "gptq")
    flexops.patch(expected)
    assert torch.equal(logits(model), logits(expected))


def test_quantized_activations_are_left_with_the_reason(tmp_path):
    from compressed_tensors.quantization import QuantizationArgs

    compressed(llama(), tmp_path / "model", True, "group", 32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    layer = model.model.layers[0].self_attn.q_proj
    layer.quantization_scheme = copy.copy(layer.quantization_scheme)
    layer.quantization_scheme.input_activations = QuantizationArgs(
        num_bits=8, strategy="token", dynamic=True
    )
    report = flexops.patch(model)
    assert sum("activations" in row.reason for row in report.not_swapped) == 1
    assert len(layers(model)) == 13
    expected = load(tmp_path / "model")
    assert torch.allclose(logits(model), logits(expected), rtol=0.05, atol=0.05)


def test_8_bits_of_compressed_tensors_compute_as_before(tmp_path):
    compressed(llama(), tmp_path / "model", True, "group", 32, bits=8)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    report = flexops.patch(model)
    assert any("does not fit" in row.reason for row in report.not_swapped)
    assert torch.allclose(logits(model), logits(plain), rtol=0.05, atol=0.05)
    with pytest.raises(PatchError, match="num_bits=8, where 4 is supported"):
        load(tmp_path / "model")


def test_a_bias_gets_the_dtype_of_the_model():
    model = hosted("awq.modules.linear.gemm", "WQLinear_GEMM", "awq")
    nn.Module.to(model.model.embed_tokens, torch.bfloat16)
    for one in model.modules():
        if "Norm" in type(one).__name__:
            nn.Module.to(one, torch.bfloat16)
    flexops.patch(model)
    assert torch.isfinite(logits(model)).all()


def test_a_layout_of_a_kernel_is_left_with_the_reason():
    model = hosted("gptqmodel.nn_modules.qlinear.marlin", "MarlinLinear", "gptq")
    report = flexops.patch(model)
    reasons = [row.reason for row in report.not_swapped if row.module == "MarlinLinear"]
    assert len(reasons) == 1
    assert "load it with Int4Config" in reasons[0]
    assert not layers(model)


# ---- adapters ----


@pytest.mark.parametrize("order", ["patch", "adapt"])
def test_lora_on_a_4_bit_model_has_the_gradients_of_its_dequantized_weights(order):
    import peft

    model = llama()
    flexops.patch(model, weights="int4")
    plain = dequantized(model, torch.float32)
    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)

    def adapted(base: Any) -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(base, settings).float().train()

    if order == "adapt":
        flexops.unpatch(model)
    ours, theirs = adapted(model), adapted(plain)
    adapters = {name: one for name, one in ours.state_dict().items() if "lora" in name}
    theirs.load_state_dict(adapters, strict=False)  # ours begin in the dtype of scales
    if order == "adapt":
        flexops.patch(ours)
    assert len(layers(ours)) == 14
    for one in (ours, theirs):
        one(X, labels=X).loss.backward()
    found = {name: one.grad for name, one in ours.named_parameters() if one.grad is not None}
    expected = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    assert len(expected) == 28
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-3, atol=1e-4 * grad.abs().max()), name


def test_weights_below_adapters_are_quantized_and_adapters_are_not():
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    flexops.patch(model, weights="int4")
    assert len(layers(model)) == 14
    assert all("base_layer" in name or "lora" not in name for name in layers(model))
    model(X, labels=X).loss.backward()
    with pytest.raises(AttributeError, match="merge them into the 16-bit model"):
        model.merge_and_unload()


# ---- bad input ----

Change = Callable[[dict[str, Tensor]], None]
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def _cut(name: str, dim: int = 0) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        one = tensors[name]
        tensors[name] = one.narrow(dim, 0, one.shape[dim] - 1).contiguous()

    return change


def _drop(name: str) -> Change:
    return lambda tensors: [tensors.pop(name), None][1]


def _put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


BAD: dict[str, tuple[str, dict[str, Any], Change, str]] = {
    "scales of another shape": ("gptq", {}, _cut(f"{Q}.scales", 1), "q_proj.scales does not fit"),
    "groups that do not divide": (
        "gptq", {}, _put(f"{DOWN}.scales", lambda one: torch.cat([one, one[:1]])), "divide 128",
    ),
    "another group size than declared": (
        "awq", {"group_size": 64}, _drop("nothing"), "2 groups, as the config declares",
    ),
    "zero points of another shape": ("awq", {}, _cut(f"{Q}.qzeros"), "q_proj.qzeros does not fit"),
    "codes of another shape": ("awq", {}, _cut(f"{Q}.qweight"), "q_proj.qweight does not fit"),
    "codes of another dtype": (
        "gptq", {}, _put(f"{Q}.qweight", lambda one: one.float()), "torch.int32",
    ),
    "scales that are missing": ("gptq", {}, _drop(f"{Q}.scales"), "required: scales"),
    "zero points that are missing": ("awq", {}, _drop(f"{Q}.qzeros"), "required: qzeros"),
    "inputs that were sorted": (
        "gptq", {"desc_act": True}, _put(f"{DOWN}.g_idx", lambda one: one.flip(0)), "desc_act=False",
    ),
    "8 bits": ("gptq", {"bits": 8}, _drop("nothing"), "bits=8, where 4 is supported"),
    "quantized activations": (
        "gptq", {"activation": {"mode": "w4afp8"}}, _drop("nothing"), "where None is supported",
    ),
    "the layout of a kernel": (
        "gptq", {"checkpoint_format": "marlin"}, _drop("nothing"), "required: compressed-tensors",
    ),
    "AWQ's other order": ("awq", {"version": "gemv"}, _drop("nothing"), "version='gemv'"),
    "a layer that the model lacks": (
        "gptq", {},
        lambda tensors: tensors.update({f"model.layers.0.mlp.experts.0.w1.{part}":
                                        tensors[f"{Q}.{part}"].clone()
                                        for part in ("qweight", "qzeros", "scales")}),
        "is no linear layer of this model",
    ),
    "scales of an activation": (
        "awq", {},
        lambda tensors: tensors.update({"model.layers.0.mlp.act.scales": torch.ones(64)}),
        "there is no model.layers.0.mlp.act.qweight, its codes",
    ),
    "codes that are missing": ("gptq", {}, _drop(f"{Q}.qweight"), "q_proj.qweight, its codes"),
    "scales in another dtype": (
        "gptq", {}, _put(f"{Q}.scales", lambda one: one.double()), "torch.float64",
    ),
    "a bias of another shape": (
        "awq", {}, lambda tensors: tensors.update({f"{Q}.bias": torch.zeros(3)}), "q_proj.bias",
    ),
    "groups of some inputs": ("gptq", {}, _cut(f"{Q}.g_idx"), "q_proj.g_idx does not fit"),
    "scales that are no numbers": (
        "gptq", {}, _put(f"{Q}.scales", lambda one: one.index_fill(0, torch.tensor(0), torch.nan)),
        "q_proj.scales has numbers that are not finite",
    ),
    "infinite scales": (
        "awq", {}, _put(f"{DOWN}.scales", lambda one: one * torch.inf), "down_proj.scales has",
    ),
    "a group size that is no number": (
        "awq", {"group_size": [32]}, _drop("nothing"), "group_size=[32]",
    ),
    "groups that are no mapping": (
        "gptq", {"quant_method": "compressed-tensors", "config_groups": [1]}, _drop("nothing"),
        "config_groups=[1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_does_not_fit_is_rejected(case, tmp_path):
    kind, settings, change, message = BAD[case]
    folder, tensors = golden(kind, tmp_path, **settings)
    tensors["nothing"] = torch.zeros(1)
    change(tensors)
    tensors.pop("nothing", None)
    save(folder, tensors)
    with pytest.raises(PatchError) as caught:
        load(folder)
    assert message in str(caught.value)
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kv_cache_scheme", {"num_bits": 8}),
        ("transform_config", {"rotation": "hadamard"}),
        ("config_groups", {}),
        ("format", "nvfp4-pack-quantized"),
        ("input_activations", {"num_bits": 8}),
        ("output_activations", {"num_bits": 8}),
        ("num_bits", 8),
        ("type", "float"),
        ("strategy", "tensor_group"),
    ],
)
def test_each_setting_of_compressed_tensors_counts(setting, value):
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group"}
    group: dict[str, Any] = {"weights": weights}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }
    assert formats.format_of(config) is formats.WRITTEN
    inner = {"input_activations": group, "output_activations": group}
    (weights if setting in weights else inner.get(setting, config))[setting] = value
    with pytest.raises(PatchError, match=setting):
        formats.format_of(config)


def test_a_file_that_was_cut_is_named(tmp_path):
    folder, _ = golden("gptq", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(PatchError, match=r"is damaged(.|\n)*model\.safetensors(.|\n)*again"):
        load(folder)


def test_another_quantization_method_is_rejected(tmp_path):
    folder, _ = golden("gptq", tmp_path, quant_method="hqq")
    with pytest.raises(PatchError, match=r"quant_method='hqq'(.|\n)*AWQ GEMM"):
        load(folder)


def test_16_bit_tensors_under_a_config_of_4_bits_are_rejected(tmp_path):
    model = llama(torch.float16)
    model.save_pretrained(tmp_path / "16")
    config = json.loads((tmp_path / "16/config.json").read_text())
    golden_config = json.loads((GOLDEN / "gptq/config.json").read_text())
    config["quantization_config"] = golden_config["quantization_config"]
    (tmp_path / "16/config.json").write_text(json.dumps(config))
    with pytest.raises(PatchError, match="no layer in GPTQ"):
        load(tmp_path / "16")


def test_a_decode_step_has_four_products_of_a_layer(monkeypatch):
    """q, k and v with the norm; the output with the residual; gate and up with the norm; down."""
    model = llama(torch.float32)
    report = flexops.patch(model, weights="int4")
    assert any(row.module == "LlamaMLP" for row in report.swapped)
    seen = []
    composed = few_rows.composed

    def watched(x: Any, weights: Any, *args: Any, **options: Any) -> Any:
        kinds = {type(one) for one in weights}
        parts = [name for name in ("norm", "activation", "residual") if options[name] is not None]
        seen.append((kinds == {flexops.Int4Weight}, len(weights), *parts))
        return composed(x, weights, *args, **options)

    monkeypatch.setattr(few_rows, "composed", watched)
    ids = torch.randint(3, 90, (2, 5))
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    seen.clear()
    found = flexops.generate(model, ids, max_new_tokens=4, eos_token_id=())
    assert torch.equal(found, wanted)
    of_a_layer = [(True, 3, "norm"), (True, 1, "residual")]
    of_a_layer += [(True, 2, "norm", "activation"), (True, 1, "residual")]
    assert seen[: 4 * len(model.model.layers)] == of_a_layer * len(model.model.layers)


def test_a_weight_that_is_missing_is_named(tmp_path):
    llama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save(tmp_path, tensors)
    with pytest.raises(PatchError, match=r"layers.1.mlp.up_proj.weight is missing"):
        load(tmp_path)


def test_a_state_dict_of_16_bits_is_rejected_by_a_4_bit_model():
    model, before = llama(), llama().state_dict()
    flexops.patch(model, weights="int4")
    packed = {name: one.packed.clone() for name, one in layers(model).items()}
    with pytest.raises(RuntimeError, match="is not packed"):
        model.load_state_dict(before)
    assert all(torch.equal(packed[name], one.packed) for name, one in layers(model).items())


@pytest.mark.parametrize("weights", ["int8", 4, Int4Config])
def test_other_weights_are_rejected_and_nothing_is_replaced(weights):
    model = llama()
    with pytest.raises(PatchError, match="weights="):
        flexops.patch(model, weights=weights)
    assert not layers(model)
    assert not any("forward" in vars(one) for one in model.modules())


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_report_from_the_config_of_4_bits_has_its_layers(kind):
    """And so a model on ``meta`` can be quantized, too."""
    rows = from_config.report(str(GOLDEN / kind)).swapped
    assert [row.count for row in rows if row.operator == "int4_linear"] == [7]


def test_one_name_of_what_keeps_16_bits():
    model = llama()
    flexops.patch(model, weights=Int4Config(modules_to_not_convert="down_proj"))
    assert len(layers(model)) == 12
    assert not any(name.endswith("down_proj") for name in layers(model))


def test_settings_survive_a_dict():
    made = Int4Config(group_size=32, head=True, modules_to_not_convert=["down_proj"])
    assert Int4Config.from_dict(made.to_dict()).to_dict() == made.to_dict()


def test_a_group_size_without_a_kernel_is_rejected():
    with pytest.raises(PatchError, match="32, 64, 128"):
        Int4Config(group_size=100)


def test_an_architecture_has_no_weights_to_quantize():
    with pytest.raises(PatchError, match="quantization_config="):
        flexops.patch("llama", weights="int4")


def test_an_error_on_the_way_leaves_16_bits(monkeypatch):
    model = llama(tie_word_embeddings=True)
    before, tied = logits(model), dict(model.all_tied_weights_keys)
    from flexops.patching import apply

    monkeypatch.setattr(apply, "_optimizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        flexops.patch(model, weights=Int4Config(head=True))
    assert not layers(model)
    assert model.all_tied_weights_keys == tied
    assert model.config.tie_word_embeddings
    assert torch.equal(logits(model), before)


def test_offloading_is_rejected(tmp_path):
    places = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(PatchError, match="offloaded"):
        AutoModelForCausalLM.from_pretrained(
            GOLDEN / "gptq",
            quantization_config=Int4Config(),
            device_map=places,
            offload_folder=tmp_path,
        )


def test_casting_keeps_the_scales():
    model = load(GOLDEN / "awq")
    flexops.patch(model)
    name = "model.layers.0.self_attn.q_proj"
    scales = layers(model)[name].scales.clone()
    moved = nn.Module.to(model, torch.bfloat16)
    assert torch.equal(layers(moved)[name].scales, scales)
    assert torch.isfinite(logits(moved)).all()


# ---- the guide ----


def test_the_code_of_the_guide_runs(tmp_path):
    """The blocks of its section, in order, on each kind of checkpoint."""
    text = (Path(__file__).parents[2] / "docs/inference.md").read_text()
    section = text.partition("\n## 4-bit weights\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    llama().save_pretrained(tmp_path / "16")
    names: dict[str, Any] = {"flexops": flexops, "folder": tmp_path / "4"}
    names["name"] = tmp_path / "16"
    exec(blocks[0], names)
    assert len(layers(names["model"])) == 14
    names["name"] = GOLDEN / "gptq"
    try:
        exec(blocks[1], names)
    finally:
        register_int4(False)
    assert len(layers(names["model"])) == 7
    names["model"] = llama()
    exec(blocks[2], names)
    assert len(layers(names["model"])) == 14
    exec(blocks[3], names)
    flexops.patch(again := load(names["folder"]))
    assert torch.equal(logits(again), logits(names["model"]))
    exec(blocks[4], names)
    assert len(layers(names["adapted"])) == 14
