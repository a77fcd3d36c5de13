"""The row of the matrix that the machine is judged against."""

from __future__ import annotations

import platform
import sys

from ..facts import GpuFact, TargetFact, Unknown


def target(asked: str | None, gpu: GpuFact | Unknown) -> TargetFact:
    """The row that was asked for, and the one that would be chosen for this machine. An unknown id
    is a fact, not an error."""
    from ... import targets
    from ...errors import TargetError
    from ...targets.detection import Machine, choose

    matrix = targets.load()
    seen = gpu if isinstance(gpu, GpuFact) else GpuFact()
    machine = Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=".".join(map(str, sys.version_info[:2])),
        driver=str(seen.driver or ""),
        capabilities=tuple(one.capability for one in seen.gpus if one.vendor == "nvidia"),
        rocm=tuple(one.capability for one in seen.gpus if one.vendor == "amd"),
    )
    detection = choose(matrix, machine)
    if asked is None:
        return TargetFact(None, None, detected=detection.target.id, reason=detection.reason)
    try:
        row = matrix.find(asked)
    except TargetError as error:
        return TargetFact(
            asked,
            None,
            (error.what, error.required, error.fix),
            detection.target.id,
            detection.reason,
        )
    return TargetFact(asked, row, detected=detection.target.id, reason=detection.reason)
