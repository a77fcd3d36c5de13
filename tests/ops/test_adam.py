"""flexops.adam_, flexops.adam_copy_ and flexops.optim's Adam and AdamW."""

from __future__ import annotations

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
from flexops.op_builder import loader

LISTS = {"params": None, "grads": None, "exp_avgs": torch.float32, "exp_avg_sqs": torch.float32}
NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
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
    step = Step("adam", without_amsgrad, LISTS | {"state_steps": torch.float32}, NUMBERS, optim.Adam, exact, OPTIONS, BAD_NUMBERS)
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
    )

    def test_complex_parameters_step_as_pairs(self) -> None:
        """But a copy in real numbers would lose half of each."""
        with pytest.raises(ValueError, match=r"Adam: a complex parameter has no copy in torch\.bfloat16"):
            self.optimizer([torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))])


# --- copies in a second dtype -----------------------------------------------------------------------------------------------------------------


def lists_and_copies(param_dtype: torch.dtype, copy_dtype: torch.dtype, device: str) -> tuple[Lists, list[Tensor]]:
    lists = make_lists(TestAdamW.step, param_dtype, torch.bfloat16, device)
    return lists, [torch.full_like(param, -77.0, dtype=copy_dtype) for param in lists[0]]


@ON_BOTH
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("copy_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_the_new_parameter_rounded(param_dtype: torch.dtype, copy_dtype: torch.dtype, amsgrad: bool, device: str) -> None:
    lists, copies = lists_and_copies(param_dtype, copy_dtype, device)
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


def test_copies_round_to_nearest_even_at_any_offset() -> None:
    for offset in range(9):  # streaming stores need aligned middles and plain ends
        lists, _ = lists_and_copies(torch.float32, torch.bfloat16, "cpu")
        whole = [torch.zeros(tensor.numel() + 16, dtype=torch.bfloat16) for tensor in lists[0]]
        copies = [each[offset : offset + tensor.numel()].view(tensor.shape) for each, tensor in zip(whole, lists[0], strict=True)]
        flexops.adam_copy_(*lists, copies, lr=0.01, amsgrad=True)
        for each, param in zip(whole, lists[0], strict=True):
            assert torch.equal(each[offset : offset + param.numel()].view(param.shape), param.bfloat16())
            assert not each[:offset].any()
            assert not each[offset + param.numel() :].any()


@ON_BOTH
@pytest.mark.parametrize("how", ["dtype", "list", "mapping"])
def test_copies_follow_the_parameters(how: str, device: str) -> None:
    params, expected = make_params(device), make_params(device)
    own = [param.detach().bfloat16() for param in params]
    optimizer = optim.AdamW(params, lr=0.1, copies={"dtype": torch.bfloat16, "list": own, "mapping": {params[1]: own[1]}}[how])
    oracle = torch.optim.AdamW(expected, lr=0.1)
    step_alike(3, (params, optimizer), (expected, oracle))
    assert_params_close(params, expected)
    assert len(optimizer.copies) == (1 if how == "mapping" else len(params))
    assert all(torch.equal(written, param.detach().bfloat16()) for param, written in optimizer.copies.items())
    assert "copies" not in optimizer.state_dict()["param_groups"][0]
    with pytest.raises(ValueError, match=f"copies must hold {len(params)} tensors"):
        optim.AdamW(params, copies=own[:2])


@pytest.mark.parametrize("how", ["dtype", "list"])
def test_copies_travel_with_the_optimizer(how: str) -> None:
    params = make_params("cpu", shapes=[(5,), (4, 3)])
    optimizer = optim.AdamW(params, lr=0.1, copies=torch.bfloat16 if how == "dtype" else [param.detach().bfloat16() for param in params])
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = other.param_groups[0]["params"]
        set_grads(theirs, seed=0)
        other.step()
        assert list(map(id, other.copies)) == list(map(id, theirs))
        assert all(torch.equal(written, param.bfloat16()) for param, written in other.copies.items())
        assert all(torch.equal(written, param.bfloat16()) for param, written in optimizer.copies.items())  # which have not moved


def test_copies_of_parameters_that_come_later() -> None:
    first, second = make_params("cpu", shapes=[(5,), (4, 3)])
    optimizer = copy.deepcopy(optim.AdamW([first], lr=0.1, copies=torch.bfloat16))
    optimizer.add_param_group({"params": second})
    set_grads([second], seed=0)
    optimizer.step()
    assert torch.equal(optimizer.copies[second], second.bfloat16())
    optimizer = optim.AdamW([first], lr=0.1, copies=[first.detach().bfloat16()])
    with pytest.raises(ValueError, match=r"params\[0\] of the new group has no copy.*optimizer.copies"):
        optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 1
    optimizer.copies[second] = second.detach().bfloat16()
    optimizer.add_param_group({"params": [second]})
    optimizer.step()
    assert torch.equal(optimizer.copies[second], second.bfloat16())


# --- what else is special ---------------------------------------------------------------------------------------------------------------------


def test_the_native_operator_refuses_wrong_tensors_by_itself() -> None:
    lists = make_lists(TestAdam.step, torch.float32, torch.float32, "cpu")
    assert loader.ensure("adam", "cpu")
    lists[2][1] = lists[2][1].half()
    with pytest.raises(RuntimeError, match=r"flexops::adam_: exp_avgs\[1\] must be float32, got float16"):
        torch.ops.flexops.adam_(*lists[:4], [], lists[4], **NUMBERS, amsgrad=False, maximize=False, decoupled=False)


@ON_BOTH
def test_bfloat16_gradients_of_float32_parameters(device: str) -> None:
    params, expected = make_params(device), make_params(device)
    states = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    steps = [torch.zeros((), device=device) for _ in params]
    oracle = torch.optim.AdamW(expected)
    for step in range(5):
        set_grads(expected, seed=step)
        grads = [other.grad.bfloat16() for other in expected]
        for other, grad in zip(expected, grads, strict=True):
            other.grad = grad.float()
        flexops.adam_([param.detach() for param in params], grads, *states, [], steps, lr=1e-3, weight_decay=1e-2, decoupled=True)
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_tensor_subclass_gradients_of_distributed_tensors() -> None:
    distributed = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(distributed, "distribute_tensor"):  # torch before 2.5
        distributed = pytest.importorskip("torch.distributed._tensor")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        whole = torch.randn(8, 4)
        param = torch.nn.Parameter(distributed.distribute_tensor(whole.clone(), mesh, [distributed.Shard(0)]))
        other = torch.nn.Parameter(whole.clone())
        optimizers = optim.AdamW([param]), torch.optim.AdamW([other])
        for _ in range(3):
            grad = torch.randn(8, 4)
            param.grad, other.grad = distributed.distribute_tensor(grad.clone(), mesh, [distributed.Shard(0)]), grad
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(param.full_tensor(), other, rtol=1e-5, atol=1e-6)
        assert type(optimizers[0].state[param]["exp_avg"]) is type(param.data)
    finally:
        torch.distributed.destroy_process_group()
