"""flexops.quantize and flexops.dequantize on the CPU (some tests on a GPU, too): formulas, format,
special groups, native against reference, torch.compile."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import ISA_LEVELS, Case, Contract, isa_limit
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_cases import DTYPES, assert_same, draw_input, draw_options

import flexops
from flexops import QuantizedTensor
from flexops.bench.reference import OnReference
from flexops.ops import quant as quant_module

ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
MODES = [(bits, symmetric) for bits in (4, 8) for symmetric in (False, True)]


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("quant", "cpu")


@pytest.fixture(params=["op", "reference"])
def roundtrip(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that takes this runs twice: on whatever kernels there are, and on the
    reference."""
    with OnReference() if request.param == "reference" else nullcontext():
        yield


def per_element(per_group: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    dim = q.dim % q.packed.dim()
    return per_group.repeat_interleave(q.group_size, dim).narrow(dim, 0, q.length)


def error_bound(x: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    """Half a step (a whole one where a coarse scale pushes the maximum beyond the last code), the
    float32 arithmetic, the result's rounding."""
    top = quant_module._largest_code(q.bits, q.symmetric)
    beyond = max(top * (1 + ROUNDING[x.dtype] + 2**-22) - (top + 0.5), 0.0)
    step = per_element(1 / q.scale.double(), q)
    largest = step * top + (0 if q.minimum is None else per_element(q.minimum.double().abs(), q))
    return (
        step * (0.5 + beyond)
        + largest * 2.0**-21
        + x.double().abs() * 2 * ROUNDING[x.dtype]
        + step * ROUNDING[x.dtype]
        + SMALLEST[x.dtype]
    )


# ---- results ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "symmetric"), MODES)
@pytest.mark.usefixtures("roundtrip")
def test_the_error_is_half_a_step(dtype, bits, symmetric):
    x = (torch.randn(130, 66, 3, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    for group_size, dim in product((64, 7, -1), (0, 1, -1)):
        q = flexops.quantize(x, bits, group_size, dim, symmetric)
        y = flexops.dequantize(q)
        assert y.dtype == dtype
        assert y.shape == x.shape == q.shape
        assert y.is_contiguous()
        assert q.symmetric == symmetric
        assert ((y.double() - x.double()).abs() <= error_bound(x, q)).all(), (group_size, dim)


@given(st.data())
@settings(max_examples=60)
def test_the_error_is_half_a_step_for_any_shape(data):
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    bits, symmetric = data.draw(st.sampled_from(MODES))
    dtype = data.draw(st.sampled_from(DTYPES))
    group_size = data.draw(st.one_of(st.integers(1, 70), st.just(-1)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator) * 10 ** data.draw(st.floats(-4, 4)) + data.draw(
        st.floats(-10, 10)
    )
    x = x.to(dtype).permute(data.draw(st.permutations(range(len(shape)))))
    q = flexops.quantize(x, bits, group_size, dim, symmetric)
    y = flexops.dequantize(q, torch.float32)
    assert ((y.double() - x.double()).abs() <= error_bound(x, q)).all()
    again = flexops.quantize(flexops.dequantize(q, x.dtype), bits, group_size, dim, symmetric)
    assert again.packed.shape == q.packed.shape
    assert again.scales.shape == q.scales.shape


def flexgen_compress(
    x: np.ndarray[Any, Any], group_size: int, dim: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """FlexGen's published format, from its description: 4 bits, min and max, group-major, the even
    element in the high half."""
    x = np.moveaxis(x.astype(np.float32), dim, -1)
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = (np.float32(1) / (high - low)) * np.float32(15)
    codes = np.rint(np.clip((groups - low) * scale, 0, 15)).astype(np.uint8)
    packed = (codes[..., 0::2] << 4) | codes[..., 1::2]
    pairs = np.concatenate([scale, low], -1)
    packed = packed.reshape(*packed.shape[:-2], -1)
    return np.moveaxis(packed, -1, dim), np.moveaxis(np.moveaxis(pairs, -2, dim), -1, dim + 1)


def flexgen_decompress(
    packed: np.ndarray[Any, Any], pairs: np.ndarray[Any, Any], group_size: int, dim: int
) -> np.ndarray[Any, Any]:
    packed = np.moveaxis(packed, dim, -1)
    codes = (
        np.stack([packed >> 4, packed & 15], -1)
        .reshape(*packed.shape[:-1], -1, group_size)
        .astype(np.float32)
    )
    scale, low = np.split(
        np.moveaxis(np.moveaxis(pairs.astype(np.float32), dim + 1, -1), dim, -2), 2, -1
    )
    return np.moveaxis((codes / scale + low).reshape(*packed.shape[:-1], -1), -1, dim)


@pytest.mark.parametrize(
    ("shape", "dim"), [((128, 96), 0), ((96, 128), 1), ((64, 8, 128), 2), ((5, 128, 33), 1)]
)
@pytest.mark.usefixtures("roundtrip")
def test_float32_gives_flexgens_bits(shape, dim):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    packed, pairs = flexgen_compress(x.numpy(), 64, dim)
    q = flexops.quantize(x, 4, 64, dim)
    assert np.array_equal(q.packed.numpy(), packed)
    assert np.array_equal(q.scales.numpy(), pairs)
    np.testing.assert_allclose(
        flexops.dequantize(q).numpy(),
        flexgen_decompress(packed, pairs, 64, dim),
        rtol=1e-6,
        atol=1e-6,
    )
    mine = QuantizedTensor(
        torch.from_numpy(packed.copy()), torch.from_numpy(pairs.copy()), shape[dim], 4, 64, dim
    )
    assert_same(flexops.dequantize(mine), flexops.dequantize(q))


@pytest.mark.usefixtures("roundtrip")
def test_flexgen_reads_what_we_write_in_float16():
    x = torch.randn(256, 40, generator=torch.Generator().manual_seed(4)).half()
    q = flexops.quantize(x, 4, 64, 0)
    theirs = flexgen_decompress(q.packed.numpy(), q.scales.numpy(), 64, 0)
    assert (np.abs(theirs - x.float().numpy()) <= error_bound(x, q).numpy()).all()


@pytest.mark.usefixtures("roundtrip")
def test_the_layout_is_as_documented():
    x = torch.tensor([[0.0, 15.0, 3.0, 7.0, 1.0, 2.0, 16.0]])
    q = flexops.quantize(x, 4, 3, 1)
    # groups [0, 15, 3], [7, 1, 2] and [16]; each takes two bytes, the last half of an odd group is
    # empty
    assert q.packed.tolist() == [[0x0F, 0x30, 0xF0, 0x20, 0x00, 0x00]]
    assert q.scales.shape == (1, 3, 2)
    assert q.minimum is not None
    assert q.minimum.tolist() == [[0.0, 1.0, 16.0]]
    assert q.scale.tolist() == [[1.0, 2.5, 1.0]]
    q = flexops.quantize(torch.tensor([-7.0, 7.0, 0.0, 3.0]), 4, 4, symmetric=True)
    assert q.packed.tolist() == [0x97, 0x03]
    assert q.scales.shape == (1, 1)
    assert q.minimum is None
    q = flexops.quantize(torch.tensor([-127.0, 127.0, 0.0, 3.0]), 8, 4, symmetric=True)
    assert q.packed.view(torch.int8).tolist() == [-127, 127, 0, 3]
    assert flexops.quantize(torch.randn(10, 64)).nbytes == 10 * 32 + 10 * 2 * 4


@pytest.mark.usefixtures("roundtrip")
def test_halves_round_to_even():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 15.0])
    q = flexops.quantize(x, 4, 6)
    assert q.packed.tolist() == [0x00, 0x22, 0x4F]


# ---- special groups ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.usefixtures("roundtrip")
def test_constant_groups_come_back_exactly(dtype, bits):
    for value, dim in product((0.0, -0.0, 3.7, -1e-3, 6e4), (0, 1)):
        x = torch.full((70, 70), value, dtype=dtype)
        q = flexops.quantize(x, bits, 64, dim)
        assert torch.equal(flexops.dequantize(q), x), (value, dim)
        assert (q.scale == 1).all(), (value, dim)
        assert (q.packed == 0).all(), (value, dim)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.usefixtures("roundtrip")
def test_symmetric_zeros_come_back_exactly(bits):
    q = flexops.quantize(torch.zeros(3, 64), bits, symmetric=True)
    assert (flexops.dequantize(q) == 0).all()
    assert (q.scale == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "symmetric"), MODES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.usefixtures("roundtrip")
def test_a_group_that_is_not_finite_becomes_nan(dtype, bits, symmetric, dim):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 96, generator=generator).to(dtype)
    clean = flexops.dequantize(flexops.quantize(x, bits, 32, dim, symmetric))
    broken = torch.zeros(96, 96, dtype=torch.bool)
    if dim == 0:
        broken[32:64, 70] = True
    else:
        broken[40, 64:96] = True
    for value in (float("nan"), float("inf"), -float("inf")):
        x[40, 70] = value
        q = flexops.quantize(x, bits, 32, dim, symmetric)
        y = flexops.dequantize(q)
        assert y[broken].isnan().all(), value
        assert torch.equal(y[~broken], clean[~broken]), value
        codes = flexops.dequantize(q._replace(scales=torch.ones_like(q.scales)))
        assert (codes[broken] == (0 if symmetric else 1)).all(), value  # the codes are 0


@pytest.mark.usefixtures("roundtrip")
def test_a_span_beyond_float32_becomes_nan():
    x = torch.tensor([-3e38, 3e38, 1.0, 2.0])
    assert flexops.dequantize(flexops.quantize(x, 4, 2))[:2].isnan().all()
    assert flexops.dequantize(flexops.quantize(x, 4, 2, symmetric=True)).isfinite().all()


@pytest.mark.usefixtures("roundtrip")
def test_a_tiny_span_does_not_overflow_the_scale():
    x = torch.tensor([1.0, 1.0 + 2**-10], dtype=torch.float16)
    q = flexops.quantize(x, 8, 2)
    assert q.scale.item() == 65504.0
    assert torch.equal(flexops.dequantize(q), x)
    x = torch.tensor([0.0, 1e-40])
    q = flexops.quantize(x, 4, 2)
    assert q.scale.isfinite().all()
    assert (flexops.dequantize(q) - x).abs().max() <= 1e-40


# ---- native against reference ----


def compare_with_reference(seed: int) -> None:
    random_, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    x, dim = draw_input(random_, generator)
    bits, group_size, symmetric = draw_options(random_)
    packed, scales = torch.ops.flexops.quantize(x, bits, group_size, dim, symmetric)
    expected_packed, expected_scales = quant_module._quantize_reference(
        x, bits, group_size, dim, symmetric
    )
    assert_same(packed, expected_packed)
    assert_same(scales, expected_scales)
    arguments = (packed, scales, x.shape[dim], bits, group_size, dim, random_.choice(DTYPES))
    assert_same(
        torch.ops.flexops.dequantize(*arguments), quant_module._dequantize_reference(*arguments)
    )


@pytest.mark.parametrize("block", range(4))
@pytest.mark.usefixtures("native")
def test_native_gives_the_references_bits(block):
    for seed in range(block * 60, block * 60 + 60):
        compare_with_reference(seed)


@pytest.mark.extra
@pytest.mark.parametrize("isa", ISA_LEVELS[:2])  # the best one is what every other test runs
@pytest.mark.usefixtures("native")
def test_every_isa_gives_the_references_bits(isa):
    with isa_limit(isa):
        for seed in range(1000, 1100):
            compare_with_reference(seed)


@pytest.mark.usefixtures("native")
def test_many_elements_on_all_threads():
    x = torch.randn(513, 4096, generator=torch.Generator().manual_seed(5)).bfloat16()
    for dim in (0, 1):
        q = flexops.quantize(x, 4, 64, dim)
        packed, scales = quant_module._quantize_reference(x, 4, 64, dim, False)
        assert torch.equal(q.packed, packed)
        assert torch.equal(q.scales, scales)
        assert torch.equal(
            flexops.dequantize(q),
            quant_module._dequantize_reference(
                packed, scales, q.length, 4, 64, dim, torch.bfloat16
            ),
        )


@pytest.mark.usefixtures("native")
def test_large_results_ask_for_huge_pages(require):
    """The page faults of a fresh result would take several times as long as the work."""
    require(
        Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
        "transparent huge pages",
        "a Linux kernel with CONFIG_TRANSPARENT_HUGEPAGE",
    )
    y = flexops.dequantize(flexops.quantize(torch.randn(4096, 4096)))
    inside, here, flags = y.data_ptr() + y.nbytes // 2, False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            here = int(span[1], 16) <= inside < int(span[2], 16)
        elif here and line.startswith("VmFlags:"):
            flags = line
    assert "hg" in flags.split()


@pytest.mark.usefixtures("roundtrip")
def test_dequantize_takes_any_strides():
    q = flexops.quantize(torch.randn(64, 128), 4, 32, 0)
    part = q._replace(packed=q.packed[:, ::2], scales=q.scales[:, :, ::2])
    assert_same(flexops.dequantize(part), flexops.dequantize(q)[:, ::2].contiguous())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("bits", "symmetric"), MODES)
def test_dequantize_reads_views_that_begin_anywhere(native_kernels, device, dim, bits, symmetric):
    """One byte, or one number, beyond an address that vectors of codes or scales could be read
    from."""
    native_kernels("quant", device)
    q = flexops.quantize(torch.randn(64, 128, device=device).bfloat16(), bits, 32, dim, symmetric)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    expected = flexops.dequantize(q)
    assert_same(flexops.dequantize(q._replace(packed=moved(q.packed))), expected)
    assert_same(flexops.dequantize(q._replace(scales=moved(q.scales))), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("roundtrip")
def test_dequantize_to_another_dtype(dtype):
    q = flexops.quantize(torch.randn(3, 200).half(), 4, 64)
    y = flexops.dequantize(q, dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.float(), flexops.dequantize(q, torch.float32), rtol=ROUNDING[dtype], atol=1e-6
    )


# ---- being an op ----


@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0), (2, 0, 5), (2, 5, 0)])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.usefixtures("roundtrip")
def test_empty_tensors(shape, dim):
    q = flexops.quantize(torch.empty(shape), 4, 64, dim)
    assert flexops.dequantize(q).shape == shape
    assert flexops.dequantize(flexops.quantize(torch.empty(shape), 8, -1, dim, True)).shape == shape


def test_results_do_not_require_gradients():
    x = torch.randn(4, 64, requires_grad=True)
    q = flexops.quantize(x)
    assert not q.packed.requires_grad
    assert not q.scales.requires_grad


QUANTIZE_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0, 2.0]}, TypeError, "x must be .* got list"),
    ({"x": torch.tensor(1.0)}, ValueError, "x must have at least one dimension"),
    ({"bits": 3}, ValueError, "bits must be 4 or 8, got 3"),
    ({"group_size": 0}, ValueError, "group_size must be at least 1"),
    ({"group_size": "64"}, ValueError, "group_size must be at least 1.*got '64'"),
    ({"group_size": -2}, ValueError, "group_size must be at least 1"),
    ({"dim": 2}, ValueError, r"dim must be in \[-2, 1\]"),
    ({"dim": -3}, ValueError, "dim must be in"),
]


@pytest.mark.parametrize(("change", "error", "message"), QUANTIZE_ERRORS)
def test_quantize_names_the_wrong_argument(change, error, message):
    with pytest.raises(error, match=f"flexops.quantize: {message}"):
        flexops.quantize(**({"x": torch.zeros(4, 64)} | change))


DEQUANTIZE_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"packed": torch.zeros(4, 32)}, TypeError, "packed must be a uint8 tensor, got"),
    ({"scales": torch.zeros(4, 1, 2, dtype=torch.float64)}, TypeError, "scales must be"),
    ({"scales": torch.zeros(4, 2, 2)}, ValueError, "scales must have shape"),
    ({"scales": torch.zeros(4, 2)}, ValueError, "scales must have shape"),
    (
        {"packed": torch.zeros(4, 31, dtype=torch.uint8)},
        ValueError,
        "packed must have 32 bytes along dim 1",
    ),
    ({"length": 65}, ValueError, "packed must have 64 bytes"),
    ({"length": -1}, ValueError, "length must not be negative"),
    ({"bits": 5}, ValueError, "bits must be 4 or 8"),
    ({"group_size": 0}, ValueError, "group_size must be at least 1"),
    ({"dim": 7}, ValueError, "dim must be in"),
]


@pytest.mark.parametrize(("change", "error", "message"), DEQUANTIZE_ERRORS)
def test_dequantize_names_the_wrong_argument(change, error, message):
    q = flexops.quantize(torch.zeros(4, 64))
    with pytest.raises(error, match=f"flexops.dequantize: {message}"):
        flexops.dequantize(q._replace(**change))


def test_dequantize_takes_nothing_else():
    q = flexops.quantize(torch.zeros(4, 64))
    with pytest.raises(TypeError, match="quantized must be a QuantizedTensor, got Tensor"):
        flexops.dequantize(q.packed)  # type: ignore[arg-type]
    for dtype in (torch.float64, "float32"):
        with pytest.raises(TypeError, match=f"dtype must be .*got {dtype!r}"):
            flexops.dequantize(q, dtype)


@pytest.mark.usefixtures("native")
def test_the_ops_themselves_check_too():
    """For those who call torch.ops directly: a wrong argument is an error, never a wrong
    address."""
    q = flexops.quantize(torch.zeros(4, 64))
    wrong = [
        (q.packed[:, :31], q.scales, 64, 4, 64, 1),
        (q.packed, q.scales[:3], 64, 4, 64, 1),
        (q.packed, q.scales.flatten(), 64, 4, 64, 1),
        (q.packed, q.scales, 65, 4, 64, 1),
        (q.packed, q.scales, 64, 4, 64, 2),
        (q.packed, q.scales, 64, 4, 0, 1),
        (q.packed, q.scales, 64, 6, 64, 1),
        (q.scales, q.scales, 64, 4, 64, 1),
    ]
    for arguments in wrong:
        with pytest.raises(RuntimeError, match="flexops::dequantize: "):
            torch.ops.flexops.dequantize(*arguments, torch.float32)
    others = (
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
    for dtype in others:
        with pytest.raises(
            RuntimeError,
            match=(
                rf"flexops::dequantize: dtype must be .*, got {str(dtype).removeprefix('torch.')}"
            ),
        ):
            torch.ops.flexops.dequantize(*q, dtype)
    with pytest.raises(
        RuntimeError, match=r"flexops::dequantize: dtype must be .*, got another dtype"
    ):
        torch.ops.flexops.dequantize(*q, torch.complex64)
    for arguments in (
        (torch.zeros(4, dtype=torch.int8), 4, 64, 0, False),
        (torch.zeros(4), 5, 64, 0, False),
        (torch.zeros(4), 4, 0, 0, False),
        (torch.zeros(4), 4, 64, 1, False),
    ):
        with pytest.raises(RuntimeError, match="flexops::quantize: "):
            torch.ops.flexops.quantize(*arguments)


# ---- the shared contract ----


def case(name: str, quantize: Callable[[torch.Tensor], QuantizedTensor]) -> Case:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, QuantizedTensor]:
        q = quantize(x)
        return flexops.dequantize(q, torch.bfloat16), q

    return Case(
        f"quantize, {name}",
        "quant",
        call,
        lambda make, shape: (make(*shape),),
        oracle=call,
        names=("x",),
        shapes=((6, 16), (5, 100), (65, 516)),
        same_bits=True,
        accuracy=False,
        autocast=False,
    )


class TestContract(Contract):
    cases = (
        case("4 bits along 1", lambda x: flexops.quantize(x, 4, 8)),
        case("8 bits along 0", lambda x: flexops.quantize(x, 8, 5, 0, True)),
        case("4 bits along 0", lambda x: flexops.quantize(x, 4, 64, 0)),
    )
