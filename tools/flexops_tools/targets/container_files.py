"""What the matrix makes of editors and compose: ``.devcontainer/<toolkit>/devcontainer.json`` and
``compose.yaml``."""

from __future__ import annotations

import json
from collections.abc import Iterator

from flexops.targets.model import Matrix, Target

from . import image_files

COMPOSE = "compose.yaml"
_EXTENSIONS = ("ms-python.python", "charliermarsh.ruff", "llvm-vs-code-extensions.vscode-clangd")
_USUAL = ("9.0",)
"""The row that doctor compares a development container with, where a toolkit has it."""
_COMPOSE_HEAD = (
    "#",
    "#   docker compose run --rm cu130-sm90                          doctor's report",
    "#   docker compose run --rm cu130-sm90 python examples/demo.py  in this directory",
    (
        "#   CONTAINER_USER=$(id -u):$(id -g) docker compose run ...     as you, so that what it"
        " writes here is yours"
    ),
)
_NVIDIA = (
    "    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities:"
    " [gpu]}]}}}"
)
_AMD = "    devices: [/dev/kfd, /dev/dri]"


def files(matrix: Matrix, header: str) -> dict[str, str]:
    """Path (relative to the root) and text: a development container for each toolkit, and a service
    for each row."""
    toolkits: dict[str, list[Target]] = {}
    for target in matrix.targets:
        toolkits.setdefault(target.toolkit_name, []).append(target)
    rendered = {
        f".devcontainer/{name}/devcontainer.json": dev_container(rows, header)
        for name, rows in toolkits.items()
    }
    return {**rendered, COMPOSE: compose(matrix, header)}


def dev_container(rows: list[Target], header: str) -> str:
    """The development image of a toolkit, with the checkout at /workspace. Operators for the GPUs
    of all of its rows are compiled in."""
    row = next((one for one in rows if one.capabilities == _USUAL), rows[0])
    args = {
        **image_files.build_args(row),
        "ARCH_LIST": ";".join(capability for one in rows for capability in one.capabilities),
    }
    document = {
        "name": f"flexops {row.toolkit_name}",
        "build": {
            "dockerfile": f"../../{image_files.dockerfile_path(row.accelerator)}",
            "context": "../..",
            "target": "dev",
            "args": args,
        },
        "workspaceFolder": "/workspace",
        "workspaceMount": "source=${localWorkspaceFolder},target=/workspace,type=bind",
        "remoteUser": "flexops",
        "mounts": ["source=flexops-cache,target=/cache,type=volume"],
        "hostRequirements": {"gpu": "optional" if row.accelerator == "cuda" else False},
        "runArgs": [
            "--shm-size",
            "8g",
            *(
                ["--device", "/dev/kfd", "--device", "/dev/dri"]
                if row.accelerator == "rocm"
                else []
            ),
        ],
        "containerEnv": {"PYTHONPATH": "/workspace:/workspace/tools"},
        # The environment is not the user's to write: the checkout itself registers its commands.
        "postCreateCommand": "git config --global --add safe.directory /workspace"
        " && cd tools && python setup.py --quiet egg_info",
        "customizations": {"vscode": {"extensions": list(_EXTENSIONS)}},
    }
    return f"// {header}\n{json.dumps(document, indent=2)}\n"


def compose(matrix: Matrix, header: str) -> str:
    """A service for each row. Each has a profile of its own, so that only what is named is built
    and run."""
    lines = [f"# {header}", *_COMPOSE_HEAD, "", "services:"]
    for target in matrix.targets:
        lines += _service(target)
    return "\n".join([*lines, "volumes:", "  cache:", "    name: flexops-cache", ""])


def _service(target: Target) -> Iterator[str]:
    yield f"  {target.id}:"
    yield f"    image: flexops:{target.id}"
    yield f"    profiles: [{target.id}]"
    yield (
        "    build:\n      context: .\n      dockerfile:"
        f" {image_files.dockerfile_path(target.accelerator)}\n      target: runtime\n      args:"
    )
    yield from (
        f"        {name}: {json.dumps(value)}"
        for name, value in image_files.build_args(target).items()
    )
    yield '    user: "${CONTAINER_USER:-10001:10001}"'
    yield "    shm_size: 8gb"
    yield "    volumes: [.:/workspace, cache:/cache]"
    if target.accelerator != "cpu":
        yield _NVIDIA if target.accelerator == "cuda" else _AMD
    yield ""
