"""Precompiled headers of flexops.load: on a light header of torch's, so that the machinery is
tested in seconds; once on the real one (slow)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from extension_tools import MODULE, environment, run, start

import flexops
from flexops.build.compile import pch
from flexops.errors import CompileError

LIGHT = "c10/macros/Macros.h"
STRICT = ["-Winvalid-pch", "-Werror=invalid-pch"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require: Callable[..., None]) -> Path:
    require(shutil.which("g++"), "g++, which alone has these", "apt-get install g++")
    room = shutil.disk_usage(tmp_path).free > pch.FREE_DISK_BYTES
    require(
        room,
        f"{pch.FREE_DISK_BYTES >> 30} GiB of free disk, without which no header is precompiled",
        f"make room at {tmp_path}, or set TMPDIR",
    )
    settings = {
        "FLEXOPS_CACHE_DIR": str(tmp_path / "cache"),
        "FLEXOPS_PCH": "1",
        "FLEXOPS_LOG": "quiet",
        "FLEXOPS_COMPILER_LAUNCHER": "none",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pch, "HEADER", LIGHT)
    return tmp_path / "cache"


def module(folder: Path, name: str, before: str = "") -> Path:
    path = folder / f"{name}.cpp"
    path.write_text(
        f"{before}#include <{LIGHT}>\n#ifndef C10_EXPORT\n#error\n#endif\n#define VALUE 5\n{MODULE}"
    )
    return path


def command(cache: Path, name: str) -> str:
    (log,) = cache.glob(f"{name}/*/build.log")
    return log.read_text()


def headers(cache: Path) -> list[Path]:
    return sorted(path.parent for path in cache.glob(f"{pch.NAME}/*/manifest.json"))


def load(folder: Path, name: str, flags: list[str], before: str = "") -> int:
    return int(
        flexops.load(
            name, [module(folder, name, before)], extra_cflags=[*STRICT, *flags], verbose=True
        ).value()
    )


def test_one_header_serves_all_of_the_same_flags(tmp_path, cache):
    assert load(tmp_path, "first", []) == 5
    (header,) = headers(cache)
    assert f"-include {header}/" in command(cache, "first")
    assert "ccache" not in command(cache, "first")
    made = header.stat()
    assert (
        load(tmp_path, "second", [], before="// a comment\n#pragma once\n#include <vector>\n") == 5
    )
    assert f"-include {header}/" in command(cache, "second")
    assert header.stat() == made
    assert load(tmp_path, "optimised", ["-O2"]) == 5
    assert len(headers(cache)) == 2


def test_not_where_it_could_change_the_meaning(tmp_path, cache):
    assert load(tmp_path, "macro", [], before="#define C10_MINE 1\n") == 5
    assert "-include" not in command(cache, "macro")
    (tmp_path / "pybind11").mkdir()  # another pybind11 than torch's
    flexops.load(
        "shadowed", [module(tmp_path, "shadowed")], extra_include_paths=[tmp_path], verbose=True
    )
    assert "-include" not in command(cache, "shadowed")
    assert headers(cache) == []


def test_not_where_a_new_header_hides_one_that_it_was_made_of(tmp_path, cache):
    (tmp_path / "include").mkdir()
    source = module(tmp_path, "hidden")
    source.write_text(
        source.read_text().replace(
            "#define VALUE 5",
            "#ifdef HIDDEN_BY_MINE\n#define VALUE 6\n#else\n#define VALUE 5\n#endif",
        )
    )
    for flags in (
        {"extra_include_paths": [tmp_path / "include"]},
        {"extra_cflags": [f"-I{tmp_path / 'include'}"]},
    ):
        assert flexops.load("hidden", [source], verbose=True, **flags).value() == 5  # type: ignore[arg-type]
        assert "-include" in command(cache, "hidden")
        hiding = tmp_path / "include" / "cassert"  # c10's header includes it
        hiding.write_text("#include_next <cassert>\n#define HIDDEN_BY_MINE 1\n")
        time.sleep(0.01)
        assert flexops.load("hidden", [source], **flags).value() == 6  # type: ignore[arg-type]
        hiding.unlink()
        shutil.rmtree(cache / "hidden")


def test_in_the_background_for_the_next_one(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setenv("FLEXOPS_PCH", "auto")
    assert load(tmp_path, "before", []) == 5
    said = capsys.readouterr().err
    assert (
        "precompiled in the background, once for all extensions with these flags: about 0.8 GB in"
        f" {cache / pch.NAME}, where at most 2.5 GB" in said
    )
    deadline = time.monotonic() + 600
    while not headers(cache) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert load(tmp_path, "after", []) == 5
    assert "-include" in command(cache, "after")


def test_a_compiler_that_cannot_use_it_compiles_without(tmp_path, cache):
    assert load(tmp_path, "first", []) == 5
    (header,) = headers(cache)
    (made,) = header.glob("*.gch")
    size = made.stat().st_size
    # its size is right, so it is tried
    made.write_bytes(made.read_bytes()[:64] + os.urandom(size - 64))
    assert load(tmp_path, "second", []) == 5
    assert headers(cache) == [] or "-include" not in command(cache, "second")


def test_an_error_in_the_source_is_not_blamed_on_the_header(tmp_path, cache):
    source = module(tmp_path, "broken")
    source.write_text(source.read_text() + "broken\n")
    with pytest.raises(CompileError, match=r"broken\.cpp:\d+"):
        flexops.load("broken", [source])
    assert len(headers(cache)) == 1


def test_no_room_no_header(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("FLEXOPS_CACHE_MAX_SIZE", "1G")
    assert load(tmp_path, "small", []) == 5
    assert headers(cache) == []


def test_headers_of_other_flags_make_room(tmp_path, cache, monkeypatch):
    """Together they have at most half of the cache: here that is one, as large as the real one is
    taken to be."""
    monkeypatch.setenv("FLEXOPS_CACHE_MAX_SIZE", "2049M")
    assert load(tmp_path, "first", []) == 5
    (old,) = headers(cache)
    assert load(tmp_path, "second", ["-O2"]) == 5
    (new,) = headers(cache)
    assert new != old
    assert f"-include {new}/" in command(cache, "second")


def test_a_failure_is_not_repeated_for_a_day_by_any_clock(tmp_path, cache):
    assert load(tmp_path, "first", []) == 5
    (made,) = headers(cache)
    shutil.rmtree(made)
    failed = made.with_suffix(".failed")
    failed.touch()
    assert load(tmp_path, "soon", []) == 5
    assert headers(cache) == []
    os.utime(failed, (time.time() + 30 * 86400,) * 2)  # the clock was ahead
    assert load(tmp_path, "later", []) == 5
    assert headers(cache) == [made]


@pytest.mark.extra
def test_processes_that_need_one_at_once_make_one(tmp_path, cache):
    code = (
        "import flexops\nfrom flexops.build.compile import pch\npch.HEADER ="
        f" {LIGHT!r}\nprint(flexops.load({{0!r}}, [{{1!r}}], verbose=True).value())"
    )
    names = [f"process{number}" for number in range(3)]
    processes = [
        start(code.format(name, str(module(tmp_path, name))), environment(cache, FLEXOPS_PCH="1"))
        for name in names
    ]
    assert [process.communicate()[0] for process in processes] == ["5\n"] * 3
    (header,) = headers(cache)
    assert all(f"-include {header}/" in command(cache, name) for name in names)


def test_another_users_is_used_where_the_cache_is_shared(tmp_path, cache, monkeypatch):
    """Who could change it could change what is compiled: it serves where that is wanted, and else
    is as good as not there."""
    monkeypatch.setenv("FLEXOPS_CACHE_SHARED", "1")
    assert load(tmp_path, "theirs", []) == 5
    (header,) = headers(cache)
    (made,) = header.glob("*.gch")
    made.chmod(0o666)
    before = made.stat().st_ino, made.stat().st_mtime_ns
    assert load(tmp_path, "ours", []) == 5
    assert f"-include {header}/" in command(cache, "ours")
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == before
    monkeypatch.setenv("FLEXOPS_CACHE_SHARED", "0")
    assert load(tmp_path, "mine", []) == 5
    assert f"-include {header}/" not in command(cache, "mine")


@pytest.mark.slow
def test_the_real_header(cache, monkeypatch):
    """torch/extension.h: minutes on a small machine, and 800 MB."""
    monkeypatch.setattr(pch, "HEADER", "torch/extension.h")
    text = (
        'at::Tensor plus(at::Tensor x, double y) { TORCH_CHECK_INDEX(y >= 0, "negative"); return x'
        " + y; }"
    )
    documented = {"plus": 'says "plus"\nand more'}
    module = flexops.load_inline(
        "inline", text, functions=documented, use_pch=True, extra_cflags=STRICT, verbose=True
    )
    assert torch.equal(module.plus(torch.ones(2), 1.0), torch.full((2,), 2.0))
    assert "and more" in module.plus.__doc__
    with pytest.raises(IndexError):
        module.plus(torch.ones(1), -1.0)
    assert f"-include {headers(cache)[0]}/" in command(cache, "inline")
    # In a new process, from the cache.
    loaded = (
        f"flexops.load_inline('inline', {text!r}, functions={documented!r}, use_pch=True,"
        f" extra_cflags={STRICT!r})"
    )
    assert (
        run(
            f"import torch, flexops\nprint({loaded}.plus(torch.ones(1), 2.0).item())",
            environment(cache, FLEXOPS_JIT="0"),
        ).stdout
        == "3.0\n"
    )
