"""The command line as a whole: help, completion, names."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import COMMAND, flexops_command, parse
from processes import completed

import flexops
from flexops import errors
from flexops.cli import main
from flexops.cli.commands import COMMANDS, GROUP, OF_TOOLS, OPTIONS, help_text
from flexops.cli.examples import EXAMPLES as OWN
from flexops.errors import FlexopsError, SettingsError
from flexops_tools import commands as tools

ROOT = Path(__file__).parents[1]


def commands(tool: Any, *before: str) -> Iterator[tuple[str, ...]]:
    yield before
    for name in tool.list_commands(None) if hasattr(tool, "list_commands") else ():
        yield from commands(tool.get_command(None, name), *before, name)


def test_every_command_has_a_short_option_for_help():
    found = list(commands(COMMAND))
    assert len(found) > 25
    for command in found:
        short = flexops_command(*command, "-h", catch_exceptions=True, prog_name="flexops")
        assert short.exit_code == 0, (command, short.output)
        assert (
            short.output
            == flexops_command(
                *command, "--help", catch_exceptions=True, prog_name="flexops"
            ).output
        )


EXAMPLES = OWN | tools.EXAMPLES


def test_examples_are_understood():
    found = [" ".join(command) for command in commands(COMMAND)]
    assert sorted(EXAMPLES) == sorted(
        one for one in found if not any(other.startswith(f"{one} ") for other in found) and one
    )
    for name, lines in EXAMPLES.items():
        tool = functools.reduce(
            lambda group, word: group.get_command(None, word), name.split(), COMMAND
        )
        assert tool.epilog == "\n\n".join(["Examples:", *lines])
        for line in lines:
            if line.startswith("flexops"):
                assert line.startswith(f"flexops {name}")
                parse(shlex.split(line)[1:])
    shown = flexops_command(
        "cache", "prune", "-h", catch_exceptions=True, prog_name="flexops"
    ).output
    assert "Examples:" in shown
    assert "flexops cache prune --max-size 500M" in shown


def documented() -> Iterator[tuple[str, list[str]]]:
    """The words of each command of flexops' in the documentation, with its page."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/benchmarks").glob("*.md"),
    ]
    for page in pages:
        text = page.read_text()
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        blocks = [block for language, block in fenced if language in ("", "bash")] + re.findall(
            r"^ {4}flexops .*$", text, re.MULTILINE
        )
        inline = re.findall(
            r"`((?:\w+=\S+ )*flexops [a-z][^`]*)`",
            re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE),
        )
        for line in [
            line for block in blocks for line in block.replace("\\\n", " ").splitlines()
        ] + inline:
            if "flexops " not in line or re.search(r"[\[…<]|flexops watch: ", line):
                continue
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            while "flexops" in words:
                words = words[words.index("flexops") + 1 :]
                end = next(
                    (at for at, word in enumerate(words) if word in ("&&", ";", "|", ">", ")")),
                    len(words),
                )
                yield page.name, words[:end]


def test_commands_in_the_documentation_are_understood():
    found = list(documented())
    assert len(found) > 100
    for page, command in found:
        try:
            parse(command)
        except typer.Exit:
            pass
        except Exception as error:
            # named, not typed
            if type(error).__name__ not in (
                "MissingParameter",
                "NoArgsIsHelpError",
            ) and "requires an argument" not in str(error):
                pytest.fail(f"{page}: flexops {shlex.join(command)}: {error!r}")


def test_exit_codes_are_documented():
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, FlexopsError) and "exit_code" in vars(kind)
    ]
    page = (ROOT / "docs/command-line.md").read_text()
    table = {
        int(code): name for code, name in re.findall(r"^\| (\d+) \| `?(\w+)", page, re.MULTILINE)
    }
    assert {kind.exit_code: kind.__name__ for kind in kinds}.items() <= table.items()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed_and_completes(shell, tmp_path, program):
    program(shell)
    command = tmp_path / "flexops"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m flexops "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / ".config"),
    }
    done = completed(
        [shell, "-c", "flexops --install-completion; true"], env=environment, code=None
    )
    assert f"{shell} completion installed" in done.stdout, done.stdout + done.stderr
    (script,) = [path for path in tmp_path.rglob("*flexops*") if path != command]
    assert "python" not in script.name
    if shell == "bash":
        ask = (
            f"source '{script}'; COMP_WORDS=(flexops targ) COMP_CWORD=1; _flexops_completion"
            ' flexops; echo "${COMPREPLY[@]}"'
        )
    elif shell == "fish":
        ask = f"source '{script}'; complete -C 'flexops targ'"
    else:
        ask = "_TYPER_COMPLETE_ARGS='flexops targ' _FLEXOPS_COMPLETE=complete_zsh flexops"
    told = completed([shell, "-c", ask], env=environment, code=None)
    assert "target" in told.stdout, told.stdout + told.stderr


def test_usage_names_the_command_however_it_was_started():
    """Python's own options do not hide that it is the command line, which starts without torch."""
    options = ["-X", "dev", "-W", "ignore"]
    command = [sys.executable, *options, "-m", "flexops", "target", "-h"]
    done = completed(command)
    assert "Usage: flexops target" in done.stdout
    asks = "import sys, flexops; sys.orig_argv[1:] = {!r}; print(flexops._is_command_line())"
    program = [sys.executable, "-c", asks.format(command[1:])]
    told = completed(program)
    assert told.stdout == "True\n"


MODULES = "its modules: "
CHILD = f"""import atexit, runpy, sys
atexit.register(lambda: print({MODULES!r}, *sys.modules, file=sys.stderr))
sys.orig_argv[1:] = ["-m", "flexops", *sys.argv[1:]]
runpy.run_module("flexops", run_name="__main__", alter_sys=True)"""


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which lists its modules on stderr when it ends.

    ``-X importtime`` would miss what ``importlib.import_module`` imports.
    """
    command = [sys.executable, "-c", CHILD, *arguments]
    variables = {**os.environ, **environment}
    return completed(command, env=variables, code=None)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(done.stderr.rpartition(MODULES)[2].split())


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["-h"], 0), (["--version"], 0), ([], 2)]
)
def test_help_and_version_need_no_parser(arguments, code):
    """What takes long to import stays out, so that they answer as fast as Python starts."""
    done = started(*arguments)
    assert done.returncode == code
    slow = {"torch", "typer", "click", "rich", "numpy", "flexops.build", "flexops.toolchain"}
    assert imported(done) & slow == set()
    said = f"flexops {flexops.__version__}" if "--version" in arguments else "Usage: flexops"
    assert done.stdout.startswith(said)


def test_a_command_imports_its_own_module_only():
    found = imported(started("new", "--help"))
    modules = {row.target.partition(":")[0] for row in COMMANDS.values()}
    assert found & modules == {"flexops.cli.new"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_of_commands_says_what_their_help_says(name):
    tool = COMMAND.get_command(None, name)
    first = inspect.cleandoc(tool.help).partition("\n\n")[0].replace("\n", " ")
    assert COMMANDS[name].summary == first


def test_the_help_names_every_option_and_command():
    said = flexops_command("--help", catch_exceptions=True, prog_name="flexops").output
    assert said.splitlines() == help_text().splitlines()
    context = COMMAND.make_context("flexops", ["doctor"])
    options = [", ".join(sorted(one.opts, key=len)) for one in COMMAND.get_params(context)]
    assert sorted(options) == sorted(OPTIONS)
    assert all(re.search(rf"^  {name} ", said, re.MULTILINE) for name in (*OPTIONS, *COMMANDS))
    assert re.search("^  image ", said, re.MULTILINE)
    assert max(map(len, said.splitlines())) <= 100


def test_another_distribution_adds_commands(tmp_path):
    """By an entry point. It cannot replace one of ours, and one that fails hides no others."""
    (tmp_path / "extra.py").write_text(
        "import typer\n"
        "from flexops.cli.commands import Command\n"
        "def polish(times: int = 1) -> None:\n"
        "    'Polish it.'\n"
        "    typer.echo(f'polished {times} times')\n"
        "def doctor() -> None: typer.echo('not the doctor')\n"
        "COMMANDS = {'polish': Command('extra:polish', 'Polish it.'),\n"
        "            'doctor': Command('extra:doctor', 'No.')}\n"
    )
    information = tmp_path / "extra-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    points = f"[{GROUP}]\nbroken = nothing:COMMANDS\nextra = extra:COMMANDS\n"
    (information / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    shown = started("--help", PYTHONPATH=path)
    assert re.search(r"^  polish +Polish it\.$", shown.stdout, re.MULTILINE)
    assert "No." not in shown.stdout.splitlines()
    assert "flexops: no commands of nothing:COMMANDS" in shown.stderr
    assert started("polish", "--times", "3", PYTHONPATH=path).stdout == "polished 3 times\n"
    assert "not the doctor" not in started("doctor", "--help", PYTHONPATH=path).stdout


@pytest.mark.parametrize("name", OF_TOOLS)
def test_without_flexops_tools_its_commands_say_how_to_install_it(name, monkeypatch):
    assert sorted(OF_TOOLS) == sorted(tools.COMMANDS)
    monkeypatch.setattr("flexops.cli.commands.table", lambda: COMMANDS)
    shown = flexops_command(*name.split(), catch_exceptions=True)
    assert isinstance(shown.exception, SettingsError)
    assert "pip install './tools[" in shown.exception.fix


EXIT_CODES: dict[str, int] = {
    "nothing": 2,
    "cache nothing": 2,
    "cmake-dir superfluous": 2,
    "build --nothing": 2,
    "build --device tpu": 2,
    "build --jobs 0": 2,
    "build nothing": 2,
    "build --arch 99.9x": 4,
    "warm": 2,
    "warm --record /nonexistent": 1,
    "warm --model /nonexistent": 12,
    "new": 2,
    "new 1bad": 2,
    "patch /nonexistent/config.json": 12,
    "inspect nothing --arch 9.0": 2,
    "inspect lion --arch zz": 4,
    "profile": 2,
    "profile lion --device tpu": 2,
    "sanitize": 2,
    "watch": 2,
    "watch /nonexistent -- true": 1,
    "cache prune --max-size abc": 2,
    "cache export": 2,
    "cache import /nonexistent": 7,
    "cache remote list": 7,
    "target show": 2,
    "target show nothing": 3,
    "target prove nothing": 3,
    "target lock nothing": 3,
    "channel build --variant nothing": 3,
    "channel index --channel /nonexistent": 11,
    "channel check --channel /nonexistent": 11,
    "image build nothing": 3,
    "image check nothing": 3,
    "bench build --rung nothing": 2,
    "bench build --from /nonexistent": 1,
    "bench build --from /nonexistent --quick": 2,
    "bench ops --op nothing": 2,
    "bench ops --device tpu": 2,
    "bench ops --from /nonexistent": 1,
    "bench run /nonexistent.py": 1,
    "bench model --size nothing": 2,
    "bench model --contender nothing": 2,
    "bench model --from /nonexistent": 1,
    "bench generate --size nothing": 2,
    "bench generate --contender nothing": 2,
    "bench generate --from /nonexistent": 1,
}
"""As docs/command-line.md has them: by what is wrong with the command line."""


@pytest.mark.parametrize("line", EXIT_CODES)
def test_an_exit_code_says_what_is_wrong(line, monkeypatch):
    """Of ``main`` itself, with the modules that it needs imported already."""
    monkeypatch.setattr(sys, "argv", ["flexops", *shlex.split(line)])
    monkeypatch.delenv("FLEXOPS_CACHE_REMOTE", raising=False)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == EXIT_CODES[line]


def test_every_command_has_an_exit_code_in_the_table():
    """Those left out take no argument that can be wrong, or ask a machine for its state."""
    named = {
        words
        for line in EXIT_CODES
        for words in commands(COMMAND)
        if line.startswith(" ".join(words))
    }
    without = {" ".join(words) for words in commands(COMMAND)} - {
        " ".join(words) for words in named
    }
    groups = {"bench", "cache", "cache remote", "channel", "image", "target"}
    assert without - groups == {
        "doctor",
        "cache info",
        "cache stats",
        "cache list",
        "cache clear",
        "cache remote prune",
        "cache remote check",
        "cache remote verify",
        "target list",
        "target render",
        "target detect",
    }


@pytest.mark.parametrize("name", ["FLEXOPS_FALLBACK", "MAX_JOBS", "FLEXOPS_CACHE_MAX_SIZE"])
def test_a_setting_that_is_not_understood_is_exit_code_2(name):
    assert started("cache", "info", **{name: "nothing"}).returncode == 2


@pytest.mark.parametrize(
    ("given", "seen", "said"),
    [
        (None, False, "on the CPU: torch sees no GPU here"),
        ("cpu", True, "on the CPU"),
        (None, True, "on a GPU"),
    ],
)
def test_a_profile_says_what_was_timed(given, seen, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: seen)
    monkeypatch.setattr("flexops.bench.profiling.by_torch", lambda _: [{"kernel": "k"}])
    options = ["--by", "torch", *(["--device", given] if given else [])]
    done = flexops_command("profile", "rms_norm", *options)
    assert done.output.splitlines()[-1] == f"rms_norm, by torch.profiler, {said}"
    rows = flexops_command("profile", "rms_norm", *options, "--json", catch_exceptions=True).stdout
    assert json.loads(rows) == [{"kernel": "k", "device": "cuda" if said == "on a GPU" else "cpu"}]
