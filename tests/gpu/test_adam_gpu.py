"""flexops.adam_ and flexops.optim on a GPU: against torch's fused optimizers and against the reference in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flexops
from flexops import optim
from flexops.op_builder import loader
from flexops.ops import adam as adam_module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Sizes around a vector (4), a thread block's stride and a chunk, and shapes that end in the middle of each.
SHAPES = [(1,), (3,), (4,), (5, 7), (1023,), (2048,), (16384,), (16385,), (1000, 333), (0,), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.05, "eps": 1e-4, "betas": (0.5, 0.9)},
]


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    assert loader.ensure("adam", "cuda"), [status.reason for status in flexops.status() if (status.op, status.device) == ("adam", "cuda")]


def make_params(count: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for _ in range(count) for shape in SHAPES]


def set_grads(params: list[Any], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, device="cuda").to(param.dtype)


def make_lists(param_dtype: torch.dtype, grad_dtype: torch.dtype, *, amsgrad: bool = False, shapes: list[Any] = SHAPES) -> list[list[torch.Tensor]]:
    torch.manual_seed(1)

    def draw(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]

    squares = [tensor.square() for tensor in draw()]
    return [
        draw(param_dtype),
        draw(grad_dtype),
        draw(),
        squares,
        [t * 1.01 for t in squares] if amsgrad else [],
        [torch.full((), 3.0, device="cuda") for _ in shapes],
    ]


def numbers(**changes: Any) -> dict[str, Any]:
    defaults = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False, "decoupled": False}
    return defaults | changes


def clone(lists: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def assert_lists_close(actual: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        for left, right in zip(found, wanted, strict=True):
            exact = left.dtype == torch.float32
            torch.testing.assert_close(left, right, rtol=3e-6 if exact else None, atol=1e-6 if exact else None)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_matches_torch_fused_over_many_steps(name: str, options: dict[str, Any]) -> None:
    params, expected = make_params(), make_params()
    optimizer = getattr(optim, name)(params, lr=0.01, **options)
    oracle = getattr(torch.optim, name)(expected, lr=0.01, fused=True, **options)
    for step in range(20):
        for each in (params, expected):
            set_grads(each, seed=step)
        optimizer.step()
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_matches_reference(param_dtype: torch.dtype, grad_dtype: torch.dtype, amsgrad: bool) -> None:
    lists = make_lists(param_dtype, grad_dtype, amsgrad=amsgrad)
    expected = clone(lists)
    options = numbers(amsgrad=amsgrad, weight_decay=0.1, decoupled=amsgrad, maximize=not amsgrad)
    flexops.adam_(*lists, **options)
    adam_module._adam_reference(*expected, **options)
    assert_lists_close(lists, expected)


@pytest.mark.parametrize("copy_dtype", DTYPES)
def test_copy_is_the_new_parameter_rounded(copy_dtype: torch.dtype) -> None:
    lists = make_lists(torch.float32, torch.bfloat16, amsgrad=True)
    copies = [torch.full_like(param, math.nan, dtype=copy_dtype) for param in lists[0]]
    flexops.adam_copy_(*lists, copies, **numbers(amsgrad=True))
    assert all(torch.equal(written, param.to(copy_dtype)) for written, param in zip(copies, lists[0], strict=True))


def test_mixed_dtypes_in_one_call() -> None:
    groups = [make_lists(p, g) for p in DTYPES for g in DTYPES]
    lists = [[tensor for group in groups for tensor in group[k]] for k in range(6)]
    expected = clone(lists)
    flexops.adam_(*lists, **numbers(weight_decay=0.1))
    adam_module._adam_reference(*expected, **numbers(weight_decay=0.1))
    assert_lists_close(lists, expected)


def test_more_tensors_than_one_launch_holds() -> None:
    shapes = [(17 + i % 40,) for i in range(5000)]
    lists = make_lists(torch.float32, torch.float32, shapes=shapes)
    expected = clone(lists)
    flexops.adam_(*lists, **numbers())
    adam_module._adam_reference(*expected, **numbers())
    for found, wanted in zip(lists[:4], expected[:4], strict=True):
        torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=3e-6, atol=1e-6)
    assert torch.stack(lists[5]).eq(4).all()


@pytest.mark.parametrize("which", [(0,), (1,), (2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("layout", ["transposed", "with gaps", "offset"])
def test_odd_strides_and_offsets(layout: str, which: tuple[int, ...]) -> None:
    change = {
        "transposed": lambda t: t.t().contiguous().t(),
        "with gaps": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
        "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    }[layout]
    tensors = [torch.rand(137, 241, device="cuda") for _ in range(4)]
    odd = [[change(tensor.clone()) if i in which else tensor.clone()] for i, tensor in enumerate(tensors)]
    plain = [[tensor.clone()] for tensor in tensors]
    for lists in (odd, plain):
        flexops.adam_(*lists, [], [torch.zeros((), device="cuda")], **numbers())
    assert_lists_close(odd, plain)


def test_more_than_2_to_the_31_elements() -> None:
    count = 2**31 + 12_345
    needed = count * (2 + 2 + 4 + 4) + 2**30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    param, grad = (torch.zeros(count, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    states = [torch.zeros(count, device="cuda") for _ in range(2)]
    places = torch.tensor([0, 2**30 + 1, 2**31 - 1, 2**31, count - 1], device="cuda")
    grad[places] = torch.tensor([1.0, 2.0, -3.0, 4.0, -5.0], device="cuda").bfloat16()
    flexops.adam_([param], [grad], [states[0]], [states[1]], [], [torch.zeros((), device="cuda")], lr=0.5)
    expected = torch.tensor([-0.5, -0.5, 0.5, -0.5, 0.5], device="cuda")
    assert torch.equal(param[places].float(), expected)
    assert sum(int(part.count_nonzero()) for part in param.split(2**28)) == len(places)
    torch.testing.assert_close(states[0][places], grad[places].float() * 0.1)


def test_found_inf_and_grad_scale() -> None:
    lists = make_lists(torch.float32, torch.float16)
    plain = clone(lists)
    lists[1] = [grad * 8 for grad in lists[1]]
    before = clone(lists)
    scale = torch.full((1,), 8.0, device="cuda")
    flexops.adam_(*lists, **numbers(), grad_scale=scale, found_inf=torch.ones((), device="cuda"))
    for found, wanted in zip(lists, before, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))
    flexops.adam_(*lists, **numbers(), grad_scale=scale, found_inf=torch.zeros((), device="cuda"))
    flexops.adam_(*plain, **numbers())
    assert_lists_close(lists, plain)


def test_grad_scaler_without_synchronisation() -> None:
    results = []
    for kind, options in ((optim.AdamW, {}), (torch.optim.AdamW, {"fused": True})):
        params = make_params()
        optimizer = kind(params, lr=0.1, **options)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            torch.manual_seed(step)
            scaler.scale(sum((param * torch.randn_like(param)).sum() for param in params)).backward()
            if step == 3:
                params[3].grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        results.append((params, scaler.get_scale(), optimizer.state[params[0]]["step"].item()))
    assert results[0][1:] == results[1][1:]
    for left, right in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


def test_a_step_never_waits_for_the_device() -> None:
    params = make_params()
    optimizer = optim.AdamW(params, lr=torch.tensor(0.1, device="cuda"))
    set_grads(params, seed=0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_graph_with_a_learning_rate_that_changes() -> None:
    params, expected = make_params(), make_params()
    lr = torch.tensor(0.1, device="cuda")
    optimizer, oracle = optim.AdamW(params, lr=lr, capturable=True), torch.optim.AdamW(expected, lr=0.1, fused=True)
    set_grads(params, seed=0)
    set_grads(expected, seed=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()  # makes the states
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    oracle.step()
    for step in range(1, 6):
        lr.fill_(0.1 / step)
        oracle.param_groups[0]["lr"] = 0.1 / step
        for param, other in zip(params, expected, strict=True):
            grad = torch.randn_like(other)
            param.grad.copy_(grad)
            other.grad = grad
        graph.replay()
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)
    assert optimizer.state[params[0]]["step"].item() == 6


def test_runs_on_the_current_stream() -> None:
    lists = [[torch.zeros(2**24, device="cuda")] for _ in range(4)]
    step = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # the gradient arrives late; a step on any other stream would not see it
        lists[1][0].fill_(1.0)
        flexops.adam_(*lists, [], [step], lr=0.5)
    torch.cuda.synchronize()
    torch.testing.assert_close(lists[0][0], torch.full_like(lists[0][0], -0.5))


def test_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    lists = [[torch.ones(1000, device="cuda:1")] for _ in range(4)]
    flexops.adam_(*lists, [], [torch.zeros((), device="cuda:1")], lr=0.5)
    assert lists[0][0].isfinite().all()
    assert (lists[0][0] < 1).all()


def test_steps_on_the_wrong_device_are_named() -> None:
    lists = make_lists(torch.float32, torch.float32)
    lists[5][2] = torch.zeros(())
    with pytest.raises(ValueError, match=r"flexops::adam_: state_steps\[2\] must be on the device of params\[0\], cuda:0, got cpu"):
        flexops.adam_(*lists, **numbers())


def test_state_dict_of_torch_with_steps_on_the_cpu() -> None:
    params, expected = make_params(), make_params()
    first, oracle = torch.optim.AdamW(params, lr=0.1), torch.optim.AdamW(expected, lr=0.1)
    for each, optimizer in ((params, first), (expected, oracle)):
        set_grads(each, seed=0)
        optimizer.step()
    second = optim.AdamW(params, lr=0.1)
    second.load_state_dict(first.state_dict())
    for each, optimizer in ((params, second), (expected, oracle)):
        set_grads(each, seed=1)
        optimizer.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


def test_parameters_on_cpu_and_gpu_in_one_group() -> None:
    params = [torch.nn.Parameter(torch.ones(100, device=device)) for device in ("cpu", "cuda", "cpu", "cuda")]
    optimizer = optim.AdamW(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in params[1:]:
        torch.testing.assert_close(param.detach().cpu(), params[0].detach())


def test_compiles_without_graph_breaks() -> None:
    def train_step(lists: list[list[torch.Tensor]]) -> torch.Tensor:
        torch.ops.flexops.adam_(*lists, **numbers())
        return lists[0][3] * 2

    lists = make_lists(torch.float32, torch.float32)
    expected = clone(lists)
    torch.testing.assert_close(torch.compile(train_step, fullgraph=True)(lists), train_step(expected))
    assert_lists_close(lists, expected)
