"""A child process that talks to a remote cache, for ``remote``. Run as a script:

    python -I -S remote_worker.py

A client library that hangs, crashes, or starts threads that no fork survives is then a child's trouble: it is killed, and its parent compiles. The
first line of standard input says where, ``{"path": sys.path, "url": "s3://...", "seconds": 1.0}``; every other one is a request, answered by one line:

    {"do": "get", "name": "...", "file": "...", "most": 1000}        {"found": true, "tag": "..."}  the object is in the file; or {"found": false}
    {"do": "create", "name": "...", "file": "..."}                   {"made": false}                there was one of that name, which stays
    {"do": "replace", "name": "...", "file": "...", "tag": "..."}    {"made": true}                 with a tag: only if it is still that object
    {"do": "list"}                                                   {"objects": [["name", bytes, seconds since the epoch], ...]}
    {"do": "remove", "name": "..."}                                  {}

``{"error": "..."}`` answers what failed; with ``"missing"``, for want of that package. It ends when nothing was asked for a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_IDLE_SECONDS = 60.0
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL")
_ENTRY_TYPE = "application/vnd.flexops.cache.v1"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_EMPTY = b"{}"


class Bucket:
    """An object store, a web server, or a directory, by obstore."""

    def __init__(self, url: str, seconds: float) -> None:
        from datetime import timedelta

        import obstore.store

        limit, start = timedelta(seconds=seconds), timedelta(milliseconds=50)
        if url.startswith("file://"):
            self.store: Any = obstore.store.from_url(url, mkdir=True)
        else:
            # Without encryption only where somebody has written so: in the address of a server of one's own.
            plain = url.startswith("http://") or any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
            retry: Any = {"max_retries": 3, "retry_timeout": limit, "backoff": {"init_backoff": start, "max_backoff": limit, "base": 2}}
            self.store = obstore.store.from_url(url, client_options={"timeout": limit, "connect_timeout": limit, "allow_http": plain}, retry_config=retry)
        self.library: Any = obstore

    def get(self, name: str, file: str, most: int) -> dict[str, object]:
        try:
            result = self.library.get(self.store, name)
        except (self.library.exceptions.NotFoundError, FileNotFoundError):
            return {"found": False}
        _write(file, result.stream(min_chunk_size=1 << 20), most)
        return {"found": True, "tag": json.dumps({name: result.meta[name] for name in ("e_tag", "version") if result.meta.get(name)})}

    def create(self, name: str, file: str) -> bool:
        try:
            self.library.put(self.store, name, _read(file), mode="create")
        except (self.library.exceptions.AlreadyExistsError, FileExistsError):
            return False
        return True

    def replace(self, name: str, file: str, tag: str) -> bool:
        try:
            self.library.put(self.store, name, _read(file), mode=json.loads(tag) if tag else "overwrite")
        except self.library.exceptions.PreconditionError:
            return False
        except (self.library.exceptions.NotSupportedError, NotImplementedError):  # a directory
            self.library.put(self.store, name, _read(file))
        return True

    def list(self) -> Iterator[tuple[str, int, float]]:
        for batch in self.library.list(self.store):
            for item in batch:
                yield item["path"], item["size"], item["last_modified"].timestamp()

    def remove(self, name: str) -> None:
        self.library.delete(self.store, name)


class Registry:
    """A repository of a container registry, by oras: an object is a manifest with one layer, and its name is the tag.

    A tag cannot be made on the condition that there is none: two that make the same at the same time both believe to have been the first.
    """

    def __init__(self, url: str, _seconds: float) -> None:
        import oras.provider

        place = url.removeprefix("oci://").rstrip("/")
        host = place.partition("/")[0].rpartition(":")[0] or place.partition("/")[0]
        self.client = oras.provider.Registry(insecure=host in ("localhost", "127.0.0.1", "[::1]"))
        self.place, self.has_empty = place, False
        self.client.auth.load_configs(self._container("x"))

    def get(self, name: str, file: str, most: int) -> dict[str, object]:
        container = self._container(name)
        answer = self._ask("GET", container.manifest_url(), headers={"Accept": _MANIFEST_TYPE})
        if answer.status_code == 404:
            return {"found": False}
        layers = self._right(answer).json()["layers"]
        content = self._right(self.client.get_blob(container, layers[0]["digest"], stream=True))
        _write(file, content.iter_content(1 << 20), most)
        return {"found": True, "tag": answer.headers.get("Docker-Content-Digest", "")}

    def create(self, name: str, file: str) -> bool:
        if self._ask("HEAD", self._container(name).manifest_url(), headers={"Accept": _MANIFEST_TYPE}).status_code == 200:
            return False
        return self.replace(name, file, "")

    def replace(self, name: str, file: str, _tag: str) -> bool:
        container = self._container(name)
        layer, config = _described(_read(file), _ENTRY_TYPE), _described(_EMPTY, "application/vnd.oci.empty.v1+json")
        self._right(self.client.upload_blob(file, container, layer))
        if not self.has_empty:
            with open(file + ".empty", "wb") as stream:
                stream.write(_EMPTY)
            self._right(self.client.upload_blob(stream.name, container, config))
            self.has_empty = True
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST_TYPE, "artifactType": _ENTRY_TYPE, "config": config, "layers": [layer]}
        self._right(self._ask("PUT", container.manifest_url(), json=manifest, headers={"Content-Type": _MANIFEST_TYPE}))
        return True

    def list(self) -> Iterator[tuple[str, int, float]]:
        """Registries do not say how old a tag is: the time is 0."""
        for tag in self.client.get_tags(self._container("x")):
            parts = tag.rsplit(".", 3)
            if len(parts) == 4:
                manifest = self.client.get_manifest(self.client.get_container(f"{self.place}:{tag}"))
                yield f"{parts[0]}/{'.'.join(parts[1:])}", sum(layer["size"] for layer in manifest["layers"]), 0.0

    def remove(self, name: str) -> None:
        container = self._container(name)
        self.client.delete_tag(container, container.tag)

    def _container(self, name: str) -> Any:
        return self.client.get_container(f"{self.place}:{name.replace('/', '.')}")

    def _ask(self, method: str, url: str, **options: Any) -> Any:
        return self.client.do_request(f"{self.client.prefix}://{url}", method, **options)

    def _right(self, answer: Any) -> Any:
        if answer.status_code >= 400:
            raise OSError(f"{answer.status_code} {answer.reason}")
        return answer


def _described(content: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def _read(file: str) -> bytes:
    with open(file, "rb") as stream:
        return stream.read()


def _write(file: str, parts: Iterable[Any], most: int) -> None:
    with open(file, "wb") as stream:
        for part in parts:
            most -= stream.write(part)
            if most < 0:
                raise OSError("more bytes than it may have")


def _answer(store: Bucket | Registry, asked: dict[str, Any]) -> dict[str, object]:
    what, name = asked["do"], asked.get("name", "")
    if what == "get":
        return store.get(name, asked["file"], asked["most"])
    if what == "create":
        return {"made": store.create(name, asked["file"])}
    if what == "replace":
        return {"made": store.replace(name, asked["file"], asked["tag"])}
    if what == "list":
        return {"objects": list(store.list())}
    store.remove(name)
    return {}


def _said(error: Exception) -> str:
    """What matters of what a client library says, which may be pages, and the store's own."""
    text = str(error).partition("\n\nDebug source")[0].strip()
    status = re.search(r"status code: (\d{3}[^:\n]*)", text)
    return f"it answers {status[1]}" if status else text.rpartition(" - ")[2] or type(error).__name__


def _lines() -> Iterator[str]:
    """What the parent writes: one line at a time, so that nothing of the next one is in a buffer while this waits."""
    while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # client libraries print
    lines = _lines()
    where = json.loads(next(lines))
    sys.path[:] = where["path"]
    store: Bucket | Registry | None = None
    try:
        store = (Registry if where["url"].startswith("oci://") else Bucket)(where["url"], where["seconds"])
        answer: dict[str, object] = {}
    except ModuleNotFoundError as error:
        answer = {"error": str(error), "missing": error.name or ""}
    except Exception as error:
        answer = {"error": _said(error)}
    print(json.dumps(answer), file=replies, flush=True)
    for line in lines if store else ():
        try:
            answer = _answer(store, json.loads(line))  # type: ignore[arg-type, unused-ignore]
        except Exception as error:  # whatever a client library raises is a reason not to have the object
            answer = {"error": _said(error)}
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
