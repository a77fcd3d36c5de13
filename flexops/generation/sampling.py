"""The next token of logits, on the device: as transformers' warpers do, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from ..ops._arguments import number


@dataclass(frozen=True)
class Sampling:
    """How to choose.

    Attributes:
        do_sample: draw; otherwise the largest.
        temperature: logits are divided by it.
        top_k: only so many of the largest; 0: all.
        top_p: only the fewest of the likeliest whose probabilities add up to it; 1: all.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            number(f"flexops.generate: {name}", getattr(self, name))
        for name, right, required in (
            ("temperature", self.temperature > 0, "more than 0"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, at most 1"),
        ):
            if not right:
                found = f"{name}={getattr(self, name)!r}"
                raise GenerationError(f"flexops.generate: no such {name}", found=found,
                                      required=required)  # fmt: skip

    def scores(
        self, logits: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Of logits ``[batch, words]``: scores, of which the largest is the one that is chosen, and
        the words that have them, if those are not all in order."""
        if not self.do_sample:
            return logits, None
        scores = logits.float()
        if self.temperature != 1:
            scores = scores / self.temperature
        count = scores.shape[-1]
        words: Any = None
        if 0 < self.top_k < count:
            scores, words = scores.topk(self.top_k)
        if self.top_p < 1:
            if words is None:
                scores, words = scores.sort(-1, descending=True)
            probabilities = scores.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            scores = scores.masked_fill(before >= self.top_p, -torch.inf)
        # of exponentially distributed numbers, divided by rates, the least is i with its rate's
        # probability
        noise = torch.empty_like(scores).exponential_(generator=generator)
        return scores.softmax(-1) / noise, words


def to_host(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to copy tensors; gives what waits for the copies, and gives them."""
    if tensors[0].device.type != "cuda":
        copies = tuple(one.clone() for one in tensors)
        return lambda: copies
    copies = tuple(torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors)
    for copy, one in zip(copies, tensors, strict=True):
        copy.copy_(one, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> tuple[Tensor, ...]:
        event.synchronize()
        return copies

    return wait
