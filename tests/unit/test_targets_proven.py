"""The tables of what was proven: exactly what docs/proven.json says, for the rows that it is true of."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flexops import targets
from flexops.errors import TargetError
from flexops.inspection import baseline, proving, torch_proof
from flexops.targets import proven, render

ROOT = Path(__file__).parents[2]
MATRIX = targets.load()
WHEN = {"date": "2026-11-21", "flexops": "0.2.0 abc"}
TESTS = {
    "tests/ops/test_a.py": {**WHEN, "passed": 3, "failed": [], "skipped": {"needs a GPU": 3, "an older torch": 1}},
    "tests/ops/test_b.py": {"date": "2026-11-20", "passed": 2, "failed": [], "skipped": {}},
    "tests/unit/test_c.py -k parity": {**WHEN, "passed": 2, "failed": [], "skipped": {}},
}
HOST = {"date": "2026-11-20", "flexops": "0.2.0 def", "opened": 30, "right on the CPU": 15, "tests": TESTS}
GPU = {"date": "2026-11-21", "capability": "9.0", "cuda": "13.0", "torch": "2.11.0+cu130"}


def row(name: str, facts: proven.Facts) -> list[str]:
    (line,) = (line for line in proven.table(MATRIX, facts) if line.startswith(f"| `{name}` "))
    return line.strip("| ").split(" | ")[1:]


def test_without_facts_nothing_is_claimed() -> None:
    for line in proven.table(MATRIX, {})[2:]:
        assert set(line.strip("| ").split(" | ")[1:]) == {"-"}


def test_facts_of_a_compiler_and_an_architecture_are_of_that_row_alone() -> None:
    facts = {"kernels": {"NVRTC 12.1 sm_89": {"date": "2026-11-20", "kernels": 145, "families": 14}}}
    assert row("cu121-sm89", facts)[0] == "145 of 14 families, 2026-11-20"
    assert {row(name, facts)[0] for name in MATRIX.ids if name != "cu121-sm89"} == {"-"}


def test_an_amd_gpus_rows_name_the_hipcc_that_compiled_for_them() -> None:
    facts = {"kernels": {"hipcc 5.2 gfx90a": {**WHEN, "kernels": 100, "families": 14}}}
    assert row("rocm72-gfx90a", facts)[0] == "100 of 14 families (by hipcc 5.2), 2026-11-21, `abc`"
    assert "| ROCm 7.2 | 2.13.0 | gfx90a (by hipcc 5.2) | - | - | - | 2026-11-21, `abc` |" in proven.short_table(MATRIX, facts)
    assert {row(name, facts)[0] for name in MATRIX.ids if name != "rocm72-gfx90a"} == {"-"}


def test_a_torch_counts_only_for_the_rows_that_have_it() -> None:
    facts = {"torch": {"2.14.1+cu130": HOST, "2.13.0+cpu": HOST}}
    assert row("cu130-sm75", facts)[1:3] == ["30 libraries, 2026-11-20, `def`", "15 families, 7 tests, 2026-11-20, `def`, `abc`"]
    assert row("cpu", facts)[1] == "30 libraries, 2026-11-20, `def`"
    assert row("cu132-sm80", facts)[1] == row("rocm72-gfx90a", facts)[1] == "-"


def test_another_processor_is_said() -> None:
    facts = {"torch": {"2.13.0+cpu aarch64": {**HOST, "emulated": "qemu"}}}
    assert row("cpu", facts)[2] == "15 families, 7 tests (aarch64, emulated), 2026-11-20, `def`, `abc`"
    assert row("cu130-sm90", facts)[2] == "-"


@pytest.mark.parametrize("name", [name for name in MATRIX.ids if name != "cu130-sm90"])
def test_a_gpu_that_ran_kernels_proves_the_row_of_their_compiler_and_its_architecture_only(name: str) -> None:
    facts = {"gpu": {"NVIDIA H200": GPU}}
    assert row("cu130-sm90", facts)[3] == "NVIDIA H200, from torch 2.11.0+cu130, 2026-11-21"  # which is not the row's torch: said
    assert row(name, facts)[3] == "-"


def test_the_short_table_has_a_line_for_each_toolkit() -> None:
    lines = proven.short_table(MATRIX, {"gpu": {"NVIDIA H200": GPU}, "torch": {"2.4.1+cu121": HOST}})
    assert len(lines) - 2 == len({one.toolkit_name for one in MATRIX.targets})
    assert "| CUDA 12.1 | 2.4.1 | - | yes | 15 families, 7 tests | - | 2026-11-20, `def`, `abc` |" in lines
    assert "| CUDA 13.0 | 2.14.1 | - | - | - | NVIDIA H200 (by torch 2.11.0) | 2026-11-21 |" in lines
    assert "| CUDA 13.2 | 2.15.0 | - | - | - | - | - |" in lines


def test_what_came_of_tests_stands_there_by_torch_and_folder() -> None:
    lines = proven.suites(MATRIX, {"torch": {"2.13.0+cpu": {"tests": TESTS}, "2.4.1+cu121": HOST, "1.0.0": HOST}})[2:]
    counts = ["`tests/ops` | 2 | 5 | 0 | 4 | 2026-11-20, `abc` |", "`tests/unit -k parity` | 1 | 2 | 0 | 0 | 2026-11-21, `abc` |"]
    assert lines == [f"| {torch} | {one}" for torch in ("2.4.1+cu121", "2.13.0+cpu") for one in counts]


def test_a_test_that_failed_is_said_wherever_tests_are_counted() -> None:
    failing: Any = {**HOST, "tests": {**TESTS, "tests/models/test_d.py": {**WHEN, "passed": 1, "failed": ["test_x", "test_y"], "skipped": {}}}}
    facts = {"torch": {"2.4.1+cu121": failing}}
    assert row("cu121-sm80", facts)[2] == "15 families, 8 tests (2 failed), 2026-11-20, `def`, `abc`"
    assert "15 families, 8 tests (2 failed)" in "".join(proven.short_table(MATRIX, facts))


def test_tests_are_counted_as_they_went(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n slow\n image\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_good(): pass\nclass TestMore:\n def test_bad(self): assert 0\n"
        "@pytest.fixture\ndef broken(): 1 / 0\ndef test_set_up(broken): pass\n"
        "@pytest.mark.gpu\ndef test_gpu(): assert 0\n@pytest.mark.parametrize('n', range(3))\ndef test_skipped(n): pytest.skip('why not' if n else 'why')\n"
    )
    found, wrong = torch_proof.run_tests("test_it.py", tmp_path)
    counts = {"passed": 1, "failed": ["TestMore::test_bad", "test_set_up"], "skipped": {"why": 1, "why not": 2}}
    assert found == {"test_it.py": {"date": torch_proof.today(), "flexops": found["test_it.py"]["flexops"], **counts}}
    assert wrong == ["test_it.py: TestMore::test_bad fails", "test_it.py: test_set_up fails"]
    assert list(torch_proof.run_tests(f"test_it.py -k 'good{' or gpu' * 50}'", tmp_path)[0]) == [f"test_it.py -k 'good{' or gpu' * 50}'"]
    (tmp_path / "test_stopped.py").write_text("def test_good(): pass\ndef test_that_is_interrupted(): raise KeyboardInterrupt\n")
    assert torch_proof.run_tests("test_stopped.py", tmp_path) == ({}, ["pytest test_stopped.py: status 2, so not all of its tests ran"])
    assert torch_proof.run_tests("not_there.py", tmp_path) == ({}, ["pytest not_there.py: status 4, and no test ran"])


def test_a_checkout_that_was_edited_is_said_but_not_for_the_proofs_that_were_written(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "README.md", "docs/proven.json"):
        (tmp_path / name).write_text("")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "as it was"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = torch_proof._commit(tmp_path)
    for name, said in (("docs/proven.json", clean), ("README.md", clean), ("code.py", f"{clean}-dirty")):
        (tmp_path / name).write_text("changed")
        assert torch_proof._commit(tmp_path) == said


@pytest.mark.parametrize("page", ["README.md", render.TABLE])
def test_both_pages_have_a_place_for_it(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.count(render.PROVEN_BEGIN) == text.count(render.PROVEN_END) == 1


def test_rendering_fills_the_place_and_again_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"before\n{render.PROVEN_BEGIN}\nold\n{render.PROVEN_END}\nafter\n")
    (tmp_path / "docs").mkdir()
    proven.write(tmp_path / proven.FACTS, "torch", "2.4.1+cu121", HOST)
    render.write(MATRIX, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{render.PROVEN_END}\nafter\n")
    assert "15 families, 7 tests" in text
    assert "old" not in text
    assert not render.write(MATRIX, tmp_path)


def test_facts_are_written_where_they_belong_and_a_broken_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "proven.json"
    proven.write(path, "torch", "2", {"date": "b"})
    proven.write(path, "torch", "1", {"date": "a"})
    assert list(proven.read(path)["torch"]) == ["1", "2"]
    path.write_text("{")
    with pytest.raises(TargetError, match="cannot be read"):
        proven.read(path)


def test_the_committed_facts_are_the_baselines() -> None:
    known, facts = baseline.read(ROOT / "docs/kernel-resources.json"), proven.read(ROOT / proven.FACTS)
    compiled = {place: one["kernels"] for place, one in facts["kernels"].items()}
    assert {place: count for place, count in compiled.items() if place.startswith("NVRTC ")} == {place: len(kernels) for place, kernels in known.items()}


def test_what_was_measured_of_some_families_does_not_make_the_others_newer(tmp_path: Path) -> None:
    known: Any = {"NVRTC 12.1 sm_80": {"lion a": [1], "rope b": [1], "rope c": [1]}}
    for date, whole, expected in (("2026-01-02", True, "2026-01-02"), ("2026-02-02", False, "2026-01-02"), ("2026-03-03", True, "2026-03-03")):
        proving.record(tmp_path / "p.json", known, {"date": date, "flexops": date}, whole=whole)
        counts = {"date": expected, "flexops": expected, "families": 2, "kernels": 3}
        assert json.loads((tmp_path / "p.json").read_text())["kernels"]["NVRTC 12.1 sm_80"] == counts
    known["NVRTC 12.1 sm_80"]["rope d"] = [1]
    for _ in range(2):  # the second time nothing is new
        proving.record(tmp_path / "p.json", known, {"date": "2026-04-04", "flexops": "0.2.0 abc"}, whole=False)
        written = json.loads((tmp_path / "p.json").read_text())["kernels"]["NVRTC 12.1 sm_80"]
        assert written == {"date": "2026-03-03", "flexops": "2026-03-03+abc", "families": 2, "kernels": 4}
