"""Optimizers and clipping on DTensors and under fully_shard, fp8 models under DDP and fully_shard:
one process for each of two GPUs, through NCCL.

python -m pytest tests/gpu/test_sharded_gpu.py -m gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_sharded import FAMILIES, run_ranks

from flexops.build.load import loader


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_two_gpus(tmp_path):
    for family in FAMILIES:  # here, so that the ranks find them built
        assert loader.ensure(family, "cuda")
    run_ranks(2, "cuda", tmp_path / "store", timeout=1200)


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_fp8_models_on_two_gpus(tmp_path):
    worker = Path(__file__).parents[1] / "patching" / "fp8_worker.py"
    run_ranks(2, "cuda", tmp_path / "store", timeout=1200, worker=worker)
