"""Choices among a kernel's candidates, as artifacts: measured on one machine, and exported, shared
and signed as libraries are."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ...errors import FlexopsError
from ..describe.spec import FLEXOPS
from .entry import Entry, read_entry
from .manifest import Manifest, file_crc32

if TYPE_CHECKING:
    from .cache import BuildCache

_FILE = "choice.json"


def read(cache: BuildCache, name: str, key: str) -> str:
    """The text of a choice: of the folder that is compiled ahead of time, the cache or the remote
    one; "" if there is none."""
    entry, _ = read_entry(FLEXOPS.aot / name)
    if entry is None and not cache.problem():
        entry = cache.read(name, key) or cache.fetch_key(name, key)
    return entry.library.read_text() if entry and entry.manifest.key == key else ""


def write(cache: BuildCache, name: str, key: str, text: str) -> Entry | None:
    """Store a choice, also in the remote cache; None where nothing can be stored."""
    with contextlib.suppress(FlexopsError), cache.workspace() as workspace:
        directory = workspace / "choice"
        directory.mkdir()
        file = directory / _FILE
        file.write_text(text)
        size, digest = file.stat().st_size, file_crc32(file)
        entry = cache.store(directory, Manifest(name, key, key, "cuda", _FILE, size, digest, ""))
        if cache.remote:
            cache.remote.publish(cache, entry)
        return entry
    return None
