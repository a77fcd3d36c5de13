"""The test of a module is found by its name: ``flexops/a/b.py`` has ``tests/a/test_b.py``.

``tests/tools`` mirrors ``tools/flexops_tools``; ``tests/csrc`` and ``tests/scripts`` the folders of
their names. A package counts as a module. ``test_b_part.py`` is a further file about ``b``.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
OTHER = ("conda", "emulated", "golden", "gpu", "image", "repository", "scenarios", "support")
"""Folders that mirror nothing; CONTRIBUTING.md describes each."""
SEVERAL = {
    "csrc/common/test_torch_abi.py",
    "csrc/test_stand_in_driver.py",
    "ops/test_narrow_states.py",
    "ops/test_sharded.py",
    "patching/test_libraries.py",
    "patching/test_model_tests.py",
    "patching/test_vision.py",
    "patching/test_zoo.py",
    "test_cmake.py",
}
"""Tests of several modules, or of files that are not Python."""
ROOTS = {"tools": ROOT / "tools/flexops_tools", "csrc": ROOT / "csrc", "scripts": ROOT / "scripts"}


def is_about_a_module(test: Path) -> bool:
    top, *_ = test.parts
    folder = (
        ROOTS[top] / Path(*test.parts[1:-1]) if top in ROOTS else ROOT / "flexops" / test.parent
    )
    words = test.stem.removeprefix("test_").split("_")
    names = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
    modules = {path.stem.removeprefix("_") for path in folder.glob("*") if path.stem != "__init__"}
    return bool(names & modules)


def test_every_test_is_named_like_what_it_tests():
    tests = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    mirrored = [one for one in tests if one.parts[0] not in OTHER and str(one) not in SEVERAL]
    assert len(mirrored) > 50
    assert sorted(str(one) for one in mirrored if not is_about_a_module(one)) == []


def test_the_exceptions_exist():
    assert sorted(one for one in SEVERAL if not (TESTS / one).is_file()) == []


def test_every_folder_that_mirrors_nothing_is_described():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [one for one in OTHER if f"| `tests/{one}` |" not in page] == []


def test_a_wrong_name_is_found():
    assert is_about_a_module(Path("build/store/test_cache.py"))
    assert not is_about_a_module(Path("build/plan/test_cache.py"))
