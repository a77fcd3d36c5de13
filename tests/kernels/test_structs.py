"""Structs by value: laid out as C++ has them, and what does not fit is named."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

import flexops
from flexops.errors import FlexopsError
from flexops.kernels import launch
from flexops.kernels.structs import structs

SOURCE = """
struct Options { bool last; float scale; int64_t strides[3]; char mark; };
struct alignas(32) Wide { const float* x; unsigned short a, b; };
struct Other { Options inner; };
struct With { float f() { return 1; } };
__global__ void take(const float* x, float* out, int n, const Options options, Wide wide) {}
"""


class Options(ctypes.Structure):
    _fields_ = (
        ("last", ctypes.c_bool),
        ("scale", ctypes.c_float),
        ("strides", ctypes.c_int64 * 3),
        ("mark", ctypes.c_char),
    )


VALUE = {"last": True, "scale": 2.0, "strides": [4, 5, 6], "mark": 7}


def test_a_struct_lies_in_memory_as_cpp_has_it():
    found = structs(SOURCE)
    assert set(found) == {"Options", "Wide", "CUtensorMap"}
    options = found["Options"]
    assert (options.size, options.alignment) == (
        ctypes.sizeof(Options),
        ctypes.alignment(Options),
    )
    expected = bytes(Options(True, 2.0, (ctypes.c_int64 * 3)(4, 5, 6), b"\x07"))
    for value in (VALUE, list(VALUE.values()), SimpleNamespace(**VALUE), expected):
        assert options.pack(value) == expected
    assert (found["Wide"].size, found["Wide"].alignment) == (32, 32)
    assert found["Wide"].pack((256, 1, 2)) == struct.pack("<Q2H20x", 256, 1, 2)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"last": True}, "Options has last, scale, strides, mark, got last"),
        ((1, 2.0), "got 2 values"),
        ((True, 2.0, [1, 2], 3), "Options::strides has 3 elements, got 2"),
        ((True, 2.0, 5, 3), "Options::strides has 3 elements, got 5"),
        ((True, "a", [1, 2, 3], 3), "Options::scale cannot be 'a'"),
        ((True, 1.0, [1, 2, 3], 300), "Options::mark cannot be 300"),
        (b"abc", "Options has 40 bytes, got 3"),
        (object(), "has no last"),
    ],
)
def test_a_value_that_does_not_fit_is_named(value, words):
    with pytest.raises((TypeError, ValueError), match=words.replace("(", r"\(")):
        structs(SOURCE)["Options"].pack(value)


def test_a_kernels_buffer_has_its_structs():
    wide = {"x": 16, "a": 1, "b": 2}
    kernel = flexops.kernel(
        SOURCE, "take(Tensor x) -> Tensor", args={"options": VALUE, "wide": lambda: wide}
    )
    code = kernel._code
    assert code.bound.letters == ("Q", "Q", "i", "40s@8", "32s@32")
    format_ = launch.layout(code.bound.letters)
    packed = structs(SOURCE)["Wide"].pack(wide)
    buffer = struct.pack(format_, *(0,) * 10, 1, 2, 3, bytes(40), packed)
    assert buffer[struct.calcsize("=" + launch.CONFIG) + 64 :] == packed
    with pytest.raises(FlexopsError, match="nothing says what the parameter wide"):
        flexops.kernel(SOURCE, "take(Tensor x) -> Tensor", args={"options": VALUE})


def test_a_map_is_shown_to_the_driver_by_its_address():
    """The compiler aligns it to 64 bytes of the constant bank, not of the parameters."""
    letters = ["Q", structs("")["CUtensorMap"].letter, "i"]
    buffers = launch.Buffers(letters, (1, 1, 1))
    _, config, _, parameters, extra = buffers.all
    first = config.value + struct.calcsize("=" + launch.CONFIG)
    found = (ctypes.c_void_p * 3).from_address(parameters.value)
    assert [one - first for one in found] == [0, 64, 192]
    assert extra is None
    assert launch.Buffers(["Q", "16s@16"], (1, 1, 1)).all[3] is None


def test_cooperative_and_cluster_are_attributes_of_the_launch():
    buffers = launch.Buffers((), (2, 1, 1), cooperative=True)
    content = ctypes.string_at(buffers.all[2], 144)
    assert struct.unpack_from("=II", content, 0) == (2, 0)
    assert struct.unpack_from("=I4xI", content, 0) == (2, 1)
    assert struct.unpack_from("=I4x3I", content, 72) == (4, 2, 1, 1)
    both = flexops.kernel(SOURCE.replace(", const Options options, Wide wide", ""),
                          "take(Tensor x) -> Tensor", cluster=2, cooperative=True)  # fmt: skip
    assert "_attribute, 2" in both._code.bound.text


@pytest.mark.parametrize(
    ("tensor", "box", "swizzle", "words"),
    [
        (torch.zeros(8, 64, dtype=torch.bool), (8, 64), 0, "torch.bool"),
        (torch.zeros(8, 64), (8,), 0, "a box of 1"),
        (torch.zeros(8, 64), (8, 257), 0, "1 to 256 elements"),
        (torch.zeros(8, 64), (8, 3), 0, "12 bytes in a row"),
        (torch.zeros(8, 64), (8, 64), 128, "at most 128"),
        (torch.zeros(8, 64), (8, 32), 7, "swizzle=7"),
        (torch.zeros(64, 8).t(), (8, 32), 0, "strides"),
        (torch.zeros(8, 65), (8, 32), 0, "strides"),
        (torch.zeros(0, 64), (8, 32), 0, "elements"),
        (torch.empty_strided((8, 64), (64, 1)), (8, 32), 0, "a tensor on cpu"),
    ],
)
def test_a_tensor_without_a_map_is_rejected_with_the_reason(tensor, box, swizzle, words):
    with pytest.raises(FlexopsError, match=words):
        flexops.tensor_map(tensor, box, swizzle=swizzle)
    with pytest.raises(TypeError, match="a tensor and a box such as"):
        flexops.tensor_map(tensor, 8)  # type: ignore[arg-type]
