"""Cross entropy on a GPU: every way through the kernels against the reference; the memory that in
place and in chunks save."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_cases import assert_near, compare_all

import flexops
from flexops.bench.reference import OnReference
from flexops.ops import cross_entropy as cross_entropy_module
from flexops.ops import linear_cross_entropy as linear_cross_entropy_module

pytestmark = pytest.mark.gpu
FAMILIES = ("cross_entropy",)
CLASSES = (1, 2, 3, 10, 33, 100, 1000, 1024, 1025, 1031, 2048, 2055, 4096, 8192, 10007)
MANY = (
    16384,
    16391,
    32000,
    32768,
    50257,
    65536,
    65537,
    100000,
    128256,
    131072,
    200001,
    262144,
    300007,
    600000,
    1000003,
)


@pytest.mark.parametrize("classes", [CLASSES, MANY], ids=["few", "many"])
@pytest.mark.parametrize("block", range(4))
def test_cuda_gives_what_the_reference_gives(block, classes):
    for seed in range(block * 60, block * 60 + 60):
        compare_all(seed, "cuda", classes)


def test_the_native_sum_takes_the_memory_of_the_gradient_alone(monkeypatch):
    x = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(50000, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target = torch.randint(0, 50000, (4096,), device="cuda")

    def held() -> int:
        """Autograd's thread lets go of what it had a little later."""
        gc.collect()
        torch.cuda.synchronize()
        before = -1
        while before != torch.cuda.memory_allocated():
            before = torch.cuda.memory_allocated()
            time.sleep(0.05)
        return before

    def peak(accumulate: str | None) -> int:
        before = held()
        torch.cuda.reset_peak_memory_stats()
        loss = flexops.linear_cross_entropy(
            x, weight, target, chunk_size=256, accumulate=accumulate
        )
        most = torch.cuda.max_memory_allocated() - before
        (gradient,) = torch.autograd.grad(loss, weight)
        assert gradient.dtype == torch.bfloat16
        return most

    peak(None)  # cuBLAS' workspace
    native, wide = peak("native"), peak("float32")
    logits = 256 * 50000 * 2  # of one chunk
    assert native < weight.nbytes + 1.5 * logits + 2 * x.nbytes
    assert wide - native >= weight.nbytes  # four bytes an element and not two
    for free, expected in ((2**40, wide), (0, native)):  # what other processes leave of this GPU
        monkeypatch.setattr(linear_cross_entropy_module, "_found_free", {})
        monkeypatch.setattr(
            linear_cross_entropy_module, "_ask_free_bytes", lambda *_, free=free: free
        )
        assert peak(None) == expected


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_layers_options(softcap):
    x, weight = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for shape in ((500, 256), (3000, 256))
    )
    target = torch.randint(0, 3000, (500,), device="cuda")
    target[::7] = -100
    options = {
        "softcap": softcap,
        "class_weight": torch.rand(3000, device="cuda") + 0.5,
        "z_loss": 1e-3,
        "chunk_size": 128,
    }
    results = flexops.linear_cross_entropy(
        x, weight, target, **options, return_accuracy=True, return_z_loss=True
    )  # type: ignore[call-overload]
    with OnReference():
        expected = flexops.linear_cross_entropy(
            x, weight, target, **options, return_accuracy=True, return_z_loss=True
        )  # type: ignore[call-overload]
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(
        *(torch.autograd.grad(each[0], (x, weight)) for each in (results, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2.0**-6, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 133, 1025, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_than_run_at_once(rows, dtype):
    """Rows wait for each other in the ring; the same bits each time."""
    x = torch.randn(rows, 40007, device="cuda").to(dtype)
    target = torch.randint(0, 40007, (rows,), device="cuda")
    target[1::7] = -100
    one, other = x.clone(), x.clone()
    loss = torch.ops.flexops.cross_entropy_(one, target, None, -100, 0.1, 1e-4, 2)[0]
    assert torch.equal(
        loss, torch.ops.flexops.cross_entropy_(other, target, None, -100, 0.1, 1e-4, 2)[0]
    )
    assert torch.equal(one, other)
    expected = x.clone()
    assert_near(
        loss,
        cross_entropy_module._cross_entropy_inplace_reference(
            expected, target, None, -100, 0.1, 1e-4, 2
        )[0],
    )
    assert_near(one, expected)


def test_factors_of_one_are_not_multiplied_and_others_are():
    for rows, length in ((5, 40001), (2000, 77), (70000, 3)):
        values = torch.randn(rows, length, device="cuda").bfloat16()
        for factors in (
            torch.ones((), device="cuda"),
            torch.full((), -2.5, device="cuda"),
            torch.randint(0, 3, (rows,), device="cuda").float(),
        ):
            expected = (
                values.float() * (factors.unsqueeze(1) if factors.dim() else factors)
            ).bfloat16()
            scaled = values.clone()
            torch.ops.flexops.scale_rows_(scaled, factors)
            assert torch.equal(scaled, expected)


def peak(function: object) -> int:
    """Bytes beyond those that are allocated now."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()  # type: ignore[operator]
    return torch.cuda.max_memory_allocated() - before


def test_in_place_takes_no_memory():
    logits = torch.randn(512, 50257, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 50257, (512,), device="cuda")

    def step() -> None:
        loss = flexops.cross_entropy(logits, target, inplace=True)
        torch.autograd.grad(loss, logits)

    assert peak(step) < 2**20


def test_in_chunks_never_holds_all_logits():
    x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 64000, (4096,), device="cuda")
    logits = 4096 * 64000 * 2

    def ours() -> None:
        torch.autograd.grad(
            flexops.linear_cross_entropy(x, weight, target, chunk_size=256), (x, weight)
        )

    def torchs() -> None:
        torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), (x, weight))

    ours()
    torchs()
    assert peak(ours) < logits // 16 + 3 * weight.numel() * 4 + 2**24
    assert peak(torchs) > 2 * logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_are_as_exact_as_torch(dtype, reduction):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(777, 128, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = (
        (torch.randn(5003, 128, generator=generator, device="cuda") * 0.1)
        .to(dtype)
        .requires_grad_()
    )
    target = torch.randint(0, 5003, (777,), generator=generator, device="cuda")

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return [gradient.double() for gradient in torch.autograd.grad(loss.sum(), (x, weight))]

    exact = gradients(
        F.cross_entropy(F.linear(x.double(), weight.double()), target, reduction=reduction)
    )
    torchs = gradients(F.cross_entropy(F.linear(x, weight), target, reduction=reduction))
    for chunk_size in (None, 100):
        for one, other, value in zip(
            gradients(
                flexops.linear_cross_entropy(
                    x, weight, target, reduction=reduction, chunk_size=chunk_size
                )
            ),
            torchs,
            exact,
            strict=True,
        ):
            assert (one - value).norm() <= 1.1 * (other - value).norm()
