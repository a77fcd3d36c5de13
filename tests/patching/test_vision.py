"""Vision towers and vision-language models with pictures, and speech: patched, they compute what
they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import zoo
from test_apply import distance

import flexops

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
VISION = {**SIZES, "image_size": 16, "patch_size": 4}
TEXT = {**SIZES, "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0}
HEAD = {**TEXT, "head_dim": 16}
MROPE = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
IMAGE, START = 90, 91


pytestmark = pytest.mark.usefixtures("one_thread")


def words(*rows: int) -> dict[str, torch.Tensor]:
    """Tokens with so many places for a picture's, in each row."""
    tokens = torch.randint(3, 80, (2, 24), generator=torch.Generator().manual_seed(1))
    tokens[:, 2] = START
    for row, count in enumerate(rows):
        tokens[row, 3 : 3 + count] = IMAGE
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens >= 80, -100)}


def pictures() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def patches() -> dict[str, torch.Tensor]:
    """Two pictures of 4 x 8 and 6 x 4 patches, of 8 and 6 tokens."""
    grid = torch.tensor([[1, 4, 8], [1, 6, 4]])
    pixels = torch.randn(56, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(2))
    inputs = {**words(8, 6), "pixel_values": pixels, "image_grid_thw": grid}
    return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == IMAGE).int()}


def clip() -> Any:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))


def vit() -> Any:
    return transformers.ViTModel(transformers.ViTConfig(**VISION))


def siglip() -> Any:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION))


def dinov2() -> Any:
    config = transformers.Dinov2Config(**{**VISION, "mlp_ratio": 2, "layerscale_value": 0.5})
    return transformers.Dinov2Model(config)


def llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def paligemma() -> Any:
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(
            **VISION, projection_dim=64, vision_use_head=False
        ),
        text_config=transformers.GemmaConfig(**HEAD),
        image_token_index=IMAGE,
        projection_dim=64,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**HEAD, sliding_window=6),
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen(name: str, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    config = kind.config_class(
        text_config={**HEAD, "rope_parameters": MROPE, **text},
        vision_config={**QWEN, **vision},
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=92,
        video_token_id=93,
        tie_word_embeddings=False,
    )
    return kind(config)


def internvl() -> Any:
    vision = {**SIZES, "image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 0.5}
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**vision),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=IMAGE,
        downsample_ratio=0.5,
    )
    return transformers.InternVLForConditionalGeneration(config)


def pixtral() -> Any:
    return transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**VISION))


def qwen2_vl() -> Any:
    return qwen("Qwen2VL", {}, {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2})


def qwen2_5_vl() -> Any:
    vision = {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96}
    return qwen("Qwen2_5_VL", {}, {**vision, "window_size": 16, "fullatt_block_indexes": [1]})


def qwen3_vl() -> Any:
    vision = {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return qwen("Qwen3VL", {}, vision)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=97,
        num_mel_bins=8, max_source_positions=16, decoder_start_token_id=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def speech() -> dict[str, torch.Tensor]:
    sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2))
    return {"input_features": sound, "labels": words()["labels"].clamp(min=3)}


def with_pictures(*rows: int, kinds: bool = False) -> dict[str, torch.Tensor]:
    inputs = {**words(*rows), "pixel_values": pictures()}
    if kinds:
        inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return inputs


MODELS: dict[str, tuple[Any, Any]] = {
    "clip": (clip, lambda: {"pixel_values": pictures()}),
    "vit": (vit, lambda: {"pixel_values": pictures()}),
    "siglip": (siglip, lambda: {"pixel_values": pictures()}),
    "dinov2": (dinov2, lambda: {"pixel_values": pictures()}),
    "llava": (llava, lambda: with_pictures(16, 16)),
    "paligemma": (paligemma, lambda: with_pictures(16, 16, kinds=True)),
    "internvl": (internvl, lambda: with_pictures(4, 4)),
    "pixtral": (pixtral, lambda: {"pixel_values": pictures()}),
    "gemma3": (gemma3, lambda: with_pictures(4, 4, kinds=True)),
    "qwen2_vl": (qwen2_vl, patches),
    "qwen2_5_vl": (qwen2_5_vl, patches),
    "qwen3_vl": (qwen3_vl, patches),
    "whisper": (whisper, speech),
}


def results(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> dict[str, Any]:
    model.zero_grad()
    output = model(**inputs, **options)
    hidden = output.get("logits") if "labels" in inputs else output.last_hidden_state
    loss = output.loss if "labels" in inputs else hidden.square().mean()
    loss.backward()
    named = model.named_parameters()
    found = {name: one.grad for name, one in named if one.grad is not None}
    found["loss"] = loss.detach()
    return found if hidden is None else {**found, "logits": hidden.detach()}


@pytest.mark.parametrize("name", MODELS)
def test_with_pictures_it_computes_the_same(name):
    make, inputs = MODELS[name][0], MODELS[name][1]()
    torch.manual_seed(0)
    model = zoo.shaken(make())
    expected = results(model, inputs)
    report = flexops.patch(model)
    fused = any(row.operator == "linear_cross_entropy" for row in report.swapped)
    assert fused == ("labels" in inputs)
    actual = results(model, inputs, **({"skip_logits": False} if fused else {}))
    far = distance(actual, expected)
    assert max(far.values()) < 5e-5, max(far, key=far.get)  # type: ignore[arg-type]
    if fused:
        actual = results(model, inputs)
        assert "logits" not in actual
        del expected["logits"]
        far = distance(actual, expected)
        assert max(far.values()) < 5e-5, max(far, key=far.get)  # type: ignore[arg-type]
    parts = {row.operator.split()[0] for row in report.swapped}
    assert "bias_gelu" in parts or name not in ("clip", "llava", "qwen2_vl", "siglip", "vit")
    assert {"layer_norm", "attention"} <= parts or {"rms_norm", "attention"} <= parts


def test_other_models_may_be_made_of_a_patched_ones_config(monkeypatch):
    """transformers looks for a package that has an attention whose name says "flash"."""
    flash = transformers.modeling_flash_attention_utils
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    torch.manual_seed(0)
    model = zoo.shaken(MODELS["qwen2_vl"][0]())
    inputs = patches()
    expected = results(model, inputs)
    flexops.patch(model)
    tower = model.model.visual
    assert tower.config._attn_implementation == "flexops_flash"
    other = type(model)(model.config)
    assert other.model.visual.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert tower.config._attn_implementation == tower.blocks[0].attn.config._attn_implementation
    assert tower.config._attn_implementation == "eager"
    far = distance(results(model, inputs, skip_logits=False), expected)
    assert max(far.values()) < 5e-5, max(far, key=far.get)
    flexops.unpatch(model)
    assert tower.blocks[0].attn.config is tower.config is model.config.vision_config


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_packed_pictures_are_one_call_of_attention(name, monkeypatch):
    """As on a GPU: a tower's layer attends to all pictures, or windows, at once, and in float64
    to one after the other."""
    monkeypatch.setattr("flexops.patching.attention._has_kernels", lambda _: True)
    calls = []
    of_packed = flexops.patching.attention._ops.attention
    monkeypatch.setattr(
        "flexops.patching.attention._ops.attention",
        lambda *args, **named: calls.append(named) or of_packed(*args, **named),
    )
    torch.manual_seed(0)
    model = zoo.shaken(MODELS[name][0]())
    inputs = patches()
    expected = results(model, inputs)
    flexops.patch(model)
    far = distance(results(model, inputs, skip_logits=False), expected)
    assert max(far.values()) < 5e-5, max(far, key=far.get)
    packed = [one["cu_seqlens_q"] for one in calls if one.get("cu_seqlens_q") is not None]
    assert len(packed) == 2  # one for each layer of the tower
    flexops.unpatch(model)
    assert all(after.equal(expected[key]) for key, after in results(model, inputs).items())
    inputs["pixel_values"] = inputs["pixel_values"].double()
    expected = results(model.double(), inputs)
    flexops.patch(model)
    far = distance(results(model, inputs, skip_logits=False), expected)
    assert len(calls) == 2
    assert max(far.values()) < 1e-9, max(far, key=far.get)
