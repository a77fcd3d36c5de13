"""The table "tested with": exactly what the record has, and how proofs get into it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexops import targets
from flexops.build.describe import catalog
from flexops.compute_capability import parse_arch_list
from flexops.errors import TargetError
from flexops.inspection.measuring import Measured
from flexops_tools.proving import baseline_file, hip_proof, torch_proof
from flexops_tools.proving import kernels as proving
from flexops_tools.targets import proven, render
from flexops_tools.targets.proven import KERNELS, OPERATORS, TESTS, Fact

ROOT = Path(__file__).parents[3]
MATRIX = targets.load()
DAY = "2026-11-21"
OWN = [spec.name for spec in catalog.select(()) if spec.project.own]


def measured(family: str, capability: str) -> Measured:
    (architecture,) = parse_arch_list(capability)
    return Measured(family, f"{family}::kernel", architecture, "NVRTC 13.0", {}, 0, Path("none"))


def test_without_facts_the_table_is_empty():
    assert len(proven.table(MATRIX, [])) == 2


def test_a_line_has_all_that_was_done_with_a_toolkit_and_torch_and_the_oldest_date():
    facts = [
        Fact("CUDA 13.0", "2.14.1", KERNELS, "10.0", "", DAY),
        Fact("CUDA 13.0", "2.14.1", KERNELS, "9.0", "14 of 15 families", "2026-11-20"),
        Fact("CUDA 13.0", "2.11.0", TESTS, "on NVIDIA H200", "3 passed, 1 failed", DAY),
        Fact("CUDA 13.0", "2.14.1", OPERATORS, "x86_64", "", DAY),
        Fact("none (CPU)", "2.13.0", OPERATORS, "x86_64", "", DAY),
    ]
    assert proven.table(MATRIX, facts)[2:] == [
        f"| none (CPU) | 2.13.0 | operators built and verified on x86_64 | {DAY} |",
        f"| CUDA 13.0 | 2.11.0 | tests: on NVIDIA H200 (3 passed, 1 failed) | {DAY} |",
        (
            "| CUDA 13.0 | 2.14.1 | kernels compiled for 9.0 (14 of 15 families), 10.0; "
            "operators built and verified on x86_64 | 2026-11-20 |"
        ),
    ]


@pytest.mark.parametrize("row", MATRIX.targets, ids=lambda row: row.id)
def test_a_rows_torch_names_its_toolkit(row):
    toolkit = proven.toolkit_of_torch(proven.build_of(row))
    assert toolkit == proven.toolkit_of(row)
    assert proven.torch_of(MATRIX, toolkit) == row.torch


def test_a_newer_fact_replaces_an_older_one_about_the_same(tmp_path):
    path = tmp_path / proven.RECORD
    old = Fact("CUDA 13.0", "2.14.1", TESTS, "tests/ops", "3 passed", "2026-11-20")
    other = old._replace(subject="tests/unit")
    proven.write(path, [old, other])
    new = old._replace(outcome="2 passed, 1 failed", date=DAY)
    proven.write(path, [new])
    assert proven.read(path) == [new, other]
    assert len(path.read_text().splitlines()) == 4, "a fact a line, so that a diff can be read"


@pytest.mark.parametrize("text", ["{", '[{"toolkit": "CUDA 13.0"}]', "[1]"])
def test_a_broken_record_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(TargetError, match=r"broken\.json"):
        proven.read(tmp_path / "broken.json")


def test_compiled_kernels_are_facts_of_their_compilers_toolkit():
    whole = [measured(family, "9.0") for family in OWN] + [measured("attention", "9.0a")]
    amd = [hip_proof.Compiled("rope", "gfx90a", "hipcc 5.2", ["k"], "")]
    found = proving.facts([*whole, measured("rope", "7.5")], amd, DAY)
    one_of = f"1 of {len(OWN)} families"
    assert found == [
        Fact("CUDA 13.0", proven.torch_of(MATRIX, "CUDA 13.0"), KERNELS, "7.5", one_of, DAY),
        Fact("CUDA 13.0", proven.torch_of(MATRIX, "CUDA 13.0"), KERNELS, "9.0", "", DAY),
        Fact("ROCm 7.2", "2.13.0", KERNELS, "gfx90a by hipcc 5.2", one_of, DAY),
    ]


def test_a_torch_is_tested_on_its_processor_and_gpu_and_by_its_tests():
    facts = {"machine": "aarch64", "gpu": {"name": "NVIDIA H200"}}
    found = torch_proof.tested("2.14.1+cu130", facts, {"tests/ops": "3 passed"})
    assert {one[:2] for one in found} == {("CUDA 13.0", "2.14.1")}
    assert {one.date for one in found} == {torch_proof.today()}
    said = [one[2:5] for one in found]
    assert said == [
        (OPERATORS, "aarch64", ""),
        (OPERATORS, "NVIDIA H200", ""),
        (TESTS, "tests/ops", "3 passed"),
    ]


@pytest.mark.extra
def test_tests_are_counted_as_they_went(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n slow\n image\n")
    (tmp_path / "some").mkdir()
    (tmp_path / "some/test_it.py").write_text(
        "import pytest\ndef test_good(): pass\nclass TestMore:\n def test_bad(self): assert 0\n"
        "@pytest.fixture\ndef broken(): 1 / 0\ndef test_set_up(broken): pass\n"
        "@pytest.mark.gpu\ndef test_gpu(): assert 0\n@pytest.mark.parametrize('n', range(3))\n"
        "def test_skipped(n): pytest.skip('why not' if n else 'why')\n"
    )
    found, wrong = torch_proof.run_tests("some", tmp_path)
    assert found == {"some": "1 passed, 2 failed, 3 skipped"}
    assert wrong == [
        "some/test_it.py: TestMore::test_bad fails",
        "some/test_it.py: test_set_up fails",
    ]
    for narrowed in ("some/test_it.py", f"some -k 'good{' or gpu' * 50}'"):
        assert list(torch_proof.run_tests(narrowed, tmp_path)[0]) == ["part of some"]
    (tmp_path / "test_stopped.py").write_text(
        "def test_good(): pass\ndef test_it(): raise KeyboardInterrupt\n"
    )
    stopped = ["pytest test_stopped.py: status 2, so not all of its tests ran"]
    assert torch_proof.run_tests("test_stopped.py", tmp_path) == ({}, stopped)
    missing = ["pytest missing.py: status 4, and no test ran"]
    assert torch_proof.run_tests("missing.py", tmp_path) == ({}, missing)


@pytest.mark.parametrize("page", ["README.md", render.TABLE])
def test_both_pages_have_the_table_and_no_commit(page):
    text = (ROOT / page).read_text()
    assert text.count(render.TESTED_BEGIN) == text.count(render.TESTED_END) == 1
    table = text.partition(render.TESTED_BEGIN)[2].partition(render.TESTED_END)[0]
    assert "\n".join(proven.table(MATRIX, proven.read(ROOT / proven.RECORD))) in table
    assert not re.search(r"`[0-9a-f]{7,}`", text)


def test_rendering_fills_the_place_and_again_changes_nothing(tmp_path):
    page = f"before\n{render.TESTED_BEGIN}\nold\n{render.TESTED_END}\nafter\n"
    (tmp_path / "README.md").write_text(page)
    proven.write(tmp_path / proven.RECORD, [Fact("CUDA 12.1", "2.4.1", KERNELS, "9.0", "", DAY)])
    render.write(MATRIX, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{render.TESTED_END}\nafter\n")
    assert "kernels compiled for 9.0" in text
    assert "\nold\n" not in text
    assert not render.write(MATRIX, tmp_path)


def test_the_committed_record_has_the_baselines_compilers_and_architectures():
    known = {tuple(place.split()[1:]) for place in baseline_file.read(ROOT / baseline_file.FILE)}
    recorded = {
        (one.toolkit.removeprefix("CUDA "), f"sm_{one.subject.replace('.', '')}")
        for one in proven.read(ROOT / proven.RECORD)
        if one.kind == KERNELS and one.toolkit.startswith("CUDA ")
    }
    assert recorded == {(version, sm.rstrip("a")) for version, sm in known}


def test_the_record_is_small():
    assert (ROOT / proven.RECORD).stat().st_size < 12_000
