"""The command line: ``flexops <command>``. Here and in ``doctor/report.py`` is all that prints."""

from __future__ import annotations

import sys

from ..errors import FlexopsError


def main() -> None:
    """Entry point of the ``flexops`` command; exits with an error's own code and says it without a traceback."""
    try:
        from ._app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        mend = f"{sys.executable} -m pip install typer rich   # `{sys.executable} -m flexops.doctor` works without"
        sys.exit(f"flexops: the command line needs {error.name}\n  fix: {mend}")
    try:
        app(prog_name="flexops")  # also for `python -m flexops`: completion is installed for the command
    except FlexopsError as error:
        print(f"flexops: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
