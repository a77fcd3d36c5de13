"""The cache: an entry is whole or missing, and the cache stays within its bound. Whose entries are
read is tested in test_trust.py."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import stat
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from builds import made_up_entry as add
from builds import tiny_plan

from flexops.build.plan.plan import BuildPlan
from flexops.build.store import cache_archive, lock
from flexops.build.store.cache import OWNER_LOCK, BuildCache, Entry
from flexops.build.store.manifest import Manifest
from flexops.build.store.remote import Remote
from flexops.errors import CacheError

LONG_AGO = time.time() - 3600


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path / "cache")


@pytest.fixture
def plan(tmp_path: Path) -> BuildPlan:
    return tiny_plan(tmp_path / "tiny")


def aged(entry: Entry, seconds: float) -> None:
    os.utime(entry.library, (time.time() - seconds, time.time() - seconds))


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_nothing_is_there_at_first(cache, plan):
    assert cache.lookup(plan) is None
    assert cache.entries() == []
    assert list(cache.candidates(plan.name)) == []
    assert cache.info().entries == 0
    assert not cache.root.exists(), "looking must not make anything"


def test_what_is_published_is_found(cache, plan):
    entry = add(cache, plan)
    assert cache.lookup(plan) == entry
    assert entry.library.read_bytes() == b"library"
    assert list(cache.candidates(plan.name)) == cache.entries() == [entry]
    assert not list((cache.root / ".tmp").iterdir())


def test_a_hit_writes_nothing(cache, plan):
    add(cache, plan)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in cache.root.rglob("*")}
    assert cache.lookup(plan)
    assert {
        path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in cache.root.rglob("*")
    } == before


def test_an_edited_header_misses_and_the_old_one_hits_again(cache, plan):
    header = plan.sources[0].with_name("tiny.h")
    text = header.read_text()
    add(cache, plan)
    header.write_text(text + "// edited\n")
    assert cache.lookup(plan) is None
    header.write_text(text)
    assert cache.lookup(plan)
    header.unlink()
    assert cache.lookup(plan) is None


def test_a_moved_source_tree_hits(cache, tmp_path, plan):
    entry = add(cache, plan)
    shutil.move(tmp_path / "tiny", tmp_path / "moved")
    assert (
        cache.lookup(
            tiny_plan(tmp_path / "moved")._replace(anchors=((str(tmp_path / "moved"), "<tiny>"),))
        )
        == entry
    )


DAMAGES = (
    "truncated library",
    "other library",
    "no library",
    "truncated manifest",
    "no manifest",
    "manifest of another",
    "empty directory",
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_miss_and_put_aside(cache, plan, damage):
    entry = add(cache, plan)
    other = add(cache, plan, b"for another header", header="f" * 64)
    library, manifest = entry.library, entry.directory / "manifest.json"
    if damage == "truncated library":
        library.write_bytes(library.read_bytes()[:3])
    elif damage == "other library":
        library.write_bytes(b"LIBRARY")
    elif damage == "no library":
        library.unlink()
    elif damage == "truncated manifest":
        manifest.write_text(manifest.read_text()[:-40])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "manifest of another":  # a consistent pair under the wrong key
        shutil.copy(other.library, library)
        shutil.copy(other.directory / "manifest.json", manifest)
    else:
        shutil.rmtree(entry.directory)
        entry.directory.mkdir()
    (cache.root / plan.name / f"{entry.manifest.base}.headers.json").write_text(
        json.dumps({"<tiny>/tiny.h": ""})
    )
    assert cache.lookup(plan) is None
    assert cache.info().quarantined == 1
    again = add(cache, plan)
    assert cache.lookup(plan) == again
    assert again.library.read_bytes() == b"library"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"<tiny>/tiny.h": 1, "/gone": "x"}', "\x00"])
def test_a_damaged_list_of_headers_is_a_miss(cache, plan, text):
    entry = add(cache, plan)
    listed = cache.root / plan.name / f"{entry.manifest.base}.headers.json"
    listed.write_text(text)
    assert cache.lookup(plan) is None
    assert add(cache, plan) == entry
    assert cache.lookup(plan) == entry


def test_the_first_to_publish_wins(cache, plan):
    first = add(cache, plan, b"first")
    assert add(cache, plan, b"second") == first
    assert first.library.read_bytes() == b"first"


def test_a_damaged_entry_in_the_way_is_replaced(cache, plan):
    add(cache, plan, b"first").library.write_bytes(b"FIRST")
    assert add(cache, plan, b"second").library.read_bytes() == b"second"


def test_many_publish_prune_and_clear_at_once(cache, plan):
    failures: list[BaseException] = []
    until = time.monotonic() + 1.5

    def work(number: int) -> None:
        try:
            while time.monotonic() < until:
                if number == 0:
                    cache.clear()
                elif number == 1:
                    cache.prune(max_bytes=3000)
                    cache.info()
                else:
                    # `clear` may win three times running; nothing else may go wrong
                    with contextlib.suppress(CacheError):
                        assert (
                            add(cache, plan, header=str(number)).library.parent.parent.name
                            == plan.name
                        )
                    list(cache.candidates(plan.name))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert add(cache, plan)
    assert cache.lookup(plan)


def test_a_file_in_the_cache_s_place_is_said(tmp_path, plan):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        cache = BuildCache(root)
        assert cache.lookup(plan) is None
        with pytest.raises(CacheError) as caught:
            cache.require_writable()
        assert str(root) in str(caught.value)


# ---- keeping house ----


def test_the_least_recently_used_goes_first(cache, plan):
    entries = [add(cache, plan, b"x" * 1000, header=str(number)) for number in range(4)]
    for number, entry in enumerate(entries):
        aged(entry, 1000 * (4 - number))
    assert cache.entries() == entries
    assert cache.entries() == entries, "looking does not count as using"
    removed = cache.prune(max_bytes=2 * entries[0].size + 10, keep=(entries[0].directory,))
    assert removed == entries[1:3]
    assert sorted(entry.directory for entry in cache.entries()) == sorted(
        (entries[0].directory, entries[3].directory)
    )


def test_what_a_clock_that_was_ahead_left_goes_first(cache, plan):
    """Else each new entry would go as soon as there is another one."""
    entries = [add(cache, plan, b"x" * 1000, header=str(number)) for number in range(3)]
    for entry, seconds in zip(entries, (1000, -30 * 86400, 10), strict=True):
        aged(entry, seconds)
    assert cache.prune(max_bytes=2 * entries[0].size + 10) == [entries[1]]


def test_prune_within_the_bound_removes_nothing(cache, plan):
    add(cache, plan)
    assert cache.prune() == []


def test_clear_by_name_and_all(cache, plan, tmp_path):
    mine, other = add(cache, plan), add(cache, tiny_plan(tmp_path / "other", name="other-cpu"))
    assert cache.clear(("other-cpu",)) == [other]
    assert cache.entries() == [mine]
    assert cache.clear() == [mine]
    assert cache.entries() == []
    assert cache.clear() == []


def test_sizes_and_counts(cache, plan):
    entry = add(cache, plan)
    info = cache.info()
    assert (info.entries, info.size, info.problem, info.quarantined) == (1, entry.size, "", 0)
    assert entry.size >= len(b"library")


def test_workspaces_of_the_dead_are_swept_and_of_the_living_are_not(cache):
    with cache.workspace() as alive:
        dead, starting = cache.root / ".tmp" / "dead", cache.root / ".tmp" / "starting"
        for path in (dead, starting):
            path.mkdir()
        (dead / OWNER_LOCK).write_text("")
        for path in (dead, starting, alive):
            os.utime(path, (LONG_AGO, LONG_AGO))
        with cache.workspace():
            assert not dead.exists()
            assert starting.exists(), "its owner may be about to lock it"
            assert alive.exists()
        os.utime(starting, (1, 1))
        with cache.workspace():
            assert not starting.exists()


def test_a_workspace_goes_when_its_build_fails(cache):
    def fail() -> None:
        with cache.workspace() as workspace:
            (workspace / "half.o").write_text("")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list((cache.root / ".tmp").iterdir())


def test_locks_exclude_and_do_without_where_they_cannot_be(tmp_path):
    path = tmp_path / "a.lock"
    order: list[str] = []

    def second() -> None:
        with lock.held(path):
            order.append("second")

    with lock.held(path):
        assert lock.is_held(path)
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert not lock.is_held(path)
    with lock.held(tmp_path / "no" / "such" / "directory.lock"):
        pass


# ---- archives ----


def test_an_export_removes_what_a_killed_one_left_and_no_other_file(cache, plan, tmp_path):
    add(cache, plan)
    folder = tmp_path / "archives"
    folder.mkdir()
    for name in (".cache.tar.gz.swp", ".other.tar.gz.1"):
        (folder / name).touch()
    others = set(folder.iterdir())
    if (child := os.fork()) == 0:
        tarfile.TarFile.add = lambda *_, **_options: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        with contextlib.suppress(BaseException):
            cache_archive.export(cache, folder / "cache.tar.gz")
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert set(folder.iterdir()) - others == {folder / f".cache.tar.gz.{child}"}
    with lock.held(alive := folder / ".cache.tar.gz.1"):
        cache_archive.export(cache, folder / "cache.tar.gz")
        assert set(folder.iterdir()) == {*others, alive, folder / "cache.tar.gz"}


def test_export_and_import(cache, plan, tmp_path):
    entry = add(cache, plan)
    damaged = add(cache, plan, b"damaged", header="1")
    damaged.library.write_bytes(b"DAMAGED")
    assert cache_archive.export(cache, tmp_path / "cache.tar.gz") == [entry]
    elsewhere = BuildCache(tmp_path / "elsewhere")
    brought = cache_archive.import_archive(elsewhere, tmp_path / "cache.tar.gz")
    assert [item.manifest._replace(own_crc32="") for item in brought] == [
        entry.manifest._replace(own_crc32="")
    ]
    found = elsewhere.lookup(plan)
    assert found is not None
    assert found.library.read_bytes() == b"library"
    assert cache_archive.import_archive(elsewhere, tmp_path / "cache.tar.gz") == [found], (
        "importing again changes nothing"
    )
    assert files_below(tmp_path) >= {"cache.tar.gz"}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".cache.tar.gz")]


def archive_of(path: Path, members: dict[str, bytes], *, link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if link:
            member = tarfile.TarInfo("adam-cpu/key/link")
            member.type, member.linkname = tarfile.SYMTYPE, link
            archive.addfile(member)
    return path


@pytest.fixture
def archives(tmp_path: Path) -> dict[str, Path]:
    good = json.loads(
        Manifest(
            name="a",
            key="k",
            base="b",
            device="cpu",
            library="lib.so",
            size=1,
            crc32="0",
            torch_abi="x",
        ).to_json()
    )
    climbing = {**good, "name": "../../outside"}
    made = {
        "no archive": tmp_path / "text.tar.gz",
        "a path outside": archive_of(tmp_path / "outside.tar.gz", {"../../evil": b"x"}),
        "an absolute path": archive_of(tmp_path / "absolute.tar.gz", {"/tmp/evil": b"x"}),
        "a link": archive_of(tmp_path / "link.tar.gz", {}, link="/etc/passwd"),
        "a library that is not the manifest's": archive_of(
            tmp_path / "swapped.tar.gz",
            {"a/k/lib.so": b"y", "a/k/manifest.json": json.dumps(good).encode()},
        ),
        "a name outside": archive_of(
            tmp_path / "climbing.tar.gz",
            {"a/k/lib.so": b"y", "a/k/manifest.json": json.dumps(climbing).encode()},
        ),
        "no file": tmp_path / "absent.tar.gz",
        "a truncated archive": tmp_path / "truncated.tar.gz",
    }
    made["no archive"].write_text("text")
    made["a truncated archive"].write_bytes(made["a name outside"].read_bytes()[:60])
    return made


@pytest.mark.parametrize(
    "which",
    [
        "no archive",
        "a path outside",
        "an absolute path",
        "a link",
        "a library that is not the manifest's",
        "a name outside",
        "no file",
        "a truncated archive",
    ],
)
def test_a_bad_archive_is_rejected(cache, archives, which):
    with pytest.raises(CacheError) as caught:
        cache_archive.import_archive(cache, archives[which])
    assert caught.value.fix
    assert cache.entries() == []
    assert not list((cache.root / ".tmp").iterdir())


def test_an_archive_that_cannot_be_written_is_said(cache, plan, tmp_path):
    add(cache, plan)
    with pytest.raises(CacheError, match="cannot be written"):
        cache_archive.export(cache, tmp_path / "no" / "such" / "place.tar.gz")


def test_what_is_stored_can_be_read_by_those_who_share_it(cache, plan):
    entry = add(cache, plan)
    listed = cache.root / plan.name / f"{entry.manifest.base}.headers.json"
    for path in (cache.root, entry.directory, entry.directory / "manifest.json", listed):
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path


BOMBS = (
    "zeros",
    "many files",
    "a long name",
    "a sparse file",
    "a device",
    "a pipe",
    "an endless file",
    "a size beyond the end",
    "twice the same",
)


def bomb(which: str, path: Path) -> Path:
    """An archive that took minutes, gigabytes or for ever."""
    with (
        gzip.open(path, "wb", compresslevel=9) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):

        def add(name: str, size: int = 0, content: bytes = b"", **fields: object) -> None:
            member = tarfile.TarInfo(name)
            member.size = size or len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(content) if content else None)

        if which == "zeros":
            archive.addfile(sized("a/k/lib.so", 2**28), Zeros(2**28))
        elif which == "many files":
            for number in range(200):
                add(f"a/k/{number}", content=b"x")
        elif which == "a long name":  # 2 MB of it took 2 GB of memory
            header = tarfile.TarInfo("././@LongLink")
            header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2**28
            archive.addfile(header, Zeros(2**28))
        elif which == "a sparse file":
            add("a/k/lib.so", type=tarfile.GNUTYPE_SPARSE)
        elif which == "a device":
            add("a/k/lib.so", type=tarfile.CHRTYPE, devmajor=1, devminor=5)
        elif which == "a pipe":
            add("a/k/lib.so", type=tarfile.FIFOTYPE)
        elif which == "a size beyond the end":
            stream.write(sized("a/k/lib.so", 2**40).tobuf(tarfile.GNU_FORMAT))
        else:
            add("a/k/lib.so", content=b"x")
            add("a/k/lib.so", content=b"y")
    return path if which != "an endless file" else Path("/dev/zero")


def sized(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


class Zeros(io.RawIOBase):
    def __init__(self, left: int) -> None:
        self.left = left

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = min(size, self.left)
        self.left -= size
        return bytes(size)


@pytest.mark.parametrize("which", BOMBS)
def test_an_archive_that_would_fill_the_disk_is_rejected_early(cache, tmp_path, which, monkeypatch):
    """In a process that may have little memory and write little: what is rejected only after it was
    unpacked dies there."""
    monkeypatch.setattr(cache_archive, "MAX_MEMBERS", 100)
    archive = bomb(which, tmp_path / "bomb.tar.gz")

    def restricted() -> str:
        room = 32 * 2**20
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * room, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * room, resource.RLIM_INFINITY))
        with pytest.raises(CacheError, match="not an archive") as caught:
            cache_archive.import_archive(cache, archive)
        return caught.value.found

    assert in_child(restricted)
    assert cache.entries() == []
    assert not list((cache.root / ".tmp").iterdir())


def slow_bomb(which: str, path: Path) -> Path:
    """An archive within the bounds of size and ratio that takes seconds to unpack."""
    if which == "empty parts":
        path.write_bytes(gzip.compress(b"", mtime=0) * 1_000_000)
        return path
    piece = bytes(300_000)
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(sized("a/k/lib.so", 2_000 * 304_000).tobuf(tarfile.USTAR_FORMAT))
        for _ in range(2_000):
            stream.write(piece + os.urandom(4_000))
    return path


@pytest.mark.parametrize("which", ["much content", "empty parts"])
def test_a_load_waits_for_no_archive_longer_than_its_limit(
    cache, tmp_path, which, monkeypatch, logged
):
    """What a remote cache sends is unpacked for as long as its answers are waited for."""
    archive = slow_bomb(which, tmp_path / "bomb.tar.gz")
    sent = lambda _self, _name, file, _most: shutil.copy(archive, file) and "tag"  # noqa: E731
    monkeypatch.setattr(Remote, "_get", sent)
    assert Remote("file:///nowhere", limit=0.2).fetch(cache, "a", "k") is None
    assert "takes more than 0.2 s to unpack" in logged.getvalue()
    assert "asked again in" in logged.getvalue()
    assert not list((cache.root / ".tmp").iterdir())


def in_child(work: Callable[[], str]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, work().encode())
            os._exit(0)
        except BaseException as error:
            os.write(writer, repr(error).encode())
            os._exit(1)
    os.close(writer)
    with open(reader, encoding="utf-8") as answers:
        said = answers.read()
    assert os.waitpid(child, 0)[1] == 0, said
    return said


@pytest.mark.parametrize(
    "name",
    [
        "a/k/li\nb.so",
        "a/k/\x1b[2Jlib.so",
        "a\x7f/k/lib.so",
        "a/k/.hidden",
        "lib.so",
        "a/b/c/lib.so",
        "a//lib.so",
        "./a/k/lib.so",
    ],
)
def test_a_name_that_flexops_does_not_write_is_rejected(cache, tmp_path, name):
    with pytest.raises(CacheError, match="not an archive") as caught:
        cache_archive.import_archive(cache, archive_of(tmp_path / "names.tar.gz", {name: b"x"}))
    assert "unexpected name" in caught.value.found
    assert caught.value.found.isprintable()


def test_an_archive_may_not_hold_more_than_the_cache(cache, plan, tmp_path):
    add(cache, plan, os.urandom(100_000))
    cache_archive.export(cache, tmp_path / "cache.tar.gz")
    with pytest.raises(CacheError, match="not an archive") as caught:
        cache_archive.import_archive(
            BuildCache(tmp_path / "small", max_bytes=50_000), tmp_path / "cache.tar.gz"
        )
    assert "FLEXOPS_CACHE_MAX_SIZE" in caught.value.found
