"""What cases are made for: a device, and the sizes that suit it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COMPILE = "torch.compile"

Function = Callable[..., Any]
Functions = Mapping[str, Function]


@dataclass(frozen=True)
class Setup:
    """What cases are made for.

    Attributes:
        device: ``cpu`` or ``cuda``.
        small: a quick look with smaller tensors.
        compile: torch.compile's mode, or "" to leave it out.
    """

    device: str
    small: bool = False
    compile: str = ""

    def rows(self, count: int) -> int:
        """Fewer than on a GPU where memory is slow: everything stays larger than the caches, which
        are larger where there are more cores."""
        if self.device == "cpu":
            count //= 8 if torch.get_num_threads() < 8 else 2
        return count // 8 if self.small else count

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        return random(torch.Size(shape), dtype, self.device).requires_grad_(grad)

    def compiled(self, function: Function, mode: str | None = None) -> Functions:
        """``function`` under ``torch.compile``, if that is wanted."""
        return (
            {COMPILE: torch.compile(function, dynamic=False, mode=mode or self.compile)}
            if self.compile
            else {}
        )


def random(shape: torch.Size, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Normal numbers; a million of them again and again where there are more, because CPUs take
    long to make them."""
    some = torch.randn(min(shape.numel(), 2**20), device=device, dtype=dtype)
    times = -(-shape.numel() // max(some.numel(), 1))
    return some.repeat(times)[: shape.numel()].view(shape)


def default_device() -> str:
    """``cuda`` where torch has a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    """What is measured, in words."""
    return (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
