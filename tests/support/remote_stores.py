"""Stores on this machine for the tests of the remote cache: real servers, and one whose days are as
bad as a test wants."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests-own-id",
    "AWS_SECRET_ACCESS_KEY": "tests-own-secret",
    "AWS_REGION": "us-east-1",
}
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_REGISTRY = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: 127.0.0.1:{port}}}
"""
USER, PASSWORD = "tests", "tests-own/pass?word#1"
_HTPASSWD = f"{USER}:$2b$05$tUCEiQHkB.hN.dT.iupn2uMbTKRTu8MelqtMZXPlRgxtF1tSRoxEa\n"
_NGINX = """
{user}
daemon off;
worker_processes 2;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    auth_basic "tests";
    auth_basic_user_file {folder}/users;
    root {folder}/www;
    client_max_body_size 1g;
    location / {{
      dav_methods PUT DELETE;
      create_full_put_path on;
    }}
  }}
}}
"""


@contextlib.contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    """The address of a server that answers while the block runs."""
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """moto's S3 server: its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def bucket(address: str, name: str, method: str = "PUT") -> None:
    """Make a bucket, or remove it."""
    signed = {
        "Authorization": (
            "AWS4-HMAC-SHA256 Credential=tests-own-id/20260101/us-east-1/s3/aws4_request"
        )
    }
    urllib.request.urlopen(
        urllib.request.Request(f"{address}/{name}", method=method, headers=signed), timeout=300
    ).close()


@contextlib.contextmanager
def azurite(program: str) -> Iterator[dict[str, str]]:
    """Microsoft's emulator of Azure's blobs: the variables that lead a client to it. Account and
    key are the emulator's own, in its documentation."""
    command = [program, "--silent", "--inMemoryPersistence", "--skipApiVersionCheck"]
    command += ["--disableTelemetry", "--blobPort"]
    with running(lambda port: [*command, str(port)]) as port:
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
            "AZURE_STORAGE_ACCOUNT_KEY": _AZURITE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/devstoreaccount1",
        }


def azure_container(endpoint: str, name: str) -> None:
    """Make a container, with a request signed as Azure's *Authorize with Shared Key* says."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    account = endpoint.rpartition("/")[2]
    lines = [
        "PUT",
        *[""] * 11,
        *(f"{key}:{value}" for key, value in headers.items()),
        f"/{account}/{account}/{name}",
        "restype:container",
    ]
    signature = base64.b64encode(
        hmac.new(base64.b64decode(_AZURITE_KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
    ).decode()
    headers |= {"Authorization": f"SharedKey {account}:{signature}", "Content-Length": "0"}
    urllib.request.urlopen(
        urllib.request.Request(
            f"{endpoint}/{name}?restype=container", method="PUT", headers=headers
        ),
        timeout=300,
    ).close()


def find_azurite(folder: Path) -> str | None:
    """azurite-blob, installed, or brought by npm; None where neither is available."""
    if found := shutil.which("azurite-blob"):
        return found
    if npm := shutil.which("npm"):
        subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), "azurite@3.37.0"],
            capture_output=True,
            check=False,
        )
    return (
        str(program)
        if (program := folder / "node_modules" / ".bin" / "azurite-blob").exists()
        else None
    )


@contextlib.contextmanager
def running(command: Callable[[int], list[str]], **options: Any) -> Iterator[int]:
    """The port of a server, once it can be connected to. A server ends if another process takes its
    port first: then it is started with another one. ``options``: as of ``subprocess.Popen``."""
    for _ in range(5):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        process = subprocess.Popen(command(port), **options)
        try:
            if _answers(port, process):
                yield port
                return
        finally:
            process.terminate()  # nginx ends its workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
    raise AssertionError(f"{command(port)} does not start")


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the port can be connected to; False if the server ends before."""
    until = time.monotonic() + 600
    while process.poll() is None:
        assert time.monotonic() < until, "the server does not answer"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
            return process.poll() is None
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def oci(program: str, folder: Path, *, users: bool = False) -> Iterator[str]:
    """Debian's docker-registry: its host and port. With ``users``, it asks for a password."""
    login = ""
    if users:
        (folder / "users").write_text(_HTPASSWD)
        login = f"auth: {{htpasswd: {{realm: tests, path: {folder / 'users'}}}}}\n"
    file = folder / "registry.yml"

    def command(port: int) -> list[str]:
        file.write_text(_REGISTRY.format(root=folder / "registry", port=port) + login)
        return [program, "serve", str(file)]

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with running(command, **quiet) as port:
        yield f"127.0.0.1:{port}"


def docker_login(folder: Path, place: str) -> str:
    """A folder for DOCKER_CONFIG with the user's password, as ``docker login`` leaves it."""
    secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (folder / "docker").mkdir(exist_ok=True)
    logins = {"auths": {place: {"auth": secret}}}
    (folder / "docker" / "config.json").write_text(json.dumps(logins))
    return str(folder / "docker")


@contextlib.contextmanager
def s3rver(program: str, folder: Path) -> Iterator[str]:
    """A server of S3 that ignores the conditions of a put: its address."""
    command = [program, "-s", "-d", str(folder), "--configure-bucket", "bucket"]
    command += ["--allow-mismatched-signatures", "-p"]
    with running(lambda port: [*command, str(port)]) as port:
        yield f"http://127.0.0.1:{port}"


def find_s3rver(folder: Path) -> str | None:
    """s3rver, brought by npm; None where it is not available."""
    if found := shutil.which("s3rver"):
        return found
    if npm := shutil.which("npm"):
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
        subprocess.run([*command, "s3rver@3.7.1"], capture_output=True, check=False)
    program = folder / "node_modules" / ".bin" / "s3rver"
    return str(program) if program.exists() else None


@contextlib.contextmanager
def webdav(program: str, folder: Path, certificate: Path) -> Iterator[str]:
    """nginx with TLS, its module for PUT, and a password: its URL without them."""
    for name in ("www", "body"):
        (folder / name).mkdir()
    hashed = hashlib.sha1(PASSWORD.encode()).digest()
    (folder / "users").write_text(f"{USER}:{{SHA}}{base64.b64encode(hashed).decode()}\n")
    user = "user root;" if os.geteuid() == 0 else ""
    key = certificate.with_name("key.pem")
    file = folder / "nginx.conf"

    def command(port: int) -> list[str]:
        places = {"folder": folder, "certificate": certificate, "key": key}
        file.write_text(_NGINX.format(port=port, user=user, **places))
        return [program, "-p", str(folder), "-c", str(file)]

    with running(command) as port:
        yield f"https://localhost:{port}"


def find_registry(folder: Path) -> str | None:
    """docker-registry; None where it is not available."""
    return _find_in_debian("docker-registry", "usr/bin/docker-registry", folder)


def find_nginx(folder: Path) -> str | None:
    """nginx; None where it is not available."""
    return _find_in_debian("nginx", "usr/sbin/nginx", folder)


def _find_in_debian(name: str, path: str, folder: Path) -> str | None:
    """A program, installed, or unpacked from its package: installed, that would start a service."""
    if found := shutil.which(name) or shutil.which(name, path="/usr/sbin"):
        return found
    if not shutil.which("apt-get"):
        return None
    for command in (["true"], ["apt-get", "update"]):
        subprocess.run(command, capture_output=True, check=False)
        fetch = ["apt-get", "download", name]
        subprocess.run(fetch, cwd=folder, capture_output=True, check=False)
        for package in folder.glob(f"{name}_*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
            return str(folder / path)
    return None


class WebServer(ThreadingHTTPServer):
    """Python's own, with the files of a folder, and the paths that it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

            def log_message(self, *_: object) -> None:
                asked.append(self.path)

        super().__init__(("127.0.0.1", 0), Handler)


def certificate(folder: Path) -> Path:
    """A self-signed certificate for localhost, with its key beside it."""
    key, file = folder / "key.pem", folder / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost",
        "-addext",
        "basicConstraints=critical,CA:FALSE",
    ]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(file)], capture_output=True, check=True
    )
    return file


def encrypted(file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, file.with_name("key.pem"))
    return context


Fault = Callable[["BadDay", bytes | None], bool]
"""Does something else than answering, and returns True; or lets the server answer."""


class BadStore(ThreadingHTTPServer):
    """As much of S3 as a client needs, in memory; ``fault`` decides about each request before it is
    answered."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), BadDay)
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fault: Fault | None = None
        self.lock = threading.Lock()


class BadDay(BaseHTTPRequestHandler):
    server: BadStore
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._begin(None)

    def do_PUT(self) -> None:
        self._begin(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def do_DELETE(self) -> None:
        self._begin(None)

    def _begin(self, body: bytes | None) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.fault is None or not self.server.fault(self, body):
            self.serve(body)

    def serve(self, body: bytes | None) -> None:
        place, _, query = self.path.partition("?")
        with self.server.lock:
            there = self.server.objects.get(self.path)
            if "list-type=2" in query:
                self.answer(
                    200, self.listing(place, urllib.parse.parse_qs(query).get("prefix", [""])[0])
                )
            elif self.command == "PUT" and not self.may_put(there):
                self.answer(412)
            elif self.command == "PUT":
                self.server.objects[self.path] = body or b""
                self.answer(200)
            elif self.command == "DELETE":
                self.server.objects.pop(self.path, None)
                self.answer(204)
            elif there is None:
                self.answer(404)
            else:
                self.answer(200, there)

    def listing(self, place: str, prefix: str) -> bytes:
        found = [
            (urllib.parse.unquote(path)[len(place) + 1 :], content)
            for path, content in self.server.objects.items()
            if path.startswith(place + "/")
        ]
        entries = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(content)}</Size><LastModified>2026-11-23T00:00:00.000Z</LastModified></Contents>"
            for name, content in found
            if name.startswith(prefix)
        )
        return f"<ListBucketResult>{entries}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()

    def may_put(self, there: bytes | None) -> bool:
        """The conditions of S3, and of Google's XML API, where a generation distinguishes an object from
        its successors, and none is 0."""
        wanted = self.headers.get("x-goog-if-generation-match")
        return not (there is not None and self.headers.get("If-None-Match") == "*") and wanted in (
            None,
            str(generation(there)),
        )

    def answer(self, status: int, body: bytes = b"", size: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 00:00:00 GMT")
        self.send_header("x-goog-generation", str(generation(self.server.objects.get(self.path))))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def generation(there: bytes | None) -> int:
    return 0 if there is None else 1 + zlib.crc32(there)


def is_entry(request: BadDay) -> bool:
    return request.path.endswith(".tar.gz")


def hangs(_request: BadDay, _body: bytes | None) -> bool:
    time.sleep(30)
    return True


def fails(request: BadDay, _body: bytes | None) -> bool:
    request.answer(500)
    return True


def forbids(request: BadDay, _body: bytes | None) -> bool:
    request.answer(403)
    return True


def is_full(request: BadDay, body: bytes | None) -> bool:
    if body is not None:
        request.answer(507)
    return body is not None


def truncates(request: BadDay, _body: bytes | None) -> bool:
    content = request.server.objects.get(request.path, b"")
    if request.command == "GET" and is_entry(request) and content:
        request.answer(200, content[: len(content) // 2])
        return True
    return False


def breaks_off(request: BadDay, _body: bytes | None) -> bool:
    content = request.server.objects.get(request.path, b"")
    if request.command == "GET" and is_entry(request) and content:
        request.answer(200, content[: len(content) // 2], size=len(content))
        request.close_connection = True
        return True
    return False


def lies(request: BadDay, _body: bytes | None) -> bool:
    """Another entry than the one that was asked for, and whole."""
    others = [
        content
        for path, content in request.server.objects.items()
        if path.endswith(".tar.gz") and path != request.path
    ]
    if request.command == "GET" and is_entry(request) and others:
        request.answer(200, others[0])
        return True
    return False


def garbles(request: BadDay, _body: bytes | None) -> bool:
    """Another length of noise for whatever is there."""
    content = request.server.objects.get(request.path, b"")
    if request.command == "GET" and content:
        request.answer(200, hashlib.sha256(content).digest() * 40)
        return True
    return False


def closes(request: BadDay, _body: bytes | None) -> bool:
    request.close_connection = True
    request.connection.shutdown(socket.SHUT_RDWR)
    return True
