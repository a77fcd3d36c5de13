"""The remote cache: each artifact is compiled once, whatever the store; and a store that fails
costs little, and never a failure."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builds
import pytest
import remote_stores as stores
from builds import answer, child_environment, runs, tiny_plan
from marks import first_of
from processes import completed
from remote_machines import at_once, claim

from flexops.build.compile import building
from flexops.build.plan import cache_key
from flexops.build.store import cache_archive, counters, election, remote
from flexops.build.store.cache import BuildCache
from flexops.build.store.remote import Remote


@pytest.fixture(scope="module")
def google_address() -> Iterator[str]:
    with stores.served(stores.BadStore()) as address:
        yield address


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory, require: Any) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("azurite")
    program = stores.find_azurite(folder)
    require(program, "Azurite, Microsoft's own emulator", "npm install -g azurite")
    with stores.azurite(str(program)) as environment:
        yield environment


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, require: Any) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("registry")
    program = stores.find_registry(folder)
    require(program, "docker-registry", "apt-get install docker-registry")
    with stores.oci(str(program), folder) as place:
        yield place


AZURE = pytest.param("az", marks=pytest.mark.slow)


@pytest.fixture(params=[*first_of("s3", "gs", "oci", "file"), AZURE])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that can be written to."""
    name = f"b{os.urandom(8).hex()}"
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", address := request.getfixturevalue("s3_address"))
        stores.bucket(address, name)
    elif request.param == "gs":
        monkeypatch.setenv("GOOGLE_BASE_URL", request.getfixturevalue("google_address"))
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "tests-own-token")
    elif request.param == "az":
        for variable, value in request.getfixturevalue("azure").items():
            monkeypatch.setenv(variable, value)
        stores.azure_container(os.environ["AZURE_STORAGE_ENDPOINT"], name)
    elif request.param == "oci":
        return f"oci://{request.getfixturevalue('registry')}/team/{name}"
    elif request.param == "file":
        return f"file://{tmp_path}/store"
    return f"{request.param}://{name}/some/prefix"


# ---- what it is for ----


def test_what_one_machine_compiled_the_others_fetch(url, machines, opened, wait):
    assert wait
    assert answer(machines.obtain("first", opened(url)).library) == 42
    names = {item.name for item in opened(url).list()}
    second = opened(url, write=False)
    entry = machines.obtain("second", second)
    assert machines.compiled == 1
    assert (answer(entry.library), second.problem) == (42, "")
    assert entry.directory.is_relative_to(machines.folder / "caches" / "second")
    assert remote.entry_name(entry.manifest.name, entry.manifest.key) in names
    assert {item.name for item in opened(url).list()} == names


def test_over_http_from_a_server_that_knows_files_only(tmp_path, machines, opened):
    machines.obtain("first", opened(f"file://{tmp_path}/www/kernels"))
    server = stores.WebServer(tmp_path / "www")
    with stores.served(server) as address:
        second = opened(f"{address}/kernels")
        assert answer(machines.obtain("second", second).library) == 42
    assert machines.compiled == 1
    assert any(path.endswith(".tar.gz") for path in server.asked)


@pytest.mark.parametrize("known", [True, False])
def test_over_https_from_a_server_whose_certificate_is_known(
    known, tmp_path, machines, opened, monkeypatch, require
):
    require(shutil.which("openssl"), "openssl", "apt-get install openssl")
    certificate = stores.certificate(tmp_path)
    machines.obtain("first", opened(f"file://{tmp_path}/www/kernels"))
    server = stores.WebServer(tmp_path / "www")
    server.socket = stores.encrypted(certificate).wrap_socket(server.socket, server_side=True)
    if known:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with stores.served(server) as address:
        second = opened(
            f"{address.replace('http://127.0.0.1', 'https://localhost')}/kernels",
            limit=300.0 if known else 5.0,
        )
        assert answer(machines.obtain("second", second).library) == 42
    assert machines.compiled == (1 if known else 2)
    assert bool(second.problem) is not known


def test_an_edited_header_is_another_artifact_and_the_old_one_stays(url, machines, opened):
    plan = machines.plan()
    machines.obtain("first", opened(url), plan)
    header = plan.sources[0].with_name("tiny.h")
    header.write_text("inline int answer_of_header() { return 43; }\n")
    os.utime(header, (1, 1))
    second = machines.obtain("second", there := opened(url), plan)
    assert answer(second.library) == 43
    headers = there.headers(machines.cache("other", there), plan.name, second.manifest.base)
    assert headers == {"<tiny>/tiny.h": cache_key.file_digest(header)}, "those of the last build"
    assert answer(machines.obtain("third", opened(url), plan).library) == 43
    assert machines.compiled == 2
    assert len([item for item in opened(url).list() if item.name.endswith(".tar.gz")]) == 2


def test_a_store_that_is_slow_and_has_nothing_is_given_up(tmp_path, monkeypatch):
    """Look-ups in vain may take as long together as one may; what is found starts anew."""
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 1e6)
    there, found = Remote("s3://bucket", limit=10.0), [False, True, False, False]
    answered = {"seconds": 6.0, "tag": "1"}
    monkeypatch.setattr(there, "_ask", lambda *_: {"found": found.pop(0), **answered})
    for _ in range(3):
        there._get("name", tmp_path / "file", 1)
        assert not there.problem
    there._get("name", tmp_path / "file", 1)
    assert "it is slow" in there.problem


@pytest.mark.usefixtures("patient")
def test_what_a_store_hands_out_is_read_with_care(machines, monkeypatch):
    """A list of headers that is none is not known, and what is rejected costs time as well."""
    there, headers = Remote("s3://bucket", limit=1e-9), {"a.h": "1"}
    texts = ["[]", '["a.h"]', '{"a.h": 1}', "{", json.dumps(headers), "no archive"]

    def get(_name: str, file: Path, _most: int) -> str:
        file.write_text(texts.pop(0))
        return "tag"

    monkeypatch.setattr(there, "_get", get)
    cache = machines.cache("one", there)
    found = [there.headers(cache, "tiny-cpu", "base") for _ in range(5)]
    assert found == [None] * 4 + [headers]
    assert there.fetch(cache, "tiny-cpu", "1" * 40) is None
    assert "is rejected" in there.problem


def test_a_check_names_a_store_that_forgets_and_one_that_ignores_conditions(monkeypatch):
    there, written = Remote("s3://bucket", write=True), []

    def ask(asked: dict[str, Any], _limit: float) -> dict[str, Any]:
        if asked["do"] == "create":
            written.append(asked["name"])
        if asked["do"] == "get":
            Path(asked["file"]).write_text("another")
        return {"found": bool(written), "made": True, "conditional": True, "seconds": 0.0}

    monkeypatch.setattr(there, "_ask", ask)
    found = {one.what: one for one in there.check()}
    assert (found["read back"].ok, found["remove"].ok) == (False, True)
    assert "another content" in found["read back"].found
    assert found["conditional put"].found.startswith("ignored")


def test_what_is_there_is_never_overwritten(url, machines, opened):
    entry = machines.obtain("first", opened(url))
    before = opened(url).list()
    other = opened(url)
    changed = BuildCache(machines.folder / "changed")
    shutil.copytree(machines.folder / "caches" / "first", changed.root)
    (changed.root / entry.manifest.name / entry.manifest.key / "build.log").write_text(
        "another log\n"
    )
    assert other.publish(changed, next(iter(changed.entries())))
    assert [item for item in other.list() if item.name.endswith(".tar.gz")] == [
        item for item in before if item.name.endswith(".tar.gz")
    ]


def test_without_permission_to_write_nothing_is_written(tmp_path, machines, opened):
    machines.obtain("first", opened(f"file://{tmp_path}/store", write=False))
    assert opened(f"file://{tmp_path}/store").list() == []


def test_a_warm_start_does_not_touch_it(machines, opened, bad):
    machines.obtain("first", opened("s3://bucket"))
    cold, bad.requests[:] = len(bad.requests), []
    warm = opened("s3://bucket")
    machines.obtain("first", warm)
    assert cold > 0
    assert bad.requests == []
    assert warm._worker is None


def test_signatures_travel_and_count(tmp_path, machines, opened, program):
    program("ssh-keygen", "openssh-client")
    for name in ("ours", "theirs"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    (tmp_path / "trusted").write_text(f"builder@team {(tmp_path / 'ours.pub').read_text()}")
    url = f"file://{tmp_path}/store"
    signed = {"trusted_keys": tmp_path / "trusted", "signing_key": tmp_path / "ours"}
    machines.obtain("theirs", opened(url), signing_key=tmp_path / "theirs")
    reader = opened(url)
    machines.obtain("ours", reader, **signed)
    assert machines.compiled == 2, "what others signed is not taken"
    assert not reader.problem
    shutil.rmtree(tmp_path / "store")
    machines.obtain("again", opened(url), machines.plan("other-cpu"), **signed)
    machines.obtain(
        "reader", opened(url), machines.plan("other-cpu"), trusted_keys=tmp_path / "trusted"
    )
    assert machines.compiled == 3


# ---- bad days ----


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (stores.hangs, "no answer within"),
        (stores.fails, "500"),
        (stores.forbids, "403"),
        (stores.closes, ""),
    ],
)
def test_a_store_that_fails_is_not_asked_again_at_once(fault, why, machines, opened, bad):
    bad.fault = fault
    there = opened("s3://bucket", limit=1.0 if fault is stores.hangs else 300.0)
    assert answer(machines.obtain("first", there).library) == 42
    assert why in there.problem
    assert there.problem
    asked = len(bad.requests)
    assert answer(machines.obtain("first", there, machines.plan("other-cpu")).library) == 42
    assert len(bad.requests) == asked, "it is not asked any more"
    assert asked <= 6, "the client's own retries"


@pytest.mark.parametrize(
    "fault", [stores.truncates, stores.breaks_off, stores.garbles, stores.lies]
)
def test_what_a_store_says_is_not_believed(fault, machines, opened, bad):
    machines.obtain("first", opened("s3://bucket"))
    machines.obtain("first", opened("s3://bucket"), machines.plan("other-cpu"))
    bad.fault = fault
    cache = machines.cache("second", opened("s3://bucket"))
    entry = building.obtain([machines.plan()], cache)[0].require()
    assert answer(entry.library) == 42
    assert machines.compiled == 3
    assert [one.manifest.name for one in cache.entries()] == ["tiny-cpu"], (
        "nothing of what was sent is in the cache"
    )


def test_a_full_store_is_still_read(machines, opened, bad):
    machines.obtain("first", opened("s3://bucket"))
    bad.fault = stores.is_full
    there = opened("s3://bucket")
    machines.obtain("second", there, machines.plan("other-cpu"))
    assert "507" in there.unwritten
    assert not there.problem
    machines.obtain("second", there)
    assert machines.compiled == 2


def test_a_bucket_that_vanishes(s3_address, machines, opened, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_address)
    there = opened("s3://was-never-there/x")
    assert answer(machines.obtain("first", there).library) == 42
    assert there.unwritten


def test_a_store_that_is_stopped_in_the_middle(machines, opened, monkeypatch):
    server = stores.BadStore()
    with stores.served(server) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        there = opened("s3://bucket")
        machines.obtain("first", there)
    server.fault = stores.closes  # what is still connected
    assert answer(machines.obtain("first", there, machines.plan("other-cpu")).library) == 42
    assert there.problem


def test_a_client_that_is_not_installed_is_named(machines, opened, monkeypatch, logged):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    there = opened("s3://bucket")
    assert answer(machines.obtain("first", there).library) == 42
    assert 'pip install "flexops-torch[remote]"' in there.problem
    assert logged.getvalue().count("flexops-torch[remote]") == 1


# ---- one compile in a cluster ----

RANK = """
import os, sys
sys.path[:0] = [{support!r}]
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
from builds import answer, tiny_plan
from flexops.build.compile import building as builder
from flexops.build.store import counters
from flexops.build.store.cache import BuildCache
plan = tiny_plan(Path({sources!r}), compiler={compiler!r})
cache = BuildCache(Path({caches!r}) / str(dist.get_rank()))
assert answer(builder.obtain([plan], cache)[0].require().library) == 42
made = counters.cache_stats()
Path({caches!r}, f"said-{{dist.get_rank()}}").write_text(f"{{made['compiler']['hits']}} {{made['ranks']['hits']}}")
dist.barrier()
dist.destroy_process_group()
"""


def test_of_the_ranks_of_a_job_one_compiles(tmp_path, machines):
    """Two ranks with a cache each, as on two machines, under torchrun; no remote cache is
    there."""
    machines.plan()
    support = str(Path(builds.__file__).parent)
    (tmp_path / "caches").mkdir()
    script = tmp_path / "rank.py"
    script.write_text(
        RANK.format(
            support=support,
            sources=str(tmp_path / "sources-tiny-cpu"),
            caches=str(tmp_path / "caches"),
            compiler=machines.compiler,
        )
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    completed(command, env=child_environment(OMP_NUM_THREADS="1"))
    assert machines.compiled == 1
    assert sorted((tmp_path / "caches" / f"said-{rank}").read_text() for rank in range(2)) == [
        "0 1",
        "1 0",
    ]


@pytest.mark.parametrize("url", ["s3", "gs", AZURE, "file"], indirect=True)
def test_of_processes_without_a_job_one_compiles(url, machines, opened, wait):
    """Four machines that know of each other only through the store: threads here, each with a cache
    and a client of its own."""
    wait(600)
    plan = machines.plan()
    made = at_once(4, lambda one: machines.obtain(f"machine{one}", opened(url), plan).library)
    assert [answer(library) for library in made] == [42] * 4
    assert machines.compiled == 1


@pytest.mark.parametrize("url", ["s3", "gs", AZURE], indirect=True)
def test_only_one_takes_over_a_claim(url, machines, opened):
    there, plan = opened(url), machines.plan()
    cache, name, digest = machines.cache("other", there), plan.name, building._digest(plan)
    claim(there, machines, until=0, by="who is late")
    found = there.hint(cache, name, digest, "claim")
    assert found
    assert [
        there.leave(cache, name, digest, "claim", {"until": 9e12, "by": who}, replace=found[1])
        for who in ("first", "second")
    ] == [True, False]
    assert (again := there.hint(cache, name, digest, "claim"))
    assert again[0]["by"] == "first"
    assert not there.problem + there.unwritten


def test_a_machine_that_never_delivers_is_not_waited_for_any_longer(
    tmp_path, machines, opened, wait
):
    wait(1)
    there = opened(f"file://{tmp_path}/store")
    claim(there, machines, until=9e12)
    assert answer(machines.obtain("first", there).library) == 42
    assert machines.compiled == 1


@pytest.mark.parametrize(
    "value", [{"until": 5.0}, {"until": "never"}, {"until": 9e12, "failed": True}]
)
def test_a_claim_that_has_expired_or_failed_blocks_no_process(value, machines, opened, bad, wait):
    wait(1000)
    assert bad
    there = opened("s3://bucket")
    claim(there, machines, **value)
    assert answer(machines.obtain("first", there).library) == 42


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(
    tmp_path, machines, opened, wait
):
    """A command that is run again after it was killed starts at once."""
    wait(1000)
    there = opened(f"file://{tmp_path}/store")
    mine = election._Claims(there, machines.cache("claiming", there), 1000)._claim()
    assert election._is_held(mine)
    theirs = mine | {"by": mine["by"].replace(f":{os.getpid()}:", f":{_ended()}:")}
    assert election._is_held(theirs | {"by": f"other-{theirs['by']}"})
    claim(there, machines, **theirs)
    assert answer(machines.obtain("first", there).library) == 42


def test_hosts_of_one_name_are_told_apart():
    """Each has the first PID namespace, whose number is the same everywhere."""
    mine = f"{election._machine()}:1:nonce"
    assert not election._is_dead(mine)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ended = mine.replace(":1:", f":{_ended()}:")
    assert election._is_dead(ended)
    assert not election._is_dead(ended.replace(boot, "1a2b3c"))
    assert not election._is_dead(ended.replace(f"{boot}:", ""))  # as it was written before


def test_a_process_that_proc_hides_is_not_taken_for_dead(monkeypatch):
    """Of another user, with /proc mounted with hidepid."""
    real = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda x: not str(x).startswith("/proc/") and real(x))
    assert not election._is_dead(f"{election._machine()}:{os.getpid()}:nonce")

    def not_permitted(_process: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", not_permitted)
    assert not election._is_dead(f"{election._machine()}:{_ended()}:nonce")


@pytest.mark.parametrize("process", ["99999999999999999999", "9" * 5000, "-1", "x", ""])
def test_what_is_no_number_of_a_process_is_not_taken_for_dead(process):
    assert not election._is_dead(f"{election._machine()}:{process}:nonce")


def _ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_cannot_be_compiled_is_tried_by_everybody_at_once(tmp_path, machines, opened, wait):
    wait(1000)
    plan = tiny_plan(tmp_path / "wrong", compiler=machines.compiler, source="this is no C++\n")
    there = opened(f"file://{tmp_path}/store")
    for name in ("first", "second"):
        assert building.obtain([plan], machines.cache(name, there))[0].error
    assert len([kind for kind in runs(tmp_path / "compiler") if kind == "compile"]) == 2


# ---- the real thing ----

CALL = """
import json, sys, torch, flexops
from flexops.build.store import counters
from flexops.build.load import loader
x, cos, sin = torch.randn(2, 5, 4, 8), torch.randn(5, 4), torch.randn(5, 4)
got = flexops.rotary_embedding(x, x, cos, sin)[0]
loader.ensure("rope", "cpu")
status = next(one for one in flexops.status() if (one.op, one.device) == ("rope", "cpu"))
print(json.dumps({"backend": status.backend, "reason": status.reason, "sum": float(got.sum().isfinite()), "counters": counters.cache_stats(),
    "clients": [name for name in ("obstore", "oras", "requests") if name in sys.modules]}))
"""


def call(tmp_path: Path, name: str, **variables: str | None) -> dict[str, Any]:
    environment = child_environment(FLEXOPS_CACHE_DIR=str(tmp_path / name), **variables)
    done = completed([sys.executable, "-c", CALL], env=environment)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_an_operator_on_a_machine_without_a_compiler(tmp_path, host_compiler):
    assert host_compiler
    there = {
        "FLEXOPS_CACHE_REMOTE": f"file://{tmp_path}/store",
        "FLEXOPS_CACHE_REMOTE_TIMEOUT": "300",
    }
    first = call(tmp_path, "first", FLEXOPS_CACHE_REMOTE_WRITE="1", **there)
    assert first["reason"].startswith("compiled in")
    nothing = {"FLEXOPS_JIT": "0", "FLEXOPS_FALLBACK": "forbid", "PATH": "/nonexistent"}
    second = call(tmp_path, "second", **there, **nothing)
    assert (second["backend"], second["reason"]) == ("jit", "found in the remote cache")
    assert (second["counters"]["remote"]["hits"], second["counters"]["compiler"]["hits"]) == (1, 0)
    warm = call(tmp_path, "second", **there, **nothing)
    assert warm["reason"] == "found in the cache"
    assert warm["counters"]["remote"] == {"hits": 0, "misses": 0, "bytes": 0, "seconds": 0}
    assert first["clients"] == second["clients"] == [], "the client library stays in the worker"


def test_a_kernel(tmp_path, opened, nvrtc_of):
    from flexops.build.compile import device_code
    from flexops.build.describe import catalog, layout
    from flexops.build.plan import kernel_plan
    from flexops.compute_capability import parse_arch_list

    rope = catalog.find("rope")
    architecture, sources = parse_arch_list("9.0")[0], rope.cuda_sources
    plan = kernel_plan.plan_kernel(
        "rope",
        sources,
        "flexops::rope::rotate<float>",
        architecture,
        nvrtc_of(),
        layout.csrc_root(),
    )
    url = f"file://{tmp_path}/store"
    made = [
        device_code.obtain([plan], BuildCache(tmp_path / name, remote=opened(url)))[0]
        for name in ("first", "second")
    ]
    assert [result.cached for result in made] == [False, True]
    codes = [result.require().library.read_bytes() for result in made]
    assert codes[0] == codes[1]
    assert codes[0].startswith(b"\x7fELF")


def test_an_extension_of_a_users_own(tmp_path, host_compiler, monkeypatch):
    import flexops
    from flexops.errors import FlexopsError

    assert host_compiler
    (tmp_path / "own.cpp").write_text('extern "C" int answer() { return 42; }\n')
    load = {"name": "own", "sources": [str(tmp_path / "own.cpp")], "is_python_module": False}
    url = f"file://{tmp_path}/store"
    for name, value in {
        "REMOTE": url,
        "REMOTE_WRITE": "1",
        "REMOTE_TIMEOUT": "300",
        "DIR": str(tmp_path / "first"),
    }.items():
        monkeypatch.setenv(f"FLEXOPS_CACHE_{name}", value)
    flexops.load(**load)
    monkeypatch.setenv("FLEXOPS_CACHE_DIR", str(tmp_path / "second"))
    monkeypatch.setenv("FLEXOPS_JIT", "0")
    flexops.load(**load)
    assert [entry.manifest.name for entry in BuildCache(tmp_path / "second").entries()] == ["own"]
    monkeypatch.setenv("FLEXOPS_CACHE_REMOTE", f"file://{tmp_path}/empty")
    monkeypatch.setenv("FLEXOPS_CACHE_DIR", str(tmp_path / "third"))
    with pytest.raises(FlexopsError, match="FLEXOPS_JIT=0"):
        flexops.load(**load)
    for one in (url, f"file://{tmp_path}/empty"):
        if worker := remote._of(one, True, 300.0, False)._worker:
            worker.stop()


# ---- secrets, counters, and the rest ----


def test_errors_tell_no_secrets(machines, opened, bad, logged):
    bad.fault = stores.forbids
    port = bad.server_port
    there = opened(f"http://user:hunter2@127.0.0.1:{port}/store?sig=topsecret")
    machines.obtain("first", there)
    said = f"{there.problem} {there.name} {logged.getvalue()}"
    assert there.problem
    assert not [secret for secret in ("hunter2", "topsecret", "tests-own-secret") if secret in said]


def test_counters_are_of_all_processes_that_used_a_cache(tmp_path, machines, opened):
    url = f"file://{tmp_path}/store"
    machines.obtain("first", opened(url))
    machines.obtain("second", opened(url))
    first, second = (
        counters.of_cache(machines.folder / "caches" / name) for name in ("first", "second")
    )
    assert (first["compiler"]["hits"], first["published"]["hits"], first["remote"]["hits"]) == (
        1,
        1,
        0,
    )
    assert (second["compiler"]["hits"], second["remote"]["hits"]) == (0, 1)
    assert second["remote"]["bytes"] == first["published"]["bytes"] > 0
    text = counters.prometheus(second)
    assert 'flexops_cache_hits_total{tier="remote"} 1' in text.splitlines()


def test_a_fork_gets_a_client_of_its_own(tmp_path, machines, opened):
    there = opened(f"file://{tmp_path}/store")
    machines.obtain("first", there)
    parents, child = there._worker, os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if there.list() and there._worker is not parents else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert there.list(), "the parent's goes on"


def test_an_archive_must_be_what_was_asked_for(tmp_path, machines):
    cache = machines.cache("first", None)
    building.obtain([machines.plan(), machines.plan("other-cpu")], cache)
    cache_archive.export(cache, tmp_path / "both.tar.gz")
    entry = cache.entries()[0].manifest
    other = BuildCache(tmp_path / "empty")
    with pytest.raises(Exception, match="not the archive"):
        cache_archive.import_archive(other, tmp_path / "both.tar.gz", only=(entry.name, entry.key))
    assert other.entries() == []
    assert remote.is_named_right(remote.entry_name(entry.name, entry.key), entry)
    assert not remote.is_named_right(f"other/{entry.key}.tar.gz", entry)
    odd = entry._replace(name="../up")
    assert not remote.is_named_right(remote.entry_name(odd.name, odd.key), odd)
