"""``flexops_tools.release`` in a clone of its own: what it would do, what it does, what it rejects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import completed

import flexops
from flexops import _toml

ROOT = Path(__file__).parents[2]
KEPT = (
    "flexops/_version.py",
    "recipe/recipe.yaml",
    "CITATION.cff",
    "CHANGELOG.md",
    "pyproject.toml",
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with what a release changes, as it is here."""
    for name in KEPT:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    note(tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "A Tester")
    git(tmp_path, "config", "user.email", "tester@example.org")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    return completed(["git", "-C", str(root), *arguments]).stdout


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "a state")


def release(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flexops_tools.release", "--root", str(root), *arguments]
    return completed(command, code=None)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def note(root: Path) -> None:
    """Something to be released, whatever stands there: also right after a release."""
    path = root / "CHANGELOG.md"
    noted = "## [Unreleased]\n\n### Added\n\n- What nothing else has.\n\n"
    path.write_text(
        re.sub(
            r"## \[Unreleased\]\n.*?(?=## \[)", noted, path.read_text(), count=1, flags=re.DOTALL
        )
    )


def test_this_checkout_has_one_version_and_a_changelog_in_order():
    done = release(ROOT, "verify", "--tag", "refs/heads/main")
    assert (done.returncode, done.stdout) == (0, f"flexops {flexops.__version__}\n"), done.stderr
    assert _toml.load(ROOT / "pyproject.toml")["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "flexops._version.__version__"
    }


def test_preparing_shows_and_writes_nothing_without_write(clone):
    done = release(clone, "prepare", "9.8.7", "--date", "2031-02-03")
    assert done.returncode == 0, done.stderr
    assert '+__version__ = "9.8.7"' in done.stdout
    assert "+## [9.8.7] - 2031-02-03" in done.stdout
    assert git(clone, "status", "--porcelain") == ""


def test_a_whole_release(clone):
    before = (clone / "CHANGELOG.md").read_text()
    assert release(clone, "prepare", "9.8.7", "--date", "2031-02-03", "--write").returncode == 0
    assert release(clone, "version").stdout == "9.8.7\n"
    assert '  version: "9.8.7"\n' in (clone / "recipe/recipe.yaml").read_text()
    assert "\nversion: 9.8.7\ndate-released: 2031-02-03\n" in (clone / "CITATION.cff").read_text()
    after = (clone / "CHANGELOG.md").read_text()
    assert after == before.replace(
        "## [Unreleased]\n", "## [Unreleased]\n\n## [9.8.7] - 2031-02-03\n"
    )
    notes = release(clone, "notes", "9.8.7").stdout.strip()
    assert notes
    assert notes in before
    assert release(clone, "verify", "--tag", "refs/tags/v9.8.7").returncode == 0
    wrong = release(clone, "verify", "--tag", "refs/tags/v9.8.8")
    assert wrong.returncode == 1
    assert "the tag is v9.8.8, and the version 9.8.7" in wrong.stderr
    commit(clone)
    assert release(clone, "prepare", "9.8.7").returncode == 1, "it is there already"
    second = release(clone, "prepare", "9.9.0")
    assert "has nothing under [Unreleased]" in second.stderr


@pytest.mark.parametrize(("path", "old", "new", "said"), [
    ("recipe/recipe.yaml", f'version: "{flexops.__version__}"', 'version: "7.7.7"',
     "recipe/recipe.yaml says 7.7.7"),
    ("CITATION.cff", "version: " + flexops.__version__, "version: latest",
     "CITATION.cff has 0 lines with the version"),
    ("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n### Fixed\n\n### Fixed\n",
     "### Fixed stands"),
])  # fmt: skip
def test_what_does_not_agree_is_named(clone, path, old, new, said):
    edit(clone / path, old, new)
    done = release(clone, "verify", "--tag", "refs/heads/main")
    assert done.returncode == 1
    assert said in done.stderr


def test_an_unclean_tree_is_neither_prepared_nor_tagged(clone):
    (clone / "new.py").write_text("")
    for command in (("prepare", "9.8.7", "--write"), ("tag", "--write")):
        done = release(clone, *command)
        assert done.returncode == 1
        assert "not clean" in done.stderr
    assert git(clone, "tag") == ""


@pytest.mark.parametrize("version", ["v9.8.7", "9.8", "9.8.7-rc1", ""])
def test_what_is_no_version_is_rejected(clone, version):
    done = release(clone, "prepare", version)
    assert done.returncode == 1
    assert "is not a version" in done.stderr


@pytest.mark.extra
def test_a_tag_is_made_of_a_checked_clone(tmp_path, require):
    """In a real clone, whose rendered files are all there: it is tagged with the changelog's
    section, once."""
    require(
        (ROOT / ".git").exists(),
        "a clone of the repository",
        "git clone",
        "these are sources without their history",
    )
    git(tmp_path, "clone", "--quiet", "--local", "--no-hardlinks", str(ROOT), "clone")
    clone = tmp_path / "clone"
    git(clone, "config", "user.name", "A Tester")
    git(clone, "config", "user.email", "tester@example.org")
    note(clone)
    commit(clone)
    assert release(clone, "prepare", "9.8.7", "--write").returncode == 0
    commit(clone)
    would = release(clone, "tag")
    assert (would.returncode, "v9.8.7 would be at" in would.stdout) == (0, True), would.stderr
    assert git(clone, "tag") == ""
    assert release(clone, "tag", "--write").returncode == 0
    message = git(clone, "tag", "--list", "v9.8.7", "--format=%(contents)")
    assert message.startswith("flexops 9.8.7\n")
    assert re.search(r"^### Added$", message, re.MULTILINE), (
        "headings of the changelog are no comments"
    )
    again = release(clone, "tag", "--write")
    assert "there is a tag v9.8.7 already" in again.stderr
