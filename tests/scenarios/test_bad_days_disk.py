"""Bad days: disks that are full, caches that may not be written or are not ours, files that were
damaged."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builds import answer, child_environment, copy_csrc, run_child, tiny_plan
from processes import completed

from flexops import settings
from flexops.build.compile import device_code
from flexops.build.describe import catalog
from flexops.build.load import provider
from flexops.build.store.cache import BuildCache
from flexops.compute_capability import parse_arch_list
from flexops.errors import FlexopsError

KIB = 1024


@pytest.fixture
def folder(tmp_path: Path, host_compiler: Any) -> Path:
    tiny_plan(tmp_path / "tiny", compiler=str(host_compiler.path))
    return tmp_path


def build(folder: Path, cache: Path, **options: Any) -> dict[str, Any]:
    environment = child_environment(FLEXOPS_CACHE_DIR=str(cache), FLEXOPS_COMPILER_LAUNCHER="none")
    return run_child("obtain.py", {"folder": str(folder / "tiny")}, environment, **options)


def assert_right(result: dict[str, Any]) -> None:
    assert "error" not in result, result["error"]
    assert answer(Path(result["library"])) == 42


def assert_said(result: dict[str, Any], *words: str) -> None:
    """One clear error with its fix."""
    assert result["kind"] in ("CacheError", "CompileError"), result
    assert any(word in result["error"] for word in words), result["error"]
    assert result["fix"]
    assert "Traceback" not in result["stderr"]


# ---- a full disk ----


@contextmanager
def file_system(require: Callable[..., None], options: str, excuse: str) -> Iterator[Path]:
    """One in memory, mounted with these options."""
    place = Path(tempfile.mkdtemp(prefix="flexops-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    mounted = completed(command, code=None).returncode == 0
    if not mounted:
        place.rmdir()
    how = "run the tests as root in a container that may mount"
    require(mounted, "the right to mount a small file system", how, excuse)
    yield place
    completed(["umount", place])
    place.rmdir()


@pytest.fixture(scope="module")
def small_disk(require: Callable[..., None]) -> Iterator[Path]:
    with file_system(require, "size=1m", "test_no_room_for_large_files covers full disks") as place:
        yield place


@pytest.mark.parametrize("free", [0, 4, 8, 16, 32])
def test_a_full_disk(folder, small_disk, free):
    """With so many KiB free: done, or said; and once there is room, done, with nothing of the
    failure left."""
    cache = small_disk / "cache"
    cache.mkdir()
    filler = small_disk / "filler"
    try:
        room = os.statvfs(small_disk)
        filler.write_bytes(b"x" * (room.f_bavail * room.f_frsize - free * KIB))
        result = build(folder, cache)
        if "error" in result:
            assert_said(result, "No space left on device", "disk is full")
        else:
            assert_right(result)
        filler.unlink()
        assert_right(build(folder, cache))
        assert not list((cache / ".tmp").iterdir())
        assert build(folder, cache)["cached"]
    finally:
        filler.unlink(missing_ok=True)
        shutil.rmtree(cache, ignore_errors=True)


@pytest.mark.parametrize("free", [4, 16])
def test_a_full_disk_while_a_kernel_is_compiled(small_disk, nvcc_toolkit, free):
    """Neither a cubin nor its manifest finds room, or only one of them."""
    assert nvcc_toolkit
    cache, filler = small_disk / "cache", small_disk / "filler"
    cache.mkdir(mode=0o700)
    compiler = provider.compiler_for(settings.current(), (), asked="9.0").compiler
    rope = catalog.find("rope")
    plan = provider.plan_kernel(
        rope, "flexops::rope::rotate<float>", parse_arch_list("9.0")[0], compiler
    )
    try:
        room = os.statvfs(small_disk)
        filler.write_bytes(b"x" * (room.f_bavail * room.f_frsize - free * KIB))
        try:
            error: FlexopsError | None = device_code.obtain([plan], BuildCache(cache))[0].error
        except FlexopsError as raised:
            error = raised
        assert error
        assert "No space left on device" in str(error)
        assert error.fix
        filler.unlink()
        assert device_code.obtain([plan], BuildCache(cache))[0].entry
        assert not list((cache / ".tmp").iterdir())
        assert device_code.obtain([plan], BuildCache(cache))[0].cached
    finally:
        filler.unlink(missing_ok=True)
        shutil.rmtree(cache, ignore_errors=True)


@pytest.mark.parametrize("limit", [0, 100, 1000, 4000])
def test_no_room_for_large_files(folder, limit):
    """The same where mounting is not allowed: no file may grow beyond so many bytes."""

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    result = build(folder, folder / "cache", preexec_fn=restrict)
    assert_said(result, "File too large", "File size limit", "disk is full", "cannot be")
    assert_right(build(folder, folder / "cache"))
    assert not list((folder / "cache" / ".tmp").iterdir())


# ---- whose, and whether it may be written ----


@pytest.fixture(scope="module")
def noexec_disk(require: Callable[..., None]) -> Iterator[Path]:
    with file_system(require, "size=16m,noexec", "most containers may not mount") as place:
        yield place


def test_a_cache_where_nothing_may_be_executed(tmp_path, noexec_disk):
    environment = child_environment(FLEXOPS_CACHE_DIR=str(noexec_disk / "cache"))
    result = run_child("call.py", {"csrc": str(copy_csrc(tmp_path))}, environment)
    assert (result["values"], result["backend"]) == ([1.0, 4.0, 9.0], "reference")
    assert result["reason"].count("mounted noexec") == 1
    assert "FLEXOPS_CACHE_DIR" in result["fix"]
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    code = f"import flexops; flexops.load('answer', [{str(source)!r}], is_python_module=False)"
    said = completed(
        [sys.executable, "-c", code], env={**environment, "FLEXOPS_PCH": "0"}, code=None
    ).stderr
    assert "CacheError: extension answer cannot be loaded" in said
    assert "mounted noexec" in said
    assert "fix: export FLEXOPS_CACHE_DIR=" in said


def read_only(root: Path, yes: bool) -> None:
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            path.chmod(0o555 if yes else 0o755)


def test_a_read_only_cache_serves_what_it_holds(folder, obedient):
    first = build(folder, folder / "cache")
    read_only(folder / "cache", True)
    try:
        again = build(folder, folder / "cache", prefix=obedient)
        assert again["cached"]
        assert again["library"] == first["library"]
        tiny_plan(folder / "tiny", header="inline int answer_of_header() { return 7; }\n")
        assert_said(build(folder, folder / "cache", prefix=obedient), "cannot be written")
    finally:
        read_only(folder / "cache", False)
    assert answer(Path(build(folder, folder / "cache")["library"])) == 7


def test_damage_in_a_read_only_cache_is_not_loaded(folder, obedient):
    library = Path(build(folder, folder / "cache")["library"])
    library.write_bytes(library.read_bytes()[:5000])
    read_only(folder / "cache", True)
    try:
        assert_said(build(folder, folder / "cache", prefix=obedient), "cannot be written")
    finally:
        read_only(folder / "cache", False)
    assert_right(build(folder, folder / "cache"))


@pytest.mark.parametrize("name", ["", "cache/deeper"])
def test_a_place_where_no_cache_can_be(folder, obedient, name):
    """The parent is read-only, or a file is where the directory should be."""
    parent = folder / "parent"
    parent.mkdir()
    if name:
        (parent / "cache").write_text("")
    parent.chmod(0o555)
    try:
        assert_said(
            build(folder, parent / (name or "cache"), prefix=obedient),
            "cannot be written",
            "not safe",
        )
    finally:
        parent.chmod(0o755)


def test_a_cache_of_another_user_is_neither_read_nor_written(folder, require):
    require(
        os.geteuid() == 0,
        "the right to give a directory away",
        "run the tests as root in a container",
    )
    cache = folder / "cache"
    build(folder, cache)
    os.chown(cache, 12345, 12345)
    before = sorted(str(path) for path in cache.rglob("*") if "tools.json" not in path.name)
    result = build(folder, cache)
    assert_said(result, "belongs to user id 12345")
    assert "FLEXOPS_CACHE_DIR" in result["fix"]
    assert sorted(str(path) for path in cache.rglob("*") if "tools.json" not in path.name) == before
    shared = child_environment(
        FLEXOPS_CACHE_DIR=str(cache), FLEXOPS_COMPILER_LAUNCHER="none", FLEXOPS_CACHE_SHARED="1"
    )
    assert run_child("obtain.py", {"folder": str(folder / "tiny")}, shared)["cached"]


def test_nothing_that_is_made_under_umask_000_is_open_to_others(folder):
    """Of a build that fails, one that does not, and of what tools are remembered by."""
    root = folder / "new" / "parents" / "cache"
    tiny_plan(folder / "tiny", source="int broken = nothing_of_that_name;\n")
    assert_said(build(folder, root, preexec_fn=lambda: os.umask(0)), "nothing_of_that_name")
    tiny_plan(
        folder / "tiny",
        source='#include "tiny.h"\nextern "C" int answer() { return answer_of_header(); }\n',
    )
    assert_right(build(folder, root, preexec_fn=lambda: os.umask(0)))
    assert build(folder, root)["cached"]
    assert (root / "tools.json").exists()
    assert [path for path in (folder / "new").rglob("*") if path.lstat().st_mode & 0o022] == []


def test_an_op_with_a_cache_of_another_user_still_runs(tmp_path, require):
    require(
        os.geteuid() == 0,
        "the right to give a directory away",
        "run the tests as root in a container",
    )
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, 12345, 12345)
    environment = child_environment(FLEXOPS_CACHE_DIR=str(cache))
    result = run_child("call.py", {"csrc": str(copy_csrc(tmp_path))}, environment)
    assert result["values"] == [1.0, 4.0, 9.0]
    assert result["backend"] == "reference"
    assert "belongs to user id 12345" in result["reason"]
    assert "FLEXOPS_CACHE_DIR" in result["fix"]


def test_a_ccache_that_cannot_write_does_not_cost_the_build(tmp_path, obedient, ccache):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o555)
    environment = child_environment(
        FLEXOPS_CACHE_DIR=str(tmp_path / "cache"),
        FLEXOPS_COMPILER_LAUNCHER=str(ccache),
        CCACHE_DIR=str(home / "ccache"),
        HOME=str(home),
    )
    result = run_child(
        "obtain.py",
        {"csrc": str(copy_csrc(tmp_path)), "device": "cpu"},
        environment,
        prefix=obedient,
    )
    assert "error" not in result, result["error"]
    assert Path(result["library"]).exists()


# ---- damage ----


@pytest.mark.parametrize("text", ["[" * 100_000, '["\\ud800"]', "9" * 400])
@pytest.mark.parametrize("which", ["manifest.json", "headers.json", "tools.json", "failure.json"])
def test_json_of_any_kind_is_no_reason_to_raise(folder, which, text):
    library = Path(build(folder, folder / "cache")["library"])
    (base,) = (path.name.partition(".")[0] for path in library.parent.parent.glob("*.headers.json"))
    names = {
        "manifest.json": library.parent,
        "headers.json": library.parent.parent,
        "tools.json": library.parents[2],
        "failure.json": library.parent.parent,
    }
    (
        names[which] / (f"{base}.{which}" if which in ("headers.json", "failure.json") else which)
    ).write_text(text)
    if which == "failure.json":
        shutil.rmtree(library.parent)
    assert_right(build(folder, folder / "cache"))


# ---- time, home, locks ----


@pytest.mark.parametrize("moment", [0.0, 4e9], ids=["1970", "2096"])
def test_a_clock_that_jumps_loses_nothing_and_makes_nothing_stale(folder, moment):
    """Everything in the cache, and the sources, are of another age all at once; what is edited
    afterwards is noticed all the same."""
    first = build(folder, folder / "cache")
    for path in [*(folder / "cache").rglob("*"), *(folder / "tiny").iterdir()]:
        os.utime(path, (moment, moment))
    again = build(folder, folder / "cache")
    assert (again["cached"], again["library"]) == (True, first["library"])
    (folder / "tiny" / "tiny.h").write_text("inline int answer_of_header() { return 7; }\n")
    os.utime(folder / "tiny" / "tiny.h", (moment, moment))
    edited = build(folder, folder / "cache")
    assert not edited["cached"]
    assert answer(Path(edited["library"])) == 7
    assert not list((folder / "cache" / ".tmp").iterdir())


def test_a_home_that_cannot_be_written(tmp_path, obedient):
    """And nothing else said: the operator runs as plain PyTorch, with the variable that fixes
    it."""
    home = tmp_path / "home"
    home.mkdir()
    csrc = copy_csrc(tmp_path)
    home.chmod(0o555)
    environment = child_environment(FLEXOPS_CACHE_DIR=None, XDG_CACHE_HOME=None, HOME=str(home))
    result = run_child("call.py", {"csrc": str(csrc)}, environment, prefix=obedient)
    assert (result["values"], result["backend"]) == ([1.0, 4.0, 9.0], "reference")
    assert "cannot be written" in result["reason"]
    assert "FLEXOPS_CACHE_DIR" in result["fix"]
    assert list(home.iterdir()) == []
    fixed = run_child(
        "call.py",
        {"csrc": str(csrc)},
        {**environment, "FLEXOPS_CACHE_DIR": str(tmp_path / "cache")},
        prefix=obedient,
    )
    assert (fixed["values"], fixed["backend"]) == ([1.0, 4.0, 9.0], "jit")
