"""``flexops cache``: what is printed, and what is done."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from builds import made_up_entry, tiny_plan
from command_line import flexops_command
from typer.testing import Result

from flexops import settings
from flexops.build.compile import building
from flexops.build.store.cache import BuildCache, Entry
from flexops.errors import CacheError, SettingsError


@pytest.fixture
def entry(cache_dir: Path, tmp_path: Path, host_compiler: object) -> Entry:
    assert host_compiler
    return building.obtain([tiny_plan(tmp_path / "tiny")], BuildCache(cache_dir))[0].require()


def flexops(*arguments: str) -> Result:
    """Run the command line in this process; our own errors are raised, as ``cli.main`` sees
    them."""
    return flexops_command("cache", *arguments)


def test_info_of_nothing(cache_dir):
    result = flexops("info")
    assert str(cache_dir) in result.stdout
    assert "0 entries" in result.stdout
    assert not cache_dir.exists(), "asking makes nothing"


def test_info(entry, cache_dir):
    told = json.loads(flexops("info", "--json").stdout)
    assert told == {
        "root": str(cache_dir),
        "entries": 1,
        "bytes": entry.size,
        "max_bytes": 5 * 2**30,
        "quarantined": 0,
        "problem": None,
    }
    assert "1 entries" in flexops("info").stdout


def test_info_says_what_is_wrong(entry, cache_dir):
    cache_dir.chmod(0o777)
    assert "written by everybody" in flexops("info").stdout
    assert "written by everybody" in json.loads(flexops("info", "--json").stdout)["problem"]
    cache_dir.chmod(0o755)
    entry.library.write_bytes(b"")
    BuildCache(cache_dir).read(entry.manifest.name, entry.manifest.key)
    assert "damaged entries put aside: 1;" in flexops("info").stdout


def test_list(entry):
    (told,) = json.loads(flexops("list", "--json").stdout)
    assert told["name"] == "tiny-cpu"
    assert told["key"] == entry.manifest.key
    assert told["directory"] == str(entry.directory)
    assert (told["device"], told["torch_abi"], told["isa_levels"]) == (
        "cpu",
        "stable-2.11",
        ["baseline"],
    )
    assert told["last_used"] == pytest.approx(entry.last_used)
    header, line = (re.split(r"\s{2,}", one) for one in flexops("list").stdout.splitlines())
    assert header[:5] == ["name", "key", "size", "last used", "for"]
    assert line[:2] == ["tiny-cpu", entry.manifest.key[:12]]


def test_prune_and_clear(entry, cache_dir):
    assert "removed 0" in flexops("prune").stdout
    assert entry.library.exists()
    assert "removed 1" in flexops("prune", "--max-size", "1K").stdout
    assert not entry.library.exists()
    assert "removed 0" in flexops("clear", "--yes").stdout
    assert cache_dir.exists()


def test_clear_by_name(entry):
    assert "removed 1" in flexops("clear", "--yes", "tiny-cpu").stdout
    assert not entry.library.exists()


def test_clear_asks(entry):
    with pytest.raises(CacheError, match="no answer") as caught:
        flexops("clear")
    assert caught.value.fix == "flexops cache clear --yes"
    refused = flexops_command("cache", "clear", catch_exceptions=True, input="n\n")
    assert refused.exit_code == 1
    assert entry.library.exists()
    asked = flexops_command("cache", "clear", catch_exceptions=True, input="y\n")
    assert "Remove 1 entries" in asked.output
    assert "removed 1" in asked.output
    assert not entry.library.exists()


def test_clearing_what_is_not_there_is_said(entry):
    with pytest.raises(CacheError, match="called so") as caught:
        flexops("clear", "tiny-cpu", "tiny-cup")
    assert "tiny-cup; " in str(caught.value)
    assert "tiny-cpu" in caught.value.found
    assert entry.library.exists()


@pytest.mark.parametrize("columns", [80, 100])
def test_the_list_wraps(cache_dir, tmp_path, monkeypatch, columns):
    plan = tiny_plan(
        tmp_path / "tiny", name="an_extension_with_the_name_of_somebody_s_whole_project"
    )
    made_up_entry(
        BuildCache(cache_dir),
        plan._replace(isa_levels=("avx512",)),
        architectures=("8.0", "8.6", "9.0", "9.0a", "10.0", "10.3", "12.0", "12.1+PTX"),
        cuda_version="13.0",
    )
    assert [one["cuda_version"] for one in json.loads(flexops("list", "--json").stdout)] == ["13.0"]
    (line,) = [line for line in flexops("list").stdout.splitlines() if "an_extension" in line]
    assert "somebody_s_whole_project" in line, "one line for each where a program reads them"
    assert "8.0, 8.6, 9.0, 9.0a, 10.0, 10.3, 12.0, 12.1+PTX" in line
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = flexops("list").stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "10.3" in "".join(lines)
    assert "12.1+PTX" in "".join(lines).replace(" ", "")


def test_a_size_that_is_none_is_said(cache_dir):
    assert cache_dir
    with pytest.raises(SettingsError, match="--max-size"):
        flexops("prune", "--max-size", "huge")


def test_export_and_import(entry, tmp_path, monkeypatch):
    archive = tmp_path / "cache.tar.gz"
    assert "1 entries" in flexops("export", str(archive)).stdout
    monkeypatch.setenv("FLEXOPS_CACHE_DIR", str(tmp_path / "elsewhere"))
    settings.current.cache_clear()
    assert "1 entries" in flexops("import", str(archive)).stdout
    (told,) = json.loads(flexops("list", "--json").stdout)
    assert told["key"] == entry.manifest.key
    assert building.obtain([tiny_plan(tmp_path / "tiny")], BuildCache(tmp_path / "elsewhere"))[
        0
    ].cached
    with pytest.raises(CacheError, match="archive"):
        flexops("import", str(tmp_path / "absent.tar.gz"))
