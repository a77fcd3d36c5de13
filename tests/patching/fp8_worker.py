"""One rank of the test of fp8 models in two processes: ``python fp8_worker.py RANK WORLD STORE
DEVICE``. Exits with 0 if the losses of each step are one process's."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import flexops
from flexops.patching import fp8


def losses(model: Any, rows: torch.Tensor, world: int) -> list[float]:
    """Of four steps; averaged over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(4):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        found.append(mean.item())
    return found


def main(rank: int, world: int, store: str, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
    )
    ids = (torch.arange(128).view(4, 32) * 7 % 61).to(device)
    fp8.LEAST_SIZE, tolerance = 12, 1e-3 if device == "cuda" else 1e-4
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, vocab_size=61,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    plain = losses(copy.deepcopy(model), ids, 1)
    own = ids.chunk(world)[rank]
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        whole = copy.deepcopy(model)
        flexops.patch(whole, fp8=recipe)
        together, sharded = copy.deepcopy(whole), copy.deepcopy(whole)
        expected = losses(whole, ids, 1)
        assert expected != plain
        assert expected[-1] < expected[0] - 0.5, expected
        parallel = torch.nn.parallel.DistributedDataParallel(together)
        mesh = init_device_mesh(device, (world,))
        for module in (*sharded.model.layers, sharded):
            fully_shard(module, mesh=mesh)
        for name, other in (("DDP", parallel), ("fully_shard", sharded)):
            found = losses(other, own, world)
            # gradients of weights are quantized over a rank's rows
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
            print(f"rank {rank}: {recipe} under {name} holds", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
