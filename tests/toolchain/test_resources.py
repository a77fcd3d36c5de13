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


PERIOD = "100000"
V1_CPU = "cpu,cpuacct/job/cpu.cfs"
V1_MEMORY = "memory/job/memory."


@pytest.mark.parametrize(("group", "files", "cpus", "mib"), [
    (None, {}, 16, 8192),
    ("0::/", {"cpu.max": "max 100000"}, 16, 8192),
    ("0::/", {"cpu.max": "200000 100000"}, 2, 8192),
    ("0::/", {"cpu.max": "150000 100000"}, 2, 8192),
    ("0::/", {"cpu.max": "50000 100000"}, 1, 8192),
    # the limit is two levels up
    ("0::/pod/box/job", {"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "max 100000"}, 3, 8192),
    # a container sees the host's path but only its own mount
    ("0::/../../host/path", {"cpu.max": "400000 100000"}, 4, 8192),
    ("3:cpu,cpuacct:/job", {f"{V1_CPU}_quota_us": "500000", f"{V1_CPU}_period_us": PERIOD}, 5, 8192),
    ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": PERIOD}, 16, 8192),
    # memory: limit - (usage - page cache)
    ("0::/job",
     {"job/memory.max": 4096 * MIB, "job/memory.current": 3072 * MIB,
      "job/memory.stat": f"anon 1\ninactive_file {1024 * MIB}\n"}, 16, 2048),
    ("0::/", {"memory.max": "max", "memory.current": "5"}, 16, 8192),
    ("4:memory:/job",
     {f"{V1_MEMORY}limit_in_bytes": 1024 * MIB, f"{V1_MEMORY}usage_in_bytes": 256 * MIB,
      "memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"},
     16, 768),
    ("0::/", {"memory.max": "100", "memory.current": "500"}, 16, 0),
])  # fmt: skip
def test_resources(tmp_path, group, files, cpus, mib):
    known = {"proc/self/cgroup": f"{group}\n"} if group else {}
    known |= {f"sys/fs/cgroup/{name}": str(text) for name, text in files.items()}
    assert detect(tree(tmp_path, known), affinity=16) == Resources(cpus, mib * MIB)


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
