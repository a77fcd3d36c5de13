"""flexops.int4_linear and the weights that it takes, on the CPU: layout, quantization, products at
each instruction set, gradients, errors, the module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexops
from flexops.ops import int4_linear as module

sys.path.insert(0, str(Path(__file__).parent))
from contract import ISA_LEVELS, isa_limit

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(16, 64, 64), (40, 672, 32), (7, 1280, 128), (33, 192, 64)]


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("int4_linear", "cpu")


def parts_of(
    n: int, k: int, group_size: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, k // group_size, generator=generator).to(dtype)
    zeros = (torch.rand(n, k // group_size, generator=generator) * 15).half()
    return codes, scales, None if symmetric else zeros


def formula(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    offset = 8.0 if zeros is None else zeros.to(dtype).repeat_interleave(group_size, 1)
    return (codes.to(dtype) - offset) * scales.to(dtype).repeat_interleave(group_size, 1)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Rounded once to dtype; sums in float32."""
    torch.testing.assert_close(
        found.double(),
        wanted.double(),
        rtol=torch.finfo(dtype).eps,
        atol=float(wanted.abs().max()) * 1e-5,
    )


def random_x(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def test_the_layout_is_as_documented():
    codes, scales, zeros = parts_of(40, 192, 64, False)
    weight = flexops.pack_int4(codes, scales, zeros, group_size=64)
    assert weight.packed.shape == (3, 3, 512)
    for tile_n, tile_k, r, t, w, b in ((0, 0, 0, 0, 0, 0), (1, 2, 5, 3, 3, 1), (1, 1, 7, 1, 2, 2)):
        byte = int(weight.packed[tile_n, tile_k, 64 * r + 16 * t + 4 * w + b])
        column = 64 * tile_k + 16 * w + 2 * t + (0, 8, 1, 9)[b]
        assert byte & 15 == codes[16 * tile_n + r, column]
        assert byte >> 4 == codes[16 * tile_n + r + 8, column]
    assert weight.scales.shape == (3, 3, 16)
    assert weight.scales[1, 2, 2 * 3 + 1] == scales[16 + 3 + 8, 2]
    assert weight.zeros is not None
    assert weight.zeros[2, 0, 2 * 4] == zeros[32 + 4, 0]  # type: ignore[index]
    assert weight.shape == (40, 192)
    assert weight.dtype == torch.bfloat16
    assert weight.nbytes == 3 * 3 * 512 + 2 * 2 * 3 * 3 * 16


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_unpacked_values_are_those_of_the_formula(level, dtype, symmetric):
    for n, k, group_size in SHAPES:
        parts = parts_of(n, k, group_size, symmetric)
        weight = flexops.pack_int4(*parts, group_size=group_size)
        wanted = formula(*parts, group_size, torch.float32).to(dtype)
        assert torch.equal(module.unpack_reference(weight, dtype), wanted)
        with isa_limit(level):
            assert torch.equal(flexops.unpack_int4(weight, dtype), wanted)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_products_are_those_of_the_unpacked_weight(level, dtype, symmetric):
    # scales of 64 groups are loaded at a time
    for n, k, group_size in (*SHAPES, (20, 2144, 32), (20, 4224, 64)):
        parts = parts_of(n, k, group_size, symmetric)
        weight = flexops.pack_int4(*parts, group_size=group_size)
        dense = formula(*parts, group_size)
        bias = random_x(n, dtype=dtype)
        # kernels multiply up to 4 or 8 at once, four times with the same tables
        for rows in (*range(1, 10), 17, 37):
            x = random_x(rows, k, dtype=dtype)
            with isa_limit(level):
                out, again = (
                    torch.ops.flexops.int4_product(x, *weight[:3], bias, *weight[3:], 0)
                    for _ in range(2)
                )
            assert torch.equal(out, again)
            wanted = F.linear(x.double(), dense, bias.double())
            if dtype == torch.bfloat16 and rows > 8:  # some CPUs' kernels round the weight
                rounded = F.linear(x.double(), dense.to(dtype).double(), bias.double())
                wanted = min(wanted, rounded, key=lambda one: float((out - one).abs().sum()))
            close(out, wanted, dtype)


def numbers_of_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """By the formula, in float64: a sign, two bits of exponent, one of mantissa, and a scale."""
    exponent, mantissa = (codes >> 1 & 3).double(), (codes & 1).double() / 2
    size = torch.where(exponent > 0, (1 + mantissa) * (exponent - 1).exp2(), mantissa)
    return size.where(codes < 8, -size) * scales.double().repeat_interleave(32, 1)


def parts_of_mxfp4(n: int, k: int) -> tuple[Tensor, Tensor]:
    codes, scales, _ = parts_of(n, k, 32, True)
    return codes, (scales.float() * 16 - 8).round().exp2().bfloat16()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_scales", DTYPES, ids=str)
def test_unpacked_values_of_mxfp4_are_its_numbers(level, dtype, of_scales):
    for n, k in ((16, 64), (40, 672), (7, 96)):
        codes, scales = parts_of_mxfp4(n, k)
        if of_scales != torch.float16:
            scales[:4, 0] = torch.tensor([2.0**-127, 2.0**-126, 2.0**126, 2.0**127])
        codes[:4, :16] = torch.arange(16)  # the largest ones are infinite
        weight = flexops.pack_int4(codes, scales.to(of_scales), group_size=32)
        wanted = numbers_of_mxfp4(codes, scales).float().to(dtype)
        bits = torch.int32 if dtype == torch.float32 else torch.int16  # zeros have signs
        plain = module.unpack_reference(weight, dtype, True)
        assert torch.equal(plain.view(bits), wanted.view(bits))
        with isa_limit(level):
            found = torch.ops.flexops.int4_unpack(*weight, dtype, True)
        assert torch.equal(found.view(bits), wanted.view(bits))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_mxfp4_are_those_of_its_numbers(level, dtype):
    for n, k in ((16, 64), (40, 672), (7, 96), (20, 2144)):
        codes, scales = parts_of_mxfp4(n, k)
        weight = flexops.pack_int4(codes, scales, group_size=32)
        bias = random_x(n, dtype=dtype)
        for rows in (*range(1, 10), 17, 37):  # above 32 the weight is unpacked
            x = random_x(rows, k, dtype=dtype)
            with isa_limit(level):
                out = module.linear(x, weight, bias, mxfp4=True)
            wanted = F.linear(x.double(), numbers_of_mxfp4(codes, scales), bias.double())
            close(out, wanted, dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exponent", [-127, -126, 126, 127])
def test_products_of_mxfp4_with_the_smallest_and_largest_scales(level, dtype, exponent):
    codes, _ = parts_of_mxfp4(20, 96)
    codes &= 0b1011  # up to 1.5: larger ones are infinite in float32, too
    scales = torch.full((20, 3), 2.0**exponent).bfloat16()
    weight = flexops.pack_int4(codes, scales, group_size=32)
    for rows in (1, 3, 9):
        x = random_x(rows, 96, dtype=dtype) * 2.0 ** -(exponent // 2)
        with isa_limit(level):
            out = module.linear(x, weight, None, mxfp4=True)
        close(out, x.double() @ numbers_of_mxfp4(codes, scales).t(), dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("group_size", [32, 64])
def test_mxfp4_has_groups_of_32_and_no_zero_points(group_size):
    weight = flexops.pack_int4(*parts_of(16, 128, group_size, False), group_size=group_size)
    message = "MXFP4 has groups of 32 columns and no zero points"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.flexops.int4_unpack(*weight, torch.float32, True)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(3,), (2, 3), (0,), (1, 1, 1), (90,)], ids=str)
def test_any_leading_shape_and_strides(dtype, rows):
    weight = flexops.pack_int4(*parts_of(33, 192, 64, False), group_size=64)
    wide = random_x(*rows, 400, dtype=dtype)
    dense = flexops.unpack_int4(weight, torch.float32)
    for x in (wide[..., :192], wide[..., 1:193], wide[..., ::2][..., :192]):
        out = flexops.int4_linear(x, weight)
        assert out.shape == (*rows, 33)
        assert out.dtype == dtype
        assert out.is_contiguous()
        if x.numel():
            # many rows: torch's product with the weight rounded to dtype
            wanted = F.linear(x.float(), dense.to(dtype).float() if rows == (90,) else dense)
            torch.testing.assert_close(
                out.float(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-2
            )


@pytest.mark.usefixtures("native")
def test_on_a_cpu_a_part_of_the_weight_is_dequantized_at_a_time(
    monkeypatch,
):
    weight = flexops.quantize_int4(random_x(40, 64, dtype=torch.float32))
    x, bias = random_x(90, 64, dtype=torch.float32), random_x(40, dtype=torch.float32)
    whole = flexops.int4_linear(x, weight, bias)
    monkeypatch.setattr(module, "_ELEMENTS_OF_A_PART", 17 * 64)
    torch.testing.assert_close(flexops.int4_linear(x, weight, bias), whole)


@pytest.mark.parametrize("rows", [3, 90])
def test_gradients_are_those_of_the_dense_product(rows):
    weight = flexops.quantize_int4(random_x(40, 128, dtype=torch.float32))
    dense = flexops.unpack_int4(weight)
    x = random_x(rows, 128, dtype=torch.float32).requires_grad_()
    bias = random_x(40, dtype=torch.float32).requires_grad_()
    out = flexops.int4_linear(x, weight, bias)
    grad = random_x(rows, 40, dtype=torch.float32)
    saved = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert sum(one.nbytes for one in saved) == weight.nbytes
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad @ dense)
    torch.testing.assert_close(bias.grad, grad.sum(0))
    weight.scales.requires_grad_()
    with pytest.raises(ValueError, match=r"weight\.scales must not require a gradient"):
        flexops.int4_linear(x, weight)


@pytest.mark.usefixtures("native")
def test_the_operators_pass_opcheck():
    weight = flexops.quantize_int4(random_x(20, 128, dtype=torch.float32))
    arguments = (None, *weight[3:])
    for rows in (2, 50):
        x = random_x(rows, 128, dtype=torch.float32).requires_grad_()
        torch.library.opcheck(torch.ops.flexops.int4_linear.default, (x, *weight[:3], *arguments))
    torch.library.opcheck(torch.ops.flexops.int4_unpack.default, (*weight, torch.bfloat16))
    weight = flexops.quantize_int4(random_x(20, 128, dtype=torch.float32), 32, symmetric=True)
    torch.library.opcheck(torch.ops.flexops.int4_unpack.default, (*weight, torch.float16, True))
    given = random_x(2, 128, dtype=torch.float32), *weight[:3], None, *weight[3:], 0, True
    torch.library.opcheck(torch.ops.flexops.int4_product.default, given)


def test_a_compiled_call_is_one_graph():
    weight = flexops.quantize_int4(random_x(20, 128, dtype=torch.float32))
    call = torch.compile(
        lambda x: flexops.int4_linear(x, weight) * 2, backend="aot_eager", fullgraph=True
    )
    x = random_x(3, 128, dtype=torch.float32)
    torch.testing.assert_close(call(x), flexops.int4_linear(x, weight) * 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_quantization_is_within_half_a_step(dtype, symmetric, group_size):
    x = random_x(24, 256, dtype=dtype)
    x[3] += 2  # a row of one sign
    x[5] = 0
    weight = flexops.quantize_int4(x, group_size, symmetric)
    back = flexops.unpack_int4(weight, torch.float32)
    groups = x.float().unflatten(1, (-1, group_size))
    lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    step = torch.maximum(-lowest, highest) / 7 if symmetric else (highest - lowest) / 15
    # the scale's rounding, times the largest distance from zero point in steps
    bound = step * (0.5 + 16 * torch.finfo(dtype).eps)
    error = (back - x.float()).abs().unflatten(1, (-1, group_size)).amax(-1)
    assert (error <= bound + 1e-7).all()
    assert not back[5].any()
    assert weight.dtype == dtype


def test_groups_that_are_not_finite_become_nan():
    x = torch.randn(4, 128)
    x[1, 3], x[2, 100] = torch.nan, torch.inf
    for symmetric in (False, True):
        back = flexops.unpack_int4(flexops.quantize_int4(x, 64, symmetric))
        assert back[1, :64].isnan().all()
        assert back[2, 64:].isnan().all()
        assert back.isnan().sum() == 128


@pytest.mark.parametrize("symmetric", [False, True])
def test_flexgens_format_converts_with_the_same_codes(symmetric):
    x = torch.randn(20, 128)
    quantized = flexops.quantize(x, 4, 32, symmetric=symmetric)
    weight = module.from_quantized(quantized)
    torch.testing.assert_close(flexops.unpack_int4(weight), flexops.dequantize(quantized))
    with pytest.raises(ValueError, match="grouped along the last one"):
        module.from_quantized(flexops.quantize(x, 4, 32, dim=0))


def test_the_module_loads_what_it_saved():
    linear = torch.nn.Linear(128, 40, dtype=torch.bfloat16)
    for symmetric in (False, True):
        packed = flexops.nn.Int4Linear.from_linear(linear, 32, symmetric)
        other = flexops.nn.Int4Linear(128, 40, True, 32, symmetric, dtype=torch.bfloat16)
        state = packed.state_dict()
        assert set(state) == {"packed", "scales", "bias"} | (set() if symmetric else {"zeros"})
        other.load_state_dict(state)
        x = random_x(3, 128, dtype=torch.bfloat16)
        assert torch.equal(other(x), packed(x))
        wanted = F.linear(x, flexops.unpack_int4(packed.weight), linear.bias)
        torch.testing.assert_close(other(x), wanted, rtol=0.02, atol=0.02)


def test_the_modules_dtype_is_the_biass():
    packed = flexops.nn.Int4Linear.from_linear(torch.nn.Linear(64, 16))
    scales = packed.scales.clone()
    packed.half()
    assert torch.equal(packed.scales, scales)
    assert packed.bias is not None
    assert packed.bias.dtype == torch.float16
    assert packed(torch.randn(2, 64).half()).dtype == torch.float16
    moved = packed.to("meta")
    assert moved.packed.device.type == moved.scales.device.type == "meta"


def test_a_state_dict_of_16_bits_is_rejected():
    linear = torch.nn.Linear(64, 16)
    packed = flexops.nn.Int4Linear.from_linear(linear)
    with pytest.raises(RuntimeError, match=r"weight is not packed.*fix: .*from_linear"):
        packed.load_state_dict(linear.state_dict())


def _weight() -> Any:
    return flexops.pack_int4(*parts_of(16, 128, 64, False), group_size=64)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: flexops.int4_linear(torch.ones(2, 64), _weight()), ValueError, "x must have"),
        (lambda: flexops.int4_linear(torch.ones(()), _weight()), ValueError, r"x must .* got \[\]"),
        (lambda: flexops.int4_linear(torch.ones(2, 128).int(), _weight()), TypeError, "x must be"),
        (
            lambda: flexops.int4_linear(torch.ones(2, 128), torch.ones(16, 128)),
            TypeError,
            "weight must be an Int4Weight, got Tensor; fix:",
        ),
        (
            lambda: flexops.int4_linear(torch.ones(2, 128), _weight(), torch.ones(3)),
            ValueError,
            r"bias must have shape \[16\]",
        ),
        (
            lambda: flexops.int4_linear(torch.ones(2, 128), _weight(), torch.ones(16).half()),
            TypeError,
            "bias must be a float32",
        ),
        (
            lambda: flexops.int4_linear(torch.ones(2, 128, device="meta"), _weight()),
            ValueError,
            "must be on the device of x, meta, got cpu",
        ),
        (
            lambda: flexops.unpack_int4(_weight()._replace(group_size=32)),
            ValueError,
            r"weight.scales must have shape \[1, 4, 16\]",
        ),
        (
            lambda: flexops.unpack_int4(_weight()._replace(n=40)),
            ValueError,
            r"weight.packed must have shape \[3, 2, 512\]",
        ),
        (lambda: flexops.unpack_int4(_weight(), torch.int8), TypeError, "dtype must be"),
        (
            lambda: flexops.pack_int4(*parts_of(16, 128, 64, True)[:2], group_size=32),
            ValueError,
            r"scales must have shape \[16, 4\]",
        ),
        (
            lambda: flexops.pack_int4(torch.ones(2, 2), torch.ones(2, 1), group_size=64),
            TypeError,
            "codes must be a uint8 tensor",
        ),
        (
            lambda: flexops.quantize_int4(torch.ones(4, 100)),
            ValueError,
            "group_size must divide K, .*100 is no multiple of 64",
        ),
        (lambda: flexops.quantize_int4(torch.ones(4, 0)), ValueError, "K > 0, got .4, 0."),
        (lambda: flexops.quantize_int4(torch.ones(4, 64).int()), TypeError, "int4: weight must be"),
        (
            lambda: flexops.quantize_int4(torch.ones(4, 128), 48),
            ValueError,
            "group_size must be 32, 64 or 128, got 48",
        ),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_self_check(device):
    assert module.self_check(device) < 1e-3


def test_from_linear_names_what_is_no_layer():
    with pytest.raises(TypeError, match=r"linear must be a torch.nn.Linear, got int"):
        flexops.nn.Int4Linear.from_linear(3)
