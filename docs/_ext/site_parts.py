"""What the site adds to Sphinx: the public names of a module, pages that no section names, and
links out of docs/ into the repository."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).parents[1]
REPOSITORY = "https://github.com/flexops/flexops/blob/main/"
PLACE = "{pages that no section names}"
MARKS = "<!-- {0}:begin -->", "<!-- {0}:end -->"


def public_names(module: ModuleType) -> list[str]:
    """Names of ``__all__``; where there is none, what a module has of flexops' own without an
    underscore."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("__")]
    ours = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    return [
        name
        for name, value in ours.items()
        if (getattr(value, "__module__", "") or "").startswith("flexops")
    ]


class PublicNames(SphinxDirective):
    """``.. public-names:: flexops``: everything public in a module, in groups by the module that
    defines it. Nothing is listed by hand."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        module = import_module(self.arguments[0])
        return self.parse_text_to_nodes("\n".join(_sections(module)), allow_section_headings=True)


def _sections(module: ModuleType) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in public_names(module):
        value = getattr(module, name)
        home = (
            value.__name__
            if inspect.ismodule(value)
            else getattr(value, "__module__", None) or module.__name__
        )
        groups.setdefault(home, []).append(name)
    for home in sorted(groups, key=lambda one: (not one.startswith("flexops.ops"), one)):
        title = _title(home)
        yield from (title, "-" * len(title), "")
        if home.startswith("flexops.ops"):  # formulas that several functions share
            yield from (f".. automodule:: {home}", "   :no-members:", "   :no-index:", "")
        for name in groups[home]:
            yield from _entry(module, name)


def _title(home: str) -> str:
    """A heading from a module's name: ``flexops.ops.cross_entropy`` is *cross_entropy*."""
    return home.removeprefix("flexops.").removeprefix("ops.")


def _entry(module: ModuleType, name: str) -> Iterator[str]:
    value = getattr(module, name)
    if inspect.ismodule(value):
        yield from ((value.__doc__ or "").strip().splitlines()[0], "")
        if (DOCS / "api" / f"{name}.rst").is_file():
            yield from (f":doc:`{module.__name__}.{name} <{name}>`", "")
        else:
            for inner in public_names(value):
                yield from _entry(value, inner)
        return
    kind = (
        "autoclass" if inspect.isclass(value) else "autofunction" if callable(value) else "autodata"
    )
    yield from (f".. {kind}:: {module.__name__}.{name}", "")


class CommandLine(SphinxDirective):
    """``{command-line}``: every command of ``flexops``, with its arguments and options, as
    ``--help`` has them."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        import typer

        from flexops.cli._app import app

        command = typer.main.get_command(app)
        with command.make_context("flexops", ["doctor"]) as context:
            return self.parse_text_to_nodes(
                "\n".join(_commands("flexops", command, context)), allow_section_headings=True
            )


def _commands(name: str, command: Any, context: Any) -> Iterator[str]:
    """Markdown for a command, or for those of a group."""
    for sub in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from _commands(f"{name} {sub}", command.get_command(context, sub), context)
    if hasattr(command, "list_commands"):
        return
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from (
        f"## {name}",
        "",
        f"    {usage}",
        "",
        inspect.cleandoc(command.help or "").split("\f")[0],
        "",
    )
    yield from (
        "```bash",
        *filter(None, (command.epilog or "").removeprefix("Examples:").split("\n\n")),
        "```",
        "",
    )
    records = filter(None, (one.get_help_record(context) for one in command.params))
    yield from (
        "| argument | meaning |",
        "| --- | --- |",
        *(f"| `{_cell(left)}` | {_cell(right)} |" for left, right in records),
        "",
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


class ModuleTable(SphinxDirective):
    """``{module-table} flexops``: every module below a package, by the first paragraph of its
    docstring."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        rows = _modules(DOCS.parent / self.arguments[0])
        return self.parse_text_to_nodes(
            "\n".join(
                [
                    "| module | what it is |",
                    "| --- | --- |",
                    *(f"| `{name}` | {_cell(text)} |" for name, text in rows),
                ]
            )
        )


def _modules(package: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(
        package.rglob("*.py"), key=lambda one: (one.parent, one.name != "__init__.py", one)
    ):
        text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition(
            "\n\n"
        )[0]
        if text:
            yield (
                str(path.relative_to(DOCS.parent)).removesuffix("/__init__.py").removesuffix(".py"),
                text.replace("``", "`"),
            )


def complete_navigation(_app: Sphinx, name: str, source: list[str]) -> None:
    """A page that was added to docs/ and to no section of index.md is listed with the guides, and
    so never lost."""
    if name == "index":
        listed = set(re.findall(r"^([\w-]+)$", source[0], re.MULTILINE))
        pages = sorted(
            path.stem for path in DOCS.glob("*.md") if path.stem not in {"index", *listed}
        )
        source[0] = source[0].replace(PLACE, "\n".join(pages))


def front_page(app: Sphinx, name: str, source: list[str]) -> None:
    """The site's front page is the README, with the install selector in the place of its
    commands."""
    if name != "index" or Path(app.srcdir) != DOCS:  # a test builds a page of its own
        return
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8").partition("\n")[2]
    before, _, after = _cut(readme, "install")
    for part, text in (("readme", before), ("rest", after)):
        head, _, tail = _cut(source[0], part)
        source[0] = head + _links_of_docs(text) + tail


def _cut(text: str, part: str) -> tuple[str, str, str]:
    """What is before, between and after the marks of a part."""
    begin, end = (mark.format(part) for mark in MARKS)
    before, found, rest = text.partition(begin)
    inside, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"no place called {part}: a line {begin} and, after it, a line {end}")
    return before, inside, after


def _links_of_docs(text: str) -> str:
    """Links of the README as a page in docs/ has them."""

    def target(match: re.Match[str]) -> str:
        link = match[1]
        return f"]({link.removeprefix('docs/') if link.startswith('docs/') else f'../{link}'})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", target, text)


def link_to_repository(_app: Sphinx, name: str, source: list[str]) -> None:
    """``[...](../csrc/common)`` is a file beside docs/ for who reads on GitHub, and a link to the
    repository on the site."""
    folder = (DOCS / name).parent

    def absolute(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        target = (folder / path).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            raise ValueError(f"docs/{name}: there is no {match[1]}")
        return f"]({REPOSITORY}{target.relative_to(DOCS.parent)}{'#' * bool(anchor)}{anchor})"

    source[0] = re.sub(r"\]\((\.\./[^)\s]+)\)", absolute, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    app.add_directive("command-line", CommandLine)
    app.add_directive("module-table", ModuleTable)
    app.connect("source-read", complete_navigation)
    app.connect("source-read", front_page)
    app.connect("source-read", link_to_repository)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
