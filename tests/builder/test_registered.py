"""Modules that a command line names: imported, and what is wrong with them said."""

from __future__ import annotations

import sys

import pytest

from flexops.builder import registered
from flexops.errors import FlexopsError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise SystemExit(3)", "unit_module cannot be imported\n  found: SystemExit: 3"),
        ("import lacking_module", "found: ModuleNotFoundError: No module named 'lacking_module'"),
        ("x = 1", "unit_module.py, which declares no operators of that name"),
    ],
)
def test_a_module_that_is_no_library_is_named(text, said, tmp_path, monkeypatch):
    (tmp_path / "unit_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(FlexopsError) as caught:
            registered.load_for(("unit_module.family",))
    finally:
        sys.modules.pop("unit_module", None)
    assert said in str(caught.value)


def test_a_name_that_nothing_has_is_left_to_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registered.load_for(("no_such_module",))
