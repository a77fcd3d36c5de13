"""``pip install transformers`` gives a newer one than the test environment's: its first release
that calls a model's cache ``cache``, and wraps what reads ``past_key_values``."""

from __future__ import annotations

import os
import sys

import pytest
from builds import REPOSITORY, child_environment
from processes import completed

NEWEST = "transformers==5.24.0"
TESTS = (
    "patching/test_attention.py::test_a_cache_is_filled_in_pieces",
    "patching/test_apply.py::test_a_model_in_float64_runs_its_own_code",
    "generation/test_model.py::test_the_rest_of_generate_stays_outside",
    "generation/test_model.py::test_what_cannot_be_captured_runs_as_before",
    "generation/test_model.py::test_transformers_own_loop_replays_steps[llama-left]",
    "generation/test_paged.py::"
    "test_a_patched_model_gives_the_tokens_of_plain_transformers[Exaone4-more3]",
)


@pytest.mark.extra
@pytest.mark.usefixtures("transformers_models")
def test_models_of_the_newest_transformers(tmp_path):
    python = [sys.executable, "-m"]
    completed([*python, "pip", "install", "-q", "--no-deps", "--target", tmp_path, NEWEST])
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    completed(
        [*python, "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
        + [f"tests/{one}" for one in TESTS],
        cwd=REPOSITORY,
        env=child_environment() | {"PYTHONPATH": path},
    )
