"""flexops.gated_delta_rule and flexops.mamba2_scan: their formulas, transformers' functions,
states, gradients and errors."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import ISA_LEVELS, isa_limit
from state_scan_cases import by_steps, draw, expected_delta, expected_mamba2, mamba2, near

import flexops
from flexops.ops import state_chunks, state_scan

LENGTHS = (1, 2, 17, 64, 150)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# batch, key heads, heads, rows, columns
SHAPES = (
    (2, 2, 4, 16, 24),
    (1, 3, 3, 96, 192),
    (2, 1, 2, 128, 128),
    (1, 1, 1, 5, 3),
    (1, 2, 2, 256, 72),
)


@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_delta_rule_is_its_formula(length, dtype, level, native_kernels):
    native_kernels("state_scan", "cpu")
    for shape in SHAPES:
        given = draw(shape, length, dtype)
        before = given["initial_state"].clone()
        with isa_limit(level):
            out, final = flexops.gated_delta_rule(
                **given, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
        wanted, last = expected_delta(given, True, shape[3] ** -0.5)
        torch.testing.assert_close(out.double(), wanted, **near(dtype))
        torch.testing.assert_close(final.double(), last, rtol=1e-4, atol=1e-5)
        assert torch.equal(given["initial_state"], before)
        assert out.is_contiguous()
        assert out.dtype == dtype


@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_mamba2_is_its_formula(length, dtype, level, native_kernels):
    native_kernels("state_scan", "cpu")
    for shape in SHAPES:
        x, dt, A, B, C, named = mamba2(shape, length, dtype)
        with isa_limit(level):
            out, final = flexops.mamba2_scan(x, dt, A, B, C, return_final_states=True, **named)
        wanted, last = expected_mamba2(x, dt, A, B, C, named)
        torch.testing.assert_close(out.double(), wanted, **near(dtype))
        torch.testing.assert_close(final.double(), last, rtol=1e-4, atol=1e-4)


def test_steps_continue_a_sequence():
    """By updates of one and of several steps, which write the state."""
    given = draw((2, 2, 4, 16, 24), 20)
    state = given.pop("initial_state")
    whole, final = flexops.gated_delta_rule(**given, initial_state=state, output_final_state=True)
    parts = []
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        part = {name: one[:, begin:end] for name, one in given.items()}
        version = state._version
        parts.append(flexops.gated_delta_rule_update(state, **part))
        assert state._version > version
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, final)

    x, dt, A, B, C, named = mamba2((2, 2, 4, 16, 24), 20)
    states = named.pop("initial_states")
    whole, final = flexops.mamba2_scan(
        x, dt, A, B, C, initial_states=states, return_final_states=True, **named
    )
    parts = [
        flexops.mamba2_scan_update(states, x[:, p], dt[:, p], A, B[:, p], C[:, p], **named)
        for p in (slice(0, 7), slice(7, 8), slice(8, 20))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(states, final)


@pytest.mark.parametrize("length", [1, 63, 130])
def test_transformers_functions(length):
    """Of Qwen 3.5, and of Mamba 2 on which layers of other models are based."""
    mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    given = draw((2, 4, 4, 16, 24), length)
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    theirs = {"query": given["q"], "key": given["k"], "value": given["v"]}
    theirs |= {name: given[name] for name in ("g", "beta", "initial_state")}
    for function in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        torch.testing.assert_close(
            flexops.gated_delta_rule(**given, **named), function(**theirs, **named)
        )
    x, dt, A, B, C, named = mamba2((2, 2, 4, 16, 24), length)
    named["return_final_states"] = True
    torch.testing.assert_close(
        flexops.mamba2_scan(x, dt, A, B, C, **named),
        mamba.mamba2_chunk_scan(x, dt, A, B, C, chunk_size=64, **named),
    )


@pytest.mark.parametrize("softplus", [False, True])
def test_gradients(softplus):
    given = {name: one.double() for name, one in draw((1, 1, 2, 8, 8), 3).items()}
    names = list(given)
    torch.autograd.gradcheck(
        lambda *values: flexops.gated_delta_rule(
            **dict(zip(names, values, strict=True)),
            output_final_state=True,
            use_qk_l2norm_in_kernel=softplus,
        ),
        [one.requires_grad_() for one in given.values()],
    )
    x, dt, A, B, C, named = mamba2((1, 1, 2, 8, 8), 3)
    tensors = [one.double().requires_grad_() for one in (x, dt.abs() + 0.1, A, B, C, named["D"])]
    torch.autograd.gradcheck(
        lambda *values: flexops.mamba2_scan(
            *values[:5], D=values[5], dt_softplus=softplus, return_final_states=True
        ),
        tensors,
    )


@pytest.mark.parametrize("rate", [False, True])
def test_without_softplus_rates_are_given(rate):
    x, dt, A, B, C, named = mamba2((2, 2, 4, 16, 24), 9)
    dt = dt.abs()
    out = flexops.mamba2_scan(x, dt, A, B, C, dt_bias=named["dt_bias"] if rate else None)
    rates = dt + (named["dt_bias"] if rate else 0)
    rates = rates.clamp(min=0).double()
    start = torch.zeros(2, 4, 16, 24)
    wanted, _ = by_steps(start, C, B, x, (A.double() * rates).exp(), rates, False)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)


def test_decays_that_forget_all():
    """exp(-inf) and products of decays that no float32 holds."""
    for g in (-math.inf, -300.0, -20.0):
        given = draw((1, 1, 2, 16, 24), 40)
        given["g"] = given["g"].clone()
        given["g"][:, 5::6] = g
        out, final = flexops.gated_delta_rule(**given, output_final_state=True)
        given["g"] = given["g"].double()
        wanted, last = expected_delta(given, False, 0.25)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(final.double(), last, rtol=1e-3, atol=1e-4)


def test_the_gates_of_a_layer():
    """As layers compute them from what they project; the operator's third kind."""
    given = draw((2, 2, 4, 16, 24), 21)
    a_log, bias = torch.rand(4), torch.randn(4)
    raw, rate = torch.randn(2, 21, 4), torch.randn(2, 21, 4)
    state = given["initial_state"].clone()
    tensors = (given["q"], given["k"], given["v"], raw, rate, a_log, bias, None)
    out = torch.ops.flexops.state_scan_(state, *tensors, 2, True, True, 0.25, 0.0, 2.0)
    given["g"] = -a_log.exp() * F.softplus(raw + bias)
    given["beta"] = 2 * rate.sigmoid()
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    wanted, last = flexops.gated_delta_rule(**given, **named)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("batch", [0, 2])
def test_no_steps_and_no_batch(batch):
    given = draw((2, 2, 4, 16, 24), 3)
    given = {
        name: one[:batch] if name == "initial_state" else one[:batch, :0]
        for name, one in given.items()
    }
    out, final = flexops.gated_delta_rule(**given, output_final_state=True)
    assert out.shape == (batch, 0, 4, 24)
    assert torch.equal(final, given["initial_state"])


def test_compiled_calls():
    given = draw((2, 2, 4, 16, 24), 5)
    function = functools.partial(flexops.gated_delta_rule, output_final_state=True)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given), function(**given))


def test_the_operator_is_as_it_says():
    given = draw((2, 2, 4, 16, 24), 5)
    tensors = [given[name] for name in ("initial_state", "q", "k", "v", "g", "beta")]
    torch.library.opcheck(
        torch.ops.flexops.state_scan_.default,
        (*tensors, None, None, None, 0, True, True, 0.25, 0.0, 1.0),
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 3, 2, 16).int()}, TypeError, "q must be a float32"),
        ({"q": torch.zeros(2, 3, 2, 16).half()}, TypeError, "q must have v's dtype"),
        ({"k": torch.zeros(2, 3, 2, 8)}, ValueError, r"k must have shape \[2, 3, 2, 16\]"),
        (
            {"v": torch.zeros(2, 3, 96)},
            ValueError,
            r"v must have shape \[batch, length, heads, V\]",
        ),
        ({"v": torch.zeros(2, 3, 3, 24)}, ValueError, "v must have a multiple of 2 heads, got 3"),
        ({"g": torch.zeros(2, 3)}, ValueError, r"g must have shape \[2, 3, 4\]"),
        ({"beta": torch.zeros(2, 3, 1)}, ValueError, r"beta must have shape \[2, 3, 4\]"),
        (
            {"initial_state": torch.zeros(2, 4, 24, 16)},
            ValueError,
            r"initial_state must have shape \[2, 4, 16, 24\]",
        ),
        ({"scale": "1"}, TypeError, "scale must be a number"),
    ],
)  # fmt: skip
def test_wrong_calls_of_the_delta_rule(changes, error, message):
    given = draw((2, 2, 4, 16, 24), 3)
    with pytest.raises(error, match=f"flexops.gated_delta_rule: {message}"):
        flexops.gated_delta_rule(**given | changes)
    state = given.pop("initial_state")
    if "initial_state" not in changes:
        with pytest.raises(error, match=f"flexops.gated_delta_rule_update: {message}"):
            flexops.gated_delta_rule_update(state, **given | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dt": torch.zeros(2, 3)}, r"dt must have shape \[2, 3, 4\]"),
        ({"A": torch.zeros(4, 1)}, r"A must have shape \[4\]"),
        ({"B": torch.zeros(2, 3, 3, 16)}, r"C must have shape \[2, 3, 3, 16\]"),
        ({"D": torch.zeros(3)}, r"D must have shape \[4\]"),
        ({"dt_limit": (1.0, 0.0)}, "dt_limit must be two numbers, the lesser first"),
        ({"state": torch.zeros(2, 4, 16, 24)}, r"state must have shape \[2, 4, 24, 16\]"),
    ],
)
def test_wrong_calls_of_mamba2(changes, message):
    x, dt, A, B, C, named = mamba2((2, 2, 4, 16, 24), 3)
    state = named.pop("initial_states")
    given = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C} | named
    with pytest.raises(ValueError, match=f"flexops.mamba2_scan_update: {message}"):
        flexops.mamba2_scan_update(**given | changes)


def test_states_that_no_kernel_has():
    """Of 300 rows."""
    given = draw((1, 1, 2, 300, 8), 5)
    out, _ = flexops.gated_delta_rule(**given)
    wanted, _ = expected_delta(given, False, 300**-0.5)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=1e-3)
    assert state_scan._MOST_ROWS == 256


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_the_operator_with_a_gradient(delta, given_state):
    """That kernels of chunks have: of heads that share q and k, and of one result alone."""
    given = draw((2, 2, 4, 16, 24), 70, torch.bfloat16)
    if not given_state:
        given.pop("initial_state")
    skip = None if delta else torch.randn(4)
    leaves = [one.requires_grad_() for one in (*given.values(), skip) if one is not None]

    def run(function: Any) -> Any:
        state = given.get("initial_state")
        tensors = (given[name] for name in ("q", "k", "v", "g", "beta"))
        return function(state, *tensors, None, None, skip, 0, delta, True, 0.25, 0.0, 1.0)

    for which in ([0, 1], [0], [1]):
        ours, wanted = (
            torch.autograd.grad(
                sum(run(function)[i].float().square().sum() for i in which),
                leaves,
                allow_unused=True,
                materialize_grads=True,
            )
            for function in (state_chunks.differentiable, state_chunks.scanned)
        )
        for one, other in zip(ours, wanted, strict=True):
            assert one.dtype == other.dtype
            assert (one - other).double().norm() <= 1e-2 * other.double().norm()


def test_the_operators_with_a_gradient_are_as_they_say():
    given = draw((2, 2, 4, 16, 24), 5, torch.bfloat16)
    tensors = [given[name].requires_grad_() for name in ("q", "k", "v")]
    tensors += [given[name].float().requires_grad_() for name in ("g", "beta")]
    state = given["initial_state"].requires_grad_()
    said = (None, state, True, True, 0.25)
    torch.library.opcheck(torch.ops.flexops.state_chunks.default, (*tensors, *said))
    grads = torch.ones_like(tensors[2]).contiguous(), torch.ones_like(state)
    torch.library.opcheck(
        torch.ops.flexops.state_chunks_backward.default,
        (*grads, *(one.detach() for one in tensors), None, state.detach(), True, True, 0.25),
    )


LENGTHS_PACKED = (1, 40, 3, 90)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_packed_sequences_of_the_delta_rule(kind):
    """Each begins with zeros; results and gradients."""
    given = draw((1, 2, 4, 16, 24), sum(LENGTHS_PACKED))
    given.pop("initial_state")
    leaves = [one.requires_grad_() for one in given.values()]
    begins = torch.tensor([0, *itertools.accumulate(LENGTHS_PACKED)], dtype=kind)
    out, final = flexops.gated_delta_rule(**given, cu_seqlens=begins)
    assert final is None
    parts = zip(*(one.split(LENGTHS_PACKED, 1) for one in given.values()), strict=True)
    expected = torch.cat(
        [flexops.gated_delta_rule(**dict(zip(given, part, strict=True)))[0] for part in parts], 1
    )
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    for one, other in zip(
        (out, *torch.autograd.grad(out, leaves, upstream)),
        (expected, *torch.autograd.grad(expected, leaves, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        out, _ = flexops.gated_delta_rule(**given, cu_seqlens=begins)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("softplus", [False, True])
def test_packed_sequences_of_mamba2(softplus):
    x, dt, A, B, C, named = mamba2((2, 2, 4, 16, 24), sum(LENGTHS_PACKED))
    dt, named["dt_softplus"] = dt.abs(), softplus
    named.pop("initial_states")
    ids = torch.tensor([i for i, n in enumerate(LENGTHS_PACKED) for _ in range(n)])
    ids = torch.stack([ids, torch.zeros_like(ids)])
    leaves = [one.requires_grad_() for one in (x, dt, A, B, C)]
    out = flexops.mamba2_scan(*leaves, **named, seq_idx=ids)
    steps = (one.split(LENGTHS_PACKED, 1) for one in (x[:1], dt[:1], B[:1], C[:1]))
    parts = [
        flexops.mamba2_scan(one, rate, A, b, c, **named)
        for one, rate, b, c in zip(*steps, strict=True)
    ]
    whole = flexops.mamba2_scan(x[1:], dt[1:], A, B[1:], C[1:], **named)
    expected = torch.cat([torch.cat(parts, 1), whole])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    for one, other in zip(
        (out, *torch.autograd.grad(out, leaves, upstream)),
        (expected, *torch.autograd.grad(expected, leaves, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens": [0, 3]}, TypeError, "cu_seqlens must be an int32 or int64 tensor"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "1 dimensions"),
        ({"output_final_state": True}, ValueError, "leave these out"),
        ({"initial_state": torch.zeros(1, 4, 16, 24)}, ValueError, "leave these out"),
    ],
)
def test_packed_sequences_that_do_not_fit(change, error, message):
    given = draw((1, 2, 4, 16, 24), 3)
    given.pop("initial_state")
    begins = torch.tensor([0, 1, 3])
    assert flexops.gated_delta_rule(**given, cu_seqlens=begins)[0].shape == (1, 3, 4, 24)
    with pytest.raises(error, match=message):
        flexops.gated_delta_rule(**given | {"cu_seqlens": begins} | change)
    with pytest.raises(ValueError, match="needs a batch of 1, got 2"):
        flexops.gated_delta_rule(
            **{name: one.expand(2, *one.shape[1:]) for name, one in given.items()},
            cu_seqlens=begins,
        )
