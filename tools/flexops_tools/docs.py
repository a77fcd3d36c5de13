"""Renders docs/troubleshooting.md from the tables that diagnose, and builds the documentation site,
strictly: a broken link or docstring is an error.

    bash scripts/ci/build_site.sh             # into site/, with an environment of its own
    python -m flexops_tools.docs              # into site/; requires torch, flexops' requirements
                                              # and docs/requirements.txt
    python -m flexops_tools.docs --render     # troubleshooting.md only
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
CHECKS = ROOT / "flexops" / "doctor" / "checks"
NEEDED = ("sphinx", "myst_parser", "sphinx_copybutton", "furo", "torch", "typer", "rich")
"""What builds the site, and what the modules import whose docstrings are in it."""
HEAD = """# Troubleshooting

<!-- generated from flexops/build/compile/diagnose.py and flexops/doctor/checks -->
<!-- by: python -m flexops_tools.docs --render -->

Start with `flexops doctor`. It runs every check below on this machine, and prints what was found,
what is required and the fix. `flexops.status()` lists for each family what runs, and why.
`FLEXOPS_LOG=debug` shows every command of a build. In the tables, `…` stands for what depends on
the machine.
"""


def diagnose() -> ModuleType:
    """The module with the tables, of this checkout."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module("flexops.build.compile.diagnose")
    finally:
        sys.path.remove(str(ROOT))


def troubleshooting() -> str:
    """The page, whole."""
    tables = diagnose()
    builds = [(f"`{_pattern(rule.pattern)}`", rule.cause, rule.fix) for rule in tables.RULES]
    loads = [(f"`{_pattern(rule.pattern)}`", rule.cause, rule.fix) for rule in tables.LOAD_RULES]
    parts = [
        HEAD,
        (
            "## A build fails\n\nThe message begins with the first real error, its cause and its"
            " fix. The compilers' output is\ncompared with these patterns, in this order:\n"
        ),
        _table(("what the compilers say", "cause", "fix"), builds),
        "\n## A library does not load\n",
        _table(("what the dynamic linker says", "cause", "fix"), loads),
        (
            "\n## What doctor finds\n\nThe names are those in its report (and in `flexops doctor"
            " --json`). A finding may have several causes.\n"
        ),
        _table(("check", "found", "required", "fix"), sorted(set(_findings()))),
    ]
    return "\n".join(parts) + "\n"


def _pattern(pattern: str) -> str:
    """A regular expression as people read it: alternatives by commas, and what is between parts as
    dots."""
    plain = re.sub(
        r"\(\?:|\(\\S\+\)|\(\\w\[[^]]*\]\*\)|\\S\+|\\w\+|\\d\+|'?\[\^'\]\+'?|\.\*|\.command\.line\.",
        " … ",
        pattern,
    )
    plain = re.sub(
        r"\[(\w)(\w)\]",
        lambda found: found[1].lower(),
        plain.replace("?", "").replace("\\", "").replace("^", ""),
    )
    return (
        re.sub(
            r"\s*…\s*(…\s*)*",
            " … ",
            plain.replace("|", ", ").replace("command.line", "command-line"),
        )
        .replace("(", "")
        .replace(")", "")
        .strip()
    )


def _findings() -> Iterator[tuple[str, str, str, str]]:
    """The id and the texts of each ``warn(...)`` and ``fail(...)`` in the checks."""
    for path in sorted(CHECKS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _judges(node.func) and len(node.args) == 4:
                id, found, required, fix = map(_text, node.args)
                # else only this machine's doctor can say it
                if (found, required, fix).count("…") < 2:
                    yield f"`{id}`".replace("`…`", "`build`, `op`"), found, required, fix


def _judges(function: ast.expr) -> bool:
    return isinstance(function, ast.IfExp) or (
        isinstance(function, ast.Name) and function.id in ("warn", "fail")
    )


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.BoolOp):  # `fact.fix or "flexops build"`
        return _text(node.values[-1])
    return "…"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in line) + " |"
            for line in lines
        )
        + "\n"
    )


def build(out: Path) -> int:
    """Sphinx's exit status. Warnings are errors, and all of them are shown."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        fix = "bash scripts/ci/build_site.sh   # makes an environment for it"
        sys.exit(
            f"the site cannot be built by {sys.executable}\n  found: no {', '.join(missing)}\n "
            f" fix: {fix}"
        )
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-j",
        "auto",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        str(out.parent / f".{out.name}-doctrees"),
    ]
    return subprocess.run([*command, str(ROOT / "docs"), str(out)], check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--render", action="store_true", help="write docs/troubleshooting.md, and build nothing"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if docs/troubleshooting.md is not up to date, and build nothing",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="default: site/")
    asked = parser.parse_args()
    wanted = troubleshooting()
    if asked.render:
        TROUBLESHOOTING.write_text(wanted, encoding="utf-8")
    elif not TROUBLESHOOTING.is_file() or TROUBLESHOOTING.read_text(encoding="utf-8") != wanted:
        sys.exit(
            "docs/troubleshooting.md does not follow the tables\n  fix: python"
            " -m flexops_tools.docs --render"
        )
    elif not asked.check:
        sys.exit(build(asked.out.resolve()))


if __name__ == "__main__":
    main()
