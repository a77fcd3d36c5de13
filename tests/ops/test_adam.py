"""flexops.adam_, flexops.adam_copy_ and flexops.optim's Adam and AdamW."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from step_contract import (
    DTYPES,
    ON_BOTH,
    Lists,
    Step,
    StepContract,
    TorchStepContract,
    assert_lists_close,
    assert_params_close,
    clone,
    make_lists,
    make_params,
    set_grads,
    step_alike,
)
from torch import Tensor

import flexops
from flexops import optim
from flexops.bench.reference import OnReference
from flexops.build.load import loader

LISTS = {"params": None, "grads": None, "exp_avgs": torch.float32, "exp_avg_sqs": torch.float32}
NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
BAD_NUMBERS = ("lr", "weight_decay", "eps")
OPTIONS = {"betas": (0.9, 0.999), "weight_decay": 0.1}
TORCH_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.05, "eps": 1e-4, "betas": (0.5, 0.9)},
    {"betas": (0.0, 0.0)},
]


def exact(row: list[Tensor], n: dict[str, Any]) -> list[Tensor]:
    """Also with the largest squares before the step count, and with a copy at the end."""
    param, grad, m, v, *rest = row
    largest, copies = rest[:1] if n.get("amsgrad") else [], rest[2 if n.get("amsgrad") else 1 :]
    count, beta1, beta2 = rest[len(largest)] + 1, n["beta1"], n["beta2"]
    g = grad if n.get("decoupled") else grad + n["weight_decay"] * param
    value = param * (1 - n["lr"] * n["weight_decay"]) if n.get("decoupled") else param
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    largest = [torch.maximum(before, v) for before in largest]
    root = (largest[0] if largest else v).sqrt() / (1 - beta2**count).sqrt()
    value = value - n["lr"] / (1 - beta1**count) * m / (root + n["eps"])
    return [value, grad, m, v, *largest, count, *(value for _ in copies)]


def without_amsgrad(*lists: Any, **numbers: Any) -> None:
    flexops.adam_(*lists[:4], [], *lists[4:], **numbers)


def copying(*lists: Any, **numbers: Any) -> None:
    flexops.adam_copy_(*lists[:4], [], *lists[4:], **numbers)


class TestAdam(TorchStepContract):
    step = Step(
        "adam",
        without_amsgrad,
        LISTS | {"state_steps": torch.float32},
        NUMBERS,
        optim.Adam,
        exact,
        OPTIONS,
        BAD_NUMBERS,
        any_width=STATES,
    )
    oracle = torch.optim.Adam
    torch_options = TORCH_OPTIONS


class TestAdamW(TorchStepContract):
    """The operator with the largest squares; the class without, as its users have it."""

    step = Step(
        "adam",
        flexops.adam_,
        LISTS | {"max_exp_avg_sqs": torch.float32, "state_steps": torch.float32},
        NUMBERS | {"amsgrad": True, "decoupled": True},
        optim.AdamW,
        exact,
        OPTIONS,
        BAD_NUMBERS,
        any_width=STATES,
    )
    oracle = torch.optim.AdamW
    torch_options = TORCH_OPTIONS


class TestCopies(StepContract):
    step = Step(
        "adam",
        copying,
        LISTS | {"state_steps": torch.float32, "copies": None},
        NUMBERS,
        functools.partial(optim.Adam, copies=torch.bfloat16),
        exact,
        OPTIONS,
        BAD_NUMBERS,
        operator="adam_copy_",
        any_width=STATES,
    )

    def test_complex_parameters_step_as_pairs(self):
        """But a copy in real numbers would lose half of each."""
        with pytest.raises(
            ValueError, match=r"Adam: a complex parameter has no copy in torch\.bfloat16"
        ):
            self.optimizer([torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))])


# ---- copies in a second dtype ----


def lists_and_copies(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, copy_dtype: torch.dtype, device: str
) -> tuple[Lists, list[Tensor]]:
    lists = make_lists(TestAdamW.step, param_dtype, grad_dtype, device)
    return lists, [torch.full_like(param, -77.0, dtype=copy_dtype) for param in lists[0]]


@ON_BOTH
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("copy_dtype", DTYPES)
@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_copy_is_the_new_parameter_rounded(param_dtype, grad_dtype, copy_dtype, amsgrad, device):
    lists, copies = lists_and_copies(param_dtype, grad_dtype, copy_dtype, device)
    if not amsgrad:
        lists[4] = []
    plain = clone(lists)
    flexops.adam_copy_(*lists, copies, lr=0.01, amsgrad=amsgrad)
    flexops.adam_(*plain, lr=0.01, amsgrad=amsgrad)
    assert_lists_close(lists, plain)
    for written, param in zip(copies, lists[0], strict=True):
        if param_dtype == torch.float32:
            assert torch.equal(written, param.to(copy_dtype))  # bit for bit
        else:
            torch.testing.assert_close(written, param.to(copy_dtype), rtol=1e-2, atol=1e-2)


def test_copies_round_to_nearest_even_at_any_offset():
    for offset in range(9):  # streaming stores need aligned middles and plain ends
        lists, _ = lists_and_copies(torch.float32, torch.bfloat16, torch.bfloat16, "cpu")
        whole = [torch.zeros(tensor.numel() + 16, dtype=torch.bfloat16) for tensor in lists[0]]
        copies = [
            each[offset : offset + tensor.numel()].view(tensor.shape)
            for each, tensor in zip(whole, lists[0], strict=True)
        ]
        flexops.adam_copy_(*lists, copies, lr=0.01, amsgrad=True)
        for each, param in zip(whole, lists[0], strict=True):
            assert torch.equal(
                each[offset : offset + param.numel()].view(param.shape), param.bfloat16()
            )
            assert not each[:offset].any()
            assert not each[offset + param.numel() :].any()


@ON_BOTH
@pytest.mark.parametrize("how", ["dtype", "list", "mapping"])
def test_copies_follow_the_parameters(how, device):
    params, expected = make_params(device), make_params(device)
    own = [param.detach().bfloat16() for param in params]
    optimizer = optim.AdamW(
        params,
        lr=0.1,
        copies={"dtype": torch.bfloat16, "list": own, "mapping": {params[1]: own[1]}}[how],
    )
    oracle = torch.optim.AdamW(expected, lr=0.1)
    step_alike(3, (params, optimizer), (expected, oracle))
    assert_params_close(params, expected)
    assert len(optimizer.copies) == (1 if how == "mapping" else len(params))
    assert all(
        torch.equal(written, param.detach().bfloat16())
        for param, written in optimizer.copies.items()
    )
    assert "copies" not in optimizer.state_dict()["param_groups"][0]
    with pytest.raises(ValueError, match=f"copies must hold {len(params)} tensors"):
        optim.AdamW(params, copies=own[:2])


@pytest.mark.parametrize("how", ["dtype", "list"])
def test_copies_travel_with_the_optimizer(how):
    params = make_params("cpu", shapes=[(5,), (4, 3)])
    optimizer = optim.AdamW(
        params,
        lr=0.1,
        copies=(
            torch.bfloat16 if how == "dtype" else [param.detach().bfloat16() for param in params]
        ),
    )
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = other.param_groups[0]["params"]
        set_grads(theirs, seed=0)
        other.step()
        assert list(map(id, other.copies)) == list(map(id, theirs))
        assert all(
            torch.equal(written, param.bfloat16()) for param, written in other.copies.items()
        )
        # which have not moved
        assert all(
            torch.equal(written, param.bfloat16()) for param, written in optimizer.copies.items()
        )


def test_copies_of_parameters_that_come_later():
    first, second = make_params("cpu", shapes=[(5,), (4, 3)])
    optimizer = copy.deepcopy(optim.AdamW([first], lr=0.1, copies=torch.bfloat16))
    optimizer.add_param_group({"params": second})
    set_grads([second], seed=0)
    optimizer.step()
    assert torch.equal(optimizer.copies[second], second.bfloat16())
    optimizer = optim.AdamW([first], lr=0.1, copies=[first.detach().bfloat16()])
    with pytest.raises(
        ValueError, match=r"params\[0\] of the new group has no copy.*optimizer.copies"
    ):
        optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 1
    optimizer.copies[second] = second.detach().bfloat16()
    optimizer.add_param_group({"params": [second]})
    optimizer.step()
    assert torch.equal(optimizer.copies[second], second.bfloat16())


# ---- what else is special ----


def test_the_native_operator_rejects_wrong_tensors_by_itself():
    lists = make_lists(TestAdam.step, torch.float32, torch.float32, "cpu")
    assert loader.ensure("adam", "cpu")
    lists[2][1] = lists[2][1].double()
    with pytest.raises(
        RuntimeError,
        match=r"flexops::adam_: exp_avgs\[1\] must be float32, bfloat16 or float16, got float64",
    ):
        torch.ops.flexops.adam_(
            *lists[:4], [], lists[4], **NUMBERS, amsgrad=False, maximize=False, decoupled=False
        )


@ON_BOTH
def test_bfloat16_gradients_of_float32_parameters(device):
    params, expected = make_params(device), make_params(device)
    states = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    steps = [torch.zeros((), device=device) for _ in params]
    oracle = torch.optim.AdamW(expected)
    for step in range(5):
        set_grads(expected, seed=step)
        grads = [other.grad.bfloat16() for other in expected]
        for other, grad in zip(expected, grads, strict=True):
            other.grad = grad.float()
        flexops.adam_(
            [param.detach() for param in params],
            grads,
            *states,
            [],
            steps,
            lr=1e-3,
            weight_decay=1e-2,
            decoupled=True,
        )
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_tensor_subclass_gradients_of_distributed_tensors():
    distributed = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(distributed, "distribute_tensor"):  # torch before 2.5
        distributed = pytest.importorskip("torch.distributed._tensor")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        whole = torch.randn(8, 4)
        param = torch.nn.Parameter(
            distributed.distribute_tensor(whole.clone(), mesh, [distributed.Shard(0)])
        )
        other = torch.nn.Parameter(whole.clone())
        optimizers = optim.AdamW([param]), torch.optim.AdamW([other])
        for _ in range(3):
            grad = torch.randn(8, 4)
            param.grad, other.grad = (
                distributed.distribute_tensor(grad.clone(), mesh, [distributed.Shard(0)]),
                grad,
            )
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(param.full_tensor(), other, rtol=1e-5, atol=1e-6)
        assert type(optimizers[0].state[param]["exp_avg"]) is type(param.data)
    finally:
        torch.distributed.destroy_process_group()


# ---- states of 16 bits ----


def narrow_lists(dtype: torch.dtype, state_dtype: torch.dtype, device: str, amsgrad: bool) -> Lists:
    lists = make_lists(TestAdamW.step, dtype, dtype, device)
    for at in (2, 3, 4):
        lists[at] = [state.to(state_dtype) for state in lists[at]] if amsgrad or at < 4 else []
    return lists


@ON_BOTH
def test_stochastic_rounding_goes_by_the_place_in_memory(device):
    """Of a transposed parameter, too; one that lies in pieces is counted row by row."""
    for make in (
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    ):
        results = []
        for where in (device, "reference"):
            place = "cpu" if where == "reference" else where
            generator = torch.Generator().manual_seed(0)
            param, grad = (
                make(torch.randn(30, 50, generator=generator)).to(place) for _ in range(2)
            )
            states = [torch.zeros_like(param, dtype=torch.bfloat16) for _ in range(2)]
            count = torch.zeros((), device=place)
            with OnReference() if where == "reference" else contextlib.nullcontext():
                for _ in range(3):
                    flexops.adam_(
                        [param],
                        [grad],
                        [states[0]],
                        [states[1]],
                        [],
                        [count],
                        lr=0.01,
                        stochastic=True,
                    )
            results.append(torch.stack([state.cpu() for state in states]))
        assert (results[0] != results[1]).float().mean() < 0.01


def test_stochastic_rounding_is_right_on_average():
    """An average that gets the same gradient each time; to the nearest, 0.999 of it and 0.001 of
    the new square are the old one for ever."""
    size = 4096
    for stochastic, bound in ((True, 0.01), (False, None)):
        param, grad = torch.zeros(size), torch.full((size,), 1.7)
        m, v, count = (
            torch.zeros(size, dtype=torch.bfloat16),
            torch.zeros(size, dtype=torch.bfloat16),
            torch.zeros(()),
        )
        for _ in range(700):
            flexops.adam_([param], [grad], [m], [v], [], [count], lr=0.0, stochastic=stochastic)
        found, wanted = v.double().mean(), 1.7**2 * (1 - 0.999**700)
        error = float((found - wanted).abs() / wanted)
        assert error < bound if bound else error > 0.1, (stochastic, error)
        assert not stochastic or v.unique().numel() > 5


@pytest.mark.parametrize("backend", ["op", "reference"])
def test_stochastic_rounding_keeps_what_is_no_number(backend):
    grad = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, 0.0])
    param, m, v = (
        torch.zeros(5),
        torch.zeros(5, dtype=torch.bfloat16),
        torch.zeros(5, dtype=torch.bfloat16),
    )
    with OnReference() if backend == "reference" else contextlib.nullcontext():
        flexops.adam_([param], [grad], [m], [v], [], [torch.zeros(())], lr=0.1, stochastic=True)
    assert m[0] == torch.inf
    assert m[1] == -torch.inf
    assert m[2].isnan()
    assert v[:2].isinf().all()
    assert v[2].isnan()
    assert m[3:].isfinite().all()
    assert m[4] == v[4] == 0.0


def test_nothing_is_done_to_narrow_states_after_an_overflow():
    lists = narrow_lists(torch.bfloat16, torch.bfloat16, "cpu", True)
    before = clone(lists)
    for reference in (False, True):
        with OnReference() if reference else contextlib.nullcontext():
            flexops.adam_(
                *lists,
                lr=0.1,
                amsgrad=True,
                stochastic=True,
                grad_scale=torch.full((), 2.0),
                found_inf=torch.ones(()),
            )
        for written, kept in zip(lists, before, strict=True):
            assert all(map(torch.equal, written, kept))


STATE_DTYPES = [None, "param", torch.float32, torch.bfloat16, torch.float16]


STATES_OF_CLASS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_states_of_others_are_taken_over(state_dtype, dtype):
    """Torch's own, which are of the parameters' dtype, and those of each dtype of ours; and back to
    torch's."""
    params = make_params("cpu", dtype)
    for other in (
        functools.partial(torch.optim.AdamW),
        *(functools.partial(optim.AdamW, state_dtype=each) for each in STATE_DTYPES),
    ):
        source = other(params, lr=0.01, amsgrad=True)
        set_grads(params, seed=0)
        source.step()
        optimizer = optim.AdamW(params, lr=0.01, amsgrad=True, state_dtype=state_dtype)
        optimizer.load_state_dict(source.state_dict())
        wanted = dtype if state_dtype == "param" else state_dtype or torch.float32
        for param in params:
            for name in STATES_OF_CLASS:
                assert optimizer.state[param][name].dtype == wanted
                torch.testing.assert_close(
                    optimizer.state[param][name], source.state[param][name].to(wanted)
                )
        optimizer.step()
        back = torch.optim.AdamW(params, lr=0.01, amsgrad=True)
        back.load_state_dict(optimizer.state_dict())
        back.step()


def test_complex_parameters_keep_complex_states():
    param = torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))
    optimizer = optim.AdamW([param], state_dtype=torch.bfloat16)
    for _ in range(2):
        param.grad = torch.randn(9, dtype=torch.complex64)
        optimizer.step()
        assert optimizer.state[param]["exp_avg"].dtype == torch.complex64


def test_copies_beside_narrow_states():
    params = make_params("cpu")
    optimizer = optim.AdamW(params, lr=0.01, state_dtype=torch.bfloat16, copies=torch.bfloat16)
    alone = [torch.nn.Parameter(param.detach().clone()) for param in params]
    without = optim.AdamW(alone, lr=0.01, state_dtype=torch.bfloat16)
    for step in range(3):
        for each in (params, alone):
            set_grads(each, seed=step)
        optimizer.step()
        without.step()
    for param, other in zip(params, alone, strict=True):
        assert torch.equal(param, other)
        assert torch.equal(optimizer.copies[param], param.bfloat16())


# ---- clipping within the step ----


@ON_BOTH
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"maximize": True, "amsgrad": True}),
        (torch.bfloat16, {"state_dtype": "param"}),
    ],
)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_within_the_step(device, dtype, options, max_norm):
    clipped, apart = make_params(device, dtype), make_params(device, dtype)
    within, after = (
        optim.AdamW(clipped, lr=0.01, max_norm=max_norm, **options),
        optim.AdamW(apart, lr=0.01, **options),
    )
    for step in range(3):
        set_grads(clipped, seed=step)
        set_grads(apart, seed=step)
        norm = optim.clip_grad_norm_(apart, max_norm)
        after.step()
        before = [param.grad.clone() for param in clipped if param.grad is not None]
        within.step()
        assert within.grad_norm is not None
        assert torch.equal(within.grad_norm, norm)
        assert all(
            torch.equal(param.grad, grad) for param, grad in zip(clipped, before, strict=True)
        )  # type: ignore[arg-type]
    for left, right in zip(clipped, apart, strict=True):
        torch.testing.assert_close(
            left,
            right,
            rtol=1e-5 if dtype == torch.float32 else 2e-2,
            atol=5e-6 if dtype == torch.float32 else 1e-2,
        )


def test_clipping_within_the_step_of_scaled_gradients():
    """The norm is that of the gradients as they are without the scale."""
    scaled, plain = make_params("cpu"), make_params("cpu")
    one, other = (
        optim.AdamW(scaled, lr=0.01, max_norm=0.5),
        optim.AdamW(plain, lr=0.01, max_norm=0.5),
    )
    set_grads(scaled, seed=0)
    set_grads(plain, seed=0)
    for param in scaled:
        assert param.grad is not None
        param.grad *= 64.0
    one.grad_scale, one.found_inf = torch.tensor(64.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    one.step()
    other.step()
    assert_params_close(scaled, plain)
    torch.testing.assert_close(one.grad_norm, other.grad_norm)


def test_clipping_within_the_step_is_kept_and_rejects():
    params = make_params("cpu")
    optimizer = pickle.loads(pickle.dumps(optim.AdamW(params, max_norm=0.5)))
    set_grads(optimizer.param_groups[0]["params"], seed=0)
    optimizer.step()
    assert optimizer.grad_norm > 0.5
    with pytest.raises(ValueError, match="max_norm must be more than 0, or None, got 0"):
        optim.AdamW(params, max_norm=0)
    with pytest.raises(
        ValueError, match="max_norm is of all parameters' gradients, and no option of a group"
    ):
        optim.AdamW([{"params": params, "max_norm": 0.5}])
    number = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    number.grad = torch.ones_like(number)
    with pytest.raises(ValueError, match="max_norm does not clip complex gradients"):
        optim.AdamW([number], max_norm=1.0).step()


@ON_BOTH
def test_an_infinite_element_under_decoupled_decay(device, native_kernels):
    """As torch's fused kernel for CUDA has it, which takes an infinity from an infinity; the
    reference multiplies. Finite ones are the same."""
    native_kernels("adam", device)

    def stepped(optimizer: Any, **options: Any) -> Tensor:
        param = torch.nn.Parameter(
            torch.tensor([float("inf"), 1.0, -float("inf"), -2.0], device=device)
        )
        param.grad = torch.ones_like(param)
        optimizer([param], lr=0.1, weight_decay=0.1, **options).step()
        return param.detach()

    native = stepped(optim.AdamW)
    with OnReference():
        reference = stepped(optim.AdamW)
    assert native.isnan().tolist() == [True, False, True, False]
    assert reference.isinf().tolist() == [True, False, True, False]
    torch.testing.assert_close(native[1::2], reference[1::2])
    if device == "cuda":
        torch.testing.assert_close(native, stepped(torch.optim.AdamW, fused=True), equal_nan=True)


@ON_BOTH
@pytest.mark.parametrize(
    "optimizer", [optim.Adam, optim.AdamW, optim.Lion, optim.Adagrad, optim.LAMB, optim.AdamW8bit]
)
@pytest.mark.parametrize("whose", ["gradient", "parameter"])
def test_tensors_with_the_negative_bit(optimizer, whose, device):
    def stepped(negate: Any) -> tuple[Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(3)
        value, grad = (torch.randn(8, 9, generator=generator).to(device) for _ in range(2))
        param = (negate(-value) if whose == "parameter" else value).requires_grad_()
        param.grad = negate(-grad) if whose == "gradient" else grad
        optim.clip_grad_norm_([param], 1.0)
        step = optimizer([param], lr=0.1)
        step.step()
        step.step()
        return param.detach().resolve_neg(), param.grad.resolve_neg()

    for actual, expected in zip(stepped(torch._neg_view), stepped(torch.neg), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@ON_BOTH
def test_gradients_with_the_negative_bit_are_unscaled_where_they_lie(device):
    grad = torch._neg_view(torch.full((4,), -6.0, device=device))
    param, *states = (torch.zeros(4, device=device) for _ in range(3))
    steps = [torch.zeros((), device=device)]
    flexops.adam_(
        [param],
        [grad],
        [states[0]],
        [states[1]],
        [],
        steps,
        lr=0.1,
        grad_scale=torch.full((), 2.0, device=device),
    )
    assert grad.tolist() == [3.0] * 4
    assert param.tolist() == pytest.approx([-0.1] * 4)
