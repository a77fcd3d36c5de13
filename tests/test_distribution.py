"""What flexops is called on package indexes, where ``flexops`` is another project's: no text may
send people there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import completed

from flexops import _toml, distribution, settings
from flexops.build.deliver import aot
from flexops.doctor.probes import machine
from flexops.errors import ToolchainError

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = "flexops" + r"(?![\w-])"  # and not flexops-torch
SENT_THERE = (
    rf"\b(pip3?|uv|pipx|poetry|pdm)[\"',]*\s+[\"']?(install|add|download)\b[^`\n#&;]*?(?<![\w./:-]){FOREIGN}(?![/:.])",
    rf"(?<![\w./-]){FOREIGN}\[[a-z]",  # an extra of the other project's
    rf"(distribution|version|requires|files|metadata)\([\"']{FOREIGN}[\"']\)",
)


def sent_there(text: str) -> list[str]:
    return [match[0] for pattern in SENT_THERE for match in re.finditer(pattern, text)]


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ("pip install {}", True),
        ("python -m pip install -U torch {}==0.1.0", True),
        ("uv add {}", True),
        ("an extra: '{}[conda]'", True),
        ("importlib.metadata.version('{}')", True),
        ("pip install flexops-torch", False),
        ('pip install "flexops-torch[conda]"', False),
        ("pip uninstall flexops", False),
        ("conda install -c conda-forge flexops", False),
        ("pip install /src/flexops", False),
        ("pip install ./flexops/", False),
        ("pip install torch && flexops doctor", False),
        ("`RUN pip install x` adds to flexops", False),
    ],
)
def test_what_is_forbidden(text, forbidden):
    assert bool(sent_there(text.format("flexops"))) == forbidden


def test_no_text_names_the_other_projects_distribution(require):
    listed = completed(["git", "ls-files", "-z"], cwd=ROOT, code=None)
    require(
        listed.returncode == 0,
        "a git checkout",
        "git clone",
        "the test reads the files that belong to it",
    )
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if (
            path.is_file()
            and path.suffix not in (".png", ".lock")
            and path != Path(__file__).resolve()
        ):
            found += [
                f"{name}: {text}"
                for text in sent_there(path.read_text(encoding="utf-8", errors="replace"))
            ]
    assert found == []


def test_the_name_is_the_one_that_is_packaged():
    project = _toml.load(ROOT / "pyproject.toml")["project"]
    assert project["name"] == distribution.NAME
    assert project["scripts"] == {"flexops": "flexops.cli:main"}
    assert project["authors"] == [{"name": distribution.AUTHOR}]
    tools = _toml.load(ROOT / "tools/pyproject.toml")["project"]
    assert {"conda", "bench"} <= set(tools["optional-dependencies"])  # that fixes name


def install(site: Path, version: str, author: str) -> None:
    info = site / f"flexops-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: flexops\nVersion: {version}\nAuthor: {author}\n"
    )


def test_the_other_project_is_seen_where_it_is_installed_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert distribution.namesake() == ""
    # ours, from before it was called flexops-torch
    install(tmp_path, "0.1.0", "The flexops developers")
    assert distribution.namesake() == ""
    install(tmp_path, "3.2.0", "Another Project")
    assert distribution.namesake() == f"flexops 3.2.0 in {tmp_path}"
    assert machine.python().namesake == distribution.namesake()
    with pytest.raises(ToolchainError) as caught:
        aot.build_into_package(("quant",), settings.current(), tmp_path)
    assert "3.2.0" in caught.value.found
    assert caught.value.fix.startswith("pip uninstall --yes flexops")
