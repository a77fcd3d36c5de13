"""What a run has recorded is made before the next one starts: exactly that, and then nothing is
compiled."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builds import child_environment, made_up_entry, tiny_plan
from command_line import flexops_command
from processes import completed

from flexops import settings, toolchain
from flexops.build.deliver import aot, warm
from flexops.build.describe import catalog, layout
from flexops.build.load import loader, provider, record
from flexops.build.plan import kernel_plan
from flexops.build.store import cache_archive, counters
from flexops.build.store.cache import BuildCache
from flexops.build.store.remote import Object
from flexops.cli.remote import to_remove
from flexops.compute_capability import ComputeCapability, parse_arch_list
from flexops.errors import CacheError, FlexopsError
from flexops.patching import patterns
from flexops.report import FAMILIES

ROTATE = '{"kernel": "flexops::rope::rotate<float>", "family": "rope", "capability": "9.0"}'
OWN = "template <class T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }\n"
RUN = """
import json, torch, flexops
x, cos, sin = torch.randn(2, 5, 4, 8), torch.randn(5, 4), torch.randn(5, 4)
got, expected = flexops.rotary_embedding(x, x, cos, sin)[0], x.new_empty(0)
status = next(one for one in flexops.status() if (one.op, one.device) == ("rope", "cpu"))
print(json.dumps({"reason": status.reason, "stats": flexops.cache_stats()}))
"""


def run(**variables: str | None) -> dict[str, Any]:
    done = completed([sys.executable, "-c", RUN], env=child_environment(**variables))
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.fixture
def flexops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """``flexops("cache", "list", status=0, VARIABLE="value")``: what the command says, in this
    process."""

    def call(*arguments: str, status: int = 0, **variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.current.cache_clear()
        result = flexops_command(*arguments, catch_exceptions=True)
        code = (
            result.exception.exit_code
            if isinstance(result.exception, FlexopsError)
            else result.exit_code
        )
        assert code == status, f"{result.output}\n{result.exception}"
        return f"{result.output}{result.exception or ''}"

    yield call
    monkeypatch.undo()
    settings.current.cache_clear()


@pytest.fixture
def compiler(nvrtc_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some NVRTC, whatever torch is installed."""
    found = nvrtc_of()
    monkeypatch.setattr(
        provider,
        "compiler_for",
        lambda *_, asked: provider.CompilerChoice(found, parse_arch_list(asked), ()),
    )


def test_from_a_recorded_run_to_a_start_without_a_compiler(tmp_path, host_compiler, flexops):
    assert host_compiler
    written, archive = tmp_path / "record.jsonl", tmp_path / "all.tar.gz"
    run(FLEXOPS_RECORD=str(written))
    assert written.read_text() == '{"library": "rope", "device": "cpu"}\n'
    flexops("warm", "--record", str(written), "--archive", str(archive))
    flexops("cache", "import", str(archive), FLEXOPS_CACHE_DIR=str(tmp_path / "imported"))
    started = run(
        FLEXOPS_CACHE_DIR=str(tmp_path / "imported"),
        FLEXOPS_JIT="0",
        FLEXOPS_FALLBACK="forbid",
        PATH="/nonexistent",
    )
    assert started["reason"] == "found in the cache"
    assert started["stats"]["cache"]["hits"] == 1


@pytest.mark.usefixtures("compiler")
def test_into_the_remote_cache(tmp_path, cache_dir, flexops):
    (tmp_path / "record.jsonl").write_text(ROTATE)
    there = {
        "FLEXOPS_CACHE_REMOTE": f"file://{tmp_path}/store",
        "FLEXOPS_CACHE_REMOTE_TIMEOUT": "300",
    }
    warm_it = ("warm", "--record", str(tmp_path / "record.jsonl"), "--remote")
    assert "FLEXOPS_CACHE_REMOTE_WRITE is not 1" in flexops(*warm_it, status=7, **there)
    assert "1 entries in the remote cache" in flexops(*warm_it, FLEXOPS_CACHE_REMOTE_WRITE="1")
    other = str(tmp_path / "other")
    assert json.loads(flexops(*warm_it[:3], "--json", FLEXOPS_CACHE_DIR=other)) == [
        {"name": "flexops::rope::rotate<float> for 9.0", "cached": True, "error": None}
    ]
    assert [
        json.loads(flexops("cache", "stats", "--json"))[tier]["hits"]
        for tier in ("remote", "compiler")
    ] == [1, 0]
    assert 'flexops_cache_hits_total{tier="remote"} 1\n' in flexops(
        "cache", "stats", "--prometheus"
    )
    assert (
        json.loads(flexops("cache", "stats", "--json", FLEXOPS_CACHE_DIR=str(cache_dir)))[
            "published"
        ]["hits"]
        == 1
    )


@pytest.mark.usefixtures("compiler")
def test_kernels_for_architectures_that_are_elsewhere(tmp_path, cache_dir):
    written = tmp_path / "record.jsonl"
    written.write_text(f"{ROTATE}\n{ROTATE}\n")
    made = warm.make(record.read([written]), settings.current(), arch_list="8.0;9.0")
    assert [(one.name, one.cached) for one in made] == [
        (f"flexops::rope::rotate<float> for {one}", False) for one in ("8.0", "9.0")
    ]
    assert {one.manifest.architectures for one in BuildCache(cache_dir).entries()} == {
        ("8.0",),
        ("9.0",),
    }
    by_default = warm.make(record.read([written]), settings.current())
    assert [(one.name, one.cached) for one in by_default] == [
        ("flexops::rope::rotate<float> for 9.0", True)
    ]
    assert warm.archive(made, settings.current(), tmp_path / "archive") == 2
    assert (
        len(cache_archive.import_archive(BuildCache(tmp_path / "other"), tmp_path / "archive")) == 2
    )


@pytest.mark.usefixtures("compiler")
def test_a_users_own_kernel(tmp_path, cache_dir, monkeypatch):
    monkeypatch.setenv("FLEXOPS_RECORD", str(tmp_path / "record.jsonl"))
    settings.current.cache_clear()
    kernel = kernel_plan.TextKernel("kernel-scale", OWN, "scale<float>", layout.csrc_root())
    record.kernel(kernel, ComputeCapability(9, 0))
    record.kernel(kernel, ComputeCapability(9, 0))
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 1
    made = warm.make(record.read([tmp_path / "record.jsonl"]), settings.current())
    assert [one.error for one in made] == [None]
    assert [entry.manifest.name for entry in BuildCache(cache_dir).entries()] == [
        kernel.name("sm_90")
    ]


def test_extensions_are_taken_from_the_caches(tmp_path, cache_dir, monkeypatch):
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(BuildCache, "fetch_key", lambda _, *names: asked.append(names))
    entry = made_up_entry(BuildCache(cache_dir), tiny_plan(tmp_path / "tiny"))
    name, key = entry.manifest.name, entry.manifest.key
    (tmp_path / "record.jsonl").write_text(
        "".join(
            json.dumps({"extension": name, "key": one}) + "\n" for one in (key, "0123", "../0123")
        )
    )
    made = warm.make(record.read([tmp_path / "record.jsonl"]), settings.current())
    assert [one.entry for one in made if one.entry] == [entry]
    assert [type(one.error) for one in made if not one.entry] == [CacheError, CacheError]
    assert asked == [(name, "0123")], "of the remote cache, by a name without a path"


@pytest.mark.parametrize(
    "line", ["", "[1]", "{}", '{"library": "rope"}', '{"kernel": "x"}', "no JSON", '"library"']
)
def test_what_is_no_record_is_named_by_its_line(tmp_path, line):
    (tmp_path / "record.jsonl").write_text(f"{ROTATE}\n{line}\n")
    with pytest.raises(FlexopsError, match=r"record\.jsonl:2"):
        record.read([tmp_path / "record.jsonl"])
    with pytest.raises(FlexopsError, match="cannot be read"):
        record.read([tmp_path / "none"])


def test_lines_of_many_processes_do_not_mix(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXOPS_RECORD", str(tmp_path / "record.jsonl"))
    settings.current.cache_clear()
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            for other in range(50):
                record.library(f"{'x' * 3000}{number}", str(other))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert len(record.read([tmp_path / "record.jsonl"]).libraries) == 400
    settings.current.cache_clear()


@pytest.mark.usefixtures("compiler", "host_compiler")
def test_without_a_stand_in_some_kernels_are_enough(cache_dir, monkeypatch, tmp_path):
    """Without ``FLEXOPS_FALLBACK=forbid``, plain PyTorch would stand in for a family that lacks
    one."""
    rope = catalog.find("rope")
    plan = loader.local_plan(rope, "cuda", settings.current())
    from flexops.build.compile import building

    entry = building.obtain([plan], BuildCache(tmp_path / "libraries"))[0].require()
    nine = (ComputeCapability(9, 0),)
    monkeypatch.setattr(toolchain, "local_capabilities", lambda: nine)
    monkeypatch.setattr(provider, "_too_new", lambda _: None)
    for fallback, expected in (
        ("forbid", False),
        ("warn", False),
        ("forbid", True),
        ("warn", False),
    ):
        monkeypatch.setenv("FLEXOPS_FALLBACK", fallback)
        monkeypatch.setenv("FLEXOPS_JIT", "0")
        settings.current.cache_clear()
        assert (loader._no_kernels(entry, rope) is None) == expected
        (tmp_path / "record.jsonl").write_text(ROTATE)
        if fallback == "warn":
            warm.make(record.read([tmp_path / "record.jsonl"]), settings.current())
    assert len(BuildCache(cache_dir).entries()) == 1


def test_what_is_pruned_is_the_oldest():
    items = [Object(str(number), 10, float(number)) for number in range(1, 6)]
    assert to_remove(items, now=6.0, seconds=3.5, most=None) == items[:2]
    assert to_remove(items, now=6.0, seconds=None, most=25) == items[:3]
    assert to_remove(items, now=6.0, seconds=3.5, most=25) == items[:3]
    assert to_remove(items, now=6.0, seconds=100.0, most=50) == []


def test_the_remote_cache_on_the_command_line(tmp_path, flexops):
    cache, store = BuildCache(tmp_path / "cache"), tmp_path / "store"
    there = {
        "FLEXOPS_CACHE_REMOTE": f"file://{store}",
        "FLEXOPS_CACHE_REMOTE_TIMEOUT": "300",
        "FLEXOPS_CACHE_DIR": str(cache.root),
    }
    from flexops.build.store.remote import Remote, entry_name

    remote = Remote(f"file://{store}", write=True, limit=300.0)
    names = []
    for name in ("one", "two"):
        entry = made_up_entry(cache, tiny_plan(tmp_path / name, name=name))
        assert remote.publish(cache, entry)
        names.append(entry_name(name, entry.manifest.key))
    assert [
        item["name"] for item in json.loads(flexops("cache", "remote", "list", "--json", **there))
    ] == names
    assert "2 of 2 entries are whole" in flexops("cache", "remote", "verify", **there)
    (store / names[0]).write_bytes((store / names[1]).read_bytes())
    said = flexops("cache", "remote", "verify", "--remove", status=1, **there)
    assert f"{names[0]}: holds another entry" in said
    assert [item.name for item in remote.list() if item.name.endswith(".gz")] == names[1:]
    flexops("cache", "remote", "prune", status=2, **there)
    flexops("cache", "remote", "prune", "--older-than", "1h", **there)
    assert len(remote.list()) == 3
    os.utime(store / names[1], (1, 1))
    flexops("cache", "remote", "prune", "--older-than", "1h", **there)
    assert len(remote.list()) == 2
    assert "no remote cache is named" in flexops(
        "cache", "remote", "list", status=7, FLEXOPS_CACHE_REMOTE=""
    )
    assert remote._worker
    remote._worker.stop()


def test_counters_of_a_damaged_file(tmp_path):
    (tmp_path / ".stats.jsonl").write_text(
        '{"tier": "remote", "hit": true, "bytes": 5, "seconds": 0.5}\n{"tier": "none"}\n[]\nno'
        " JSON\n"
    )
    assert counters.of_cache(tmp_path)["remote"] == {
        "hits": 1,
        "misses": 0,
        "bytes": 5,
        "seconds": 0.5,
    }


def test_a_models_families_without_a_run(flexops, monkeypatch):
    """The patch names them; rope's are compiled, the others' would take a minute."""
    asked: list[tuple[str, ...]] = []
    build = aot.build
    monkeypatch.setattr(
        aot,
        "build",
        lambda names, *rest, **options: asked.append(names) or build(("rope",), *rest, **options),
    )
    made = json.loads(
        flexops("warm", "--model", "llama", "--arch", "9.0", "--json", FLEXOPS_LOG="quiet")
    )
    training = ("activation", "attention", "cross_entropy", "norm", "norm_backward", "rope")
    assert asked == [tuple(sorted((*training, "few_rows", "kvcache_attention")))]
    assert {one["name"] for one in made} >= {
        "rope-cpu",
        "rope-cuda",
        "flexops::rope::rotate<float> for 9.0",
    }
    assert not any(one["error"] for one in made)
    assert all(
        one["cached"]
        for one in json.loads(
            flexops("warm", "--model", "llama", "--arch", "9.0", "--json", FLEXOPS_LOG="quiet")
        )
    )


def test_every_pattern_says_which_families_it_needs():
    for pattern in patterns.PATTERNS:
        families = [
            FAMILIES[name] for name in re.findall(r"\w+", pattern.operator) if name in FAMILIES
        ]
        assert families, pattern.operator
        for family in (name for names in families for name in names):
            catalog.find(family)


def test_without_a_record_or_a_model_there_is_nothing_to_make(flexops):
    assert "--model MODEL_CONFIG" in flexops("warm", status=2)
