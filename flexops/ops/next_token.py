"""The next token of each sequence of a batch, from its words' scores, with what a decode step keeps
of it. For each row::

    chosen = argmax(scores)           or words[argmax(scores)]; the first of equal scores
    chosen = pad                      where the row is finished
    finished = finished or chosen in ends
    last, tokens[at] = chosen, chosen

and ``at`` is one more afterwards. Without ``ends`` no row is finished.

Of a step that has tried several tokens of a row (Saxena, "Prompt Lookup Decoding", 2023), those are
kept that were chosen behind right ones::

    right = how many i from 0 on have tried[i + 1] = chosen[i]
    tokens[known ...] = chosen[0 ... right], up to an end and the limit
    known = known + that many;  lengths = known - 1

What is tried next: the last token, and what follows the latest of the longest earlier copies of the
last three, two, or one; behind the last token it is repeated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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


MOST_TRIED = 32


def keep_tokens_(
    chosen: Tensor, tokens: Tensor, known: Tensor, finished: Tensor, limit: Tensor, ends: Tensor,
    tried: Tensor, lengths: Tensor,
) -> None:  # fmt: skip
    """Keep what a step has chosen, and find what the next one tries. Formulas: see the module.

    Args:
        chosen: int64 ``[rows, new]``, at most 32: the word behind each that was tried.
        tokens: int64 ``[rows, columns]``, of which each row has ``known``, int64 ``[rows]``, at
            least 1; there is room for ``known + new``.
        finished: bool ``[rows]``: keep nothing.
        limit: int64 ``[1]``: how many tokens a row has at most; then it is finished.
        ends: int64: the words that end a row, which is finished then.
        tried: int64 ``[rows, new]``: the last token, and what was tried behind it.
        lengths: int32 ``[rows]``.
    """
    call = _KEEP if chosen.is_cuda else _keep_reference
    call(chosen, tokens, known, finished, limit, ends, tried, lengths)


def _keep_reference(
    chosen: Tensor, tokens: Tensor, known: Tensor, finished: Tensor, limit: Tensor, ends: Tensor,
    tried: Tensor, lengths: Tensor,
) -> None:  # fmt: skip
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    right = (tried[:, 1:] == chosen[:, :-1]).cumprod(1).sum(1)
    before_end = (torch.isin(chosen, ends).cumsum(1) == 0).sum(1)
    count = torch.minimum(torch.minimum(right, before_end) + 1, (limit - known).clamp(min=0))
    count = count.masked_fill(finished, 0)
    places = (known[:, None] + columns).clamp(max=tokens.shape[1] - 1)
    kept = torch.where(columns < count[:, None], chosen, tokens.gather(1, places))
    tokens.scatter_(1, places, kept)
    known.add_(count)
    finished |= (count > before_end) | (known >= limit)
    lengths.copy_(known - 1)
    tried.copy_(_tries(tokens, known, chosen.shape[1]))


_ALIKE = 3


def _tries(tokens: Tensor, known: Tensor, count: int) -> Tensor:
    room = tokens.shape[1]
    places = torch.arange(room, device=tokens.device)
    last = known[:, None] - 1
    alike = places < last
    found = torch.full_like(tokens, -1)
    for back in range(_ALIKE):
        word = tokens.gather(1, (last - back).clamp(min=0))
        alike = alike & (F.pad(tokens, (back, 0), value=-1)[:, :room] == word)
        found = torch.where(alike, places + back * room, found)
    best = found.amax(1, keepdim=True)
    copy = torch.where(best < 0, last, best % room)
    following = copy + torch.arange(count, device=tokens.device)
    return tokens.gather(1, torch.minimum(following, last))


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


def _check_keep(chosen: Tensor, tokens: Tensor, *_: Any) -> None:
    if chosen.dim() != 2 or not 1 <= chosen.shape[1] <= MOST_TRIED:
        raise ValueError(
            f"flexops.keep_tokens_: chosen must be [rows, 1 to {MOST_TRIED}], got"
            f" {list(chosen.shape)}"
        )
    if tokens.dim() != 2 or tokens.shape[0] != chosen.shape[0]:
        raise ValueError(
            f"flexops.keep_tokens_: tokens must have shape [{chosen.shape[0]}, any], got"
            f" {list(tokens.shape)}"
        )


define("next_token_", _reference, check=_check)
define("keep_tokens_", _keep_reference, check=_check_keep)
_CALL = caller(torch.ops.flexops.next_token_.default)
_KEEP = caller(torch.ops.flexops.keep_tokens_.default)


@checking()
def self_check(make: Make) -> Any:
    """Three rows, of which one has ended and one ends; then what was tried."""
    scores = make(3, 5000)
    scores[2, 7] = 99
    words = torch.arange(5000, device=scores.device).flip(0).expand(3, -1).contiguous()
    tokens, last = words[:, :4].clone(), words[:, :1].clone()
    finished = last.squeeze(-1) != last.squeeze(-1)
    finished[0] = True
    at, ends = words[0, -3:-2].clone(), words[0, 7:8].clone()
    workspace = torch.zeros(4, dtype=torch.int64, device=scores.device)
    _CALL(scores, words, tokens, last, finished, at, ends, 3, workspace)
    results = tokens.clone(), last.clone(), finished.clone(), at.clone()
    rows = (words[:, :12] + words[0, :3].flip(0)[:, None]).remainder(5)
    known, limit = words.new_full((3,), 9), words.new_full((1,), 11)
    chosen, tried = rows[:, 4:7].clone(), rows[:, 3:6].clone()
    lengths = known.int()
    _KEEP(chosen, rows, known, finished, limit, ends, tried, lengths)
    return [one.float() for one in (*results, rows, known, tried, lengths)]
