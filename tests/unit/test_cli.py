"""The command line as a whole: help, completion, names."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flexops import errors
from flexops.cli._app import app
from flexops.cli.examples import EXAMPLES
from flexops.errors import FlexopsError

ROOT = Path(__file__).parents[2]


def commands(group: typer.Typer, *before: str) -> Iterator[tuple[str, ...]]:
    yield before
    for command in group.registered_commands:
        yield (*before, command.name or getattr(command.callback, "__name__", "").replace("_", "-"))
    for sub in group.registered_groups:
        assert sub.typer_instance is not None
        yield from commands(sub.typer_instance, *before, str(sub.name))


def test_every_command_has_a_short_option_for_help() -> None:
    found = list(commands(app))
    assert len(found) > 25
    for command in found:
        short = CliRunner().invoke(app, [*command, "-h"], prog_name="flexops")
        assert short.exit_code == 0, (command, short.output)
        assert short.output == CliRunner().invoke(app, [*command, "--help"], prog_name="flexops").output


COMMAND: Any = typer.main.get_command(app)
"""Made once: to make it takes a tenth of a second."""


def parse(words: list[str]) -> None:
    """Raise if the command line is not understood; runs nothing."""
    tool = COMMAND
    context = tool.make_context("flexops", words, allow_interspersed_args=False)
    while words := [*getattr(context, "_protected_args", ()), *context.args] if hasattr(tool, "commands") else []:
        tool = tool.commands[words[0]]
        context = tool.make_context(words[0], words[1:], parent=context)


def test_examples_are_understood() -> None:
    found = [" ".join(command) for command in commands(app)]
    assert sorted(EXAMPLES) == sorted(one for one in found if not any(other.startswith(f"{one} ") for other in found) and one)
    for name, lines in EXAMPLES.items():
        tool = functools.reduce(lambda group, word: group.commands[word], name.split(), COMMAND)
        assert tool.epilog == "\n\n".join(["Examples:", *lines])
        for line in lines:
            if line.startswith("flexops"):
                assert line.startswith(f"flexops {name}")
                parse(shlex.split(line)[1:])
    shown = CliRunner().invoke(app, ["cache", "prune", "-h"], prog_name="flexops").output
    assert "Examples:" in shown
    assert "flexops cache prune --max-size 500M" in shown


def documented() -> Iterator[tuple[str, list[str]]]:
    """The words of each command of flexops' in the documentation, with its page."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/benchmarks").glob("*.md")]
    for page in pages:
        text = page.read_text()
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        blocks = [block for language, block in fenced if language in ("", "bash")] + re.findall(r"^ {4}flexops .*$", text, re.MULTILINE)
        inline = re.findall(r"`((?:\w+=\S+ )*flexops [a-z][^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
        for line in [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + inline:
            if "flexops " not in line or re.search(r"[\[…<]|flexops watch: ", line):
                continue
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            while "flexops" in words:
                words = words[words.index("flexops") + 1 :]
                end = next((at for at, word in enumerate(words) if word in ("&&", ";", "|", ">", ")")), len(words))
                yield page.name, words[:end]


def test_commands_in_the_documentation_are_understood() -> None:
    found = list(documented())
    assert len(found) > 100
    for page, command in found:
        try:
            parse(command)
        except typer.Exit:
            pass
        except Exception as error:
            if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError") and "requires an argument" not in str(error):  # named, not typed
                pytest.fail(f"{page}: flexops {shlex.join(command)}: {error!r}")


def test_exit_codes_are_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FlexopsError) and "exit_code" in vars(kind)]
    page = (ROOT / "docs/command-line.md").read_text()
    table = {int(code): name for code, name in re.findall(r"^\| (\d+) \| `?(\w+)", page, re.MULTILINE)}
    assert {kind.exit_code: kind.__name__ for kind in kinds}.items() <= table.items()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed_and_completes(shell: str, tmp_path: Path, require: Callable[..., None]) -> None:
    require(shutil.which(shell), shell, f"apt-get install {shell}, or sudo bash scripts/run_tests.sh, which does")
    command = tmp_path / "flexops"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -m flexops \"$@\"\n")
    command.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    done = subprocess.run([shell, "-c", "flexops --install-completion; true"], env=environment, capture_output=True, text=True, check=False)
    assert f"{shell} completion installed" in done.stdout, done.stdout + done.stderr
    (script,) = [path for path in tmp_path.rglob("*flexops*") if path != command]
    assert "python" not in script.name
    if shell == "bash":
        ask = f"source '{script}'; COMP_WORDS=(flexops targ) COMP_CWORD=1; _flexops_completion flexops; echo \"${{COMPREPLY[@]}}\""
    elif shell == "fish":
        ask = f"source '{script}'; complete -C 'flexops targ'"
    else:
        ask = "_TYPER_COMPLETE_ARGS='flexops targ' _FLEXOPS_COMPLETE=complete_zsh flexops"
    told = subprocess.run([shell, "-c", ask], env=environment, capture_output=True, text=True, check=False)
    assert "target" in told.stdout, told.stdout + told.stderr


def test_usage_names_the_command_however_it_was_started() -> None:
    """Python's own options do not hide that it is the command line, which starts without torch."""
    command = [sys.executable, "-X", "importtime", "-W", "ignore", "-m", "flexops", "target", "-h"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Usage: flexops target" in done.stdout
    assert {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & {"flexops", "torch"} == {"flexops"}


@pytest.mark.parametrize("width", [80, 100])
def test_the_list_of_targets_fits_a_terminal(width: int) -> None:
    shown = CliRunner().invoke(app, ["target", "list"], env={"COLUMNS": str(width)}).output
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (("target", "show", "cu999"), "cu130-sm90"),
        (("target", "lock", "cu999"), "cu130"),
        (("bench", "ops", "--op", "sqrt"), "rms_norm"),
        (("bench", "build", "--rung", "ladder"), "flexops-cold"),
        (("build", "sqrt"), "norm"),
    ],
)
def test_a_name_that_matches_nothing_fails_with_those_there_are(arguments: tuple[str, ...], listed: str) -> None:
    with pytest.raises(FlexopsError) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert listed in caught.value.required
