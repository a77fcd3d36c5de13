"""``flexops build``: what a name on its command line builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import flexops_command

from flexops.build.deliver import aot
from flexops.build.store.manifest import FILE_NAME
from flexops.errors import CacheError, FlexopsError


def test_an_operators_name_builds_its_family(tmp_path, host_compiler):
    assert host_compiler
    done = flexops_command("build", "swiglu", "--device", "cpu", "--out", str(tmp_path), "--json")
    (built,) = json.loads(done.stdout)
    assert (built["name"], built["device"], built["error"]) == ("activation-cpu", "cpu", None)
    assert b"swiglu\0" in Path(built["library"]).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["activation-cpu"]
    assert (
        json.loads((tmp_path / "activation-cpu" / FILE_NAME).read_text())["name"]
        == "activation-cpu"
    )


def test_several_names_of_one_family_build_it_once(host_compiler):
    assert host_compiler
    done = flexops_command("build", "geglu", "activation", "swiglu", "--device", "cpu", "--json")
    assert [built["name"] for built in json.loads(done.stdout)] == ["activation-cpu"]


def test_a_name_that_is_nearly_right_gets_the_right_one():
    with pytest.raises(FlexopsError, match="did you mean swiglu"):
        flexops_command("build", "swigluu", "--device", "cpu")


def test_a_place_that_cannot_be_written_is_said_before_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "build_specs", lambda *_, **__: pytest.fail("built"))
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "libraries")
    done = flexops_command("build", "swiglu", "--out", place, catch_exceptions=True)
    assert isinstance(done.exception, CacheError)
    assert f"{place}: Not a directory" in str(done.exception)
