"""The examples, run as people run them: each trains, and says itself whether the loss went down."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import completed

pytestmark = pytest.mark.usefixtures("transformers_models")

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"plain_loop": (), "hf_trainer": pytest.mark.extra}
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "text")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in EXAMPLES],
)
def test_the_example_trains(name, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, ROOT / "examples" / f"{name}.py"]
    done = completed(command, cwd=tmp_path, env=environment)
    assert "linear_cross_entropy" in done.stdout
    assert " -> " in done.stdout.splitlines()[-1]
