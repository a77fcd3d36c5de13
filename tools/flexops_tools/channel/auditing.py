"""What a channel reports of its packages, and whether that is true. Runs in a process
of its own, for it takes the bindings."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .place import SUBDIRS, SUFFIXES
from .sealing import sha256

Fault = str
Listing = dict[str, Any]
"""``<subdir>/<file>`` and its record."""

_FORMS = {
    "repodata.json": {"zstd_enabled": False, "sharded_enabled": False},
    "repodata.json.zst": {"zstd_enabled": True, "sharded_enabled": False},
    "repodata_shards.msgpack.zst": {"zstd_enabled": False, "sharded_enabled": True},
}
"""What the index is read from, by the oldest clients, newer ones and the newest."""


async def audit(url: str, name: str, work: Path) -> tuple[list[str], list[Fault]]:
    """Reads the index in each of its forms, then each package called ``name``, whole; returns what
    is listed, and what is wrong."""
    forms = {form: await _listing(url, name, options, work) for form, options in _FORMS.items()}
    truth = forms["repodata.json"]
    faults = [
        f"{form} does not say what repodata.json says{_difference(truth, other)}"
        for form, other in forms.items()
        if not _same(truth, other)
    ]
    for subdir in SUBDIRS:
        faults += [
            f"{subdir}/{file} is misnamed: it holds {held}"
            for file, held in (await _misnamed(url, subdir, name)).items()
        ]
    for path, record in truth.items():
        faults += [f"{path} {fault}" for fault in await _faults(record, work)]
    return list(truth), faults


async def _listing(url: str, name: str, options: Mapping[str, bool], work: Path) -> Listing:
    from rattler import Gateway, SourceConfig

    config = SourceConfig(bz2_enabled=False, cache_action="no-cache", **options)
    found = await Gateway(cache_dir=work / "index", default_config=config).query(
        [url], SUBDIRS, [name], recursive=False
    )
    return {
        f"{record.subdir}/{record.file_name}": record for records in found for record in records
    }


async def _misnamed(url: str, subdir: str, name: str) -> dict[str, str]:
    """Files of that name that hold something else, and files of other names that hold it. Clients
    go by one or the other."""
    from rattler import Client
    from rattler.package_streaming import download_bytes

    try:
        data = json.loads(await download_bytes(Client(), f"{url}/{subdir}/repodata.json"))
    except (
        Exception
    ):  # no such sub-folder; an index that cannot be read has failed the queries before
        return {}
    entries = [*data.get("packages", {}).items(), *data.get("packages.conda", {}).items()]
    held = {file: f"{entry['name']}-{entry['version']}-{entry['build']}" for file, entry in entries}
    return {
        file: own
        for file, own in held.items()
        if f"{name}-" in (file[: len(name) + 1], own[: len(name) + 1]) and not _is_called(file, own)
    }


def _is_called(file: str, own: str) -> bool:
    return file in [f"{own}{suffix}" for suffix in SUFFIXES]


def _facts(record: Any) -> dict[str, Any]:
    """What a client goes by."""
    identity = {
        "name": record.name.normalized,
        "version": str(record.version),
        "build": str(record.build),
        "build_number": record.build_number,
    }
    return {
        **identity,
        "subdir": record.subdir,
        "depends": list(record.depends),
        "constrains": list(record.constrains),
    }


def _same(one: Listing, other: Listing) -> bool:
    def digests(listing: Listing) -> dict[str, Any]:
        return {
            path: (_facts(record), record.sha256, record.size) for path, record in listing.items()
        }

    return digests(one) == digests(other)


def _difference(truth: Listing, other: Listing) -> str:
    odd = sorted(truth.keys() ^ other.keys())
    return f": only one of them has {', '.join(odd)}" if odd else ""


async def _faults(record: Any, work: Path) -> list[Fault]:
    from rattler import Client
    from rattler.package_streaming import download_to_path

    file = work / record.file_name
    try:
        await download_to_path(Client(), record.url, file)
    except Exception as error:  # the bindings raise many types
        return [f"is listed, but cannot be downloaded: {error}"]
    try:
        if record.sha256 is None:
            return ["is listed without its sha256: nothing can be verified"]
        found = sha256(file)
        if (found, file.stat().st_size) != (
            record.sha256.hex(),
            record.size or file.stat().st_size,
        ):
            return [
                f"is not the file that the index lists: its sha256 is {found},"
                f" {record.sha256.hex()} is listed"
            ]
        return [*inspect(file, work, _facts(record))]
    finally:
        file.unlink(missing_ok=True)


def inspect(package: Path, work: Path, listed: Mapping[str, Any] | None = None) -> Iterator[Fault]:
    """What is wrong inside a package: every file is compared with its digest, what it says it is
    with its name and with what is ``listed`` of it."""
    import tempfile

    from rattler.package_streaming import extract

    with tempfile.TemporaryDirectory(dir=work) as folder:
        try:
            extract(package, Path(folder))
            index = json.loads(Path(folder, "info/index.json").read_text())
            for entry in json.loads(Path(folder, "info/paths.json").read_text())["paths"]:
                file = Path(folder, entry["_path"])
                if entry.get("path_type") == "hardlink" and sha256(file) != entry["sha256"]:
                    yield (
                        f"is damaged: {entry['_path']} is not what it was when the package was made"
                    )
        except Exception as error:  # as above
            yield f"is damaged: {error or type(error).__name__}"
            return
    own = f"{index.get('name')}-{index.get('version')}-{index.get('build')}"
    if not _is_called(package.name, own):
        yield f"is misnamed: it holds {own}"
    for field, value in (listed or {}).items():
        if index.get(field, []) != value:
            yield (
                f"is listed with another {field}: {value} in the index, {index.get(field)} in the"
                " package"
            )


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, as a web server would serve it. What only a client of such a server
    notices is noticed before there is one."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...
