"""What builds are done with and where they go: toolchain, launcher, cache, lock files,
libraries."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..facts import CacheFact, LibraryFact, LockFile

if TYPE_CHECKING:
    from ...build.describe.spec import DeviceType
    from ...build.store.manifest import Manifest, Rejection
    from ...settings import Settings
    from ...toolchain.model import Toolchain
    from ...toolchain.nvrtc import DeviceCompiler
    from ...toolchain.resources import Resources
    from ...toolchain.select import Choice


def tools(chosen: Settings, device: DeviceType) -> Toolchain:
    from ...toolchain import discover

    return discover(chosen, device=device)


def device_compiler(chosen: Settings) -> Choice[DeviceCompiler]:
    from ...toolchain import device_compiler as find
    from ...toolchain import device_headers

    choice = find(chosen)
    roots = device_headers.roots(choice.value) if choice.value else ()
    choice.notes += tuple(f"headers of {one}" for one in roots)
    return choice


def unregistered() -> tuple[tuple[str, str], ...]:
    from ...builder import registered

    return tuple(registered.unregistered())


def resources() -> Resources:
    from ...toolchain.resources import detect

    return detect()


def cache(chosen: Settings) -> CacheFact:
    """The build cache's directory, or the nearest one above it that is there."""
    from ...build.load.loader import open_cache

    store = open_cache(chosen)
    there = next(path for path in (store.root, *store.root.parents) if os.path.isdir(path))
    system = os.statvfs(there)
    info = store.info()
    return CacheFact(
        root=store.root,
        exists=there == store.root,
        problem=info.problem,
        unwritable=_unwritable(there, system),
        noexec=bool(system.f_flag & getattr(os, "ST_NOEXEC", 0)),
        free_bytes=system.f_bavail * system.f_frsize,
        entries=info.entries,
        size=info.size,
        max_size=info.max_size,
        quarantined=info.quarantined,
    )


def _unwritable(directory: Path, system: os.statvfs_result) -> str:
    if system.f_flag & os.ST_RDONLY:
        return f"{directory} is on a read-only file system"
    if os.access(directory, os.W_OK | os.X_OK):
        return ""
    seen = directory.stat()
    return (
        f"{directory} may not be written to (owner {seen.st_uid}, mode {seen.st_mode & 0o7777:o},"
        f" you are {os.geteuid()})"
    )


def locks(environ: dict[str, str] | None = None) -> tuple[LockFile, ...]:
    """torch's own lock files. Its cpp_extension waits for one to vanish, for ever if its maker
    died."""
    variables = os.environ if environ is None else environ
    base = variables.get("TORCH_EXTENSIONS_DIR") or os.path.join(
        variables.get("XDG_CACHE_HOME")
        or os.path.join(variables.get("HOME") or os.path.expanduser("~"), ".cache"),
        "torch_extensions",
    )
    paths = list(_lock_files(base, depth=2))
    held = _open_files() if paths else frozenset()
    now = time.time()
    return tuple(
        LockFile(
            path,
            max(0.0, now - os.path.getmtime(path)),
            None if held is None else os.path.realpath(path) in held,
        )
        for path in paths
    )


def _lock_files(directory: str, depth: int) -> Iterator[str]:
    """``<base>/<extension>/lock`` with TORCH_EXTENSIONS_DIR, ``<base>/<python and
    CUDA>/<extension>/lock`` without."""
    with contextlib.suppress(OSError), os.scandir(directory) as scan:
        for item in sorted(scan, key=lambda entry: entry.name):
            if not item.is_dir(follow_symlinks=False) or item.name.startswith("."):
                continue
            if os.path.isfile(lock := os.path.join(item.path, "lock")):
                yield lock
            if depth > 1:
                yield from _lock_files(item.path, depth - 1)


def _open_files() -> frozenset[str] | None:
    """Every file that a process of this user has open; None where /proc does not show them."""
    if not os.path.isdir("/proc/self/fd"):
        return None
    found: set[str] = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
    return frozenset(found)


def libraries(found: Toolchain, chosen: Settings) -> tuple[LibraryFact, ...]:
    """The libraries there are for each op and device type: compiled at install, and in the cache;
    each judged as the loader would."""
    from ...build.compile import device_code
    from ...build.describe import catalog, layout
    from ...build.load import loader
    from ...build.plan import kernel_names
    from ...build.store.cache import read_entry
    from ...build.store.manifest import judge

    if found.torch is None:
        return ()
    cached_ones = loader.open_cache(chosen)
    facts: list[LibraryFact] = []
    for spec in catalog.CATALOG:
        for device in spec.devices:
            entry, damage = read_entry(layout.aot_root() / f"{spec.name}-{device}")
            if damage:
                facts.append(LibraryFact(spec.name, device, "aot", (), damage.reason, damage.fix))
            if entry:
                refusal = judge(entry.manifest, found.torch)
                facts.append(_library(spec.name, device, "aot", entry.manifest, refusal))
            for cached in cached_ones.candidates(f"{spec.name}-{device}"):
                refusal = judge(cached.manifest, found.torch)
                own = [cached.manifest]
                if device == "cuda" and not found.torch.hip:  # its kernels are entries of their own
                    kept = device_code.kept_for(
                        cached_ones, spec.name, kernel_names.names_in(cached.library)
                    )
                    own = [
                        cached.manifest._replace(cuda_version=version, architectures=tuple(names))
                        for version, names in kept.items()
                    ] or own
                facts += [
                    _library(spec.name, device, "cache", manifest, refusal) for manifest in own
                ]
    return tuple(facts)


def _library(
    op: str,
    device: str,
    origin: Literal["aot", "cache"],
    manifest: Manifest,
    refusal: Rejection | None,
) -> LibraryFact:
    reason, fix = (refusal.reason, refusal.fix) if refusal else ("", "")
    return LibraryFact(
        op,
        device,
        origin,
        manifest.architectures,
        reason,
        fix,
        manifest.torch_abi,
        manifest.cuda_version,
    )
