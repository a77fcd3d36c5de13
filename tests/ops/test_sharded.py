"""Optimizers, clipping, losses and attention on DTensors and under fully_shard: two processes, on
the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexops.build.load import loader

WORKER = Path(__file__).with_name("sharded_worker.py")
FAMILIES = (
    "adam",
    "lion",
    "adagrad",
    "lamb",
    "adam8bit",
    "grad_norm",
    "cross_entropy",
    "activation",
    "attention",
)


def run_ranks(world: int, device: str, store: Path, timeout: float, worker: Path = WORKER) -> None:
    """Start all ranks; fail with the output of those that failed."""
    commands = [
        [sys.executable, str(worker), str(rank), str(world), str(store), device]
        for rank in range(world)
    ]
    outputs = [store.with_name(f"rank{rank}.txt") for rank in range(world)]
    ranks = [
        subprocess.Popen(command, stdout=output.open("w"), stderr=subprocess.STDOUT)
        for command, output in zip(commands, outputs, strict=True)
    ]
    try:
        codes = [rank.wait(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [
        output.read_text()[-3000:] for code, output in zip(codes, outputs, strict=True) if code
    ]
    assert not failed, "\n".join(failed)


def test_two_processes(tmp_path, monkeypatch):
    by_torch = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
    if not by_torch:
        monkeypatch.setenv("FULLY_SHARD", "0")
    for family in FAMILIES:  # here, so that the ranks find them built
        loader.ensure(family, "cpu")
    run_ranks(2, "cpu", tmp_path / "store", timeout=1200)
    if not by_torch:
        pytest.skip(
            "DTensors are stepped and clipped as on later torches; fully_shard makes CUDA streams"
            " on CPUs, too, before torch 2.6"
        )
