"""flexops.quantize_fp8, quantize_int8 and back on a GPU: every kernel gives the reference's bits,
for any length and place."""

from __future__ import annotations

import pytest
import torch
from test_fp8 import (
    CODES,
    DTYPES,
    E4M3,
    E5M2,
    assert_same,
    compare_with_reference,
    dequantize,
    quantize,
)

import flexops
from flexops.ops import fp8 as fp8_module

pytestmark = pytest.mark.gpu
FAMILIES = ("fp8",)


@pytest.mark.parametrize("block", range(8))
def test_cuda_gives_the_references_bits(block):
    for seed in range(block * 100, block * 100 + 100):
        compare_with_reference(seed, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("length", [64, 256, 264, 2048, 8192, 11008, 16392, 65536, 200003])
def test_rows_of_all_lengths(dtype, code, length):
    """In a part of a warp, a block, and too long for a block; at any place in memory."""
    generator = torch.Generator("cuda").manual_seed(1)
    whole = torch.randn(7, length + 3, generator=generator, device="cuda").to(dtype)
    for x in (
        whole[:, :length].contiguous(),
        whole[:, 1 : length + 1],
        whole.flatten()[1 : 7 * length + 1].view(7, length),
    ):
        values, scales = quantize(x, code)
        expected = fp8_module._quantize_reference(x, code, -1)
        assert_same(values, expected[0])
        assert_same(scales, expected[1])
        assert_same(
            dequantize(values, scales, dtype),
            fp8_module._dequantize_reference(*expected, -1, dtype),
        )


@pytest.mark.parametrize("segment", [1, 8, 24, 100, 128, 512, 1000, 4096])
def test_groups_of_all_sizes(segment):
    x = torch.randn(65, 4104, device="cuda").bfloat16()
    for part in (x, x[:, :4100], x[:, 3:]):
        values, scales = quantize(part, E4M3, segment)
        expected = fp8_module._quantize_reference(part, E4M3, segment)
        assert_same(values, expected[0])
        assert_same(scales, expected[1])
        assert_same(
            dequantize(values, scales, torch.bfloat16, segment),
            fp8_module._dequantize_reference(*expected, segment, torch.bfloat16),
        )


def test_a_large_tensor_with_one_scale():
    x = torch.randn(4099, 4097, device="cuda").bfloat16()
    for where in (0, x.numel() - 1, x.numel() // 2):
        y = x.clone()
        y.view(-1)[where] = -1000.0
        values, scales = flexops.quantize_fp8(y, E5M2, "tensor")
        expected = fp8_module._quantize_reference(y, E5M2, 0)
        assert_same(values, expected[0])
        assert_same(scales, expected[1])
        again, _ = flexops.quantize_fp8(y, E5M2, "tensor", scale=scales)
        assert_same(again, expected[0])
    y.view(-1)[77] = torch.nan
    values, scales = flexops.quantize_fp8(y, E5M2, "tensor")
    assert scales.isnan()
    assert (values.view(torch.uint8) == 0).all()


def test_cuda_gives_the_cpus_bits():
    x = torch.randn(500, 1000).bfloat16()
    for code, segment in ((E4M3, -1), (E5M2, 128), (E4M3, 0), (torch.int8, -1)):
        for on_gpu, on_cpu in zip(
            quantize(x.cuda(), code, segment), quantize(x, code, segment), strict=True
        ):
            assert_same(on_gpu.cpu(), on_cpu)


def test_torch_multiplies_with_these_scales(require):
    """torch._scaled_mm takes values and scales as they are."""
    able = torch.cuda.get_device_capability() >= (8, 9)
    require(
        able,
        "a GPU of compute capability 8.9, for torch._scaled_mm",
        "run the tests on such a GPU",
        "this one is older",
    )
    a, b = (
        torch.randn(64, 256, device="cuda").bfloat16(),
        torch.randn(48, 256, device="cuda").bfloat16(),
    )
    for scaling in ("row", "tensor"):
        (codes_a, scales_a), (codes_b, scales_b) = (
            flexops.quantize_fp8(a, scaling=scaling),
            flexops.quantize_fp8(b, scaling=scaling),
        )
        product = torch._scaled_mm(
            codes_a,
            codes_b.t(),
            scale_a=scales_a,
            scale_b=scales_b.t() if scaling == "row" else scales_b,
            out_dtype=torch.bfloat16,
        )
        expected = (
            flexops.dequantize_fp8(codes_a, scales_a)
            @ flexops.dequantize_fp8(codes_b, scales_b).t()
        )
        torch.testing.assert_close(product.float(), expected, rtol=2**-7, atol=2**-5)


def test_in_a_cuda_graph_with_one_scale():
    """The two passes and what they share."""
    x = torch.randn(600, 512, device="cuda").half()
    flexops.quantize_fp8(x, scaling="tensor")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scales = flexops.quantize_fp8(x, scaling="tensor")
    for size in (100.0, 0.01):
        x.normal_(0, size)
        graph.replay()
        expected = fp8_module._quantize_reference(x, E4M3, 0)
        assert_same(values, expected[0])
        assert_same(scales, expected[1])
