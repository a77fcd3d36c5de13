"""What doctor sees: on made-up file trees, and of a torch that is absent, broken, crashing or
hanging."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flexops.doctor import children
from flexops.doctor.checks import machine as machine_checks
from flexops.doctor.probes import build, machine, target
from flexops.doctor.probes import torch as torch_probe
from flexops.settings import Settings

FAKES = {
    "raises": "raise ImportError('libcudnn.so.9: cannot open shared object file')",
    "aborts": "import os; os.abort()",
    "exits": "import os; os._exit(3)",
    "sleeps": "import time; time.sleep(600)",
    "chatters": "print('@flexops', flush=True); raise RuntimeError('two\\nlines')",
}


@pytest.mark.parametrize(
    ("kind", "state", "word"),
    [
        ("raises", "broken", "ImportError: libcudnn.so.9"),
        ("aborts", "broken", "killed by SIGABRT"),
        ("exits", "broken", "exited 3"),
        ("sleeps", "hangs", "no answer within 3 s"),
        ("chatters", "broken", "RuntimeError: two lines"),
    ],
)
def test_a_torch_that_does_not_import_is_a_fact(tmp_path, monkeypatch, kind, state, word):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(FAKES[kind])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fact = torch_probe.torch(timeout=3.0 if kind == "sleeps" else 600.0)
    assert (fact.state, word in fact.detail) == (state, True), fact
    assert machine_checks.torch(fact).status == "fail"


def test_no_torch_at_all():
    child = children.Child(0, ({"error": "ModuleNotFoundError: No module named 'torch'"},), "")
    assert torch_probe.read(child).state == "absent"
    other = children.Child(0, ({"error": "ModuleNotFoundError: No module named 'numpy'"},), "")
    assert torch_probe.read(other).state == "broken"


def test_the_real_torch():
    fact = torch_probe.torch()
    assert fact.state == "ok", fact
    assert fact.import_seconds > 0
    assert Path(fact.root).is_dir()
    assert any(one.soname.startswith("libstdc++") for one in fact.loaded)


def test_loaded_libraries_are_those_of_cuda_and_cpp_without_the_drivers():
    wanted = [
        "libcublasLt.so.13",
        "libcudart-d0da41ae.so.11.0",
        "libcudart.so.13.0.96",
        "libcudnn_graph.so.9",
        "libcusparseLt.so.0",
    ]
    wanted += ["libnvrtc-builtins.so.13.0", "libstdc++.so.6.0.30"]
    others = ["libcuda.so.1", "libnvidia-ml.so.1", "libc.so.6", "libtorch_cpu.so", "libcurl.so.4"]
    assert torch_probe.loaded(f"/x/{name}" for name in [*others, *wanted]) == [
        (name, f"/x/{name}") for name in wanted
    ]


def test_children_read_messages_out_of_noise():
    child = children.run(
        [
            "-c",
            (
                "print('noise', end=''); print('@flexops-doctor {\"a\": 1}');"
                " print('@flexops-doctor {broken'); print('end')"
            ),
        ],
        timeout=600,
    )
    assert child.messages == ({"a": 1},)
    assert child.last_line == "end"
    assert child.failure == ""


def test_children_are_stopped_with_their_own(tmp_path):
    """A hanging compiler must not outlive the trial that started it."""
    program = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '600']);"
        f" open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    for limit in (2.0, 20.0, 200.0):  # a loaded machine may not get to start it within the first
        child = children.run(["-c", program], timeout=limit)
        assert child.returncode is None
        if (tmp_path / "pid").exists() and (said := (tmp_path / "pid").read_text()):
            break
    pid = int(said)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and _alive(pid):
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_settings_that_are_not_understood_are_left_away():
    fact = machine.settings(
        {"HOME": "/home/x", "MAX_JOBS": "many", "FLEXOPS_LOG": "loud", "FLEXOPS_JIT": "0"}
    )
    assert fact.settings.max_jobs is None
    assert fact.settings.jit is False
    assert fact.left_away == ("FLEXOPS_LOG", "MAX_JOBS")


def test_a_misspelled_setting_is_named():
    fact = machine.settings(
        {
            "HOME": "/home/x",
            "FLEXOPS_FALBACK": "forbid",
            "FLEXOPS_CACHEDIR": "/cache",
            "FLEXOPS_JIT": "0",
            "FLEXOPS_IMAGE_DRIVER": "580",  # the images' own
            "FLEXOPS_SHIPPING_TOKEN": "x",  # another program's
        }
    )
    assert fact.misspelled == (
        ("FLEXOPS_CACHEDIR", "FLEXOPS_CACHE_DIR"),
        ("FLEXOPS_FALBACK", "FLEXOPS_FALLBACK"),
    )


def test_a_child_is_without_what_was_left_away(monkeypatch):
    monkeypatch.setenv("FLEXOPS_LOG", "loud")
    monkeypatch.setenv("FLEXOPS_JIT", "0")
    program = "import os; print([os.environ.get(f'FLEXOPS_{name}') for name in ('LOG', 'JIT')])"
    child = children.run(["-c", program], timeout=60, without=("FLEXOPS_LOG",))
    assert child.noise == "[None, '0']"


def tree(root: Path, **files: str) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_containers(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert machine.container(tree(tmp_path / "none", **{"proc/1/cgroup": "0::/init.scope"})) == ""
    assert machine.container(tree(tmp_path / "docker", **{".dockerenv": ""})) == "docker"
    assert machine.container(tree(tmp_path / "podman", **{"run/.containerenv": ""})) == "podman"
    assert (
        machine.container(
            tree(tmp_path / "group", **{"proc/1/cgroup": "12:pids:/kubepods/burstable/pod1"})
        )
        == "kubernetes"
    )
    assert (
        machine.container(
            tree(tmp_path / "nspawn", **{"proc/1/environ": "A=b\0container=systemd-nspawn\0"})
        )
        == "systemd-nspawn"
    )
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert machine.container(str(tmp_path / "none")) == "kubernetes"


def test_a_gpu_on_the_bus_without_a_driver_is_seen(tmp_path):
    devices = "sys/bus/pci/devices"
    root = tree(
        tmp_path,
        **{
            f"{devices}/0000:01:00.0/vendor": "0x10de\n",
            f"{devices}/0000:01:00.0/class": "0x030200\n",
            f"{devices}/0000:01:00.1/vendor": "0x10de\n",  # its sound device
            f"{devices}/0000:01:00.1/class": "0x040300\n",
            f"{devices}/0000:02:00.0/vendor": "0x8086\n",
            f"{devices}/0000:02:00.0/class": "0x030000\n",
            "proc/driver/nvidia/version": (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:10:17 UTC"
                " 2025"
            ),
        },
    )
    fact = machine.gpus(root)
    assert fact.unusable == ("NVIDIA GPU at 0000:01:00.0",)
    assert str(fact.driver) == "580.65.06"
    assert fact.gpus == ()


def test_locks_are_found_and_their_holders_too(tmp_path):
    """With TORCH_EXTENSIONS_DIR torch leaves the Python and CUDA folder out; a lock that a process
    has open is held."""
    for place in ("mine", "py312_cu130/other", "py312_cu130/held"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "lock").write_text("")
    os.utime(tmp_path / "mine" / "lock", (1, 1))
    with open(tmp_path / "py312_cu130/held/lock"):
        found = {
            Path(lock.path).parent.name: lock
            for lock in build.locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
        }
    assert set(found) == {"mine", "other", "held"}
    assert found["mine"].age_seconds > 1e6
    assert [found[name].held for name in ("mine", "other", "held")] == [False, False, True]
    assert build.locks({"HOME": str(tmp_path / "nobody")}) == ()
    assert build.locks({"XDG_CACHE_HOME": str(tmp_path), "HOME": "/"}) == ()


def test_a_cache_that_is_not_there_yet(tmp_path):
    fact = build.cache(Settings.from_environ({"FLEXOPS_CACHE_DIR": str(tmp_path / "a" / "b")}))
    assert not fact.exists
    assert fact.problem == ""
    assert fact.free_bytes > 0
    assert not (tmp_path / "a").exists()


def test_a_cache_that_everybody_can_write_to(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    fact = build.cache(Settings.from_environ({"FLEXOPS_CACHE_DIR": str(tmp_path / "cache")}))
    assert "everybody" in fact.problem


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    # root may write anywhere, and tests run as root too
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert (
        "may not be written"
        in build.cache(
            Settings.from_environ({"FLEXOPS_CACHE_DIR": str(tmp_path / "cache")})
        ).unwritable
    )


def test_targets_are_facts_also_when_they_are_unknown():
    fact = target.target("cu999", machine.GpuFact())
    assert fact.row is None
    assert "cu999" in fact.problem[0]
    assert fact.detected == "cpu"
    assert target.target("cu130-sm90", machine.GpuFact()).row is not None
