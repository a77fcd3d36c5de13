"""``python3 -m flexops.targets``: the matrix for scripts, on a plain Python that has neither torch
nor typer yet.

It prints, like the command line, of which ``flexops target`` is the comfortable form.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import FlexopsError
from . import detect, load, requirements, text


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or that of the error it printed."""
    options = _parser().parse_args(arguments)
    try:
        print(_answer(options))
    except FlexopsError as error:
        print(f"flexops: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _answer(options: argparse.Namespace) -> str:
    if options.command == "detect":
        return text.detection(detect(python=options.python), options.json)
    if options.command == "list":
        return text.listing(load(), options.json)
    target = load().find(options.id)
    if options.command == "requirements":
        return requirements.requirements(target).rstrip("\n")
    if options.command == "locked":
        return requirements.installed(target, Path.cwd(), toolkit=options.toolkit).rstrip("\n")
    return (
        text.field(target, options.field) if options.field else text.details(target, options.json)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m flexops.targets", description="The matrix of targets."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    found = commands.add_parser(
        "detect", help="the best target for this machine: its id, then the reason, then notes"
    )
    found.add_argument(
        "--python",
        metavar="X.Y",
        type=_python_version,
        help="the environment's Python; default this one, '' if any can be had",
    )
    listed = commands.add_parser("list", help="all targets")
    shown = commands.add_parser("show", help="one target")
    shown.add_argument("--field", metavar="NAME", help="only the value of this field")
    wanted = commands.add_parser(
        "requirements", help="what pip installs for a target, as a requirements file"
    )
    locked = commands.add_parser(
        "locked",
        help="the same by hash, with all that it depends on, from the checkout that this runs in",
    )
    locked.add_argument("--toolkit", action="store_true", help="with the package index's compiler")
    for command in (shown, wanted, locked):
        command.add_argument("id", metavar="ID")
    for command in (found, listed, shown):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _python_version(text: str) -> str:
    match = re.fullmatch(r"(\d+\.\d+)(\.\d+)*", text)
    if text and not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 3.12")
    return match[1] if match else ""


if __name__ == "__main__":
    sys.exit(main())
