"""Every kernel through NVRTC 12.1: the front end of the oldest pinned toolkit, whose nvcc no package index has. Needs no GPU and no toolkit."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexops.op_builder import layout

CSRC = layout.csrc_root()
ARCHITECTURES = ("sm_80", "sm_89", "sm_90")
QUANT_KERNELS = ("quantize_rows", "dequantize_rows", "quantize_columns", "dequantize_columns")
KERNELS = {
    "adam/adam.cuh": ("flexops::adam::step_kernel", "flexops::adam::adam_kernel<false>", "flexops::adam::adam_kernel<true>"),
    "quant/quant.cuh": (
        *(f"flexops::quant::{kernel}<flexops::quant::{type_}>" for kernel in QUANT_KERNELS for type_ in ("kF32", "kF16", "kBf16")),
        "flexops::quant::quantize_any",
        "flexops::quant::dequantize_any",
    ),
}


class Nvrtc:
    """Just enough of libnvrtc."""

    def __init__(self, path: Path) -> None:
        self.library: Any = ctypes.CDLL(str(path))

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        assert self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
        return major.value, minor.value

    def compile(self, source: str, kernels: tuple[str, ...], architecture: str) -> bytes:
        """The cubin; fails the test with the compiler's log."""
        program, lib = ctypes.c_void_p(), self.library
        assert lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
        for kernel in kernels:
            assert lib.nvrtcAddNameExpression(program, f"&{kernel}".encode()) == 0
        options = (f"--gpu-architecture={architecture}", "--std=c++17", f"-I{CSRC}")
        status = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options)))
        if status != 0:
            pytest.fail(self._text("Log", program))
        cubin = self._bytes("CUBIN", program)
        lib.nvrtcDestroyProgram(ctypes.byref(program))
        return cubin

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        return self._bytes(f"Program{what}", program).decode(errors="replace")

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(self.library, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.raw


@pytest.fixture(scope="module")
def nvrtc(require: Any) -> Nvrtc:
    path = next(_libraries(), None)
    require(path, "NVRTC 12.1", "pip install nvidia-cuda-nvrtc-cu12==12.1.105, or run scripts/run_tests.sh, which does")
    found = Nvrtc(Path(str(path)))
    assert found.version() == (12, 1)
    return found


def _libraries() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        yield from Path(root).glob("cuda_nvrtc/lib/libnvrtc.so.12")


def test_no_kernel_is_left_out() -> None:
    for header in sorted(path.relative_to(CSRC).as_posix() for path in CSRC.glob("*/*.cuh") if path.parent.name != "common"):
        defined = set(re.findall(r"__global__ void (?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(", (CSRC / header).read_text()))
        listed = {re.sub(r"<.*", "", kernel).rpartition("::")[2] for kernel in KERNELS[header]}
        assert defined == listed, header


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("header", sorted(KERNELS))
def test_kernels_compile(nvrtc: Nvrtc, header: str, architecture: str) -> None:
    cubin = nvrtc.compile(f'#include "{header}"\n', KERNELS[header], architecture)
    assert cubin[:4] == b"\x7fELF"
    for kernel in KERNELS[header]:
        assert re.sub(r"<.*", "", kernel).rpartition("::")[2].encode() in cubin
