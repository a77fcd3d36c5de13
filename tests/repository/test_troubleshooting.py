"""docs/troubleshooting.md is the table that diagnoses, and nothing else."""

from __future__ import annotations

from flexops.build.compile import diagnose
from flexops_tools import docs


def test_the_page_follows_the_tables():
    assert docs.TROUBLESHOOTING.read_text() == docs.troubleshooting(), (
        "python -m flexops_tools.docs --render"
    )


def test_every_cause_and_fix_is_on_the_page():
    page = docs.troubleshooting().replace("&lt;", "<").replace("\\|", "|")
    for rule in (*diagnose.RULES, *diagnose.LOAD_RULES):
        assert f"| {rule.cause} | {rule.fix} |" in page


def test_every_check_that_says_something_of_its_own_is_on_the_page():
    page = docs.troubleshooting()
    for name in (
        "`torch-gpu`",
        "`environment`",
        "`jobs`",
        "`build`, `op`",
        "unset CUDA_VISIBLE_DEVICES",
    ):
        assert name in page
