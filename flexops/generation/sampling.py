"""The next token of logits, on the device: as transformers' warpers do, in their order."""

from __future__ import annotations

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

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``[batch]`` of ``[batch, words]``."""
        if not self.do_sample:
            return _largest(logits)
        scores = logits.float()
        if self.temperature != 1:
            scores = scores / self.temperature
        words = scores.shape[-1]
        indices: Any = None
        if 0 < self.top_k < words:
            scores, indices = scores.topk(self.top_k)
        if self.top_p < 1:
            if indices is None:
                scores, indices = scores.sort(-1, descending=True)
            probabilities = scores.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            scores = scores.masked_fill(before >= self.top_p, -torch.inf)
        # of exponentially distributed numbers, divided by rates, the least is i with its rate's
        # probability
        noise = torch.empty_like(scores).exponential_(generator=generator)
        chosen = _largest(scores.softmax(-1) / noise)
        return chosen if indices is None else indices.gather(-1, chosen[:, None]).squeeze(-1)


_PARTS = (512, 256, 128, 64)


def _largest(scores: Tensor) -> Tensor:
    """``scores.argmax(-1)``, the first where several are alike; of parts of each row first, because
    torch gives a row to few blocks of a GPU."""
    rows, words = scores.shape
    part = next((one for one in _PARTS if words % one == 0 and words > 8 * one), 0)
    if not part:
        return scores.argmax(-1)
    values, places = scores.view(rows, -1, part).max(-1)
    best = values.argmax(-1, keepdim=True)
    return places.gather(-1, best).add(best, alpha=part).squeeze(-1)
