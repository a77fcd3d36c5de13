"""The machine itself: system, Python, environment, settings, GPUs."""

from __future__ import annotations

import difflib
import os
import platform as stdlib_platform
import shutil
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ... import distribution
from ...toolchain.probe import read_text
from ..facts import Gpu, GpuFact, PlatformFact, PythonFact, SettingsFact

if TYPE_CHECKING:
    from ...toolchain.driver import DriverRelease

ENVIRONMENT = (
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "PYTHONPATH",
)
_PREFIX = "FLEXOPS_"
_NEARLY = 0.9  # FLEXOPS_FALBACK is near enough; FLEXOPS_IMAGE_DRIVER is not FLEXOPS_IMAGE_TARGET
_INSTALLERS = (
    ("apt-get", "apt-get install -y"),
    ("dnf", "dnf install -y"),
    ("zypper", "zypper install -y"),
    ("pacman", "pacman -S"),
    ("apk", "apk add"),
)
_CONTAINER_FILES = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
_CONTAINER_GROUPS = (
    ("kubepods", "kubernetes"),
    ("docker", "docker"),
    ("containerd", "containerd"),
    ("lxc", "lxc"),
    ("libpod", "podman"),
)
_PCI_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_PCI_DISPLAY = ("0x0300", "0x0302", "0x0380")


def platform(root: str = "") -> PlatformFact:
    """``root`` is prefixed to ``/proc``, ``/etc`` and the like; empty on a real machine."""
    libc, version = stdlib_platform.libc_ver()
    return PlatformFact(
        system=stdlib_platform.system(),
        release=stdlib_platform.release(),
        machine=stdlib_platform.machine(),
        distribution=_distribution(root),
        libc=f"{libc} {version}".strip(),
        container=container(root),
        installer=_installer(),
    )


def container(root: str = "") -> str:
    """What kind of container this process is in; empty outside one."""
    for path, kind in _CONTAINER_FILES:
        if os.path.exists(root + path):
            return kind
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    groups = read_text(f"{root}/proc/1/cgroup")
    found = next((kind for word, kind in _CONTAINER_GROUPS if word in groups), "")
    return found or _declared(read_text(f"{root}/proc/1/environ"))


def python() -> PythonFact:
    environment: Literal["venv", "conda", "system"] = "system"
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        environment = "conda"
    elif sys.prefix != sys.base_prefix:
        environment = "venv"
    origin: Literal["system", "conda", "other"] = (
        "system" if os.path.realpath(sys.base_prefix) == "/usr" else "other"
    )
    if os.path.isdir(os.path.join(sys.base_prefix, "conda-meta")):
        origin = "conda"
    headers = os.path.join(sysconfig.get_path("include"), "Python.h")
    return PythonFact(
        sys.version_info[:3],
        sys.executable,
        environment,
        os.path.exists(headers),
        origin,
        distribution.namesake(),
    )


def environment() -> dict[str, str]:
    """The variables that change how programs load and run, as far as they are set."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


def settings(environ: Mapping[str, str] | None = None) -> SettingsFact:
    """The settings; a variable that is not understood is reported, and left away so that everything
    else can still be looked at."""
    from ...errors import SettingsError
    from ...settings import Settings

    given = dict(os.environ if environ is None else environ)
    remaining = _Watched(given)
    problems: list[tuple[str, str, str, str]] = []
    while True:
        try:
            found = Settings.from_environ(remaining)
            return SettingsFact(found, tuple(problems), _misspelled(given, remaining.read))
        except SettingsError as error:
            problems.append((error.what, error.found, error.required, error.fix))
            if remaining.pop(error.what.split()[0], None) is None:
                raise


class _Watched(dict[str, str]):
    """Variables that remember which names were asked for: those are the settings."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def _misspelled(given: Mapping[str, str], read: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Variables of flexops' prefix that are not read, but are nearly one that is. Others may belong
    to another program."""
    settings = [name for name in read if name.startswith(_PREFIX)]
    return tuple(
        (name, near[0])
        for name in sorted(given)
        if name.startswith(_PREFIX)
        and name not in read
        and (near := difflib.get_close_matches(name, settings, n=1, cutoff=_NEARLY))
    )


def gpus(root: str = "") -> GpuFact:
    """GPUs that a driver shows, and those on the bus that none does. CUDA is not initialised in
    this process."""
    from ...toolchain import gpus as toolchain_gpus

    seen = toolchain_gpus.machine(root)
    nvidia = tuple(
        Gpu(
            one.name,
            str(one.capability),
            one.memory_bytes,
            slices=None if one.slices is None else len(one.slices),
        )
        for one in seen.gpus
    )
    amd = tuple(
        Gpu("AMD GPU", name, vendor="amd") for name in toolchain_gpus.local_gfx_targets(root)
    )
    vendors = {vendor for vendor, there in (("NVIDIA", nvidia), ("AMD", amd)) if there}
    driver, driver_cuda = (
        (seen.driver.release, seen.driver.cuda) if seen.driver else (_loaded_driver(root), None)
    )
    return GpuFact(
        gpus=nvidia + amd,
        driver=driver,
        driver_cuda=driver_cuda,
        unusable=tuple(
            f"{vendor} GPU at {slot}" for vendor, slot in _on_the_bus(root) if vendor not in vendors
        ),
        problem="" if nvidia else _driver_problem(root),
    )


def _on_the_bus(root: str) -> Iterator[tuple[str, str]]:
    """(vendor, PCI slot) of the display devices that PCI shows; a virtual machine or container may
    show none."""
    devices = f"{root}/sys/bus/pci/devices"
    for slot in sorted(os.listdir(devices)) if os.path.isdir(devices) else ():
        vendor = _PCI_VENDORS.get(read_text(f"{devices}/{slot}/vendor").strip())
        if vendor and read_text(f"{devices}/{slot}/class").startswith(_PCI_DISPLAY):
            yield vendor, slot


def _loaded_driver(root: str) -> DriverRelease | None:
    """The kernel module's release, which is there to be read also where the driver's own library is
    not."""
    import re

    from ...toolchain.driver import DriverRelease

    match = re.search(r"\b(\d{3}(?:\.\d+)+)\b", read_text(f"{root}/proc/driver/nvidia/version"))
    return DriverRelease.parse(match[1]) if match else None


def _driver_problem(root: str) -> str:
    """What nvidia-smi says where there are device nodes and yet no GPU: a driver that does not
    match its kernel module, say."""
    smi = shutil.which("nvidia-smi")
    if smi is None or not os.path.exists(f"{root}/dev/nvidiactl"):
        return ""
    from ...toolchain.probe import output

    try:
        output(smi, "-L")
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _distribution(root: str) -> str:
    lines = read_text(f"{root}/etc/os-release").splitlines()
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("PRETTY_NAME", "").strip("\"'")


def _installer() -> str:
    if os.environ.get("CONDA_PREFIX") and os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        return "conda install -c conda-forge"
    found = next((command for program, command in _INSTALLERS if shutil.which(program)), "")
    return f"sudo {found}" if found and hasattr(os, "geteuid") and os.geteuid() != 0 else found


def _declared(environ: str) -> str:
    """systemd-nspawn, LXC and podman name themselves in their first process's environment."""
    return next(
        (
            entry.partition("=")[2]
            for entry in environ.split("\0")
            if entry.startswith("container=")
        ),
        "",
    )
