"""What was learned about a file, remembered for as long as that file stays the same.

Asking a compiler for its version takes a subprocess, listing ``/usr/bin`` takes half a millisecond;
a ``stat`` takes microseconds. So answers are kept beside a signature of the file (or directory)
they were got from, in ``<cache_dir>/tools.json``. It is a convenience: where it cannot be read,
written or trusted, everything still works, only slower.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import time
import zlib
from collections.abc import Callable
from typing import Any

from .. import _json, trust

SCHEMA = 1
FILE_NAME = "tools.json"
_TABLES = b',"tables":'
# a directory changed this recently may change again within one tick of its mtime
_SETTLED_NS = 2_000_000_000
_MOST_ENTRIES = 400


class Memo:
    """Answers by ``(table, path)``, each valid for one signature. Answers are JSON values."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._tables: dict[str, dict[str, list[Any]]] = _read(path) if path else {}
        self._changed = False

    def recall(
        self,
        table: str,
        path: str,
        compute: Callable[[str], Any],
        seen: os.stat_result | None = None,
    ) -> Any:
        """The answer of ``compute(path)``, remembered or got now. ``OSError`` of a missing file and
        errors of ``compute`` pass through.

        Args:
            seen: the file's ``os.stat``, if the caller has it already.
        """
        seen = seen or os.stat(path)
        entry = self._tables.get(table, {}).get(path)
        if (
            entry is not None
            and entry[0] == seen.st_size
            and entry[1] == seen.st_mtime_ns
            and entry[2] == seen.st_ino
        ):
            return entry[3]
        answer = compute(path)
        if not stat.S_ISDIR(seen.st_mode) or time.time_ns() - seen.st_mtime_ns > _SETTLED_NS:
            self._tables.setdefault(table, {})[path] = [
                seen.st_size,
                seen.st_mtime_ns,
                seen.st_ino,
                answer,
            ]
            self._changed = True
        return answer

    def save(self) -> None:
        """Write what is new, atomically; what cannot be written is not written."""
        if not self._changed or self.path is None:
            return
        self._changed = False
        try:
            tables = json.dumps(_pruned(self._tables), separators=(",", ":")).encode()
            _write(
                self.path,
                b'{"schema":%d,"crc32":"%s"%s%s}'
                % (SCHEMA, _crc32(tables).encode(), _TABLES, tables),
            )
        except OSError:
            return


@functools.cache
def for_cache_dir(cache_dir: str) -> Memo:
    """The memo of that cache directory, one in each process: signatures keep it right however long
    it lives."""
    return Memo(os.path.join(cache_dir, FILE_NAME))


def _read(path: str) -> dict[str, dict[str, list[Any]]]:
    """An answer can name a program to run, so only the user's own file (or root's) is believed, and
    only as it was written."""
    try:
        content = _json.read(path, accept=trust.problem)
        document = _json.parse(content)
    except (OSError, ValueError):
        return {}
    if (
        not isinstance(document, dict)
        or document.get("schema") != SCHEMA
        or document.get("crc32") != _crc32(content.partition(_TABLES)[2][:-1])
    ):
        return {}
    tables: dict[str, dict[str, list[Any]]] = document.get("tables", {})
    return tables if _well_formed(tables) else {}


def _crc32(tables: bytes) -> str:
    return f"{zlib.crc32(tables):08x}"


def _well_formed(tables: object) -> bool:
    return isinstance(tables, dict) and all(
        isinstance(entries, dict)
        and all(isinstance(entry, list) and len(entry) == 4 for entry in entries.values())
        for entries in tables.values()
    )


def _pruned(tables: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, list[Any]]]:
    if sum(map(len, tables.values())) <= _MOST_ENTRIES:
        return tables
    return {
        table: {path: entry for path, entry in entries.items() if os.path.exists(path)}
        for table, entries in tables.items()
    }


def _write(path: str, text: bytes) -> None:
    folder = os.path.dirname(path)
    trust.make_directory(folder, 0o700)
    if os.stat(folder).st_uid != os.getuid():
        return
    draft = f"{path}.{os.getpid()}.{time.monotonic_ns()}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        # whatever the umask says: a group-writable file would not be believed
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    finally:
        if os.path.exists(draft):
            os.unlink(draft)
