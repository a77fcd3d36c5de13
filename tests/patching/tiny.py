"""Tiny random models of every architecture that ``flexops.patch`` names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WORDS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2}
WINDOW = {"sliding_window": 6}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED | WINDOW),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 16}),
    "gemma2": ("Gemma2", GROUPED | WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3",
        GROUPED
        | WINDOW
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", GROUPED),
    "gpt_neox": ("GPTNeoX", {}),
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
HALF_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
SINKS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": (
        "DeepseekV4",
        WINDOW
        | {"head_dim": 16, "q_lora_rank": 16, "moe_intermediate_size": 32, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "num_hidden_layers": 3},
    ),
    "gpt_oss": ("GptOss", GROUPED | WINDOW | MOE | HALF_WINDOWED | {"head_dim": 16}),
    "granite_swa": ("GraniteSWA", GROUPED | WINDOW | HALF_WINDOWED),
    "granitemoe_swa": ("GraniteMoeSWA", GROUPED | WINDOW | MOE | HALF_WINDOWED),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        GROUPED
        | WINDOW
        | HALF_WINDOWED
        | {"head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
}
"""Models with attention sinks."""
CHUNK = 5
CHUNKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": (
        "Llama4",
        GROUPED
        | MOE
        | {"head_dim": 16, "attention_chunk_size": CHUNK, "intermediate_size_mlp": 96}
        | {"layer_types": ["chunked_attention", "full_attention"], "num_experts_per_tok": 1},
    ),
}
"""Models with attention in chunks."""
OTHERS = ("bert", "vit")
ALL = (*CAUSAL, *OTHERS)
_TEXT = CAUSAL | SINKS | CHUNKS
LENGTH, PICTURE = 12, 16


def config(name: str, **changes: Any) -> Any:
    if name == "bert":
        return transformers.BertConfig(**SIZES, **WORDS, **changes)
    if name == "vit":
        return transformers.ViTConfig(
            **SIZES, image_size=PICTURE, patch_size=4, num_labels=7, **changes
        )
    prefix, more = _TEXT[name]
    kind = f"{prefix}TextConfig" if name in ("gemma3", "llama4") else f"{prefix}Config"
    return getattr(transformers, kind)(**{**SIZES, **WORDS, **more, **changes})


def model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """In training mode, with norms that are not all ones, and no dropout."""
    classes = {"bert": "BertForMaskedLM", "vit": "ViTForImageClassification"}
    torch.manual_seed(0)
    kind = classes.get(name) or f"{_TEXT[name][0]}ForCausalLM"
    made = getattr(transformers, kind)(config(name, **changes))
    with torch.no_grad():
        for key, value in made.named_parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.2)
            elif "embed" not in key:
                value.mul_(4)  # so that layers do something
    for part in made.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    return made.to(dtype).train()


@contextlib.contextmanager
def eagerly(model: Any) -> Iterator[None]:
    """Where transformers chose torch's attention, its eager one, which has Gemma's soft cap."""
    config, chosen = model.config, model.config._attn_implementation
    config._attn_implementation_internal = "eager" if chosen == "sdpa" else chosen
    yield
    config._attn_implementation_internal = chosen


@functools.lru_cache
def _batch(name: str, padding: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {
            "pixel_values": torch.randn(3, 3, PICTURE, PICTURE, generator=generator),
            "labels": torch.tensor([1, 5, 2]),
        }
    tokens = torch.randint(3, WORDS["vocab_size"], (3, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, 3:5] = -100
    inputs = {"input_ids": tokens, "labels": labels}
    if padding:
        mask = torch.ones_like(tokens)
        mask[1, (slice(None, 4) if padding == "left" else slice(-4, None))] = 0
        labels[mask == 0] = -100
        if padding == "left":
            # its logits are those of padding, of which attention functions make what they like
            labels[1, 4] = -100
        inputs["attention_mask"] = mask
    return inputs


def batch(
    name: str, dtype: torch.dtype = torch.float32, padding: str = ""
) -> dict[str, torch.Tensor]:
    """A batch with labels, some of them -100."""
    return {
        key: value.to(dtype) if value.is_floating_point() else value.clone()
        for key, value in _batch(name, padding).items()
    }
