"""What an image reports about itself: ``python -m flexops.doctor.image.inside facts`` or
``check TARGET``; both print JSON.

``check`` is a stage of the build: it fails if the image is not what the row of the matrix asks for.
It needs the standard library and flexops only.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ... import __version__, distribution, targets, toolchain
from ...build.describe import layout
from ...build.store import manifest
from ...build.store.cache import read_entry
from ..examination import examine
from ..finding import DoctorReport, Finding, fail, ok, worst
from .facts import ImageFacts, Library
from .judgement import judge

_COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "hipcc", "ccache")
_BUILD_PLACES = (
    "/opt/wheelhouse",
    "/opt/toolkit",
    "/opt/build",
    "/opt/kernels",
    "/opt/ccache",
    "/usr/local/cuda",
    "/opt/docker/ca-certificates",
)
_PIP_SETTINGS = (
    "/etc/pip.conf",
    "/etc/xdg/pip/pip.conf",
    "/opt/flexops/pip.conf",
    "~/.pip/pip.conf",
    "~/.config/pip/pip.conf",
)


def facts() -> ImageFacts:
    """Versions, libraries, sizes and left-overs of the image that this runs in."""
    torch = toolchain.torch_build()
    return ImageFacts(
        python=".".join(map(str, sys.version_info[:3])),
        packages={
            dist.metadata["Name"].lower(): dist.version
            for dist in importlib.metadata.distributions()
        },
        torch_cuda=(torch.cuda or "") if torch else "",
        torch_hip=(torch.hip or "") if torch else "",
        libraries=tuple(_libraries(torch)),
        compilers=tuple(name for name in _COMPILERS if shutil.which(name)),
        leftovers=tuple(_leftovers()),
        added_bytes=sum(map(_size, _own_packages())),
        flexops=__version__,
    )


def _libraries(torch: Any) -> Iterable[Library]:
    root = layout.aot_root()
    for directory in sorted(root.iterdir()) if root.is_dir() else ():
        entry, damage = read_entry(directory)
        if entry is None:
            yield Library(directory.name, refusal=damage.reason if damage else "no library")
            continue
        # device code, which the driver opens, and no torch; the library's manifest says what it is
        # for
        if entry.manifest.kernel:
            continue
        refusal = manifest.judge(entry.manifest, torch) if torch else None
        known = entry.manifest
        yield Library(
            directory.name,
            known.device,
            known.cuda_version,
            tuple(known.architectures),
            known.glibc,
            known.glibcxx,
            refusal.reason if refusal else "",
            str(entry.library),
        )


def _leftovers() -> Iterable[str]:
    """What the build used and no user should see: its places, and settings of package
    indexes."""
    yield from (
        place
        for place in (*_BUILD_PLACES, *_PIP_SETTINGS)
        if os.path.exists(os.path.expanduser(place))
    )
    yield from (
        name
        for name in os.environ
        if name.startswith("PIP_") or name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    )


def _own_packages() -> set[str]:
    """flexops and what it needs, without torch and what torch needs."""
    return _closure(distribution.NAME, stop="torch") - _closure("torch")


def _closure(name: str, stop: str = "") -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        one = re.split(r"[^A-Za-z0-9._-]", ahead.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if one in found or one == stop:
            continue
        try:
            requirements = importlib.metadata.requires(one) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(one)
        ahead += [requirement for requirement in requirements if "extra ==" not in requirement]
    return found


def _size(name: str) -> int:
    files = importlib.metadata.files(name) or []
    return sum(
        path.stat().st_size
        for path in {Path(str(file.locate())) for file in files}
        if path.is_file()
    )


def check(target_id: str) -> tuple[DoctorReport, list[Finding], ImageFacts]:
    """Doctor's report, the judgement of the image, and the facts; every library is opened, which
    needs no GPU."""
    row = targets.load().find(target_id)
    known = facts()
    return examine(target_id), [*judge(row, known, strict_base=False), *_opened(known)], known


def _opened(known: ImageFacts) -> Iterable[Finding]:
    """Each library for a GPU, opened by torch in this process, which needs none; those for the CPU
    doctor has opened, and run."""
    libraries = [library for library in known.libraries if library.device != "cpu" and library.path]
    if not libraries:
        return
    import torch

    from ... import ops as _ops  # noqa: F401  (defines what the libraries implement)

    for library in libraries:
        try:
            torch.ops.load_library(library.path)  # type: ignore[no-untyped-call, unused-ignore]
            yield ok(f"open-{library.name}", library.path)
        except (OSError, RuntimeError) as error:
            yield fail(
                f"open-{library.name}",
                str(error),
                "a library that torch can open",
                "flexops image build --no-cache <target>",
            )


def main(arguments: list[str]) -> int:
    """``facts`` | ``check TARGET``. Returns 1 if the check found a fault, which goes to standard
    error for the build's log."""
    if arguments[0] == "facts":
        print(json.dumps(facts().as_dict(), indent=1))
        return 0
    report, findings, known = check(arguments[1])
    found = [*findings, *report.findings]
    print(
        json.dumps(
            {
                "target": arguments[1],
                "status": worst(found),
                "findings": [one.as_dict() for one in found],
                "image": known.as_dict(),
            },
            indent=1,
        )
    )
    faults = [one for one in found if one.status == "fail"]
    for one in faults:
        print(
            f"flexops: the image is not in order: {one.id}: {one.found}\n  required:"
            f" {one.required}\n  fix: {one.fix}",
            file=sys.stderr,
        )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
