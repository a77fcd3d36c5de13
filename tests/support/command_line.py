"""The whole command line: read without running anything, or run in this process."""

from __future__ import annotations

from typing import Any

import typer
from typer.testing import CliRunner, Result

from flexops.cli._app import app

COMMAND: Any = typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Raise if the command line is not understood; runs nothing."""
    tool = COMMAND
    context = tool.make_context("flexops", words, allow_interspersed_args=False)
    while words := (
        [*getattr(context, "_protected_args", ()), *context.args]
        if hasattr(tool, "commands")
        else []
    ):
        tool = tool.get_command(context, words[0])
        context = tool.make_context(words[0], words[1:], parent=context)


def flexops_command(*words: object, **options: Any) -> Result:
    """``flexops WORDS``; an exception reaches the test unless ``catch_exceptions=True``."""
    options = {"catch_exceptions": False, **options}
    return CliRunner().invoke(app, [*map(str, words)], **options)
