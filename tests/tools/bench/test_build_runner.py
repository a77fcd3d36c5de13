"""The build-time ladder on this machine, for real."""

from __future__ import annotations

import json
import sys

import pytest
from builds import child_environment
from processes import completed

from flexops_tools.bench.build_ladder import RUNGS


@pytest.mark.slow
def test_a_quick_ladder_on_this_machine(nvcc_toolkit, tmp_path):
    """Minutes: the conventional source is compiled once. How long each rung takes is not
    asserted."""
    assert nvcc_toolkit
    command = [sys.executable, "-m", "flexops", "bench", "build", "--quick", "--json"]
    done = completed(command, env=child_environment(), cwd=tmp_path)
    told = {rung["id"]: rung for rung in json.loads(done.stdout)["rungs"]}
    assert [
        rung.id
        for rung in RUNGS
        if rung.quick
        and told[rung.id]["seconds"] is None
        and "no ccache" not in told[rung.id]["note"]
    ] == []
