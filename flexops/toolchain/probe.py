"""Asks an executable for its version. The only place of the toolchain that runs compilers; callers
remember the answers.

The identity is what enters cache keys: the same for the same version of a tool on two machines, so
it holds no path and no file time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from . import proc
from .version import Version

Probe = Callable[[str, str], "tuple[Version, str]"]
"""``(kind, path) -> (version, identity)``; raises ``OSError`` or ``ValueError`` saying why there is
no answer."""

_SECONDS = 120  # a file system may pause for half a minute, on a machine that is busy besides


def probe(kind: str, path: str) -> tuple[Version, str]:
    """Run ``path`` and read its answer. ``kind`` is ``nvcc``, ``hipcc``, ``c++`` or the name of
    another tool."""
    text = output(path, "-v" if kind == "c++" else "--version")
    return _READERS[kind](text) if kind in _READERS else read_plain(text, kind)


def nvcc_root(path: str) -> str:
    """The toolkit directory that this nvcc works with; it may be a wrapper script far from its
    toolkit. Empty when it does not say."""
    match = re.search(
        r"^#\$ TOP=(.+)$",
        output(path, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"),
        re.MULTILINE,
    )
    return match[1].strip() if match else ""


def output(path: str, *arguments: str) -> str:
    """Both streams of a command, in English; raises ``OSError`` or ``ValueError`` when it does not
    run."""
    environment = {**os.environ, "LC_ALL": "C", "LANGUAGE": "C"}
    done = proc.run([path, *arguments], seconds=_SECONDS, environment=environment)
    if done.status is None:
        raise ValueError(f"gave no answer within {_SECONDS} s")
    if done.status:
        last = (done.output.strip().splitlines() or [""])[-1][:200]
        raise ValueError(f"exits {done.status} when asked for its version: {last}")
    return done.output


def read_compiler(text: str) -> tuple[Version, str]:
    """From ``g++ -v`` or ``clang++ -v``: ``"gcc 12.2.0 (Debian 12.2.0-14+deb12u1)
    x86_64-linux-gnu"``."""
    match = re.search(
        r"^(?P<vendor>.*?)\b(?P<kind>gcc|clang) version (?P<version>[\d.]+)(?P<rest>.*)$",
        text,
        re.MULTILINE,
    )
    if match is None:
        raise ValueError("neither GCC nor clang")
    target = re.search(r"^Target: (\S+)", text, re.MULTILINE)
    words = (
        match["kind"],
        match["version"],
        match["vendor"],
        match["rest"],
        target[1] if target else "",
    )
    return Version.parse(match["version"]), " ".join(" ".join(words).split())


def read_nvcc(text: str) -> tuple[Version, str]:
    """From ``nvcc --version``: version 13.0.88, ``"nvcc 13.0.88
    cuda_13.0.r13.0/compiler.36424714_0"``."""
    match = re.search(r"release [\d.]+, V([\d.]+)", text)
    if match is None:
        raise ValueError("not nvcc: it names no release")
    build = re.search(r"^Build (\S+)", text, re.MULTILINE)
    return Version.parse(match[1]), f"nvcc {match[1]} {build[1] if build else ''}".strip()


def read_hipcc(text: str) -> tuple[Version, str]:
    """From ``hipcc --version``; it also names its clang, which is what compiles."""
    match = re.search(r"HIP version: *(\S+)", text)
    if match is None:
        raise ValueError("not hipcc: it names no HIP version")
    clang = re.search(r"clang version .*", text)
    return Version.parse(match[1]), " ".join(
        f"hipcc {match[1]} {clang[0] if clang else ''}".split()
    )


def read_plain(text: str, kind: str) -> tuple[Version, str]:
    """From ``ninja --version``, ``ccache --version`` and the like: the first dotted number."""
    match = re.search(r"\d+(?:\.\d+)+", text)
    if match is None:
        raise ValueError("it names no version")
    return Version.parse(match[0]), f"{kind} {match[0]}"


_READERS: dict[str, Callable[[str], tuple[Version, str]]] = {
    "c++": read_compiler,
    "nvcc": read_nvcc,
    "hipcc": read_hipcc,
}


def read_text(path: str) -> str:
    """A small file's text; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
