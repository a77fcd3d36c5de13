"""transformers' own tests of models (``ModelTesterMixin``) for small models of ten types, for
:mod:`test_model_tests`, which runs them in a package with transformers' file, twice: with
``FLEXOPS_PATCHED=1`` every model is patched after construction."""

from __future__ import annotations

import os
import unittest
from typing import Any

import torch
import transformers
import zoo
from transformers.testing_utils import torch_device

import flexops

from .test_modeling_common import ModelTesterMixin, ids_tensor

TYPES = (
    "bert", "cohere", "gemma2", "gpt2", "granite", "llama", "mixtral", "olmo2", "opt", "qwen3",
)  # fmt: skip
CLASSES = ("Model", "ForCausalLM", "ForMaskedLM", "LMHeadModel")
PATCHED = os.environ.get("FLEXOPS_PATCHED") == "1"


class Tester:
    """What the mixin asks for: a small config, and inputs."""

    is_training = True
    batch_size, seq_length = 3, 7

    def __init__(self, name: str) -> None:
        self.name = name
        config = self.get_config()
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.num_hidden_layers = config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads

    def get_config(self) -> Any:
        config = zoo.tiny_config(transformers.CONFIG_MAPPING[self.name], self.name)
        if config.max_position_embeddings > 512:  # longer inputs are tried, too
            config.max_position_embeddings = 512
        if getattr(config, "head_dim", 0) is None:
            config.head_dim = config.hidden_size // config.num_attention_heads
        config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.ones_like(tokens, device=torch_device)
        return self.get_config(), {"input_ids": tokens, "attention_mask": mask}


def classes_of(name: str) -> tuple[type, ...]:
    base: Any = transformers.AutoModel._model_mapping[transformers.CONFIG_MAPPING[name]]
    stem = base.__name__.removesuffix("Model")
    found = (getattr(transformers, stem + ending, None) for ending in CLASSES)
    return tuple(one for one in found if one is not None)


def make(name: str) -> type:
    class Test(ModelTesterMixin, unittest.TestCase):  # type: ignore[misc]
        all_model_classes = classes_of(name)

        def setUp(self) -> None:
            self.model_tester = Tester(name)
            super().setUp()

        @classmethod
        def setUpClass(cls) -> None:
            super().setUpClass()
            if PATCHED:
                flexops.patch(name)

        @classmethod
        def tearDownClass(cls) -> None:
            if PATCHED:
                assert flexops.unpatch(name) > 0
            super().tearDownClass()

    Test.__name__ = Test.__qualname__ = f"Test_{name}"
    return Test


for _name in TYPES:
    globals()[f"Test_{_name}"] = make(_name)
