"""A library is stale once what it was made from is otherwise here, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexops.build.describe import catalog, layout
from flexops.build.describe.spec import OpSpec, Project
from flexops.build.load.freshness import stale
from flexops.build.plan.cache_key import file_digest
from flexops.build.store.entry import Entry
from flexops.build.store.manifest import Manifest

SOURCES = ("one/one_binding.cpp", "one/one_cpu.cpp")
HEADER = "<csrc>/common/dtypes.cuh"


@pytest.fixture
def spec(tmp_path: Path) -> OpSpec:
    for name in SOURCES:
        (tmp_path / "mine/csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine/csrc" / name).write_text(name)
    return OpSpec("one", project=Project("mine", tmp_path / "mine"))


def entry(spec: OpSpec, directory: str = "cache", **changed: str | None) -> Entry:
    """Made from its sources, one of flexops' headers and one of the compiler's."""
    files = {f"<mine>/{name}": file_digest(spec.project.csrc / name) for name in SOURCES}
    files |= {HEADER: file_digest(layout.csrc_root() / "common/dtypes.cuh")}
    files |= {"/usr/include/elsewhere.h": "another machine's"}
    kernel = changed.pop("kernel", None) or ""
    for name, digest in changed.items():
        files = {key: value for key, value in files.items() if not key.endswith(name)}
        files |= {} if digest is None else {f"<mine>/{name}": digest}
    manifest = Manifest(
        "mine.one-cpu", "k", "b", "cpu", "lib.so", 1, "c", "abi", files=files, kernel=kernel
    )
    return Entry(Path(spec.project.csrc.parent, directory, "x"), manifest)


def why(one: Entry, spec: OpSpec) -> str:
    refusal = stale(one, spec)
    return refusal.reason if refusal else ""


def test_what_was_made_from_what_is_here_is_fresh(spec):
    assert why(entry(spec), spec) == ""


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_changed_that_is_gone_or_that_is_new(spec, name):
    before = entry(spec)
    assert why(entry(spec, **{name: None}), spec) == f"{name} was missing when it was built"
    # a kernel was made from fewer files than its family has
    assert why(entry(spec, kernel="fill", **{name: None}), spec) == ""
    gone = entry(spec, **{"one/gone.h": "its digest"})
    assert why(gone, spec) == "one/gone.h has changed since it was built"
    (spec.project.csrc / name).write_text("edited")
    assert why(before, spec) == f"{name} has changed since it was built"


def test_a_header_of_flexops_counts_in_a_cache_and_not_in_an_installed_package(spec):
    cached = entry(spec)
    cached.manifest.files[HEADER] = "that of another flexops"  # type: ignore[index]
    assert why(cached, spec) == "common/dtypes.cuh has changed since it was built"
    assert why(cached._replace(directory=spec.project.aot / "mine.one-cpu"), spec) == ""


def test_declarations_that_changed():
    """flexops' own binding is written from them: its text is among what a library was made from."""
    manifest = Manifest("lion-cpu", "k", "b", "cpu", "lib.so", 1, "c", "abi", files={})
    assert why(Entry(Path("/none"), manifest), catalog.find("lion")) == (
        "the declaration of lion's operators has changed since it was built"
    )
