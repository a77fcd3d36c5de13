"""The command line: ``flexops <command>``. Here and in ``doctor/report.py`` is all that prints."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ..errors import FlexopsError, SettingsError, TorchUnavailableError


def main() -> None:
    """Entry point of the ``flexops`` command. An error ends it with the error's own exit code,
    without a traceback."""
    if (said := _said_at_once(sys.argv[1:])) is not None:
        print(said)
        sys.exit(0 if sys.argv[1:] else SettingsError.exit_code)
    try:
        from ._app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        fix = (
            f"{sys.executable} -m pip install typer rich   # `{sys.executable} -m flexops.doctor`"
            " works without"
        )
        sys.exit(f"flexops: the command line needs {error.name}\n  fix: {fix}")
    try:
        # also for `python -m flexops`: completion is installed for the command
        app(prog_name="flexops")
    except FlexopsError as error:
        _end(error)
    except Exception as error:
        if not _is_of_torch(error):
            raise
        what = "this command needs torch, which cannot be imported"
        _end(TorchUnavailableError(what, found=str(error), fix="flexops doctor"))


def _end(error: FlexopsError) -> NoReturn:
    print(f"flexops: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def _is_of_torch(error: Exception) -> bool:
    """Whether it is that ``import torch`` fails: torch is absent, or raises while it is imported
    (and then is no module that has been imported)."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return True
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals.get("__name__") != "torch":
        trace = trace.tb_next
    return trace is not None and "torch" not in sys.modules


def _said_at_once(arguments: list[str]) -> str | None:
    """The answer to ``--help``, ``--version`` and no arguments, without the parser, whose import
    takes longest. A shell that asks for completions gives no arguments either."""
    if "_FLEXOPS_COMPLETE" in os.environ:
        return None
    if arguments in ([], ["--help"], ["-h"]):
        from .commands import help_text

        return help_text()
    if arguments == ["--version"]:
        from .. import __version__

        return f"flexops {__version__}"
    return None
