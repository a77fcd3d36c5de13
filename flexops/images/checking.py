"""Checking an image: doctor in it under different circumstances, its labels and contents against the matrix, its layers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..doctor.finding import Finding, Status, fail, ok, worst
from ..errors import ImageError
from ..targets import Target
from ..targets.image_files import LABEL_PREFIX, build_args
from .facts import ImageFacts
from .judgement import judge, judge_labels
from .naming import STAGE_LABEL
from .running import create

if TYPE_CHECKING:
    from docker import DockerClient

TRIALS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("plain", {}),
    ("as root", {"user": "0:0"}),
    ("as an arbitrary user", {"user": "43210:54321"}),
    ("read-only", {"read_only": True, "tmpfs": {"/cache": "exec,mode=1777"}}),
    ("without network", {"network_mode": "none"}),
)
"""The circumstances that doctor has to work in, as options of the SDK."""

_SECONDS = 600


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


def check(client: DockerClient, row: Target, name: str, options: Mapping[str, Any] | None = None) -> Checked:
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
        raise ImageError(f"there is no image {name}", fix=f"flexops image build {row.id}") from error
    common = dict(options or {})
    labels = image.labels
    findings = [*judge_labels(row, labels), *_contents(client, row, name, labels, common)]
    findings += [_trial(client, row, name, what, {**common, **circumstances}) for what, circumstances in TRIALS]
    return Checked(row.id, name, tuple(findings), tuple(layers(image.history())), int(image.attrs["Size"]))


def _contents(client: DockerClient, row: Target, name: str, labels: Mapping[str, str], options: Mapping[str, Any]) -> Iterator[Finding]:
    command = ["python", "-m", "flexops.images.inside", "facts"]
    code, out, err, _ = _run(client, row, name, command, options)
    if code:
        yield fail("contents", _last(err) or f"exit code {code}", "an image that can say what is in it", f"flexops image build {row.id}")
        return
    args = build_args(row)
    own_base = labels.get("org.opencontainers.image.base.name") == args["RUNTIME_BASE"] and labels.get(LABEL_PREFIX + "build-base") == args["BUILD_BASE"]
    yield from judge(row, ImageFacts.from_dict(json.loads(out)), strict_base=own_base, runtime=labels.get(STAGE_LABEL) != "dev")


def _trial(client: DockerClient, row: Target, name: str, what: str, options: Mapping[str, Any]) -> Finding:
    """Doctor, as the default command runs it, under these circumstances."""
    code, out, err, seconds = _run(client, row, name, ["doctor", "--json"], options)
    identifier = "doctor-" + what.replace(" ", "-")
    try:
        report = json.loads(out)
    except ValueError:
        return fail(identifier, f"no report: {_last(err) or f'exit code {code}'}", "doctor's report", f"docker run --rm {name}")
    faults = [f"{one['id']}: {one['found']}" for section in report.get("sections", []) for one in section["findings"] if one["status"] == "fail"]
    if code or faults:
        return fail(identifier, "; ".join(faults) or f"exit code {code}", "a report without faults", f"docker run --rm {name}")
    return ok(identifier, f"{report.get('status', 'ok')}, in {seconds:.1f} s")


def _run(client: DockerClient, row: Target, name: str, command: Sequence[str], options: Mapping[str, Any]) -> tuple[int, str, str, float]:
    """Exit code, output, errors and seconds of a container."""
    from docker.errors import APIError

    container = create(client, row, name, command, options)
    started = time.monotonic()
    try:
        container.start()
        code = int(container.wait(timeout=_SECONDS)["StatusCode"])
        seconds = time.monotonic() - started
        out, err = (container.logs(stdout=stdout, stderr=not stdout).decode(errors="replace") for stdout in (True, False))
        return code, out, err, seconds
    except APIError as error:
        raise ImageError(f"{name} cannot be run", found=str(error.explanation), fix="docker info") from error
    finally:
        container.remove(force=True)


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def layers(history: Sequence[Mapping[str, Any]]) -> Iterator[Layer]:
    """The layers that hold something, from the base up."""
    for entry in reversed(history):
        if entry["Size"]:
            text = re.sub(r"^/bin/sh -c (#\(nop\) )?|^\|\d+ .*?/bin/sh -c ", "", entry.get("CreatedBy") or entry.get("Comment") or "(base)")
            yield Layer(int(entry["Size"]), " ".join(text.split())[:120])
