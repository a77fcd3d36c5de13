"""Whose code is opened: what another user could have written or could swap is rejected, and what a
key vouches for is all that a reader with keys opens."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builds import answer, made_up_entry, tiny_plan, watched_compiler

from flexops import trust
from flexops.build.compile import ninja
from flexops.build.compile.building import obtain as build_plans
from flexops.build.load import extension
from flexops.build.plan import cache_key
from flexops.build.plan.plan import BuildPlan
from flexops.build.store import cache_archive, objects
from flexops.build.store.cache import BuildCache, Entry, read_manifest
from flexops.build.store.manifest import file_crc32
from flexops.build.store.remote import Remote
from flexops.errors import CacheError

VICTIM, ATTACKER = 4711, 4712


@pytest.fixture
def place(require: Callable[..., None]) -> Iterator[Path]:
    """A directory that every user can look into, and only root can change; the tests become other
    users in it."""
    require(
        os.geteuid() == 0,
        "the right to become another user",
        "run the tests as root in a container",
    )
    made = Path(tempfile.mkdtemp(prefix="flexops-trust-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def as_user(user: int, work: Callable[[], Any], group: int = 0) -> Any:
    """What ``work`` returns (as JSON) in a process of that user, in no other group than that."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([group] if group else [])
            os.setgid(user)
            os.setuid(user)
            os.write(writer, json.dumps(work()).encode())
            os._exit(0)
        except BaseException as error:
            os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as answers:
        said = json.loads(answers.read())
    _, status = os.waitpid(child, 0)
    assert status == 0, said
    return said


def home_of(user: int, place: Path) -> Path:
    home = place / f"home-{user}"
    home.mkdir()
    os.chown(home, user, user)
    return home


@pytest.fixture
def plan(place: Path) -> BuildPlan:
    found = tiny_plan(place / "tiny")
    for path in (place / "tiny").iterdir():
        path.chmod(0o644)
    return found


def found(root: Path, plan: BuildPlan, name: str = "") -> dict[str, Any]:
    """What a user gets from a cache: the content that a look-up would open, the candidates, and
    what is wrong."""
    cache = BuildCache(root)
    entry = cache.lookup(plan)
    opened = [
        content
        for one in cache.candidates(name or plan.name)
        for content in _content(cache.verified(one)[0])
    ]
    return {
        "lookup": _content(entry),
        "candidates": [] if cache.problem() else opened,
        "problem": cache.problem(),
    }


def _content(entry: Entry | None) -> list[str]:
    return [entry.library.read_text()] if entry else []


def publish(root: Path, plan: BuildPlan, content: str, umask: int = 0o022) -> str:
    os.umask(umask)
    return str(made_up_entry(BuildCache(root), plan, content.encode()).directory)


def loose(root: Path) -> list[str]:
    """What others may write to."""
    return [
        str(path)
        for path in (root, *root.rglob("*"))
        if path.lstat().st_mode & 0o022 and not path.is_symlink()
    ]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o770])
def test_a_root_that_others_may_write_to(place, plan, mode):
    """A user who may add entries may add code; that of a group counts as well, unless
    FLEXOPS_CACHE_SHARED says that it is trusted."""
    root = home_of(VICTIM, place) / "cache"

    def planted() -> str:
        os.umask(0)
        root.mkdir()
        made = publish(root.parent / "made", plan, "planted", umask=0)
        root.chmod(mode)
        shutil.move(Path(made).parent, root)
        return made

    as_user(VICTIM, planted)
    seen = as_user(VICTIM, lambda: found(root, plan))
    assert "can be written by" in seen["problem"]
    assert (seen["lookup"], seen["candidates"]) == ([], [])
    assert BuildCache(root, shared=True).problem() == ""


def test_entries_that_another_user_left_while_the_root_was_open(place, plan):
    """The root was made under umask 000, another user's entry came in, and then the owner closed
    the root: it stays rejected, and a build fixes it."""
    root = home_of(VICTIM, place) / "cache"
    root.mkdir()
    os.chown(root, VICTIM, VICTIM)
    root.chmod(0o777)
    as_user(ATTACKER, lambda: publish_loosely(root, plan, "planted"))
    root.chmod(0o755)
    assert as_user(VICTIM, lambda: found(root, plan)) == {
        "lookup": [],
        "candidates": [],
        "problem": "",
    }
    as_user(VICTIM, lambda: publish(root, plan, "mine"))
    assert as_user(VICTIM, lambda: found(root, plan)) == {
        "lookup": ["mine"],
        "candidates": ["mine"],
        "problem": "",
    }


def publish_loosely(root: Path, plan: BuildPlan, content: str) -> str:
    """As another user who cares for no check would."""
    elsewhere = Path(tempfile.mkdtemp())
    made = Path(publish(elsewhere, plan, content))
    target = root / plan.name
    shutil.copytree(made.parent, target)
    shutil.rmtree(elsewhere)
    return str(target)


@pytest.mark.parametrize("which", ["name", "entry", "library", "manifest", "headers"])
@pytest.mark.parametrize("how", ["0777", "another user's"])
def test_one_part_that_another_user_could_change(place, plan, which, how):
    root = home_of(VICTIM, place) / "cache"
    entry = Path(as_user(VICTIM, lambda: publish(root, plan, "mine")))
    manifest = read_manifest(entry)
    assert manifest is not None
    part = {
        "name": entry.parent,
        "entry": entry,
        "library": manifest.library,
        "manifest": entry / "manifest.json",
        "headers": entry.parent / f"{manifest.manifest.base}.headers.json",
    }[which]
    part.chmod(part.stat().st_mode | 0o022) if how == "0777" else os.chown(part, ATTACKER, ATTACKER)
    seen = as_user(VICTIM, lambda: found(root, plan))
    assert seen["lookup"] == []
    assert seen["candidates"] == (["mine"] if which == "headers" else [])
    as_user(VICTIM, lambda: publish(root, plan, "again"))
    seen = as_user(VICTIM, lambda: found(root, plan))
    assert seen["lookup"] == seen["candidates"] == (["mine"] if which == "headers" else ["again"])
    assert not [
        path for path in loose(root) if "/.quarantine/" not in path and "/.refused-" not in path
    ]


def test_who_could_put_another_directory_in_the_cache_s_place(place, monkeypatch):
    home = home_of(VICTIM, place)
    (home / "open" / "cache").mkdir(parents=True)
    for path in (home / "open", home / "open" / "cache"):
        os.chown(path, VICTIM, VICTIM)
    (home / "link").symlink_to("open")
    os.lchown(home / "link", VICTIM, VICTIM)

    def problem(path: str) -> str:
        return str(as_user(VICTIM, lambda: BuildCache(home / path).problem()))

    assert problem("open/cache") == problem("link/cache") == problem("not/there") == ""
    (home / "open").chmod(0o777)
    assert f"{home}/open can be written by everybody" in problem("open/cache")
    assert f"{home}/open can be written by everybody" in problem("link/cache"), (
        "also where a link leads there"
    )
    assert f"{home}/open can be written by everybody" in problem("open/not/there")
    (home / "open").chmod(0o1777)
    assert problem("open/cache") == "", "as in /tmp, only the owner of a directory may rename it"
    (home / "open").chmod(0o775)
    assert problem("open/cache") == "", "the group of the user's own number is the user's alone"
    os.chown(home / "open", VICTIM, 100)
    assert "can be written by its group" in problem("open/cache")
    os.chown(home / "open", ATTACKER, ATTACKER)
    assert f"{home}/open belongs to user id {ATTACKER}" in problem("open/cache")
    (home / "flexops").touch()
    os.chown(home / "flexops", ATTACKER, ATTACKER)
    monkeypatch.setattr(trust, "__file__", str(home / "flexops"))
    assert problem("open/cache") == "", "who owns flexops need not swap anything"
    monkeypatch.undo()
    os.lchown(home / "link", ATTACKER, ATTACKER)
    assert f"{home}/link belongs to user id {ATTACKER}" in problem("link/cache")


def test_a_build_directory_that_others_can_write_to(place, plan):
    """``flexops.load(build_directory=...)`` loads its copy: it must be the one that it made."""
    home = home_of(VICTIM, place)
    theirs, mine = home / "theirs", home / "mine"
    for folder, owner in ((theirs, ATTACKER), (mine, VICTIM)):
        folder.mkdir()
        os.chown(folder, owner, owner)
    entry = read_manifest(Path(as_user(VICTIM, lambda: publish(home / "cache", plan, "mine"))))
    assert entry is not None

    def installed(folder: Path, shared: bool = False) -> str:
        try:
            return extension._installed(entry, folder, shared=shared).read_text()
        except CacheError as error:
            return error.found

    assert as_user(VICTIM, lambda: installed(mine)) == "mine"
    planted = mine / entry.manifest.library
    for owner in (VICTIM, ATTACKER):
        planted.write_text("EVIL")
        os.chown(planted, owner, owner)
        os.utime(planted, ns=(0, entry.library.stat().st_mtime_ns))
        assert as_user(VICTIM, lambda: installed(mine)) == "mine", "of the same size and date"
    mine.chmod(0o777)
    assert "can be written by everybody" in as_user(VICTIM, lambda: installed(mine))
    mine.chmod(0o775)
    assert as_user(VICTIM, lambda: installed(mine)) == "mine"
    assert f"belongs to user id {ATTACKER}" in as_user(VICTIM, lambda: installed(theirs))
    theirs.chmod(0o777)
    assert as_user(VICTIM, lambda: installed(theirs, shared=True)) == "mine"


def test_links_in_circles_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        trust.path_problem(str(tmp_path / "a" / "cache"))
    assert "cannot be looked at" in BuildCache(tmp_path / "a" / "cache").problem()


@pytest.mark.parametrize("how", ["publish", "import"])
def test_what_is_stored_under_umask_000_is_closed(tmp_path, how):
    plan = tiny_plan(tmp_path / "tiny")
    archive = tmp_path / "cache.tar.gz"
    made_up_entry(BuildCache(tmp_path / "first"), plan)
    cache_archive.export(BuildCache(tmp_path / "first"), archive)
    root = tmp_path / "new" / "parents" / "cache"
    before = os.umask(0)
    try:
        (
            made_up_entry(BuildCache(root), plan)
            if how == "publish"
            else cache_archive.import_archive(BuildCache(root), archive)
        )
    finally:
        os.umask(before)
    assert loose(tmp_path / "new") == []
    assert stat.S_IMODE((root / ".locks").stat().st_mode) == 0o700, (
        "or anybody could hold a lock for ever"
    )
    assert BuildCache(root).lookup(plan)


def test_a_name_that_was_open_is_put_aside_where_something_is_published(place, plan):
    """A failed build under umask 000 left one, and the next build of that name could not be
    stored."""
    root = home_of(VICTIM, place) / "cache"
    as_user(VICTIM, lambda: publish(root, plan._replace(identity=(("another", "key"),)), "other"))
    (root / plan.name).chmod(0o777)
    as_user(VICTIM, lambda: publish(root, plan, "mine"))
    assert as_user(VICTIM, lambda: found(root, plan)) == {
        "lookup": ["mine"],
        "candidates": ["mine"],
        "problem": "",
    }


def test_a_team_s_cache_serves_and_takes_from_all_of_them(place, plan):
    root = place / "team"
    root.mkdir()
    os.chown(root, 0, 100)
    root.chmod(0o2777)  # as_user leaves all groups

    def member(content: str, plan: BuildPlan) -> str:
        os.umask(0o077)
        made_up_entry(BuildCache(root, shared=True), plan, content.encode())
        return "".join(_content(BuildCache(root, shared=True).lookup(plan)))

    other = plan._replace(identity=(("another", "key"),))
    assert as_user(VICTIM, lambda: member("first", plan)) == "first"
    assert as_user(ATTACKER, lambda: member("second", plan)) == "first", "the first to publish wins"
    assert as_user(ATTACKER, lambda: member("second", other)) == "second"
    assert as_user(VICTIM, lambda: len(BuildCache(root, shared=True).prune(max_bytes=0))) == 2


# ---- signatures ----


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory, program: Callable[..., str]) -> Path:
    """Two key pairs, ``team`` and ``other``, and ``allowed_signers`` with the first."""
    program("ssh-keygen", "openssh-client")
    folder = tmp_path_factory.mktemp("keys")
    for name in ("team", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)],
            check=True,
        )
    (folder / "allowed_signers").write_text(f"builder@team {(folder / 'team.pub').read_text()}")
    return folder


def reader(root: Path, keys: Path, **options: Any) -> BuildCache:
    return BuildCache(root, trusted_keys=keys / "allowed_signers", **options)


def builder(root: Path, keys: Path, key: str = "team") -> BuildCache:
    return BuildCache(root, signing_key=keys / key)


def test_only_what_a_trusted_key_signed_is_opened(tmp_path, keys):
    plan, root = tiny_plan(tmp_path / "tiny"), tmp_path / "cache"
    unsigned = made_up_entry(BuildCache(root), plan, header="1")
    foreign = made_up_entry(builder(root, keys, "other"), plan, header="2")
    signed = made_up_entry(builder(root, keys), plan)
    cache = reader(root, keys)
    assert cache.lookup(plan) == signed
    said = {entry.directory: cache.verified(entry)[1] for entry in cache.candidates(plan.name)}
    assert said[signed.directory] is None
    assert "is not signed" in str(said[unsigned.directory])
    assert "not of one of the keys" in str(said[foreign.directory])
    for entry in (unsigned, foreign):
        assert cache.read(entry.manifest.name, entry.manifest.key) is None
        assert entry.library.exists(), "a process without keys may go on using it"


@pytest.mark.parametrize(
    "what", ["library", "library and manifest", "signature", "nonsense for a signature"]
)
def test_what_changed_after_it_was_signed(tmp_path, keys, what):
    plan = tiny_plan(tmp_path / "tiny")
    entry = made_up_entry(builder(tmp_path / "cache", keys), plan)
    other = made_up_entry(BuildCache(tmp_path / "other"), plan, b"evil!!!")
    if what.startswith("library"):
        shutil.copy(other.library, entry.library)
    if what.endswith("manifest"):
        shutil.copy(other.directory / "manifest.json", entry.directory)
    if what.endswith("signature"):
        (entry.directory / "manifest.json.sig").write_text(
            "" if what == "signature" else "-----BEGIN SSH SIGNATURE-----\n\x00"
        )
    assert reader(tmp_path / "cache", keys).lookup(plan) is None


def test_keys_that_are_not_there_are_said(tmp_path, keys):
    plan = tiny_plan(tmp_path / "tiny")
    made_up_entry(builder(tmp_path / "cache", keys), plan)
    cache = BuildCache(tmp_path / "cache", trusted_keys=keys / "absent")
    (candidate,) = cache.candidates(plan.name)
    entry, refusal = cache.verified(candidate)
    assert entry is None
    assert "no file that can be read" in str(refusal)


def test_nothing_is_built_that_could_not_be_opened(tmp_path, keys):
    plan = tiny_plan(tmp_path / "tiny")
    with pytest.raises(CacheError, match="would not be signed") as caught:
        reader(tmp_path / "cache", keys).require_writable()
    assert "FLEXOPS_CACHE_SIGNING_KEY" in str(caught.value)
    both = reader(tmp_path / "cache", keys, signing_key=keys / "team")
    both.require_writable()
    assert made_up_entry(both, plan) == both.lookup(plan)
    with pytest.raises(CacheError, match="could not be stored") as caught:
        made_up_entry(
            reader(tmp_path / "cache", keys, signing_key=keys / "other"), plan, header="1"
        )
    assert "not of one of the keys" in str(caught.value)


@pytest.mark.parametrize("key", ["absent", "locked"])
def test_a_key_that_cannot_sign_is_said(tmp_path, keys, key):
    if key == "locked" and not (keys / key).exists():
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "passphrase", "-f", str(keys / key)],
            check=True,
        )
    with pytest.raises(CacheError, match="cannot be signed") as caught:
        made_up_entry(builder(tmp_path / "cache", keys, key), tiny_plan(tmp_path / "tiny"))
    assert str(keys / key) in str(caught.value)
    assert caught.value.fix


def test_a_signature_replaces_an_entry_without_one(tmp_path, keys):
    plan, root = tiny_plan(tmp_path / "tiny"), tmp_path / "cache"
    made_up_entry(BuildCache(root), plan, b"whose?")
    cache = reader(root, keys, signing_key=keys / "team")
    assert made_up_entry(cache, plan, b"signed").library.read_bytes() == b"signed"
    assert cache.lookup(plan)


def test_signed_entries_of_a_shared_cache_are_opened_where_no_other_user_can_write(tmp_path, keys):
    """What others may still swap after it was verified is not what is opened."""
    plan, root = tiny_plan(tmp_path / "tiny"), tmp_path / "team"
    root.mkdir()
    root.chmod(0o777)
    shared = made_up_entry(BuildCache(root, shared=True, signing_key=keys / "team"), plan)
    cache = reader(root, keys, shared=True, copies=tmp_path / "own" / "copies")
    entry = cache.lookup(plan)
    assert entry is not None
    assert entry.directory.is_relative_to(tmp_path / "own")
    assert loose(tmp_path / "own") == []
    shared.library.write_bytes(b"EVIL!!!")
    assert entry.library.read_bytes() == b"library"
    (candidate,) = cache.candidates(plan.name)
    assert cache.verified(candidate) == (entry, None), "the copy that was verified"
    shutil.rmtree(tmp_path / "own")
    assert cache.verified(candidate)[0] is None
    assert not list((tmp_path / "own").glob("copies/tiny-cpu/*"))


def test_signatures_travel_in_archives(tmp_path, keys):
    plan = tiny_plan(tmp_path / "tiny")
    made_up_entry(builder(tmp_path / "first", keys), plan)
    cache_archive.export(BuildCache(tmp_path / "first"), tmp_path / "signed.tar.gz")
    made_up_entry(BuildCache(tmp_path / "second"), plan)
    cache_archive.export(BuildCache(tmp_path / "second"), tmp_path / "unsigned.tar.gz")
    there = reader(tmp_path / "there", keys)
    with pytest.raises(CacheError, match="this build is not intact") as caught:
        cache_archive.import_archive(there, tmp_path / "unsigned.tar.gz")
    assert "is not signed" in str(caught.value)
    assert len(cache_archive.import_archive(there, tmp_path / "signed.tar.gz")) == 1
    assert there.lookup(plan)


# ---- builds in a shared cache ----


def team_root(place: Path, mode: int) -> Path:
    root = place / "team"
    root.mkdir()
    os.chown(root, 0, 100)
    root.chmod(mode)
    return root


def swap(root: Path, forged: bytes) -> int:
    """As another member: put a forged folder in the place of each; returns of how many."""
    os.umask(0)
    swapped = 0
    for private in (root / ".tmp").iterdir():
        try:
            private.rename(private.with_name(f"moved-{private.name}"))
        except OSError:
            continue
        (private / "tiny-cpu").mkdir(parents=True)
        (private / "tiny-cpu" / "tiny.so").write_bytes(forged)
        (private / "tiny-cpu" / "tiny.o.d").write_text("tiny.o:\n")
        swapped += 1
    return swapped


@pytest.mark.parametrize("mode", [0o2775, 0o777, 0o1777, 0o2777])
def test_no_member_of_a_shared_cache_can_swap_what_is_built_and_signed(
    place, keys, mode, monkeypatch
):
    """The private folder was below the shared root, where any member could rename it."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TMPDIR", raising=False)
    root, tools = team_root(place, mode), place / "tools"
    watched = watched_compiler(tools, shutil.which("g++") or "g++")
    plan = tiny_plan(place / "tiny", compiler=str(watched))
    (tools / "hang-link").touch()
    cache = BuildCache(root, shared=True, signing_key=keys / "team")
    said: list[Entry] = []
    signer = threading.Thread(target=lambda: said.append(build_plans([plan], cache)[0].require()))
    signer.start()
    try:
        until = time.monotonic() + 300
        while not (tools / "waiting-link").exists():
            assert time.monotonic() < until, "it never came to the link"
            time.sleep(0.01)
        swapped = as_user(ATTACKER, lambda: swap(root, b"forged"), group=100)
    finally:
        (tools / "hang-link").unlink()
        signer.join()
    assert len(said) == 1, "the build was done"
    libraries = [path.with_name("tiny.so") for path in root.glob("*/*/manifest.json.sig")]
    signed = [library for library in libraries if library.read_bytes() == b"forged"]
    assert (swapped, signed) == (0, [])
    opened = reader(root, keys, shared=True, copies=place / "copies").lookup(plan)
    assert opened is not None
    assert answer(opened.library) == 42
    entry = said[0].directory
    assert stat.S_IMODE(entry.stat().st_mode) & 0o777 == mode & 0o777, "every member may remove it"
    assert not any(path.stat().st_mode & 0o022 for path in entry.iterdir())
    assert mode & 0o2000 == 0 or entry.stat().st_gid == 100, "the group that the root hands down"


def test_what_another_user_could_have_changed_is_not_signed(place, keys):
    folder = place / "open" / "built"
    folder.mkdir(parents=True)
    (folder / "tiny.so").write_bytes(b"library")
    folder.parent.chmod(0o777)
    plan = tiny_plan(place / "tiny")
    made = made_up_entry(BuildCache(place / "made"), plan)
    with pytest.raises(CacheError, match="not signed") as caught:
        builder(place / "cache", keys).store(folder, made.manifest)
    assert "can be written by everybody" in caught.value.found


def test_no_place_that_only_the_builder_can_change_is_said(place, plan, monkeypatch):
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(place / "open"))
    cache = BuildCache(team_root(place, 0o777), shared=True)
    with pytest.raises(CacheError, match="no place to build in") as caught:
        made_up_entry(cache, plan)
    assert caught.value.fix.startswith("export TMPDIR=")
    made_up_entry(BuildCache(place / "own"), plan)  # builds of one's own cache are in it


def test_a_place_of_that_name_that_another_user_made_is_not_built_in(place, plan, monkeypatch):
    (place / "tmp").mkdir()
    (place / "tmp").chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place / "tmp"))
    as_user(ATTACKER, lambda: (place / "tmp" / f"flexops-builds-{VICTIM}").mkdir())
    root = team_root(place, 0o777)
    with pytest.raises(AssertionError, match=f"belongs to user id {ATTACKER}"):
        as_user(VICTIM, lambda: str(made_up_entry(BuildCache(root, shared=True), plan).directory))


def test_a_workshop_that_another_user_left_is_put_aside(place, plan):
    """Made while the root was open; root, who may write anywhere, built in it."""
    root = place / "cache"
    (root / "theirs").mkdir(parents=True)
    os.chown(root / "theirs", ATTACKER, ATTACKER)
    (root / ".tmp").symlink_to("theirs")
    (root / ".locks").mkdir()
    os.chown(root / ".locks", ATTACKER, ATTACKER)
    made_up_entry(BuildCache(root), plan)
    for path in (root / ".tmp", root / ".locks"):
        assert not path.is_symlink()
        assert path.lstat().st_uid == 0


def test_what_is_signed_is_not_linked_from_objects_of_another_member(place, keys):
    """Objects are kept in the shared cache: a forged one would be linked and signed."""
    root = team_root(place, 0o777)
    plan = tiny_plan(place / "tiny", keep_objects=True)
    member = BuildCache(root, shared=True)
    build_plans([plan], member)
    (kept,) = member.candidates(objects.NAME)
    shutil.copy(kept.library, place / "forged.o")
    evil = tiny_plan(place / "evil", header="inline int answer_of_header() { return 666; }\n")
    with BuildCache(place / "elsewhere").workspace() as workspace:
        ninja.run([evil], workspace)
        forged = (workspace / "tiny-cpu" / "tiny.o").read_bytes()
    kept.library.write_bytes(forged)
    manifest = kept.manifest._replace(
        size=len(forged), crc32=file_crc32(kept.library), sha256=cache_key.file_digest(kept.library)
    )
    (kept.directory / "manifest.json").write_text(manifest.to_json())
    shutil.rmtree(root / plan.name)
    signer = BuildCache(root, shared=True, signing_key=keys / "team")
    entry = build_plans([plan], signer)[0].require()
    assert answer(entry.library) == 42
    trusting = BuildCache(
        root,
        shared=True,
        signing_key=keys / "team",
        trusted_keys=keys / "allowed_signers",
        copies=place / "copies",
    )
    shutil.rmtree(root / plan.name)
    assert answer(build_plans([plan], trusting)[0].require().library) == 42


def test_a_list_of_headers_is_not_written_through_a_link(place, plan, monkeypatch):
    """A member put a link in the place of the temporary file: what it led to was overwritten."""
    precious = place / "precious"
    precious.write_text("mine")
    real = tempfile.mkstemp

    def swapped(*arguments: Any, **options: Any) -> tuple[int, str]:
        handle, name = real(*arguments, **options)
        if ".headers.json." in name:
            os.unlink(name)
            os.symlink(precious, name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", swapped)
    made_up_entry(BuildCache(team_root(place, 0o777), shared=True), plan)
    assert precious.read_text() == "mine"


# ---- files that no entry has ----


def with_files(archive: Path, target: Path, files: dict[str, bytes]) -> Path:
    """An archive of one entry with more files in it."""
    ustar = tarfile.USTAR_FORMAT
    with tarfile.open(archive) as old, tarfile.open(target, "w:gz", format=ustar) as new:
        for member in old.getmembers():
            new.addfile(member, old.extractfile(member))
        manifest = next(name for name in old.getnames() if name.endswith("/manifest.json"))
        folder = manifest.rpartition("/")[0]
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    return target


ADDED = {"train.py": b"evil", "sitecustomize.py": b"evil", "Makefile": b"evil"}


@pytest.mark.parametrize("way", ["import", "remote", "verified copy"])
def test_a_signed_entry_with_added_files_brings_none_of_them(tmp_path, keys, way):
    """The signature covers the manifest and the library, and nothing that is beside them."""
    plan, user = tiny_plan(tmp_path / "tiny"), tmp_path / "user"
    made = made_up_entry(builder(tmp_path / "first", keys), plan)
    cache_archive.export(BuildCache(tmp_path / "first"), tmp_path / "signed.tar.gz")
    unsigned = {"build.ninja": b"rule evil", "build.log": b"evil"}
    added = {**ADDED, **unsigned}
    archive = with_files(tmp_path / "signed.tar.gz", tmp_path / "added.tar.gz", added)
    cache = reader(tmp_path / "there", keys)
    if way == "import":
        cache_archive.import_archive(cache, archive)
    elif way == "remote":
        store = tmp_path / "store" / plan.name
        store.mkdir(parents=True)
        shutil.copy(archive, store / f"{made.manifest.key}.tar.gz")
        cache.remote = Remote(f"file://{tmp_path}/store", limit=300)
        assert cache.fetch_key(plan.name, made.manifest.key), cache.remote.problem
        header = cache_key.file_digest(tmp_path / "tiny" / "tiny.h")
        cache.record_headers(made.manifest, {"<tiny>/tiny.h": header})
    else:
        root = tmp_path / "team"
        shutil.copytree(tmp_path / "first", root)
        for name, content in added.items():
            (root / plan.name / made.manifest.key / name).write_bytes(content)
        root.chmod(0o777)
        cache = reader(root, keys, shared=True, copies=tmp_path / "copies")
    entry = cache.lookup(plan)
    assert entry is not None
    signed = {"manifest.json", "manifest.json.sig", "tiny.so"}
    assert {path.name for path in entry.directory.iterdir()} == signed
    user.mkdir()
    (user / "train.py").write_text("mine")
    extension._installed(entry, user, shared=False)
    assert (user / "train.py").read_text() == "mine"
    assert {path.name for path in user.iterdir()} == {"train.py", *signed}


def test_files_that_an_older_flexops_has_imported_are_not_installed(tmp_path):
    entry = made_up_entry(BuildCache(tmp_path / "cache"), tiny_plan(tmp_path / "tiny"))
    for name, content in ADDED.items():
        (entry.directory / name).write_bytes(content)
    (entry.directory / "build.ninja").write_text("ours")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "train.py").write_text("mine")
    extension._installed(entry, tmp_path / "user", shared=False)
    assert (tmp_path / "user" / "train.py").read_text() == "mine"
    assert (tmp_path / "user" / "build.ninja").read_text() == "ours"
    assert not (tmp_path / "user" / "sitecustomize.py").exists()


def test_a_library_of_another_name_is_not_what_was_planned(tmp_path):
    """An unsigned archive may call its library ``train.py``: it would be installed so."""
    plan, cache = tiny_plan(tmp_path / "tiny"), BuildCache(tmp_path / "cache")
    made_up_entry(cache, plan._replace(library="train.py"))
    assert cache.lookup(plan._replace(library="train.py"))
    assert cache.lookup(plan) is None
