"""What CUDA allows of a launch, on every GPU: decided before the driver is called where grid and
block are constants, and explained after it failed where they are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = (1024, 1024, 64)
MOST_THREADS_OF_BLOCK = 1024


def launch_error(
    grid: Sequence[int] | None, block: Sequence[int] | None, bounds: str = ""
) -> tuple[str, str]:
    """What of a launch no GPU accepts, and what is required; two empty texts if nothing.

    Args:
        grid, block: three numbers each; None for what is not known yet.
        bounds: the threads in the kernel's ``__launch_bounds__``, as text.
    """
    for what, sizes, most in (("grid", grid, MOST_BLOCKS), ("block", block, MOST_THREADS)):
        for axis, size, limit in zip("xyz", sizes or (), most, strict=False):
            least = 0 if what == "grid" else 1  # nothing is launched for no blocks
            if not least <= size <= limit:
                return f"{what} {tuple(sizes or ())}", f"{what} {axis} from {least} to {limit}"
    if block and math.prod(block) > MOST_THREADS_OF_BLOCK:
        found = f"block {tuple(block)}, which is {math.prod(block)} threads"
        return found, f"at most {MOST_THREADS_OF_BLOCK} threads in a block"
    if block and bounds.isdecimal() and math.prod(block) > int(bounds):
        found = f"block {tuple(block)}, which is {math.prod(block)} threads"
        return found, f"at most {bounds}, as the kernel's __launch_bounds__({bounds}) says"
    return "", ""
