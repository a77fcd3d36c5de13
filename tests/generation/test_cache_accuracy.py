"""How much a cache of 8 and 4 bits costs: the perplexity of a small model that copies from its
context, on text that it has not seen.

The text is the source of Python's standard library. The second half of a sequence has the passages
of its first half in another order, so its tokens are predicted by finding them in the cache."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import flexops

CONTEXT, CHUNK, PASSAGES = 2048, 64, 4
BOUNDS = {8: 1.005, 4: 1.02}
STAGES = ((256, 64, 1.0), (CONTEXT, 8, 0.5))
"""Of the training: lengths of sequences, how many a step has, and the loss of their second half at
which the stage ends. Copying is learned from short sequences first."""
MOST_STEPS = 3000


def source() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and bytes to measure."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held = files[::10]
    parts = ([path for path in files if path not in held], held)
    train, unseen = (
        torch.frombuffer(bytearray().join(path.read_bytes() for path in part), dtype=torch.uint8)
        for part in parts
    )
    return train.long().cuda(), unseen.long().cuda()


def sequences(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """``[count, length]``: passages from anywhere in the text, and the same in another order."""
    size = length // 2 // PASSAGES
    places = {"generator": generator, "device": text.device}
    starts = torch.randint(text.numel() - size, (count, PASSAGES, 1), **places)  # type: ignore[call-overload]
    passages = text[starts + torch.arange(size, device=text.device)]
    order = torch.rand(count, PASSAGES, **places).argsort(1)  # type: ignore[call-overload]
    again = passages.gather(1, order[..., None].expand_as(passages))
    return torch.cat((passages, again), 1).flatten(1)


def trained(text: Tensor) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100)
    generator = torch.Generator("cuda").manual_seed(0)
    for length, batch, enough in STAGES:
        recent, step = torch.full((50,), math.inf, device="cuda"), 0
        while step < MOST_STEPS and (step % 50 or recent.mean() > enough):
            ids = sequences(text, batch, length, generator)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(input_ids=ids).logits
            loss = cross_entropy(logits, ids)
            loss.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            recent[step % 50] = loss.detach()[:, length // 2 - 1 :].mean()
            step += 1
        print(f"{step} steps with {length} tokens: loss of the second half {recent.mean():.3f}")
    return model.eval()


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each token but the first."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none"
    )


@torch.no_grad()
def perplexity(model: Any, ids: Tensor, bits: int) -> float:
    """Of the second half, in chunks that attend to what the cache has kept."""
    cache = flexops.KVCache(model.config, CONTEXT, bits=bits)
    logits = [
        model(input_ids=ids[:, at : at + CHUNK], past_key_values=cache).logits
        for at in range(0, CONTEXT, CHUNK)
    ]
    return math.exp(cross_entropy(torch.cat(logits, 1), ids)[:, CONTEXT // 2 - 1 :].mean())


def shuffled(ids: Tensor) -> Tensor:
    """The tokens of the first half in another order."""
    order = torch.randperm(CONTEXT // 2, generator=torch.Generator().manual_seed(1)).cuda()
    return torch.cat((ids[:, order], ids[:, CONTEXT // 2 :]), 1)


@pytest.mark.slow
@pytest.mark.gpu  # an hour on two cores
def test_perplexity_stays_within_the_bounds():
    train, held = source()
    model = trained(train)
    ids = sequences(held, 8, CONTEXT, torch.Generator("cuda").manual_seed(2))
    plain, without = perplexity(model, ids, 16), perplexity(model, shuffled(ids), 16)
    found = {bits: perplexity(model, ids, bits) / plain for bits in BOUNDS}
    print(f"perplexity {plain:.3f} in 16 bits, {without:.3f} of a shuffled context; ratios {found}")
    assert without > 2 * plain, "the model uses its context"
    for bits, bound in BOUNDS.items():
        assert 1 / bound < found[bits] < bound, found
