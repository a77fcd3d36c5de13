"""Which rows are meant, and what their images are called."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

from flexops.errors import ImageError
from flexops.targets import Matrix, Target

from ..targets.image_files import LABEL_PREFIX

Stage = Literal["runtime", "dev"]
STAGES: tuple[Stage, ...] = get_args(Stage)

REPOSITORY = "flexops"
TARGET_LABEL = LABEL_PREFIX + "target"
STAGE_LABEL = LABEL_PREFIX + "stage"


def stage(name: str) -> Stage:
    """The stage called that; raises ``ImageError``."""
    for known in STAGES:
        if known == name:
            return known
    raise ImageError(
        f"there is no stage {name!r}", required=" | ".join(STAGES), fix="--stage runtime"
    )


def select(matrix: Matrix, patterns: Sequence[str]) -> tuple[Target, ...]:
    """The rows that ids and globs (``cu130-*``, ``all``) name, in the matrix's order; raises
    ``TargetError`` for one that names none."""
    wanted: set[str] = set()
    for pattern in patterns:
        matching = {name for name in matrix.ids if pattern == "all" or fnmatchcase(name, pattern)}
        wanted |= matching or {matrix.find(pattern).id}
    return tuple(target for target in matrix.targets if target.id in wanted)


def reference(
    target_id: str, stage: Stage, tag: str | None = None, *, several: bool = False
) -> str:
    """The image's name: ``flexops:cu130-sm90``, or ``-dev`` for that stage.

    Args:
        tag: what ``--tag`` says: a whole reference, or a repository, to which the usual tag is
            added.
        several: more than one image is built, so a whole reference cannot be meant.
    """
    usual = target_id if stage == "runtime" else f"{target_id}-{stage}"
    if not tag:
        return f"{REPOSITORY}:{usual}"
    if ":" not in tag.rpartition("/")[2]:
        return f"{tag}:{usual}"
    if several:
        raise ImageError(
            "one --tag cannot name several images",
            found=tag,
            required="a repository without a tag",
            fix=f"--tag {tag.rpartition(':')[0]}",
        )
    return tag


def build_command(target_id: str, name: str) -> str:
    """The command that makes the image of that name."""
    for stage in STAGES:
        if name == reference(target_id, stage):
            return f"flexops image build {target_id}" + (
                "" if stage == "runtime" else f" --stage {stage}"
            )
    return f"flexops image build {target_id} --tag {name}"


def kernels(target_id: str) -> str:
    """The image that keeps the libraries of a row's last build, so that the next one compiles only
    what has changed."""
    return f"{REPOSITORY}-kernels:{target_id}"


def split(name: str) -> tuple[str, str]:
    """Repository and tag."""
    head, colon, tag = name.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (name, "latest")
