"""What ``flexops.patch`` replaces in each text and vision-language type of transformers:
``python tests/patching/zoo.py`` writes the table of docs/models.md, ``--why TYPE`` reports on one."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

import flexops

_GROUPED = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(_GROUPED, 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("vocab_size", "n_positions"), 97),
    "head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "sliding_window": 6,
}
"""What is set of a config, where it has it."""
LIGER = frozenset(
    (
        "deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma", "gemma2", "gemma3_text", "gemma3",
        "gemma4_text", "gemma4", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "internvl", "llama",
        "llama4_text", "llama4", "llava", "granite", "mllama", "mllama_text_model", "ministral",
        "mistral", "mixtral", "muse_glimmer", "nemotron", "olmo2", "pixtral", "olmo3", "qwen2",
        "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text",
        "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl",
        "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "smollm3", "phi3", "paligemma",
        "falcon_h1", "smolvlm", "hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4"
    )
)  # fmt: skip
"""The types of Liger's table."""
_AUTO = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
VISION = frozenset(("clip", "dinov2", "siglip", "siglip2", "vit"))
"""Towers of vision without a language model; test_vision.py runs them."""
TYPES = sorted({*LIGER, *VISION, *(name for mapping in _AUTO for name in mapping)})
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PARTS = ("norms", "residuals", "activations", "experts", "rope", "attention", "loss")
_OPERATORS = {
    "norms": r"\b(gated_)?(rms|layer)_norm",
    "rope": "rotary",
    "activations": "glu_linear|bias_",
    "attention": "^attention",
    "loss": "cross_entropy",
    "residuals": "^add_",
    "experts": "experts|grouped_linear",
}


MROPE = re.compile(
    "qwen2_vl|qwen2_5_vl|qwen2_5_omni|paddleocr_vl|glm4v|glm46v|glm_ocr|glmga|ernie4_5_vl"
)
_START = {"decoder_start_token_id": 0}
_BLIP = {"num_query_tokens": 2, "image_token_index": 95, "image_token_id": 95}
_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPARSE = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "output_gate_type": "sigmoid", "pad_token_id": 0,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "t5": _START,
    "longt5": _START,
    "switch_transformers": _START,
    "udop": _START,
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "falcon_h1": _MAMBA,
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "marian": _START,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "esmc": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4, "num_dense_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "esm": {"vocab_size": 97, "mask_token_id": 1, "pad_token_id": 0},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "chameleon": {"vocabulary_map": {"<image>": 95}},
    "emu3": {"vocabulary_map": {"<image>": 95}},
    "qwen4_exp_text": _SPARSE,
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense"] + ["sparse"] * 7,
        "num_experts_per_tok": 2,
    },
    "hunyuan_vl_text": {
        "head_dim": 16,
        "rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]},
    },
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
    "xmod": {"default_language": "en_XX"},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 91},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 91},
}
"""What a type's config requires besides."""
TINY: dict[str, dict[str, Any]] = {
    "marian": {"decoder_vocab_size": 97},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1], **_MAMBA2},
    "granitemoehybrid": {**_HYBRID, **_MAMBA2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": {**_HYBRID, "kv_lora_rank": 16, "linear_num_heads": 4, "linear_head_dim": 16},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
    },
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 8,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "chunk_size": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "mobilebert": {
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
        "true_hidden_size": 32,
    },
    "squeezebert": {"embedding_size": 64},
    "reformer": {
        "axial_pos_embds_dim": (16, 48),
        "axial_pos_shape": (4, 3),
        "attn_layers": ("local",) * 2,
        "local_attn_chunk_length": 4,
        "attention_head_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": [96, 96],
        "activation_sparsity_pattern": [0.9, 0.0],
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "qwen_sparse_attention"],
        "hc_lowrank": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "pad_token_id": 0,
    },
    "perceiver": {
        "max_position_embeddings": 12,
        "d_latents": 64,
        "num_latents": 8,
        "num_self_attends_per_block": 2,
    },
    "cosmos3_edge_text": {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [2, 2, 4]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "step3p5": {"sliding_window": 6, "share_expert_dim": 32},
    "glm5_next_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16},
    "luke": {"entity_vocab_size": 97, "entity_emb_size": 64},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "janus_vqgan": {"num_embeddings": 97, "image_token_embed_dim": 64, "base_channels": 32},
    "glm5_next_vision": {"projection_intermediate_size": 96},
    "muse_glimmer": {"projector_hidden_size": 64},
    "roc_bert": {"shape_vocab_size": 97, "pronunciation_vocab_size": 97},
    "blip_text_model": {"bos_token_id": 1, "sep_token_id": 2},
    "emu3_vqgan": {"base_channels": 32, "hidden_size": 32},
    "blip-2": _BLIP,
    "instructblip": _BLIP,
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 4]}},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 64, "d_kv": 16},
    "pix2struct_text_model": {"d_kv": 16, **_START},
    "kosmos-2": {"latent_query_num": 2},
    "kosmos_2_text_model": {"layers": 2, "attention_heads": 4},
    **{
        name: {"image_size": 28, "patch_size": 14}
        for name in (
            "vit", "dinov2", "pixtral", "idefics_vision", "blip_vision_model", "git_vision_model",
            "blip_2_vision_model", "instructblip_vision_model", "kosmos_2_vision_model",
        )
    },
}  # fmt: skip
"""What a small model's config requires besides."""
_REASONS = {
    "test_vision.py runs it": ("clip", "siglip", "siglip2"),
    "it requires more than pictures": (
        "instructblipvideo", "pi0", "pp_formulanet", "voxtral_realtime",
    ),
    "it requires another package": ("fast_vlm", "gemma3n", "perception_lm"),
    "it is no model of its own": (
        "encoder-decoder", "gemma4_assistant", "gemma4_unified_assistant", "musicgen",
        "musicgen_melody", "vision-encoder-decoder",
    ),
    "its config's defaults make no model, or no small one": (
        "blt", "diffusion_gemma", "granite4_vision",
    ),
    "its code cannot be trained": ("xlstm",),
}  # fmt: skip
_OF = {
    "granite4_vision": {"text_config": {"model_type": "granite"}},
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    **{name: {"pad_token_id": 0} for name in ("idefics3", "smolvlm")},
}
"""What a config, which makes others of it, is made with."""
UNTESTED = {name: reason for reason, names in _REASONS.items() for name in names}
"""Types whose models the tests do not run, with the reason."""


def tiny_config(cls: Any, name: str) -> Any:
    """A config made with small numbers where it has any."""
    default = cls(**_OF.get(cls.model_type, {}))
    own = vars(default) | {key: getattr(default, key, None) for key in default.attribute_map}
    given = {key: value for key, value in SMALL.items() if isinstance(own.get(key), int)}
    parts = {key: one for key, one in own.items() if isinstance(one, transformers.PreTrainedConfig)}
    given |= {key: tiny_config(type(one), name) for key, one in parts.items()}
    kinds = own.get("layer_types")
    if kinds and "layer_types" not in default.attribute_map:
        given["layer_types"] = [kinds[0], kinds[-1]]
    if "qk_rope_head_dim" in own:
        given |= dict.fromkeys(given.keys() & _GROUPED, given.get("num_attention_heads"))
        given.pop("head_dim", None)
    if MROPE.match(name) and "rope_parameters" in own:
        few = [1, 1, 2] if "moe" in name else [2, 3, 3]
        given["rope_parameters"] = {**default.rope_parameters, "mrope_section": few}
    for changes in (CHANGES, TINY):
        given |= changes.get(cls.model_type or cls.__name__, {})
    return cls(**given)


def large_config(name: str) -> Any:
    """A config of the type's own sizes, with few layers."""

    def shorten(config: Any) -> Any:
        for value in list(vars(config).values()):
            if isinstance(value, transformers.PreTrainedConfig):
                shorten(value)
        for key in SMALL:
            many = vars(config).get(key)
            if re.search("layer|depth", key) and isinstance(many, int):
                kinds = vars(config).get("layer_types")
                setattr(config, key, min(many, 8))
                if kinds and len(kinds) > 8:
                    config.layer_types = kinds[:8]
        return config

    config = shorten(transformers.CONFIG_MAPPING[name](**_OF.get(name, {})))
    for part in configs(config):
        for key, value in CHANGES.get(part.model_type or type(part).__name__, {}).items():
            if key in _GROUPED and getattr(part, key, None) is not None:
                continue  # for the tiny model's heads
            setattr(part, key, value)
    return config


def class_of(config: Any) -> Any:
    if config.model_type == "mllama_text_model":
        return transformers.MllamaForCausalLM
    for mapping in _AUTO:
        kind = mapping.get(config.model_type)
        if kind:
            return getattr(transformers, kind if isinstance(kind, str) else kind[0])
    return transformers.AutoModel._model_mapping[type(config)]


def tiny(name: str, seed: int = 0) -> Any:
    """A small random model of a type."""
    torch.manual_seed(seed)
    config = tiny_config(transformers.CONFIG_MAPPING[name], name)
    return shaken(class_of(config)(config))


def shaken(model: Any) -> Any:
    """With other weights than those of its initialization, without dropout, in training mode."""
    with torch.no_grad():
        for key, value in model.named_parameters():
            if not torch.isfinite(value).all() or value.abs().max() > 100:
                value.normal_(0, 0.1)  # not initialized
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.2)
            elif "embed" not in key:
                value.mul_(1.5)  # so that layers do something
    for part in [*model.modules(), *configs(model.config)]:
        for key, value in list(vars(part).items()):
            if re.search("drop|^p$", key) and isinstance(value, float):
                setattr(part, key, 0.0)
    return model.train()


def configs(config: Any) -> list[Any]:
    """A config with those inside of it."""
    parts = [x for x in vars(config).values() if isinstance(x, transformers.PreTrainedConfig)]
    return [config, *(one for part in parts for one in configs(part))]


def batch(model: Any, padded: bool) -> dict[str, torch.Tensor]:
    """Tokens with labels, some of them -100; one row may be padded on the left."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 90, (3, 12), generator=generator)
    labels = tokens.clone()
    labels[0, 3:5] = -100
    inputs = {"input_ids": tokens, "labels": labels}
    if padded:
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][1, :4] = 0
        labels[1, :5] = -100
    if "labels" not in inspect.signature(type(model).forward).parameters:
        del inputs["labels"]
    return PICTURES.get(model.config.model_type, lambda _, given: given)(model.config, inputs)


def _picture(config: Any, *shape: int) -> torch.Tensor:
    size = getattr(config, "vision_config", config).image_size
    return torch.randn(3, *shape, 3, size, size, generator=torch.Generator().manual_seed(2))


def _with_queries(config: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs["input_ids"][:, 5 : 5 + config.num_query_tokens] = config.image_token_id
    return inputs | {"pixel_values": _picture(config)}


def _with_instructions(config: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    asked = inputs["input_ids"][:, :4].clone()
    return _with_queries(config, inputs) | {"qformer_input_ids": asked}


PICTURES: dict[str, Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    **dict.fromkeys(
        ("vit", "dinov2", "pixtral"), lambda config, _: {"pixel_values": _picture(config)}
    ),
    "pix2struct": lambda _, given: {
        "flattened_patches": torch.rand(3, 8, 66, generator=torch.Generator().manual_seed(2)),
        "labels": given["labels"],
    },
    **dict.fromkeys(
        ("blip", "git"), lambda config, given: given | {"pixel_values": _picture(config)}
    ),
    "blip-2": _with_queries,
    "instructblip": _with_instructions,
    "idefics": lambda config, given: (
        given
        | {
            "pixel_values": _picture(config, 1),
            "image_attention_mask": torch.ones(3, 12, 1, dtype=torch.long),
        }
    ),
    "udop": lambda _, given: given | {"bbox": torch.arange(4).div(4).expand(3, 12, 4)},
    "kosmos-2": lambda config, given: (
        given
        | {
            "pixel_values": _picture(config),
            "image_embeds_position_mask": (torch.arange(12) // 2 == 2).long().expand(3, 12),
        }
    ),
}
"""What a type whose models require pictures is called with."""


def on_meta(name: str) -> Any:
    """The model of the type's own sizes, with few layers."""
    config = large_config(name)
    with torch.device("meta"):
        return class_of(config)(config)


def table() -> str:
    """A row for each combination of parts, those of most types first."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in TYPES:
        try:
            report = flexops.patch(on_meta(name))
        except Exception as error:
            print(name, type(error).__name__, str(error)[:90].replace("\n", " "), file=sys.stderr)
            continue
        cells = tuple(cell(report, part) for part in PARTS)
        found.setdefault(cells, []).append(f"{name} *" if name in LIGER else name)
    return rows(found)


def rows(found: dict[tuple[str, ...], list[str]]) -> str:
    lines = [f"| {' | '.join(PARTS)} | types |", "|" + " --- |" * (len(PARTS) + 1)]
    for cells, names in sorted(found.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {' | '.join(cells)} | {', '.join(names)} |")
    return "\n".join(lines)


def cell(report: Any, part: str) -> str:
    """How much of a part is replaced; "-" where there is none of it, or nothing to gain: a pooler
    reads one token of each sequence."""
    rows = [
        row
        for row in report.rows
        if (
            re.search(_OPERATORS[part], row.operator)
            or (part == "experts" and row.module.endswith("Experts"))
        )
        and not re.search("no norm reads|nothing to fuse", row.reason)
        and not row.module.endswith("Pooler")
    ]
    swapped = [row.swapped for row in rows]
    return "-" if not rows else "all" if all(swapped) else "some" if any(swapped) else "none"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if sys.argv[1:2] == ["--why"]:
        for kind in sys.argv[2:]:
            print(flexops.patch(on_meta(kind)))
    else:
        before, mark, _ = PAGE.read_text().partition("<!-- table -->\n")
        PAGE.write_text(f"{before}{mark}\n{table()}\n")
