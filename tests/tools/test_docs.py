"""The documentation site builds strictly, and holds what it promises: every public name, every
command, every page, no dead link."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from processes import completed

import flexops

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BUILD = ROOT / "tools/flexops_tools/docs.py"

pytestmark = pytest.mark.extra  # the site takes a quarter of a minute


class Page(HTMLParser):
    """What a page links to, what can be linked to in it, and its sidebar's links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, _tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids |= {found[name] or "" for name in ("id", "name") if name in found}
        self.links += [found[name] or "" for name in ("href", "src") if name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the site, built as CI builds it."""
    out = tmp_path_factory.mktemp("docs") / "site"
    completed([sys.executable, str(BUILD), "--out", str(out)])
    return {path.relative_to(out): Page(path) for path in out.rglob("*.html")}


def test_who_lacks_what_builds_it_gets_what_makes_an_environment():
    done = completed([sys.executable, "-I", "-S", str(BUILD)], code=None)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "no sphinx" in done.stderr
    assert "fix: bash scripts/ci/build_site.sh" in done.stderr


def pinned(*files: Path) -> set[str]:
    return {name for file in files for name in re.findall(r"^[\w.-]+", file.read_text(), re.M)}


HIDE = """
import sys
from importlib.metadata import packages_distributions
for module, distributions in packages_distributions().items():
    if set(distributions) <= set(sys.argv[1:]):
        sys.modules[module] = None
import flexops
print(len([getattr(flexops, name) for name in flexops.__all__]))
"""


def test_every_public_name_is_there_with_what_the_site_s_environment_installs():
    """What only the tests install is hidden."""
    script = (ROOT / "scripts/ci/build_site.sh").read_text()
    installed = {"setuptools", *re.findall(r"[\w.-]+", script)}  # torch requires setuptools
    others = pinned(ROOT / "tests/requirements.txt") - pinned(DOCS / "requirements.txt")
    hidden = others - installed
    assert {"accelerate", "py-rattler"} <= hidden
    done = completed([sys.executable, "-c", HIDE, *sorted(hidden)])
    assert int(done.stdout) > 50


def public_names() -> Iterator[str]:
    """``flexops.x`` for every public name, and those of the modules among them."""
    for name in flexops.__all__:
        value = getattr(flexops, name)
        if inspect.ismodule(value):
            inner = getattr(value, "__all__", None) or [
                one for one in vars(value) if not one.startswith("_")
            ]
            found = {one: getattr(value, one) for one in inner}
            yield from (
                f"flexops.{name}.{one}"
                for one, it in found.items()
                if (getattr(it, "__module__", "") or "").startswith("flexops")
            )
        elif not name.startswith("__"):
            yield f"flexops.{name}"


@pytest.mark.extra
def test_every_public_name_is_on_a_page_of_the_api(site):
    described = set().union(*(page.ids for page in site.values()))
    names = list(public_names())
    assert {"flexops.rms_norm", "flexops.load", "flexops.optim.AdamW"} <= set(names)
    assert sorted(set(names) - described) == []


def leaves(name: str, tool: Any) -> Iterator[str]:
    if not hasattr(tool, "list_commands"):
        yield name
        return
    for sub in tool.list_commands(None):
        yield from leaves(f"{name}-{sub}", tool.get_command(None, sub))


@pytest.mark.extra
def test_every_command_is_on_the_command_line_s_page(site):
    typer = import_module("typer")
    from flexops.cli._app import app

    commands = list(leaves("flexops", typer.main.get_command(app)))
    assert {"flexops-cache-prune", "flexops-cache-remote-list", "flexops-doctor"} <= set(commands)
    assert sorted(set(commands) - site[Path("command-line.html")].ids) == []


class Selector(HTMLParser):
    """The classes of each element that is a child of the install selector, in their order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.children: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if self.open[-1:] == ["install"]:
            self.children.append(found.get("id") or found.get("class") or tag)
        if tag == "div":
            self.open.append(found.get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self.open.pop()


def test_the_front_page_is_the_readme_with_an_install_selector(site, tmp_path):
    """One way for each platform and installer, after the buttons that show it; and the chart."""
    page = site[Path("index.html")]
    assert {"a-kernel-of-your-own", "operators", "limits"} <= page.ids
    assert "_images/training-step.svg" in page.links
    (tmp_path / "selector.html").write_text((DOCS / "index.md").read_text())
    children = Selector(tmp_path / "selector.html").children
    buttons = [one for one in children if one in ("cuda", "rocm", "cpu", "pip", "docker", "conda")]
    ways = [set(one.split()) for one in children if one.startswith("way ")]
    assert len(buttons) == 6
    assert children.index("conda") < min(children.index(one) for one in children if " " in one)
    css = (DOCS / "_static/site.css").read_text()
    for platform in buttons[:3]:
        for installer in buttons[3:]:
            assert sum({platform, installer} <= way for way in ways) == 1, (platform, installer)
            assert f"#{platform}:checked ~ #{installer}:checked ~ .{platform}.{installer}" in css


@pytest.mark.extra
def test_every_page_is_in_the_navigation(site):
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")} - {
        Path("index.html")
    }
    assert pages <= set(site)
    top = {str(path) for path in pages if len(path.parts) == 1}
    assert sorted(top - set(site[Path("index.html")].links)) == []


@pytest.mark.extra
def test_no_link_within_the_site_is_dead(site):
    root = Path("/site")
    dead = []
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if (
                parts.scheme
                or parts.netloc
                or not (parts.path or parts.fragment)
                or "_static" in parts.path
            ):
                continue
            target = (
                (root / path.parent / unquote(parts.path)).resolve().relative_to(root)
                if parts.path
                else path
            )
            if target.suffix == ".html" and (
                target not in site
                or (parts.fragment and unquote(parts.fragment) not in site[target].ids)
            ):
                dead.append(f"{path}: {link}")
    assert dead == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_pages_beside_the_site_link_to_what_there_is(name):
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", (ROOT / name).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.extra
def test_a_broken_link_fails_the_build(tmp_path):
    """Strict is strict: one page with a link to nowhere, built with the site's own settings."""
    (tmp_path / "index.md").write_text("# A page\n\n[nowhere](missing.md)\n")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "-c",
        str(DOCS),
        str(tmp_path),
        str(tmp_path / "out"),
    ]
    done = completed(command, code=None)
    assert done.returncode != 0
    assert "missing.md" in done.stderr
