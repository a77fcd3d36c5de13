"""Where flexops does not run, importing it says so, with the fix."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import completed

import flexops

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "platform", "words"),
    [
        ((3, 9, 18), "linux", ("found: 3.9.18", "required: 3.10 or newer")),
        ((3, 12, 1), "win32", ("on Windows", "required: Linux", "WSL 2")),
    ],
)
def test_it_is_said_what_is_required(version, platform, words):
    with pytest.raises(ImportError) as caught:
        flexops._refuse_unfit_python(version, platform)
    for word in (*words, "fix: "):
        assert word in str(caught.value)


def test_others_are_let_in():
    for platform in ("linux", "darwin"):
        flexops._refuse_unfit_python((3, 10, 0), platform)


def test_importing_calls_it():
    program = "import sys; sys.platform = 'win32'; sys.modules['torch'] = None; import flexops"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = completed([sys.executable, "-c", program], env=environment, code=None)
    assert "ImportError: flexops does not run on Windows" in done.stderr


def test_an_old_python_gets_a_report_of_doctors(tmp_path):
    """Python 3.9 has no sys.orig_argv, by which the command line is known."""
    (tmp_path / "sitecustomize.py").write_text("import sys\ndel sys.orig_argv\n")
    (tmp_path / "torch.py").write_text("raise ImportError('none here')\n")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "FLEXOPS_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = completed([sys.executable, "-m", "flexops.doctor"], env=environment, code=None)
    assert done.stdout.startswith("flexops doctor"), done.stderr
