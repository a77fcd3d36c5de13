"""One rank of the tests of sharded parameters: ``python sharded_worker.py RANK WORLD STORE
cpu|cuda``. Exits with 0 if everything holds.

With ``FULLY_SHARD=0`` it leaves out what is under ``fully_shard``.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flexops
from flexops import optim

if hasattr(torch.distributed.tensor, "DTensor"):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
else:  # torch 2.4
    from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
if hasattr(torch.distributed.fsdp, "fully_shard"):
    from torch.distributed.fsdp import fully_shard
else:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": functools.partial(optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": functools.partial(optim.AdamW, lr=0.1, weight_decay=0.1),
    "Lion": functools.partial(optim.Lion, lr=0.1, weight_decay=0.1),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "LAMB": functools.partial(optim.LAMB, lr=0.1, weight_decay=0.1),
    "Muon": functools.partial(optim.Muon, lr=0.1),
    "AdamW8bit": functools.partial(optim.AdamW8bit, lr=0.1, min_8bit_size=64),
    "AdamW16bit": functools.partial(
        optim.AdamW, lr=0.1, state_dtype=torch.bfloat16, stochastic_rounding=False
    ),
}
ROUGH = ("AdamW8bit", "AdamW16bit", "Muon")
"""Those that make of gradients which differ by a rounding steps that differ by more."""
# Even, uneven, fewer rows than ranks, and by columns.
SHARDED = (((64, 48), 0), ((33, 20), 0), ((1, 100), 0), ((16, 70), 1))


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Setting:
    """The parameters of one test: DTensors, and the same ones whole on every rank."""

    def __init__(self, mesh: DeviceMesh, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.mesh = device, mesh
        self.places: list[Any] = [
            [*[Replicate()] * (mesh.ndim - 1), Shard(dim)] for _, dim in SHARDED
        ]
        self.places += [[Replicate()] * mesh.ndim, None]
        self.shapes = [*(shape for shape, _ in SHARDED), (300,), (40, 10)]
        values = [draw(shape, i).to(dtype).to(device) for i, shape in enumerate(self.shapes)]
        self.plain = [torch.nn.Parameter(value.clone()) for value in values]
        self.params = [
            torch.nn.Parameter(self.place(value, place))
            for value, place in zip(values, self.places, strict=True)
        ]

    def place(self, value: Tensor, place: Any) -> Tensor:
        return (
            value.clone() if place is None else distribute_tensor(value.clone(), self.mesh, place)
        )

    def set_grads(self, seed: int, scale: float = 1.0) -> None:
        for i, (param, plain, place) in enumerate(
            zip(self.params, self.plain, self.places, strict=True)
        ):
            grad = (draw(self.shapes[i], 100 * seed + i) * scale).to(plain.dtype).to(self.device)
            param.grad, plain.grad = self.place(grad, place), grad

    def local(self) -> list[torch.nn.Parameter]:
        """This rank's parts, as plain parameters."""
        return [torch.nn.Parameter(_part(param).detach().clone()) for param in self.params]


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_steps(mesh: DeviceMesh, device: str, name: str, dtype: torch.dtype) -> None:
    """A sharded parameter is stepped as the whole one would be; with 8-bit states, whose blocks are
    each rank's own, as the part would be."""
    setting = Setting(mesh, device, dtype)
    alone = setting.local() if name == "AdamW8bit" else setting.plain
    make = (
        functools.partial(OPTIMIZERS[name], min_8bit_size=0)
        if name == "AdamW8bit"
        else OPTIMIZERS[name]
    )
    optimizer, oracle = make(setting.params), make(alone)
    for step in range(4):
        setting.set_grads(step)
        if name == "AdamW8bit":
            for param, part in zip(setting.params, alone, strict=True):
                part.grad = _part(param.grad)
        optimizer.step()
        oracle.step()
        if step == 1:  # a state dict of sharded states keeps them
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(setting.params)
            optimizer.load_state_dict(saved)
    for param, plain in zip(setting.params, alone, strict=True):
        found = _part(param) if name == "AdamW8bit" else whole(param)
        exact = dtype == torch.float32
        rtol, atol = (1e-5, 2e-6) if exact else (2e-2, 2e-2)
        if exact and name == "Muon" and device == "cuda":  # it iterates in float16
            atol = 1e-3
        torch.testing.assert_close(found, plain.detach(), rtol=rtol, atol=atol)
        for state in optimizer.state[param].values():
            assert not isinstance(param, DTensor) or isinstance(state, DTensor) or not state.dim()


def check_clipping(mesh: DeviceMesh, device: str, norm_type: float) -> None:
    for scale in (0.001, 1.0):
        setting = Setting(mesh, device)
        setting.set_grads(3, scale)
        norm = optim.clip_grad_norm_(setting.params, 1.0, norm_type)
        wanted = torch.nn.utils.clip_grad_norm_(setting.plain, 1.0, norm_type)
        assert not isinstance(norm, DTensor)
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=1e-6)
        for param, plain in zip(setting.params, setting.plain, strict=True):
            torch.testing.assert_close(whole(param.grad), plain.grad, rtol=2e-5, atol=1e-7)
    if dist.get_rank() == dist.get_world_size() - 1:  # on one rank only
        _part(setting.params[0].grad)[0, 0] = math.nan
    assert optim.clip_grad_norm_(setting.params, 1.0, norm_type).isnan()


def check_sums_that_are_not_added_up(mesh: DeviceMesh, device: str) -> None:
    """Gradients that each rank has a summand of."""
    value, ranks = draw((30, 40), 0).to(device), dist.get_world_size()
    for place in ([Replicate()], [Shard(0)]):
        param, plain = (
            torch.nn.Parameter(distribute_tensor(value.clone(), mesh, place)),
            torch.nn.Parameter(value.clone()),
        )
        plain.grad = draw((30, 40), 5).to(device)
        param.grad = (
            DTensor.from_local(plain.grad / ranks, mesh, [Partial()])
            if place == [Replicate()]
            else distribute_tensor(plain.grad, mesh, [Shard(1)])
        )
        torch.testing.assert_close(
            optim.clip_grad_norm_([param], 1.0), torch.nn.utils.clip_grad_norm_([plain], 1.0)
        )
        optim.LAMB([param], lr=0.1).step()
        optim.LAMB([plain], lr=0.1).step()
        torch.testing.assert_close(whole(param), plain.detach())


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 33), torch.nn.GELU(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 7)
    )


@functools.cache
def _times(mesh: DeviceMesh, device: str) -> float:
    """What fully_shard makes of a gradient that is the same on all ranks: its mean; torch 2.7 on
    the CPU its sum."""
    model, plain = (torch.nn.Linear(2, 1, bias=False).to(device) for _ in range(2))
    fully_shard(model, mesh=mesh)
    for each in (model, plain):
        each(torch.ones(1, 2, device=device)).sum().backward()
    (times,) = set((whole(model.weight.grad) / plain.weight.grad).flatten().tolist())  # type: ignore[arg-type, operator]
    assert times == 1 or (times == mesh.size() and torch.__version__.startswith("2.7."))
    return float(times)


def mean_gradients(model: torch.nn.Module, mesh: DeviceMesh, device: str) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad /= _times(mesh, device)


def check_fully_sharded(mesh: DeviceMesh, device: str, name: str) -> None:
    """FSDP2: a model trained in parts, with clipping, against the same model whole; its state dict
    goes into a new optimizer in between."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, plain = _model().to(device), _model().to(device)
    fully_shard(model, mesh=mesh)
    optimizer, oracle = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    for step in range(6):
        # the same on all ranks, so that the mean is the gradient
        x, y = draw((8, 20), step).to(device), draw((8, 7), step + 50).to(device)
        norms = []
        for each, stepper in ((model, optimizer), (plain, oracle)):
            stepper.zero_grad()
            torch.nn.functional.mse_loss(each(x), y).backward()
            if each is model:
                mean_gradients(model, mesh, device)
            norms.append(optim.clip_grad_norm_(each.parameters(), 0.05))
            stepper.step()
        torch.testing.assert_close(*norms, rtol=1e-4 if name not in ROUGH else 0.5, atol=1e-5)
        if step == 2:
            saved = get_optimizer_state_dict(model, optimizer)
            before = copy.deepcopy(optimizer.state_dict()["state"])
            optimizer = OPTIMIZERS[name](model.parameters())
            set_optimizer_state_dict(model, optimizer, saved)
            for index, states in optimizer.state_dict()["state"].items():
                for key, value in states.items():
                    assert value.dtype == before[index][key].dtype, (key, value.dtype)
                    assert torch.equal(_part(value), _part(before[index][key])), key
    if name not in ROUGH:
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(param).detach(), other.detach(), rtol=1e-3, atol=2e-4)


class Head(torch.nn.Linear):
    """As docs/training.md has it: the loss is worked out where the weight is whole."""

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return flexops.linear_cross_entropy(hidden, self.weight, target, self.bias)


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(20, 24), Head(24, 33)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.head(self.body(x), target)
        return loss


def check_head(mesh: DeviceMesh, device: str) -> None:
    """A head that is sharded alone; and what is said where its weight is used outside of it."""
    model, plain = Classifier().to(device), Classifier().to(device)
    for module in (model.head, model):
        fully_shard(module, mesh=mesh)
    x, target = draw((8, 20), 1).to(device), torch.arange(8, device=device)
    losses = [each(x, target) for each in (model, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    mean_gradients(model, mesh, device)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad)  # type: ignore[arg-type]
    model.head.reshard()  # type: ignore[operator]
    for call, name in (
        (
            lambda: flexops.linear_cross_entropy(
                draw((8, 24), 1).to(device), model.head.weight, target
            ),
            "weight",
        ),
        (lambda: flexops.swiglu(model.head.weight), "gate"),
        (lambda: flexops.bias_silu(draw((8, 33), 1).to(device), model.head.bias), "bias"),
    ):
        with pytest.raises(TypeError, match=f": {name} must be a plain tensor, got a DTensor"):
            call()


class Attention(torch.nn.Module):
    """Attention of grouped heads over a projection, in bfloat16 on a GPU, where its kernels are."""

    def __init__(self, linear: type[torch.nn.Linear], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = linear(48, 8 * 16, dtype=dtype), linear(64, 48, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 16)).split([4, 2, 2], -2)
        attended = flexops.attention(q, k, v, causal=True)
        assert isinstance(attended, Tensor)
        hidden: Tensor = self.out(attended.flatten(-2))
        return x + hidden


def check_attention(mesh: DeviceMesh, device: str, linear: type[torch.nn.Linear]) -> None:
    """Two layers, each sharded alone, under checkpointing, against the same whole; and what is
    said of DTensors."""
    from torch.utils.checkpoint import checkpoint

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, plain = (
        torch.nn.ModuleList(Attention(linear, dtype) for _ in range(2)).to(device) for _ in range(2)
    )
    for module in model:
        fully_shard(module, mesh=mesh)
    # the same on all ranks, so that the mean is the gradient
    x = draw((2, 37, 48), 1).to(device, dtype)
    for layers in (model, plain):
        hidden = x
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        hidden.float().square().mean().backward()
    mean_gradients(model, mesh, device)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if device == "cuda" else {}
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad, **tolerance)  # type: ignore[arg-type]
    sharded = distribute_tensor(x.unflatten(-1, (3, 16)), mesh, [Replicate()])
    with pytest.raises(
        TypeError, match=r"flexops\.attention: q must be a plain tensor, got a DTensor"
    ):
        flexops.attention(sharded, sharded, sharded)


def main(rank: int, world: int, store: str, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    warnings.simplefilter("error", category=RuntimeWarning)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
    )
    mesh, flat = init_device_mesh(device, (1, world)), init_device_mesh(device, (world,))
    for name in OPTIMIZERS:
        for each in (flat, mesh):
            check_steps(each, device, name, torch.float32)
        check_steps(flat, device, name, torch.bfloat16)
        print(f"rank {rank}: steps of {name} hold", flush=True)
    for norm_type in (2.0, math.inf, 3.0):
        check_clipping(flat, device, norm_type)
        check_clipping(mesh, device, norm_type)
    print(f"rank {rank}: clipping holds", flush=True)
    check_sums_that_are_not_added_up(flat, device)
    if os.environ.get("FULLY_SHARD") != "0":
        check_head(flat, device)
        for linear in (torch.nn.Linear, flexops.nn.Fp8Linear):
            check_attention(flat, device, linear)
        for name in OPTIMIZERS:
            check_fully_sharded(flat, device, name)
            print(f"rank {rank}: {name} under fully_shard holds", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
