"""``flexops/build/compile/progress.py``."""

from __future__ import annotations

import sys

import pytest

from flexops.build.compile import progress


def test_a_process_without_standard_error_builds_all_the_same(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)  # as Python sets it if file descriptor 2 is closed
    progress.say("compiled", "info")
    with progress.shown("mylib", "info") as count:
        assert count is None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("log", ["info", "quiet"])
def test_without_a_terminal_one_line_says_what_was_compiled(log, capsys):
    with progress.shown("mylib", log) as count:
        for i in range(3 if count else 0):
            count(i + 1, 3, "mylib.o")
    said = capsys.readouterr()
    assert said.out == ""
    assert (
        said.err.count("\n") == said.err.count("flexops: compiling mylib took") == (log == "info")
    )
