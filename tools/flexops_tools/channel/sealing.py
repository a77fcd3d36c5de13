"""Packages that are the same bytes whenever, wherever and by whomever they are built from the same
inputs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from flexops.errors import SettingsError

INPUTS = ("csrc", "flexops", "recipe", "pyproject.toml", "setup.py", "README.md", "LICENSE")
_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The first moment that a zip archive can record."""
_LEVEL = 19


def source_date(root: Path) -> int:
    """Seconds since the epoch that all of a package is dated with: ``SOURCE_DATE_EPOCH``, else the
    checkout's commit, else the newest input.

    Raises:
        SettingsError: ``SOURCE_DATE_EPOCH`` is no such number.
    """
    if given := os.environ.get("SOURCE_DATE_EPOCH", "").strip():
        if not (given.isascii() and given.isdigit() and len(given) <= 10):
            raise SettingsError(
                "SOURCE_DATE_EPOCH is not a time",
                found=given,
                required="seconds since 1970",
                fix="unset SOURCE_DATE_EPOCH",
            )
        return int(given)
    try:
        command = ["git", "-C", str(root), "log", "-1", "--format=%ct", "--", *INPUTS]
        committed = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        committed = ""
    return (
        int(committed)
        if committed.isdigit()
        else max((int(path.stat().st_mtime) for path in _inputs(root)), default=0)
    )


def seal(package: Path, target: Path, date: int, work: Path) -> None:
    """Write ``package`` (a ``.conda`` file) to ``target`` with what depends on this build taken
    out: times, users, umask, folders of this machine.

    What the build tools write is dated by the clock, and no setting of theirs changes that. Takes
    the bindings and zstandard.
    """
    from rattler.package_streaming import extract

    with tempfile.TemporaryDirectory(dir=work) as folder:
        root = Path(folder, package.name.removesuffix(".conda"))
        extract(package, root)
        # Requirements that were exported come in any order.
        _edit(
            root / "info" / "index.json",
            lambda data: {
                **data,
                "timestamp": date * 1000,
                "depends": sorted(data.get("depends", [])),
            },
        )
        _edit(
            root / "info" / "about.json",
            lambda data: {
                **data,
                "channels": [
                    one for one in data.get("channels", ()) if not one.startswith("file:")
                ],
            },
        )
        pack(root, target, root.name, date)


def pack(root: Path, target: Path, name: str, date: int) -> None:
    """Write the package called ``name`` whose files are in ``root``: the same bytes for the same
    files."""
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr(
            zipfile.ZipInfo("metadata.json", _EARLIEST), '{"conda_pkg_format_version":2}'
        )
        for part in ("pkg", "info"):
            files = (
                path
                for path in _files(root)
                if (path.relative_to(root).parts[0] == "info") == (part == "info")
            )
            with archive.open(
                zipfile.ZipInfo(f"{part}-{name}.tar.zst", _EARLIEST), "w", force_zip64=True
            ) as stream:
                _pack(root, files, date, stream)


def sha256(path: Path) -> str:
    """Of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _pack(root: Path, files: Iterator[Path], date: int, stream: IO[bytes]) -> None:
    import zstandard

    with (
        zstandard.ZstdCompressor(level=_LEVEL).stream_writer(stream, closefd=False) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as tar,
    ):
        for path in files:
            entry = tar.gettarinfo(path, str(path.relative_to(root)))
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = date, 0, 0, "", ""
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            if entry.isreg():
                with path.open("rb") as content:
                    tar.addfile(entry, content)
            else:
                tar.addfile(entry)


def _edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(
        json.dumps(change(json.loads(path.read_text(encoding="utf-8"))), indent=2, sort_keys=True),
        encoding="utf-8",
    )


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file())


def _inputs(root: Path) -> Iterator[Path]:
    for name in INPUTS:
        yield from (
            path
            for path in (root / name, *(root / name).rglob("*"))
            if path.is_file() and not {"__pycache__", "_aot"} & set(path.parts)
        )
