"""The container engine: reaching it through the docker SDK, and what its rejections mean."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flexops.errors import ImageError

if TYPE_CHECKING:
    from docker import DockerClient

GET_ONE = (
    "sudo apt-get install -y docker.io && sudo systemctl start docker   # or export"
    " DOCKER_HOST=unix://… of an engine that runs elsewhere"
)
_TIMEOUT = 600


def connect() -> DockerClient:
    """A client of the engine that the environment names (``DOCKER_HOST``), which answers.

    Raises:
        ImageError: the SDK is missing, nothing answers, or this user may not ask it; with the fix.
    """
    try:
        # Not `import docker`: in a checkout without the SDK that succeeds, and is the folder
        # docker/.
        from docker import DockerClient
        from docker.errors import DockerException
    except ImportError as error:
        raise ImageError(
            "the docker SDK for Python is missing",
            found=str(error),
            fix="pip install ./tools   # in the clone",
        ) from error
    try:
        client = DockerClient.from_env(timeout=_TIMEOUT)
        client.ping()
    except DockerException as error:
        raise unreachable(str(error)) from error
    return client


def unreachable(message: str) -> ImageError:
    """Why no engine can be used, by what the SDK reports."""
    if "Permission denied" in message or "PermissionError" in message:
        return ImageError(
            "this user may not use the container engine",
            found=message,
            required="membership in the group docker, or a rootless engine",
            fix="sudo usermod -aG docker $USER && newgrp docker",
        )
    return ImageError(
        "no container engine answers", found=message, required="a running engine", fix=GET_ONE
    )


def environment() -> dict[str, str]:
    """For the program docker: the engine that the SDK talks to, and a builder whose images that
    engine has."""
    chosen = {"DOCKER_BUILDKIT": "1", "BUILDX_BUILDER": "default"}
    if not os.environ.get("DOCKER_HOST"):
        chosen["DOCKER_CONTEXT"] = "default"
    return {**os.environ, **chosen}


def no_program(found: str) -> ImageError:
    """The program docker is missing, or has no BuildKit."""
    return ImageError(
        "images are built by BuildKit, and run by the program docker",
        found=found,
        required="the program docker with BuildKit (docker 20.10, or newer with buildx)",
        fix=(
            "sudo apt-get install docker-buildx   # Debian 12 has none: put its docker.io"
            " (/usr/bin/docker) first on PATH"
        ),
    )


def engine_root(client: DockerClient) -> str:
    """Where the engine keeps its images."""
    return str(information(client).get("DockerRootDir", ""))


def information(client: DockerClient) -> dict[str, Any]:
    """What the engine says about itself."""
    found: dict[str, Any] = client.info()
    return found
