"""Running an image: the GPU options that the host supports, and a container whose output, signals
and exit code are this process's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexops.errors import ImageError
from flexops.targets import Target

from . import contents
from .engine import environment, information, no_program
from .naming import build_command

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

CACHE_VOLUME = "flexops-cache"
_SECONDS = 600
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


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


def comfort(engine: Mapping[str, Any], uid: int, gid: int, *, mounts: bool) -> dict[str, Any]:
    """What a container gets unless it is asked for otherwise. Pure.

    Shared memory as Linux itself gives it, half of the memory: the engine's 64 MB end a
    DataLoader's workers with a bus error. Where a directory of this machine is mounted, the user
    who calls, to whom it belongs; under an engine without root that user is the container's root.
    """
    options: dict[str, Any] = {"shm_size": int(engine.get("MemTotal") or 0) // 2 or None}
    if mounts:
        rootless = any("rootless" in str(one) for one in engine.get("SecurityOptions") or ())
        options["user"] = "0:0" if rootless else f"{uid}:{gid}"
    return {name: value for name, value in options.items() if value}


def run(
    client: DockerClient, row: Target, name: str, command: Sequence[str], options: Mapping[str, Any]
) -> int:
    """Run a command (empty: the image's own) in a new container and return its exit code. The
    program docker attaches it to this terminal, and passes signals on; the container is removed.

    Raises:
        ImageError: the image is missing, or the engine rejects or cannot start it.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    terminal = {"tty": interactive, "stdin_open": interactive}
    container = create(client, row, name, command, {**terminal, **options})
    attach = ["docker", "start", "--attach", *(["--interactive"] if interactive else [])]
    try:
        # a terminal sends its signals to the whole group, and docker is to get each once
        process = subprocess.Popen(
            [*attach, str(container.id)], env=environment(), start_new_session=not interactive
        )
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: process.send_signal(number))
        code = process.wait()
        container.reload()
        if problem := container.attrs["State"].get("Error"):
            raise ImageError(
                "the container cannot be started",
                found=problem,
                fix="docker info   # GPUs need the container toolkit",
            )
        return code
    except FileNotFoundError as error:
        raise no_program(str(error)) from error
    finally:
        container.remove(force=True)


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
        raise ImageError(
            f"{name} cannot be run", found=str(error), fix="flexops image run --help"
        ) from error


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


def engine_comfort(client: DockerClient, *, mounts: bool) -> dict[str, Any]:
    """``comfort`` for this engine and user."""
    return comfort(information(client), os.getuid(), os.getgid(), mounts=mounts)
