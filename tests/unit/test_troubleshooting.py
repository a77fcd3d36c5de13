"""docs/troubleshooting.md is the table that diagnoses, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from flexops.build.compile import diagnose

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
assert spec
assert spec.loader
build_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_docs)


def test_the_page_follows_the_tables() -> None:
    assert build_docs.TROUBLESHOOTING.read_text() == build_docs.troubleshooting(), (
        "python scripts/build_docs.py --render"
    )


def test_every_cause_and_mend_is_on_the_page() -> None:
    page = build_docs.troubleshooting().replace("&lt;", "<").replace("\\|", "|")
    for rule in (*diagnose.RULES, *diagnose.LOAD_RULES):
        assert f"| {rule.cause} | {rule.fix} |" in page


def test_every_check_that_says_something_of_its_own_is_on_the_page() -> None:
    page = build_docs.troubleshooting()
    for name in (
        "`torch-gpu`",
        "`environment`",
        "`jobs`",
        "`build`, `op`",
        "unset CUDA_VISIBLE_DEVICES",
    ):
        assert name in page
