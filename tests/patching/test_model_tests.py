"""transformers' own tests of models, with every model patched after construction: none that passes
without flexops fails with it, but for the exceptions here."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILE = "tests/test_types.py"
EXCEPTIONS = {
    "test_sdpa_can_dispatch_non_composite_models": (
        'the model\'s attention is named "flexops" then, and not "sdpa"'
    ),
    "test_eager_matches_batched_and_grouped_inference": (
        "the experts run as flexops', and not by the function that the test watches"
    ),
}
"""How names of tests begin, of any type, with the reason."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with transformers' file, from the source distribution of the installed version."""
    folder = tmp_path_factory.mktemp("suite")
    version = importlib.metadata.version("transformers")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    pip += ["--no-build-isolation", "--dest", str(folder), f"transformers=={version}"]
    subprocess.run(pip, check=True, timeout=3600)
    name = "tests/test_modeling_common.py"
    with tarfile.open(folder / f"transformers-{version}.tar.gz") as archive:
        member = archive.extractfile(f"transformers-{version}/{name}")
        assert member is not None
        files = {name: member.read().decode()}
    files[FILE] = (HERE / "transformers_suite.py").read_text()
    for package in ("", "exporters/", "generation/"):
        files[f"tests/{package}__init__.py"] = ""
    # parts of the mixin that the archive lacks
    files["tests/exporters/test_export.py"] = "class ExportTesterMixin: pass\n"
    files["tests/generation/test_utils.py"] = "class GenerationTesterMixin: pass\n"
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def outcomes(suite: Path, patched: bool, names: Iterable[str] = ("",)) -> dict[str, str]:
    """What became of each test; the one about the missing mixin is left out."""
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(suite), "-k", "not generation_tester_mixin"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
        "FLEXOPS_PATCHED": str(int(patched)),
        "FLEXOPS_FALLBACK": "allow",
        "HF_HUB_OFFLINE": "1",
    }
    command += [f"{FILE}::{name}" if name else FILE for name in names]
    done = subprocess.run(
        command, cwd=suite, env=environment, capture_output=True, text=True, check=False
    )
    found = re.findall(
        rf"^{FILE}::(\S+) .*?(PASSED|FAILED|ERROR|SKIPPED)", done.stdout, re.MULTILINE
    )
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(found)


@pytest.mark.slow
def test_no_test_of_transformers_fails_with_flexops(suite):
    """Those that do not pass do not without flexops either."""
    patched = outcomes(suite, True)
    assert sum(one == "PASSED" for one in patched.values()) > 900
    left = [
        name
        for name, one in patched.items()
        if one != "PASSED" and not name.split("::")[-1].startswith(tuple(EXCEPTIONS))
    ]
    plain = outcomes(suite, False, left) if left else {}
    assert plain.keys() == set(left)
    assert [name for name in left if plain[name] == "PASSED"] == []
