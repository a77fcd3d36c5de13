"""flexops.quantize_fp8, quantize_int8 and back: formulas, scales, what becomes of NaN, infinities
and zeros; native against reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from contract import Case, Contract, Make, Refusal, Shape
from quant_cases import DTYPES, SPECIAL, restride
from torch import Tensor

import flexops
from flexops.bench.reference import OnReference
from flexops.ops import fp8 as fp8_module

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODES = (E4M3, E5M2, torch.int8)
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("fp8", "cpu")


def quantize(x: Tensor, code: torch.dtype, segment: int = -1) -> tuple[Tensor, Tensor]:
    """Whatever kernels there are."""
    if code == torch.int8:
        values, scales = torch.ops.flexops.quantize_int8(x)
    else:
        values, scales = torch.ops.flexops.quantize_fp8(x, code, segment)
    return values, scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype, segment: int = -1) -> Tensor:
    ops = torch.ops.flexops
    out: Tensor = (
        ops.dequantize_int8(values, scales, dtype)
        if values.dtype == torch.int8
        else ops.dequantize_fp8(values, scales, segment, dtype)
    )
    return out


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert expected.is_contiguous()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    if actual.element_size() == 1:  # -0.0 too
        same = (actual.view(torch.uint8) == expected.view(torch.uint8)) | actual.float().isnan()
        assert same.all()


def draw_input(random_: random.Random, generator: torch.Generator, device: str = "cpu") -> Tensor:
    """Any shape and strides, with what is special about numbers in it."""
    shape = [random_.choice((1, 2, 3, 5, 17, 64)) for _ in range(random_.choice((0, 1, 1, 2)))]
    shape.append(random_.choice((1, 3, 8, 16, 64, 100, 128, 200, 257, 1000, 4100)))
    if random_.random() < 0.05:
        shape[random_.randrange(len(shape))] = 0
    x = torch.randn(shape, generator=generator) * 10 ** random_.uniform(-6, 6)
    kind = random_.random()
    if kind < 0.1:
        x = torch.full(shape, random_.choice((3.7, 0.0, -0.0, -1e-3, 1e-44)))
    elif kind < 0.4 and x.numel():
        for value in SPECIAL:
            x.view(-1)[random_.randrange(x.numel())] = value
    x = x.to(random_.choice(DTYPES)).to(device)
    return restride(x, random_)


def compare_with_reference(seed: int, device: str = "cpu") -> None:
    """Also what tests on a GPU call."""
    random_, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    x = draw_input(random_, generator, device)
    code = random_.choice(CODES)
    segment = (
        -1
        if code == torch.int8
        else random_.choice((-1, 0, 1, 3, 16, 32, 100, 128, 128, 256, 1024, 5000))
    )
    values, scales = quantize(x, code, segment)
    expected_values, expected_scales = fp8_module._quantize_reference(x, code, segment)
    assert_same(values, expected_values)
    assert_same(scales, expected_scales)
    dtype = random_.choice(DTYPES)
    assert_same(
        dequantize(values, scales, dtype, segment),
        fp8_module._dequantize_reference(values, scales, segment, dtype),
    )
    if code != torch.int8:
        scale = torch.tensor(10 ** random_.uniform(-6, 6), device=device)
        assert_same(
            torch.ops.flexops.quantize_fp8_scaled(x, scale, code),
            fp8_module._quantize_scaled_reference(x, scale, code),
        )
        # all codes, NaN too; not aligned
        every = torch.arange(256, dtype=torch.uint8, device=device).view(code)[
            random_.randrange(17) :
        ]
        assert_same(
            dequantize(every, scale, dtype, 0),
            fp8_module._dequantize_reference(every, scale, 0, dtype),
        )


# ---- native against reference ----


@pytest.mark.parametrize("block", range(4))
@pytest.mark.usefixtures("native")
def test_native_gives_the_references_bits(block):
    for seed in range(block * 60, block * 60 + 60):
        compare_with_reference(seed)


@pytest.mark.parametrize("code", [E4M3, E5M2])
@pytest.mark.usefixtures("native")
def test_codes_are_torchs(code):
    """Every float16 number, which holds all codes and the points halfway between them, as torch
    rounds it; beyond the range, the largest."""
    x = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    values, _ = flexops.quantize_fp8(x, code, "tensor", scale=torch.ones(()))
    assert_same(values, x.float().clamp(-LARGEST[code], LARGEST[code]).to(code))
    every = torch.arange(256, dtype=torch.uint8).view(code)
    assert_same(flexops.dequantize_fp8(every, torch.ones(())), every.float())


@pytest.mark.usefixtures("native")
def test_many_elements_on_all_threads():
    x = torch.randn(300, 4096, generator=torch.Generator().manual_seed(5)).bfloat16()
    for segment in (-1, 0, 128):
        values, scales = quantize(x, E4M3, segment)
        expected = fp8_module._quantize_reference(x, E4M3, segment)
        assert_same(values, expected[0])
        assert_same(scales, expected[1])
        assert_same(
            dequantize(values, scales, torch.bfloat16, segment),
            fp8_module._dequantize_reference(*expected, segment, torch.bfloat16),
        )


# ---- results ----


@pytest.fixture(params=["op", "reference"])
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that takes this runs twice: on whatever kernels there are, and on the
    reference."""
    with OnReference() if request.param == "reference" else nullcontext():
        yield


def roundtrip(x: Tensor, code: torch.dtype, scaling: str) -> tuple[Tensor, Tensor, Tensor]:
    if code == torch.int8:
        values, scales = flexops.quantize_int8(x)
        return values, scales, flexops.dequantize_int8(values, scales)
    values, scales = flexops.quantize_fp8(x, code, scaling, 32)
    return values, scales, flexops.dequantize_fp8(values, scales, group_size=32)


SCALINGS = [
    (E4M3, "row"),
    (E4M3, "group"),
    (E4M3, "tensor"),
    (E5M2, "row"),
    (E5M2, "group"),
    (E5M2, "tensor"),
    (torch.int8, "row"),
]
RELATIVE = {E4M3: 2.0**-4, E5M2: 2.0**-3, torch.int8: 0.0}  # half a step of normal numbers
# half a step of the others, in units of the scale
ABSOLUTE = {E4M3: 2.0**-10, E5M2: 2.0**-17, torch.int8: 0.5}


@pytest.mark.parametrize(("code", "scaling"), SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("either")
def test_the_error_is_half_a_step(code, scaling, dtype):
    x = (torch.randn(13, 3, 200, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    values, scales, y = roundtrip(x, code, scaling)
    assert values.dtype == code
    assert values.shape == x.shape
    assert scales.dtype == y.dtype == torch.float32
    assert tuple(scales.shape) == {"row": (13, 3, 1), "group": (13, 3, 7), "tensor": ()}[scaling]
    step = (
        scales.double()
        if scaling != "group"
        else scales.double().repeat_interleave(32, -1)[..., :200]
    )
    assert (
        (y.double() - x.double()).abs()
        <= (x.double().abs() * RELATIVE[code]).maximum(step * ABSOLUTE[code]) * (1 + 2**-14)
    ).all()


@pytest.mark.usefixtures("either")
def test_scales_are_what_products_are_multiplied_by():
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    values, scales = flexops.quantize_fp8(x)
    assert torch.equal(scales, x.abs().amax(1, keepdim=True) / 448)
    assert torch.equal(values.float().abs().amax(1), torch.full((6,), 448.0))
    assert torch.equal(flexops.dequantize_fp8(values, scales), values.float() * scales)
    codes, scales = flexops.quantize_int8(x)
    assert torch.equal(scales, x.abs().amax(1, keepdim=True) / 127)
    product = torch.mm(codes.int(), codes.int().t()) * scales * scales.t()
    torch.testing.assert_close(product, x @ x.t(), rtol=0, atol=0.6)
    _, scales = flexops.quantize_fp8(x, scaling="tensor")
    assert scales.shape == ()
    assert scales == x.abs().max() / 448


@pytest.mark.usefixtures("either")
def test_halves_round_to_even():
    # codes near 16 are 2 apart, the smallest ones 2**-9
    x = torch.tensor([448.0, 17.0, 19.0, 21.0, -17.0, 2.0**-10, 3 * 2.0**-10])
    assert flexops.quantize_fp8(x)[0].float().tolist() == [448, 16, 20, 20, -16, 0, 2**-8]
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert flexops.quantize_int8(x)[0].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.usefixtures("either")
def test_a_given_scale_saturates():
    x = torch.tensor([1.0, 1e6, -1e6, float("inf"), -float("inf"), float("nan"), 448.0, 460.0])
    scale = torch.tensor([2.0])
    values, same = flexops.quantize_fp8(x, scaling="tensor", scale=scale)
    assert same is scale
    assert values.float().nan_to_num(-1).tolist() == [0.5, 448, -448, 448, -448, -1, 224, 224]
    values, _ = flexops.quantize_fp8(x, E5M2, "tensor", scale=scale)
    assert values.float().nan_to_num(-1).tolist() == [
        0.5,
        57344,
        -57344,
        57344,
        -57344,
        -1,
        224,
        224,
    ]


# ---- special rows ----


@pytest.mark.parametrize(("code", "scaling"), SCALINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.usefixtures("either")
def test_what_is_not_finite_breaks_its_own_only(code, scaling, value):
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    _, _, clean = roundtrip(x, code, scaling)
    x[4, 40] = value
    values, scales, y = roundtrip(x, code, scaling)
    broken = torch.zeros(6, 96, dtype=torch.bool)
    broken[
        (
            (slice(None), slice(None))
            if scaling == "tensor"
            else (4, slice(32, 64) if scaling == "group" else slice(None))
        )
    ] = True
    assert y[broken].isnan().all()
    assert torch.equal(y[~broken], clean[~broken])
    assert (values.view(torch.uint8)[broken] == 0).all()
    assert int(scales.isnan().sum()) == 1


@pytest.mark.parametrize(("code", "scaling"), SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("either")
def test_zeros_and_constants(code, scaling, dtype):
    _, scales, y = roundtrip(torch.zeros(4, 64, dtype=dtype), code, scaling)
    assert (y == 0).all()
    assert (scales == 1).all()
    x = torch.full((4, 64), -2.5, dtype=dtype)
    values, _, y = roundtrip(x, code, scaling)
    assert (values.float() == -LARGEST[code]).all()
    torch.testing.assert_close(y, x.float(), rtol=2**-22, atol=0)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.usefixtures("either")
def test_tiny_numbers_do_not_overflow(code):
    x = torch.tensor([1e-44, -1e-40, 0.0, 3e-39])
    _, scales, y = roundtrip(x, code, "row")
    assert scales.item() == 2.0**-126
    assert (
        (y - x).abs() <= (x.abs() * RELATIVE[code]).clamp(min=scales.item() * ABSOLUTE[code])
    ).all()


# ---- being an op ----


@pytest.mark.parametrize(("code", "scaling"), SCALINGS)
@pytest.mark.usefixtures("either")
def test_empty_tensors(code, scaling):
    for shape in ((0,), (0, 64), (3, 0), (2, 0, 5), (2, 5, 0)):
        values, scales, y = roundtrip(torch.empty(shape), code, scaling)
        assert values.shape == y.shape == shape
        assert (scales == 1).all(), shape
        if scaling == "tensor":
            assert (
                flexops.quantize_fp8(torch.empty(shape), E4M3, "tensor", scale=torch.ones(()))[
                    0
                ].shape
                == shape
            )


def test_dequantize_takes_any_strides():
    values, scales = flexops.quantize_fp8(torch.randn(64, 128), scaling="group", group_size=32)
    y = flexops.dequantize_fp8(values, scales, group_size=32)
    assert_same(
        flexops.dequantize_fp8(values[::2], scales[::2], group_size=32), y[::2].contiguous()
    )
    assert_same(
        flexops.dequantize_fp8(
            values.t().contiguous().t(), scales.t().contiguous().t(), group_size=32
        ),
        y,
    )


def test_results_do_not_require_gradients():
    x = torch.randn(4, 64, requires_grad=True)
    for result in (
        *flexops.quantize_fp8(x),
        *flexops.quantize_int8(x),
        flexops.quantize_fp8(x, scaling="tensor", scale=torch.ones(()))[0],
    ):
        assert not result.requires_grad


QUANTIZE_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, "x must be .* got list"),
    ({"x": torch.tensor(1.0)}, ValueError, "x must have at least one dimension"),
    (
        {"dtype": torch.int8},
        TypeError,
        "dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got torch.int8",
    ),
    ({"scaling": "block"}, ValueError, "scaling must be 'row', 'group' or 'tensor', got 'block'"),
    ({"scaling": "group", "group_size": 0}, ValueError, "group_size must be at least 1, got 0"),
    ({"scale": torch.ones(())}, ValueError, "scale must be None unless scaling is 'tensor'"),
    ({"scaling": "tensor", "scale": 1.0}, TypeError, "scale must be a float32 tensor, got float"),
    (
        {"scaling": "tensor", "scale": torch.ones((), dtype=torch.float64)},
        TypeError,
        "scale must be a float32 tensor",
    ),
    ({"scaling": "tensor", "scale": torch.ones(2)}, ValueError, "scale must be one number"),
]


@pytest.mark.parametrize(("change", "error", "message"), QUANTIZE_ERRORS)
def test_quantize_names_the_wrong_argument(change, error, message):
    with pytest.raises(error, match=f"flexops.quantize_fp8: {message}"):
        flexops.quantize_fp8(**({"x": torch.zeros(4, 64)} | change))


DEQUANTIZE_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"values": torch.zeros(4, 64)}, TypeError, "values must be .* got torch.float32"),
    (
        {"scales": torch.zeros(4, 1, dtype=torch.float64)},
        TypeError,
        "scales must be a float32 tensor",
    ),
    ({"scales": torch.zeros(5, 1)}, ValueError, "scales must have shape"),
    ({"scales": torch.zeros(4, 3)}, ValueError, "scales must have shape"),
    ({"scales": torch.zeros(4)}, ValueError, "scales must have shape"),
    ({"dtype": torch.float64}, TypeError, "dtype must be float32, float16 or bfloat16"),
]


@pytest.mark.parametrize("code", [E4M3, torch.int8])
@pytest.mark.parametrize(("change", "error", "message"), DEQUANTIZE_ERRORS)
def test_dequantize_names_the_wrong_argument(code, change, error, message):
    function: Callable[..., Tensor] = (
        flexops.dequantize_int8 if code == torch.int8 else flexops.dequantize_fp8
    )
    arguments = {"values": torch.zeros(4, 64).to(code), "scales": torch.ones(4, 1)} | change
    with pytest.raises(error, match=f"flexops.{function.__name__}: {message}"):
        function(**arguments)


@pytest.mark.usefixtures("native")
def test_scales_of_another_shape_are_told_the_shapes_that_fit():
    with pytest.raises(ValueError, match=r"shape \[4, 1\] \(rows\), \[4, 2\] \(groups\) or \[\]"):
        flexops.dequantize_fp8(torch.zeros(4, 130).to(E4M3), torch.zeros(3))


def test_the_ops_themselves_check_too():
    """For those who call torch.ops directly: a wrong argument is an error, never a wrong
    address."""
    x = torch.zeros(4, 64)
    values, scales = flexops.quantize_fp8(x)
    for arguments in (
        (x.int(), E4M3, -1),
        (x, torch.float32, -1),
        (x, E4M3, -2),
        (torch.zeros(()), E4M3, -1),
    ):
        with pytest.raises(RuntimeError, match="flexops::quantize_fp8: "):
            torch.ops.flexops.quantize_fp8(*arguments)
    for wrong in (
        (values, scales[:3], -1),
        (values, scales, 32),
        (values, scales, 0),
        (values, scales.double(), -1),
        (x, scales, -1),
    ):
        with pytest.raises(RuntimeError, match="flexops::dequantize_fp8: "):
            torch.ops.flexops.dequantize_fp8(*wrong, torch.float32)
    with pytest.raises(RuntimeError, match="flexops::dequantize_fp8: dtype must be"):
        torch.ops.flexops.dequantize_fp8(values, scales, -1, torch.float64)
    with pytest.raises(RuntimeError, match="flexops::quantize_fp8_scaled: scale must be"):
        torch.ops.flexops.quantize_fp8_scaled(x, scales, E4M3)
    with pytest.raises(RuntimeError, match="flexops::quantize_int8: x must be"):
        torch.ops.flexops.quantize_int8(x.int())


def test_opcheck_with_a_given_scale():
    for x in (torch.randn(5, 70), torch.randn(6, 40).t().bfloat16(), torch.empty(0, 3)):
        arguments = (x, torch.ones(()), E5M2)
        torch.library.opcheck(torch.ops.flexops.quantize_fp8_scaled.default, arguments)


# ---- the shared contract ----


def rows(make: Make, shape: Shape) -> tuple[Tensor]:
    return (make(*shape),)


def case(name: str, call: Callable[[Tensor], tuple[Tensor, ...]], **options: Any) -> Case:
    """Codes as bytes, because torch compares no fp8 numbers."""
    refusals = (
        Refusal(lambda: call(torch.zeros(())), ValueError, "x must have at least one dimension"),
    )
    return Case(name, "fp8", call, rows, oracle=call, names=("x",), shapes=((3, 16), (5, 100), (65, 516)), same_bits=True, accuracy=False, autocast=False,
                refusals=refusals, **options)  # fmt: skip


def fp8_case(code: torch.dtype, scaling: str, **options: Any) -> Case:
    def call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, scales = flexops.quantize_fp8(x, code, scaling, 8)
        return (
            flexops.dequantize_fp8(values, scales, torch.bfloat16, 8),
            values.view(torch.uint8),
            scales,
        )

    return case(f"quantize {str(code)[6:]} per {scaling}", call, **options)


def int8_call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = flexops.quantize_int8(x)
    return flexops.dequantize_int8(values, scales, torch.bfloat16), values, scales


class TestContract(Contract):
    cases = (
        fp8_case(E4M3, "row", huge=(2**18 + 3, 2**13)),
        fp8_case(E5M2, "group", huge=(2**18 + 3, 2**13)),
        fp8_case(E4M3, "tensor"),
        case("quantize int8 per token", int8_call, huge=(2**18 + 3, 2**13)),
    )
