"""README's shell blocks, found by parsing and run in order, in a copy of the checkout.

Real: ``scripts/build_wheel.sh`` (for one family, to save time), pip, and the installed ``flexops``.
Stand-ins, for what a test cannot have: the container engine (a server on a socket); ``docker``,
``conda`` and ``conda-build`` (programs that record their arguments; the first one also looks into
the context of a build, the last one packs a file); torch and other packages (links to this environment's).
Scripts that make an environment, or run all tests, have tests of their own (tests/scripts/test_setup.py);
here only their presence is checked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socketserver
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from builds import REPOSITORY

from flexops.toolchain import zig

SHELL = re.compile(r"```(?:bash|sh|shell)\n(.*?)```", re.DOTALL)
OTHERS = (
    "scripts/setup_cuda_dev_environment.sh",
    "scripts/run_tests.sh",
    "scripts/ci/build_site.sh",
)
FACTS = {
    "python": "3.12.3", "packages": {"torch": "2.14.1", "ninja": "1.13.0"}, "torch_cuda": "13.0",
    "torch_hip": "", "libraries": [], "compilers": [], "leftovers": [], "added_bytes": 0,
    "flexops": "1",
}  # fmt: skip


def commands() -> list[str]:
    """Every command line of README's shell blocks, in order, without its comment."""
    blocks = SHELL.findall((REPOSITORY / "README.md").read_text())
    lines = [
        re.sub(r"\s+#.*$", "", line).strip() for block in blocks for line in block.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


class Engine(socketserver.ThreadingUnixStreamServer):
    """As much of a container engine as a build needs."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Api)


class _Api(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        path = re.sub(r"^/v[\d.]+", "", urlsplit(self.path).path)
        if path == "/_ping":
            self._send(b"OK")
        elif path == "/version":
            self._send({"ApiVersion": "1.44", "Version": "25"})
        elif path == "/info":
            self._send({"DockerRootDir": "/nowhere"})
        elif path.startswith("/images/flexops-kernels"):
            self._send({"message": "no such image"}, 404)
        elif path.startswith("/images/"):
            self._send({"Id": "sha256:2", "Size": 1, "RepoTags": [], "RepoDigests": []})
        elif path.endswith("/logs"):
            self._send(json.dumps(FACTS).encode() if "stdout=1" in self.path else b"")
        else:
            self._send({"Id": "c", "Config": {"Tty": True}, "Image": "sha256:1"})

    def do_POST(self) -> None:
        self._body()
        path = urlsplit(self.path).path
        if path.endswith("/build"):  # adds labels
            self._stream(json.dumps({"aux": {"ID": "sha256:1"}}).encode() + b"\r\n")
        elif path.endswith("/wait"):
            self._send({"StatusCode": 0})
        else:
            self._send({"Id": "c"}, 201)

    def do_DELETE(self) -> None:
        self._send({})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _stream(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))

    def _send(self, what: dict[str, Any] | bytes, status: int = 200) -> None:
        data = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serve(path: Path) -> Iterator[Engine]:
    server = Engine(path)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


DOCKER = """#!/bin/sh
echo "docker $*" >>{calls}
for one in "$@"; do
  [ "$before" != --iidfile ] || echo sha256:1 >"$one"
  before=$one
done
[ "$1" != build ] || (cd "$one" && find csrc -name lion_cpu.cpp >>{calls})
"""
CONDA_BUILD = """#!{python}
import json, os, pathlib, sys
from rattler_build import assemble_package
if "--version" in sys.argv:
    sys.exit(print("conda-build 26.1"))
output = sys.argv[sys.argv.index("--output-folder") + 1]
variant = pathlib.Path(sys.argv[sys.argv.index("-m") + 1]).stem
pathlib.Path("{calls}").open("a").write("conda-build " + sys.argv[1] + "\\n")
files, made = pathlib.Path(output, "files"), pathlib.Path(output, "noarch")
(files / "share").mkdir(parents=True), made.mkdir()
(files / "share" / "flexops.txt").write_text(variant)
options = {{"files_dir": files, "depends": [], "build_number": 0, "license": "Apache-2.0"}}
assemble_package("flexops", "0.2.0", "noarch", variant + "_h0_0", made, **options)
"""


class User:
    """A user with a clone and a new environment. ``run`` runs a line in the clone."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.calls, self.socket = (
            folder / "clone",
            folder / "calls",
            folder / "engine.sock",
        )
        self.environment, programs = folder / "env", folder / "bin"
        _copy(self.clone)
        subprocess.run([sys.executable, "-m", "venv", str(self.environment)], check=True)
        _torch_of_this_environment(folder / "site", self.environment)
        programs.mkdir()
        _program(programs / "conda", f'#!/bin/sh\necho "conda $*" >>{self.calls}\n')
        _program(programs / "docker", DOCKER.format(calls=self.calls))
        _program(
            programs / "conda-build", CONDA_BUILD.format(python=sys.executable, calls=self.calls)
        )
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        places = [str(programs), str(self.environment / "bin"), os.environ["PATH"]]
        self.variables = {
            **kept, "PATH": os.pathsep.join(places), "VIRTUAL_ENV": str(self.environment),
            "DOCKER_HOST": f"unix://{self.socket}", "FLEXOPS_CACHE_DIR": str(folder / "cache"),
            "PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }  # fmt: skip

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-euc", line]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500}
        return subprocess.run(command, cwd=self.clone, env=self.variables, check=False, **options)


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _copy(clone: Path) -> None:
    """The checkout, with one family, because compiling all of them takes a minute."""
    left_out = shutil.ignore_patterns("__pycache__", "_aot", "*.egg-info")
    for name in ("csrc", "docker", "docs", "envs", "flexops", "recipe", "scripts", "tools"):
        shutil.copytree(REPOSITORY / name, clone / name, ignore=left_out)
    for path in REPOSITORY.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, clone)
    with (clone / "flexops/build/describe/catalog.py").open("a") as catalog:
        catalog.write('CATALOG = (find("lion"),)\n')


def _torch_of_this_environment(site: Path, environment: Path) -> None:
    """Installs links to all packages here but flexops, so nothing is downloaded."""
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "flexops" not in path.name.lower() and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    (target,) = (environment / "lib").glob("python*/site-packages")
    (target / "torch.pth").write_text(f"{site}\n")


@pytest.mark.extra
def test_readme_s_blocks_run_in_order(tmp_path, require):
    pytest.importorskip("docker.utils.build")
    pytest.importorskip("rattler_build")
    zig_is_here = importlib.util.find_spec("ziglang")
    require(zig_is_here, "zig", f"pip install {zig.REQUIREMENT}")
    lines = commands()
    assert any("scripts/build_wheel.sh" in line for line in lines), (
        "the wheel is what README begins with"
    )
    user = User(tmp_path)
    with serve(user.socket):
        for line in lines:
            if other := next((name for name in OTHERS if name in line), None):
                assert (user.clone / other).is_file(), line
                continue
            done = user.run(line)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    calls = user.calls.read_text()
    assert "docker build" in calls
    assert "csrc/lion/lion_cpu.cpp" in calls.splitlines(), "the context of an image"
    assert f"conda-build {user.clone}/recipe" in calls
    assert "docker run" in calls
    (made,) = (user.clone / "dist").glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        names = {one.partition(".dist-info/")[2]: one for one in archive.namelist()}
        listed = json.loads(archive.read(names["sboms/flexops.cdx.json"]))
        notices = archive.read(names["licenses/THIRD_PARTY_NOTICES.txt"]).decode()
        metadata = archive.read(names["METADATA"]).decode()
    assert {one["name"] for one in listed["components"]} == {"zig", "libc++"}
    assert "Zig contributors" in notices
    assert "Requires-Dist: torch>=2.11" in metadata
    found = user.run("cd / && python -c 'import flexops; print(flexops.__file__)'").stdout
    assert found.startswith(str(user.environment)), (
        "the flexops that ran was the wheel's, not the clone's"
    )
