"""The table of commands: where each is defined, and the line that ``flexops --help`` has about it.

It imports neither torch nor the command line's libraries, so that ``flexops --help`` and
``--version`` start as fast as Python does; a command's module is imported when that command runs.
Another distribution adds its commands by an entry point of the group ``GROUP`` that names such a
table, as flexops-tools does (tools/pyproject.toml). A name of two words, such as ``target render``,
is a command of the group called by the first.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import SettingsError
from .examples import EXAMPLES

GROUP = "flexops.commands"
SUMMARY = "Fused PyTorch operators: build, check, cache, targets, benchmarks."
EPILOG = (
    "Exit codes: 0, success; 1, a check or measurement failed; 2, a command line or setting that is"
    " not understood; 3 and above, one for each kind of error (docs/command-line.md). `flexops"
    " COMMAND --help` has examples."
)
OPTIONS = {
    "--version": "Show the version and exit.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": (
        "Show completion for the current shell, to copy it or customize the installation."
    ),
    "-h, --help": "Show this message and exit.",
}
_WIDEST = 100
OF_TOOLS = (
    "bench build",
    "bench model",
    "bench generate",
    "bench ops",
    "channel",
    "image",
    "target lock",
    "target prove",
    "target render",
)
"""The commands of flexops-tools, which is installed from a clone."""


class Command(NamedTuple):
    """A command or a group of commands.

    Attributes:
        target: ``module:name`` of a function, or of a ``typer.Typer``, which is a group.
        summary: the first line of its help.
        interspersed: options may follow arguments.
        examples: by the name of a command, those that its help ends with.
    """

    target: str
    summary: str
    interspersed: bool = True
    examples: Mapping[str, tuple[str, ...]] = EXAMPLES


COMMANDS: dict[str, Command] = {
    "build": Command(
        "flexops.cli.build:build",
        "Compile operators ahead of time, also for GPUs that are not in this machine.",
    ),
    "warm": Command(
        "flexops.cli.warm:warm",
        "Compile exactly what a recorded run launched. FLEXOPS_JIT=0 FLEXOPS_FALLBACK=forbid then "
        "verifies that a start compiles nothing.",
    ),
    "new": Command(
        "flexops.cli.new:new",
        "Write a package of your own operators, with tests that pass at once (docs/builder.md).",
    ),
    "cmake-dir": Command(
        "flexops.cli.new:cmake_dir",
        "Print the directory for CMake's flexops_DIR, where find_package(flexops) looks "
        "(docs/builder.md).",
    ),
    "doctor": Command(
        "flexops.cli.doctor:doctor",
        "Examine this machine, build a small op, verify every operator against its reference, "
        "and report what is wrong and how to fix it.",
    ),
    "patch": Command(
        "flexops.cli.patch:patch",
        "What flexops.patch replaces in a model, what it skips and why; requires no weights.",
    ),
    "inspect": Command(
        "flexops.cli.inspect:inspect",
        "Registers, spills, shared memory, occupancy and instructions of an operator's kernels.",
    ),
    "profile": Command(
        "flexops.cli.profile:profile",
        "Each kernel of one call: its time, and how busy memory, processors and warps are.",
    ),
    "sanitize": Command(
        "flexops.cli.profile:sanitize",
        "compute-sanitizer over the contract's cases: accesses out of bounds, races, "
        "missing barriers, uninitialized memory. Requires a GPU.",
    ),
    "watch": Command(
        "flexops.cli.watch:watch",
        "Run a command now and whenever a source changes; its result and the change of its "
        "speed on one line.",
        interspersed=False,
    ),
    "cache": Command(
        "flexops.cli.cache:app",
        "Inspect and clean the build cache.",
    ),
    "target": Command(
        "flexops.cli.target:app",
        "The targets that flexops supports.",
    ),
    "bench": Command(
        "flexops.cli.bench:app",
        "Measure flexops against other libraries, both sides in one run.",
    ),
}


def table() -> dict[str, Command]:
    """All commands, those of other distributions too. A name of flexops' own is never replaced."""
    from importlib.metadata import entry_points

    found: dict[str, Command] = {}
    for point in entry_points(group=GROUP):
        try:
            rows: Mapping[str, Command] = point.load()
            found |= rows
        except Exception as error:
            print(f"flexops: no commands of {point.value}: {error!r}", file=sys.stderr)
    return COMMANDS | {name: row for name, row in found.items() if name not in COMMANDS}


def find(name: str) -> Command | None:
    """A command by its name. Other distributions are only asked for a name that is not ours.

    Raises:
        SettingsError: it is a command of flexops-tools, which is not installed.
    """
    found = COMMANDS.get(name) or table().get(name)
    if found is None and name in OF_TOOLS:
        raise SettingsError(
            f"`flexops {name}` is a command of flexops-tools, for releases and measurements",
            found="flexops without flexops-tools",
            required="flexops-tools of the same version, from a clone of flexops",
            fix="pip install './tools[conda,bench]'   # in the clone",
        )
    return found


def names(group: str = "") -> list[str]:
    """The commands of a group, without its name; of flexops itself by default."""
    before = f"{group} " if group else ""
    rest = [name.removeprefix(before) for name in table() if name.startswith(before)]
    return [name for name in rest if " " not in name]


def help_text() -> str:
    """What ``flexops --help`` prints."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    commands = {name: row.summary for name, row in table().items() if " " not in name}
    left = max(map(len, [*OPTIONS, *commands])) + 4

    def block(title: str, rows: Mapping[str, str]) -> list[str]:
        filled = (
            textwrap.fill(
                text, width, initial_indent=f"  {name}".ljust(left), subsequent_indent=" " * left
            )
            for name, text in rows.items()
        )
        return ["", title, *filled]

    return "\n".join(
        [
            "Usage: flexops [OPTIONS] COMMAND [ARGS]...",
            "",
            SUMMARY,
            *block("Options:", OPTIONS),
            *block("Commands:", commands),
            "",
            textwrap.fill(EPILOG, width),
        ]
    )
