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
    "forged": (
        (
            "from flexops import trust; trust.problem = lambda _: ''; "
            "trust.path_problem = lambda _, **__: ''"
        ),
        "foreign code",
    ),
    "swaps": ("from flexops import trust; trust.path_problem = lambda _, **__: ''", "foreign code"),
    "poisoned": (
        "from flexops.build.store.cache import BuildCache; BuildCache.reject = lambda *_: None",
        "wrong result",
    ),
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
def test_nothing_is_found(host_compiler, require):
    assert host_compiler
    code, parts = campaign("--rounds", "40")
    done = {name: part for name, part in parts.items() if not part["skipped"]}
    assert {name: part["told"] for name, part in done.items()} == {name: [] for name in done}
    assert all(part["rounds"] and part["seen"] for part in done.values())
    assert code == 0
    struck = [
        count for what, count in parts["kills"]["seen"].items() if "nothing there" not in what
    ]  # type: ignore[attr-defined]
    assert sum(struck) > 20, "kills that killed something"
    lacking = parts.keys() - done.keys()
    excuse = "most containers may not mount" if lacking == {"disks"} else ""
    require(
        not lacking,
        f"what the campaign needs for {', '.join(lacking)}",
        "bash scripts/run_tests.sh as root, in a container that may mount",
        excuse,
    )


@pytest.mark.extra
@pytest.mark.parametrize("part", ["forged", "swaps", "poisoned", "flips", "headers", "texts"])
def test_what_is_broken_on_purpose_is_found(host_compiler, require, part):
    assert host_compiler
    fault, kind = FAULTS[part]
    code, parts = campaign("--rounds", "60", "--only", part, fault=fault)
    require(
        not parts[part]["skipped"],
        "the right to become another user",
        "run the tests as root in a container",
    )
    assert code == 1
    assert parts[part][kind], parts[part]
