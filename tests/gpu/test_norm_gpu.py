"""The norms on a GPU: every way through the kernels against the reference, for lengths and layouts
at which the ways change."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from norm_cases import DTYPES, ROUNDING, Drawn, assert_near, compare_all
from processes import completed

import flexops
from flexops.ops._register import reference_of

pytestmark = pytest.mark.gpu
FAMILIES = ("norm", "norm_backward")
ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 2, 7, 8, 9, 63, 64, 136, 256, 257, 520, 1000, 1024, 1032, 2048, 4095, 4096, 5120,
    8192, 8200, 12288, 16384, 16392, 32768, 65535, 65536)  # fmt: skip


def draw(rows: int, columns: int, dtype: torch.dtype, how: int) -> torch.Tensor:
    """Contiguous, padded rows, padded rows at odd places, one row for all, every second element."""
    if how == 1:
        return torch.randn(rows, columns + 16, device="cuda").to(dtype)[:, 8 : 8 + columns]
    if how == 2:
        return torch.randn(rows, columns + 3, device="cuda").to(dtype)[:, 1 : 1 + columns]
    if how == 3:
        return torch.randn(1, columns, device="cuda").to(dtype).expand(rows, columns)
    if how == 4:
        return torch.randn(rows, columns, 2, device="cuda").to(dtype)[..., 0]
    return torch.randn(rows, columns, device="cuda").to(dtype)


@pytest.mark.parametrize("columns", LENGTHS)
def test_kernels_give_what_the_reference_gives(columns):
    torch.manual_seed(columns)
    choose = random.Random(columns)
    for turn in range(12):
        x_dtype = DTYPES[turn % 3]
        row_dtype = x_dtype if turn % 4 else choose.choice(DTYPES)
        weight_dtype, bias_dtype = (
            (x_dtype, x_dtype) if turn % 2 else (choose.choice(DTYPES), choose.choice(DTYPES))
        )
        rows = choose.choice((1, 3, 64, 700 if columns < 10000 else 70))
        x, grad = (
            draw(rows, columns, x_dtype, choose.randrange(5)),
            draw(rows, columns, x_dtype, choose.randrange(4)),
        )
        residual, also = (
            draw(rows, columns, row_dtype, choose.randrange(4)),
            draw(rows, columns, row_dtype, choose.randrange(4)),
        )
        weight = (
            torch.randn(columns, device="cuda").to(weight_dtype) if choose.random() < 0.8 else None
        )
        bias = torch.randn(columns, device="cuda").to(bias_dtype) if choose.random() < 0.8 else None
        needs = [choose.random() < 0.8 for _ in range(3)]
        some = also if turn % 3 else None
        offset = float(turn >= 6)
        drawn = Drawn(x, residual, grad, some, weight, bias, needs, bias_dtype, offset)
        # a row of one column has a gradient of zero: all that is left is rounding
        compare_all(drawn, floor=1e-6 if columns == 1 else 1e-7)


@pytest.mark.parametrize("columns", [7, 256, 1000, 4096, 9000, 40000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_an_offset_is_added_to_the_weight(name, dtype, columns):
    """Results and gradients are float64's, with weights of x's dtype and of float32."""
    torch.manual_seed(columns)
    x, grad = torch.randn(2, 5, columns, device="cuda").to(dtype)
    nothing = torch.zeros_like(x)
    for weight_dtype in (dtype, torch.float32):
        weight = torch.randn(columns, device="cuda").to(weight_dtype)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        exact = [one.detach().double().requires_grad_() for one in leaves]
        wanted = getattr(F, name)(exact[0], (columns,), weight=exact[1] + 1, eps=1e-5)
        expected = wanted, *torch.autograd.grad(wanted, exact, grad.double())
        for y in (
            getattr(flexops, name)(x, weight=weight, eps=1e-5, offset=1.0),
            getattr(flexops, f"add_{name}")(x, nothing, weight=weight, eps=1e-5, offset=1.0)[0],
        ):
            actual = y, *torch.autograd.grad(y, leaves, grad)
            rounded = [one.to(same.dtype) for one, same in zip(expected, actual, strict=True)]
            assert_near(actual, rounded, size=5)


@pytest.mark.parametrize("columns", [1, 7, 8, 520, 4096, 8192, 16384, 40000])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes(columns, dtype):
    torch.manual_seed(columns)
    for x_dtype in DTYPES:
        x, residual = torch.randn(2, 67, columns, device="cuda").to(x_dtype)
        weight = torch.randn(columns, device="cuda")
        x[3] = 0
        x[4, columns // 2] = torch.inf
        for arguments in ((x, weight), (x, None, 1e-6, dtype, residual)):
            values, scales, *rest = flexops.rms_norm_quantized(
                *arguments[:2], 1e-6, dtype, *arguments[4:]
            )
            op = (
                reference_of("flexops::add_rms_norm_quantized")
                if rest
                else reference_of("flexops::rms_norm_quantized")
            )
            expected, expected_scales, *_ = op(x, *arguments[4:], arguments[1], 1e-6, dtype)
            torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
            difference = (values.view(torch.int8).int() - expected.view(torch.int8).int()).abs()
            assert difference.max() <= 1
            # ties: sums are rounded another way
            assert difference.sum() <= 3 + difference.numel() // 200


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("factor", [2.0**-80, 1.0, 2.0**80])
def test_codes_near_the_ends_of_float32(x_dtype, factor):
    """Where x * weight comes near them, or leaves them, but the result does not."""
    x, weight = (
        torch.randn(40, 4096, device="cuda").to(x_dtype),
        torch.rand(4096, device="cuda").add(0.5),
    )
    if x_dtype != torch.float16:
        x = (x.float() * 2.0**50 if factor > 1 else x.float() * 2.0**-50 if factor < 1 else x).to(
            x_dtype
        )
        weight = (weight * factor).to(x_dtype)
    else:
        weight = weight.to(x_dtype)
    values, scales = flexops.rms_norm_quantized(x, weight, 0.0)
    expected, expected_scales = reference_of("flexops::rms_norm_quantized")(
        x, weight, 0.0, torch.int8
    )
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
    difference = (values.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert difference.sum() <= 3 + difference.numel() // 200


@pytest.mark.parametrize("columns", [8, 128, 136, 1000, 1032, 8192, 16384, 32768, 40000, 65536])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_layer_norm_of_rows_with_an_outlier_or_a_large_mean(x_dtype, columns):
    """The kernels' sums are as good as sums of squares off the mean, wherever the outlier lies."""
    rows = 200000 // columns * 32 + 1
    x = torch.randn(rows, columns, device="cuda")
    x[::4, 0] += 1000
    x[1::4, columns // 2] -= 1000
    x[2::4] += 100
    x = x.to(x_dtype)
    weight, bias = torch.randn(2, columns, device="cuda").to(x_dtype)
    y = flexops.layer_norm(x, weight, bias).double()
    exact = torch.nn.functional.layer_norm(x.double(), (columns,), weight.double(), bias.double())
    # A mean of 100 is known to 2^-24 of itself, which deviations inherit; of rows of 8 they may be
    # less than 1.
    scale = 1 / x.double().std(-1, keepdim=True, correction=0).clamp(max=1)
    bound = ROUNDING[x_dtype] * exact.abs() + 4e-5 * (weight.double().abs() * scale + 1)
    assert ((y - exact).abs() <= bound).all()


@pytest.mark.parametrize("columns", [64, 1024, 8192, 16384, 20000, 65536])
def test_the_same_bits_every_time(columns):
    x = torch.randn(1000, columns, device="cuda").bfloat16().requires_grad_()
    weight, bias = (torch.randn(columns, device="cuda").requires_grad_() for _ in range(2))
    grad = torch.randn_like(x)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flexops.layer_norm(x, weight, bias), (x, weight, bias), grad)

    first = gradients()
    for _ in range(5):
        for one, other in zip(first, gradients(), strict=True):
            assert torch.equal(one, other)


LONG_ROWS_FIRST = """
import torch, flexops
from torch.profiler import ProfilerActivity, profile
x = torch.randn(64, 65536, device="cuda").bfloat16().requires_grad_()
y = flexops.rms_norm(x, torch.ones(65536, device="cuda", dtype=torch.bfloat16))
room = torch.empty(2**28, device="cuda", dtype=torch.uint8)
del room  # what backward allocates is there: nothing of CUDA's runtime runs on autograd's thread before our kernels
grad = torch.randn_like(y)
with profile(activities=[ProfilerActivity.CUDA]) as profiled:
    torch.autograd.grad(y, x, grad)
    torch.cuda.synchronize()
print([event.key for event in profiled.key_averages()])
"""


def test_autograds_thread_finds_room_for_clusters_before_its_first_launch():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters are of compute capability 9.0")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = completed([sys.executable, "-c", LONG_ROWS_FIRST], env=environment)
    assert "backward_walk" in done.stdout, done.stdout
