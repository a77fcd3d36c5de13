"""Experts of few tokens, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexops
from flexops.ops import few_experts as few
from flexops.ops import int4_grouped as grouped

TOKENS, K, EXPERTS, HIDDEN, INNER = 3, 2, 4, 24, 16


def given(columns: bool = False) -> list[Any]:
    torch.manual_seed(0)

    def weight(outputs: int, inputs: int) -> Tensor:
        made = torch.randn(EXPERTS, outputs, inputs).bfloat16() / inputs**0.5
        return made.transpose(1, 2).contiguous().transpose(1, 2) if columns else made

    choices = torch.randint(0, EXPERTS, (TOKENS, K))
    choices[1, 0] = EXPERTS  # left out
    x, weights = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, K)
    return [x, choices, weights, weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)]


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    return (up + 1) * gate * torch.sigmoid(1.7 * gate)


ACTIVATIONS: dict[str, Any] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped": clamped,
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_are_the_formulas(activation, interleaved):
    x, choices, weights, gate_up, down = given()
    biases = torch.randn(EXPERTS, 2 * INNER).bfloat16(), torch.randn(EXPERTS, HIDDEN).bfloat16()
    options: Any = {"activation": activation, "interleaved": interleaved}
    options |= {"alpha": 1.7, "limit": 1.5}
    found = few.few_experts(x, choices, weights, gate_up, down, biases, **options)
    swapped = few.few_experts(x, choices, weights, *given(columns=True)[3:], biases, **options)
    expected = torch.zeros(TOKENS, HIDDEN)
    for token, expert, weight in zip(
        torch.arange(TOKENS).repeat_interleave(K), choices.flatten(), weights.flatten(), strict=True
    ):
        if expert < EXPERTS:
            packed = gate_up[expert].float() @ x[token].float() + biases[0][expert].float()
            gate, up = (packed[::2], packed[1::2]) if interleaved else packed.chunk(2)
            h = ACTIVATIONS[activation](gate, up)
            expected[token] += weight * (down[expert].float() @ h + biases[1][expert].float())
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.03)
    assert torch.equal(found, swapped)


@pytest.mark.parametrize(
    ("at", "changed", "message"),
    [
        (0, torch.zeros(TOKENS).bfloat16(), "x must have 2 dimensions"),
        (1, torch.zeros(5, K, dtype=torch.int64), r"choices must have shape \[3, k\]"),
        (2, torch.zeros(TOKENS, 3), "weights must have choices's shape"),
        (2, torch.zeros(TOKENS, K).half(), "weights must be float32 or torch.bfloat16"),
        (3, torch.zeros(EXPERTS, INNER, HIDDEN).bfloat16(), "gate_up must have shape"),
        (4, torch.zeros(EXPERTS, INNER, HIDDEN).bfloat16(), "must have shape"),
        (4, torch.zeros(HIDDEN, INNER).bfloat16(), "down must have 3 dimensions"),
    ],
)
def test_errors_name_what_does_not_fit(at, changed, message):
    arguments = given()
    arguments[at] = changed
    with pytest.raises((TypeError, ValueError), match=message):
        few.few_experts(*arguments)
    with pytest.raises(ValueError, match=r"down_bias must have shape \[4, 24\]"):
        few.few_experts(*given(), (None, torch.zeros(EXPERTS, 8).bfloat16()))


def test_what_the_kernels_take(monkeypatch):
    monkeypatch.setattr(few, "_runs_on", lambda _: True)

    def fits(at: int | None = None, change: Any = None, columns: bool = False) -> bool:
        arguments = given(columns)
        if at is not None:
            arguments[at] = change(arguments[at])
        x, choices, _, *weights = arguments
        return few.fits(OnGpu(x), choices, *weights)  # type: ignore[arg-type]

    assert fits()
    assert fits(columns=True)
    assert not fits(0, Tensor.float)
    assert not fits(1, lambda one: one[:0])
    assert not fits(1, lambda one: one.repeat(2, 1))  # 12 choices of 4 experts
    assert not fits(3, lambda one: one[:, :, ::2])
    assert not fits(3, lambda one: one.transpose(1, 2).contiguous().transpose(1, 2))
    assert not fits(4, lambda one: one[:, :, :12])
    assert not few.fits(*[given()[i] for i in (0, 1, 3, 4)])  # on a CPU


# ---- weights of 4 bits ----


def given_int4(group_size: int = 64, mxfp4: bool = False) -> list[Any]:
    torch.manual_seed(0)
    weights = [torch.randn(EXPERTS * n, 64).bfloat16() / 8 for n in (2 * 64, 64)]
    packed = [flexops.quantize_int4(one, group_size, mxfp4) for one in weights]
    if mxfp4:
        packed = [one._replace(scales=one.scales.log2().round().exp2()) for one in packed]
    x, choices, factors, *_ = given()
    return [x.repeat(1, 3)[:, :64].contiguous(), choices, factors, *packed]


def dequantized(mxfp4: bool, *packed: Any) -> list[Tensor]:
    unpack = few.unpack_mxfp4 if mxfp4 else flexops.unpack_int4
    return [unpack(one, torch.bfloat16).view(EXPERTS, -1, one.k) for one in packed]


@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_results_of_4_bits_are_those_of_their_values(interleaved, mxfp4):
    """MXFP4's values are exact in bfloat16; the others' results differ by one rounding."""
    x, choices, weights, *packed = given_int4(32 if mxfp4 else 64, mxfp4)
    biases = torch.randn(EXPERTS, 128).bfloat16(), torch.randn(EXPERTS, 64).bfloat16()
    options: Any = {"interleaved": interleaved}
    found = few.few_experts_int4(x, choices, weights, *packed, biases, mxfp4=mxfp4, **options)
    expected = few.few_experts(x, choices, weights, *dequantized(mxfp4, *packed), biases, **options)
    close: Any = {"rtol": 0, "atol": 0} if mxfp4 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, expected, **close)


def test_numbers_of_mxfp4_are_those_of_transformers():
    integrations = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.arange(256, dtype=torch.uint8).repeat(2)[torch.randperm(512)].view(1, 16, 2, 16)
    exponents = torch.randint(0, 250, (1, 16, 2), dtype=torch.uint8)
    expected = integrations._convert_moe_packed_tensors(blocks, exponents)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).view(16, 64)
    scales = torch.ldexp(torch.ones(16, 2), exponents[0].int() - 127).bfloat16()
    found = few.unpack_mxfp4(flexops.pack_int4(codes, scales, group_size=32), torch.bfloat16)
    assert torch.equal(found, expected[0].t())


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (0, lambda x: x[:, :40], "x must be"),
        (1, lambda one: one[:1], r"choices must have shape \[3, k\]"),
        (2, lambda one: one.half(), "weights must be float32 or torch.bfloat16"),
        (3, lambda one: one._replace(packed=one.packed[:-1]), "the rows of all experts"),
        (3, lambda one: one._replace(scales=one.scales[:-1]), r"\(gate_up\): weight.scales must"),
        (4, lambda one: one._replace(packed=one.packed[:, :0]), r"\(down\): weight.packed must"),
    ],
)
def test_errors_of_4_bits_name_what_does_not_fit(at, change, message):
    arguments = given_int4()
    arguments[at] = change(arguments[at])
    with pytest.raises((TypeError, ValueError), match=message):
        few.few_experts_int4(*arguments)


def test_mxfp4_has_groups_of_32_and_no_zero_points():
    with pytest.raises(ValueError, match="MXFP4 has groups of 32 columns and no zero points"):
        few.few_experts_int4(*given_int4(), mxfp4=True)


@pytest.mark.parametrize(
    ("capability", "size", "most"), [((9, 0), 64, 4), ((9, 0), 32, 2), ((8, 9), 64, 8)]
)
def test_what_the_kernels_of_4_bits_take(capability, size, most, monkeypatch):
    """So many choices of four experts; grouped products take more of them."""
    monkeypatch.setattr(few, "_runs_on", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    x, choices, _, *packed = given_int4(size)
    on_gpu: Any = OnGpu(x)
    some = choices[:1, :1].repeat(most, 1)
    assert few.fits_int4(on_gpu, some, *packed)
    assert not few.fits_int4(on_gpu, some[:0], *packed)
    assert not few.fits_int4(on_gpu, torch.cat([some, some[:1]]), *packed)
    assert not few.fits_int4(on_gpu, some[:1].repeat(1, 65), *packed)
    assert not few.fits_int4(x, some, *packed)  # on a CPU
    wide = packed[0]._replace(scales=packed[0].scales.float())
    assert not few.fits_int4(on_gpu, some, wide, wide)


@pytest.mark.parametrize(
    ("capability", "rows", "reads"),
    [((9, 0), 9999, True), ((8, 0), 512, True), ((8, 0), 513, False), ((7, 5), 4, False)],
)
def test_what_grouped_products_read_packed(capability, rows, reads, monkeypatch):
    monkeypatch.setattr(grouped, "has_native", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    x, _, _, weight, _ = given_int4()
    on_gpu: Any = OnGpu(x[:1].expand(rows, -1))
    assert grouped.reads_packed(on_gpu, weight, EXPERTS) == reads
    assert not grouped.reads_packed(x, weight, EXPERTS)  # on a CPU
    assert not grouped.reads_packed(OnGpu(x.float()), weight, EXPERTS)  # type: ignore[arg-type]


class OnGpu:
    """A tensor that says that it is on one."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getattr__(self, name: str) -> Any:
        return True if name == "is_cuda" else getattr(self.x, name)
