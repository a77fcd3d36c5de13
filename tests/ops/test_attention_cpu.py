"""Attention's CPU kernels: every option at random against the formula in float64, at each
instruction set, as exact as torch's flash kernel."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import assert_close, distance_of, errors, exact
from contract import ISA_LEVELS, at_each_isa, isa_limit
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import first_of
from processes import completed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexops

LEVELS = first_of(*reversed(ISA_LEVELS))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module", autouse=True)
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("attention", "cpu")


def draw(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# ---- every option at random ----

LENGTHS = st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 63, 64, 65, 130]))
COLUMNS = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 40, 64, 65, 96, 128]))
LIMIT = st.one_of(st.none(), st.integers(0, 3), st.integers(4, 200))


@st.composite
def problems(choose: st.DrawFn) -> dict[str, Any]:
    """Arguments of flexops.attention."""
    dtype, seed = choose(st.sampled_from(DTYPES)), choose(st.integers(0, 2**16))
    batch, key_heads, group = (
        choose(st.integers(1, 2)),
        choose(st.integers(1, 2)),
        choose(st.integers(1, 3)),
    )
    queries, keys, columns, columns_v = (
        choose(LENGTHS),
        choose(LENGTHS),
        choose(COLUMNS),
        choose(COLUMNS),
    )
    heads = key_heads * group
    q, k, v = draw(
        (batch, queries, heads, columns),
        (batch, keys, key_heads, columns),
        (batch, keys, key_heads, columns_v),
        dtype=dtype,
        seed=seed,
    )
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "causal": choose(st.booleans()),
        "window": choose(st.none() | st.tuples(LIMIT, LIMIT)),
    }
    arguments["scale"] = choose(st.sampled_from([None, None, 0.25, -0.25, 0.0]))
    arguments["softcap"] = choose(st.sampled_from([0.0, 0.0, 1.5, 30.0]))
    kind = choose(st.sampled_from([None, None, torch.bool, *DTYPES]))
    if kind is not None:
        shape = [choose(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
        (bias,) = draw(tuple(shape), seed=seed + 1)
        arguments["bias"] = bias > -0.5 if kind == torch.bool else bias.to(kind)
    if choose(st.booleans()):
        arguments["alibi_slopes"] = torch.rand(
            (batch, heads) if choose(st.booleans()) else (heads,),
            generator=torch.Generator().manual_seed(seed),
        )
    if choose(st.booleans()):
        arguments["sinks"] = draw((heads,), seed=seed + 2)[0]
    return arguments


def assert_right(arguments: dict[str, Any]) -> None:
    """Within what rounding explains; gradients that are zero but for rounding are measured by the
    size of what cancels."""
    q, k, v = (arguments[name] for name in "qkv")
    options = {name: x for name, x in arguments.items() if name not in "qkv"}
    found = errors(q, k, v, with_lse=True, **options)
    bound = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[q.dtype]
    for name, limit in (("lse", 1e-5), ("out", bound), *((name, 8 * bound) for name in "qkv")):
        assert found[name] < limit, (name, found, describe(arguments))


def describe(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x
        for name, x in arguments.items()
    }


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, derandomize=True)
@given(problem=problems())
def test_any_problem(level, problem):
    with isa_limit(level):
        assert_right(problem)


# ---- as exact as torch's kernel ----


def each_error(
    call: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor, expected: list[Tensor]
) -> list[tuple[float, float]]:
    """The largest and the mean one of the output and each gradient."""
    differences = [
        (a.double() - b).abs()
        for a, b in zip(with_gradients(call, tensors, grad), expected, strict=True)
    ]
    return [(float(difference.max()), float(difference.mean())) for difference in differences]


def with_gradients(
    call: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        ).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_errors_are_no_larger_than_those_of_torchs_flash_kernel(dtype, size):
    shape = (2, 500, 4, 64)
    tensors = [
        x * y for x, y in zip(draw(shape, shape, shape, dtype=dtype), (size, size, 1), strict=True)
    ]
    (grad,) = draw(shape, dtype=dtype, seed=1)
    expected = with_gradients(
        lambda *args: exact(*args, causal=True)[0], [x.double() for x in tensors], grad
    )
    theirs = each_error(flash, tensors, grad, expected)
    for isa in at_each_isa("cpu"):
        with isa:
            ours = each_error(
                lambda *args: flexops.attention(*args, causal=True), tensors, grad, expected
            )  # type: ignore[arg-type, return-value]
        for (largest, mean), (their_largest, their_mean) in zip(ours, theirs, strict=True):
            assert largest <= 1.5 * their_largest, (ours, theirs)
            assert mean <= 1.25 * their_mean, (ours, theirs)


# ---- what they must not do ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_whatever_the_threads(dtype):
    """One key head, so that its queries are shared out to several items."""
    q, k, v, grad = draw(
        (1, 700, 2, 24), (1, 300, 1, 24), (1, 300, 1, 24), (1, 700, 2, 24), dtype=dtype
    )
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(
                with_gradients(
                    lambda *args: flexops.attention(*args, window=(250, 30)), [q, k, v], grad
                )
            )  # type: ignore[arg-type, return-value]
    finally:
        torch.set_num_threads(threads)
    assert all(
        torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True)
    )
    assert_close(errors(q, k, v, window=(250, 30)), dtype)


def test_scores_are_never_held():
    """2^28 of them, a GiB; peak memory is measured in a process of its own."""
    program = """
import resource, torch, flexops
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
q = torch.randn(1, 2**14, 1, 8, requires_grad=True)
flexops.attention(q[:, :9], q[:, :9], q[:, :9]).sum().backward()
before = peak()
flexops.attention(q, q, q).sum().backward()
assert any(one.op == "attention" and one.path for one in flexops.status()), flexops.status()
print(peak() - before)
"""
    run = completed([sys.executable, "-c", program])
    assert int(run.stdout) < 100 * 1024  # KiB


def test_what_is_packed_together_is_not_copied():
    """Slices of a projection, and tensors with heads before lengths, give what copies of them
    give."""
    (together,) = draw((2, 70, 3, 4, 40))
    slices = together.unbind(2)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in slices]
    columns_apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in slices]
    (grad,) = draw((2, 70, 4, 40), seed=1)

    def call(*args: Tensor) -> Any:
        return flexops.attention(*args, causal=True)

    expected = with_gradients(call, [x.contiguous() for x in slices], grad)
    for tensors in (list(slices), heads_first, columns_apart):
        for given_grad in (
            grad,
            grad.transpose(1, 2).contiguous().transpose(1, 2),
            torch.ones(()).expand(grad.shape),
        ):
            actual = with_gradients(call, tensors, given_grad)
            assert torch.equal(actual[0], expected[0])
            if given_grad.shape == grad.shape and torch.equal(given_grad, grad):
                assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("window", [None, (100, 0), (0, 5), (None, -1), (500, 500)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding(window, dtype):
    """One query, whose grouped heads are computed together, unless each has its own bias, slope or
    sink: layouts of a cache with heads first, and a slice of a longer one."""
    q, k, v = draw((2, 12, 1, 40), (2, 3, 333, 40), (2, 3, 333, 24), dtype=dtype)
    own: list[dict[str, Tensor]] = [{}]
    if window != (0, 5):  # softmax of one number has no gradient
        bias, slopes, sinks = draw((1, 12, 1, 333), (12,), (12,), seed=1)
        own += [{"bias": bias}, {"alibi_slopes": slopes.abs() / 99}, {"sinks": sinks}]
    for isa in at_each_isa("cpu"):
        with isa:
            for first, more in itertools.product((0, 70), own):
                cut = {"bias": more["bias"][..., first:]} if "bias" in more else more
                found = errors(
                    q.transpose(1, 2),
                    k.transpose(1, 2)[:, first:],
                    v.transpose(1, 2)[:, first:],
                    window=window,
                    softcap=4.0,
                    with_lse=True,
                    **cut,
                )
                if window == (0, 5):
                    del found["q"], found["k"]
                assert_close(found, dtype)


# ---- packed sequences ----


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=10, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    biased=st.booleans(),
)
@example(lengths=[(0, 0), (0, 5), (5, 0)], dtype=torch.float32, causal=True, biased=True)
@example(lengths=[(1, 40), (0, 9)], dtype=torch.float32, causal=True, biased=False)
def test_packed_sequences(level, lengths, dtype, causal, biased):
    """Each is what it is alone; bias and slopes are its own."""
    ends_q, ends_k = ([0, *itertools.accumulate(column)] for column in zip(*lengths, strict=True))
    batch, longest = len(lengths), [max(column) for column in zip(*lengths, strict=True)]
    q, k, v, grad = draw(
        (ends_q[-1], 4, 16),
        (ends_k[-1], 2, 16),
        (ends_k[-1], 2, 24),
        (ends_q[-1], 4, 24),
        dtype=dtype,
    )
    bias, slopes = (
        draw((batch, 1, *longest), seed=1)[0],
        torch.rand(batch, 4, generator=torch.Generator().manual_seed(2)),
    )
    options: dict[str, Any] = {"causal": causal, "softcap": 5.0}
    ends = {
        "cu_seqlens_q": torch.tensor(ends_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(ends_k, dtype=torch.int32),
    }
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with isa_limit(level):
        modifiers = {"bias": bias, "alibi_slopes": slopes} if biased else {}
        out, lse = flexops.attention(*leaves, return_lse=True, **modifiers, **options, **ends)
        gradients = torch.autograd.grad(out, leaves, grad)
    bound = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[dtype]
    for i, (queries, keys) in enumerate(lengths):
        rows, columns = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        own = [
            x.detach()[None, part].double().requires_grad_()
            for x, part in ((q, rows), (k, columns), (v, columns))
        ]
        modifiers = (
            {"bias": bias[i : i + 1, :, :queries, :keys], "alibi_slopes": slopes[i : i + 1]}
            if biased
            else {}
        )
        expected, expected_lse = exact(*own, **modifiers, **options)
        assert distance_of(out[rows], expected[0]) < bound
        assert distance_of(lse[:, rows], expected_lse[0]) < 1e-5
        for one, other, part in zip(
            gradients,
            torch.autograd.grad(expected, own, grad[None, rows].double()),
            (rows, columns, columns),
            strict=True,
        ):
            assert distance_of(one[part], other[0]) < 8 * bound


def test_rows_of_no_sequence_are_zeros_and_wrong_lengths_stay_inside():
    q = torch.ones(10, 1, 8, requires_grad=True)

    def call(ends: list[int], longest: int) -> tuple[Tensor, Tensor]:
        cumulative = torch.tensor(ends, dtype=torch.int32)
        out, lse = flexops.attention(
            q,
            q,
            q,
            cu_seqlens_q=cumulative,
            cu_seqlens_k=cumulative,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            return_lse=True,
        )
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert gradient.isfinite().all()
        return out[:, 0, 0], lse[0]

    out, lse = call([2, 5, 7], 3)
    assert out.tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert (lse == -torch.inf).tolist() == [True] * 2 + [False] * 5 + [True] * 3
    call([0, 10], 4)
    call([-5, 3, 40, 7], 10)


def test_a_sequence_is_no_longer_than_the_longest():
    """The bias has rows and columns for the longest; more are neither written nor seen."""
    q, k, v = draw((10, 2, 16), (10, 2, 16), (10, 2, 16), dtype=torch.float32)
    bias = draw((1, 2, 4, 5), seed=1)[0]
    ends = torch.tensor([0, 10], dtype=torch.int32)
    out, lse = flexops.attention(
        q,
        k,
        v,
        bias=bias,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=4,
        max_seqlen_k=5,
        return_lse=True,
    )
    alone = exact(*(x[None, :n].double() for x, n in ((q, 4), (k, 5), (v, 5))), bias=bias)
    assert distance_of(out[:4], alone[0][0]) < 3e-6
    assert distance_of(lse[:, :4], alone[1][0]) < 1e-5
    assert (out[4:] == 0).all()
    assert (lse[:, 4:] == -torch.inf).all()


# ---- special values ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_with_its_row(dtype):
    q, k, v = draw((1, 70, 1, 16), (1, 70, 1, 16), (1, 70, 1, 16), dtype=dtype)
    q[0, 5, 0, 3] = torch.nan
    for isa in at_each_isa("cpu"):
        with isa:
            out, lse = flexops.attention(q, k, v, return_lse=True)
        assert out.isnan().flatten(1).nonzero()[:, 1].unique().numel() == 16
        assert out[0, 5].isnan().all()
        assert lse.isnan().nonzero().tolist() == [[0, 0, 5]]


def test_large_scores():
    """Powers that overflow but for the maximum that is taken off first."""
    q, k, v = draw((1, 70, 1, 16), (1, 130, 1, 16), (1, 130, 1, 16))
    for isa in at_each_isa("cpu"):
        with isa:
            out = flexops.attention(q * 300, k * 30, v)
        assert isinstance(out, Tensor)
        assert distance_of(out, exact(q.double() * 300, k.double() * 30, v.double())[0]) < 1e-4


def test_sinks_that_are_far_from_all_scores():
    """Above and below them, also where a row sees nothing but its sink: no power overflows."""
    q, k, v = draw((1, 40, 4, 16), (1, 30, 1, 16), (1, 30, 1, 16))
    sinks = torch.tensor([200.0, -200.0, 0.5, -torch.inf])
    for isa in at_each_isa("cpu"):
        with isa:
            found = flexops.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        wide = [x.double() for x in (q, k, v, sinks)]
        wanted = exact(*wide[:3], causal=True, sinks=wide[3])
        assert distance_of(found[0], wanted[0]) < 1e-5
        torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


def test_more_keys_than_a_window_shows():
    """200,000 keys of which a query sees 65."""
    q, k, v = draw((1, 3, 2, 8), (1, 200_000, 1, 8), (1, 200_000, 1, 8))
    found = errors(q, k, v, window=(64, 0))
    assert_close(found, torch.float32)
