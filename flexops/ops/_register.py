"""How an op is registered with torch, once for all of them.

Python defines the schema, the fake kernel and the reference; a native library only adds kernels for ``CPU`` or ``CUDA``, and the dispatcher
prefers those. The reference is what asks the loader for that library, the first time it is reached on a device. So nothing but the dispatcher
chooses between native and reference, and once the library is loaded a call costs no Python of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..op_builder import loader

NAMESPACE = "flexops"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def define(
    family: str,
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,),
) -> None:
    """Define ``torch.ops.flexops.<name>``.

    Args:
        family: the op's name in the catalogue: which native library implements it.
        schema: ``name(arguments) -> results``, without the namespace.
        reference: plain PyTorch with the schema's arguments; must not alias its inputs unless the schema says so.
        fake: gives the results' shapes, dtypes and devices from fake tensors.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, _loading(family, name, reference), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _loading(family: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference, preceded by the search for something better."""
    qualified = f"{NAMESPACE}::{name}"

    @functools.wraps(reference)
    def entry(*args: Any, **kwargs: Any) -> Any:
        device = next((tensor.device.type for tensor in _tensors((args, kwargs))), "cpu")
        if loader.ensure(family, device) and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, _DISPATCH_KEYS[device]):
            return getattr(getattr(torch.ops, NAMESPACE), name)(*args, **kwargs)
        return reference(*args, **kwargs)

    return entry


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
