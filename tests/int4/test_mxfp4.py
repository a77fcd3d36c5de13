"""MXFP4 checkpoints of gpt-oss: their values, logits, errors, and what is saved, against
transformers' own dequantization."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoints import load, logits, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

import flexops
from flexops.errors import PatchError
from flexops.nn import Int4Experts
from flexops.ops.few_experts import unpack_mxfp4
from flexops.ops.int4_grouped import int4_grouped_linear
from flexops.patching import register_int4

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

EXPERTS, HIDDEN, INNER = 4, 96, 64
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
FIRST = "model.layers.0.mlp.experts"


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of ``[..., K]``, by section 6.3 of the OCP specification: nearest."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().nan_to_num_(neginf=-127).sub_(2)
    exponents = exponents.clamp_(-127, 127)
    numbers = groups / exponents.exp2().unsqueeze(-1)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (numbers.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (numbers < 0)
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    write(folder)
    return folder


def write(folder: Path) -> None:
    """A model of random weights; the smallest exponents are among its scales."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=61, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts_per_tok=2,
        num_local_experts=EXPERTS, pad_token_id=0, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for key, parameter in model.named_parameters():
        if not key.endswith("norm.weight"):
            nn.init.normal_(parameter, std=0.3)
    state = model.state_dict()
    for key in list(state):
        if key.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = quantized(state.pop(key).transpose(1, 2))
            scales[0, 0, 0], scales[0, 1, 0] = 0, 1  # 2^-127 and 2^-126
            state |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    save(folder, {key: one.contiguous() for key, one in state.items()})


def of_experts(model: nn.Module) -> dict[str, Int4Experts]:
    return {name: one for name, one in model.named_modules() if isinstance(one, Int4Experts)}


def theirs(folder: Path, dtype: torch.dtype) -> Any:
    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
    # its experts have bfloat16 whatever dtype is
    return nn.Module.float(model) if dtype == torch.float32 else model


def ours(folder: Path, dtype: torch.dtype) -> Any:
    config = flexops.patching.Int4Config()
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    save(folder, tensors)
    return folder


# ---- reading ----


def test_values_are_those_of_transformers(checkpoint):
    model, tensors = load(checkpoint), load_file(checkpoint / "model.safetensors")
    assert len(of_experts(model)) == 2
    for path, one in of_experts(model).items():
        assert one.mxfp4
        assert one.gate.activation == "clamped"  # few tokens read the packed weights
        assert one.gate_up_scales.dtype == torch.bfloat16
        for name, weight in (("gate_up_proj", one.gate_up), ("down_proj", one.down)):
            given = (tensors[f"{path}.{name}_{part}"] for part in ("blocks", "scales"))
            wanted = mxfp4._convert_moe_packed_tensors(*given).transpose(1, 2)
            found = unpack_mxfp4(weight, torch.bfloat16).view_as(wanted)
            assert torch.equal(found, wanted)
            assert torch.equal(one.get_parameter(f"{name}_bias"), tensors[f"{path}.{name}_bias"])


def test_every_exponent_has_the_value_of_transformers():
    from flexops.int4.mxfp4 import _packed, _unpacked

    blocks = torch.arange(256).to(torch.uint8).view(16, 1, 16).repeat(1, 255, 1)
    scales = torch.arange(255).to(torch.uint8).expand(16, -1).contiguous()
    packed = _packed(blocks, scales)
    wanted = mxfp4._convert_moe_packed_tensors(blocks[None], scales[None])[0].t()
    assert torch.equal(unpack_mxfp4(packed, torch.bfloat16), wanted)
    for one, other in zip(_unpacked(packed), (blocks, scales), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_tokens_are_those_of_transformers(dtype, patched, checkpoint):
    plain, model = theirs(checkpoint, dtype), ours(checkpoint, dtype)
    exact = logits(theirs(checkpoint, torch.float32))
    if patched:
        report = flexops.patch(model)
        assert [row.operator for row in report.swapped if row.module == "Int4Experts"] == [
            "int4_grouped_linear"
        ]
        assert not report.not_swapped, report
    rounded = (logits(plain) - exact).abs().max()
    assert (logits(model) - exact).abs().max() <= 2 * rounded + 1e-4 * exact.abs().max()
    if dtype == torch.float32:
        ids = torch.arange(10).view(2, 5) * 7 % 58 + 3
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_arguments_do_not_matter_and_registration_needs_none(checkpoint):
    expected = logits(load(checkpoint))
    assert torch.equal(
        logits(load(checkpoint, group_size=128, modules_to_not_convert="experts", head=True)),
        expected,
    )
    register_int4()
    try:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    finally:
        register_int4(False)
    assert len(of_experts(model)) == 2
    assert torch.equal(logits(model), expected)


def test_no_16_bit_weight_is_made(checkpoint):
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, Tensor) and not made.is_meta and made.is_floating_point():
                largest = max(largest, made.numel())
            return made

    with Watch():
        load(checkpoint)
    assert 0 < largest < EXPERTS * HIDDEN * INNER


def test_experts_of_16_bits_beside_those_of_4(checkpoint, tmp_path):
    dense = theirs(checkpoint, torch.bfloat16).state_dict()

    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("gate_up_proj", "down_proj"):
            for part in ("blocks", "scales"):
                tensors.pop(f"{FIRST}.{name}_{part}")
            tensors[f"{FIRST}.{name}"] = dense[f"{FIRST}.{name}"].contiguous()

    model = load(changed(checkpoint, tmp_path, change))
    assert list(of_experts(model)) == ["model.layers.1.mlp.experts"]
    assert torch.equal(model.get_submodule(FIRST).down_proj, dense[f"{FIRST}.down_proj"])


def _put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def _nan(scales: Tensor) -> Tensor:
    scales[1, 2, 0] = 255
    return scales


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            lambda tensors: tensors.pop(f"{FIRST}.down_proj_scales"),
            (f"{FIRST}.down_proj_scales is missing", "shape [4, 96, 2], torch.uint8"),
        ),
        (
            lambda tensors: tensors.pop(f"{FIRST}.gate_up_proj_bias"),
            (f"{FIRST}.gate_up_proj_bias is missing", "shape [4, 128], torch.bfloat16 or"),
        ),
        (
            _put(f"{FIRST}.gate_up_proj_blocks", lambda one: one[:, :-2]),
            (f"{FIRST}.gate_up_proj_blocks does not fit", "[4, 126, 3, 16]", "[4, 128, 3, 16]"),
        ),
        (
            _put(f"{FIRST}.down_proj_bias", lambda one: one[:-1]),
            (f"{FIRST}.down_proj_bias does not fit", "shape [3, 96]", "shape [4, 96]"),
        ),
        (
            _put(f"{FIRST}.down_proj_scales", lambda one: one.to(torch.bfloat16)),
            (f"{FIRST}.down_proj_scales does not fit", "torch.bfloat16", "torch.uint8"),
        ),
        (
            lambda tensors: tensors.update({"model.layers.7.mlp.experts.down_proj_blocks":
                                            tensors[f"{FIRST}.down_proj_blocks"].clone()}),
            ("cannot place model.layers.7.mlp.experts.down_proj_blocks",),
        ),
        (
            lambda tensors: [tensors.pop(key) for key in list(tensors)
                             if key.endswith(("blocks", "scales"))],
            ("has no layer in MXFP4", "*_blocks"),
        ),
        (
            _put(f"{FIRST}.down_proj_scales", _nan),
            (f"{FIRST}.down_proj_scales has numbers that are not finite", "1 of 768 are 255"),
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_rejected(change, messages, checkpoint, tmp_path):
    with pytest.raises(PatchError) as caught:
        load(changed(checkpoint, tmp_path, change))
    for message in (*messages, "fix:"):
        assert message in str(caught.value)


def test_errors_about_other_formats_name_this_one(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, lambda _: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "hqq"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(PatchError, match="MXFP4"):
        load(folder)


# ---- saving ----


def assert_same_files(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype, key
        assert torch.equal(tensor.view(torch.uint8), second[key].view(torch.uint8)), key


@pytest.mark.parametrize("patched", [False, True])
def test_it_is_saved_as_it_was_read(patched, checkpoint, tmp_path):
    model = load(checkpoint)
    if patched:
        flexops.patch(model)
    model.save_pretrained(tmp_path)
    assert_same_files(checkpoint, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(theirs(tmp_path, dtype)), logits(theirs(checkpoint, dtype)))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    for folder in (tmp_path, tmp_path / "sharded"):
        assert torch.equal(logits(load(folder)), logits(load(checkpoint)))


def test_layers_of_4_bits_beside_the_experts_compute_but_are_not_saved(checkpoint, tmp_path):
    model = load(checkpoint)
    before = logits(model)
    report = flexops.patch(model, weights=flexops.patching.Int4Config(group_size=32))
    assert any(row.module == "Linear" and row.operator == "int4_linear" for row in report.swapped)
    assert all(one.mxfp4 for one in of_experts(model).values())
    error = (logits(model) - before).norm() / before.norm()
    assert 0 < error < 1
    with pytest.raises(PatchError, match=r"8 other layers(.|\n)*q_proj(.|\n)*fix:.*before flexops"):
        model.save_pretrained(tmp_path)


# ---- in memory ----


def test_unpatching_and_copies(checkpoint):
    model = load(checkpoint)
    before = logits(model)
    flexops.patch(model)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    flexops.unpatch(model)
    assert torch.equal(logits(model), before)
    one = of_experts(model)[FIRST]
    given = torch.randn(3, HIDDEN), torch.tensor([[0, 3], [1, 2], [3, 1]]), torch.rand(3, 2)
    one = one.float()
    expected = one(*given)
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert other.mxfp4
        assert torch.equal(other(*given), expected)
    assert one.to(torch.float16).gate_up_scales.dtype == torch.bfloat16
    assert repr(one).endswith("group_size=32, symmetric=True, mxfp4=True)")
    fresh = of_experts(load(checkpoint))["model.layers.1.mlp.experts"].float()
    fresh.load_state_dict(one.float().state_dict())
    assert torch.equal(fresh(*given), one(*given))
    whole = Int4Experts(one.gate_up, one.down, EXPERTS, gate=one.gate)  # of the same shapes
    biases = {name: bias for name, bias in one.state_dict().items() if name.endswith("bias")}
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*down_mxfp4.*Unexpected.*down_packed"):
        one.load_state_dict({**whole.state_dict(), **biases})


def test_gradients(checkpoint):
    one = of_experts(ours(checkpoint, torch.float32))[FIRST]
    plain = theirs(checkpoint, torch.float32).get_submodule(FIRST)
    torch.manual_seed(0)
    x, choices = torch.randn(5, HIDDEN), torch.randint(EXPERTS, (5, 2))
    weights, results = torch.rand(5, 2), []
    for module in (one, plain):
        rows = x.clone().requires_grad_()
        out = module(rows, choices, weights)
        results.append((out, *torch.autograd.grad(out.square().sum(), rows)))
    for found, wanted in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_few_tokens_read_the_packed_weights(checkpoint, monkeypatch):
    """As on a GPU; here the operator is its reference."""
    from flexops.nn import experts

    one = of_experts(load(checkpoint))[FIRST]
    torch.manual_seed(0)
    given = torch.randn(5, HIDDEN).bfloat16(), torch.randint(EXPERTS, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        many = one(*given)
        monkeypatch.setattr(experts, "fits_int4", lambda *_: True)
        monkeypatch.setattr(experts, "int4_grouped_linear", None)
        few = one(*given)
    assert (few - many).abs().max() <= 2e-2 * many.abs().max()


def test_weights_that_cannot_be_mxfp4_are_rejected():
    made = flexops.quantize_int4(torch.randn(EXPERTS * 32, 64), 64)
    with pytest.raises(ValueError, match=r"Int4Experts: gate_up: MXFP4 has groups of 32"):
        Int4Experts(made, made, EXPERTS, mxfp4=True)
    with pytest.raises(ValueError, match="MXFP4 has groups of 32"):
        int4_grouped_linear(
            torch.randn(3, 64), made, torch.full([EXPERTS], 3, dtype=torch.int32), mxfp4=True
        )


def test_experts_of_transformers_kernel_are_left_alone_with_a_reason(checkpoint):
    """As transformers makes them where its kernels are installed."""
    model = theirs(checkpoint, torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.experts = mxfp4.Mxfp4GptOssExperts(model.config)
        layer.mlp.forward = mxfp4.mlp_forward.__get__(layer.mlp)
    report = flexops.patch(model)
    [row] = [row for row in report.not_swapped if row.module == "Mxfp4GptOssExperts"]
    assert row.count == 2
    assert "load it with Int4Config" in row.reason
    for layer in model.model.layers:  # it may add the residual, too
        forward = layer.mlp.forward
        assert getattr(forward, "keywords", {}).get("inner", forward).__func__ is mxfp4.mlp_forward
    assert not of_experts(model)


def test_a_report_from_the_config_has_the_experts(checkpoint):
    from flexops.patching import from_config

    report = from_config.report(str(checkpoint / "config.json"))
    swapped = [row.module for row in report.swapped if row.operator.startswith("int4")]
    assert swapped == ["GptOssExperts"]
