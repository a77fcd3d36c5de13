"""A release: its version everywhere, the changelog's section, checks, the tag. Writes nothing
without --write.

    python -m flexops_tools.release COMMAND

    check                      is this checkout fit to be released?
    prepare 0.2.0 [--write]    the changes for that version; applies them
    tag [--write]              the tag; creates it, and pushes nothing
    verify --tag REF           the version is the same everywhere, and that of the tag (another ref:
                               of none)
    version | notes VERSION    the version; its section of the changelog

A release: prepare --write, commit, tag --write, `git push --follow-tags`. The workflows do the
rest.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
SOURCE = "flexops/_version.py"
PLACES: Mapping[str, str] = {
    SOURCE: rf'^__version__ = "({VERSION})"$',
    "recipe/recipe.yaml": rf'^  version: "({VERSION})"$',
    "CITATION.cff": rf"^version: ({VERSION})$",
}
"""Where the version stands: a file, and the line. The first decides; the package's metadata is read
from there."""
CHANGELOG = "CHANGELOG.md"
UNRELEASED = "## [Unreleased]\n"


class ReleaseError(Exception):
    """Why there can be no release, and the fix."""


def read(root: Path) -> dict[str, str]:
    """Every file that a release changes, by path."""
    return {path: (root / path).read_text(encoding="utf-8") for path in (*PLACES, CHANGELOG)}


def version_in(files: Mapping[str, str], path: str) -> str:
    found = re.findall(PLACES[path], files[path], re.MULTILINE)
    if len(found) != 1:
        raise ReleaseError(
            f"{path} has {len(found)} lines with the version\n  required: one that matches"
            f" {PLACES[path]}"
        )
    return str(found[0])


def section(changelog: str, version: str) -> str:
    """What the changelog has of a version (``Unreleased`` too), without its heading."""
    found = re.search(
        rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|^\[[^]]+\]: |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if not found:
        raise ReleaseError(
            f"{CHANGELOG} has no section [{version}]\n  fix: python -m"
            f" flexops_tools.release prepare {version} --write"
        )
    return found[1].strip()


def faults(files: Mapping[str, str]) -> Iterator[str]:
    """What is wrong in these files, whatever is to be released."""
    version = version_in(files, SOURCE)
    yield from (
        f"{path} says {other}, {SOURCE} {version}"
        for path in PLACES
        if (other := version_in(files, path)) != version
    )
    for heading in ("Unreleased", version):
        if f"## [{heading}]" in files[CHANGELOG]:
            found = re.findall(r"^### (.+)$", section(files[CHANGELOG], heading), re.MULTILINE)
            yield from (
                f"{CHANGELOG}, [{heading}]: ### {name} stands {found.count(name)} times"
                for name in dict.fromkeys(found)
                if found.count(name) > 1
            )


def prepared(files: Mapping[str, str], version: str, date: str) -> dict[str, str]:
    """The files of that version: its number in every place, and what was unreleased as its section
    of the changelog."""
    if not re.fullmatch(VERSION, version):
        raise ReleaseError(f"{version!r} is not a version\n  required: such as 0.2.0 or 0.2.0rc1")
    if f"## [{version}]" in files[CHANGELOG]:
        raise ReleaseError(f"{CHANGELOG} has a section [{version}] already\n  fix: another version")
    if not section(files[CHANGELOG], "Unreleased"):
        raise ReleaseError(
            f"{CHANGELOG} has nothing under [Unreleased]\n  fix: say there what a user notices"
        )
    changed = {
        path: re.sub(
            line, lambda found: found[0].replace(found[1], version), files[path], flags=re.MULTILINE
        )
        for path, line in PLACES.items()
    }
    undated = re.sub(r"^date-released: .*\n", "", changed["CITATION.cff"], flags=re.MULTILINE)
    changed["CITATION.cff"] = re.sub(
        PLACES["CITATION.cff"], rf"\g<0>\ndate-released: {date}", undated, flags=re.MULTILINE
    )
    changed[CHANGELOG] = files[CHANGELOG].replace(
        UNRELEASED, f"{UNRELEASED}\n## [{version}] - {date}\n", 1
    )
    return changed


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"git {' '.join(arguments)} failed\n  found: {done.stderr.strip()}")
    return done.stdout


def check(root: Path) -> None:
    """Everything that can be checked without building: a clean tree, one version, a changelog in
    order, rendered files that are up to date."""
    found = list(faults(read(root)))
    if changes := git(root, "status", "--porcelain"):
        found.append("the tree is not clean:\n    " + "\n    ".join(changes.splitlines()[:10]))
    for what, command in {
        "files rendered from the matrix": ["-m", "flexops", "target", "render", "--check"],
        "docs/troubleshooting.md": ["-m", "flexops_tools.docs", "--check"],
    }.items():
        done = subprocess.run(
            [sys.executable, *command], cwd=root, capture_output=True, text=True, check=False
        )
        if done.returncode:
            found.append(f"{what}: {(done.stderr or done.stdout).strip()}")
    if found:
        raise ReleaseError(
            "\n".join(["this checkout cannot be released", *(f"  - {one}" for one in found)])
        )


def prepare(root: Path, version: str, date: str, write: bool) -> None:
    if write and git(root, "status", "--porcelain"):
        raise ReleaseError(
            "the tree is not clean, so the release's changes cannot be identified\n  fix: git"
            " stash, or commit"
        )
    before = read(root)
    for path, text in prepared(before, version, date).items():
        if write:
            (root / path).write_text(text, encoding="utf-8")
        print(
            "".join(
                difflib.unified_diff(
                    before[path].splitlines(True), text.splitlines(True), path, path, n=1
                )
            ),
            end="",
        )
    print(
        f"\nwritten; next: git commit -am 'flexops {version}'"
        if write
        else "\nnothing was written; --write does"
    )


def tag(root: Path, write: bool) -> None:
    check(root)
    version = version_in(read(root), SOURCE)
    notes = section(read(root)[CHANGELOG], version)
    if git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(
            f"there is a tag v{version} already\n  fix: python -m"
            " flexops_tools.release prepare <next version>"
        )
    if write:
        git(
            root,
            "tag",
            "--annotate",
            f"v{version}",
            "--message",
            f"flexops {version}\n\n{notes}",
            "--cleanup=verbatim",
        )
    print(
        f"v{version} {'is' if write else 'would be'} at"
        f" {git(root, 'rev-parse', '--short', 'HEAD').strip()}"
        + ("" if write else "; --write makes it")
    )


def verify(root: Path, ref: str) -> None:
    if found := list(faults(read(root))):
        raise ReleaseError("\n".join(found))
    version = version_in(read(root), SOURCE)
    if ref.startswith("refs/tags/"):
        if ref != f"refs/tags/v{version}":
            raise ReleaseError(
                f"the tag is {ref.removeprefix('refs/tags/')}, and the version {version}\n  fix:"
                " python -m flexops_tools.release tag --write"
            )
        section(read(root)[CHANGELOG], version)
    print(f"flexops {version}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    commands.add_parser("version")
    commands.add_parser("notes").add_argument("of")
    making = commands.add_parser("prepare")
    making.add_argument("of")
    making.add_argument(
        "--date", default=datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    )
    making.add_argument("--write", action="store_true")
    commands.add_parser("tag").add_argument("--write", action="store_true")
    commands.add_parser("verify").add_argument("--tag", required=True)
    asked = parser.parse_args()
    root: Path = asked.root.resolve()
    try:
        match asked.command:
            case "check":
                check(root)
                print(f"flexops {version_in(read(root), SOURCE)} can be released")
            case "version":
                print(version_in(read(root), SOURCE))
            case "notes":
                print(section(read(root)[CHANGELOG], asked.of))
            case "prepare":
                prepare(root, asked.of, asked.date, asked.write)
            case "tag":
                tag(root, asked.write)
            case "verify":
                verify(root, asked.tag)
    except ReleaseError as error:
        sys.exit(f"release: {error}")


if __name__ == "__main__":
    main()
