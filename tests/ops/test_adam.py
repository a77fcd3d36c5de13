"""flexops.adam_ and flexops.optim on the CPU: against torch.optim, and native against reference."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

import flexops
from flexops import optim
from flexops.op_builder import loader
from flexops.ops import adam as adam_module

SHAPES = [(7,), (33, 65), (), (3, 5, 17), (1031,), (0,), (4, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Each option alone, and the ones that meet in one line of the formula together.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.05, "eps": 1e-4, "betas": (0.5, 0.9)},
    {"betas": (0.0, 0.0)},
]
needs_mutable_lists = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5), reason="torch.compile of torch 2.4 takes no op that writes lists of tensors"
)
PAIRS = [(optim.Adam, torch.optim.Adam), (optim.AdamW, torch.optim.AdamW)]


@pytest.fixture(scope="module", params=["native", "reference"])
def step(request: pytest.FixtureRequest) -> Any:
    """The op as a user calls it, and the reference on its own."""
    if request.param == "native":
        if not loader.ensure("adam", "cpu"):
            pytest.skip(next(status.reason for status in flexops.status() if (status.op, status.device) == ("adam", "cpu")))
        return torch.ops.flexops.adam_
    return adam_module._adam_reference


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_grads(params: list[Any], seed: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(dtype or param.dtype)


def make_lists(param_dtype: torch.dtype, grad_dtype: torch.dtype, *, amsgrad: bool = False, seed: int = 0, step: float = 3.0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]

    squares = [tensor.square() for tensor in draw()]
    largest = [tensor * 1.01 for tensor in squares] if amsgrad else []
    return [draw(param_dtype), draw(grad_dtype), draw(), squares, largest, [torch.tensor(step) for _ in SHAPES]]


def numbers(**changes: Any) -> dict[str, Any]:
    defaults = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False, "decoupled": False}
    return defaults | changes


def clone(lists: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def assert_lists_close(actual: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        for left, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(left, right, rtol=None if left.dtype != torch.float32 else 2e-6, atol=None if left.dtype != torch.float32 else 1e-6)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_matches_torch_over_many_steps(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    params, expected = make_params(), make_params()
    optimizer, oracle = ours(params, lr=0.01, **options), theirs(expected, lr=0.01, **options)
    for step in range(30):
        for each in (params, expected):
            set_grads(each, seed=step)
        optimizer.step()
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)
        state, wanted = optimizer.state[left], oracle.state[right]
        assert set(state) == set(wanted)
        for name in wanted:
            torch.testing.assert_close(state[name], wanted[name], rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_native_matches_reference(param_dtype: torch.dtype, grad_dtype: torch.dtype, amsgrad: bool) -> None:
    lists = make_lists(param_dtype, grad_dtype, amsgrad=amsgrad)
    expected = clone(lists)
    options = numbers(amsgrad=amsgrad, weight_decay=0.1, decoupled=amsgrad, maximize=not amsgrad)
    flexops.adam_(*lists, **options)
    adam_module._adam_reference(*expected, **options)
    assert_lists_close(lists, expected)


@pytest.mark.parametrize("copy_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_copy_is_the_new_parameter_rounded(param_dtype: torch.dtype, copy_dtype: torch.dtype) -> None:
    lists = make_lists(param_dtype, torch.bfloat16)
    plain = clone(lists)
    copies = [torch.full_like(param, -77.0, dtype=copy_dtype) for param in lists[0]]
    flexops.adam_copy_(*lists, copies, **numbers())
    flexops.adam_(*plain, **numbers())
    assert_lists_close(lists, plain)
    for written, param in zip(copies, lists[0], strict=True):
        if param_dtype == torch.float32:
            assert torch.equal(written, param.to(copy_dtype))  # bit for bit
        else:
            torch.testing.assert_close(written, param.to(copy_dtype), rtol=1e-2, atol=1e-2)


def test_copy_rounds_to_nearest_even_at_any_offset() -> None:
    for offset in range(9):  # streaming stores need aligned middles and plain ends
        lists = make_lists(torch.float32, torch.float32)
        whole = [torch.zeros(tensor.numel() + 16, dtype=torch.bfloat16) for tensor in lists[0]]
        copies = [each[offset : offset + tensor.numel()].view(tensor.shape) for each, tensor in zip(whole, lists[0], strict=True)]
        flexops.adam_copy_(*lists, copies, **numbers())
        for each, param in zip(whole, lists[0], strict=True):
            assert torch.equal(each[offset : offset + param.numel()].view(param.shape), param.bfloat16())
            assert not each[:offset].any()
            assert not each[offset + param.numel() :].any()


def test_grad_scale_is_taken_out_and_written_back(step: Any) -> None:
    lists = make_lists(torch.float32, torch.bfloat16)
    plain = clone(lists)
    scale = 1024.0
    lists[1] = [grad * scale for grad in lists[1]]
    step(*lists, **numbers(), grad_scale=torch.tensor([scale]), found_inf=torch.zeros(()))
    step(*plain, **numbers())
    assert_lists_close(lists, plain)


def test_found_inf_does_nothing_at_all(step: Any) -> None:
    lists = make_lists(torch.float32, torch.float16, amsgrad=True)
    before = clone(lists)
    step(*lists, **numbers(amsgrad=True), grad_scale=torch.tensor(2.0), found_inf=torch.ones(()))
    for found, wanted in zip(lists, before, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))


def test_tensor_lr(step: Any) -> None:
    lists = make_lists(torch.float32, torch.float32)
    plain = clone(lists)
    step(*lists, **numbers(lr=99.0, weight_decay=0.1, decoupled=True), lr_tensor=torch.tensor([0.01]))
    step(*plain, **numbers(weight_decay=0.1, decoupled=True))
    assert_lists_close(lists, plain)


def test_nan_and_inf_gradients_give_what_torch_gives(step: Any) -> None:
    bad = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0] * 9)
    zeros = [torch.zeros_like(bad) for _ in range(3)]
    param, other = torch.ones_like(bad), torch.nn.Parameter(torch.ones_like(bad))
    step([param], [bad], [zeros[0]], [zeros[1]], [zeros[2]], [torch.zeros(())], **numbers(amsgrad=True))
    other.grad = bad.clone()
    torch.optim.Adam([other], lr=0.01, amsgrad=True).step()
    torch.testing.assert_close(param, other.detach(), equal_nan=True)


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda t: torch.cat([torch.zeros(1), t.float().flatten()]).to(t.dtype)[1:].view(t.shape),
}


@pytest.mark.parametrize("which", ["params", "grads", "states", "all", "copies"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_odd_strides(layout: Any, which: str) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.rand(37, 41, generator=generator) for _ in range(4)]
    plain = [[tensor.clone()] for tensor in tensors]
    chosen = {"params": (0,), "grads": (1,), "states": (2, 3), "all": (0, 1, 2, 3), "copies": ()}[which]
    odd = [[layout(tensor.clone()) if i in chosen else tensor.clone()] for i, tensor in enumerate(tensors)]
    copies = [torch.zeros(37, 41, dtype=torch.bfloat16)]
    odd_copies = [layout(copies[0].clone())] if which in ("copies", "all") else [copies[0].clone()]
    flexops.adam_copy_(*odd, [], [torch.zeros(())], odd_copies, **numbers())
    flexops.adam_copy_(*plain, [], [torch.zeros(())], copies, **numbers())
    assert_lists_close([*odd, odd_copies], [*plain, copies])


def test_no_tensors_and_empty_tensors() -> None:
    flexops.adam_([], [], [], [], [], [], lr=0.1)
    step = torch.zeros(())
    flexops.adam_(*([torch.zeros(0, 3)] for _ in range(4)), [], [step], lr=0.1)
    assert step.item() == 1


def test_large_tensor_splits_into_the_same_result() -> None:
    lists = [[torch.randn(300_001)], [torch.randn(300_001)], [torch.zeros(300_001)], [torch.zeros(300_001)], [], [torch.zeros(())]]
    expected = clone(lists)
    flexops.adam_(*lists, **numbers())
    adam_module._adam_reference(*expected, **numbers())
    assert_lists_close(lists, expected)


BAD_ARGUMENTS = [
    ("params", 1, lambda t: t.double(), TypeError, "float32, bfloat16 or float16, got float64"),
    ("grads", 2, lambda t: t.to(torch.int32), TypeError, "float32, bfloat16 or float16, got int32"),
    ("exp_avgs", 1, lambda t: t.bfloat16(), TypeError, "must be float32, got bfloat16"),
    ("exp_avg_sqs", 0, lambda t: t.half(), TypeError, "must be float32, got float16"),
    ("max_exp_avg_sqs", 3, lambda t: t.half(), TypeError, "must be float32, got float16"),
    ("state_steps", 1, lambda t: t.double(), TypeError, "must be float32, got float64"),
    ("state_steps", 1, lambda t: t.expand(2).clone(), ValueError, "must have one element"),
    ("grads", 1, lambda t: t[:-1], ValueError, "must have the shape of its parameter, [33, 65], got [32, 65]"),
    ("exp_avgs", 1, lambda t: t.t(), ValueError, "must have the shape of its parameter"),
    ("grads", 3, lambda t: t.to_sparse(), TypeError, "must be a dense (strided) tensor"),
    ("grads", 3, lambda _: None, TypeError, "must be a tensor, got NoneType"),
    ("copies", 1, lambda t: t[:-1], ValueError, "must have the shape of its parameter"),
    ("copies", 1, lambda t: t.long(), TypeError, "float32, bfloat16 or float16, got int64"),
]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(("name", "index", "change", "error", "text"), BAD_ARGUMENTS)
def test_wrong_tensors_are_named(name: str, index: int, change: Any, error: type[Exception], text: str, backend: str) -> None:
    lists = [*make_lists(torch.float32, torch.float32, amsgrad=True), [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]]
    before = clone(lists)
    changed = lists[adam_module._LIST_NAMES.index(name)]
    changed[index] = change(changed[index])
    call = flexops.adam_copy_ if backend == "native" else adam_module._adam_copy_reference
    with pytest.raises(error) as caught:
        call(*lists, **numbers(amsgrad=True))
    assert f"flexops::adam_copy_: {name}[{index}]" in str(caught.value)
    assert text in str(caught.value)
    assert torch.equal(lists[0][0], before[0][0])  # nothing was touched


@pytest.mark.parametrize(("position", "name"), list(enumerate(("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"))))
def test_wrong_lengths_are_named(position: int, name: str) -> None:
    lists = make_lists(torch.float32, torch.float32, amsgrad=True)
    lists[position] = lists[position][:-1]
    with pytest.raises(ValueError, match=r"flexops::adam_: \w+ must hold \d tensors, as params does, got \d") as caught:
        flexops.adam_(*lists, **numbers(amsgrad=True))
    assert name == "params" or name in str(caught.value)


def test_a_tensor_on_another_device_is_named() -> None:
    lists = make_lists(torch.float32, torch.float32)
    lists[1][2] = lists[1][2].to("meta")  # through the dispatcher a meta tensor would select the fake kernel
    with pytest.raises(ValueError, match=r"grads\[2\] must be on the device of params\[0\], cpu, got meta"):
        adam_module._adam_reference(*lists, **numbers())


def test_native_op_refuses_wrong_tensors_by_itself() -> None:
    if not loader.ensure("adam", "cpu"):
        pytest.skip("no native library")
    lists = make_lists(torch.float32, torch.float32)
    lists[2][1] = lists[2][1].half()
    with pytest.raises(RuntimeError, match=r"flexops::adam_: exp_avgs\[1\] must be float32, got float16"):
        torch.ops.flexops.adam_(*lists, **numbers())


@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("beta1", 1.0), ("beta2", -0.1), ("eps", -1e-8), ("weight_decay", -1.0), ("eps", float("nan"))])
def test_wrong_numbers_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"flexops::adam_: {name} must"):
        flexops.adam_(*make_lists(torch.float32, torch.float32), **numbers(**{name: value}))


@pytest.mark.parametrize("name", ["lr", "grad_scale", "found_inf"])
def test_wrong_number_tensors_are_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"flexops::adam_: {name} must be a float32 tensor of one element"):
        flexops.adam_(*make_lists(torch.float32, torch.float32), **(numbers() | {name: torch.zeros(2)}))


@needs_mutable_lists
def test_opcheck() -> None:
    lists = [tensors[:3] for tensors in make_lists(torch.float32, torch.bfloat16, amsgrad=True)]
    torch.library.opcheck(torch.ops.flexops.adam_.default, tuple(clone(lists)), numbers(amsgrad=True))
    torch.library.opcheck(torch.ops.flexops.adam_.default, tuple(clone([*lists[:4], [], lists[5]])), numbers() | {"found_inf": torch.zeros(())})
    copies = [tensor.bfloat16() for tensor in lists[0]]
    torch.library.opcheck(torch.ops.flexops.adam_copy_.default, (*clone(lists), copies), numbers(amsgrad=True))


@needs_mutable_lists
def test_compiles_without_graph_breaks() -> None:
    def train_step(lists: list[list[torch.Tensor]]) -> torch.Tensor:
        torch.ops.flexops.adam_(*lists, **numbers())
        return lists[0][0] * 2

    lists = [tensors[:2] for tensors in make_lists(torch.float32, torch.float32)]
    expected = clone(lists)
    doubled = torch.compile(train_step, fullgraph=True, backend="aot_eager")(lists)
    torch.testing.assert_close(doubled, train_step(expected))
    assert_lists_close(lists, expected)


@needs_mutable_lists
def test_public_function_compiles() -> None:
    def train_step(lists: list[list[torch.Tensor]]) -> torch.Tensor:
        flexops.adam_(*lists, **numbers())
        return lists[0][0] * 2

    lists = [tensors[:2] for tensors in make_lists(torch.float32, torch.float32)]
    expected = clone(lists)
    torch.testing.assert_close(torch.compile(train_step, backend="aot_eager")(lists), train_step(expected))


def test_backward_notices_that_a_saved_parameter_was_stepped() -> None:
    param = torch.nn.Parameter(torch.randn(4))
    loss = (param**2).sum()
    param.grad = torch.ones(4)
    optim.AdamW([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- the optimizers ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_is_a_drop_in(ours: Any, theirs: Any) -> None:
    params = make_params()
    assert isinstance(ours(params), theirs)
    ours(params, 1e-3, (0.9, 0.99), 1e-8, 0.1, True, foreach=True, maximize=True, capturable=True)
    ours(params, fused=True)
    ours([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "weight_decay": 0.3}], lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        ours(params, differentiable=True)
    with pytest.raises(ValueError, match="Invalid beta parameter"):
        ours(params, betas=(1.0, 0.9))


def test_groups_schedules_and_missing_gradients() -> None:
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        params = make_params()
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.3, "betas": (0.8, 0.9)}]
        optimizer = kind(groups, lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(6):
            set_grads(params, seed=step)
            params[step % 3].grad = None
            optimizer.step()
            schedule.step()
        results.append(params)
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_state_dicts_load_both_ways(ours: Any, theirs: Any, first: str) -> None:
    kinds = (ours, theirs) if first == "ours" else (theirs, ours)
    params = make_params()
    optimizer: Any = kinds[0](params, lr=0.05, amsgrad=True, weight_decay=0.1)
    expected = make_params()
    oracle: Any = theirs(expected, lr=0.05, amsgrad=True, weight_decay=0.1)
    for step in range(8):
        if step == 4:
            saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
            optimizer = kinds[1](params, lr=1.0)
            optimizer.load_state_dict(saved)
        for each in (params, expected):
            set_grads(each, seed=step)
        optimizer.step()
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


def test_low_precision_parameters_keep_float32_states_through_a_state_dict() -> None:
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params)
    set_grads(params, seed=1)
    optimizer.step()
    restored = optim.AdamW(params)
    restored.load_state_dict(optimizer.state_dict())
    for param in params:
        assert restored.state[param]["exp_avg"].dtype == torch.float32
        assert torch.equal(restored.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])
        assert torch.equal(restored.state[param]["exp_avg_sq"], optimizer.state[param]["exp_avg_sq"])


def test_copies_and_pickles() -> None:
    params = make_params()
    optimizer = optim.Adam(params, lr=0.1)
    set_grads(params, seed=1)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.copies == {}
        set_grads(other.param_groups[0]["params"], seed=2)
        other.step()


def test_mixed_precision_gradients_need_float32_parameters_only() -> None:
    params, expected = make_params(), make_params()
    optimizer, oracle = optim.AdamW(params), torch.optim.AdamW(expected)
    for step in range(5):
        set_grads(expected, seed=step)
        for param, other in zip(params, expected, strict=True):
            other.grad = other.grad.bfloat16().float()
            grad = other.grad.bfloat16()
            lists = [[param.detach()], [grad]]
            state = optimizer.state[param]
            if not state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            flexops.adam_(*lists, [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], lr=1e-3, weight_decay=1e-2, decoupled=True)
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale: bool) -> None:
    results = []
    for kind, options in ((optim.AdamW, {}), (torch.optim.AdamW, {"fused": True})):
        params = make_params()
        optimizer = kind(params, lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            loss = sum((param * torch.randn(param.shape, generator=generator)).sum() for param in params)
            scaler.scale(loss).backward()
            if step == 3:
                params[1].grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
        results.append((params, scaler.get_scale(), optimizer.state[params[0]]["step"].item()))
    (params, scale, steps), (expected, wanted_scale, wanted_steps) = results
    assert (scale, steps) == (wanted_scale, wanted_steps)
    assert steps == 5
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


def test_closure_and_hooks() -> None:
    params = make_params()
    optimizer = optim.Adam(params)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert seen == [1]


def test_sparse_gradients_are_refused_clearly() -> None:
    param = torch.nn.Parameter(torch.randn(5, 3))
    param.grad = torch.eye(5, 3).to_sparse()
    with pytest.raises(RuntimeError, match=r"AdamW does not support sparse gradients; torch.optim.SparseAdam does"):
        optim.AdamW([param]).step()


def test_double_parameters_are_refused_clearly() -> None:
    param = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    with pytest.raises((TypeError, RuntimeError), match=r"params\[0\] must be float32, bfloat16 or float16, got float64"):
        optim.AdamW([param]).step()


def test_complex_parameters_step_as_pairs() -> None:
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))
        optimizer = kind([param], lr=0.1)
        for _ in range(4):
            param.grad = torch.randn(9, dtype=torch.complex64)
            optimizer.step()
        results.append(param)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("how", ["dtype", "list", "mapping"])
def test_copies_follow_the_parameters(how: str) -> None:
    params, expected = make_params(), make_params()
    own = [param.detach().bfloat16() for param in params]
    optimizer = optim.AdamW(params, lr=0.1, copies={"dtype": torch.bfloat16, "list": own, "mapping": {params[1]: own[1]}}[how])
    oracle = torch.optim.AdamW(expected, lr=0.1)
    for step in range(3):
        for each in (params, expected):
            set_grads(each, seed=step)
        optimizer.step()
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)
    assert len(optimizer.copies) == (1 if how == "mapping" else len(params))
    assert all(torch.equal(written, param.detach().bfloat16()) for param, written in optimizer.copies.items())
    assert "copies" not in optimizer.state_dict()["param_groups"][0]
    with pytest.raises(ValueError, match=f"copies must hold {len(params)} tensors"):
        optim.AdamW(params, copies=own[:2])


# --- instruction sets -------------------------------------------------------------------------------------------------------------------------

_ISA_PROGRAM = """
import sys; sys.path.insert(0, {here!r})
import test_adam, torch
from flexops.op_builder import loader
assert loader.ensure("adam", "cpu")
for param_dtype in test_adam.DTYPES:
    for grad_dtype in test_adam.DTYPES:
        for amsgrad in (False, True):
            test_adam.test_native_matches_reference(param_dtype, grad_dtype, amsgrad)
for copy_dtype in test_adam.DTYPES:
    test_adam.test_copy_is_the_new_parameter_rounded(torch.float32, copy_dtype)
test_adam.test_large_tensor_splits_into_the_same_result()
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])  # the best one is what every other test runs
def test_lower_instruction_sets(isa: str) -> None:
    if not loader.ensure("adam", "cpu"):
        pytest.skip("no native library")
    program = _ISA_PROGRAM.format(here=os.path.dirname(__file__))
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "FLEXOPS_CPU_ISA": isa}, timeout=300)
