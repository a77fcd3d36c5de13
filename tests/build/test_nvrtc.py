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
ELEMENTS = ("float", "flexops::f16", "flexops::bf16", "flexops::AnyElement")
ACTIVATED = ("float", "flexops::activation::AnyHalf", "flexops::AnyElement")
FLOATS = ("kF32", "kF16", "kBf16")
SIZES = ("kF32", "kHalf")
KERNELS = {
    "activation/activation_biased.cuh": (
        *(f"flexops::activation::biased<{type_}, {erf}>" for type_ in ACTIVATED for erf in ("false", "true")),
        *(f"flexops::activation::biased_sums<{type_}, {erf}>" for type_ in ELEMENTS for erf in ("false", "true")),
        *(f"flexops::activation::biased_backward<{type_}>" for type_ in ACTIVATED),
        "flexops::activation::bias_gradient",
    ),
    "activation/activation_gated.cuh": tuple(
        f"flexops::activation::{kernel}<{type_}, {pairs}>" for kernel in ("gated", "gated_backward") for type_ in ACTIVATED for pairs in ("false", "true")
    ),
    "rope/rope.cuh": tuple(f"flexops::rope::rotate<{type_}>" for type_ in ELEMENTS),
    "adam/adam.cuh": ("flexops::adam::step_kernel", "flexops::adam::adam_kernel<false>", "flexops::adam::adam_kernel<true>"),
    "adagrad/adagrad.cuh": ("flexops::adagrad::step_kernel", *(f"flexops::adagrad::adagrad_kernel<{general}>" for general in ("false", "true"))),
    "adam8bit/adam8bit.cuh": ("flexops::adam8bit::step_kernel", *(f"flexops::adam8bit::adam8bit_kernel<{general}>" for general in ("false", "true"))),
    "grad_norm/grad_norm.cuh": (
        *(f"flexops::grad_norm::{kernel}<{which}>" for kernel in ("norm_kernel", "clip_kernel") for which in ("false", "true")),
        "flexops::grad_norm::final_kernel",
    ),
    "lamb/lamb.cuh": (
        *(f"flexops::lamb::{kernel}<{general}>" for kernel in ("moments_kernel", "apply_kernel") for general in ("false", "true")),
        "flexops::lamb::step_kernel",
        "flexops::lamb::norms_kernel",
    ),
    "fp8/fp8_quantize.cuh": (
        *(
            f"flexops::scaled::{kernel}<flexops::rows::{type_}>"
            for kernel in ("quantize_groups", "quantize_short", "find_largest", "cast_chunk")
            for type_ in SIZES
        ),
        *(f"flexops::scaled::quantize_long<flexops::rows::{which}>" for which in ("kF32, true", "kHalf, false", "kHalf, true")),
    ),
    "fp8/fp8_dequantize.cuh": tuple(
        f"flexops::scaled::{kernel}<flexops::rows::{type_}>" for kernel in ("dequantize_short", "dequantize_chunk") for type_ in SIZES
    ),
    "lion/lion.cuh": tuple(f"flexops::lion::lion_kernel<{general}>" for general in ("false", "true")),
    "cross_entropy/cross_entropy.cuh": (
        *(f"flexops::cross_entropy::{kernel}<flexops::rows::{type_}>" for kernel in ("cross_entropy_rows", "scale_rows") for type_ in FLOATS),
        *(f"flexops::cross_entropy::cross_entropy_rows<flexops::rows::{type_}, false>" for type_ in FLOATS[1:]),
        "flexops::cross_entropy::cross_entropy_finish",
    ),
    "cross_entropy/cross_entropy_ring.cuh": ("flexops::cross_entropy::cross_entropy_ring<flexops::rows::kF32>",),
    "softmax/softmax_rows.cuh": tuple(f"flexops::softmax::softmax_rows<flexops::rows::{which}>" for which in ("kF32, true", "kHalf, false", "kHalf, true")),
    "softmax/softmax_added.cuh": tuple(f"flexops::softmax::softmax_added<flexops::rows::{type_}>" for type_ in SIZES),
    "softmax/softmax_long.cuh": tuple(f"flexops::softmax::softmax_long<flexops::rows::{type_}>" for type_ in SIZES),
    "softmax/softmax_general.cuh": tuple(
        f"flexops::softmax::{kernel}<flexops::rows::{type_}>" for kernel in ("softmax_general", "softmax_long_masked") for type_ in SIZES
    ),
    "softmax/softmax_backward.cuh": (
        *(f"flexops::softmax::softmax_backward_rows<flexops::rows::{type_}>" for type_ in FLOATS),
        "flexops::softmax::softmax_backward_whole<flexops::rows::kHalf>",
    ),
    "norm/norm.cuh": (),
    "norm/norm_forward_held.cuh": (
        *(f"flexops::norm::forward_held<{t}, {way}>" for t in ELEMENTS[:3] for way in ("false, false, 2", "false, true, 8", "true, true, 4")),
        "flexops::norm::forward_held<float, false, true, 2>",
    ),
    "norm/norm_forward_layer.cuh": tuple(f"flexops::norm::forward_layer<{way}>" for way in ("flexops::f16, 4", "flexops::bf16, 2", "flexops::bf16, 4")),
    "norm/norm_forward_codes.cuh": tuple(f"flexops::norm::forward_codes<{t}, {held}>" for t in ELEMENTS[:3] for held in (4, 8)),
    "norm/norm_forward_rows.cuh": tuple(f"flexops::norm::forward_rows<{t}>" for t in ("float", "flexops::norm::Half")),
    "norm/norm_forward_long.cuh": ("flexops::norm::forward_long<float>",),
    "norm/norm_forward_ragged.cuh": ("flexops::norm::forward_ragged",),
    "norm/norm_forward_short.cuh": ("flexops::norm::forward_short",),
    "norm_backward/norm_backward.cuh": (
        *(f"flexops::norm::backward_walk<{type_}, true>" for type_ in ELEMENTS[:3]),
        "flexops::norm::backward_walk<flexops::bf16, false>",
        *(
            f"flexops::norm::{kernel}<{type_}>"
            for kernel in ("backward_input", "backward_parameters")
            for type_ in ("float", "flexops::norm::Half", "flexops::norm::Any")
        ),
        "flexops::norm::reduce_partial",
    ),
    "quant/quant_any.cuh": ("flexops::quant::quantize_any", "flexops::quant::dequantize_any"),
    **{
        f"quant/quant_{way}.cuh": (
            *(f"flexops::quant::quantize_{way}<flexops::quant::{type_}>" for type_ in ("kF32", "kF16", "kBf16")),
            *(f"flexops::quant::dequantize_{way}<{size}>" for size in (4, 2)),
        )
        for way in ("rows", "columns")
    },
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
    nested = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))"  # parentheses in parentheses
    for header in sorted(path.relative_to(CSRC).as_posix() for path in CSRC.glob("*/*.cuh") if path.parent.name != "common"):
        defined = set(re.findall(rf"__global__ void (?:__launch_bounds__\({nested}*\)\s*)?(\w+)(?:<\w+>)?\(", (CSRC / header).read_text()))
        listed = {re.sub(r"<.*", "", kernel).rpartition("::")[2] for kernel in KERNELS.get(header, ())}
        assert defined == listed, header


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("header", sorted(KERNELS))
def test_kernels_compile(nvrtc: Nvrtc, header: str, architecture: str) -> None:
    cubin = nvrtc.compile(f'#include "{header}"\n', KERNELS[header], architecture)
    assert cubin[:4] == b"\x7fELF"
    for kernel in KERNELS[header]:
        assert re.sub(r"<.*", "", kernel).rpartition("::")[2].encode() in cubin
