"""The fault campaign in short: nothing is found, every part did what it is about, and what is
broken on purpose is found."""

from __future__ import annotations

import json
import sys

import pytest
from builds import REPOSITORY
from processes import completed

BREAK = """
import json, runpy, sys
sys.modules["torch"] = None
sys.path.insert(0, {repository!r})
{fault}
runpy.run_module("flexops_tools.campaign", run_name="__main__")
"""
_RAISES = """
from flexops import _json
def parse(text):
    try:
        return json.loads(text)
    except ValueError:
        raise KeyError("damaged")
_json.parse = parse
"""
FAULTS = {
    "flips": (_RAISES, "traceback"),
    "texts": ("from flexops import _json; _json.parse = json.loads", "traceback"),
    "headers": (
        "from flexops.build.plan import edits; edits.Before.verdict = lambda *_: 'same'",
        "wrong result",
    ),
}


def campaign(*arguments: str, fault: str = "") -> tuple[int, dict[str, dict[str, object]]]:
    code = BREAK.format(repository=str(REPOSITORY), fault=fault)
    done = completed([sys.executable, "-c", code, "--json", *arguments], code=None)
    assert done.stdout, done.stderr
    return done.returncode, {part["name"]: part for part in json.loads(done.stdout)["parts"]}


@pytest.mark.extra
def test_nothing_is_found(host_compiler):
    assert host_compiler
    code, parts = campaign("--rounds", "40")
    assert {name: part["told"] for name, part in parts.items()} == {name: [] for name in parts}
    assert all(part["rounds"] and part["seen"] for part in parts.values())
    assert code == 0
    struck = [
        count for what, count in parts["kills"]["seen"].items() if "nothing there" not in what
    ]  # type: ignore[attr-defined]
    assert sum(struck) > 20, "kills that killed something"


@pytest.mark.extra
@pytest.mark.parametrize("part", sorted(FAULTS))
def test_what_is_broken_on_purpose_is_found(host_compiler, part):
    assert host_compiler
    fault, kind = FAULTS[part]
    code, parts = campaign("--rounds", "60", "--only", part, fault=fault)
    assert code == 1
    assert parts[part][kind], parts[part]
