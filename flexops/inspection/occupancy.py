"""How many warps of a kernel a multiprocessor holds: the arithmetic of CUDA's occupancy
calculator."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from .. import _toml
from ..compute_capability import ComputeCapability

REGISTERS, REGISTER_UNIT, WARP = 65536, 256, 32
_DATA = Path(__file__).with_suffix(".toml")


class Multiprocessor(NamedTuple):
    """Threads and blocks at once, and bytes of shared memory: in all, and what each block takes
    beside its own."""

    threads: int
    blocks: int
    shared: int
    reserved: int


@functools.cache
def multiprocessors() -> dict[str, Multiprocessor]:
    """By compute capability; the newest are missing until they are certain."""
    return {
        name: Multiprocessor(
            row["threads"], row["blocks"], row["shared"] * 1024, row["reserved"] * 1024
        )
        for name, row in _toml.load(_DATA).items()
    }


def occupancy(
    capability: ComputeCapability, registers: int, shared: int, threads: int
) -> float | None:
    """Resident warps as a fraction of what a multiprocessor can hold; None where that is not known.

    Args:
        registers: of a thread.
        shared: bytes of a block, static and dynamic.
        threads: of a block.
    """
    known = multiprocessors().get(str(capability.base))
    if known is None or threads <= 0:
        return None
    warps = -(-threads // WARP)
    of_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    # warps are dealt out to four partitions
    by_registers = REGISTERS // of_warp // 4 * 4 // warps if of_warp else known.blocks
    by_shared = (
        known.shared // (shared + known.reserved) if shared + known.reserved else known.blocks
    )
    blocks = min(known.blocks, known.threads // (warps * WARP), by_registers, by_shared)
    return blocks * warps * WARP / known.threads
