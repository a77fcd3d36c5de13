"""Small models that read pictures, and prompts with pictures."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
import zoo
from torch import Tensor

PROMPT, BEFORE = 9, 3
"""Words of a prompt, and how many of them are before the picture."""
TYPES = (
    "gemma3", "glm4v", "idefics3", "internvl", "llava", "mistral3", "paligemma", "qwen2_5_vl",
    "qwen2_vl", "qwen3_vl", "smolvlm",
)  # fmt: skip
SHIFTED = ("glm4v", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
"""Those whose words' positions are not their places, behind a picture."""
IMAGE, ROW = 80, 84
"""The token that a picture takes the places of, and the first of the others that configs name."""
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 64},
    "idefics3": {"image_size": 128},
    "smolvlm": {"image_size": 128},
    "internvl": {"image_size": [56, 56]},
    "mistral3": {"image_size": 56},
    "paligemma": {"image_size": 32, "projection_dim": 64},
    **{name: {"out_hidden_size": 64} for name in ("glm4v", "qwen2_5_vl", "qwen3_vl")},
}
"""Small pictures, and as wide as the words."""


def small(name: str) -> Any:
    config = zoo.tiny_config(transformers.CONFIG_MAPPING[name], name)
    config.mm_tokens_per_image = 4
    tokens = [key for key in dir(config) if re.fullmatch(r"[a-z_]+_token_(id|index)", key)]
    for place, key in enumerate(sorted(key for key in tokens if key[:3] not in ("bos", "eos"))):
        if "pad" not in key:
            setattr(config, key, IMAGE if key.startswith("image_token") else ROW + place)
    for key, value in VISION.get(name, {}).items():
        setattr(config.vision_config, key, value)
    torch.manual_seed(0)
    return zoo.shaken(zoo.class_of(config)(config)).eval()


def picture(model: Any) -> dict[str, Tensor]:
    """What a model's vision reads, of two pictures."""
    vision, made = model.config.vision_config, torch.Generator().manual_seed(2)
    patch = getattr(vision, "patch_size", 0)
    if hasattr(vision, "spatial_merge_size") and hasattr(vision, "temporal_patch_size"):
        grid = torch.tensor([[1, 4, 6], [1, 4, 4]])
        columns = 3 * vision.temporal_patch_size * patch**2
        rows = int(grid.prod(-1).sum())
        pixels = torch.randn(rows, columns, generator=made)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    size = vision.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (2, 3, height, width)
    if type(model).__name__.startswith(("Idefics3", "SmolVLM")):
        shape = (2, 1, *shape[1:])
    given = {"pixel_values": torch.randn(shape, generator=made)}
    if type(model).__name__.startswith("Mistral3"):
        given["image_sizes"] = torch.tensor([[height, width]] * 2)
    return given


def inputs(model: Any) -> dict[str, Tensor]:
    """Two prompts of words, a picture and words; the shorter one is padded at the left."""
    given = picture(model)
    with torch.no_grad():
        found = model.get_image_features(**given, return_dict=True).pooler_output
    parts = list(found) if len(found) == 2 else found.flatten(0, -2).chunk(2)
    counts = [part.flatten(0, -2).shape[0] for part in parts]
    length = PROMPT + max(counts)
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in enumerate(counts):
        start = max(counts) - count
        mask[row, :start] = 0
        ids[row, start + BEFORE : start + BEFORE + count] = IMAGE
    kinds = ((ids == IMAGE) & (mask == 1)).long()
    if type(model).__name__.startswith("Gemma3"):
        given["token_type_ids"] = kinds
    elif "image_grid_thw" in given:
        given["mm_token_type_ids"] = kinds
    return given | {"input_ids": ids, "attention_mask": mask}
