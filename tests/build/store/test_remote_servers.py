"""The remote cache against servers as sites run them, with passwords, TLS and conditions that are
ignored: each artifact is compiled once, a failure is not for ever, and nothing leaves TLS.
"""

from __future__ import annotations

import http.server
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import remote_stores as stores
from builds import answer, child_environment, tiny_plan
from command_line import flexops_command
from marks import first_of
from processes import completed
from remote_machines import Open, at_once, claim

from flexops.build.compile import building
from flexops.build.store import counters, election, remote
from flexops.build.store.cache import BuildCache
from flexops.build.store.remote import Remote


@pytest.fixture(scope="module")
def s3rver(tmp_path_factory: pytest.TempPathFactory, require: Any) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("s3rver")
    program = stores.find_s3rver(folder)
    require(program, "s3rver", "npm install -g s3rver")
    with stores.s3rver(str(program), folder) as address:
        yield address


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, require: Any) -> Iterator[tuple[str, str]]:
    """Its place, and a folder with a login."""
    folder = tmp_path_factory.mktemp("registry")
    program = stores.find_registry(folder)
    require(program, "docker-registry", "apt-get install docker-registry")
    with stores.oci(str(program), folder, users=True) as place:
        yield place, stores.docker_login(folder, place)


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory, require: Any) -> Iterator[tuple[str, Path]]:
    """Its URL with a password, and its certificate."""
    require(shutil.which("openssl"), "openssl", "apt-get install openssl")
    folder = tmp_path_factory.mktemp("nginx")
    program = stores.find_nginx(folder)
    require(program, "nginx", "apt-get install nginx")
    certificate = stores.certificate(folder)
    with stores.webdav(str(program), folder, certificate) as url:
        password = quote(stores.PASSWORD, safe="")
        yield url.replace("://", f"://{stores.USER}:{password}@"), certificate


@pytest.fixture(params=first_of("oci", "s3rver", "https"))
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, opened: Open) -> str:
    """A store without conditional puts."""
    assert opened, "which sets other credentials"
    name = f"b{os.urandom(8).hex()}"
    if request.param == "s3rver":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3rver"))
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(variable, "S3RVER")
        return f"s3://bucket/{name}"
    if request.param == "oci":
        place, login = request.getfixturevalue("registry")
        monkeypatch.setenv("DOCKER_CONFIG", login)
        return f"oci://{place}/team/{name}"
    address, certificate = request.getfixturevalue("nginx")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    return f"{address}/{name}"


def test_what_one_machine_compiled_the_others_fetch(url, machines, opened, wait):
    assert wait
    first, second = opened(url), opened(url, write=False)
    assert answer(machines.obtain("first", first).library) == 42
    assert answer(machines.obtain("second", second).library) == 42
    assert (first.problem, first.unwritten, second.problem) == ("", "", "")
    assert machines.compiled == 1


def test_without_conditional_puts_one_of_many_compiles(url, machines, opened, wait, in_step):
    """Eight machines that know of each other only through the store."""
    wait(600)
    in_step(8)
    plan = machines.plan()
    made = at_once(8, lambda one: machines.obtain(f"machine{one}", opened(url), plan).library)
    assert [answer(library) for library in made] == [42] * 8
    assert machines.compiled == 1


def test_one_of_many_takes_over_a_claim_that_has_expired(url, machines, opened, in_step):
    claim(opened(url), machines, until=0, by="a process that is late")
    in_step(4)
    plan = machines.plan()
    name, digest = plan.name, building._digest(plan)

    def take(number: int) -> bool | None:
        own = opened(url)
        cache = machines.cache(f"taker{number}", own)
        looked = time.monotonic()
        found = own.hint(cache, name, digest, "claim")
        assert found
        value = {"until": 9e12, "by": str(number)}
        return own.claim(cache, name, digest, value, looked=looked, replace=found[1])

    assert sorted(map(str, at_once(4, take))) == ["False", "False", "False", "True"]


@pytest.mark.parametrize(("spent", "shortest", "longest"), [(0, 2, 30), (3, 12, 30), (99, 30, 30)])
def test_the_pause_covers_all_from_the_look_up_to_the_last_put(
    spent, shortest, longest, monkeypatch, machines
):
    """Of a store that ignores conditions: both puts of the first claim count."""
    there, pauses = Remote("s3://bucket", write=True, limit=10.0), []
    monkeypatch.setattr(there, "_ask", lambda *_: {"made": True, "found": False})
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    cache = machines.cache("one", there)
    made = there.claim(cache, "a", "d", {"by": "me"}, looked=time.monotonic() - spent)
    assert made is None
    assert shortest <= pauses[0] <= longest


def test_claims_of_any_content_have_one_length(tmp_path, machines, opened):
    """A server that writes two at once into one file keeps one of them, and no mixture."""
    there = opened(f"file://{tmp_path}/store")
    ballot = election._Claims(there, machines.cache("one", there), 600)
    ballot.begin("a", "d", lambda: None)
    sizes = {there.list()[0].size}
    claim(there, machines, until=0, by="a process that is late")
    ballot.deliver("a", "d", None)
    assert len(sizes | {item.size for item in there.list()}) == 1


def test_a_claim_that_is_being_written_is_read_again(monkeypatch, machines):
    """A simple server shows nothing of it at that moment: its maker is waited for all the same."""
    there, asked = Remote("s3://bucket", write=True), []
    shown = [None, ({"until": 9e12}, "tag"), None, None, ({"until": 0}, "tag")]

    def hint(*_: Any) -> Any:
        asked.append(0)
        return shown.pop(0)

    monkeypatch.setattr(there, "hint", hint)
    monkeypatch.setattr(there, "claim", lambda *_, **_options: pytest.fail("it is not taken over"))
    ballot = election._Claims(there, machines.cache("one", there), 600)
    assert ballot.receive("a", "d", lambda: None, lambda: "the entry") == "the entry"
    assert len(asked) == 5


def test_a_store_that_ignores_conditions_is_detected(
    s3_address, s3rver, machines, opened,
    monkeypatch, logged
):  # fmt: skip
    for address, honoured in ((s3rver, False), (s3_address, True)):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "S3RVER")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S3RVER")
        if honoured:
            stores.bucket(s3_address, "bucket")
        there = opened("s3://bucket/detect")
        cache = machines.cache("detect", there)
        assert there.claim(cache, "a", "d", {"by": "me"}, looked=time.monotonic())
        assert there.conditional is honoured
        assert ("it ignores the condition of a put" in logged.getvalue()) is not honoured
        logged.truncate(0)


def test_a_registry_without_a_login_says_so(
    registry, machines, opened, tmp_path,
    monkeypatch
):  # fmt: skip
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    there = opened(f"oci://{registry[0]}/team/x")
    assert answer(machines.obtain("first", there).library) == 42
    assert there.problem == f"{registry[0]} requires a user and password"


# ---- a failure is not for ever ----


def let_the_pause_pass(there: Remote) -> None:
    there._asking._until = there._writing._until = 0.0


def test_a_store_that_failed_is_asked_again_after_a_pause(machines, opened, bad):
    machines.obtain("first", opened("s3://bucket"))
    there, bad.fault = opened("s3://bucket"), stores.forbids
    before = counters.cache_stats()["remote_given_up"]["count"]
    machines.obtain("second", there, machines.plan("other-cpu"))
    assert "403" in there.problem
    assert counters.cache_stats()["remote_given_up"]["count"] == before + 1
    bad.fault = None
    let_the_pause_pass(there)
    compiled = machines.compiled
    machines.obtain("second", there)
    assert (there.problem, machines.compiled) == ("", compiled)
    text = counters.prometheus(counters.of_cache(machines.folder / "caches" / "second"))
    assert "flexops_remote_given_up_total 1" in text.splitlines()


def test_pauses_grow_and_a_success_makes_them_short_again():
    gate = remote.Gate()
    assert [gate.close("why") for _ in range(7)] == [30, 60, 120, 240, 480, 600, 600]
    assert gate.why == "why"
    gate.opened()
    assert gate.close("why") == 30


def test_a_full_store_is_written_again_after_a_pause(machines, opened, bad):
    there, bad.fault = opened("s3://bucket"), stores.is_full
    machines.obtain("first", there)
    assert "507" in there.unwritten
    bad.fault = None
    let_the_pause_pass(there)
    machines.obtain("first", there, machines.plan("other-cpu"))
    assert any("other-cpu" in name for name in bad.objects)


def test_a_client_that_starts_slowly_is_no_slow_store(tmp_path, machines, opened, monkeypatch):
    """As where all processors are busy: its start takes longer than a request may."""
    real, clock, passed = remote._worker, time.monotonic, [0.0]

    def slowly(*arguments: Any) -> Any:
        child = real(*arguments)
        passed[0] += 1000.0
        return child

    monkeypatch.setattr(remote, "_worker", slowly)
    monkeypatch.setattr(remote.time, "monotonic", lambda: clock() + passed[0])
    there = opened(f"file://{tmp_path}/store", limit=300.0)
    machines.obtain("first", there)
    assert there.problem == ""
    assert there.list()


def test_a_remote_miss_is_counted(tmp_path, machines, opened):
    machines.obtain("first", opened(f"file://{tmp_path}/store"))
    counted = counters.of_cache(machines.folder / "caches" / "first")["remote"]
    assert (counted["hits"], counted["misses"] > 0) == (0, True)


# ---- nothing leaves TLS ----


class Redirects(http.server.ThreadingHTTPServer):
    """Leads whatever is asked to another address."""

    def __init__(self, target: str) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(302)
                self.send_header("Location", f"{target}{self.path}")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        super().__init__(("127.0.0.1", 0), Handler)


def test_a_redirect_does_not_lead_from_https_to_http(
    tmp_path, machines, opened, monkeypatch, require
):
    """Not even where another store's address is one without encryption."""
    require(shutil.which("openssl"), "openssl", "apt-get install openssl")
    machines.obtain("first", opened(f"file://{tmp_path}/www/kernels"))
    certificate, open_one = stores.certificate(tmp_path), stores.WebServer(tmp_path / "www")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with stores.served(open_one) as target:
        monkeypatch.setenv("AWS_ENDPOINT_URL", target)
        front = Redirects(target)
        context = stores.encrypted(certificate)
        front.socket = context.wrap_socket(front.socket, server_side=True)
        with stores.served(front) as address:
            place = address.replace("http://127.0.0.1", "https://localhost")
            there = opened(f"{place}/kernels")
            machines.obtain("second", there)
    assert open_one.asked == []
    assert there.problem
    assert machines.compiled == 2


@pytest.mark.parametrize("plain", [False, True])
def test_http_to_another_machine_is_for_who_allows_it(plain, monkeypatch, opened):
    assert opened
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.invalid:9000")
    there = Remote("s3://bucket", plain=plain)
    try:
        with pytest.raises(Exception, match="remote cache") as caught:
            there.list()
    finally:
        if there._worker:
            there._worker.stop()
    rejected = "AWS_ENDPOINT_URL begins with http://" in str(caught.value)
    assert rejected is not plain
    assert ("FLEXOPS_CACHE_REMOTE_HTTP=1" in str(caught.value)) is rejected


# ---- what is printed ----


def test_only_the_process_that_compiles_says_so(
    tmp_path, machines, opened, monkeypatch,
    capsys
):  # fmt: skip
    from flexops.build.compile import progress

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    said = []
    for name in ("first", "second", "third"):
        cache = machines.cache(name, opened(f"file://{tmp_path}/store"))
        with progress.shown("tiny-cpu", "info") as report:
            building.obtain([machines.plan()], cache, progress=report)
        said.append(capsys.readouterr().err)
    assert "flexops: compiling tiny-cpu took" in said[0]
    assert f"(rank 3 of 8 on {os.uname().nodename})" in said[0]
    assert said[1:] == ["", ""]


def test_a_build_that_fails_says_that_it_compiled(tmp_path, machines, capsys):
    from flexops.build.compile import progress

    plan = tiny_plan(tmp_path / "wrong", compiler=machines.compiler, source="no C++\n")
    with progress.shown("tiny-cpu", "info") as report:
        assert building.obtain([plan], BuildCache(tmp_path / "c"), progress=report)[0].error
    assert "compiling tiny-cpu took" in capsys.readouterr().err


# ---- flexops cache remote check ----


def checked(url: str, **options: Any) -> dict[str, remote.Check]:
    there = Remote(url, limit=300.0, **options)
    try:
        return {one.what: one for one in there.check()}
    finally:
        if there._worker:
            there._worker.stop()


def test_a_check_tries_everything_and_leaves_nothing(url, tmp_path):
    found = checked(url, write=True)
    assert [one for one in found.values() if one.ok is False] == []
    assert "reading claims again" in found["conditional put"].found
    assert "remove" in found
    found = checked(f"file://{tmp_path}/store", write=True)
    assert found["conditional put"].found == "honoured"
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
    assert checked(url, write=False)["write"].ok is None


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("http://127.0.0.1:1/x", "Connection refused"),
        ("https://store.invalid/x", "failed to lookup address"),
        ("s3://was-never-there/x", "NoSuchBucket"),
        ("https://{nginx}/x", "UnknownIssuer"),
        ("https://me:wrong@{nginx}/x", "401"),
        ("oci://{registry}/x", "requires a user and password"),
    ],
)
def test_a_check_names_the_cause(
    url, cause, s3_address, nginx, registry,
    opened, monkeypatch, tmp_path
):  # fmt: skip
    assert opened
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_address)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    if "wrong" in url:
        monkeypatch.setenv("SSL_CERT_FILE", str(nginx[1]))
    place = nginx[0].rpartition("@")[2]
    found = checked(url.format(nginx=place, registry=registry[0]), write=True)
    failed = [one for one in found.values() if one.ok is False]
    assert len(failed) == 1
    assert cause in failed[0].found
    assert failed[0].fix


@pytest.mark.usefixtures("patient")
def test_a_page_in_place_of_every_object_is_no_store():
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"<htm>")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = checked(f"http://127.0.0.1:{server.server_port}/x", write=True)
        server.shutdown()
    assert "a login page" in found["place"].found
    assert "write" not in found


@pytest.mark.usefixtures("patient")
def test_check_on_the_command_line(tmp_path, monkeypatch):
    from flexops import settings

    for store, status in ((f"file://{tmp_path}/s", 0), ("http://127.0.0.1:1/x", 1)):
        monkeypatch.setenv("FLEXOPS_CACHE_REMOTE", store)
        monkeypatch.setenv("FLEXOPS_CACHE_REMOTE_WRITE", "1")
        settings.current.cache_clear()
        done = flexops_command("cache", "remote", "check", catch_exceptions=True)
        assert done.exit_code == status, done.output
        assert ("FAILED" in done.output) is bool(status)
        there = remote.of(settings.current())
        assert there
        if there._worker:
            there._worker.stop()
    settings.current.cache_clear()


# ---- one warning for each job ----

FALLS_BACK = """
import os, warnings
import torch.distributed as dist
if {initialised}:
    dist.init_process_group("gloo")
from flexops.build.store import counters
from flexops.build.load import loader
from flexops.build.load.loader import OpStatus
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loader._announce(OpStatus("rope", "cpu", "reference", "no compiler"))
count = counters.cache_stats()["fallbacks"]["count"]
open(os.path.join({folder!r}, os.environ["RANK"]), "w").write(f"{{len(caught)}} {{count}}")
if {initialised}:
    dist.barrier()
"""


@pytest.mark.parametrize("initialised", first_of(True, False))
def test_of_the_ranks_of_a_job_one_warns_of_a_fallback(initialised, tmp_path):
    script, said = tmp_path / "rank.py", tmp_path / "said"
    said.mkdir()
    (tmp_path / "c").mkdir()
    script.write_text(FALLS_BACK.format(initialised=initialised, folder=str(said)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = child_environment(OMP_NUM_THREADS="1", FLEXOPS_CACHE_DIR=str(tmp_path / "c"))
    completed([*command, "--nproc-per-node=2", str(script)], env=environment)  # fmt: skip
    assert sorted(path.read_text() for path in said.iterdir()) == ["0 1", "1 1"]
    text = counters.prometheus(counters.of_cache(tmp_path / "c"))
    assert "flexops_fallbacks_total 2" in text.splitlines()
