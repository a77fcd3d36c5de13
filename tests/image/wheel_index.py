"""A package index on this machine with the wheels of one target, so that the tests' builds download
fast, and from nowhere else.

pip fetches the wheels once, as this machine's settings say, into a directory that outlives the
tests.
"""

from __future__ import annotations

import base64
import contextlib
import html
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CREDENTIALS = "someone:s3cret"
"""What the index requires of its clients, as private ones do: none of it may be kept."""

PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux2010_x86_64",
)


def fetch(
    requirements: Sequence[Path], python: str, directory: Path, extra_index: str = ""
) -> None:
    """Download the wheels that these requirements, each for itself, come to on a Python such as
    ``"3.11"``; nothing is done if they are there."""
    wanted = "".join(path.read_text() for path in requirements)
    done = directory / "done.txt"
    if done.is_file() and done.read_text() == wanted:
        return
    directory.mkdir(parents=True, exist_ok=True)
    for path in requirements:
        _download(path, python, directory, extra_index)
    done.write_text(wanted)


def _download(requirements: Path, python: str, directory: Path, extra_index: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:",
        "--dest", str(directory), "--requirement", str(requirements)]  # fmt: skip
    if python != "{}.{}".format(*sys.version_info[:2]):
        command += [
            "--python-version",
            python,
            "--implementation",
            "cp",
            *(f"--platform={name}" for name in PLATFORMS),
        ]
    # Another index may be out of reach; then it must not cost more than a moment.
    extra = (
        ["--extra-index-url", extra_index, "--retries", "0", "--timeout", "10"]
        if extra_index
        else []
    )
    if not extra or subprocess.run([*command, *extra], check=False).returncode:
        subprocess.run(command, check=True)


class _Index(SimpleHTTPRequestHandler):
    """``/simple/<project>/`` lists the wheels of a project; ``/<file>`` is one."""

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(CREDENTIALS.encode()).decode()
        if self.headers.get("Authorization") != wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
        elif match := re.fullmatch(r"/simple/([^/]+)/", self.path):
            self._list(match[1])
        else:
            super().do_GET()

    def _list(self, project: str) -> None:
        wheels = [
            path.name
            for path in Path(self.directory).glob("*.whl")
            if _normal(path.name.split("-")[0]) == _normal(project)
        ]
        if not wheels:
            self.send_error(404)
            return
        page = "".join(
            f'<a href="/{html.escape(name)}">{html.escape(name)}</a>\n' for name in wheels
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[str]:
    """The URL, with credentials, of an index with the wheels in a directory."""
    handler = partial(_Index, directory=str(directory))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{CREDENTIALS}@127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":  # wheel_index.py DIRECTORY: for trying things out by hand
    with serve(Path(sys.argv[1])) as url:
        print(url, flush=True)
        threading.Event().wait()
