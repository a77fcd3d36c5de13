"""``flexops.generate``: tokens are chosen on the device, and the host reads finished ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import GenerationError
from ..ops.next_token import next_token_
from . import decoder, lookup, step
from .cache import KVCache
from .names import cache_name
from .sampling import Sampling, to_host

_AHEAD = 8
"""So many steps are launched before the host looks whether all sequences have ended."""


def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 20,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    cache: Any = None,
    streamer: Any = None,
    prompt_lookup_num_tokens: int = 0,
) -> Tensor:
    """Continue prompts, with a model of transformers that :func:`flexops.patch` has patched.

    Args:
        model: a decoder with a head for words.
        input_ids: ``[batch, length]``, integers.
        attention_mask: the same shape, 0 for padding, which is at the left; None: no padding.
        max_new_tokens: at most so many tokens are added to each prompt.
        do_sample: draw tokens; False takes the likeliest.
        temperature, top_k, top_p: as transformers' options of these names; 0 and 1 are off.
        eos_token_id: tokens that end a sequence; None is the ``eos_token_id`` of the model's
            generation config, ``()`` none.
        pad_token_id: behind the end; None is the generation config's, or the first of
            ``eos_token_id``.
        generator: what draws; None is the device's default.
        seed: a new generator of this seed in its place.
        cache: an empty :class:`flexops.KVCache`; None makes one.
        streamer: one of transformers' streamers; it gets tokens in groups of up to eight, or as
            many as a step that tries several has kept.
        prompt_lookup_num_tokens: a step tries so many tokens behind the last one, 0 to 31: those
            that followed the same words before. Where text repeats itself, as summaries and changed
            code do, a step appends several. Rounding aside, the result is that of single steps, or
            has their distribution.

    Returns:
        ``[batch, length + new]``: prompts and new tokens, up to the end of the longest.

    Raises:
        GenerationError: an argument is not as above, or the cache is too short or in use.

    On a GPU a step, the choice of the token included, is one CUDA graph, which is captured at the
    first call of a batch size and length. A model whose step cannot be captured runs as it is;
    :func:`flexops.status` says why.
    """
    sampling = Sampling(do_sample, temperature, top_k if do_sample else 0, top_p)
    tries = prompt_lookup_num_tokens
    _check(model, input_ids, attention_mask, max_new_tokens, generator, seed, streamer, tries)
    config = model.generation_config
    ends = _ends(config.eos_token_id if eos_token_id is None else eos_token_id)
    pad = config.pad_token_id if pad_token_id is None else pad_token_id
    pad = pad if pad is not None else ends[0] if ends else 0
    if not isinstance(pad, int):
        _fail("no such pad_token_id", repr(pad), "a token")
    batch, length = input_ids.shape
    mine = decoder.decoder_of(model)
    room = length + max_new_tokens - 1 + tries
    if cache is None:
        cache = mine.borrow(model, batch, room + 1)
    elif not isinstance(cache, KVCache):
        _fail("no such cache", type(cache).__name__, "a flexops.KVCache")
    elif cache.store.recurrent:  # steps run ahead of the end
        _fail("no such cache", "one with states of layers, which cannot forget tokens", "None")
    elif cache.length or cache.max_length < room:
        raise GenerationError(
            "flexops.generate starts with an empty cache, with room for all tokens",
            found=f"{cache.length} tokens in a cache of {cache.max_length}",
            required=f"0 in one of {room}",
            fix=f"flexops.KVCache(model.config, max_length={room + 1})",
        )
    elif tries and cache.settings[0] != 16:
        _fail("no such cache with prompt_lookup_num_tokens", "one of codes", "one of 16 bits")
    else:
        mine.serve(model, cache)
    if step.refusal(model):
        cache.decoder = None
    if seed is not None:
        generator = mine.generator(input_ids.device).manual_seed(seed)
    with step.untracked():
        return _Run(model, cache, sampling, generator, ends, pad, tries)(
            input_ids, attention_mask, max_new_tokens, streamer
        )


def _fail(what: str, found: str, required: str) -> None:
    raise GenerationError(f"flexops.generate: {what}", found=found, required=required)


def _ends(tokens: Any) -> list[int]:
    found = [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)
    if not all(isinstance(one, int | Tensor) for one in found):
        _fail("no such eos_token_id", repr(tokens), "a token, or several")
    return [int(one) for one in found]


def _check(
    model: Any,
    input_ids: Any,
    mask: Any,
    max_new_tokens: Any,
    generator: Any,
    seed: Any,
    streamer: Any,
    tries: Any,
) -> None:
    if not hasattr(model, "generation_config"):
        _fail(
            "model does not generate",
            type(model).__name__,
            "a model of transformers with a head for words, as AutoModelForCausalLM makes it",
        )
    shape = getattr(input_ids, "shape", None)
    if model.config.is_encoder_decoder:
        _fail("model has an encoder", type(model).__name__, "a decoder, or model.generate")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.numel() == 0:
        _fail(
            "no such input_ids",
            f"{type(input_ids).__name__} {shape}",
            "a tensor, [batch, length], not 0",
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        _fail("no such input_ids", str(input_ids.dtype), "int64 or int32")
    if input_ids.device != model.device:
        _fail("input_ids and the model are apart", f"{input_ids.device}, {model.device}", "one")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        _fail("no such max_new_tokens", repr(max_new_tokens), "at least 1")
    if not isinstance(tries, int) or not 0 <= tries <= lookup.MOST_TOKENS:
        required = f"a whole number, 0 to {lookup.MOST_TOKENS}"
        _fail("no such prompt_lookup_num_tokens", repr(tries), required)
    if generator is not None and not isinstance(generator, torch.Generator):
        _fail("no such generator", repr(generator), "a torch.Generator")
    if streamer is not None and not hasattr(streamer, "put"):
        _fail("no such streamer", repr(streamer), "a streamer of transformers, with put and end")
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**64):
        _fail("no such seed", repr(seed), "a whole number of 64 bits")
    if generator is not None and seed is not None:
        _fail("generator and seed exclude each other", "both", "one of them")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != shape:
        _fail("no such attention_mask", str(getattr(mask, "shape", mask)), f"{list(shape or ())}")
    if bool((mask[:, 1:].bool() < mask[:, :-1].bool()).any()) or not bool(mask[:, -1].all()):
        _fail(
            "attention_mask hides tokens behind others",
            "a 0 behind a 1, or at the end",
            "padding at the left: tokenizer.padding_side = 'left'",
        )
    if "position_ids" not in inspect.signature(model.forward).parameters and not bool(mask.all()):
        _fail(
            "left padding changes the positions of this model",
            f"{type(model).__name__}, whose forward takes no position_ids",
            "prompts of one length, or model.generate",
        )


class _Buffers:
    """What steps read and write: all tokens of a batch, the last ones, where the next ones go,
    which sequences have ended, the tokens that end them, and the kernel's workspace."""

    def __init__(self, batch: int, length: int, ends: int, device: torch.device) -> None:
        self.tokens = torch.zeros((batch, length), dtype=torch.int64, device=device)
        self.last = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.ends = torch.zeros(ends, dtype=torch.int64, device=device)
        self.workspace = torch.zeros(batch + 1, dtype=torch.int64, device=device)


class _Run:
    """One call: the prompt, then steps until all sequences have ended."""

    def __init__(
        self,
        model: Any,
        cache: Any,
        sampling: Sampling,
        generator: torch.Generator | None,
        ends: list[int],
        pad: int,
        tries: int,
    ) -> None:
        self.model, self.cache, self.sampling = model, cache, sampling
        self.generator, self.ends, self.pad, self.lookup = generator, ends, pad, tries

    def __call__(
        self, prompt: Tensor, mask: Tensor | None, max_new_tokens: int, streamer: Any
    ) -> Tensor:
        batch, length = prompt.shape
        total = length + max_new_tokens
        reads_pictures = step.reads_pictures(self.model)
        mask = torch.ones_like(prompt) if mask is None and reads_pictures else mask
        self.places = mask is not None and (reads_pictures or not bool(mask.all()))
        logits = self._prefill(prompt, mask)
        if streamer is not None:
            streamer.put(prompt.cpu())
        if self.lookup and lookup.fits(self, total):
            run = lookup.Lookup(self, batch, prompt.device)
            return run(prompt, mask, logits, total, streamer)
        key = f"tokens, {len(self.ends)} ends"
        room = self.cache.max_length + 1
        buffers = self.cache.store.inputs.get(key)
        if buffers is None:
            buffers = _Buffers(batch, room, len(self.ends), prompt.device)
            self.cache.store.inputs[key] = buffers
        self.buffers: _Buffers = buffers
        buffers.tokens[:, :length] = prompt
        buffers.finished.zero_()
        buffers.at.fill_(length)
        buffers.ends.copy_(torch.tensor(self.ends, dtype=torch.int64))
        self._choose(logits)
        found = self._steps(self._stepper(mask), length, total, streamer)
        if not self.cache.store.recurrent:
            self.cache.crop_to(found.shape[1] - 1)
        return found

    def _prefill(self, prompt: Tensor, mask: Tensor | None) -> Tensor:
        options: dict[str, Any] = {}
        if self.model._supports_logits_to_keep():
            options["logits_to_keep"] = 1
        return self._forward(prompt, mask, **options)

    def _forward(self, tokens: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """The model as it is: logits behind ``tokens``; ``mask``: of all tokens so far."""
        if mask is not None:
            options["attention_mask"] = mask
            if self.places:
                positions = mask.long().cumsum(-1).sub(1).clamp(min=0)
                options["position_ids"] = positions[:, -tokens.shape[1] :]
        output = self.model(
            input_ids=tokens,
            use_cache=True,
            return_dict=True,
            **{cache_name(): self.cache},
            **options,
        )
        found: Tensor = output.logits[:, -1]
        return found

    def _choose(self, logits: Tensor) -> None:
        """Append each sequence's next token, or padding behind its end."""
        to = self.buffers
        scores, words = self.sampling.scores(logits, self.generator)
        next_token_(
            scores, words, to.tokens, to.last, to.finished, to.at, to.ends, self.pad, to.workspace
        )

    def _stepper(self, mask: Tensor | None) -> Callable[[int], None]:
        """What takes a step, given how many tokens there are."""
        cache, buffers = self.cache, self.buffers
        if cache.decoder is None:
            return self._plain_stepper(mask, cache.length)
        store = cache.store
        store.place(cache.length, mask)
        state = (store.lengths, buffers.finished, buffers.tokens, buffers.last, buffers.at)
        captures = decoder.captures(buffers.tokens.device) and not cache.decoder.refused

        def compute(bucket: int) -> None:
            with store.stepping(bucket):
                self._choose(step.logits_of(self.model, self.model, cache, buffers.last)[:, -1])

        instead: list[Callable[[int], None]] = []

        def take(length: int) -> None:
            if instead:
                return instead[0](length)
            bucket = step.bucket_of(length, cache.max_length)
            if not captures:
                compute(bucket)
            else:
                drawn = self.sampling, self.generator
                ends = len(self.ends), self.pad
                key = ("tokens", cache.state, drawn, ends, bucket)
                graph = cache.decoder.captured(
                    store, key, lambda: compute(bucket), state, self.generator
                )
                if graph is None:
                    buffers.at.fill_(length)
                    instead.append(self._plain_stepper(mask, length - 1))
                    return instead[0](length)
                graph.replay()
            cache.advance(1)
            store.known = cache.length
            return None

        return take

    def _plain_stepper(self, mask: Tensor | None, length: int) -> Callable[[int], None]:
        """The model as it is, which keeps lengths on the host, after so many tokens."""
        seen = None if mask is None else F.pad(mask, (0, length - mask.shape[1]), value=1)

        def take(length: int) -> None:
            nonlocal seen
            if seen is not None:
                seen = torch.cat([seen, seen.new_ones(seen.shape[0], 1)], -1)
            self._choose(self._forward(self.buffers.tokens[:, length - 1 : length], seen))

        return take

    def _steps(self, take: Callable[[int], None], length: int, total: int, streamer: Any) -> Tensor:
        """Launch groups of steps; before the next one's end, look whether the one before it has
        ended all sequences."""
        looks: list[tuple[int, Any]] = []
        end, told = length + 1, length
        ended = False
        while True:
            looks.append((end, to_host(self.buffers.finished)))
            if len(looks) > 1 or end == total:
                at, look = looks.pop(0)
                ended = bool(look()[0].all())
                if ended:
                    break
                if streamer is not None:
                    told = self.tell(streamer, self.buffers.tokens, told, at)
            if end == total:
                break
            for _ in range(min(_AHEAD, total - end)):
                take(end)
                end += 1
        found = self.buffers.tokens[:, : self._longest(length, end)]
        if streamer is not None:
            self.tell(streamer, found, told, found.shape[1])
            streamer.end()
        return found.clone()

    @staticmethod
    def tell(streamer: Any, tokens: Tensor, begin: int, end: int) -> int:
        """Give a streamer columns of tokens; gives where the next ones begin."""
        for column in tokens[:, begin:end].cpu().unbind(1):
            streamer.put(column)
        return max(begin, end)

    def _longest(self, length: int, end: int) -> int:
        """Where the last sequence ends."""
        if not self.ends:
            return end
        stops = torch.isin(self.buffers.tokens[:, length:end], self.buffers.ends)
        first = torch.where(stops.any(-1), stops.int().argmax(-1) + 1, end - length)
        return length + int(first.max())
