"""TRL's trainers with patched models.

TRL (1.16) gives a model's ``forward`` a fused head (``trl.trainer.utils.add_fused_lm_head``), which
passes the hidden states and the weight to ``_ChunkedLogProbFunction.apply``; SFT, DPO, KTO, GRPO
and RLOO are all built on what it returns. That name of ``trl.trainer.utils`` gets a function that
computes the same by :func:`flexops.linear_logprobs`, for a model whose head :func:`flexops.patch`
has replaced, and calls TRL's own function for any other model. TRL's files and its trainers' code
are not changed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import after_import
from ..nn.linears import function_of
from ..ops.linear_logprobs import with_statistics
from .loss import head

_MODULE, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
_ROUNDING = 1e-5  # of a target's logit against itself, as the greatest
_COMPUTED = frozenset({"log_probs", "entropy", "mean_logits", "is_top1"})


class ChunkedLogProbs:
    """In place of TRL's autograd function: ``apply`` has its arguments."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: Sequence[str] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> Any:
        """Log-probabilities, entropies, the logarithm of the sum of squared probabilities, mean
        logits and whether the target is the first of the greatest; None for what ``outputs`` does
        not name."""
        model = sys._getframe(1).f_locals.get("self")
        wanted = set(outputs)
        if (
            not _has_our_head(model)
            or not wanted <= _COMPUTED
            or (softcap is not None and "mean_logits" in wanted)
            or not logit_scale > 0.0
        ):
            rest = (temperature, chunk_size, softcap, logit_scale, outputs)
            return self.original.apply(hidden, weight, bias, targets, *rest)
        # the cap of scaled logits is that of the logits at another temperature
        result, entropy, (_, sums) = with_statistics(
            hidden,
            weight,
            targets,
            bias,
            temperature=temperature / logit_scale,
            softcap=None if softcap is None else softcap / logit_scale,
        )
        with torch.no_grad():
            is_top1 = result + sums.log() >= -_ROUNDING if "is_top1" in wanted else None
            mean = (
                _mean_logits(hidden, weight, bias) * (logit_scale / temperature)
                if "mean_logits" in wanted
                else None
            )
        return result, entropy if "entropy" in wanted else None, None, mean, is_top1


def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
    return mean if bias is None else mean + bias.mean(dtype=torch.float32)


def _has_our_head(model: Any) -> bool:
    """Whether :func:`flexops.patch` has replaced the loss of a model with its head."""
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found is not None and function_of(found) is head


@functools.cache
def install() -> None:
    """Replace TRL's function, now or when its module is imported."""
    after_import(_MODULE, _replace)


def _replace() -> None:
    """TRL without this function, older or newer, computes as it does."""
    module = sys.modules[_MODULE]
    original = getattr(module, _NAME, None)
    if original is not None and not isinstance(original, ChunkedLogProbs):
        setattr(module, _NAME, ChunkedLogProbs(original))
