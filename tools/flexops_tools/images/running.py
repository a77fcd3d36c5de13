"""Running an image: the GPU options that the host supports, and a container that ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexops.errors import ImageError
from flexops.targets import Target

from . import contents
from .engine import information
from .naming import build_command

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

_SECONDS = 600


@dataclass(frozen=True)
class HostGpus:
    """What this machine has of GPUs and of the NVIDIA container toolkit.

    Attributes:
        nvidia: an NVIDIA GPU's device file is there.
        hook: the container toolkit's programs are there.
        amd_devices: device files for ROCm.
        amd_groups: the numbers of the groups that own them; their names differ between host and
            image, so names are no use.
    """

    nvidia: bool = False
    hook: bool = False
    amd_devices: tuple[str, ...] = ()
    amd_groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class GpuOptions:
    """Options for the SDK's ``containers.create``, and what is to be said about them."""

    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def look() -> HostGpus:
    """This machine's."""
    devices = tuple(path for path in ("/dev/kfd", "/dev/dri") if os.path.exists(path))
    return HostGpus(
        nvidia=any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")),
        hook=any(
            shutil.which(name)
            for name in ("nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvidia-ctk")
        ),
        amd_devices=devices if "/dev/kfd" in devices else (),
        amd_groups=tuple(sorted(_groups())),
    )


def _groups() -> Iterator[int]:
    with contextlib.suppress(OSError):
        for path in ("/dev/kfd", *(entry.path for entry in os.scandir("/dev/dri"))):
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.stat(path).st_mode):
                    yield os.stat(path).st_gid


def gpu_options(row: Target, engine: Mapping[str, Any], host: HostGpus) -> GpuOptions:
    """How a container of this row gets its GPUs here, or why it gets none. Pure.

    Args:
        engine: what the engine says about itself: its runtimes, and devices by CDI.
    """
    if row.accelerator == "cpu":
        return GpuOptions()
    if row.accelerator == "rocm":
        if not host.amd_devices:
            return GpuOptions(
                note="no AMD GPU on this machine (no /dev/kfd): the operators run on the CPU"
            )
        return GpuOptions(
            {
                "devices": [f"{path}:{path}:rwm" for path in host.amd_devices],
                "group_add": list(dict.fromkeys(host.amd_groups)),
            }
        )
    devices = [
        str(one.get("ID", ""))
        for one in engine.get("DiscoveredDevices") or []
        if one.get("Source") == "cdi"
    ]
    if "nvidia.com/gpu=all" in devices:
        return GpuOptions(
            {"device_requests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]}
        )
    if "nvidia" in (engine.get("Runtimes") or {}) or (host.nvidia and host.hook):
        return GpuOptions(
            {"device_requests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]}
        )
    if host.nvidia:
        fix = (
            "install nvidia-container-toolkit"
            " (https://docs.nvidia.com/datacenter/cloud-native/container-toolkit), and restart the"
            " engine"
        )
        return GpuOptions(
            note=(
                "there is an NVIDIA GPU, but the engine cannot pass it on: the operators run on"
                f" the CPU\n  fix: {fix}"
            )
        )
    return GpuOptions(note="no NVIDIA GPU on this machine: the operators run on the CPU")


def create(
    client: DockerClient, row: Target, name: str, command: Sequence[str], options: Mapping[str, Any]
) -> Container:
    """A container that has not started yet; raises ``ImageError``."""
    from docker.errors import APIError, DockerException, ImageNotFound

    # The SDK's DeviceRequest is a dict with these very keys, so the options can be plain values.
    try:
        return client.containers.create(name, list(command), **options)
    except ImageNotFound as error:
        raise ImageError(
            f"there is no image {name}",
            found=str(error.explanation),
            fix=build_command(row.id, name),
        ) from error
    except APIError as error:
        raise ImageError(
            f"{name} cannot be run", found=str(error.explanation), fix="docker info"
        ) from error
    except DockerException as error:  # the SDK itself rejects an option
        raise ImageError(f"{name} cannot be run", found=str(error), fix="docker info") from error


def run_quietly(
    client: DockerClient, row: Target, name: str, command: Sequence[str], options: Mapping[str, Any]
) -> tuple[int, str, str, float]:
    """Exit code, output, errors and seconds of a container, which is removed; raises ``ImageError``
    if it cannot be run."""
    from docker.errors import APIError

    container = create(client, row, name, command, options)
    started = time.monotonic()
    try:
        container.start()
        code = int(container.wait(timeout=_SECONDS)["StatusCode"])
        seconds = time.monotonic() - started
        out, err = (
            container.logs(stdout=stdout, stderr=not stdout).decode(errors="replace")
            for stdout in (True, False)
        )
        return code, out, err, seconds
    except APIError as error:
        raise ImageError(
            f"{name} cannot be run", found=str(error.explanation), fix="docker info"
        ) from error
    finally:
        container.remove(force=True)


def facts_command() -> tuple[str, ...]:
    """What an image runs to say what is in it: this ``contents.py``, whatever flexops it has."""
    return "python", "-c", Path(contents.__file__).read_text(encoding="utf-8"), "facts"


def engine_gpus(client: DockerClient, row: Target) -> GpuOptions:
    """``gpu_options`` for this engine and machine."""
    return gpu_options(row, information(client), look())
