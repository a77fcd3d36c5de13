"""The key holds everything that decides what a build produces, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builds import HOST, OLD_TORCH, SQUARE, TOOLS, TORCH, copy_csrc, paper_plan, tiny_plan
from hypothesis import given
from hypothesis import strategies as st

from flexops.build.plan import cache_key
from flexops.build.plan.plan import BuildPlan
from flexops.toolchain.resources import Resources

fields = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=4)


def key(plan: BuildPlan) -> str:
    return cache_key.base_key(plan, cache_key.source_digests(plan))


@given(fields, fields)
def test_different_fields_have_different_digests(one, other):
    assert (cache_key.digest_fields(one) == cache_key.digest_fields(other)) == (one == other)


def test_the_key_does_not_depend_on_places(tmp_path):
    here, there = copy_csrc(tmp_path / "here"), copy_csrc(tmp_path / "there")
    moved = TOOLS._replace(
        torch=TORCH._replace(root=Path("/elsewhere/torch")),
        host=HOST._replace(path=Path("/opt/bin/c++")),
    )
    assert key(paper_plan(SQUARE, "cuda", csrc=here)) == key(
        paper_plan(SQUARE, "cuda", moved, csrc=there)
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_key_does_not_depend_on_how_fast_it_is_built(device):
    slow = paper_plan(
        SQUARE, device, TOOLS._replace(launcher=None), resources=Resources(1, 2**30), max_jobs=1
    )
    fast = paper_plan(SQUARE, device, resources=Resources(64, 2**40))
    assert key(slow) == key(fast)


@pytest.mark.parametrize(
    "tools",
    [
        TOOLS._replace(torch=OLD_TORCH),
        TOOLS._replace(torch=OLD_TORCH._replace(cxx11_abi=True)),
        TOOLS._replace(torch=OLD_TORCH._replace(version="2.5.1+cu121")),
        TOOLS._replace(host=HOST._replace(identity="gcc 13.1.0 x86_64-linux-gnu")),
    ],
    ids=["older torch", "its other C++ ABI", "its other minor", "host compiler"],
)
def test_every_tool_enters_the_key(tools):
    others = [TOOLS, TOOLS._replace(torch=OLD_TORCH)]
    assert key(paper_plan(SQUARE, "cuda", tools)) not in {
        key(paper_plan(SQUARE, "cuda", other)) for other in others if other != tools
    }


def test_torches_with_the_stable_abi_share_a_key():
    """One library serves every later torch; but the C++ standard of the headers is part of the
    command, from 2.13."""
    keys = {
        key(paper_plan(SQUARE, "cpu", TOOLS._replace(torch=TORCH._replace(version=version))))
        for version in ("2.13.0+cpu", "2.14.1+cu130", "2.15.0")
    }
    assert len(keys) == 1


def test_names_enter_the_key():
    plan = paper_plan(SQUARE, "cuda")
    assert key(plan) != key(plan._replace(name="other-cuda"))


def test_sources_and_headers_enter_the_key(tmp_path):
    plan = tiny_plan(tmp_path)
    before = key(plan)
    (tmp_path / "tiny.cpp").write_text("// edited\n")
    assert key(plan) != before
    full = [
        cache_key.full_key(before, headers)
        for headers in (
            {},
            {"<tiny>/a.h": "1"},
            {"<tiny>/a.h": "2"},
            {"<tiny>/b.h": "1"},
            {"<tiny>/a.h": cache_key.ABSENT},
        )
    ]
    assert len(set(full)) == 5


def test_a_large_library_is_known_by_size_and_date(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_key, "_LARGE_LIBRARY", 4)
    library = tmp_path / "a.so"
    states = []
    for text, date in (("1234", 1), ("1234", 2), ("12345", 2), ("12345", 3), ("54321", 3)):
        library.write_text(text)
        os.utime(library, (date, date))
        states.append(cache_key.library_state(library))
    assert states[0] == states[1], "its contents"
    assert states[3] == states[4], "nothing is read"
    assert len(set(states)) == 3


def test_what_decides_on_commands_enters_the_key(tmp_path):
    """Or a library would be found under its key, and each start's look at manifests, which know
    what decided on the commands, would reject it."""
    file = tmp_path / "plan.py"
    file.write_text("one")
    plan = tiny_plan(tmp_path)._replace(recipe=(file,))
    before = key(plan)
    file.write_text("two")
    assert key(plan) != before


def test_a_missing_source_is_named(tmp_path):
    plan = tiny_plan(tmp_path)
    (tmp_path / "tiny.cpp").unlink()
    with pytest.raises(FileNotFoundError, match=r"tiny\.cpp"):
        key(plan)


def test_depfiles_are_understood():
    assert cache_key.parse_depfile("a.o: /x/a.cpp \\\n /x/b.h /x/c.h\n") == [
        "/x/a.cpp",
        "/x/b.h",
        "/x/c.h",
    ]
    assert cache_key.parse_depfile(
        "adam.cu.o : /x/adam.cu \\\n    /x/with\\ blank.h \\\n    /x/co$$t.h\n"
    ) == ["/x/adam.cu", "/x/with blank.h", "/x/co$t.h"]
    assert cache_key.parse_depfile("") == []


def test_only_headers_that_nothing_else_covers_are_recorded(tmp_path):
    plan = tiny_plan(tmp_path)._replace(trusted_roots=("/py/torch",))
    depfile = tmp_path / "tiny.o.d"
    depfile.write_text(
        f"tiny.o: {tmp_path}/tiny.cpp {tmp_path}/tiny.h /usr/include/stdio.h /py/torch/include/a.h"
        " /py/torchvision/b.h\n"
    )
    assert cache_key.reached_headers(plan, [depfile]) == sorted(
        [f"{tmp_path}/tiny.h", "/py/torchvision/b.h"]
    )
