"""The images that the engine has, beside the rows of the matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flexops.targets import Matrix

from .engine import connect
from .naming import STAGE_LABEL, TARGET_LABEL


@dataclass(frozen=True)
class Local:
    """An image that the engine has; all but ``target`` empty for a row that has none."""

    target: str
    reference: str = ""
    stage: str = ""
    size: int = 0
    created: str = ""
    revision: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspected() -> list[dict[str, Any]]:
    """What the engine says about each image that carries a target's label. Raises ``ImageError`` if
    it does not answer."""
    return [image.attrs for image in connect().images.list(filters={"label": TARGET_LABEL})]


def listing(images: Iterable[Mapping[str, Any]], matrix: Matrix) -> tuple[Local, ...]:
    """Every row with its images, in the matrix's order; then images of targets that the matrix no
    longer has."""
    found = [one for image in images for one in _local(image)]
    unknown = sorted({one.target for one in found} - set(matrix.ids))
    rows: list[Local] = []
    for target_id in (*matrix.ids, *unknown):
        own = sorted(
            (one for one in found if one.target == target_id), key=lambda one: one.reference
        )
        rows += own or [Local(target_id)]
    return tuple(rows)


def _local(image: Mapping[str, Any]) -> list[Local]:
    labels = image["Config"]["Labels"]
    common = (
        labels.get(STAGE_LABEL, ""),
        int(image["Size"]),
        image.get("Created", "")[:19],
        labels.get("org.opencontainers.image.revision", ""),
    )
    return [Local(labels[TARGET_LABEL], name, *common) for name in image.get("RepoTags") or ()]
