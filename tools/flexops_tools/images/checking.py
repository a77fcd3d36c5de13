"""Checking an image: doctor in it under different circumstances, its labels and contents against
the matrix, its layers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexops.doctor.finding import Finding, Status, fail, worst
from flexops.errors import ImageError
from flexops.targets import Target

from ..targets.image_files import BASES, LABEL_PREFIX, build_args
from .contents import ImageFacts, judge
from .labels import judge_labels, judge_report
from .naming import STAGE_LABEL, build_command
from .running import facts_command, run_quietly

if TYPE_CHECKING:
    from docker import DockerClient

TRIALS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("plain", "", {}),
    ("as-root", "--user 0:0", {"user": "0:0"}),
    ("as-an-arbitrary-user", "--user 43210:54321", {"user": "43210:54321"}),
    (
        "read-only",
        "--read-only --tmpfs /cache:exec,mode=1777",
        {"read_only": True, "tmpfs": {"/cache": "exec,mode=1777"}},
    ),
    ("without-network", "--network none", {"network_mode": "none"}),
)
"""The circumstances that doctor has to work in, as words for docker and as options of the SDK."""


@dataclass(frozen=True)
class Layer:
    """One layer of an image: its size, and the instruction that made it."""

    size: int
    made_by: str


@dataclass(frozen=True)
class Checked:
    """Everything found about an image."""

    target: str
    reference: str
    findings: tuple[Finding, ...]
    layers: tuple[Layer, ...]
    size: int

    @property
    def status(self) -> Status:
        return worst(self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "image": self.reference,
            "status": self.status,
            "size": self.size,
            "layers": [{"size": layer.size, "made_by": layer.made_by} for layer in self.layers],
            "findings": [one.as_dict() for one in self.findings],
        }


def check(
    client: DockerClient, row: Target, name: str, options: Mapping[str, Any] | None = None
) -> Checked:
    """Check one image.

    Args:
        options: for every container, GPUs for example.

    Raises:
        ImageError: there is no such image, or the engine does not run it.
    """
    from docker.errors import ImageNotFound

    try:
        image = client.images.get(name)
    except ImageNotFound as error:
        raise ImageError(f"there is no image {name}", fix=build_command(row.id, name)) from error
    common = dict(options or {})
    known = _facts(client, row, name, common)
    findings = [*judge_labels(row, image.labels, known), *_contents(row, image.labels, known)]
    findings += [
        _trial(client, row, name, what, words, {**common, **circumstances})
        for what, words, circumstances in TRIALS
    ]
    return Checked(
        row.id, name, tuple(findings), tuple(layers(image.history())), int(image.attrs["Size"])
    )


def _facts(
    client: DockerClient, row: Target, name: str, options: Mapping[str, Any]
) -> ImageFacts | str:
    """What the image reports about its contents, or why it reports nothing."""
    code, out, err, _ = run_quietly(client, row, name, facts_command(), options)
    try:
        return _last(err) or f"exit code {code}" if code else ImageFacts.from_dict(json.loads(out))
    except (ValueError, TypeError, KeyError):
        return "its flexops is of another version than this one"


def _contents(row: Target, labels: Mapping[str, str], known: ImageFacts | str) -> Iterator[Finding]:
    if isinstance(known, str):
        yield fail(
            "contents",
            known,
            "an image that can say what is in it",
            f"flexops image build {row.id}",
        )
        return
    args = build_args(row)
    stage = labels.get(STAGE_LABEL, "runtime")
    own_base = (
        labels.get("org.opencontainers.image.base.name") == args[BASES[stage]]
        and labels.get(LABEL_PREFIX + "build-base") == args["BUILD_BASE"]
    )
    yield from judge(row, known, strict_base=own_base, runtime=stage != "dev")


def _trial(
    client: DockerClient, row: Target, name: str, what: str, words: str, options: Mapping[str, Any]
) -> Finding:
    """Doctor, as the default command runs it, under these circumstances."""
    code, out, err, seconds = run_quietly(client, row, name, ["doctor", "--json"], options)
    command = " ".join(["docker run --rm", *words.split(), name])
    try:
        return judge_report(f"doctor-{what}", json.loads(out), code, seconds, command)
    except ValueError:
        return fail(
            f"doctor-{what}",
            f"no report: {_last(err) or f'exit code {code}'}",
            "doctor's report",
            command,
        )


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def layers(history: Sequence[Mapping[str, Any]]) -> Iterator[Layer]:
    """The layers that hold something, from the base up."""
    for entry in reversed(history):
        if entry["Size"]:
            text = re.sub(
                r"^/bin/sh -c (#\(nop\) )?|^\|\d+ .*?/bin/sh -c ",
                "",
                entry.get("CreatedBy") or entry.get("Comment") or "(base)",
            )
            yield Layer(int(entry["Size"]), " ".join(text.split())[:120])
