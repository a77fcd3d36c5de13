"""flexops.adam8bit_ and flexops.optim.AdamW8bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from step_contract import ON_BOTH, Step, StepContract, clone, make_lists, make_params, set_grads
from torch import Tensor

import flexops
from flexops import optim
from flexops.bench.reference import OnReference
from flexops.ops import adam8bit

LISTS = {
    "params": None,
    "grads": None,
    "exp_avgs": torch.int8,
    "exp_avg_sqs": torch.uint8,
    "exp_avg_scales": torch.float32,
    "exp_avg_sq_scales": torch.float32,
    "state_steps": torch.float32,
}


def exact(row: list[Tensor], n: dict[str, Any]) -> list[Tensor]:
    """The codes of before mean what they mean; of those of after, only the scales are exact."""
    param, grad, codes1, codes2, scales1, scales2, step = row
    beta1, beta2, count = n["beta1"], n["beta2"], step + 1

    def scaled(value: Tensor, scales: Tensor) -> Tensor:
        return (value.flatten() * scales.repeat_interleave(256)[: value.numel()]).view(value.shape)

    root1, root2 = codes1.double() / 127, codes2.double() / 255
    m = beta1 * scaled(root1 * root1.abs(), scales1) + (1 - beta1) * grad
    v = beta2 * scaled(root2**4, scales2) + (1 - beta2) * grad * grad
    value = param * (1 - n["lr"] * n["weight_decay"] * n["decoupled"])
    value = value - n["lr"] / (1 - beta1**count) * m / (
        v.sqrt() / (1 - beta2**count).sqrt() + n["eps"]
    )
    largest = [
        (
            torch.stack([block.abs().max() for block in each.flatten().split(256)])
            if each.numel()
            else scales1
        )
        for each in (m, v)
    ]
    return [value, grad, codes1, codes2, *largest, count]


class TestStep(StepContract):
    step = Step(
        "adam8bit",
        flexops.adam8bit_,
        LISTS,
        {
            "lr": 0.01,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "decoupled": True,
        },
        optim.AdamW8bit,
        exact,
        {"betas": (0.9, 0.999), "weight_decay": 0.1, "min_8bit_size": 100},
        bad_numbers=("lr", "weight_decay", "eps"),
    )


@ON_BOTH
def test_plain_adam(device):
    lists = make_lists(TestStep.step, torch.float32, torch.float32, device)
    expected = clone(lists)
    flexops.adam8bit_(*lists, lr=0.01, weight_decay=0.2)
    with OnReference():
        flexops.adam8bit_(*expected, lr=0.01, weight_decay=0.2)
    torch.testing.assert_close(lists[0], expected[0], rtol=4e-6, atol=2e-6)


def _average(values: Tensor, seeds: int, device: str) -> tuple[Tensor, Tensor]:
    """What codes of the averages of one step from zero mean, on average over many roundings."""
    total1, total2 = torch.zeros_like(values), torch.zeros_like(values)
    for seed in range(seeds):
        lists = [
            [torch.zeros_like(values)],
            [values],
            *(
                [torch.zeros(values.shape, dtype=d, device=device)]
                for d in (torch.int8, torch.uint8)
            ),
        ]
        lists += [
            [torch.zeros(adam8bit.blocks(values.numel()), device=device)] for _ in range(2)
        ] + [[torch.tensor(float(seed), device=device)]]
        flexops.adam8bit_(*lists, lr=0.0, beta1=0.0, beta2=0.0)
        total1 += adam8bit.dequantize_averages(lists[2][0], lists[4][0])
        total2 += adam8bit.dequantize_averages(lists[3][0], lists[5][0])
    return total1 / seeds, total2 / seeds


@ON_BOTH
def test_rounding_is_right_on_average(device):
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(device)
    seeds = 400
    first, second = _average(values, seeds, device)
    largest = values.view(-1, 256).abs().amax(1).repeat_interleave(256)
    # between neighbouring codes
    gap1 = (2 * (values.abs() / largest).sqrt() / 127 + 1 / 127**2) * largest
    root = (values.abs() / largest).sqrt()
    gap2 = ((root + 1 / 255) ** 4 - root**4) * largest**2
    assert ((first - values).abs() <= 5 * 0.5 * gap1 / math.sqrt(seeds) + 1e-7).all()
    assert ((second - values.square()).abs() <= 5 * 0.5 * gap2 / math.sqrt(seeds) + 1e-7).all()


@ON_BOTH
def test_codes_that_are_exact_stay(device):
    codes = torch.cat([torch.arange(-127, 128), torch.tensor([127])]).to(torch.int8).to(device)
    scale = torch.full((1,), 3.0, device=device)
    exact = adam8bit.dequantize_averages(codes, scale)
    lists = [
        [torch.zeros(256, device=device)],
        [exact],
        [torch.zeros_like(codes)],
        [torch.zeros(256, dtype=torch.uint8, device=device)],
    ]
    lists += [
        [torch.zeros(1, device=device)],
        [torch.zeros(1, device=device)],
        [torch.zeros((), device=device)],
    ]
    flexops.adam8bit_(*lists, lr=0.0, beta1=0.0)
    assert ((lists[2][0].int() - codes.int()).abs() <= 1).all()
    assert (lists[2][0] == codes).float().mean() > 0.95
    assert lists[2][0][0] == -127
    assert lists[2][0][127] == 0


@ON_BOTH
def test_a_second_moment_never_becomes_zero(device):
    grad = torch.full((256,), 1e-12, device=device)
    grad[7] = 1.0
    lists = [
        [torch.zeros(256, device=device)],
        [grad],
        *([torch.zeros(256, dtype=d, device=device)] for d in (torch.int8, torch.uint8)),
    ]
    lists += [
        [torch.zeros(1, device=device)],
        [torch.zeros(1, device=device)],
        [torch.zeros((), device=device)],
    ]
    flexops.adam8bit_(*lists, lr=0.1)
    assert (lists[3][0] >= 1).all()


@ON_BOTH
@pytest.mark.parametrize("size", [1e-5, 1e-12, 1e-16, 1e-18])
def test_tiny_gradients(size, device):
    """Down to where squares leave float32."""
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(device) * size
    lists = [
        [torch.ones(1000, device=device)],
        [grad],
        *([torch.zeros(1000, dtype=d, device=device)] for d in (torch.int8, torch.uint8)),
    ]
    lists += [
        [torch.zeros(4, device=device)],
        [torch.zeros(4, device=device)],
        [torch.zeros((), device=device)],
    ]
    expected = clone(lists)
    for _ in range(3):
        flexops.adam8bit_(*lists, lr=0.1)
        with OnReference():
            flexops.adam8bit_(*expected, lr=0.1)
        torch.testing.assert_close(lists[0], expected[0], rtol=1e-3, atol=1e-4)
        first = adam8bit.dequantize_averages(lists[2][0], lists[4][0])
        assert (
            first - adam8bit.dequantize_averages(expected[2][0], expected[4][0])
        ).abs().max() < 0.1 * size


def test_small_parameters_are_stepped_as_adamw():
    params, expected = (
        make_params("cpu", shapes=[(63, 65), (4095,), ()]),
        make_params("cpu", shapes=[(63, 65), (4095,), ()]),
    )
    optimizer, oracle = optim.AdamW8bit(params, lr=0.1), optim.AdamW(expected, lr=0.1)
    for step in range(3):
        for each in (params, expected):
            set_grads(each, seed=step)
        optimizer.step()
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        assert torch.equal(left, right)
        assert optimizer.state[left]["exp_avg"].dtype == torch.float32


def test_states_take_two_bytes_an_element():
    param = torch.nn.Parameter(torch.randn(512, 512))
    set_grads([param], seed=0)
    optimizer = optim.AdamW8bit([param])
    optimizer.step()
    size = sum(value.numel() * value.element_size() for value in optimizer.state[param].values())
    assert size / param.numel() < 2.04


@ON_BOTH
def test_channels_last_parameters(device):
    torch.manual_seed(0)
    start = torch.randn(32, 16, 3, 3, device=device)
    params = [
        torch.nn.Parameter(start.to(memory_format=torch.channels_last)),
        torch.nn.Parameter(start.permute(0, 2, 3, 1).contiguous()),
    ]
    optimizers = [optim.AdamW8bit([param], lr=0.1) for param in params]
    for step in range(3):
        grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).to(device)
        params[0].grad, params[1].grad = grad, grad.permute(0, 2, 3, 1).contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(params[0].permute(0, 2, 3, 1), params[1])  # blocks follow memory


def _train(kind: Any, device: str) -> list[float]:
    """A small network on a task that it can learn: 200 steps, the loss of each."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    embedding = torch.nn.Embedding(64, 64)
    network = torch.nn.Sequential(
        torch.nn.Linear(128, 256),
        torch.nn.GELU(),
        torch.nn.LayerNorm(256),
        torch.nn.Linear(256, 64),
    ).to(device)
    embedding.to(device)
    optimizer = kind([*embedding.parameters(), *network.parameters()], lr=3e-3, weight_decay=0.01)
    successor = torch.randint(0, 64, (64, 64), generator=generator).to(device)
    losses = []
    for _ in range(200):
        pairs = torch.randint(0, 64, (128, 2), generator=generator).to(device)
        loss = torch.nn.functional.cross_entropy(
            network(embedding(pairs).flatten(1)), successor[pairs[:, 0], pairs[:, 1]]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@ON_BOTH
def test_trains_as_adamw_does(device):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is small
    ours, theirs = _train(optim.AdamW8bit, device), _train(torch.optim.AdamW, device)
    torch.set_num_threads(threads)
    assert theirs[0] > 4.0  # that of a guess
    end, wanted = sum(ours[-50:]) / 50, sum(theirs[-50:]) / 50
    assert wanted < 3.5  # it does learn
    assert abs(end - wanted) < 0.03 * wanted


@ON_BOTH
def test_an_average_that_decays_is_followed(device):
    """Half of a block gets no gradient any more. Rounded to nearest, its codes would never move
    again."""
    param = torch.nn.Parameter(torch.zeros(8192, device=device))
    optimizer = optim.AdamW8bit([param], lr=0.0, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(0)
    for step in range(500):
        grad = torch.randn(8192, generator=generator).to(device)
        if step >= 200:
            grad[::2] = 0.0
        param.grad = grad
        optimizer.step()
    state = optimizer.state[param]
    second = adam8bit.dequantize_averages(state["exp_avg_sq_codes"], state["exp_avg_sq_scale"])
    expected = 0.99**300  # of what it was
    assert 0.3 * expected < second[::2].mean() < 3 * expected
    assert abs(second[1::2].mean() - 1.0) < 0.1
    first = adam8bit.dequantize_averages(state["exp_avg_codes"], state["exp_avg_scale"])
    assert first[::2].abs().max() < 1e-3


def test_scales_that_are_too_few_are_named():
    lists = make_lists(TestStep.step, torch.float32, torch.float32, "cpu")
    lists[4][9] = torch.zeros(8)
    with pytest.raises(
        ValueError,
        match=r"exp_avg_scales\[9\] must be a contiguous .* of at least 9 elements, got shape \[8\]",
    ):
        flexops.adam8bit_(*lists, lr=0.1)
    lists[4][9] = torch.zeros(10)  # more is room
    flexops.adam8bit_(*lists, lr=0.1)
    assert lists[4][9][8] > 0
    assert lists[4][9][9] == 0


# ---- state dicts of other formats ----


def _trained(kind: Any, shape: tuple[int, ...] = (70, 80), **options: Any) -> tuple[Any, Any]:
    """A parameter and its optimizer, after three steps of gradients of very different sizes."""
    param = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    if len(shape) == 4:
        param = torch.nn.Parameter(param.detach().to(memory_format=torch.channels_last))
    optimizer = kind([param], lr=0.01, **options)
    for step in range(3):
        set_grads([param], seed=step)
        optimizer.step()
    return param, optimizer


def _loaded(kind: Any, like: Tensor, saved: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    param = torch.nn.Parameter(like.detach().clone())
    optimizer = kind([param], lr=0.01, **options)
    optimizer.load_state_dict(copy.deepcopy(saved))
    return param, optimizer


@pytest.mark.parametrize("shape", [(70, 80), (8, 16, 8, 8)])
@pytest.mark.parametrize("theirs", [torch.optim.AdamW, optim.AdamW])
def test_float_states_are_quantized_when_they_are_loaded(theirs, shape):
    trained, source = _trained(theirs, shape)
    param, optimizer = _loaded(optim.AdamW8bit, trained, source.state_dict())
    state, wanted = optimizer.state[param], source.state[trained]
    dtypes = {name: value.dtype for name, value in state.items()}
    assert dtypes.pop("exp_avg_codes") == torch.int8
    assert dtypes.pop("exp_avg_sq_codes") == torch.uint8
    assert set(dtypes) == {"step", "exp_avg_scale", "exp_avg_sq_scale"}
    assert state["step"] == 3
    for name, power, levels in (("exp_avg", 2, 127), ("exp_avg_sq", 4, 255)):
        codes, scales = state[f"{name}_codes"], state[f"{name}_scale"]
        order = sorted(range(codes.dim()), key=codes.stride, reverse=True)
        found = adam8bit.dequantize_averages(codes.permute(order), scales).flatten()
        exact = wanted[name].permute(order).flatten()
        largest = scales.repeat_interleave(256)[: exact.numel()]
        root = (exact.abs() / largest).pow(1 / power)
        gap = ((root + 1 / levels) ** power - root**power) * largest  # to the next code
        assert ((found - exact).abs() <= gap * 1.01).all()
    for each, stepper in ((param, optimizer), (trained, source)):
        set_grads([each], seed=9)
        stepper.step()
    assert (param - trained).abs().max() < 2e-3  # of steps of up to 0.01
    assert (param - trained).abs().mean() < 2e-4


@pytest.mark.parametrize("shape", [(70, 80), (8, 16, 8, 8)])
@pytest.mark.parametrize("ours", [optim.AdamW, optim.Adam, optim.LAMB])
def test_8bit_states_are_dequantized_when_they_are_loaded(ours, shape):
    trained, source = _trained(optim.AdamW8bit, shape)
    param, optimizer = _loaded(ours, trained, source.state_dict())
    state, saved = optimizer.state[param], source.state[trained]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    for name in ("exp_avg", "exp_avg_sq"):
        codes = saved[f"{name}_codes"]
        order = sorted(range(codes.dim()), key=codes.stride, reverse=True)
        exact = adam8bit.dequantize_averages(codes.permute(order), saved[f"{name}_scale"])
        assert torch.equal(state[name].permute(order), exact)
    if ours is optim.AdamW:  # the step itself is AdamW8bit's
        for each, stepper in ((param, optimizer), (trained, source)):
            set_grads([each], seed=9)
            stepper.step()
        torch.testing.assert_close(param, trained, rtol=4e-6, atol=2e-6)


def _as_saved_before(saved: dict[str, Any]) -> dict[str, Any]:
    """As AdamW8bit named its states once."""
    saved = copy.deepcopy(saved)
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state.pop(f"{name}_codes")
    return saved


def test_checkpoints_of_before_load_into_adamw8bit():
    trained, source = _trained(optim.AdamW8bit)
    param, optimizer = _loaded(optim.AdamW8bit, trained, _as_saved_before(source.state_dict()))
    for name, value in source.state[trained].items():
        assert torch.equal(optimizer.state[param][name], value)
        assert optimizer.state[param][name].dtype == value.dtype
    into_adamw = _loaded(optim.AdamW, trained, _as_saved_before(source.state_dict()))
    assert into_adamw[1].state[into_adamw[0]]["exp_avg"].dtype == torch.float32


def test_torchs_adamw_does_not_take_codes_for_averages():
    trained, source = _trained(optim.AdamW8bit)
    param, optimizer = _loaded(torch.optim.AdamW, trained, source.state_dict())
    set_grads([param], seed=9)
    with pytest.raises(KeyError, match="exp_avg"):
        optimizer.step()


BITSANDBYTES = {
    "step": 3,
    "state1": torch.zeros(70, 80, dtype=torch.uint8),
    "state2": torch.zeros(70, 80, dtype=torch.uint8),
    "qmap1": torch.zeros(256),
    "qmap2": torch.zeros(256),
    "absmax1": torch.zeros(22),
    "absmax2": torch.zeros(22),
}


@pytest.mark.parametrize("kind", [optim.AdamW8bit, optim.AdamW, optim.LAMB, optim.Lion])
def test_bitsandbytes_states_are_named_when_they_are_loaded(kind):
    trained, source = _trained(kind)
    saved = source.state_dict()
    saved["state"] = {0: BITSANDBYTES}
    message = r"param_groups\[0\]: params\[0\] must have .*exp_avg.* bitsandbytes' format. fix: "
    before = copy.deepcopy(source.state_dict())
    with pytest.raises(ValueError, match=message):
        source.load_state_dict(saved)
    after = source.state_dict()
    for name, value in before["state"][0].items():  # nothing was loaded
        assert torch.equal(after["state"][0][name], value)
    saved["state"] = {}
    param, optimizer = _loaded(kind, trained, saved)  # the fix
    set_grads([param], seed=9)
    optimizer.step()


def test_states_of_other_optimizers_are_rejected_when_they_are_loaded():
    pairs = {
        (torch.optim.SGD, optim.AdamW): ({"momentum": 0.9}, "got momentum_buffer"),
        (torch.optim.NAdam, optim.Adam): ({}, "mu_product"),
        (torch.optim.AdamW, optim.Lion): ({}, "must have exp_avg, got exp_avg, exp_avg_sq, step"),
        (torch.optim.AdamW, optim.Adagrad): ({}, "must have step, sum"),
        (optim.AdamW8bit, optim.Lion): ({}, "the format of flexops.optim.AdamW8bit"),
        (torch.optim.Adagrad, optim.AdamW8bit): ({}, "got step, sum"),
    }
    for (theirs, ours), (options, message) in pairs.items():
        trained, source = _trained(theirs, **options)
        with pytest.raises(ValueError, match=message):
            _loaded(ours, trained, source.state_dict())
    trained, source = _trained(torch.optim.AdamW, amsgrad=True)
    with pytest.raises(ValueError, match="AdamW8bit has no amsgrad"):
        _loaded(optim.AdamW8bit, trained, source.state_dict())
    saved = source.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(70, 80, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"exp_avg as a floating-point tensor, got torch\.int32"):
        _loaded(optim.AdamW, trained, saved)
