"""Every environment variable that flexops reads, read in one place.

The variables that the PyTorch world already knows keep their meaning: ``TORCH_CUDA_ARCH_LIST``, ``PYTORCH_ROCM_ARCH``, ``MAX_JOBS``,
``NVCC_THREADS``, ``CUDA_HOME``/``CUDA_PATH``, ``ROCM_HOME``/``ROCM_PATH``, ``TORCH_EXTENSIONS_DIR``, ``CXX``, ``CC``.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from .errors import SettingsError

Fallback = Literal["allow", "warn", "forbid"]
LogLevel = Literal["quiet", "info", "debug"]
Precompile = Literal["auto", "0", "1"]
CpuIsa = Literal["baseline", "avx2", "avx512"]
AotDevice = Literal["cpu", "cuda"]

_DEFAULT_CACHE_BYTES = 5 * 2**30
_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Settings:
    """The user's wishes, as the environment states them. Nothing here is probed.

    Attributes:
        cache_dir: root of the build cache: ``FLEXOPS_CACHE_DIR``, else ``TORCH_EXTENSIONS_DIR/flexops``, else ``XDG_CACHE_HOME/flexops``,
            else ``~/.cache/flexops``.
        cache_max_bytes: ``FLEXOPS_CACHE_MAX_SIZE`` (bytes, or with K, M, G, T), default 5G.
        cache_shared: ``FLEXOPS_CACHE_SHARED``: 1 trusts a cache directory that belongs to someone else (a team's shared directory).
        cache_signing_key: ``FLEXOPS_CACHE_SIGNING_KEY``: an SSH key that signs what is put into the cache.
        cache_trusted_keys: ``FLEXOPS_CACHE_TRUSTED_KEYS``: an ``allowed_signers`` file; nothing that these keys have not signed is opened.
        cache_copies: where verified copies of a shared cache's signed entries are kept: ``XDG_CACHE_HOME/flexops-verified``, else
            ``~/.cache/flexops-verified``; None without ``cache_trusted_keys``.
        fallback: ``FLEXOPS_FALLBACK``: may the plain PyTorch reference stand in for a native kernel? allow, warn (default) or forbid.
        jit: ``FLEXOPS_JIT``: 0 never compiles at run time.
        log: ``FLEXOPS_LOG``: quiet, info (default) or debug (shows every command).
        aot: ``FLEXOPS_AOT``: ops that an install compiles in: nothing, ``all`` or names.
        aot_devices: ``FLEXOPS_AOT_DEVICES``: device types that it compiles them for, such as ``cpu`` or ``cpu,cuda``; unset means cpu, and cuda where
            there is a toolkit that matches torch. A package says it, so that what it holds does not hang on the machine that builds it.
        pch: ``FLEXOPS_PCH``: torch's headers precompiled for ``flexops.load``: auto (default: in the background, for the next kernel), 1 (before
            the first kernel compiles) or 0 (never: an image layer, say, should not carry their 800 MB).
        launcher: ``FLEXOPS_COMPILER_LAUNCHER``: a program such as ccache or sccache, or ``none``; unset means whichever is found.
        arch_list: ``TORCH_CUDA_ARCH_LIST``, unparsed; None when unset or empty.
        rocm_arch_list: ``PYTORCH_ROCM_ARCH``, unparsed.
        max_jobs: ``MAX_JOBS``, an upper bound on parallel compile jobs.
        nvcc_threads: ``NVCC_THREADS``, threads within one nvcc.
        cpu_isa: ``FLEXOPS_CPU_ISA``: the most that CPU kernels may use: baseline, avx2 or avx512 (default: what this CPU has). The kernels read
            it themselves, once (csrc/common/cpu.h).
        search_path: ``PATH``, in its order.
        conda_prefix: ``CONDA_PREFIX``, the active conda environment.
        virtual_env: ``VIRTUAL_ENV``, the active virtual environment.
        cuda_visible_devices: ``CUDA_VISIBLE_DEVICES``, unparsed; None when unset (set and empty hides every GPU).
        cuda_device_order: ``CUDA_DEVICE_ORDER``, which the numbers in the former refer to.
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
    aot_devices: tuple[AotDevice, ...] = ()
    pch: Precompile = "auto"
    cache_signing_key: Path | None = None
    cache_trusted_keys: Path | None = None
    cache_copies: Path | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings out of ``environ``; raises ``SettingsError`` naming the variable."""
        get = environ.get
        return cls(
            cache_dir=_cache_dir(environ),
            cache_max_bytes=parse_size("FLEXOPS_CACHE_MAX_SIZE", size) if (size := get("FLEXOPS_CACHE_MAX_SIZE")) else _DEFAULT_CACHE_BYTES,
            cache_shared=_choice(environ, "FLEXOPS_CACHE_SHARED", "0", ("0", "1")) == "1",
            fallback=cast(Fallback, _choice(environ, "FLEXOPS_FALLBACK", "warn", get_args(Fallback))),
            jit=_choice(environ, "FLEXOPS_JIT", "1", ("0", "1")) == "1",
            log=cast(LogLevel, _choice(environ, "FLEXOPS_LOG", "info", get_args(LogLevel))),
            aot=tuple(name for name in _words(get("FLEXOPS_AOT", "")) if name not in ("0", "none")),
            launcher=get("FLEXOPS_COMPILER_LAUNCHER") or None,
            arch_list=get("TORCH_CUDA_ARCH_LIST", "").strip() or None,
            rocm_arch_list=get("PYTORCH_ROCM_ARCH", "").strip() or None,
            max_jobs=_positive(environ, "MAX_JOBS"),
            nvcc_threads=_positive(environ, "NVCC_THREADS"),
            cpu_isa=cast(CpuIsa, _choice(environ, "FLEXOPS_CPU_ISA", "avx512", get_args(CpuIsa))),
            cuda_home=_path(get("CUDA_HOME") or get("CUDA_PATH")),
            rocm_home=_path(get("ROCM_HOME") or get("ROCM_PATH")),
            cxx=get("CXX") or None,
            cc=get("CC") or None,
            search_path=tuple(entry for entry in get("PATH", "").split(os.pathsep) if entry),
            conda_prefix=_path(get("CONDA_PREFIX")),
            virtual_env=_path(get("VIRTUAL_ENV")),
            cuda_visible_devices=get("CUDA_VISIBLE_DEVICES"),
            cuda_device_order=get("CUDA_DEVICE_ORDER") or "FASTEST_FIRST",
            aot_devices=_devices(get("FLEXOPS_AOT_DEVICES", "")),
            pch=cast(Precompile, _choice(environ, "FLEXOPS_PCH", "auto", get_args(Precompile))),
            cache_signing_key=_path(get("FLEXOPS_CACHE_SIGNING_KEY")),
            cache_trusted_keys=_path(get("FLEXOPS_CACHE_TRUSTED_KEYS")),
            cache_copies=_copies_dir(environ) if get("FLEXOPS_CACHE_TRUSTED_KEYS") else None,
        )


@functools.cache
def current() -> Settings:
    """The settings of this process; the environment is read at the first call only."""
    return Settings.from_environ(os.environ)


def _cache_dir(environ: Mapping[str, str]) -> Path:
    if own := environ.get("FLEXOPS_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if extensions := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(extensions).expanduser().absolute() / "flexops"
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser().absolute() if base else Path.home() / ".cache") / "flexops"


def _copies_dir(environ: Mapping[str, str]) -> Path:
    """Beside the cache that this user would have, had none been named: that one may be others' too."""
    return _cache_dir({"XDG_CACHE_HOME": environ.get("XDG_CACHE_HOME", "")}).with_name("flexops-verified")


def _devices(text: str) -> tuple[AotDevice, ...]:
    names = _words(text)
    if wrong := set(names) - set(get_args(AotDevice)):
        required, fix = "cpu | cuda | cpu,cuda", "unset FLEXOPS_AOT_DEVICES"
        raise SettingsError("FLEXOPS_AOT_DEVICES is not understood", found=", ".join(sorted(wrong)), required=required, fix=fix)
    return tuple(device for device in get_args(AotDevice) if device in names)


def _words(text: str) -> list[str]:
    """The pieces between blanks, commas and semicolons. Without a regular expression: to compile one takes a tenth of a warm start."""
    return text.replace(",", " ").replace(";", " ").split()


def _path(text: str | None) -> Path | None:
    return Path(text).expanduser().absolute() if text else None


def _choice(environ: Mapping[str, str], name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = environ.get(name, "").strip().lower() or default
    if value not in allowed:
        raise SettingsError(f"{name} is not understood", found=value, required=" | ".join(allowed), fix=f"export {name}={default}")
    return value


def _positive(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise SettingsError(f"{name} is not a positive whole number", found=text, required="1, 2, 3, ...", fix=f"unset {name}")
    return int(text)


def parse_size(name: str, text: str) -> int:
    """Bytes from ``"5G"``, ``"500M"``, ``"1048576"``; raises ``SettingsError`` naming ``name``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise SettingsError(f"{name} is not a size", found=text, required="bytes, or a number with K, M, G or T", fix=f"{name}=5G")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])
