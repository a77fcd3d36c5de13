"""What the child process that talks to a store makes of its client's answers, on clients that are
not one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexops.build.store import remote_worker
from flexops.build.store.remote_worker import Bucket, Registry, Rejected


class Errors:
    class NotFoundError(Exception): ...

    class AlreadyExistsError(Exception): ...

    class NotSupportedError(Exception): ...

    class PreconditionError(Exception): ...


class Library:
    """obstore, whose calls end as told, one after the other."""

    exceptions = Errors

    def __init__(self, *ends: Any) -> None:
        self.ends, self.asked = list(ends), []

    def _end(self, *asked: Any) -> Any:
        self.asked.append(asked)
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def get(self, _store: Any, name: str) -> Any:
        return self._end("get", name)

    def put(self, _store: Any, name: str, _content: bytes, mode: Any = None) -> None:
        self._end("put", name, mode)

    def head(self, _store: Any, name: str) -> None:
        self._end("head", name)


def bucket(*ends: Any) -> Bucket:
    made = Bucket.__new__(Bucket)
    made.store, made.library, made.conditional = None, Library(*ends), True
    return made


def registry(**parts: Any) -> Registry:
    made = Registry.__new__(Registry)
    made.place, made.has_empty = "host/repository", True
    made.client = SimpleNamespace(get_container=lambda _: SimpleNamespace(manifest_url=str))
    vars(made).update(parts)
    return made


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it has waited; it does not wait."""
    taken: list[float] = []
    monkeypatch.setattr(remote_worker.time, "sleep", taken.append)
    return taken


@pytest.fixture
def file(tmp_path: Any) -> str:
    (tmp_path / "object").write_bytes(b"content")
    return str(tmp_path / "object")


def found(*parts: bytes) -> SimpleNamespace:
    return SimpleNamespace(stream=lambda **_: iter(parts), meta={"e_tag": "1"})


def test_an_object_that_a_server_is_writing_is_asked_for_again(file, naps):
    half = Exception("416 Range Not Satisfiable")
    there = bucket(half, half, found(b"whole"))
    assert there.get("name", file, 100)["found"]
    assert len(naps) == 2
    with pytest.raises(Exception, match="416"):
        bucket(*[half] * 5).get("name", file, 100)
    with pytest.raises(Exception, match="forbidden"):
        bucket(Exception("forbidden")).get("name", file, 100)


def test_an_object_larger_than_it_may_be_is_rejected(file):
    assert bucket(found(b"1234", b"5678")).get("name", file, 8)["found"]
    with pytest.raises(OSError, match="larger than it may be"):
        bucket(found(b"1234", b"5678")).get("name", file, 7)


def test_a_store_without_conditional_puts_is_looked_into_first(file):
    unknown = Exception("server error, status code: 501 Not Implemented")
    there = bucket(unknown, None)
    assert there.create("name", file) == {"made": False, "conditional": False}
    assert [one[0] for one in there.library.asked] == ["put", "head"]
    there.library.ends = [Errors.NotFoundError(), None]
    assert there.create("name", file) == {"made": True, "conditional": False}
    there.library.ends = [None]
    assert there.replace("name", file, '{"e_tag": "1"}')["made"]
    assert there.library.asked[-1] == ("put", "name", None)
    there.conditional, there.library.ends = True, [unknown, None]
    assert there.replace("name", file, '{"e_tag": "1"}') == {"made": True, "conditional": False}
    with pytest.raises(Exception, match="403"):
        bucket(Exception("status code: 403")).create("name", file)
    assert bucket(Errors.PreconditionError()).replace("name", file, '{"e_tag": "1"}') == {
        "made": False,
        "conditional": True,
    }


def test_a_blob_that_is_not_the_one_of_its_digest_is_rejected(file):
    layers = {"layers": [{"digest": f"sha256:{'0' * 64}"}]}
    answer = SimpleNamespace(status_code=200, json=lambda: layers, headers={})
    there = registry(_ask=lambda *_, **__: answer)
    blob = SimpleNamespace(status_code=200, iter_content=lambda _: iter([b"another"]))
    there.client.get_blob = lambda *_, **__: blob
    with pytest.raises(OSError, match="another blob"):
        there.get("name", file, 100)


def test_a_tag_that_came_during_the_upload_stays(file):
    seen = [False, True]
    there = registry(_has=lambda _: seen.pop(0), _upload=lambda *_: {}, _ask=None)
    assert there.create("name", file) == {"made": False, "conditional": False}
    assert not seen


def test_what_a_registry_rejects_for_now_is_tried_again(file, naps):
    statuses = [500, 400, 201]
    there = registry(
        _upload=lambda *_: {},
        _ask=lambda *_, **__: SimpleNamespace(status_code=statuses.pop(0), reason=""),
    )
    assert there.replace("name", file, "")["made"]
    assert (len(naps), there.has_empty) == (2, False)
    for status, times in ((403, 1), (503, 4)):
        statuses[:] = [status] * 4
        with pytest.raises(Rejected):
            there.replace("name", file, "")
        assert len(statuses) == 4 - times


def test_tags_that_are_no_objects_are_not_listed():
    there = registry()
    there.client.get_tags = lambda _: ["latest", "adam-cpu.12.tar.gz", "a.b.12.claim.json"]
    there.client.get_manifest = lambda _: {"layers": [{"size": 3}, {"size": 4}]}
    assert list(there.list()) == [("adam-cpu/12.tar.gz", 7, 0.0), ("a.b/12.claim.json", 7, 0.0)]
