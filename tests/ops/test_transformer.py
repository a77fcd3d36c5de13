"""A small transformer, trained once with torch's operators and once with flexops': the losses have
to follow each other.

Its first layer is of one kind (rms_norm, causal softmax, swiglu), its second of another
(layer_norm, softmax with a mask, bias_gelu), so that every operator for training takes part; the
loss alternates between linear_cross_entropy and cross_entropy over the logits. A third model has
attention in place of the softmaxes: causal by its option, and by a mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexops

WIDTH, HEADS, KEY_HEADS, SIZE, HIDDEN, VOCABULARY = 64, 4, 2, 16, 128, 89
BATCH, LENGTH, STEPS = 8, 32, 200
EPS = 1e-5

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Operators:
    """What the two models differ in, and nothing else."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    rotate: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    swiglu: Callable[..., Tensor]
    bias_gelu: Callable[..., Tensor]
    losses: tuple[Callable[..., Tensor], Callable[..., Tensor]]
    optimizer: Callable[..., torch.optim.Optimizer]
    clip: Callable[..., Any]


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, EPS).to(x.dtype)


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def _masked_softmax(scores: Tensor, keep: Tensor) -> Tensor:
    return torch.softmax((scores.float() * SIZE**-0.5).masked_fill(~keep, -torch.inf), -1).to(
        scores.dtype
    )


def _by_softmax(
    causal_softmax: Callable[[Tensor], Tensor], masked_softmax: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """Attention of ``[batch, heads, length, size]``, causal if there is no mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        k, v = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (k, v))
        scores = q @ k.transpose(-1, -2)
        return (causal_softmax(scores) if keep is None else masked_softmax(scores, keep)) @ v

    return attend


def _fused(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    out = flexops.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=keep is None, bias=keep)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total.float(), total.shape[-1:], weight, bias, EPS).to(total.dtype), total


PLAIN = Operators(
    rms_norm=_rms_norm,
    add_rms_norm=lambda x, residual, weight: (_rms_norm(x + residual, weight), x + residual),
    add_layer_norm=_add_layer_norm,
    rotate=lambda q, k, cos, sin: (_rotate_one(q, cos, sin), _rotate_one(k, cos, sin)),
    attend=_by_softmax(
        lambda scores: _masked_softmax(
            scores, torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=scores.device).tril()
        ),
        _masked_softmax,
    ),
    swiglu=lambda gate, up: F.silu(gate) * up,
    bias_gelu=lambda x, bias: F.gelu(x + bias.to(x.dtype), approximate="tanh"),
    losses=(lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),) * 2,
    optimizer=torch.optim.AdamW,
    clip=torch.nn.utils.clip_grad_norm_,
)


def _swapped(optimizer: Callable[..., torch.optim.Optimizer]) -> Operators:
    return Operators(
        rms_norm=lambda x, weight: flexops.rms_norm(x, weight, EPS),
        add_rms_norm=lambda x, residual, weight: flexops.add_rms_norm(x, residual, weight, EPS),
        add_layer_norm=lambda x, residual, weight, bias: flexops.add_layer_norm(
            x, residual, weight, bias, EPS
        ),
        rotate=flexops.rotary_embedding,
        attend=_by_softmax(
            lambda scores: flexops.causal_softmax(scores, SIZE**-0.5),
            lambda scores, keep: flexops.scaled_masked_softmax(scores, keep, SIZE**-0.5),
        ),
        swiglu=flexops.swiglu,
        bias_gelu=lambda x, bias: flexops.bias_gelu(x, bias, approximate="tanh"),
        losses=(
            lambda x, weight, target: flexops.linear_cross_entropy(
                x, weight, target, chunk_size=100
            ),
            lambda x, weight, target: flexops.cross_entropy(
                F.linear(x, weight), target, inplace=True
            ),
        ),
        optimizer=optimizer,
        clip=flexops.optim.clip_grad_norm_,
    )


def make_parameters(device: str) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    attention = {"qkv": ((HEADS + 2 * KEY_HEADS) * SIZE, WIDTH), "out": (WIDTH, HEADS * SIZE)}
    matrices = {"embedding": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH)}
    matrices |= {
        f"0.{name}": shape
        for name, shape in (
            attention | {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
        ).items()
    }
    matrices |= {
        f"1.{name}": shape
        for name, shape in (attention | {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}).items()
    }
    parameters = {
        name: (
            torch.randn(shape, generator=generator)
            * (1.0 if name == "embedding" else shape[1] ** -0.5)
        )
        for name, shape in matrices.items()
    }
    parameters |= {
        name: torch.ones(WIDTH) for name in ("0.norm", "0.norm2", "1.norm", "1.norm2", "norm")
    }
    parameters |= {
        "1.norm.bias": torch.zeros(WIDTH),
        "1.norm2.bias": torch.zeros(WIDTH),
        "1.up.bias": torch.zeros(HIDDEN),
    }
    return {name: value.to(device).requires_grad_() for name, value in parameters.items()}


def attention(
    ops: Operators, p: Parameters, layer: int, x: Tensor, cos: Tensor, sin: Tensor, keep: Tensor
) -> Tensor:
    q, k, v = (
        F.linear(x, p[f"{layer}.qkv"])
        .unflatten(-1, (-1, SIZE))
        .transpose(1, 2)
        .split([HEADS, KEY_HEADS, KEY_HEADS], 1)
    )
    q, k = ops.rotate(q, k, cos, sin)
    return F.linear(
        ops.attend(q, k, v, keep if layer else None).transpose(1, 2).flatten(2), p[f"{layer}.out"]
    )


def forward(ops: Operators, p: Parameters, tokens: Tensor) -> Tensor:
    angles = torch.outer(
        torch.arange(LENGTH, device=tokens.device),
        1e4 ** (-torch.arange(0, SIZE, 2, device=tokens.device) / SIZE),
    )
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).tril()
    tables = angles.cos(), angles.sin(), keep
    residual = F.embedding(tokens, p["embedding"])
    residual = residual.to(torch.bfloat16) if torch.is_autocast_enabled() else residual
    x = attention(ops, p, 0, ops.rms_norm(residual, p["0.norm"]), *tables)
    x, residual = ops.add_rms_norm(x, residual, p["0.norm2"])
    x = F.linear(ops.swiglu(F.linear(x, p["0.gate"]), F.linear(x, p["0.up"])), p["0.down"])
    x, residual = ops.add_layer_norm(x, residual, p["1.norm"], p["1.norm.bias"])
    x, residual = ops.add_layer_norm(
        attention(ops, p, 1, x, *tables), residual, p["1.norm2"], p["1.norm2.bias"]
    )
    x = F.linear(ops.bias_gelu(F.linear(x, p["1.up"]), p["1.up.bias"]), p["1.down"])
    return ops.add_rms_norm(x, residual, p["norm"])[0]


def batches(device: str) -> Iterator[Tensor]:
    """Sentences with something to learn: each token is a fixed function of the two before it, with
    one in ten at random."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        surprising = torch.rand(BATCH, LENGTH + 1, generator=generator) < 0.1
        for place in range(2, LENGTH + 1):
            tokens[:, place] = torch.where(
                surprising[:, place],
                tokens[:, place],
                (3 * tokens[:, place - 1] + tokens[:, place - 2] // 8) % VOCABULARY,
            )
        yield tokens.to(device)


def train(ops: Operators, device: str, *, autocast: bool = False) -> Tensor:
    """The losses of all steps."""
    parameters = make_parameters(device)
    optimizer = ops.optimizer(list(parameters.values()), lr=3e-3, weight_decay=0.01)
    losses = []
    for step, tokens in enumerate(batches(device)):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            hidden = forward(ops, parameters, tokens[:, :-1]).flatten(0, 1)
            loss = ops.losses[step % 2](hidden, parameters["head"], tokens[:, 1:].flatten())
        loss.backward()
        ops.clip(list(parameters.values()), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are too small to share, and threads that wait for each other take ten times as
    long where others compute, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain() -> Callable[..., Tensor]:
    """The plain model's losses, which are made once."""
    made: dict[Any, Tensor] = {}

    def losses(device: str, autocast: bool = False) -> Tensor:
        if (device, autocast) not in made:
            made[device, autocast] = train(PLAIN, device, autocast=autocast)
        return made[device, autocast]

    return losses


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")  # attention of float32 on a GPU
@pytest.mark.parametrize("fused", [False, True], ids=["softmax", "attention"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_follows_torchs(device, fused, plain):
    expected = plain(device)
    actual = train(
        replace(_swapped(flexops.optim.AdamW), **({"attend": _fused} if fused else {})), device
    )
    assert expected[-20:].mean() < 0.5 * expected[0], (
        "the plain model must learn for this to mean something"
    )
    difference = (actual - expected).abs()
    assert difference[:20].max() < 2e-5, difference[:20]
    assert difference.max() < 5e-3, difference


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["softmax", "attention"])
def test_the_loss_follows_torchs_under_autocast(fused, plain):
    expected = plain("cuda", autocast=True)
    actual = train(
        replace(_swapped(flexops.optim.AdamW), **({"attend": _fused} if fused else {})),
        "cuda",
        autocast=True,
    )
    assert (actual - expected).abs()[:20].max() < 0.02
    assert (actual[-50:].mean() - expected[-50:].mean()).abs() < 0.03


@pytest.mark.parametrize("device", DEVICES)
def test_states_of_8_bits_learn_as_well(device, plain):
    expected = plain(device)
    actual = train(_swapped(flexops.optim.AdamW8bit), device)
    assert (actual[-50:].mean() - expected[-50:].mean()).abs() < 0.05
