"""The parts about what flexops reads: texts of every kind that a person or a damaged disk may hand
it, and archives made to do harm."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from builds import TORCH, made_up_entry, tiny_plan

from flexops import _json, settings
from flexops.build.store import cache_archive
from flexops.build.store.cache import BuildCache
from flexops.build.store.manifest import Manifest, judge
from flexops.compute_capability import ComputeCapability, parse_arch_list, runs_on
from flexops.errors import CacheError, FlexopsError

from .frame import Fault, World, run

_BATCH = 2000
_MEMORY = 3 * 2**30
_SCRAPS = (
    "",
    " ",
    ";",
    ",",
    "+PTX",
    "a",
    "f",
    "sm_",
    "compute_",
    "9.0",
    "13.0",
    "native",
    "all",
    "Hopper",
    "gfx90a",
    "gfx",
    "2.14",
    "3..4",
    "k",
    "G",
    "TB",
    "iB",
    "\0",
    "\n",
    "\x1b[2J",
    "²",
    "١",
    "½",
    "\u2028",
    "\ud800",
    "é",
    "~",
    "~nouser",
    "/",
    "..",
    "-",
    "--",
    "$",
    "`",
    "'",
    '"',
    "\\",
    "%s",
    ":",
    "0",
    "-1",
    "1e999",
    "NaN",
    "Infinity",
    "9" * 400,
    "1" * 5000,
    "x" * 3000,
    "[" * 3000,
    '{"a":' * 3000,
    "true",
    "null",
    "[]",
    "{}",
)
_VARIABLES = (
    "FLEXOPS_CACHE_DIR",
    "FLEXOPS_CACHE_MAX_SIZE",
    "FLEXOPS_CACHE_SHARED",
    "FLEXOPS_FALLBACK",
    "FLEXOPS_JIT",
    "FLEXOPS_LOG",
    "FLEXOPS_AOT",
    "FLEXOPS_AOT_DEVICES",
    "FLEXOPS_AOT_DIR",
    "FLEXOPS_PCH",
    "FLEXOPS_CPU_ISA",
    "FLEXOPS_COMPILER_LAUNCHER",
    "FLEXOPS_CACHE_SIGNING_KEY",
    "FLEXOPS_CACHE_TRUSTED_KEYS",
    "FLEXOPS_COMPILE_TIMEOUT",
    "TORCH_CUDA_ARCH_LIST",
    "PYTORCH_ROCM_ARCH",
    "MAX_JOBS",
    "NVCC_THREADS",
    "CUDA_HOME",
    "ROCM_HOME",
    "TORCH_EXTENSIONS_DIR",
    "XDG_CACHE_HOME",
    "CXX",
    "CC",
    "PATH",
    "CUDA_VISIBLE_DEVICES",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
)
_MANIFEST = Manifest(
    name="adam-cuda",
    key="k" * 40,
    base="b" * 40,
    device="cuda",
    library="lib.so",
    size=3,
    crc32="0" * 8,
    torch_abi="stable-2.11",
    cuda_version="13.0",
    architectures=("8.0", "9.0+PTX"),
    isa_levels=("avx2",),
    glibc="2.14",
    glibcxx="3.4.21",
    files={"<csrc>/a.cu": "1"},
)


def _architectures(text: str, dice: random.Random) -> None:
    found = parse_arch_list(
        text,
        native=lambda: (ComputeCapability(9, 0),),
        supported=(ComputeCapability(9, 0), ComputeCapability(12, 0)),
    )
    if parse_arch_list(";".join(map(str, found))) != found:
        raise Fault("wrong result", f"{found} is not read back")
    runs_on(found, ComputeCapability(dice.randrange(8, 13), 0))


def _size(text: str, _: random.Random) -> None:
    if settings.parse_size("--max-size", text) < 0:
        raise Fault("wrong result", "less than nothing")


def _settings(text: str, dice: random.Random) -> None:
    settings.Settings.from_environ(
        {dice.choice(_VARIABLES): text, dice.choice(_VARIABLES): text[::-1]}
    )


def _manifest(text: str, _: random.Random) -> None:
    told = Manifest.from_json(text)
    if not told.is_damaged():
        judge(told, TORCH)
        runs_on(told.architectures, ComputeCapability(9, 0))
        # which an older one does not say
        if Manifest.from_json(told.to_json())._replace(own_crc32=told.own_crc32) != told:
            raise Fault("wrong result", "a manifest is not read back")


def _document(text: str, _: random.Random) -> None:
    json.dumps(_json.parse(text))


READERS: dict[
    str, tuple[Callable[[str, random.Random], None], tuple[str, ...], tuple[type[Exception], ...]]
] = {
    "architecture lists": (
        _architectures,
        ("8.0;8.6;9.0a;12.0+PTX", "sm_90 compute_90", "native", "all-major", "Hopper;Ada"),
        (FlexopsError,),
    ),
    "sizes": (_size, ("5G", "500M", "1048576", "1.5 GiB"), (FlexopsError,)),
    "settings": (_settings, ("warn", "1", "cpu,cuda", "4", "/opt/cache", "8.0"), (FlexopsError,)),
    "manifests": (_manifest, (_MANIFEST.to_json(),), (ValueError,)),
    "other JSON": (
        _document,
        ('{"schema": 1, "tables": {"a": {"b": [1, 2, 3, {"c": null}]}}}', '{"<csrc>/a.h": "0"}'),
        (ValueError,),
    ),
}
"""Each kind of text: what reads it, what good ones look like, and what it may raise."""


def texts(world: World) -> None:
    """Texts made of good ones, cut, joined, repeated and interspersed with what has surprised
    parsers before."""
    names = sorted(READERS)
    for start in range(0, world.rounds, _BATCH):
        name, seed = names[start // _BATCH % len(names)], world.dice.random()
        count = min(_BATCH, world.rounds - start)
        world.tally.rounds += count
        world.guarded(partial(_batch, world, name, seed, count), name)


def _batch(world: World, name: str, seed: float, count: int) -> None:
    def work() -> list[object]:
        dice = random.Random(seed)
        reader, good, promised = READERS[name]
        accepted = 0
        for _ in range(count):
            text = mutated(dice, dice.choice(good))
            try:
                reader(text, dice)
                accepted += 1
            except promised:
                pass
            except Fault as fault:
                return [fault.kind, f"{text[:300]!r}: {fault}"]
            except Exception as error:
                return ["traceback", f"{text[:300]!r}: {type(error).__name__}: {str(error)[:300]}"]
        return [accepted]

    said = run(work, memory=_MEMORY)
    told = said.get("value")
    if not isinstance(told, list):
        raise Fault("traceback", str(said))
    if len(told) == 2:
        raise Fault(str(told[0]), str(told[1]))
    world.tally.seen[f"{name}: accepted"] = world.tally.seen.get(f"{name}: accepted", 0) + told[0]
    world.tally.seen[f"{name}: refused"] = (
        world.tally.seen.get(f"{name}: refused", 0) + count - told[0]
    )


def mutated(dice: random.Random, text: str) -> str:
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        at, to = sorted((dice.randint(0, len(text)), dice.randint(0, len(text))))
        how = dice.randrange(6)
        if how == 0:
            text = text[:at] + dice.choice(_SCRAPS) + text[at:]
        elif how == 1:
            text = text[:at] + text[to:] if to - at < 20 else text[:at] + text[at + 1 :]
        elif how == 2 and at < len(text):
            text = text[:at] + chr(ord(text[at]) ^ 1 << dice.randrange(7)) + text[at + 1 :]
        elif how == 3:
            text = text[:at] + dice.choice(_SCRAPS) + text[min(at + 3, len(text)) :]
        elif how == 4:
            text = text[:to] + text[at:to] * dice.randrange(3) + text[to:]
        else:
            text = (
                text[:at]
                + chr(dice.choice((dice.randrange(128), dice.randrange(0x110000))))
                + text[at:]
            )
    return text


# ---- archives ----


def archives(world: World) -> None:
    """Archives with hostile members, and good ones with hostile bytes: rejected, or whole; nothing
    is written elsewhere, nothing takes long or much."""
    plan = tiny_plan(world.folder / "tiny")
    made_up_entry(BuildCache(world.folder / "cache"), plan, b"library" * 1000)
    cache_archive.export(BuildCache(world.folder / "cache"), world.folder / "good.tar.gz")
    good = gzip.decompress((world.folder / "good.tar.gz").read_bytes())
    (world.folder / "inside").mkdir()
    before = _listing(world.folder.parent)
    for number in world.each():
        world.guarded(lambda: _archive_one(world, good, before), f"round {number}")


def _archive_one(world: World, good: bytes, before: set[str]) -> None:
    inside = world.folder / "inside"
    archive = inside / "hostile.tar.gz"
    if world.dice.random() < 0.5:
        name = world.dice.choice(sorted(_MEMBERS))
        archive.write_bytes(gzip.compress(_MEMBERS[name](world.dice), 1))
    else:
        name = "good bytes, some of them changed"
        content = bytearray(good)
        for _ in range(world.dice.randrange(1, 20)):
            content[world.dice.randrange(len(content))] = world.dice.randrange(256)
        archive.write_bytes(
            gzip.compress(
                bytes(
                    content[: world.dice.choice((len(content), world.dice.randrange(len(content))))]
                ),
                1,
            )
        )
    began = time.monotonic()
    said = run(
        lambda: len(
            cache_archive.import_archive(BuildCache(inside / "cache", max_bytes=2**28), archive)
        ),
        memory=_MEMORY,
    )
    if said.get("kind") != CacheError.__name__ and "value" not in said:
        raise Fault("traceback", f"{name}: {said}")
    if time.monotonic() - began > 30:
        raise Fault("hang", f"{name} took {time.monotonic() - began:.0f} s")
    world.tally.count(f"{name}: {'taken' if said.get('value') else 'refused or empty'}")
    if elsewhere := _listing(world.folder.parent) - before:
        raise Fault("foreign code", f"{name} wrote {sorted(elsewhere)[:5]}")
    if left := list((inside / "cache" / ".tmp").glob("*")):
        raise Fault("wrong result", f"{name} left {left[:5]}")


def _listing(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "/inside/" not in str(path)}


def _member(name: str, content: bytes = b"x", **fields: object) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    padded = content + bytes(-len(content) % 512)
    return member.tobuf(tarfile.GNU_FORMAT) + padded + bytes(1024)


_MEMBERS: dict[str, Callable[[random.Random], bytes]] = {
    "a path outside": lambda dice: _member(
        dice.choice(("../evil", "a/../../evil", "/tmp/flexops-campaign-evil", "a/k/../../../evil"))
    ),
    "a link": lambda dice: _member(
        "a/k/lib.so",
        b"",
        type=dice.choice((tarfile.SYMTYPE, tarfile.LNKTYPE)),
        linkname="/etc/passwd",
    ),
    "a device": lambda dice: _member(
        "a/k/lib.so",
        b"",
        type=dice.choice((tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)),
        devmajor=1,
        devminor=5,
    ),
    "a name with control characters": lambda dice: _member(
        f"a/k/li{chr(dice.randrange(1, 32))}b.so"
    ),
    "a name not in UTF-8": lambda _: _member("a/k/lib.so").replace(b"lib.so", b"li\xff.so"),
    "a size beyond the end": lambda dice: _member(
        "a/k/lib.so", b"", size=2 ** dice.randrange(10, 60)
    ),
    "a sparse file": lambda _: _member("a/k/lib.so", b"", type=tarfile.GNUTYPE_SPARSE),
    "a long header": lambda _: _member(
        "././@LongLink", bytes(2**22), type=tarfile.GNUTYPE_LONGNAME
    ),
    "an extended header": lambda _: _member(
        "x", b"30 path=" + b"a" * 21 + b"\n", type=tarfile.XHDTYPE
    ),
    "zeros that take room": lambda _: _member("a/k/lib.so", bytes(2**25)),
    "many files": lambda _: (
        b"".join(_member(f"a/k/{number}")[:1024] for number in range(3000)) + bytes(1024)
    ),
    "deep JSON for a manifest": lambda _: _member("a/k/manifest.json", b"[" * 100_000),
    "noise": lambda dice: dice.randbytes(dice.randrange(5000)),
}

PARTS: dict[str, tuple[Callable[[World], None], float]] = {
    "texts": (texts, 1000),
    "archives": (archives, 0.5),
}
"""Each part, and how many of its rounds there are to one kill."""
