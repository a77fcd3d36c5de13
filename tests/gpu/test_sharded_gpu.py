"""Optimizers and clipping on DTensors and under fully_shard: one process for each of two GPUs, through NCCL.

python -m pytest tests/gpu/test_sharded_gpu.py -m gpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flexops.op_builder import loader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from test_sharded import FAMILIES, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"NOT TESTED: needs two GPUs, here is {torch.cuda.device_count()}")
def test_two_gpus(tmp_path: Path) -> None:
    for family in FAMILIES:  # here, so that the ranks find them built
        assert loader.ensure(family, "cuda")
    run_ranks(2, "cuda", tmp_path / "store", timeout=300)
