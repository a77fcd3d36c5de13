"""What a run with FLEXOPS_RECORD asked for, read again."""

from __future__ import annotations

import json

import pytest

from flexops import settings
from flexops.build.load import record
from flexops.errors import FlexopsError

FACTS = (
    {"library": "rope", "device": "cpu"},
    {"extension": "mine", "key": "abc"},
    {"choice": "softmax", "key": "k", "text": "t"},
    {"capability": "9.0", "family": "rope", "kernel": "rotate<float>"},
    {"capability": "8.0", "text": "x", "name": "fill"},
)


def test_each_kind_of_line(tmp_path):
    file = tmp_path / "record.jsonl"
    file.write_text("".join(f"{json.dumps(fact)}\n" for fact in (*FACTS, FACTS[0])))
    found = record.read([file])
    assert list(found.libraries) == [("rope", "cpu")]
    assert list(found.extensions) == [("mine", "abc")]
    assert list(found.choices) == [("softmax", "k", "t")]
    assert list(found.kernels) == [("rope", "rotate<float>")]
    assert [one["name"] for one in found.texts] == ["fill"]
    assert sorted(found.capabilities) == ["8.0", "9.0"]


@pytest.mark.parametrize("line", ['{"library": "rope"}', "[1]", "no JSON", '{"capability": "9.0"}'])
def test_a_line_of_another_kind_is_named(tmp_path, line):
    file = tmp_path / "record.jsonl"
    file.write_text(f"{json.dumps(FACTS[0])}\n{line}\n")
    with pytest.raises(FlexopsError, match="not a record of a run") as caught:
        record.read([file])
    assert "record.jsonl" in caught.value.found


def test_a_fact_is_written_once_and_nothing_without_the_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_written", set())
    file = tmp_path / "record.jsonl"
    for path in (None, file, file):
        chosen = settings.current()._replace(record=path)
        monkeypatch.setattr(settings, "current", lambda chosen=chosen: chosen)
        record.library("rope", "cpu")
    assert [json.loads(line) for line in file.read_text().splitlines()] == [FACTS[0]]
