"""torch's headers, precompiled once for each compiler, torch and set of flags, and shared by
everything that ``flexops.load`` builds.

Nine tenths of compiling a small extension is ``torch/extension.h``. g++ reads a precompiled one in
place of parsing it, provided that it was made with the same flags, by the same compiler, and is
included first. Making it takes as long as two kernels do, so a process of its own makes it at the
lowest priority, beside the first kernel where there are processors to spare, else after it.

    <cache>/pch-torch/<key>/{torch_extension.h, torch_extension.h.gch, manifest.json}
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ... import trust
from ...settings import LogLevel
from ...toolchain import proc
from ...toolchain.model import HostCompiler, TorchBuild
from ..plan.cache_key import digest_fields
from ..store.cache import OWNER_LOCK, BuildCache, read_manifest
from ..store.manifest import FILE_NAME, Manifest
from . import pch_worker
from .progress import say

HEADER = "torch/extension.h"
NAME = "pch-torch"
PEAK_BYTES = 3 * 2**30
"""Upper bound on the memory that making one takes: 2.5 GB were measured with torch 2.13."""
FREE_DISK_BYTES = 3 * 2**30
"""On a disk with less room than this none is made: itself, and something to spare."""

_FILE = "torch_extension.h"
_SIZE = 2**30  # 790 MB were measured with torch 2.13
_RETRY_SECONDS = 86400.0
# Directories whose presence on the user's own include path could put other headers under torch's
# names.
_TORCH_PARTS = ("torch", "ATen", "c10", "caffe2", "pybind11", "Python.h")

# kept, so that no ResourceWarning says that one is still running
_background: list[proc.Process] = []


@dataclass(frozen=True)
class PrecompiledHeader:
    """A precompiled ``torch/extension.h`` that is, or could be, in a cache."""

    directory: Path
    command: tuple[str, ...]
    torch_abi: str
    own: bool = True

    @property
    def header(self) -> Path:
        """What to ``-include``; g++ takes the ``.gch`` beside it, or reads this if it cannot."""
        return self.directory / _FILE

    @property
    def depfile(self) -> Path:
        """What it was made of."""
        return self.directory / f"{_FILE}.d"

    @property
    def key(self) -> str:
        return self.directory.name

    def is_there(self) -> bool:
        """Whether it can be used now. Not verified by digest: g++ itself checks that it was made by
        this compiler, with these flags."""
        entry = read_manifest(self.directory, own=self.own)
        try:
            status = entry.library.stat() if entry else None
        except OSError:
            return False
        return (
            entry is not None
            and status is not None
            and status.st_size == entry.manifest.size
            and not (self.own and trust.problem(status))
        )


def describe(
    root: Path,
    flags: tuple[str, ...],
    host: HostCompiler,
    torch: TorchBuild,
    torch_abi: str,
    environment: tuple[tuple[str, str], ...] = (),
    *,
    own: bool = True,
) -> PrecompiledHeader | None:
    """The precompiled header for those flags; None if this compiler's are not supported, the flags
    include something first, or torch has no headers.

    Args:
        root: the cache's.
        flags: of the compile, less what differs between extensions and cannot matter to torch's
            headers.
        environment: the variables that compilers read by themselves.
        own: one that another user could have made is ignored; otherwise (a shared cache) it is.
    """
    if host.kind != "gcc" or any(flag in ("-include", "-imacros") for flag in flags):
        return None
    # With -MD it remembers what it read, for the dependency files of its users (-fpch-deps).
    command = (
        str(host.path),
        *flags,
        "-x",
        "c++-header",
        _FILE,
        "-o",
        f"{_FILE}.gch",
        "-MD",
        "-MF",
        f"{_FILE}.d",
    )
    try:
        stamps = [
            str(os.stat(path).st_mtime_ns)
            for path in (torch.root / "version.py", torch.include_dirs[0] / HEADER)
        ]
    except OSError:
        return None
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    facts = [
        ("compiler", host.identity),
        ("torch", torch_abi),
        ("torch files", " ".join(stamps)),
        ("libc", libc or ""),
        ("command", "\0".join(command)),
    ]
    facts += environment
    return PrecompiledHeader(root / NAME / digest_fields(facts), command, torch_abi, own)


def shadowed(include_dirs: tuple[str, ...]) -> bool:
    """Whether a directory on the user's include path holds other headers of torch, pybind11 or
    Python."""
    return any(
        os.path.exists(os.path.join(directory, part))
        for directory in include_dirs
        for part in _TORCH_PARTS
    )


def make(
    pch: PrecompiledHeader,
    cache: BuildCache,
    *,
    wait: bool,
    timeout: int = 0,
    log: LogLevel = "quiet",
) -> None:
    """Make it, and say so: now, or in the background. Does nothing where there is no room for it or
    a recent attempt failed."""
    if not _sensible(pch, cache):
        return
    when, most = "first" if wait else "in the background", cache.max_bytes / 2 / 2**30
    say(
        f"torch's headers are precompiled {when}, once for all extensions with these flags: about"
        f" 0.8 GB in {cache.root / NAME}, where at most {most:.1f} GB of such are kept"
        " (FLEXOPS_PCH=0: never)",
        log,
    )
    order = json.dumps(_order(pch, cache, wait, timeout))
    process = proc.start(
        [sys.executable, "-I", pch_worker.__file__, order],
        stdout=proc.DEVNULL,
        stderr=proc.DEVNULL,
        directory=None if wait else "/",
    )
    if wait:
        proc.finish(process)
    else:
        _background[:] = [one for one in (*_background, process) if one.poll() is None]


def drop(pch: PrecompiledHeader, cache: BuildCache) -> None:
    """Remove one that the compiler could not use."""
    cache.remove(pch.directory)


def _order(
    pch: PrecompiledHeader, cache: BuildCache, wait: bool, timeout: int
) -> dict[str, object]:
    manifest = Manifest(
        name=NAME,
        key=pch.key,
        base=pch.key,
        device="cpu",
        library=f"{_FILE}.gch",
        size=0,
        crc32="",
        torch_abi=pch.torch_abi,
    )
    return {
        "command": pch.command,
        "header": _FILE,
        "text": f"#include <{HEADER}>\n",
        "final": str(pch.directory),
        "lock": str(cache.root / ".locks" / f"{NAME}-{pch.key}.lock"),
        "workspaces": str(cache.root / ".tmp"),
        "owner_lock": OWNER_LOCK,
        "manifest": manifest._asdict(),
        "manifest_file": FILE_NAME,
        "wait": wait,
        "timeout": timeout or None,
        "own": pch.own,
    }


def _sensible(pch: PrecompiledHeader, cache: BuildCache) -> bool:
    try:
        failed = pch.directory.with_suffix(".failed").stat().st_mtime
        if abs(time.time() - failed) < _RETRY_SECONDS:  # one of the future is of another clock
            return False
    except OSError:
        pass  # it has never failed
    total = 0
    # the most recently used first; those of other flags make room when they are many
    for entry in cache.candidates(NAME):
        total += entry.size
        if total + _SIZE > cache.max_bytes // 2:
            cache.remove(entry.directory)
    return cache.max_bytes // 2 >= _SIZE and shutil.disk_usage(cache.root).free > FREE_DISK_BYTES
