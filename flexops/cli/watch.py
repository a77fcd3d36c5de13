"""``flexops watch``: run a command again whenever a source changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .. import watching
from ..errors import FlexopsError

_METRIC_HELP = (
    r"A regular expression with a group for a number in the output, such as '([\d.]+) GB/s': the"
    r" line says how it changed."
)


def watch(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH... -- COMMAND...", help="Files and directories to watch, and what to run."
        ),
    ],
    metric: Annotated[str, typer.Option(help=_METRIC_HELP)] = "",
    once: Annotated[
        bool, typer.Option("--once", hidden=True, help="End after the first change.")
    ] = False,
) -> None:
    """Run a command now and whenever a source changes; its result and the change of its speed on
    one line."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    places = [Path(argument) for argument in arguments[:split]]
    if missing := [str(path) for path in places if not path.exists()]:
        raise FlexopsError(
            "a path to watch is missing",
            found=", ".join(missing),
            required="files or directories, then -- and the command",
        )
    runner = watching.Runner(arguments[split + 1 :], metric=metric)
    last: watching.Run | None = None
    files: list[str] = []
    runs = 0
    try:
        while True:
            state = watching.snapshot(places)
            result = runner.run(places, state)
            if result:
                typer.echo(
                    f"flexops watch: {time.strftime('%H:%M:%S')} "
                    f" {watching.line(result, last, files)}"
                )
                last, runs = result, runs + 1
                if once and runs > 1:
                    break
                runner.warm_up()
            files = _wait(places, state)
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        runner.stop()


def _wait(places: list[Path], state: watching.State) -> list[str]:
    while not (files := watching.changed(state, watching.snapshot(places))):
        time.sleep(watching.POLL_SECONDS)
    return files
