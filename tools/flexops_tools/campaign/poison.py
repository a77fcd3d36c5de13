"""The parts about signatures and stores.

A member of a shared cache swaps what is built, and a remote cache sends poison.
"""

from __future__ import annotations

import ctypes
import gzip
import io
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from builds import made_up_entry, tiny_plan

from flexops import settings
from flexops.build.compile import building, kernel_compiler
from flexops.build.describe.spec import OpSpec
from flexops.build.load import extension, provider
from flexops.build.plan import cache_key
from flexops.build.plan.kernel_plan import KernelPlan
from flexops.build.plan.plan import BuildPlan
from flexops.build.store import cache_archive
from flexops.build.store.cache import BuildCache
from flexops.build.store.manifest import Manifest, file_crc32
from flexops.build.store.remote import Remote
from flexops.compute_capability import ComputeCapability, parse_arch_list
from flexops.toolchain import libcuda
from flexops.toolchain.nvrtc import DeviceCompiler
from flexops.toolchain.version import Version

from .builds import ATTACKER, FOREIGN, LINKERS, expect, plan_of
from .frame import Fault, Unavailable, World, descendants, program, run, start

_LIMIT = 0.3  # seconds that a store's answers are waited for
_SLACK = 10.0  # of a machine that has other work to do


def _keys(folder: Path) -> tuple[Path, Path]:
    """A private key, and the file of trusted keys that has it."""
    if not shutil.which("ssh-keygen"):
        raise Unavailable("there is no ssh-keygen")
    key, trusted = folder / "key", folder / "allowed_signers"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "campaign", "-f", str(key)],
        check=True,
    )
    trusted.write_text(f"campaign {key.with_suffix('.pub').read_text()}")
    return key, trusted


# ---- a member swaps the folder that is built in --------------------------------------------------


def swaps(world: World) -> None:
    """A member of a shared cache puts a forged folder in the place of one that is built in."""
    if os.geteuid() != 0:
        raise Unavailable("only root can become another user")
    world.folder.chmod(0o755)
    key, trusted = _keys(world.folder)
    evil = plan_of(world.folder / "evil", FOREIGN)
    forged = (
        building.obtain([evil], BuildCache(world.folder / "made"))[0].require().library.read_bytes()
    )
    for number in world.each():
        mode = (0o2775, 0o777, 0o2777, 0o1777)[number % 4]
        world.guarded(
            lambda number=number, mode=mode: _swap_one(
                world, number + 1, mode, forged, key, trusted
            ),  # type: ignore[misc]
            f"round {number}, mode {mode:o}",
        )


def _swap_one(
    world: World, number: int, mode: int, forged: bytes, key: Path, trusted: Path
) -> None:
    root, copies = world.folder / f"team-{number}", world.folder / f"copies-{number}"
    root.mkdir()
    os.chown(root, 0, ATTACKER)
    root.chmod(mode)
    plan = plan_of(world.folder / "tiny", number)
    when = world.dice.choice(("at the link", "at the link", "at any moment"))
    delay = world.dice.random() * 0.3
    signer = start(lambda: _sign(plan, BuildCache(root, shared=True, signing_key=key)))
    attacker = start(lambda: _swap(root, forged, signer.pid, when, delay), user=ATTACKER)
    said = signer.wait()
    swapped = attacker.wait().get("value", 0)
    reader = BuildCache(root, shared=True, trusted_keys=trusted, copies=copies)
    opened = run(lambda: _opened(plan, reader))
    world.tally.count(f"{when}: {swapped} folders swapped")
    world.tally.count("published" if "value" in said else "not published, which was said")
    if opened.get("value") is None and "error" not in opened:
        world.tally.count("nothing for a reader to open")
    else:
        expect(opened, number, errors=True)
        world.tally.count("opened by a reader")
    for folder in (root, copies):
        shutil.rmtree(folder, ignore_errors=True)


def _sign(plan: BuildPlan, cache: BuildCache) -> bool:
    building.obtain([plan], cache)[0].require()
    return True


def _swap(root: Path, forged: bytes, signer: int, when: str, delay: float) -> int:
    """As the attacker; returns how many folders were swapped."""
    os.umask(0)
    until, swapped = time.monotonic() + 20, 0
    time.sleep(delay if when == "at any moment" else 0)
    while time.monotonic() < until and not swapped and Path(f"/proc/{signer}/task").exists():
        below = descendants(signer)
        if when == "at any moment" or any(program(pid) in LINKERS for pid in below):
            swapped = sum(_swap_folder(folder, forged) for folder in _folders(root / ".tmp"))
        elif not below and _is_zombie(signer):
            break
        time.sleep(0.0005)
    return swapped


def _folders(place: Path) -> list[Path]:
    try:
        return [path for path in place.iterdir() if path.stat().st_uid != ATTACKER]
    except OSError:
        return []


def _swap_folder(folder: Path, forged: bytes) -> bool:
    try:
        folder.rename(folder.with_name(f"moved-{folder.name}"))
        (folder / "tiny-cpu").mkdir(parents=True)
        for library in (folder / "tiny-cpu" / "tiny.so", folder / "tiny.so"):
            library.write_bytes(forged)
        (folder / "tiny-cpu" / "tiny.o.d").write_text("tiny.o:\n")
    except OSError:
        return False
    return True


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _opened(plan: BuildPlan, cache: BuildCache) -> int | None:
    entry = cache.lookup(plan)
    return int(ctypes.CDLL(str(entry.library)).answer()) if entry else None


# ---- a store sends poison ------------------------------------------------------------------------


class _Kernel(NamedTuple):
    """A kernel whose code is its number, as far as the provider and the fake driver care."""

    number: int

    @property
    def spec(self) -> OpSpec:
        return OpSpec("campaign", files=())

    @property
    def expression(self) -> str:
        return f"campaign::kernel<{self.number}>"

    def name(self, architecture: str) -> str:
        return f"campaign-{architecture}"

    def plan(self) -> KernelPlan:
        compiler = DeviceCompiler(
            "nvrtc", Path("/nvrtc"), Version((13, 0, 88)), "the campaign's", Path("/builtins")
        )
        architecture = parse_arch_list("9.0")[0]
        key = cache_key.digest_fields([("kernel", self.expression)])
        return KernelPlan(
            self.name("sm_90"), key, self.expression, "", architecture, compiler, (), {}
        )

    def fix_for(self, _: ComputeCapability) -> str:
        return "flexops build"


class _Driver:
    """Takes numbers for code, and rejects all else as the real one rejects no code."""

    def cuda(self) -> Version:
        return Version((13, 0))

    def load(self, code: bytes, _symbols: object) -> list[int]:
        text = code.rstrip(b"\0")
        if not text.isdigit():
            raise libcuda.DriverError("device kernel image is invalid (error 200)", 200)
        return [int(text)]


def poisoned(world: World) -> None:
    """A store has useless code with right digests, signed archives with added files, or bombs."""
    key, trusted = _keys(world.folder)
    bombs = {
        name: _bomb(name, world.folder / f"{name}.tar.gz")
        for name in ("much content", "empty parts")
    }
    for number in world.each():
        kind = (
            "useless code",
            "useless code, JIT=0",
            "added files",
            "much content",
            "empty parts",
        )[number % 5]
        work = {
            "useless code": lambda number=number: _useless(world, number + 1, jit=True),
            "useless code, JIT=0": lambda number=number: _useless(world, number + 1, jit=False),
            "added files": lambda number=number: _added(world, number + 1, key, trusted),
        }.get(kind, lambda kind=kind: _bombed(world, bombs[kind]))
        world.guarded(work, f"round {number}, {kind}")
        world.tally.count(kind)


def _useless(world: World, number: int, *, jit: bool) -> None:
    """Two processes load a kernel of which the store has useless code; the second has no store."""
    root = world.folder / f"cache-{number}"
    archive = world.folder / "useless.tar.gz"
    plan = _Kernel(number).plan()
    noise = b"\x7fELF" + world.dice.randbytes(world.dice.randrange(2000)) + b"x"
    _archived(world.folder / "made", plan, noise, archive)
    said = run(lambda: _loaded(number, root, archive, jit=jit))
    again = run(lambda: _loaded(number, root, None, jit=jit))
    shutil.rmtree(root)
    if jit:
        expect(said, number)
        expect(again, number)
    elif "the driver rejects it" not in said.get("error", "") or "error" not in again:
        raise Fault("wrong result", f"{said}, then {again}")


def _archived(root: Path, plan: KernelPlan, code: bytes, archive: Path) -> None:
    cache = BuildCache(root)
    with cache.workspace() as workspace:
        built = workspace / "kernel"
        built.mkdir()
        (built / plan.file_name).write_bytes(code)
        manifest = Manifest(
            name=plan.name, key=plan.key, base=plan.key, device="cuda", library=plan.file_name,
            size=len(code), crc32=file_crc32(built / plan.file_name), torch_abi="",
            cuda_version="13.0", architectures=("9.0",), kernel=plan.expression, symbol="kernel",
        )  # fmt: skip
        entry = cache.store(built, manifest)
    cache_archive.export(cache, archive, [entry])
    shutil.rmtree(root)


def _loaded(number: int, root: Path, archive: Path | None, *, jit: bool) -> int:
    """In a child, what a launch loads: the store is a file, the compiler writes the number."""
    os.environ |= {
        "FLEXOPS_CACHE_DIR": str(root),
        "FLEXOPS_CACHE_REMOTE": "file:///nowhere",
        "FLEXOPS_JIT": str(int(jit)),
    }
    settings.current.cache_clear()
    compiled: list[Path] = []

    def compile_(
        _self: Any, _plan: object, output: Path, _limit: float
    ) -> tuple[str, dict[str, int]]:
        compiled.append(output)
        output.write_text(str(number))
        return "kernel", {}

    patched: Any = provider
    driver: Any = libcuda
    driver.driver = _Driver
    patched._plan = lambda kernel, _: (kernel.plan(), ())
    kernel_compiler.Worker.compile = compile_  # type: ignore[method-assign, assignment]
    Remote._get = _sends(archive)  # type: ignore[method-assign]
    kernel: Any = _Kernel(number)
    (loaded,) = provider.load_all(kernel, ComputeCapability(9, 0))
    if len(compiled) != (1 if archive else 0):
        return -len(compiled) - 1
    return loaded


def _sends(archive: Path | None) -> Callable[..., str | None]:
    def get(_self: Remote, name: str, file: Path, _most: int) -> str | None:
        return str(shutil.copy(archive, file)) if archive and name.endswith(".tar.gz") else None

    return get


def _added(world: World, number: int, key: Path, trusted: Path) -> None:
    """A genuine signed archive with more files than an entry has is fetched and installed."""
    folder, plan = world.folder / f"added-{number}", tiny_plan(world.folder / "tiny")
    made = made_up_entry(BuildCache(folder / "made", signing_key=key), plan, str(number).encode())
    cache_archive.export(BuildCache(folder / "made"), folder / "good.tar.gz")
    names = ["train.py", "sitecustomize.py", "build.ninja", "build.log", "setup.cfg", "libc.so.6"]
    added = world.dice.sample(names, world.dice.randrange(1, len(names)))
    with (
        tarfile.open(folder / "good.tar.gz") as old,
        tarfile.open(folder / "bad.tar.gz", "w:gz", format=tarfile.USTAR_FORMAT) as new,
    ):
        for member in old.getmembers():
            new.addfile(member, old.extractfile(member))
        for name in added:
            member = tarfile.TarInfo(f"{plan.name}/{made.manifest.key}/{name}")
            member.size = 4
            new.addfile(member, io.BytesIO(b"evil"))
    (folder / "user").mkdir()
    for name in names:
        (folder / "user" / name).write_text("mine")
    said = run(lambda: _installed(folder, made.manifest, trusted))
    expect(said, number)
    if changed := [name for name in names if (folder / "user" / name).read_text() != "mine"]:
        raise Fault("foreign code", f"{changed} of the user's own were overwritten")
    shutil.rmtree(folder)


def _installed(folder: Path, known: Manifest, trusted: Path) -> int:
    Remote._get = _sends(folder / "bad.tar.gz")  # type: ignore[method-assign]
    cache = BuildCache(
        folder / "reader", trusted_keys=trusted, remote=Remote("file:///nowhere", limit=20)
    )
    entry = cache.fetch_key(known.name, known.key)
    return (
        int(extension._installed(entry, folder / "user", shared=False).read_text()) if entry else -1
    )


def _bomb(kind: str, path: Path) -> Path:
    """An archive within the bounds of size and ratio that takes seconds to unpack."""
    if kind == "empty parts":
        path.write_bytes(gzip.compress(b"", mtime=0) * 1_000_000)
        return path
    member, piece = tarfile.TarInfo("a/k/lib.so"), bytes(300_000)
    member.size = 2_000 * 304_000
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(member.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(2_000):
            stream.write(piece + os.urandom(4_000))
    return path


def _bombed(world: World, bomb: Path) -> None:
    """A load is kept for the store's limit, and gets nothing."""
    root = world.folder / "bombed"
    seconds = run(lambda: _fetched(root, bomb))["value"]
    if seconds < 0:
        raise Fault("wrong result", "a bomb was taken for an entry")
    if seconds > _LIMIT + _SLACK:
        raise Fault("hang", f"a bomb kept a load for {seconds:.0f} s")
    if left := list((root / ".tmp").glob("*")):
        raise Fault("wrong result", f"a bomb left {left[:5]}")
    slowest = max(
        (float(what.split()[-2]) for what in world.tally.seen if what.startswith("slowest")),
        default=0.0,
    )
    if seconds > slowest:
        world.tally.seen.pop(f"slowest bomb: {slowest:.1f} s", None)
        world.tally.seen[f"slowest bomb: {seconds:.1f} s"] = 1


def _fetched(root: Path, bomb: Path) -> float:
    Remote._get = _sends(bomb)  # type: ignore[method-assign]
    began = time.monotonic()
    entry = BuildCache(root, remote=Remote("file:///nowhere", limit=_LIMIT)).fetch_key("a", "k")
    return -1.0 if entry else time.monotonic() - began


PARTS: dict[str, tuple[Callable[[World], None], float]] = {
    "swaps": (swaps, 0.2),
    "poisoned": (poisoned, 0.1),
}
"""Each part, and how many of its rounds there are to one kill."""
