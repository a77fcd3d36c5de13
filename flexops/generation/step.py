"""One step of few tokens, captured into a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import GenerationError
from . import chain, state
from .names import cache_name

_capturing = threading.Lock()
"""torch captures one graph at a time in a process."""
LEAST_BUCKET = 256
HOOK = "_prepare_cache_for_generation"
"""The method of transformers' models that puts a cache among the arguments of ``generate``."""


def bucket_of(length: int, max_length: int) -> int:
    """How many tokens a step looks at that has so many: the next power of two."""
    return min(max(LEAST_BUCKET, 1 << (length - 1).bit_length()), max_length)


def refusal(model: Any) -> str:
    """Why a model's decode step cannot keep its lengths on the device; "" if it can. Who patches
    models has left the answer with the hook of ``generate``."""
    hook = vars(model).get(HOOK)
    refuse = getattr(hook, "keywords", {}).get("refuse")
    return str(refuse(model)) if refuse else "flexops.patch has not prepared it"


def depends_on_length(model: Any) -> str:
    """What in a model depends on the length of a prompt; "" if nothing is known to."""
    return str(getattr(vars(model).get(HOOK), "keywords", {}).get("of_length") or "")


def reads_pictures(model: Any) -> bool:
    """Whether a model is one around a language model: its positions may be those of pictures, too,
    and begin elsewhere, unless they are given."""
    return model.config.get_text_config(decoder=True) is not model.config


def is_capturing(like: Tensor) -> bool:
    """Whether who calls captures a graph."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def logits_of(
    model: Any, forward: Callable[..., Any], cache: Any, tokens: Tensor, **keep: Any
) -> Tensor:
    """Append ``tokens``, ``[batch, new]``, to the cache, on the device only, and give the logits
    behind each, ``[batch, new, words]``, or those that ``logits_to_keep`` names. Positions are
    behind places as :meth:`.layers.Store.place` was told."""
    store, new = cache.store, tokens.shape[1]
    positions = (store.lengths - store.behind).long()[:, None]
    if new > 1:
        positions = positions + torch.arange(new, device=tokens.device)
    # attention rotates by places without padding
    with state.step(None if store.shifted else store.tables), chain.deferring(model, store, tokens):
        output = forward(
            input_ids=tokens,
            attention_mask=state.nothing_hidden(tokens),
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **keep,
            **{cache_name(): cache},
        )
        missed = state.is_unfinished() or any(one.pending for one in cache.attention)
    if missed:
        raise GenerationError(
            f"{type(model).__name__} does not attend by flexops' attention in all of its layers"
        )
    store.lengths.add_(new)
    found: Tensor = output.logits
    return found


@contextlib.contextmanager
def untracked() -> Iterator[None]:
    """Without gradients, and without tensors that only inference mode can change."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, Python collects no garbage: the end of another graph makes a capture fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _graph(generator: torch.Generator | None) -> Any:
    """One that is not captured yet."""
    made = torch.cuda.CUDAGraph()
    if generator is not None:
        made.register_generator_state(generator)
    return made


class Graph:
    """A captured function of tensors that stay where they are.

    Args:
        function: what is captured; it returns tensors, which each replay writes again.
        state: small tensors that it changes; capture leaves them as they are.
        generator: what it draws from; None: the device's default.

    The function runs once before: kernels are compiled, and libraries get their memory.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        state: tuple[Tensor, ...],
        *,
        pool: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        device = state[0].device
        before = [one.clone() for one in state]
        draws = torch.cuda.default_generators[device.index] if generator is None else generator
        drawn = draws.get_state()
        self._graph = _graph(generator)
        with _capturing, torch.cuda.device(device):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            try:
                with torch.cuda.stream(side):
                    function()
                    for one, kept in zip(state, before, strict=True):
                        one.copy_(kept)
            finally:
                torch.cuda.current_stream(device).wait_stream(side)
            options: Any = {"stream": side, "capture_error_mode": "thread_local"}
            try:
                with _uncollected(), torch.cuda.graph(self._graph, pool=pool, **options):
                    self.result = function()
            except BaseException:
                # torch takes generators for captured until the end of a capture that succeeds
                with contextlib.suppress(RuntimeError), torch.cuda.graph(_graph(generator)):
                    before[0].clone()
                draws.set_state(drawn)
                raise
        draws.set_state(drawn)

    def replay(self) -> Any:
        self._graph.replay()
        return self.result
