"""What the tests of images share: an engine, a base image, a package index on this machine, and the
`cpu` image built through the command line."""

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
_ENGINE_HOW = (
    "sudo bash scripts/lib/engine.sh, which installs and starts one, then bash scripts/run_tests.sh"
    " -m image"
)
_NETWORK = "host"  # an engine in a container or a small virtual machine may have no other


class Image:
    """The command line on a checkout, with the base, index and network of these tests."""

    def __init__(self, index_url: str) -> None:
        bases = ["--build-base", BASE, "--runtime-base", BASE]
        index = ["--index-url", index_url, "--accept-other-torch"]  # whose CPU index may be silent
        self.build_options = [*bases, *index, "--network", _NETWORK]

    def __call__(
        self,
        *arguments: str,
        checkout: Path = REPOSITORY,
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        variables = self.environment(checkout, environment)
        # In the checkout, because `python -m` looks for flexops in the working directory first.
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            cwd=checkout,
            env=variables,
            timeout=1800,
            check=False,
        )

    def build(
        self, *arguments: str, checkout: Path = REPOSITORY
    ) -> subprocess.CompletedProcess[str]:
        return self("build", *arguments, *self.build_options, checkout=checkout)

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "flexops", "image", *arguments]

    @staticmethod
    def environment(checkout: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(checkout), **(extra or {})}


@pytest.fixture(scope="session")
def engine(require: Callable[..., None]) -> Any:
    """A client of the container engine."""
    from flexops.errors import ImageError
    from flexops_tools.images.engine import connect

    try:
        client, why = connect(), ""
    except ImageError as error:
        client, why = None, error.found
    excuse = os.environ.get("FLEXOPS_TEST_NO_ENGINE", "")  # scripts/run_tests.sh has looked
    require(client, f"a container engine ({excuse or why})", _ENGINE_HOW, excuse)
    return client


@pytest.fixture(scope="session")
def base(
    engine: Any, require: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A base image: made here of this machine's distribution, with Python and tini, so that no
    registry is asked; or else the row's own, pulled.

    It is kept for the next run.
    """
    from docker.errors import DockerException, ImageNotFound

    repository, _, tag = BASE.partition(":")
    try:
        engine.images.get(BASE)
        return BASE
    except ImageNotFound:
        pass
    if (tool := shutil.which("mmdebstrap")) and os.geteuid() == 0:
        archive = tmp_path_factory.mktemp("base") / "base.tar"
        subprocess.run(
            [tool, *_DEBSTRAP, *_distribution(), str(archive)], check=True, stdin=subprocess.DEVNULL
        )
        engine.api.import_image(str(archive), repository=repository, tag=tag)
        archive.unlink()
        return BASE
    name, problem = targets.load().cpu.runtime_base, ""
    try:
        engine.images.pull(name).tag(repository, tag)
    except DockerException as error:
        problem = str(error)
    how = (
        "let the engine reach a registry; or sudo apt-get install mmdebstrap, and run these tests"
        " as root"
    )
    require(not problem, f"a base image ({name} cannot be pulled: {problem})", how)
    return BASE


_DEBSTRAP = (
    "--quiet",
    "--variant=minbase",
    "--include=apt,python3,python3-venv,tini,ca-certificates",
)


def _distribution() -> list[str]:
    """mmdebstrap's words for this machine's Debian or Ubuntu, whose tini is in another part of the
    archive."""
    known = platform.freedesktop_os_release()
    return [
        *(["--components=main,universe"] if known["ID"] == "ubuntu" else []),
        known["VERSION_CODENAME"],
    ]


@pytest.fixture(scope="session")
def wheels(engine: Any, base: str) -> Path:
    """A directory with the wheels of the row `cpu`, for the base's Python."""
    row = targets.load().cpu
    ask = "python3 -c 'import sys; print(\"{}.{}\".format(*sys.version_info[:2]))' || echo none"
    said = (
        engine.containers.run(base, ["sh", "-c", ask], network_mode="none", remove=True)
        .decode()
        .strip()
    )
    python = row.python if said == "none" else said  # which the build then installs
    directory = _STATE / f"wheels-{python}"
    wanted = [
        REPOSITORY / "envs" / "requirements" / f"{row.toolkit_name}.in",
        REPOSITORY / "docker" / "pip.lock",
        REPOSITORY / "docker" / "sbom.lock",
    ]
    wheel_index.fetch(wanted, python, directory, row.index)
    return directory


@pytest.fixture(scope="session")
def index_url(wheels: Path) -> Iterator[str]:
    """A package index on this machine with those wheels."""
    with wheel_index.serve(wheels) as url:
        yield url


@pytest.fixture
def private_index_url(wheels: Path) -> Iterator[str]:
    """The same, for those who have credentials."""
    with wheel_index.serve(wheels, private=True) as url:
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
        shutil.copytree(
            REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "_aot")
        )
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
