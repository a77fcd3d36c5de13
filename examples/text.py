"""Real text that every Python brings, and a tiny random Llama that reads its bytes: what the
examples share. With a GPU, they use it."""

from __future__ import annotations

import pydoc_data.topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = "".join(pydoc_data.topics.topics.values())
"""Python's own language reference, some 700 kB."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Dataset(torch.utils.data.Dataset):
    """Pieces of the text, a byte a token."""

    def __init__(self, length: int = 64, pieces: int = 256) -> None:
        tokens = torch.frombuffer(bytearray(TEXT.encode()), dtype=torch.uint8).long()
        self.pieces = tokens[: length * pieces].view(pieces, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=1, eos_token_id=2, **sizes))


def show(losses: list[float], by: float = 0.5) -> None:
    """The first and the last loss; training has to have lowered it by so much."""
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    assert losses[-1] < losses[0] - by
