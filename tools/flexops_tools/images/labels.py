"""The labels of an image, and whether they and doctor's report are what its row asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flexops.doctor.finding import Finding, fail, ok, warn
from flexops.targets import Target

from ..targets.image_files import LABEL_PREFIX
from ..targets.image_files import labels as expected_labels
from .contents import ImageFacts, torch_build


def contents_labels(facts: ImageFacts) -> dict[str, str]:
    """The labels that say what is in an image."""
    there = {
        "python": facts.python,
        "torch": facts.packages.get("torch", ""),
        "torch-build": torch_build(facts),
        "ninja": facts.packages.get("ninja", ""),
        "toolkit": " ".join(
            sorted({library.cuda_version for library in facts.libraries if library.cuda_version})
        ),
        "arch-list": ";".join(
            dict.fromkeys(one for library in facts.libraries for one in library.architectures)
        ),
    }
    return {LABEL_PREFIX + name: value for name, value in there.items()}


def judge_labels(
    row: Target, found: Mapping[str, str], facts: ImageFacts | str
) -> Iterator[Finding]:
    """The labels against the matrix, and against what is in the image (text: why that is not
    known)."""
    rebuild = f"flexops image build {row.id}"
    inside = {} if isinstance(facts, str) else contents_labels(facts)
    wanted = {**expected_labels(row), **inside}
    wrong = {name: value for name, value in wanted.items() if found.get(name, value) != value}
    for name, value in wrong.items():
        yield fail(
            "labels",
            f"{name}={found[name]}",
            f"{value}, which is {'in the image' if name in inside else 'the row'}",
            rebuild,
        )
    if lacking := [name for name in wanted if name not in found]:
        yield warn(
            "labels",
            f"no {', '.join(lacking)}",
            "a label for each of them, which docker alone cannot give",
            rebuild,
        )
    if not wrong and not lacking:
        yield ok("labels", f"{len(wanted)}, as in the matrix and in the image")
    revision = found.get("org.opencontainers.image.revision", "unknown")
    if revision == "unknown":
        yield warn(
            "revision", "not recorded", "the source revision", f"{rebuild}   # in a git checkout"
        )
    else:
        yield ok("revision", revision)


def judge_report(
    identifier: str, report: Mapping[str, Any], code: int, seconds: float, command: str
) -> Finding:
    """Doctor's report, as its JSON has it, from a container that ``command`` shows again; what is
    wrong is named by what doctor says of it."""
    for status, make in (("fail", fail), ("warn", warn)):
        faults = [one for one in report["findings"] if one["status"] == status]
        if faults:
            found = "; ".join(f"{one['id']}: {one['found']}" for one in faults)
            return make(
                identifier,
                found,
                "; ".join(one["required"] for one in faults),
                f"{command}   # shows each with its fix",
            )
    if code:
        return fail(identifier, f"exit code {code}", "exit code 0", command)
    return ok(identifier, f"{report['status']}, in {seconds:.1f} s")
