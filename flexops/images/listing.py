"""The images that the engine has, beside the rows of the matrix."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..targets import Matrix
from .naming import STAGE_LABEL, TARGET_LABEL

if TYPE_CHECKING:
    from docker import DockerClient


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


def listing(client: DockerClient, matrix: Matrix) -> tuple[Local, ...]:
    """Every row with its images, in the matrix's order; then images of targets that the matrix no longer has."""
    found = [one for image in client.images.list(filters={"label": TARGET_LABEL}) for one in _local(image)]
    unknown = sorted({one.target for one in found} - set(matrix.ids))
    rows: list[Local] = []
    for target_id in (*matrix.ids, *unknown):
        own = sorted((one for one in found if one.target == target_id), key=lambda one: one.reference)
        rows += own or [Local(target_id)]
    return tuple(rows)


def _local(image: Any) -> list[Local]:
    labels = image.labels
    common = (labels.get(STAGE_LABEL, ""), int(image.attrs["Size"]), image.attrs.get("Created", "")[:19], labels.get("org.opencontainers.image.revision", ""))
    return [Local(labels[TARGET_LABEL], name, *common) for name in image.tags]
