# ruff: noqa: ARG005 - a score_mod has five parameters, and uses what it needs
"""flexops.attention and flexops.scaled_dot_product_attention: the contract, every option against
the formula, packed sequences, torch's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import SCORE_MODS, WINDOWS, assert_close, distance_of, errors, exact, squared
from contract import Args, Case, Contract, Make, Refusal, Shape, assert_near, at_each_isa, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import flexops
from flexops import settings
from flexops.bench.reference import OnReference
from flexops.build.load import loader
from flexops.errors import NativeUnavailableError
from flexops.ops import attention as attention_module

HALVES = (torch.bfloat16, torch.float16)


def grouped(make: Make, shape: Shape) -> Args:
    """``shape``: batch, queries, keys, key heads, columns; twice as many query heads."""
    batch, queries, keys, heads, columns = shape
    return (
        make(batch, queries, 2 * heads, columns),
        make(batch, keys, heads, columns),
        make(batch, keys, heads, columns),
    )


def with_everything(make: Make, shape: Shape) -> Args:
    q, k, v = grouped(make, shape)
    batch, queries, heads, _ = q.shape
    small = {"dtype": torch.float32}
    return (
        q,
        k,
        v,
        make(batch, 1, queries, k.shape[1]) / 4,
        make.uniform(heads, **small),
        make(heads, **small),
    )


def packed(make: Make, shape: Shape) -> Args:
    """``shape``: queries and keys of each of two sequences, key heads, columns. The last two
    arguments are the longest."""
    queries, keys, heads, columns = shape
    ends = [
        torch.tensor([0, n, 2 * n], dtype=torch.int32, device=make.device) for n in (queries, keys)
    ]
    return (
        make(2 * queries, 2 * heads, columns),
        make(2 * keys, heads, columns),
        make(2 * keys, heads, columns),
        *ends,
        queries,
        keys,
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flexops.attention(q, k, v, causal=True, return_lse=True, deterministic=True)


def attend_with_everything(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, alibi_slopes: Tensor, sinks: Tensor
) -> Any:
    return flexops.attention(
        q,
        k,
        v,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        softcap=3.0,
        window=(5, 2),
        deterministic=True,
    )


def plain_with_everything(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, alibi_slopes: Tensor, sinks: Tensor
) -> Tensor:
    return exact(
        q, k, v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, softcap=3.0, window=(5, 2)
    )[0]


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *longest: int
) -> Any:
    return flexops.attention(
        q,
        k,
        v,
        causal=True,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        deterministic=True,
    )


def plain_packed(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return exact(*(x.unflatten(0, (2, -1)) for x in (q, k, v)), causal=True)[0].flatten(0, 1)


def wrong_calls() -> tuple[Refusal, ...]:
    q, k = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
    ends = torch.tensor([0, 3], dtype=torch.int32)

    def refused(
        message: str,
        error: type[Exception] = ValueError,
        *,
        of: tuple[Tensor, ...] = (q, k, k),
        **options: Any,
    ) -> Refusal:
        return Refusal(
            lambda: flexops.attention(*of, **options), error, rf"flexops\.attention: {message}"
        )

    return (
        refused(
            r"q must have shape \[batch, length, heads, head_dim\], got \[3, 4, 8\]",
            of=(q[0], k, k),
        ),
        refused(
            r"k must have shape \[2, any, key heads, 8\], as q, got \[2, 5, 2, 4\]",
            of=(q, k[..., :4], k),
        ),
        refused(
            r"k must have a number of heads that divides q's 4, got",
            of=(q, k[:, :, [0, 0, 0]], k[:, :, [0, 0, 0]]),
        ),
        refused(
            r"v must have k's shape \[2, 5, 2, 8\], head_dim excepted, got \[2, 3, 4, 8\]",
            of=(q, k, q),
        ),
        refused(
            r"bias must be broadcastable to .* \[2, 4, 3, 5\], got \[2, 5\]", bias=torch.zeros(2, 5)
        ),
        refused(
            "bias must be a bool, .* got torch.int32",
            TypeError,
            bias=torch.zeros(5, dtype=torch.int32),
        ),
        refused(r"sinks must have shape \[4\], got \[2\]", sinks=torch.zeros(2)),
        refused(
            r"alibi_slopes must have shape \[4\] or \[2, 4\], got \[3\]",
            alibi_slopes=torch.zeros(3),
        ),
        refused(
            "alibi_slopes must not require a gradient",
            alibi_slopes=torch.zeros(4, requires_grad=True),
        ),
        refused("cu_seqlens_q and cu_seqlens_k must both be given", cu_seqlens_q=ends),
        refused(
            r"q must have shape \[tokens, heads, head_dim\], packed, got",
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=3,
            max_seqlen_k=3,
        ),
        refused(
            "cu_seqlens_k must be int32, got int64",
            TypeError,
            of=(q[0], k[0], k[0]),
            cu_seqlens_q=ends,
            cu_seqlens_k=ends.long(),
            max_seqlen_q=3,
            max_seqlen_k=3,
        ),
        refused(
            "max_seqlen_q and max_seqlen_k must come with cu_seqlens_q and cu_seqlens_k",
            max_seqlen_q=3,
        ),
        refused("window must be two numbers of keys", window=(-2, 0)),
    )


CASES = (
    Case(
        "attention",
        "attention",
        attend,
        grouped,
        lambda q, k, v: exact(q, k, v, causal=True),
        names=("q", "k", "v"),
        differentiable=(0, 1, 2),
        rounding=2.0**-20,
        shapes=((2, 3, 4, 2, 8), (2, 33, 50, 2, 64), (1, 130, 200, 2, 64)),
        empty=((0, 3, 4, 1, 8), (2, 3, 0, 1, 8), (2, 0, 3, 1, 8)),
        refusals=wrong_calls(),
        accuracy=False,
    ),
    Case(
        "attention with everything",
        "attention",
        attend_with_everything,
        with_everything,
        plain_with_everything,
        names=("q", "k", "v", "bias", "alibi_slopes", "sinks"),
        differentiable=(0, 1, 2, 3),
        autocast=False,
        rounding=2.0**-20,
        shapes=((2, 3, 4, 2, 8), (2, 33, 50, 2, 32), (1, 130, 200, 2, 64)),
        empty=((0, 3, 4, 1, 8),),
        accuracy=False,
        inductor=False,
        # an infinite bias makes all of its row's gradients NaN, those of keys beyond the window,
        # too
        not_finite=False,
    ),
    Case(
        "packed attention",
        "attention",
        attend_packed,
        packed,
        plain_packed,
        names=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
        differentiable=(0, 1, 2),
        rounding=2.0**-20,
        shapes=((3, 4, 1, 8), (33, 50, 2, 64), (130, 200, 2, 64)),
        empty=((0, 4, 1, 8),),
        accuracy=False,
        inductor=False,
        dynamic=((3, 4, 1, 8),),
        broadcasts=False,
    ),
)


class TestContract(Contract):
    """On a GPU with what its kernels take; other dtypes are plain PyTorch there."""

    cases = (
        *(replace(case, devices=("cpu",)) for case in CASES),
        *(
            replace(
                case, name=f"{case.name}, halves", dtypes=HALVES, devices=("cuda",), refusals=()
            )
            for case in CASES
        ),
    )


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_gradients_where_most_queries_see_no_key(case, native_kernels):
    """In bfloat16, as near to the reference as the contract asks for: where the gradients of two
    rows out of 33 are not 0, these are a small difference of rounded terms."""
    native_kernels("attention", "cpu")
    for seed in range(20):
        args = case.inputs(Make(torch.bfloat16, "cpu", seed=seed), (3, 33, 2, 4, 7))
        with OnReference():
            expected = run(case.call, args, case.differentiable)
        for isa in at_each_isa("cpu"):
            with isa:
                actual = run(case.call, args, case.differentiable)
            assert_near(actual, expected, case.rounding, what=f"seed {seed}")


@pytest.fixture(params=["op", "reference"])
def both(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that takes this runs twice: on whatever kernels there are, and on the
    reference."""
    with OnReference() if request.param == "reference" else contextlib.nullcontext():
        yield


def draw(
    queries: int,
    keys: int,
    heads: int,
    key_heads: int,
    columns: int,
    columns_v: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = (
        (2, queries, heads, columns),
        (2, keys, key_heads, columns),
        (2, keys, key_heads, columns_v or columns),
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# ---- every option ----


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    "columns",
    [(8, 8), (64, 64), (40, 24), (128, 128), (192, 128), (136, 256), (20, 12), (0, 8)],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("both")
def test_any_head_dim(columns, causal, dtype):
    assert_close(errors(*draw(40, 70, 6, 2, *columns, dtype=dtype), causal=causal), dtype)


@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 300), (300, 1), (77, 33), (5, 0), (0, 5), (129, 128)]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("both")
def test_any_lengths(queries, keys, causal):
    found = errors(*draw(queries, keys, 4, 2, 16), causal=causal)
    if keys == 1:  # softmax of one number has no gradient: what is left is rounding
        del found["q"], found["k"]
    assert_close(found, torch.float32)


@pytest.mark.parametrize("window", [*WINDOWS, (10, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("both")
def test_windows(window, causal):
    found = errors(*draw(150, 200, 2, 2, 16), window=window, causal=causal)
    if causal and window == (0, None):  # one key, as below
        del found["q"], found["k"]
    assert_close(found, torch.float32)


@pytest.mark.parametrize(
    "shape", [(2, 4, 30, 40), (1, 4, 30, 1), (2, 1, 1, 40), (30, 40), (40,), (4, 1, 1)]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.usefixtures("both")
def test_bias_of_every_shape(shape, kind):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = errors(
        *draw(30, 40, 4, 2, 16), bias=bias > -0.7 if kind == torch.bool else bias.to(kind)
    )
    of_bias = found.pop("bias", 0.0)
    # rounded to bias's own dtype; what is the same for all keys changes nothing
    assert of_bias < 0.01 or shape[-1] == 1
    assert_close(found, torch.float32)


@pytest.mark.usefixtures("both")
def test_all_at_once():
    generator = torch.Generator().manual_seed(2)
    slopes, bias, sinks = (
        torch.rand(2, 4, generator=generator),
        torch.randn(2, 1, 30, 40, generator=generator),
        torch.randn(4, generator=generator),
    )
    q, k, v = draw(30, 40, 4, 2, 16)
    found = errors(
        q * 3,
        k * 3,
        v,
        causal=True,
        softcap=5.0,
        window=(15, None),
        alibi_slopes=slopes,
        bias=bias,
        sinks=sinks,
        scale=0.4,
        with_lse=True,
    )
    assert_close(found, torch.float32)


@pytest.mark.parametrize(
    "fault",
    [lambda grad: 0.9 * grad, torch.zeros_like, lambda grad: grad.roll(1)],
    ids=["a tenth short", "zeros", "another head's"],
)
def test_a_wrong_gradient_of_sinks_is_seen(fault, monkeypatch):
    """It is a sum that cancels, compared with its terms: within bfloat16's tolerance, too."""
    right, sinks = (
        attention_module._gradient_of_sinks,
        torch.randn(4, generator=torch.Generator().manual_seed(4)),
    )
    inputs = draw(30, 40, 4, 2, 64, dtype=torch.bfloat16)
    assert_close(errors(*inputs, sinks=sinks, with_lse=True), torch.bfloat16)
    monkeypatch.setattr(attention_module, "_gradient_of_sinks", lambda *args: fault(right(*args)))
    with pytest.raises(AssertionError, match="sinks"):
        assert_close(errors(*inputs, sinks=sinks, with_lse=True), torch.bfloat16)


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
@pytest.mark.parametrize("score_mod", SCORE_MODS)
def test_score_modifiers(score_mod):
    found = errors(*draw(30, 40, 4, 2, 16), score_mod=score_mod, window=(25, None))
    assert max(found.values()) < 1e-5, found


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
def test_a_score_modifier_is_compiled_with_the_graph():
    q, k, v = draw(30, 40, 4, 2, 16)
    score_mod = flexops.ScoreMod(squared)
    compiled = torch.compile(
        lambda *tensors: flexops.attention(*tensors, score_mod=score_mod),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(q, k, v), flexops.attention(q, k, v, score_mod=squared))
    assert score_mod.number == flexops.ScoreMod(lambda score, b, h, q, k: score * score).number


TEXTS = {
    "score * score": squared,
    "score - 0.1 * (h + 1) * abs(q - k) if q >= k and not k // 16 % 3 == 1 else -inf": SCORE_MODS[
        1
    ],
    "where(0 <= q - k < 20 or k == 0, 5 * tanh(s / 5), -inf)": lambda score, b, h, q, k: (
        torch.where(((q - k >= 0) & (q - k < 20)) | (k == 0), 5 * torch.tanh(score / 5), -torch.inf)
    ),
    "max(min(score, 1.0), -1.0) + exp(-square(score)) ** 2": lambda score, b, h, q, k: (
        torch.clamp(score, -1.0, 1.0) + torch.exp(-score * score) ** 2
    ),
}


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
@pytest.mark.parametrize("text", TEXTS)
def test_a_score_modifier_may_be_a_text(text):
    tensors = [x.requires_grad_() for x in draw(30, 40, 4, 2, 16)]
    found = [
        flexops.attention(*tensors, score_mod=score_mod, return_lse=True)
        for score_mod in (text, TEXTS[text])
    ]
    gradients = [
        torch.autograd.grad(out.sum() + lse.masked_fill(lse == -torch.inf, 0).sum(), tensors)
        for out, lse in found
    ]
    for actual, expected in zip(
        (*found[0], *gradients[0]), (*found[1], *gradients[1]), strict=True
    ):
        torch.testing.assert_close(actual, expected)


SLOPES, DOCUMENT, RELATIVE = (
    torch.linspace(0.1, 0.9, 4),
    torch.arange(40) // 13,
    torch.randn(4, 79, generator=torch.Generator().manual_seed(5)),
)
CAP, KEEP = torch.tensor(2.0), torch.rand(2, 40, generator=torch.Generator().manual_seed(6)) > 0.3


def alibi(score: Tensor, _b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - SLOPES[h] * abs(q - k)


def documents(score: Tensor, _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where((DOCUMENT[q] == DOCUMENT[k]) & (q >= k), score, -float("inf"))


def relative_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(KEEP[b, k], score + RELATIVE[h, q - k + 39], -1e4)


def capped(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
    return CAP * torch.tanh(score / CAP)


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
@pytest.mark.parametrize("score_mod", [alibi, documents, relative_bias, capped])
def test_flex_attentions_own_functions(score_mod):
    """With the tensors that they find outside of themselves, forward and backward."""
    tensors = [x.requires_grad_() for x in draw(40, 40, 4, 2, 16)]
    grad = torch.randn(2, 40, 4, 16, generator=torch.Generator().manual_seed(1))
    out = flexops.attention(*tensors, score_mod=score_mod)
    gradients = torch.autograd.grad(out, tensors, grad)
    # torch before 2.5 has none; what follows holds there, too
    with contextlib.suppress(ImportError):
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (
            x.detach().transpose(1, 2).repeat_interleave(4 // x.shape[2], 1) for x in tensors
        )
        torch.testing.assert_close(
            out, flex_attention(q, k, v, score_mod=score_mod).transpose(1, 2), atol=2e-5, rtol=1e-4
        )
    wide = [x.detach().double().requires_grad_() for x in tensors]
    for actual, alone in zip(
        gradients,
        torch.autograd.grad(exact(*wide, score_mod=score_mod)[0], wide, grad.double()),
        strict=True,
    ):
        assert distance_of(actual, alone) < 1e-5


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
def test_tables_of_a_score_modifier_may_change():
    q, k, v = draw(5, 6, 4, 2, 8)
    slopes = torch.rand(4)
    named, text = (
        flexops.ScoreMod(lambda score, b, h, q, k, slopes: score * slopes[h], slopes=slopes),
        flexops.ScoreMod("score * slopes[h]", slopes=slopes),
    )
    assert named.number == text.number
    for _ in range(2):
        expected, _lse = exact(q, k, v, score_mod=lambda score, b, h, q, k: score * slopes[h])
        for score_mod in (named, text, lambda score, b, h, q, k: score * slopes[h]):
            torch.testing.assert_close(flexops.attention(q, k, v, score_mod=score_mod), expected)
        slopes.mul_(3)
    compiled = torch.compile(
        lambda *tensors: flexops.attention(*tensors, score_mod=text),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(q, k, v), flexops.attention(q, k, v, score_mod=text))
    # what is beyond the ends is the first and the last
    far = flexops.ScoreMod("score + slopes[q - k] + slopes[q + 100]", slopes=slopes)
    expected, _lse = exact(
        q, k, v, score_mod=lambda score, b, h, q, k: score + slopes[(q - k).clamp(0, 3)] + slopes[3]
    )
    torch.testing.assert_close(flexops.attention(q, k, v, score_mod=far), expected)


def test_what_a_score_modifier_may_not_do():
    q, k, v = draw(3, 4, 2, 2, 8)
    wrong = {
        "must not branch": lambda score, b, h, q, k: score if q > k else b + h,
        r"must use, of torch, .* got torch\.erf": lambda score, b, h, q, k: (
            torch.erf(score) + b + h + q + k
        ),
        "must give a score": lambda *_: 1.0,
        r"must give a score .* got rows of shape \[3\]": lambda score, b, h, q, k: (
            score * torch.ones(3) + b + h + q + k
        ),
        "must use // and % on integers only": lambda score, b, h, q, k: score // 2 + b + h + q + k,
    }
    for message, function in wrong.items():
        with pytest.raises(TypeError, match=rf"flexops\.attention: score_mod {message}"):
            flexops.attention(q, k, v, score_mod=function)
    with pytest.raises(TypeError, match="score_mod must be a function"):
        flexops.attention(q, k, v, score_mod=3)  # type: ignore[arg-type]
    texts = {
        "be an expression in Python's syntax, got": "q < k ? score : 0",
        "be made of score, b, h, q, k, inf, numbers, operators and abs, .* got 'slopes'": (
            "score * slopes[h]"
        ),
        "be made of .* got \"open\\('x'\\)\"": "open('x')",
        "be made of .* got 'score.real'": "score.real",
        "look up slopes by 1 integers": "score + slopes[q, k]",
    }
    for message, text in texts.items():
        tables = {"slopes": torch.ones(2)} if "look up" in message else {}
        with pytest.raises(TypeError, match=rf"flexops\.attention: score_mod must {message}"):
            flexops.attention(q, k, v, score_mod=flexops.ScoreMod(text, **tables))
    with pytest.raises(
        ValueError, match="score_mod must come without softcap, bias and alibi_slopes"
    ):
        flexops.attention(q, k, v, score_mod=squared, softcap=2.0)


@pytest.mark.usefixtures("both")
def test_rows_that_see_nothing_are_zeros():
    q, k, v = (x.requires_grad_() for x in draw(7, 5, 4, 2, 16))
    keep = torch.ones(7, 5, dtype=torch.bool)
    keep[3] = False
    out, lse = flexops.attention(q, k, v, causal=True, bias=keep, return_lse=True)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for row in (0, 1, 3):  # causality leaves nothing to the first two
        assert not out[:, row].any()
        assert (lse[..., row] == -torch.inf).all()
        assert not gradients[0][:, row].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.usefixtures("both")
def test_packed_sequences_are_what_they_are_alone():
    lengths_q, lengths_k = [10, 0, 33, 1, 5], [10, 5, 40, 30, 0]
    at_q, at_k = (
        [sum(lengths[:i]) for i in range(len(lengths) + 1)] for lengths in (lengths_q, lengths_k)
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(tokens, heads, 16, generator=generator, requires_grad=True)
        for tokens, heads in ((at_q[-1], 4), (at_k[-1], 2), (at_k[-1], 2))
    )
    ends = {
        "cu_seqlens_q": torch.tensor(at_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(at_k, dtype=torch.int32),
    }
    grad = torch.randn(q.shape, generator=generator)
    whole = flexops.attention(q, k, v, causal=True, window=(20, None), **ends)
    assert torch.equal(
        whole,
        flexops.attention(
            q, k, v, causal=True, window=(20, None), max_seqlen_q=33, max_seqlen_k=40, **ends
        ),
    )
    parts = [
        exact(q[None, a:b], k[None, c:d], v[None, c:d], causal=True, window=(20, None))[0][0]
        for a, b, c, d in zip(at_q, at_q[1:], at_k, at_k[1:], strict=False)
    ]
    expected = torch.cat(parts)
    assert distance_of(whole, expected) < 1e-6
    for one, other in zip(
        torch.autograd.grad(whole, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad),
        strict=True,
    ):
        assert distance_of(one, other) < 1e-6


# ---- in torch's machinery ----


def test_checkpointing_gives_the_same_gradients():
    q, k, v = (x.requires_grad_() for x in draw(33, 50, 4, 2, 16))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flexops.attention(q, k, v, causal=True, deterministic=True)

    expected = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    actual = torch.autograd.grad(
        checkpoint(call, q, k, v, use_reentrant=False).square().sum(), (q, k, v)
    )
    assert all(map(torch.equal, actual, expected))


def test_autocast_casts_as_torchs_attention_does():
    q, k, v = (x.requires_grad_() for x in draw(33, 33, 4, 4, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = flexops.attention(q, k, v.bfloat16())
        torchs = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v))
        )
    assert ours.dtype == torchs.dtype == torch.bfloat16
    assert all(
        gradient.dtype == torch.float32 for gradient in torch.autograd.grad(ours.sum(), (q, k, v))
    )


def test_operations_are_counted_as_torchs_own_are():
    q, k, v = (x.requires_grad_() for x in draw(33, 50, 4, 4, 16))
    with FlopCounterMode(display=False) as ours:
        flexops.attention(q, k, v).sum().backward()
    shapes = [x.transpose(1, 2).shape for x in (q, k, v)]
    products = 2 * 2 * 4 * 33 * 50 * 16
    assert ours.get_total_flops() == 7 * products
    assert sdpa_flop_count(*shapes) == 2 * products


# ---- torch's arguments ----


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (9, 12), (12, 9)])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": torch.bool}, {"mask": torch.float32}],
    ids=str,
)
@pytest.mark.parametrize("grouped_heads", [False, True])
def test_torchs_arguments(queries, keys, options, grouped_heads):
    q, k, v = (
        x.transpose(1, 2).requires_grad_()
        for x in draw(queries, keys, 4, 2 if grouped_heads else 4, 16)
    )
    options = dict(options)
    if kind := options.pop("mask", None):
        mask = torch.randn(2, 1, queries, keys, generator=torch.Generator().manual_seed(1))
        options["attn_mask"] = mask > -1 if kind == torch.bool else mask
    repeat = 2 if grouped_heads else 1  # torch's own has enable_gqa from 2.5 on only
    results = [
        flexops.scaled_dot_product_attention(q, k, v, enable_gqa=grouped_heads, **options),
        torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), **options
        ),
    ]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(
        *(torch.autograd.grad(result.square().sum(), (q, k, v)) for result in results)
    )


def test_what_torch_alone_has_is_torchs():
    q = torch.ones(2, 4, 9, 16)
    torch.manual_seed(0)
    ours = flexops.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(
        ours, torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    )
    assert flexops.scaled_dot_product_attention(q[0], q[0], q[0]).shape == (4, 9, 16)
    bias = torch.zeros(9, 9, requires_grad=True)
    assert torch.autograd.grad(flexops.scaled_dot_product_attention(q, q, q, bias).sum(), bias)[
        0
    ].shape == (9, 9)


def test_it_may_take_the_place_of_torchs_function(monkeypatch):
    """What it leaves to torch's function does not come back to it."""
    q = torch.randn(2, 4, 9, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q[0], q[0], q[0])
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", flexops.scaled_dot_product_attention
    )
    replaced = torch.nn.functional.scaled_dot_product_attention
    assert replaced is flexops.scaled_dot_product_attention
    torch.testing.assert_close(replaced(q[0], q[0], q[0]), expected)
    assert replaced(q, q, q, dropout_p=0.5).shape == q.shape
    assert replaced(q.double(), q.double(), q.double()).dtype == torch.float64


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
def test_what_kernels_do_not_take_is_reported(monkeypatch):
    reason = "a head_dim of 260: plain PyTorch, in pieces"
    monkeypatch.setattr(loader, "_declined", {})
    for device in ("cpu", "cuda"):
        loader.decline("attention", device, reason)
    assert {
        one.device for one in flexops.status() if one.op == "attention" and one.reason == reason
    } == {"cpu", "cuda"}
    forbidding = settings.current()._replace(fallback="forbid")
    monkeypatch.setattr(settings, "current", lambda: forbidding)
    with pytest.raises(NativeUnavailableError, match="attention"):
        loader.decline("attention", "cuda", reason)


@pytest.mark.parametrize(("queries", "keys", "options"), [(5, 5, (0,)), (3, 7, (2, 1, 0.5, True))])
def test_the_operator_takes_heads_first(queries, keys, options):
    """What torch's arguments are handed on as: no tensor is transposed, results lie in memory as
    with rows first, and gradients do."""
    rows = [
        torch.randn(2, length, heads, 8, dtype=torch.float32, requires_grad=True)
        for length, heads in ((queries, 4), (keys, 2), (keys, 2))
    ]
    heads = [x.detach().transpose(1, 2).requires_grad_() for x in rows]
    op = torch.ops.flexops.attention.default
    expected, expected_lse = op(*rows, False, *options)
    out, lse = op(*heads, True, *options)
    grad = torch.randn_like(expected)
    gradients, wanted = (
        torch.autograd.grad(out, heads, grad.transpose(1, 2)),
        torch.autograd.grad(expected, rows, grad),
    )
    for actual, correct in zip((out, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(actual.transpose(1, 2), correct, rtol=0, atol=0)
        assert actual.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    torch.library.opcheck(op, (*heads, True, *options))
    with torch.no_grad():
        torch.testing.assert_close(attention_module.reference(*heads, True, *options), (out, lse))
