"""The next token of each sequence of a batch, from its words' scores, with what a decode step keeps
of it. For each row::

    chosen = argmax(scores)           or words[argmax(scores)]; the first of equal scores
    chosen = pad                      where the row is finished
    finished = finished or chosen in ends
    last, tokens[at] = chosen, chosen

and ``at`` is one more afterwards. Without ``ends`` no row is finished.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._declared import define
from ._register import caller
from ._self_check import Make, checking


def next_token_(
    scores: Tensor, words: Tensor | None, tokens: Tensor, last: Tensor, finished: Tensor,
    at: Tensor, ends: Tensor, pad: int, workspace: Tensor,
) -> None:  # fmt: skip
    """Append to each row of ``tokens`` the word with the largest score.

    Args:
        scores: ``[rows, words]``; a NaN is the largest.
        words: int64, of that shape: whose scores these are; None: of the words 0, 1, ...
        tokens: int64 ``[rows, columns]``, of which column ``at``, int64 ``[1]``, is written.
        last: int64 ``[rows, 1]``.
        finished: bool ``[rows]``.
        ends: int64: the words that end a sequence.
        workspace: int64 ``[rows + 1]`` of zeros, which it is left with.
    """
    call = _CALL if scores.is_cuda else _reference
    call(scores, words, tokens, last, finished, at, ends, pad, workspace)


_PARTS = (512, 256, 128, 64)


def _largest(scores: Tensor) -> Tensor:
    """``scores.argmax(-1)``; of parts of each row first, because torch gives a row to few blocks of
    a GPU."""
    rows, words = scores.shape
    part = next((one for one in _PARTS if words % one == 0 and words > 8 * one), 0)
    if not part:
        return scores.argmax(-1)
    values, places = scores.view(rows, -1, part).max(-1)
    best = values.argmax(-1, keepdim=True)
    return places.gather(-1, best).add(best, alpha=part).squeeze(-1)


def _reference(
    scores: Tensor, words: Tensor | None, tokens: Tensor, last: Tensor, finished: Tensor,
    at: Tensor, ends: Tensor, pad: int, workspace: Tensor,
) -> None:  # fmt: skip
    del workspace
    chosen = _largest(scores)
    if words is not None:
        chosen = words.gather(-1, chosen[:, None]).squeeze(-1)
    if ends.numel():
        chosen = chosen.masked_fill(finished, pad)
        finished |= torch.isin(chosen, ends)
    last.copy_(chosen[:, None])
    tokens.index_copy_(1, at, last)
    at.add_(1)


def _check(scores: Tensor, words: Tensor | None, tokens: Tensor, *rest: Any) -> None:
    del words
    if scores.dim() != 2 or scores.shape[1] == 0:
        raise ValueError(
            f"flexops.next_token_: scores must be [rows, words], got {list(scores.shape)}"
        )
    rows, workspace = scores.shape[0], rest[-1]
    if tokens.dim() != 2 or tokens.shape[0] != rows:
        raise ValueError(
            f"flexops.next_token_: tokens must have shape [{rows}, any], got {list(tokens.shape)}"
        )
    if workspace.numel() <= rows:
        raise ValueError(
            f"flexops.next_token_: workspace must have {rows + 1} elements, got {workspace.numel()}"
        )


define("next_token_", _reference, check=_check)
_CALL = caller(torch.ops.flexops.next_token_.default)


@checking()
def self_check(make: Make) -> Any:
    """Three rows, of which one has ended and one ends."""
    scores = make(3, 5000)
    scores[2, 7] = 99
    words = torch.arange(5000, device=scores.device).flip(0).expand(3, -1).contiguous()
    tokens, last = words[:, :4].clone(), words[:, :1].clone()
    finished = last.squeeze(-1) != last.squeeze(-1)
    finished[0] = True
    at, ends = words[0, -3:-2].clone(), words[0, 7:8].clone()
    workspace = torch.zeros(4, dtype=torch.int64, device=scores.device)
    _CALL(scores, words, tokens, last, finished, at, ends, 3, workspace)
    return tokens.float(), last.float(), finished.float(), at.float()
