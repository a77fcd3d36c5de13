"""What the tests of images share: an engine, a base image, a package index on this machine, and the
`cpu` image built through the command line."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wheel_index
from image_command import BASE, REPOSITORY, Image, copy_of_checkout
from processes import completed

from flexops import targets

_STATE = REPOSITORY / ".flexops" / "tests"
_ENGINE_HOW = (
    "sudo bash scripts/lib/engine.sh, which installs and starts one, then bash scripts/run_tests.sh"
    " -m image"
)


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
    """A package index on this machine with those wheels, for those who have credentials."""
    with wheel_index.serve(wheels) as url:
        yield url


def _has_buildkit(program: Path) -> bool:
    """Whether a client has BuildKit: built in up to 22, by its plugin buildx from 23 on."""
    plugin = subprocess.run([program, "buildx", "version"], capture_output=True, check=False)
    version = completed([program, "--version"], code=None)
    found = re.search(r"version (\d+)\.", version.stdout)
    return plugin.returncode == 0 or (found is not None and int(found[1]) < 23)


@pytest.fixture(scope="session")
def docker_with_buildkit(
    require: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The program docker is a client on PATH that has BuildKit."""
    programs = [Path(folder, "docker") for folder in os.environ["PATH"].split(os.pathsep)]
    having = next((one for one in programs if one.is_file() and _has_buildkit(one)), None)
    require(having, "a docker with BuildKit", "apt-get install docker-buildx")
    folder = tmp_path_factory.mktemp("client")
    (folder / "docker").symlink_to(str(having))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield


@pytest.fixture(scope="session")
def image(index_url: str, docker_with_buildkit: None) -> Image:  # noqa: ARG001
    """The command line with this session's options."""
    return Image(index_url)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what images are built from, to be edited. With three of the families: all of them
    take minutes. ``test_engine`` builds them with ``-m slow``, setup in every run of CI."""
    return copy_of_checkout(tmp_path_factory.mktemp("checkout"), "adam", "lion", "quant")


@pytest.fixture(scope="session")
def cpu_image(image: Image, checkout: Path) -> str:
    """`flexops:cpu-test`, built from the checkout's copy."""
    done = image.build("cpu", "--tag", "flexops:cpu-test", checkout=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    return "flexops:cpu-test"
