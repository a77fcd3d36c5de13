"""What the tests of images share: an engine, a base image, a package index on this machine, and the `cpu` image built through the command line."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wheel_index

from flexops import targets

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = "flexops-test-base:1"
_STATE = REPOSITORY / ".flexops" / "tests"
_ENGINE_HOW = "sudo bash scripts/lib/engine.sh, which installs and starts one; and pip install docker"
_NETWORK = "host"  # an engine in a container or a small virtual machine may have no other


class Image:
    """The command line on a checkout, with the base, index and network of these tests."""

    def __init__(self, index_url: str) -> None:
        self.build_options = ["--build-base", BASE, "--runtime-base", BASE, "--index-url", index_url, "--network", _NETWORK]

    def __call__(self, *arguments: str, checkout: Path = REPOSITORY, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        variables = self.environment(checkout, environment)
        # In the checkout, because `python -m` looks for flexops in the working directory first.
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, cwd=checkout, env=variables, timeout=1800, check=False)

    def build(self, *arguments: str, checkout: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
        return self("build", *arguments, *self.build_options, checkout=checkout)

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "flexops", "image", *arguments]

    @staticmethod
    def environment(checkout: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(checkout), **(extra or {})}


@pytest.fixture(scope="session")
def engine(require: Callable[[object, str, str], None]) -> Any:
    """A client of the container engine."""
    from flexops.errors import ImageError
    from flexops.images.engine import connect

    try:
        client, why = connect(), ""
    except ImageError as error:
        client, why = None, error.found
    require(client, f"a container engine ({why})" if why else "a container engine", _ENGINE_HOW)
    return client


@pytest.fixture(scope="session")
def base(engine: Any, require: Callable[[object, str, str], None], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base image of this machine's distribution with Python and tini, made here: no registry is asked. It is kept for the next run."""
    from docker.errors import ImageNotFound

    try:
        engine.images.get(BASE)
    except ImageNotFound:
        tool = shutil.which("mmdebstrap")
        require(tool and os.geteuid() == 0, "mmdebstrap, run by root", "sudo apt-get install mmdebstrap, and run these tests as root")
        release = platform.freedesktop_os_release()["VERSION_CODENAME"]
        archive = tmp_path_factory.mktemp("base") / "base.tar"
        include = "apt,python3,python3-venv,tini,ca-certificates"
        command = [str(tool), "--quiet", "--variant=minbase", f"--include={include}", release, str(archive)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        repository, _, tag = BASE.partition(":")
        engine.api.import_image(str(archive), repository=repository, tag=tag)
        archive.unlink()
    return BASE


@pytest.fixture(scope="session")
def index_url(engine: Any, base: str) -> Iterator[str]:
    """A package index on this machine with the wheels of the row `cpu`, for the base's Python."""
    row = targets.load().cpu
    said = engine.containers.run(base, ["python3", "-c", "import sys; print('{}.{}'.format(*sys.version_info[:2]))"], network_mode="none", remove=True)
    python = said.decode().strip()
    directory = _STATE / f"wheels-{python}"
    wheel_index.fetch(REPOSITORY / "envs" / "requirements" / f"{row.toolkit_name}.in", python, directory, row.index)
    with wheel_index.serve(directory) as url:
        yield url


@pytest.fixture(scope="session")
def image(index_url: str) -> Image:
    """The command line with this session's options."""
    return Image(index_url)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what images are built from, to be edited."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("csrc", "docker", "flexops", "envs"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "_aot"))
    for name in ("pyproject.toml", "setup.py", "README.md", ".dockerignore", "LICENSE"):
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, root / name)
    return root


@pytest.fixture(scope="session")
def cpu_image(image: Image, checkout: Path) -> str:
    """`flexops:cpu-test`, built from the checkout's copy."""
    done = image.build("cpu", "--tag", "flexops:cpu-test", checkout=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    return "flexops:cpu-test"
