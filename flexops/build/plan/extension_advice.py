"""What would make a user's extension build faster, in one line: said when it was built and took
long."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ...toolchain.probe import read_text
from ..describe.cpp_text import included, own_headers
from . import search
from .extension_plan import Request
from .plan import BuildPlan

WORTH_SECONDS = 10.0
"""A build that took less needs no advice."""
PAGE = "docs/splitting.md"

_WHOLE_TORCH = re.compile(
    r"(?:torch/(?:extension|torch|all|types|script|library)|ATen/ATen|torch/csrc/.+)\.h"
)


def split_device_code(
    plan: BuildPlan, request: Request, seconds: float, *, without_nvcc: bool
) -> str:
    """The line that says how to split CUDA sources which read torch's headers; "" if none does, or
    the build was quick.

    nvcc reads a source three times and more: once for the host, once for each architecture, and
    once to bring both together.

    Args:
        without_nvcc: flexops can split them automatically.
    """
    found = list(torch_in_device_code(plan, request)) if seconds >= WORTH_SECONDS else []
    if not found:
        return ""
    names = ", ".join(sorted({os.path.basename(source) for source, _ in found}))
    headers = ", ".join(sorted({header for _, header in found}))
    passes = f"{2 + max(1, len(plan.architectures))} times"
    advice = (
        f"extension {request.name} took {seconds:.0f} s to build: nvcc reads {headers} {passes} for"
        f" {names}. "
    )
    if without_nvcc:
        return (
            f'{advice}device_compiler="nvrtc" (or FLEXOPS_DEVICE_COMPILER=nvrtc) reads them once,'
            f" and not at all after an edit of a kernel ({PAGE})"
        )
    return (
        f"{advice}Kernels alone in the .cu, torch in a .cpp beside it: they are read once, and not"
        f" at all after an edit of a kernel ({PAGE})"
    )


def torch_in_device_code(plan: BuildPlan, request: Request) -> Iterator[tuple[str, str]]:
    """CUDA sources, with the header by which each reaches all of torch: its own include or one of
    the user's headers'."""
    for source in (step.inputs[0] for step in plan.steps if step.kind == "device"):
        text, folder = search.text_of(plan, source)
        for one in (text, *map(read_text, own_headers(text, folder, request.include_dirs))):
            if header := next(filter(_WHOLE_TORCH.fullmatch, included(one)), ""):
                yield source, header
                break
