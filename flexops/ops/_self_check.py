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
        return (_register.reference_of(func.name()) or func)(*args, **(kwargs or {}))


class Make:
    """Draws inputs: ``make(4, 8)`` is normal, of the dtype and on the device that are tested, the
    same numbers on every device."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: str,
        *,
        seed: int = 0,
        in_place: bool = False,
        wide: bool = False,
    ) -> None:
        self.dtype, self.device = dtype, device
        # tensors of gigabytes are made where they are needed, without an intermediate
        self._place = device if in_place else "cpu"
        self.generator = torch.Generator(self._place).manual_seed(seed)
        self._wide = wide  # what was rounded to 16 bits is float32 afterwards

    def __call__(
        self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        dtype = dtype or self.dtype
        if self._place != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device).normal_(
                shift, scale, generator=self.generator
            )
        x = torch.randn(shape, generator=self.generator) * scale + shift
        x = x.to(dtype).to(self.device)
        return x.float() if self._wide else x

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        made = torch.rand(shape, generator=self.generator, device=self._place)
        return made.mul_(high - low).add_(low).to(dtype or self.dtype).to(self.device)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        made = torch.randint(low, high, shape, generator=self.generator, device=self._place)
        return made.to(dtype).to(self.device)

    def booleans(self, *shape: int, likely: float = 0.5) -> Tensor:
        made = torch.rand(shape, generator=self.generator, device=self._place)
        return (made < likely).to(self.device)


def checking(
    of_halves: float = 1.0, wide: bool = False
) -> Callable[[Callable[[Make], Any]], Callable[[str], float]]:
    """Makes a family's ``self_check`` of a function that calls its operators, and gives what they
    return and write. It runs twice on the same numbers: by whatever kernels calls on the device
    reach, and by the references.

    Args:
        of_halves: what differences of 16-bit results are multiplied by: bfloat16 rounds numbers of
            size 1 by more than a wrong formula has to show as in float32.
        wide: references compute in float32 what operators compute in 16 bits.
    """

    def check_of(results: Callable[[Make], Any]) -> Callable[[str], float]:
        def self_check(device: str) -> float:
            """The largest difference of the results on ``device`` from the references'."""
            found = []
            for mode in (nullcontext(), OnReference()):
                with torch.no_grad(), mode:
                    made = results(
                        Make(torch.float32, device, wide=wide and isinstance(mode, OnReference))
                    )
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
