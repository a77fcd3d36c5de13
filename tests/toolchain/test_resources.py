"""Processors, memory and GPUs, read from trees and texts made for the purpose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import completed

from flexops.compute_capability import ComputeCapability
from flexops.toolchain import gpus
from flexops.toolchain.resources import Resources, detect

MIB = 1 << 20
HERE = (
    gpus.Gpu(0, "GPU-aaa", "NVIDIA A100", ComputeCapability(8, 0), 0, ("MIG-111", "MIG-222")),
    gpus.Gpu(1, "GPU-bbb", "NVIDIA L40S", ComputeCapability(8, 9), 0),
)


def tree(root: Path, files: dict[str, str], available: int = 8192) -> str:
    for name, text in {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {available * 1024} kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


CGROUP = "sys/fs/cgroup"
V1_CPU = f"{CGROUP}/cpu,cpuacct/job/cpu.cfs"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Resources(16, 8192 * MIB)),
        (
            {"proc/self/cgroup": "0::/\n", f"{CGROUP}/cpu.max": "max 100000"},
            Resources(16, 8192 * MIB),
        ),
        (
            {"proc/self/cgroup": "0::/\n", f"{CGROUP}/cpu.max": "200000 100000"},
            Resources(2, 8192 * MIB),
        ),
        (
            {"proc/self/cgroup": "0::/\n", f"{CGROUP}/cpu.max": "150000 100000"},
            Resources(2, 8192 * MIB),
        ),
        (
            {"proc/self/cgroup": "0::/\n", f"{CGROUP}/cpu.max": "50000 100000"},
            Resources(1, 8192 * MIB),
        ),
        # the limit is two levels up
        (
            {
                "proc/self/cgroup": "0::/pod/box/job\n",
                f"{CGROUP}/pod/cpu.max": "300000 100000",
                f"{CGROUP}/pod/box/cpu.max": "max 100000",
            },
            Resources(3, 8192 * MIB),
        ),
        # a container sees the host's path but only its own mount
        (
            {"proc/self/cgroup": "0::/../../host/path\n", f"{CGROUP}/cpu.max": "400000 100000"},
            Resources(4, 8192 * MIB),
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n",
                f"{V1_CPU}_quota_us": "500000",
                f"{V1_CPU}_period_us": "100000",
            },
            Resources(5, 8192 * MIB),
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                f"{CGROUP}/cpu/cpu.cfs_quota_us": "-1",
                f"{CGROUP}/cpu/cpu.cfs_period_us": "100000",
            },
            Resources(16, 8192 * MIB),
        ),
        # memory: limit - (usage - page cache)
        (
            {
                "proc/self/cgroup": "0::/job\n",
                f"{CGROUP}/job/memory.max": str(4096 * MIB),
                f"{CGROUP}/job/memory.current": str(3072 * MIB),
                f"{CGROUP}/job/memory.stat": f"anon 1\ninactive_file {1024 * MIB}\n",
            },
            Resources(16, 2048 * MIB),
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                f"{CGROUP}/memory.max": "max",
                f"{CGROUP}/memory.current": "5",
            },
            Resources(16, 8192 * MIB),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n",
                f"{CGROUP}/memory/job/memory.limit_in_bytes": str(1024 * MIB),
                f"{CGROUP}/memory/job/memory.usage_in_bytes": str(256 * MIB),
                f"{CGROUP}/memory/memory.limit_in_bytes": "9223372036854771712",
                f"{CGROUP}/memory/memory.usage_in_bytes": "1",
            },
            Resources(16, 768 * MIB),
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                f"{CGROUP}/memory.max": "100",
                f"{CGROUP}/memory.current": "500",
            },
            Resources(16, 0),
        ),
    ],
)
def test_resources(tmp_path, files, expected):
    assert detect(tree(tmp_path, files), affinity=16) == expected


def test_resources_of_nothing_known(tmp_path):
    assert detect(str(tmp_path), affinity=1) == Resources(1, 0)


def test_resources_here():
    here = detect()
    assert here.cpus >= 1
    assert here.memory_bytes > 0


@pytest.mark.parametrize(
    ("devices", "order", "shown"),
    [
        (None, "FASTEST_FIRST", [0, 1]),
        ("", "FASTEST_FIRST", []),
        ("-1", "PCI_BUS_ID", []),
        ("1", "PCI_BUS_ID", [1]),
        ("1", "FASTEST_FIRST", [0, 1]),  # which of the two that is only CUDA knows
        ("1,0", "PCI_BUS_ID", [1, 0]),
        ("0,7,1", "PCI_BUS_ID", [0]),  # CUDA stops at the first that is missing
        ("GPU-bbb", "FASTEST_FIRST", [1]),
        ("GPU-b", "FASTEST_FIRST", [1]),
        ("GPU-", "FASTEST_FIRST", []),
        ("9", "FASTEST_FIRST", []),
    ],
)
def test_visible_devices(devices, order, shown):
    assert [gpu.ordinal for gpu in gpus.visible(HERE, devices, order)] == shown


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        ("MIG-222", ["8.0"]),
        ("MIG-111,MIG-222", ["8.0", "8.0"]),
        ("MIG-GPU-aaa/2/0", ["8.0"]),
        ("GPU-bbb", ["8.9"]),
        ("MIG-gone", []),
        ("MIG-", []),
    ],
)
def test_mig_slices_have_their_gpus_capability(devices, shown):
    assert [str(gpu.capability) for gpu in gpus.visible(HERE, devices, "FASTEST_FIRST")] == shown


def test_without_a_device_node_nothing_is_asked(tmp_path, monkeypatch):
    def never() -> gpus.Machine:
        raise AssertionError("asked")

    monkeypatch.setattr(gpus, "_query", never)
    assert gpus.machine(str(tmp_path)) == gpus.Machine()


def test_amd_gpus(tmp_path):
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node, number in enumerate((0, 90010, 90402, 90402, 110000)):
        (nodes / str(node)).mkdir(parents=True)
        (nodes / str(node) / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {number}\n"
        )
    assert gpus.local_gfx_targets(str(tmp_path)) == ("gfx90a", "gfx942", "gfx1100")
    assert gpus.local_gfx_targets(str(tmp_path / "none")) == ()
    assert gpus.gfx_targets(" gfx90a;gfx942, gfx1100;") == ("gfx90a", "gfx942", "gfx1100")


@pytest.mark.gpu
def test_the_gpus_here_as_torch_sees_them_without_initialising_cuda():
    import torch

    code = (
        "import torch; from flexops.toolchain import local_capabilities as local; print(*local(),"
        " torch.cuda.is_initialized())"
    )
    told = completed([sys.executable, "-c", code]).stdout.split()
    seen = {
        ComputeCapability(*torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    }
    assert told == [*map(str, sorted(seen)), "False"]
