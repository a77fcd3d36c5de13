"""How much a cache of 8 and 4 bits costs: the perplexity of a small model, trained for a minute on
the source of Python's standard library, on modules that it has not seen."""

from __future__ import annotations

import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import flexops

CONTEXT, CHUNK = 2048, 64
BOUNDS = {8: 1.005, 4: 1.02}


def source() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and bytes to measure."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held = files[::10]
    parts = ([path for path in files if path not in held], held)
    train, unseen = (
        torch.frombuffer(bytearray().join(path.read_bytes() for path in part), dtype=torch.uint8)
        for part in parts
    )
    return train.long(), unseen.long()


def trained(train: Tensor, seconds: float) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    end, steps = time.monotonic() + seconds, 0
    while time.monotonic() < end or steps < 40:
        at = int(torch.randint(train.numel() - CONTEXT, ()))
        ids = train[at : at + CONTEXT][None]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    return model.eval()


@torch.no_grad()
def perplexity(model: Any, ids: Tensor, bits: int) -> float:
    """Of every token but the first chunk's, in chunks that attend to what the cache has kept."""
    cache = flexops.KVCache(model.config, CONTEXT, bits=bits)
    logits = [
        model(input_ids=ids[:, at : at + CHUNK], past_key_values=cache).logits
        for at in range(0, CONTEXT, CHUNK)
    ]
    found = torch.cat(logits, 1)[:, CHUNK - 1 : -1]
    loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), ids[:, CHUNK:].flatten())
    return math.exp(loss)


@pytest.mark.slow
def test_perplexity_stays_within_the_bounds() -> None:
    train, held = source()
    model = trained(train, 60)
    ids = held[: held.numel() // CONTEXT * CONTEXT].view(-1, CONTEXT)[::7][:6]
    plain = perplexity(model, ids, 16)
    assert plain < 40, "the model has learnt something: 256 are guesses"
    found = {bits: perplexity(model, ids, bits) / plain for bits in BOUNDS}
    print(f"perplexity {plain:.3f} in 16 bits; ratios {found}")
    for bits, bound in BOUNDS.items():
        assert 1 / bound < found[bits] < bound, found
