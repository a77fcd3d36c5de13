"""The table of commands: where each is defined, and the line that ``flexops --help`` has about it.

It imports neither torch nor the command line's libraries, so that ``flexops --help`` and
``--version`` start as fast as Python does; a command's module is imported when that command runs.
Another distribution adds its commands by an entry point of the group ``GROUP`` that names such a
table::

    [project.entry-points."flexops.commands"]
    release = "flexops_release.commands:COMMANDS"
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

GROUP = "flexops.commands"
SUMMARY = "Fused PyTorch operators: build, check, cache, targets, benchmarks."
EPILOG = (
    "Exit codes: 0, success; 1, a check or measurement failed; 2, a command line or setting that is"
    " not understood; 3 to 12, one for each kind of error (docs/command-line.md). `flexops COMMAND"
    " --help` has examples."
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


class Command(NamedTuple):
    """A command or a group of commands.

    Attributes:
        target: ``module:name`` of a function, or of a ``typer.Typer``, which is a group.
        summary: the first line of its help.
        interspersed: options may follow arguments.
    """

    target: str
    summary: str
    interspersed: bool = True


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
    "channel": Command(
        "flexops.cli.channel:app",
        "Build conda packages into a channel, index and check it.",
    ),
    "image": Command(
        "flexops.cli.image:app",
        "Images of the targets. Requires a container engine and the docker SDK "
        "(flexops-torch[images]).",
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
    """A command by its name. Other distributions are only asked for a name that is not ours."""
    return COMMANDS.get(name) or table().get(name)


def help_text() -> str:
    """What ``flexops --help`` prints."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    commands = {name: row.summary for name, row in table().items()}
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
