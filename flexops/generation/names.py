"""What a release of transformers calls a model's cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

CACHES = ("cache", "past_key_values")
"""Names of a model's argument for the cache: from transformers 5.24 on, and before."""


@functools.cache
def cache_name() -> str:
    """Of the argument, and of the field of the model's output."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    fields = CausalLMOutputWithPast.__dataclass_fields__
    return next(name for name in CACHES if name in fields)


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments, or None."""
    cache = kwargs.get(CACHES[0])
    return kwargs.get(CACHES[1]) if cache is None else cache
