"""What is written beside every library, and the judgement whether that library can run here, made
before it is opened."""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from ... import _json, trust
from ..._version import __version__
from ...errors import ArchitectureError
from ...toolchain.installed_torch import TorchBuild
from ...toolchain.version import Version
from ..plan.cache_key import SCHEMA, Digests

FILE_NAME = "manifest.json"

ABI = 1
"""What a library and the flexops that opens it agree on: how it is given its kernels
(``csrc/common/launch.h``), how kernels' names stand in its file. Raised when that changes, so that
a project's library that an older flexops compiled is rejected with this as the reason."""
_NONE: dict[str, Any] = {}  # never written to


class Manifest(NamedTuple):
    """The record of one artifact. (A NamedTuple, as in ``toolchain/model.py``.)

    Attributes:
        name: ``<op>-<device>``, or the name of a user's extension.
        key, base: see ``cache_key``.
        device: torch's device type.
        library, size, crc32, sha256: the file this manifest speaks of. ``BuildCache.publish`` adds
            the SHA-256.
        torch_abi: ``TorchBuild.abi_id`` of the torch it was built against.
        cuda_version: of what compiled device code, "" for host code.
        architectures: of device code: what it is for, such as ``("9.0",)`` or ``("compute_90",)``;
            of an installed library for CUDA: what its kernels, which lie beside it, were compiled
            for; for AMD GPUs: what is compiled in.
        isa_levels: the CPU kernels compiled in.
        glibc, glibcxx: the newest symbol versions that the library needs, "" for none.
        files: what it was made from (sources, headers, and the files that chose the commands),
            relocatable name -> sha256.
        kernel, symbol, compiler: of device code: the kernel as C++ names it and as the driver does,
            and what compiled it.
        resources: of device code: registers, stack, spills and shared memory, by ptxas.
        flexops: the version of flexops that planned the build.
        abi: ``ABI`` of that flexops; 0 in manifests that do not say.
        own_crc32: of the other fields, so that a flipped bit does not turn one architecture into
            another; "" in manifests that do not say.
    """

    name: str
    key: str
    base: str
    device: str
    library: str
    size: int
    crc32: str
    torch_abi: str
    cuda_version: str = ""
    architectures: tuple[str, ...] = ()
    isa_levels: tuple[str, ...] = ()
    glibc: str = ""
    glibcxx: str = ""
    files: Digests = _NONE
    kernel: str = ""
    symbol: str = ""
    compiler: str = ""
    resources: dict[str, int] = _NONE
    flexops: str = __version__
    schema: str = SCHEMA
    abi: int = ABI
    sha256: str = ""
    own_crc32: str = ""

    def to_json(self) -> str:
        return (
            json.dumps({**self._asdict(), "own_crc32": self._crc32()}, indent=1, sort_keys=True)
            + "\n"
        )

    def is_damaged(self) -> bool:
        """Whether this is not what was written."""
        return self.own_crc32 not in ("", self._crc32())

    def _crc32(self) -> str:
        text = json.dumps({**self._asdict(), "own_crc32": ""}, sort_keys=True)
        return f"{zlib.crc32(text.encode()):08x}"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ``ValueError`` if the text is no manifest of this schema."""
        data: Any = _json.parse(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"not a manifest of schema {SCHEMA}")
        known = set(cls._fields)
        if (
            missing := {"name", "key", "base", "library", "size", "crc32", "torch_abi", "device"}
            - data.keys()
        ):
            raise ValueError(f"manifest lacks {', '.join(sorted(missing))}")
        for name in known & data.keys():
            _check(name, data[name])
        for name in ("architectures", "isa_levels"):
            data[name] = tuple(data.get(name, ()))
        return cls(**{"abi": 0, **{name: value for name, value in data.items() if name in known}})


def _check(name: str, value: Any) -> None:
    """Raises ``ValueError`` for a value that the field cannot have. Names become paths, so they
    must be plain."""
    if name in ("architectures", "isa_levels"):
        good = isinstance(value, list) and all(
            isinstance(item, str) and (name == "isa_levels" or _is_architecture(item))
            for item in value
        )
    elif name == "files":
        good = isinstance(value, dict) and all(
            _is_path(item) and isinstance(digest, str) for item, digest in value.items()
        )
    elif name == "resources":
        good = isinstance(value, dict) and all(
            type(number) is int and 0 <= number < 2**31 for number in value.values()
        )
    elif name in ("size", "abi"):
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    elif name in ("cuda_version", "glibc", "glibcxx"):
        good = value == "" or (
            isinstance(value, str)
            and all(
                part.isdecimal() and part.isascii() and len(part) < 10 for part in value.split(".")
            )
        )
    else:
        good = isinstance(value, str) and (
            name not in ("name", "key", "base", "library") or is_plain(value)
        )
    if not good:
        raise ValueError(f"manifest field {name} is {str(value)[:200]!r}")


def is_plain(name: str) -> bool:
    """Whether this names a file or directory, visible and right here."""
    return (
        name.isprintable()
        and "/" not in name
        and not name.startswith(".")
        and 0 < len(name.encode()) < 256
    )


def _is_path(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _is_architecture(text: str) -> bool:
    if text.startswith("gfx"):
        return text.isascii() and text.isalnum()
    from ...compute_capability import parse_arch_list

    try:
        return len(text) < 20 and bool(parse_arch_list(text))
    except ArchitectureError:
        return False


class Rejection(NamedTuple):
    """Why a library or a way to get one is not taken, and what would change that."""

    reason: str
    fix: str = ""


def judge(manifest: Manifest, torch: TorchBuild) -> Rejection | None:
    """None if the library can be opened by a process with that torch and will run here; otherwise
    why not. Opens nothing."""
    if manifest.abi != ABI:
        return Rejection(
            f"compiled by flexops {manifest.flexops}, whose libraries have ABI {manifest.abi}; this"
            f" one opens ABI {ABI}",
            "flexops build",
        )
    if manifest.torch_abi != torch.abi_id:
        return Rejection(
            f"built for torch ABI {manifest.torch_abi}, this is {torch.abi_id} (torch"
            f" {torch.version})",
            "flexops build",
        )
    return _judge_symbols(manifest, torch.cxx11_abi)


def _judge_symbols(manifest: Manifest, cxx11_abi: bool) -> Rejection | None:
    """Where this process's own libraries cannot be looked at, opening the library will show it."""
    fix = "build on this system: flexops build"
    glibc = _glibc() if manifest.glibc else ""
    if glibc and Version.parse(manifest.glibc) > Version.parse(glibc):
        return Rejection(f"needs glibc {manifest.glibc}, this system has {glibc}", fix)
    # The C++11 ABI came with GLIBCXX_3.4.21: a torch that has that ABI has loaded a libstdc++ with
    # these symbols, which saves reading it.
    surely_there = not manifest.glibcxx or (
        cxx11_abi and Version.parse(manifest.glibcxx) <= Version((3, 4, 21))
    )
    libstdcxx = "" if surely_there else _libstdcxx()
    if libstdcxx and not _defines(libstdcxx, f"GLIBCXX_{manifest.glibcxx}"):
        return Rejection(f"needs GLIBCXX_{manifest.glibcxx}, which {libstdcxx} lacks", fix)
    return None


def verify(
    directory: Path, manifest: Manifest, *, strict: bool = False, own: bool = False
) -> Rejection | None:
    """None if the library is the very one that the manifest speaks of.

    Args:
        strict: by its SHA-256, which says so to those who trust the manifest; otherwise by its
            CRC-32, which only finds damage, in a third of the time or less: every start reads whole
            libraries, and who can change one in a private cache can change the manifest beside it.
        own: reject a library that another user could change.
    """
    library, fix = directory / manifest.library, "flexops cache clear"
    if strict and not manifest.sha256:
        return Rejection(
            f"the manifest of {library} has no SHA-256", "build it again, with this flexops"
        )
    try:
        descriptor = os.open(library, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if own and (problem := trust.problem(status)):
                return Rejection(f"{library} {problem}", fix)
            same = (
                stat.S_ISREG(status.st_mode)
                and status.st_size == manifest.size
                and not manifest.is_damaged()
            )
            if not same or _digest(descriptor, strict) != (
                manifest.sha256 if strict else manifest.crc32
            ):
                return Rejection(
                    f"{library} is not the file that its manifest describes (damaged, truncated, or"
                    " swapped)",
                    fix,
                )
        finally:
            os.close(descriptor)
    except OSError as error:
        return Rejection(f"{library} cannot be read: {error.strerror}", fix)
    return None


def file_crc32(path: Path) -> str:
    """CRC-32 of a file's content, in hex."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _digest(descriptor, sha256=False)
    finally:
        os.close(descriptor)


def _digest(descriptor: int, sha256: bool) -> str:
    secure, value = hashlib.sha256(), 0
    while chunk := os.read(descriptor, 1 << 16):
        if sha256:
            secure.update(chunk)
        else:
            value = zlib.crc32(chunk, value)
    return secure.hexdigest() if sha256 else f"{value:08x}"


def needed_versions(library: Path) -> tuple[str, str]:
    """The newest GLIBC and GLIBCXX symbol versions that an ELF library names."""
    content = library.read_bytes()
    return _newest(rb"GLIBC_(\d+(?:\.\d+)+)\0", content), _newest(
        rb"GLIBCXX_(\d+(?:\.\d+)+)\0", content
    )


def _newest(pattern: bytes, content: bytes) -> str:
    versions = [Version.parse(match.decode()) for match in set(re.findall(pattern, content))]
    return str(max(versions)) if versions else ""


@functools.cache
def _glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    except (ValueError, OSError):
        return ""


@functools.cache
def _libstdcxx() -> str:
    """Path of the libstdc++ that this process has loaded (torch loads it); "" if that is
    unknown."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return next(
                (line.split(maxsplit=5)[5].strip() for line in maps if "libstdc++.so" in line), ""
            )
    except OSError:
        return ""


@functools.cache
def _defines(library: str, version: str) -> bool:
    """Whether a library has that symbol version; True if it cannot be read."""
    try:
        # mapped: the names are near its start
        with (
            open(library, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(version.encode() + b"\0") >= 0
    except (OSError, ValueError):
        return True
