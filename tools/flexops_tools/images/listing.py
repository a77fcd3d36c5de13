"""The images that the engine has, beside the rows of the matrix."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flexops.targets import Matrix

from .engine import NoSdk, connect, unreachable
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


def inspected() -> tuple[list[dict[str, Any]], str]:
    """What the engine says about each image that carries a target's label, as ``docker inspect``
    prints it; and why there is nothing, if it cannot be asked.

    Without the docker SDK the program ``docker`` asks. Raises ``ImageError`` if the engine does not
    answer.
    """
    try:
        return [image.attrs for image in connect().images.list(filters={"label": TARGET_LABEL})], ""
    except NoSdk as error:
        if not shutil.which("docker"):
            return (
                [],
                (
                    f"{error.what} or the program docker, to know which images there are\n  fix:"
                    f" {error.fix}"
                ),
            )
    names = _docker(
        "image", "ls", "--quiet", "--no-trunc", "--filter", f"label={TARGET_LABEL}"
    ).split()
    found: list[dict[str, Any]] = (
        json.loads(_docker("image", "inspect", *dict.fromkeys(names))) if names else []
    )
    return found, ""


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise unreachable(done.stderr.strip())
    return done.stdout


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
