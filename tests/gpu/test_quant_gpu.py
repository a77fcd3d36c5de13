"""flexops.quantize and flexops.dequantize on a GPU: every kernel gives the reference's bits for any
size."""

from __future__ import annotations

import random

import pytest
import torch
from quant_cases import DTYPES, assert_same, draw_input, draw_options

import flexops
from flexops.ops import quant as quant_module

pytestmark = pytest.mark.gpu
FAMILIES = ("quant",)
MODES = [(bits, symmetric) for bits in (4, 8) for symmetric in (False, True)]


def compare(
    x: torch.Tensor, bits: int, group_size: int, dim: int, symmetric: bool, dtype: torch.dtype
) -> None:
    """Kernel and reference, both on the GPU."""
    packed, scales = torch.ops.flexops.quantize(x, bits, group_size, dim, symmetric)
    expected_packed, expected_scales = quant_module._quantize_reference(
        x, bits, group_size, dim, symmetric
    )
    assert_same(packed, expected_packed)
    assert_same(scales, expected_scales)
    arguments = (packed, scales, x.shape[dim], bits, group_size, dim, dtype)
    assert_same(
        torch.ops.flexops.dequantize(*arguments), quant_module._dequantize_reference(*arguments)
    )


@pytest.mark.parametrize("block", range(8))
def test_cuda_gives_the_references_bits(block):
    for seed in range(block * 100, block * 100 + 100):
        random_, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        x, dim = draw_input(random_, generator, "cuda")
        compare(x, *_options(random_, dim), random_.choice(DTYPES))


def _options(random_: random.Random, dim: int) -> tuple[int, int, int, bool]:
    bits, group_size, symmetric = draw_options(random_)
    return bits, group_size, dim, symmetric


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "symmetric"), MODES)
@pytest.mark.parametrize("group_size", [4, 8, 16, 32, 64, 128, 256, 96, 33])
@pytest.mark.parametrize("length", [256, 328])
def test_both_fast_ways(dtype, bits, symmetric, group_size, length):
    """Whole and short last groups, along rows and along columns."""
    generator = torch.Generator("cuda").manual_seed(1)
    for shape, dim in (((37, length), 1), ((length, 136), 0), ((3, length, 64), 1)):
        x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        compare(x, bits, group_size, dim, symmetric, dtype)


@pytest.mark.parametrize("shape", [(1, 50000), (3, 9001), (600, 9000)])
def test_long_groups(shape):
    x = torch.randn(shape, device="cuda").bfloat16()
    compare(x, 4, shape[1], 1, False, torch.bfloat16)
    compare(x, 8, shape[0], 0, True, torch.float32)


@pytest.mark.parametrize("dim", [0, 1])
def test_cuda_gives_the_cpus_bits(dim):
    x = torch.randn(500, 1024).bfloat16()
    q, on_gpu = flexops.quantize(x, 4, 64, dim), flexops.quantize(x.cuda(), 4, 64, dim)
    assert_same(on_gpu.packed.cpu(), q.packed)
    assert_same(on_gpu.scales.cpu(), q.scales)
    assert_same(flexops.dequantize(on_gpu).cpu(), flexops.dequantize(q))


@pytest.mark.parametrize(
    ("dim", "bits", "group_size"), [(1, 4, 64), (0, 4, 64), (1, 8, 64), (0, 8, 100), (1, 4, 50)]
)
def test_more_than_2_to_31_elements(dim, bits, group_size):
    # 2.2e9 elements; the reference would not fit, so the ends are compared, as tensors of their own
    shape = (2**18 + 64, 2**13 + 128)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1)
    q = flexops.quantize(x, bits, group_size, dim)
    y = flexops.dequantize(q)
    rows = 6400
    for part in (slice(0, rows), slice((shape[0] - rows) // group_size * group_size, shape[0])):
        small = flexops.quantize(x[part].clone(), bits, group_size, dim)
        groups = slice(part.start // group_size, None) if dim == 0 else part
        lines = (
            slice(part.start // group_size * q.packed.shape[0] // q.scales.shape[0], None)
            if dim == 0
            else part
        )
        assert torch.equal(q.packed[lines][: small.packed.shape[0]], small.packed)
        assert torch.equal(q.scales[groups][: small.scales.shape[0]], small.scales)
        assert torch.equal(y[part], flexops.dequantize(small))


def test_scales_on_another_device_are_an_error():
    q = flexops.quantize(torch.randn(4, 64, device="cuda"))
    with pytest.raises(ValueError, match="scales must be on packed's device"):
        flexops.dequantize(q._replace(scales=q.scales.cpu()))
