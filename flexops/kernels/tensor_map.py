"""Maps of tensors for Hopper's copy engine (TMA), as arguments of kernels."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import torch

from ..errors import FlexopsError
from ..toolchain import libcuda

# CU_TENSOR_MAP_DATA_TYPE_...
_TYPES = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.float8_e4m3fn: 0,
    torch.float8_e5m2: 0,
    torch.int32: 3,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes, and CU_TENSOR_MAP_SWIZZLE_...
_PROMOTE_256 = 3
_MOST_DIMENSIONS, _MOST_IN_A_BOX = 5, 256


def tensor_map(tensor: torch.Tensor, box: Sequence[int], *, swizzle: int = 0) -> bytes:
    """A ``CUtensorMap``: what a kernel's ``const __grid_constant__ CUtensorMap`` gets, from which
    ``cp.async.bulk.tensor`` copies boxes of the tensor.

    Args:
        tensor: on a GPU of compute capability 9.0 or newer; one to five dimensions, the last one
            with stride 1, the others with strides of multiples of 16 bytes.
        box: elements of one copy along each dimension, in the order of the tensor's: the driver,
            and the coordinates of a copy, have the last dimension first. What lies outside of the
            tensor is zeros.
        swizzle: 0, 32, 64 or 128 bytes, over which 16-byte pieces of a row are exchanged in shared
            memory.

    Returns:
        128 bytes. They have the tensor's address: make them for each call
        (``args={"map": lambda x: flexops.tensor_map(x, (64, 64))}``), which is cached.

    Raises:
        FlexopsError: the copy engine cannot copy such a tensor; the error names the reason.
    """
    if not isinstance(tensor, torch.Tensor) or not isinstance(box, (tuple, list, torch.Size)):
        found = f"{type(tensor).__name__} and {box!r}"
        raise TypeError(f"flexops.tensor_map: a tensor and a box such as (64, 64), got {found}")
    wrong = _unfit(tensor, box, swizzle)
    if wrong:
        raise FlexopsError(
            f"flexops.tensor_map: a tensor of {str(tensor.dtype).removeprefix('torch.')}"
            f" {list(tensor.shape)} with strides {list(tensor.stride())} has no map",
            found=wrong[0],
            required=wrong[1],
            fix="x.contiguous(), another box, or a kernel with plain loads",
        )
    return _encoded(
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tuple(box),
        swizzle,
    )


def _unfit(tensor: torch.Tensor, box: Sequence[int], swizzle: int) -> tuple[str, str] | None:
    size = tensor.element_size()
    if tensor.dtype not in _TYPES:
        return str(tensor.dtype), ", ".join(map(str, _TYPES))
    if not 1 <= tensor.dim() <= _MOST_DIMENSIONS or len(box) != tensor.dim():
        return (
            f"{tensor.dim()} dimensions, a box of {len(box)}",
            f"1 to {_MOST_DIMENSIONS} dimensions and a box of as many",
        )
    if swizzle not in _SWIZZLES:
        return f"swizzle={swizzle}", "0, 32, 64 or 128"
    if not all(1 <= length <= _MOST_IN_A_BOX for length in box):
        return f"a box {list(box)}", f"1 to {_MOST_IN_A_BOX} elements along each dimension"
    row = box[-1] * size
    if row % 16 or (swizzle and row > swizzle):
        least = f"a multiple of 16{f', at most {swizzle}' if swizzle else ''}"
        return f"{row} bytes in a row of the box", least
    if tensor.stride(-1) != 1 or any(stride * size % 16 for stride in tensor.stride()[:-1]):
        return f"strides {list(tensor.stride())}", "1 for the last, multiples of 16 bytes before it"
    if tensor.data_ptr() % 16 or not math.prod(tensor.shape):
        return f"address {tensor.data_ptr():#x}", "elements, from a multiple of 16 bytes on"
    if not tensor.is_cuda:
        return f"a tensor on {tensor.device}", "one on a GPU"
    return None


@functools.lru_cache(maxsize=256)
def _encoded(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    rank, size = len(shape), torch.empty((), dtype=dtype).element_size()
    memory = ctypes.create_string_buffer(128 + 63)
    at = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
    long, short = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    encode = libcuda.driver().library.cuTensorMapEncodeTiled
    status = encode(
        ctypes.c_void_p(at),
        _TYPES[dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        long(*reversed(shape)),
        long(*(stride * size for stride in reversed(strides[:-1]))),
        short(*reversed(box)),
        short(*[1] * rank),
        0,
        _SWIZZLES[swizzle],
        _PROMOTE_256,
        0,
    )
    if status:
        said = libcuda.driver().error_text(status)
        raise FlexopsError(
            "flexops.tensor_map: the driver rejects the map",
            found=f"{said}: {dtype} {list(shape)}, box {list(box)}, swizzle {swizzle}",
            required="a GPU of compute capability 9.0 or newer",
            fix="a kernel with plain loads for other GPUs",
        )
    return ctypes.string_at(at, 128)
