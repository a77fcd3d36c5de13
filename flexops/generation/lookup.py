"""Several tokens a step: what followed the same words before is tried behind the last token
(Saxena, "Prompt Lookup Decoding", 2023).

A step computes the logits behind the last token and its candidates, chooses behind each, and keeps
what was chosen up to the first candidate that is another. So tokens are those of steps of one
token, or drawn from the same distribution, but for rounding. All of it is one graph; each row has
its own length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.next_token import MOST_TRIED, keep_tokens_, next_token_
from . import decoder, prompt, step
from .layers import Store
from .sampling import Sampling, to_host

MOST_TOKENS = MOST_TRIED - 1


class Buffers:
    """What steps read and write.

    Attributes:
        tokens: ``[batch, room]``, of which each row has ``known``, int64 ``[batch]``.
        finished: bool ``[batch]``.
        tried: ``[batch, new]``: a row's last token, and what is tried behind it.
    """

    def __init__(self, batch: int, room: int, ends: int, new: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.tokens, self.known, self.tried = zeros(batch, room), zeros(batch), zeros(batch, new)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self._limit, self._ends, self._chosen = zeros(1), zeros(ends), zeros(batch, new)
        rows = batch * new
        self._at, self._workspace = zeros(1), zeros(rows + 1)
        none_ended = torch.zeros(rows, dtype=torch.bool, device=device)
        chosen = self._chosen.view(rows, 1)
        self._others = zeros(rows, 1), chosen, none_ended, self._at, zeros(0)

    def start(self, tokens: Tensor, first: Tensor, limit: int, ends: list[int], pad: int) -> None:
        """With prompts, and the first token behind them, ``[batch, 1]``."""
        length = tokens.shape[1]
        self.tokens.fill_(pad)
        self.tokens[:, :length] = tokens
        self.known.fill_(length)
        self.finished.zero_()
        self._limit.fill_(limit)
        self._ends.copy_(torch.tensor(ends, dtype=torch.int64))
        self._chosen.copy_(first.expand_as(self._chosen))
        self.tried.fill_(-1)  # so that only the first is kept

    def choose(self, scores: Tensor, words: Tensor | None) -> None:
        """A word for each row of scores, ``[batch * new, words]``."""
        self._at.zero_()
        next_token_(scores, words, *self._others, 0, self._workspace)

    def keep(self, lengths: Tensor) -> None:
        """Keep what is right of the chosen words; ``lengths``: of the cache."""
        ends = self._limit, self._ends
        keep_tokens_(
            self._chosen, self.tokens, self.known, self.finished, *ends, self.tried, lengths
        )


class Lookup:
    """What is behind the prompts of one call of ``flexops.generate``.

    Args:
        run: the call, whose cache has the prompts.
    """

    def __init__(self, run: Any, batch: int, device: torch.device) -> None:
        self.run, self.new, store = run, run.lookup + 1, run.cache.store
        name = f"lookup of {self.new}, {len(run.ends)} ends"
        if name not in store.inputs:
            sizes = batch, run.cache.max_length + 1, len(run.ends), self.new
            store.inputs[name] = Buffers(*sizes, device)
        self.to: Buffers = store.inputs[name]
        self._captures = decoder.captures(device)

    def __call__(
        self, prompts: Tensor, mask: Tensor | None, logits: Tensor, limit: int, streamer: Any
    ) -> Tensor:
        """All tokens, up to the end of the longest row; ``logits``: those behind the prompts."""
        run, cache, to = self.run, self.run.cache, self.to
        scores, words = self._scores(logits)
        first = scores.argmax(-1, keepdim=True)
        first = first if words is None else words.gather(-1, first)
        cache.store.place(cache.length, mask)
        to.start(prompts, first, limit, run.ends, run.pad)
        to.keep(cache.store.lengths)
        told, bound = prompts.shape[1], prompts.shape[1] + 1
        looks = [to_host(to.known, to.finished)]
        while True:  # a step is launched before the host looks at the one before it
            if bound < limit or not looks:
                self._step(step.bucket_of(bound - 1 + self.new, cache.max_length))
                looks.append(to_host(to.known, to.finished))
                bound = min(bound + self.new, limit)
            if len(looks) == 1 and bound < limit:
                continue
            known, finished = looks.pop(0)()
            ended = bool(finished.all())
            if streamer is not None:
                final = known.max() if ended else known[~finished].min()
                told = run.tell(streamer, to.tokens, told, int(final))
            if ended:
                break
            bound = min(int(known.max()) + self.new * len(looks), limit)
        cache.crop_to(0)
        cache.advance(int(known.min()) - 1)  # what it has of all rows
        if streamer is not None:
            streamer.end()
        return to.tokens[:, : int(known.max())].clone()

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        sampling: Sampling = self.run.sampling
        return sampling.scores(logits, self.run.generator)

    def _step(self, bucket: int) -> None:
        run, to, cache = self.run, self.to, self.run.cache
        store = cache.store

        def compute() -> None:
            with store.stepping(bucket):
                logits = step.logits_of(run.model, run.model, cache, to.tried)
            to.choose(*self._scores(logits.flatten(0, 1)))
            to.keep(store.lengths)

        graph = None
        if self._captures:
            state = store.lengths, to.finished, to.tokens, to.known, to.tried
            drawn = run.sampling, run.generator
            key = ("lookup", cache.state, drawn, self.new, len(run.ends), bucket)
            graph = cache.decoder.captured(store, key, compute, state, run.generator)
            if graph is None:  # later calls take single steps
                self._captures = cache.decoder.fills[cache.state] = False
        compute() if graph is None else graph.replay()


def fits(run: Any, limit: int) -> bool:
    """Whether steps of a call can have several tokens, of rows of at most ``limit``."""
    cache = run.cache
    if cache.decoder is None or type(cache.store) is not Store or cache.store.recurrent:
        return False
    if limit + run.lookup > prompt.room_of(run.model, cache):
        return False
    return prompt.can_fill(run.model, run.model.forward, cache)
