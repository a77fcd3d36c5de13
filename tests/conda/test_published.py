"""What is published: it never changes, a rebuild is the same, and what became of it is noticed
before any client meets it. Over HTTP, as clients have it."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conda_world import CpuBuild, copy_of_checkout, only_empty

from flexops.errors import ChannelError, SettingsError
from flexops.targets import load
from flexops_tools.channel import audit, build, check, index, sealing
from flexops_tools.channel.auditing import served
from flexops_tools.channel.place import Place
from flexops_tools.channel.run import child
from flexops_tools.targets import conda

VARIANTS = conda.variants(load())

pytestmark = pytest.mark.extra  # it takes a build of the package in a channel of its own


def extract(package: Path, folder: Path) -> None:
    from rattler.package_streaming import extract as unpack

    unpack(package, folder)


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine's own server is not asked for by way of a proxy; logs about it go below the
    current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def channel(cpu: CpuBuild, tmp_path: Path) -> Place:
    """A copy of the channel with the CPU variant, to spoil."""
    shutil.copytree(cpu.place.channel, tmp_path / "channel")
    return Place(tmp_path / "channel")


@pytest.fixture
def address(channel: Place) -> Iterator[str]:
    with served(channel.channel) as url:
        yield url


def test_a_rebuild_is_the_same_and_another_package_does_not_take_its_place(
    world, tmp_path, monkeypatch
):
    checkout, place = (
        copy_of_checkout(tmp_path / "checkout", "lion"),
        Place(tmp_path / "channel"),
    )
    world.build(place.channel, "--recipe", checkout / "recipe", "--no-test")
    (package,) = place.packages()
    first = package.read_bytes()

    moved, umask = checkout.rename(tmp_path / "checked-out-elsewhere"), os.umask(0o077)
    try:
        elsewhere = Place(tmp_path / "a-longer-name-of-a-channel")
        world.build(elsewhere.channel, "--recipe", moved / "recipe", "--no-test")
    finally:
        os.umask(umask)
    assert elsewhere.packages()[0].read_bytes() == first

    (moved / "flexops" / "added.py").write_text("x = 1\n")
    done = world.build(place.channel, "--recipe", moved / "recipe", "--no-test", code=None)
    assert done.returncode == ChannelError.exit_code
    assert "a published package never changes" in done.stderr
    assert f"raise `build:` in {moved / 'recipe' / 'recipe.yaml'}" in done.stderr
    assert package.read_bytes() == first
    assert [path.name for path in package.parent.iterdir() if path.name.startswith(".")] == []

    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    with served(place.channel) as url:
        child(
            "install",
            {
                "channels": [url, only_empty(tmp_path)],
                "specs": ["flexops"],
                "prefix": str(tmp_path / "prefix"),
            },
        )
    assert (tmp_path / "prefix" / "conda-meta").is_dir()


def test_nothing_of_the_machine_that_built_it_is_in_a_package(cpu, world, tmp_path):
    extract(cpu.package, tmp_path / "x")
    told = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert [path for path, content in told.items() if str(world.root).encode() in content] == []
    assert [
        path
        for path in told
        if path.name == "direct_url.json" or "recipe" in path.relative_to(tmp_path / "x").parts
    ] == []
    depends = json.loads((tmp_path / "x/info/index.json").read_bytes())["depends"]
    assert depends == sorted(depends)
    manifests = [
        json.loads(content) for path, content in told.items() if path.name == "manifest.json"
    ]
    assert manifests
    assert [manifest for manifest in manifests if "build_seconds" in manifest] == []
    assert [
        path.name
        for path in told
        if path.name == "METADATA" and b"\nName: flexops-torch\n" in told[path]
    ] == ["METADATA"]
    assert (tmp_path / "x/info/licenses/LICENSE").is_file()
    assert {entry.date_time for entry in zipfile.ZipFile(cpu.package).infolist()} == {
        (1980, 1, 1, 0, 0, 0)
    }


def test_what_a_package_is_dated_by(tmp_path, monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    (tmp_path / "csrc" / "__pycache__").mkdir(parents=True)
    for name, date in (
        ("csrc/a.cu", 1_600_000_000),
        ("csrc/__pycache__/a.pyc", 1_700_000_000),
        ("notes.txt", 1_700_000_000),
    ):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (date, date))
    assert sealing.source_date(tmp_path) == 1_600_000_000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1500000000")
    assert sealing.source_date(tmp_path) == 1_500_000_000
    for wrong in ("yesterday", "-1", "²", "9" * 400):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        with pytest.raises(SettingsError, match="SOURCE_DATE_EPOCH is not a time"):
            sealing.source_date(tmp_path)


# ---- what check notices ----


def repodata(place: Place, change: Callable[[dict[str, object]], None]) -> None:
    """Change what the index says of the package; every form of it, or else that is noticed."""
    path = place.packages()[0].parent / "repodata.json"
    data = json.loads(path.read_text())
    change(next(iter(data["packages.conda"].values())))
    path.write_text(json.dumps(data))
    for other in (
        path.with_name("repodata.json.zst"),
        path.with_name("repodata_shards.msgpack.zst"),
    ):
        other.unlink()


def wrong_digest(place: Place) -> None:
    repodata(place, lambda entry: entry.update(sha256="0" * 64))


def wrong_requirements(place: Place) -> None:
    repodata(place, lambda entry: entry.update(depends=["python"]))


def deleted(place: Place) -> None:
    place.packages()[0].unlink()


def replaced(place: Place) -> None:
    """One of its files, with all that the package says of it."""
    (package,) = place.packages()
    folder = place.channel.parent / "x"
    extract(package, folder)
    victim, paths = next(folder.rglob("flexops/trust.py")), folder / "info" / "paths.json"
    victim.write_text("print('not what was published')\n")
    data = json.loads(paths.read_text())
    for entry in data["paths"]:
        if entry["_path"] == str(victim.relative_to(folder)):
            entry.update(sha256=sealing.sha256(victim), size_in_bytes=victim.stat().st_size)
    paths.write_text(json.dumps(data))
    sealing.pack(folder, package, package.name.removesuffix(".conda"), 0)


def misnamed(place: Place) -> None:
    (package,) = place.packages()
    package.rename(package.with_name("flexops-9.9-cpu_h0_0.conda"))
    child("index", {"channel": str(place.channel), "force": True})


def misnamed_as_another(place: Place) -> None:
    (package,) = place.packages()
    shutil.copy(package, package.with_name("numpy-2.0-0.conda"))
    child("index", {"channel": str(place.channel), "force": True})


def unlisted(place: Place) -> None:
    (package,) = place.packages()
    shutil.copy(package, package.with_name("flexops-9.9-cpu_h0_0.conda"))


def stale(form: str) -> Callable[[Place], None]:
    """A form of the index that was not written with the others."""

    def spoil(place: Place) -> None:
        old, (package,) = (place.packages()[0].parent / form).read_bytes(), place.packages()
        index_without = place.channel.parent / "kept.conda"
        package.rename(index_without)
        child("index", {"channel": str(place.channel), "force": True})
        empty = (package.parent / form).read_bytes()
        index_without.rename(package)
        child("index", {"channel": str(place.channel), "force": True})
        assert empty != old
        (package.parent / form).write_bytes(empty)

    return spoil


FAULTS = {
    "a wrong digest": (wrong_digest, "is not the file that the index lists"),
    "wrong requirements": (wrong_requirements, "is listed with another depends"),
    "deleted": (deleted, "is listed, but cannot be downloaded"),
    "replaced": (replaced, "is not the file that the index lists"),
    "misnamed": (misnamed, "is misnamed: it holds flexops-"),
    "misnamed as another": (
        misnamed_as_another,
        "numpy-2.0-0.conda is misnamed: it holds flexops-",
    ),
    "stale zst": (
        stale("repodata.json.zst"),
        "repodata.json.zst does not say what repodata.json says",
    ),
    "stale shards": (
        stale("repodata_shards.msgpack.zst"),
        "repodata_shards.msgpack.zst does not say what repodata.json says",
    ),
}


VARIATIONS = ("misnamed as another", "stale shards")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=[pytest.mark.slow] if name in VARIATIONS else []) for name in FAULTS],
)
def test_check_notices_in_a_folder_and_on_the_web(channel, address, fault):
    spoil, message = FAULTS[fault]
    assert (
        audit(channel, "flexops")
        == audit(Place.parse(address), "flexops")
        == [Path("linux-64", channel.packages()[0].name)]
    )
    spoil(channel)
    for place in (channel, Place.parse(address)):
        with pytest.raises(ChannelError, match="the channel and its index do not agree") as caught:
            audit(place, "flexops")
        assert message in caught.value.found, caught.value.found
        assert caught.value.fix


def test_a_package_that_was_never_indexed_is_noticed(channel):
    unlisted(channel)
    with pytest.raises(ChannelError) as caught:
        audit(channel, "flexops")
    assert "linux-64/flexops-9.9-cpu_h0_0.conda is not listed under flexops" in caught.value.found


def test_index_rejects_a_package_that_changed_unless_it_is_declared_that_the_packages_are_right(
    channel,
):
    replaced(channel)
    with pytest.raises(ChannelError, match="a published package never changes") as caught:
        index(channel)
    assert "--force" in caught.value.fix
    index(channel, force=True)
    assert audit(channel, "flexops")


def test_index_rejects_a_misnamed_package(channel):
    unlisted(channel)
    with pytest.raises(ChannelError) as caught:
        index(channel)
    assert "is misnamed: it holds flexops-" in caught.value.found


# ---- a channel on the web ----


def test_a_channel_on_the_web_is_checked_and_never_written(channel, address, world, tmp_path):
    before = {path: path.read_bytes() for path in channel.channel.rglob("*") if path.is_file()}
    done = world.flexops(
        "channel",
        "check",
        "--channel",
        address,
        "--from",
        only_empty(tmp_path),
        "--no-install",
        cuda="",
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[0] == f"ok   1 packages are what the index of {address} says"
    for command in ("build", "index"):
        done = world.flexops("channel", command, "--channel", address, cwd=tmp_path, code=None)
        assert done.returncode == ChannelError.exit_code
        assert "a channel on the web can only be read" in done.stderr
    assert {
        path: path.read_bytes() for path in channel.channel.rglob("*") if path.is_file()
    } == before


def test_a_server_that_is_not_there_is_one_message(world, tmp_path):
    done = world.flexops(
        "channel", "check", "--channel", "http://127.0.0.1:9/conda", cwd=tmp_path, code=None
    )
    assert done.returncode == ChannelError.exit_code
    assert "the index of http://127.0.0.1:9/conda cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_that_holds_no_channel_is_said_to(address):
    with urllib.request.urlopen(f"{address}/noarch/repodata.json") as told:
        assert told.status == 200
    with pytest.raises(ChannelError):
        audit(Place.parse(f"{address}/nowhere"), "flexops")


@pytest.mark.parametrize(
    ("package", "command"), [("", "build"), ("flexops-1-cpu_0.conda", "index")]
)
def test_a_folder_without_an_index_names_the_command_that_writes_one(tmp_path, package, command):
    (tmp_path / "linux-64").mkdir()
    (tmp_path / "linux-64" / (package or "notes.txt")).touch()
    with pytest.raises(ChannelError, match="there is no channel") as caught:
        audit(Place(tmp_path), "flexops")
    assert caught.value.fix == f"flexops channel {command} --channel {tmp_path}"


# ---- where no channel can be ----


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("/etc/passwd", "a file is in the way"),
        ("/etc/passwd/channel", "a file is in the way"),
        ("/proc/channel", ""),
    ],
)
def test_where_no_folder_can_be_is_said_before_the_build(text, what, monkeypatch):
    monkeypatch.setattr(
        "flexops_tools.channel.building.choose", lambda _: pytest.fail("it went on to build")
    )
    with pytest.raises(ChannelError, match="the channel cannot be a folder here") as caught:
        build(VARIANTS[:1], Place.parse(text))
    assert what in caught.value.found
    assert "--channel" in caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/conda",
        "oci://ghcr.io/o/conda",
        "https://user:secret@host/conda",
        "file://host/conda",
        "http:///conda",
    ],
)
def test_addresses_that_cannot_be_read_are_rejected(text):
    with pytest.raises(ChannelError, match="this is not a channel that can be read"):
        Place.parse(text)


def test_a_file_address_is_a_folder(tmp_path):
    folder = tmp_path / "with a blank"
    assert Place.parse(folder.as_uri()) == Place.parse(str(folder)) == Place(folder)
    assert check.PACKAGE
