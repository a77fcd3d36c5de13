"""The commands of ``commands.py`` as a typer application, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from . import commands

_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class _Group(TyperGroup):
    """A group that other distributions add commands to. A command's module is imported when the
    command is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - of the interface
        return list(dict.fromkeys([*self.commands, *commands.names(self.name or "")]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in self.commands:
            name = f"{self.name} {cmd_name}" if self.name else cmd_name
            if row := commands.find(name):
                self.commands[cmd_name] = _made(name, row)
        return self.commands.get(cmd_name)


class _Commands(_Group):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "name": None})

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        formatter.write(f"{commands.help_text()}\n")


def _made(name: str, row: commands.Command) -> Any:
    module, _, attribute = row.target.partition(":")
    value = getattr(import_module(module), attribute)
    if isinstance(value, typer.Typer):
        _add_examples(value, f"{name} ", row.examples)
        value.info.cls = _Group
        made: Any = typer.main.get_group(value)
        made.name = name
        return made
    settings = {} if row.interspersed else {"allow_interspersed_args": False}
    one = typer.Typer(add_completion=False)
    last = name.split()[-1]
    one.command(last, context_settings=settings, epilog=_epilog(row.examples.get(name)))(value)
    return typer.main.get_command(one)


def _add_examples(group: typer.Typer, before: str, examples: Mapping[str, tuple[str, ...]]) -> None:
    for command in group.registered_commands:
        own = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        command.epilog = _epilog(examples.get(f"{before}{own}")) or command.epilog
    for sub in group.registered_groups:
        if sub.typer_instance is not None:
            _add_examples(sub.typer_instance, f"{before}{sub.name} ", examples)


def _epilog(lines: tuple[str, ...] | None) -> str | None:
    return "\n\n".join(["Examples:", *lines]) if lines else None


app = typer.Typer(
    name="flexops",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_HELP_OPTIONS,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexops {__version__}")
        raise typer.Exit


@app.callback(help=commands.SUMMARY)
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help=commands.OPTIONS["--version"],
        ),
    ] = False,
) -> None:
    """The options of ``flexops`` itself."""
