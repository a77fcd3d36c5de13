"""The simulated cluster in short: ``flexops_tools.cluster_simulation`` fails if a kernel was
compiled twice; docs/clusters.md has its figures."""

from __future__ import annotations

import sys

import pytest
from processes import completed


def simulate(*arguments: str) -> str:
    done = completed([sys.executable, "-m", "flexops_tools.cluster_simulation", *arguments])
    return done.stdout


def test_twenty_nodes_compile_each_kernel_once():
    assert "20 nodes, 3 kernels" in (
        said := simulate("nodes", "--count", "20", "--kernels", "3", "--latency", "0")
    )
    assert "compiled 3, failed 0" in said


@pytest.mark.slow
def test_sixty_four_processes_compile_each_kernel_once():
    assert "64 processes on 8 nodes, 12 kernels: compiled 12, fetched 84" in simulate("processes")


@pytest.mark.slow
def test_all_go_on_when_the_store_stops_in_the_middle():
    assert "store: stopped" in simulate("processes", "--stop")
