"""Every environment variable that flexops reads, read in one place.

The variables that the PyTorch world already knows keep their meaning: ``TORCH_CUDA_ARCH_LIST``,
``PYTORCH_ROCM_ARCH``, ``MAX_JOBS``, ``NVCC_THREADS``, ``CUDA_HOME``/``CUDA_PATH``,
``ROCM_HOME``/``ROCM_PATH``, ``TORCH_EXTENSIONS_DIR``, ``CXX``, ``CC``.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, cast, get_args

from .errors import SettingsError

T = TypeVar("T")

Fallback = Literal["allow", "warn", "forbid"]
LogLevel = Literal["quiet", "info", "debug"]
DeviceCompiler = Literal["auto", "nvcc", "nvrtc"]
Precompile = Literal["auto", "0", "1"]
CpuIsa = Literal["baseline", "avx2", "avx512"]
AotDevice = Literal["cpu", "cuda"]
Machine = Literal["x86_64", "aarch64"]

_COMPILER_VARIABLES = (
    *(
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "LD_RUN_PATH",
        "COMPILER_PATH",
        "GCC_EXEC_PREFIX",
        "SOURCE_DATE_EPOCH",
    ),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CCC_OVERRIDE_OPTIONS"),
    *(
        "HIPCC_COMPILE_FLAGS_APPEND",
        "HIPCC_LINK_FLAGS_APPEND",
        "HIP_CLANG_PATH",
        "HIP_DEVICE_LIB_PATH",
    ),
)
_DEFAULT_CACHE_BYTES = 5 * 2**30
_DEFAULT_TIMEOUT = 3600
_DEFAULT_WAIT = 60
_DEFAULT_REMOTE_TIMEOUT = 10.0
_REMOTES = ("s3", "gs", "az", "https", "oci", "file")
_NEAR = ("localhost", "127.0.0.1", "[::1]")
_MOST_DIGITS = 9
_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class SecretUrl:
    """A URL that may hold a password. It prints without one; ``reveal()`` returns all of it."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretUrl) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        from .redaction import redacted

        return redacted(self._text)


class Settings(NamedTuple):
    """The user's settings, as the environment states them; docs/configuration.md explains each
    variable. Nothing here is probed. (A NamedTuple, as in ``toolchain/model.py``.)

    Attributes:
        cache_copies: where verified copies of a shared cache's signed entries are kept; None
            without ``cache_trusted_keys``.
        aot: operators that an install compiles: none, ``all`` or names.
        arch_list, rocm_arch_list, cuda_visible_devices: unparsed; None when unset (an empty
            ``CUDA_VISIBLE_DEVICES`` hides every GPU).
        cpu_isa: the kernels read it themselves, once (csrc/common/cpu.h).
        compiler_environment: (name, value) of the variables that compilers and linkers read by
            themselves, such as ``CPATH``.
        image: ``FLEXOPS_IMAGE_TARGET``: the row whose image this runs in; empty elsewhere.
    """

    cache_dir: Path
    cache_max_bytes: int
    cache_shared: bool
    fallback: Fallback
    jit: bool
    log: LogLevel
    aot: tuple[str, ...]
    launcher: str | None
    arch_list: str | None
    rocm_arch_list: str | None
    max_jobs: int | None
    nvcc_threads: int | None
    cpu_isa: CpuIsa
    cuda_home: Path | None
    rocm_home: Path | None
    cxx: str | None
    cc: str | None
    search_path: tuple[str, ...] = ()
    conda_prefix: Path | None = None
    virtual_env: Path | None = None
    cuda_visible_devices: str | None = None
    cuda_device_order: str = "FASTEST_FIRST"
    aot_dir: Path | None = None
    aot_devices: tuple[AotDevice, ...] = ()
    wheel: Machine | Literal[""] = ""
    pch: Precompile = "auto"
    device_compiler: DeviceCompiler = "auto"
    compile_timeout: int = 3600
    compiler_environment: tuple[tuple[str, str], ...] = ()
    cache_signing_key: Path | None = None
    cache_trusted_keys: Path | None = None
    cache_copies: Path | None = None
    cache_remote: SecretUrl = SecretUrl()
    cache_remote_write: bool = False
    cache_remote_timeout: float = _DEFAULT_REMOTE_TIMEOUT
    cache_remote_http: bool = False
    compile_wait: int = 60
    record: Path | None = None
    autotune: bool = True
    image: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings out of ``environ``; raises ``SettingsError`` naming the variable."""
        get = environ.get
        return cls(
            cache_dir=_cache_dir(environ),
            cache_max_bytes=(
                parse_size("FLEXOPS_CACHE_MAX_SIZE", size)
                if (size := get("FLEXOPS_CACHE_MAX_SIZE"))
                else _DEFAULT_CACHE_BYTES
            ),
            cache_shared=_choice(environ, "FLEXOPS_CACHE_SHARED", "0", ("0", "1")) == "1",
            fallback=cast(
                Fallback, _choice(environ, "FLEXOPS_FALLBACK", "warn", get_args(Fallback))
            ),
            jit=_choice(environ, "FLEXOPS_JIT", "1", ("0", "1")) == "1",
            autotune=_choice(environ, "FLEXOPS_AUTOTUNE", "1", ("0", "1")) == "1",
            log=cast(LogLevel, _choice(environ, "FLEXOPS_LOG", "info", get_args(LogLevel))),
            aot=tuple(name for name in _words(get("FLEXOPS_AOT", "")) if name not in ("0", "none")),
            launcher=get("FLEXOPS_COMPILER_LAUNCHER") or None,
            arch_list=get("TORCH_CUDA_ARCH_LIST", "").strip() or None,
            rocm_arch_list=get("PYTORCH_ROCM_ARCH", "").strip() or None,
            max_jobs=_whole(environ, "MAX_JOBS", 1, None),
            nvcc_threads=_whole(environ, "NVCC_THREADS", 1, None),
            cpu_isa=cast(CpuIsa, _choice(environ, "FLEXOPS_CPU_ISA", "avx512", get_args(CpuIsa))),
            cuda_home=_path(environ, "CUDA_HOME", "CUDA_PATH"),
            rocm_home=_path(environ, "ROCM_HOME", "ROCM_PATH"),
            cxx=get("CXX") or None,
            cc=get("CC") or None,
            search_path=tuple(entry for entry in get("PATH", "").split(os.pathsep) if entry),
            conda_prefix=_path(environ, "CONDA_PREFIX"),
            virtual_env=_path(environ, "VIRTUAL_ENV"),
            cuda_visible_devices=get("CUDA_VISIBLE_DEVICES"),
            cuda_device_order=get("CUDA_DEVICE_ORDER") or "FASTEST_FIRST",
            aot_dir=_path(environ, "FLEXOPS_AOT_DIR"),
            aot_devices=_devices(get("FLEXOPS_AOT_DEVICES", "")),
            wheel=cast(Machine, _choice(environ, "FLEXOPS_WHEEL", "", ("", *get_args(Machine)))),
            compile_timeout=_whole(environ, "FLEXOPS_COMPILE_TIMEOUT", 0, _DEFAULT_TIMEOUT),
            compiler_environment=tuple(
                (name, value) for name in _COMPILER_VARIABLES if (value := get(name))
            ),
            device_compiler=cast(
                DeviceCompiler,
                _choice(environ, "FLEXOPS_DEVICE_COMPILER", "auto", get_args(DeviceCompiler)),
            ),
            pch=cast(Precompile, _choice(environ, "FLEXOPS_PCH", "auto", get_args(Precompile))),
            cache_signing_key=_path(environ, "FLEXOPS_CACHE_SIGNING_KEY"),
            cache_trusted_keys=_path(environ, "FLEXOPS_CACHE_TRUSTED_KEYS"),
            cache_copies=_copies_dir(environ) if get("FLEXOPS_CACHE_TRUSTED_KEYS") else None,
            cache_remote=_remote(get("FLEXOPS_CACHE_REMOTE", ""), plain := _plain(environ)),
            cache_remote_write=_choice(environ, "FLEXOPS_CACHE_REMOTE_WRITE", "0", ("0", "1"))
            == "1",
            cache_remote_timeout=_seconds(
                "FLEXOPS_CACHE_REMOTE_TIMEOUT",
                get("FLEXOPS_CACHE_REMOTE_TIMEOUT", ""),
                _DEFAULT_REMOTE_TIMEOUT,
            ),
            cache_remote_http=plain,
            compile_wait=_whole(environ, "FLEXOPS_COMPILE_WAIT", 0, _DEFAULT_WAIT),
            record=_path(environ, "FLEXOPS_RECORD"),
            image=get("FLEXOPS_IMAGE_TARGET", ""),
        )


@functools.cache
def current() -> Settings:
    """The settings of this process; the environment is read at the first call only."""
    return Settings.from_environ(os.environ)


def _cache_dir(environ: Mapping[str, str]) -> Path:
    if own := _path(environ, "FLEXOPS_CACHE_DIR"):
        return own
    if extensions := _path(environ, "TORCH_EXTENSIONS_DIR"):
        return extensions / "flexops"
    if base := _path(environ, "XDG_CACHE_HOME"):
        return base / "flexops"
    try:
        return Path.home().absolute() / ".cache" / "flexops"
    except (
        RuntimeError,
        FileNotFoundError,
    ):  # no HOME, and a user id that the system has no name for, as containers have them
        return Path(environ.get("TMPDIR") or "/tmp") / f"flexops-{os.getuid()}"


def _copies_dir(environ: Mapping[str, str]) -> Path:
    """Beside the cache that this user would have, had none been named: that one may be others'
    too."""
    return _cache_dir({"XDG_CACHE_HOME": environ.get("XDG_CACHE_HOME", "")}).with_name(
        "flexops-verified"
    )


def _devices(text: str) -> tuple[AotDevice, ...]:
    names = _words(text)
    if wrong := set(names) - set(get_args(AotDevice)):
        required, fix = "cpu | cuda | cpu,cuda", "unset FLEXOPS_AOT_DEVICES"
        raise SettingsError(
            "FLEXOPS_AOT_DEVICES is not understood",
            found=", ".join(sorted(wrong)),
            required=required,
            fix=fix,
        )
    return tuple(device for device in get_args(AotDevice) if device in names)


def _words(text: str) -> list[str]:
    """The pieces between blanks, commas and semicolons. Without a regular expression: to compile
    one takes a tenth of a warm start."""
    return text.replace(",", " ").replace(";", " ").split()


def _path(environ: Mapping[str, str], *names: str) -> Path | None:
    """The first of these variables that is set, as an absolute path."""
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None
    text, required, fix = environ[name], "an absolute path", f"export {name}=<an absolute path>"
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError
        return Path(text).expanduser().absolute()
    except ValueError:  # also of what no file system could spell
        raise SettingsError(
            f"{name} is no path", found=repr(text), required=required, fix=fix
        ) from None
    except RuntimeError:
        raise SettingsError(
            f"{name} names a home directory that this system does not know",
            found=text,
            required=required,
            fix=fix,
        ) from None
    except FileNotFoundError:
        found = f"{text}, and no working directory (it has been removed)"
        raise SettingsError(
            f"{name} is relative to a directory that is gone",
            found=found,
            required=required,
            fix=fix,
        ) from None


def _choice(environ: Mapping[str, str], name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = environ.get(name, "").strip().lower() or default
    if value not in allowed:
        raise SettingsError(
            f"{name} is not understood",
            found=value,
            required=" | ".join(allowed),
            fix=f"export {name}={default}",
        )
    return value


def _whole(environ: Mapping[str, str], name: str, least: int, default: T) -> int | T:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not (
        text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) >= least
    ):
        required = f"{least}, {least + 1}, {least + 2}, ... of at most {_MOST_DIGITS} digits"
        raise SettingsError(
            f"{name} is not a {'positive ' if least else ''}whole number",
            found=_shortened(text),
            required=required,
            fix=f"unset {name}",
        )
    return int(text)


def _plain(environ: Mapping[str, str]) -> bool:
    return _choice(environ, "FLEXOPS_CACHE_REMOTE_HTTP", "0", ("0", "1")) == "1"


def _remote(text: str, plain: bool) -> SecretUrl:
    """A remote cache's URL. HTTP without encryption is for servers on this machine unless
    ``plain``: on a network another machine could answer with a library of its own. The error
    prints no secrets.
    """
    text = text.strip()
    if not text:
        return SecretUrl()
    from .redaction import redacted

    scheme, separator, rest = text.partition("://")
    place = re.split("[/?#]", rest)[0]
    near = scheme == "http" and (plain or is_loopback(place))
    required = " | ".join(f"{name}://..." for name in _REMOTES)
    required += "; http:// for this machine, or with FLEXOPS_CACHE_REMOTE_HTTP=1"
    fix = "export FLEXOPS_CACHE_REMOTE=s3://bucket/prefix"
    if not (near or scheme in _REMOTES) or not rest or not text.isprintable() or " " in text:
        found = "/".join(redacted(text).split("/")[:3]) if separator else "no ://"
        what = "FLEXOPS_CACHE_REMOTE is no URL of a store"
        raise SettingsError(what, found=_shortened(found), required=required, fix=fix)
    if scheme == "file" and place:
        raise SettingsError(
            "FLEXOPS_CACHE_REMOTE names a directory of another machine",
            found=_shortened(text),
            required="an absolute path: three slashes",
            fix=f"export FLEXOPS_CACHE_REMOTE=file:///{rest.partition('/')[2]}",
        )
    if scheme in ("http", "https") and "@" in rest[len(place) :]:
        raise SettingsError(
            "FLEXOPS_CACHE_REMOTE has an @ behind its first / ? or #",
            found=redacted(text),
            required="in user and password: %2F for /, %3F for ?, %23 for #; in a path: %40 for @",
            fix=(
                'python -c "import getpass, urllib.parse as u; print(u.quote(getpass.getpass(),'
                " ''))\""
            ),
        )
    return SecretUrl(text)


def is_loopback(place: str) -> bool:
    """Whether ``host``, ``host:port`` or ``user@host:port`` is on this machine."""
    place = place.rpartition("@")[2]
    host = place if place in _NEAR else place.rpartition(":")[0]
    return host in _NEAR


def _seconds(name: str, text: str, default: float) -> float:
    if not text.strip():
        return default
    match = re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text.strip(), re.ASCII)
    if match is None or float(text) <= 0:
        raise SettingsError(
            f"{name} is no number of seconds",
            found=_shortened(text),
            required="such as 1 or 0.5",
            fix=f"unset {name}",
        )
    return float(text)


def parse_size(name: str, text: str) -> int:
    """Bytes from ``"5G"``, ``"500M"``, ``"1048576"``; raises ``SettingsError`` naming ``name``."""
    match = re.fullmatch(
        r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII
    )
    if match is None:
        raise SettingsError(
            f"{name} is not a size",
            found=_shortened(text),
            required="bytes, or a number with K, M, G or T",
            fix=f"{name}=5G",
        )
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def size_in_words(count: float) -> str:
    """``512 B``, ``33 KiB``, ``5.0 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
