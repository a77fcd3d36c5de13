"""How far operators are off their references, for ``flexops doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .._torch import TorchDispatchMode, tree_leaves
from . import _register

_HALVES = (torch.float16, torch.bfloat16)


class OnReference(TorchDispatchMode):
    """Inside, operators of flexops run their references, backward passes included."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _register.references.get(func.name(), func)(*args, **(kwargs or {}))


class Draw:
    """Random numbers, the same on every device: ``draw(3, 4)`` are normal ones.

    Args:
        device: where they go.
        wide: whether numbers that were rounded to 16 bits are float32 afterwards.
    """

    def __init__(self, device: str, wide: bool) -> None:
        self.device, self.wide = torch.device(device), wide
        self.generator = torch.Generator().manual_seed(0)

    def __call__(
        self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        x = (torch.randn(shape, generator=self.generator) * scale).to(self.device, dtype)
        return x.float() if self.wide else x

    def uniform(self, *shape: int, most: float = 1.0) -> Tensor:
        """Between 0 and ``most``."""
        return (torch.rand(shape, generator=self.generator) * most).to(self.device)

    def integers(self, most: int, *shape: int) -> Tensor:
        """From 0 on, less than ``most``."""
        return torch.randint(most, shape, generator=self.generator).to(self.device)


def checking(
    of_halves: float = 1.0, wide: bool = False
) -> Callable[[Callable[[Draw], Any]], Callable[[str], float]]:
    """Makes a family's ``self_check`` of a function that calls its operators, and gives what they
    return and write. It runs twice on the same numbers: by whatever kernels calls on the device
    reach, and by the references.

    Args:
        of_halves: what differences of 16-bit results are multiplied by: bfloat16 rounds numbers of
            size 1 by more than a wrong formula has to show as in float32.
        wide: references compute in float32 what operators compute in 16 bits.
    """

    def check_of(results: Callable[[Draw], Any]) -> Callable[[str], float]:
        def self_check(device: str) -> float:
            """The largest difference of the results on ``device`` from the references'."""
            found = []
            for mode in (nullcontext(), OnReference()):
                with torch.no_grad(), mode:
                    made = results(Draw(device, wide and isinstance(mode, OnReference)))
                found.append([one for one in tree_leaves(made) if isinstance(one, Tensor)])
            return difference(*found, of_halves=of_halves)

        return self_check

    return check_of


def difference(
    actual: Iterable[Tensor], expected: Iterable[Tensor], *, of_halves: float = 1.0
) -> float:
    """The largest absolute difference of tensors that correspond, of equal shapes; NaN if there is
    one, which Python's ``max`` may pass over. Those of 16 bits count ``of_halves`` times."""
    found = []
    for one, other in zip(actual, expected, strict=True):
        largest = (one.float() - other.float()).abs().max()
        found.append(largest * of_halves if one.dtype in _HALVES else largest)
    return float(torch.stack(found).max())
