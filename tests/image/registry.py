"""A registry on this machine, with as much of the distribution API as an engine needs to push an
image. It keeps everything in memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Registry(ThreadingHTTPServer):
    """``blobs`` by digest, ``manifests`` by ``name:tag``. With ``refuses`` it rejects every push."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Api)
        self.refuses, self.blobs, self.manifests = (
            refuses,
            dict[str, bytes](),
            dict[str, dict[str, object]](),
        )

    @property
    def host(self) -> str:
        """To begin an image's name with; engines take registries on this machine without
        encryption."""
        return f"127.0.0.1:{self.server_port}"


class _Api(BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"
    uploads: dict[str, bytes] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        self._answer(200 if urlsplit(self.path).path == "/v2/" else 404)

    def do_HEAD(self) -> None:
        there = (found := re.fullmatch(r"/v2/.+/blobs/(sha256:\w+)", self.path)) and found[
            1
        ] in self.server.blobs
        self._answer(200 if there else 404)

    def do_POST(self) -> None:
        if self.server.refuses:
            self._answer(
                403,
                body=json.dumps(
                    {"errors": [{"code": "DENIED", "message": "not yours to push to"}]}
                ).encode(),
            )
            return
        self._answer(202, Location=f"{self.path}{len(self.uploads)}-{id(self)}")

    def do_PATCH(self) -> None:
        self.uploads[self.path] = self.uploads.get(self.path, b"") + self._body()
        self._answer(202, Location=self.path, Range=f"0-{len(self.uploads[self.path]) - 1}")

    def do_PUT(self) -> None:
        where, body = urlsplit(self.path), self._body()
        if manifest := re.fullmatch(r"/v2/(.+)/manifests/(.+)", where.path):
            self.server.manifests[f"{manifest[1]}:{manifest[2]}"] = json.loads(body)
            self._answer(
                201, **{"Docker-Content-Digest": f"sha256:{hashlib.sha256(body).hexdigest()}"}
            )
            return
        content, digest = (
            self.uploads.pop(where.path, b"") + body,
            parse_qs(where.query)["digest"][0],
        )
        right = digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.server.blobs |= {digest: content} if right else {}
        self._answer(201 if right else 400, **{"Docker-Content-Digest": digest})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "Docker-Distribution-Api-Version": "registry/2.0",
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextlib.contextmanager
def serve(*, refuses: bool = False) -> Iterator[Registry]:
    """A registry while the block runs."""
    server = Registry(refuses=refuses)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
