# ruff: noqa: ARG001, ARG005 - a score_mod has five parameters, and uses what it needs
"""Score modifiers: what FlexAttention's users write in them, against FlexAttention and float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import distance_of
from score_mod_cases import (
    BATCH,
    BY_HEAD,
    FUNCTIONS,
    HEADS,
    LENGTH,
    MANY,
    ONE,
    ORDER,
    TWO_DIMS,
    UNLIKE_TORCHS,
    ZERO,
    Masked,
    Module,
    draw,
    inputs,
    wide,
)  # fmt: skip

import flexops
from flexops.build.load import provider_texts
from flexops.ops import _score_mod

pytestmark = pytest.mark.filterwarnings(
    "ignore::flexops.FallbackWarning", "ignore:flex_attention called"
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_flex_attention_takes(name):
    score_mod, tensors = FUNCTIONS[name], inputs()
    doubled = [x.detach().double().requires_grad_() for x in tensors]
    expected = wide(*doubled, score_mod)
    out = flexops.attention(*tensors, score_mod=score_mod)
    assert distance_of(out, expected) < 1e-5
    grad = draw(*out.shape, seed=7)
    wanted = torch.autograd.grad(expected, doubled, grad.double())
    for found, exact in zip(torch.autograd.grad(out, tensors, grad), wanted, strict=True):
        assert distance_of(found, exact) < 2e-5
    if name not in UNLIKE_TORCHS:
        from torch.nn.attention.flex_attention import flex_attention

        rows = [x.detach().transpose(1, 2) for x in tensors]
        theirs = flex_attention(*rows, score_mod=score_mod, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(out, theirs.nan_to_num(0.0), atol=3e-5, rtol=2e-4)


LEARNED: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "1 dim": ((2 * LENGTH,), lambda t, s, b, h, q, k: s + t[torch.abs(q - k)]),
    "by head": ((HEADS,), lambda t, s, b, h, q, k: s + t[h]),
    "2 dims": ((LENGTH, LENGTH), lambda t, s, b, h, q, k: s + t[q, k]),
    "t[q][k]": ((LENGTH, LENGTH), lambda t, s, b, h, q, k: s + t[q][k]),
    "turned": ((LENGTH, LENGTH), lambda t, s, b, h, q, k: s + t[k, q]),
    "3 dims": ((HEADS, LENGTH, LENGTH), lambda t, s, b, h, q, k: s + t[h, q, k]),
    "4 dims": ((BATCH, HEADS, LENGTH, LENGTH), lambda t, s, b, h, q, k: s + t[b, h, q, k]),
    "odd": ((BATCH, HEADS, 4, LENGTH), lambda t, s, b, h, q, k: s + t[b, h, ZERO, q] * s),
    "times": ((LENGTH,), lambda t, s, b, h, q, k: s * t[q]),
    "window": ((17,), lambda t, s, b, h, q, k: s + t[torch.clamp(q - k + 8, 0, 16)]),
    "symmetric": ((LENGTH,), lambda t, s, b, h, q, k: s + t[q] * t[k]),
    "indirect": ((LENGTH,), lambda t, s, b, h, q, k: s + t[ORDER[k]]),
    "gate": ((HEADS,), lambda t, s, b, h, q, k: s * torch.sigmoid(t[h].to(torch.float32))),
    "computed there": ((2, HEADS), lambda t, s, b, h, q, k: s + (3 * t)[1][h].tanh() * (q > k)),
}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("only", [False, True], ids=["all", "the table alone"])
def test_gradients_of_what_is_looked_up(name, only):
    shape, function = LEARNED[name]
    tensors, table = inputs(), draw(*shape, seed=9).requires_grad_()
    if only:
        tensors = [x.detach() for x in tensors]
    doubled = [x.detach().double().requires_grad_(x.requires_grad) for x in (*tensors, table)]
    expected = wide(*doubled[:3], functools.partial(function, doubled[3]))
    out, lse = flexops.attention(
        *tensors, score_mod=functools.partial(function, table), return_lse=True
    )
    grad = draw(*out.shape, seed=7)
    leaves = [x for x in (*tensors, table) if x.requires_grad]
    wanted = torch.autograd.grad(expected, [x for x in doubled if x.requires_grad], grad.double())
    for found, exact in zip(
        torch.autograd.grad(out, leaves, grad, retain_graph=True), wanted, strict=True
    ):
        if exact.norm() > 1e-9:  # what is the same for all keys changes nothing
            assert distance_of(found, exact) < 2e-5
    assert torch.autograd.grad(lse.sum(), table)[0].abs().sum() > 0


def test_a_function_is_traced_again_where_what_it_finds_has_changed():
    q, k, v = (x.detach() for x in inputs())
    added, table, module = True, torch.ones(HEADS), Module()

    def switched(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + q * table[h] if added else s * table[h]

    def check(function: Any) -> None:
        expected = wide(q.double(), k.double(), v.double(), function)
        assert distance_of(flexops.attention(q, k, v, score_mod=function), expected) < 1e-5

    check(switched)
    added = False
    check(switched)
    table = torch.full((HEADS,), 3.0)
    check(switched)
    table[1] = -1.0
    check(switched)
    check(module.score_mod)
    module.slopes = torch.nn.Parameter(torch.zeros(HEADS), requires_grad=False)
    check(module.score_mod)
    module.tables.mul_(2)  # type: ignore[operator]
    check(module.score_mod)
    number = _score_mod.made(switched)
    assert _score_mod.made(switched) is number, "nothing has changed: it is not called again"


def test_what_a_modifier_made_once_looks_up_is_of_today():
    q, k, v = (x.detach() for x in inputs())
    table = draw(3, HEADS)
    made = flexops.ScoreMod(lambda s, b, h, q, k: s + table[-1][h] + (2 * table)[0, h])
    for _ in range(2):
        function = lambda s, b, h, q, k: s + table[2, h] + 2 * table[0, h]  # noqa: E731
        expected = wide(q.double(), k.double(), v.double(), function)
        assert distance_of(flexops.attention(q, k, v, score_mod=made), expected) < 1e-5
        table.mul_(-3)


def test_errors_name_what_a_modifier_may_not_do():
    q, k, v = inputs()
    wide_rows, double = draw(LENGTH, 256), torch.zeros(LENGTH, dtype=torch.complex64)
    wrong: dict[str, Callable[..., Any]] = {
        r"rows of at most 32 numbers, got one of wide_rows": lambda s, b, h, q, k: (
            s + wide_rows[q].sum()
        ),
        r"not read numbers out of tensors, got item": lambda s, b, h, q, k: s * ONE.item(),
        r"not write tensors, got add_": lambda s, b, h, q, k: s + BY_HEAD.add_(0)[h],
        r"look up TWO_DIMS by 2 integers, got": lambda s, b, h, q, k: s + TWO_DIMS[s],
        r"look things up in float or integer tensors, double is complex64": lambda s, b, h, q, k: (
            s + double[q]
        ),
        r"use, of methods, .*, got item": lambda s, b, h, q, k: s * q.item(),
        r"give a score .*, got a bool": lambda s, b, h, q, k: q > k,
        r"raise to whole powers": lambda s, b, h, q, k: s**1.7,
        r"not call torch\.autograd\.Function": lambda s, b, h, q, k: Masked.apply(s, q > k),
        r"use << and >> on integers only": lambda s, b, h, q, k: s << 1,
    }
    for message, function in wrong.items():
        with pytest.raises(TypeError, match=rf"flexops\.attention: score_mod must .*{message}"):
            flexops.attention(q, k, v, score_mod=function)


def test_equal_functions_are_one_kernel():
    made = [flexops.ScoreMod(lambda s, b, h, q, k: s + MANY[0][b, h][q]) for _ in range(2)]
    assert made[0].number == made[1].number
    assert "score::at(words, 0, b, h, q)" in provider_texts.of(made[0].number)
