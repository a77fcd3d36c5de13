"""Output: steps that name themselves when they fail, questions, errors with their fix."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import FrameType

from flexops.errors import FlexopsError

from .indexes import without_credentials

_COLOURS = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
BOLD, DIM, RED, PLAIN = ("\033[1m", "\033[2m", "\033[31m", "\033[0m") if _COLOURS else ("",) * 4


class Failure(Exception):
    """What is wrong, and the command that fixes it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


class Step:
    """The step that is running, and how to fix it when it fails."""

    number = 0
    name = ""
    fix = ""


def say(text: str = "") -> None:
    print(text, flush=True)


def heading(text: str) -> None:
    say(f"{BOLD}{text}{PLAIN}")


def note(text: str) -> None:
    for line in text.splitlines():
        say(f"  {DIM}{line}{PLAIN}")


def fact(name: str, text: str) -> None:
    say(f"  {name:<15} {text}")


def warn(text: str) -> None:
    print(f"{RED}warning:{PLAIN} {text}", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask(question: str, *, default: bool) -> bool:
    """Only for terminals: callers decide first what silence means."""
    try:
        answer = input(f"{question} {'[Y/n]' if default else '[y/N]'} ").strip()
    except EOFError:
        answer = ""
    return answer.lower().startswith("y") if answer else default


def step(name: str, fix: str, work: Callable[[], None]) -> None:
    """Do a part of the work; if it fails, the name and the fix are printed."""
    Step.number, Step.name, Step.fix = Step.number + 1, name, fix
    say()
    heading(f"{Step.number}. {name}")
    work()
    Step.name = Step.fix = ""


def run(*command: str, variables: Mapping[str, str] | None = None, quiet: bool = False) -> None:
    """Run a program, with these variables too; raises ``CalledProcessError`` if it fails."""
    output = subprocess.DEVNULL if quiet else None
    subprocess.run(command, check=True, stdout=output, env={**os.environ, **(variables or {})})


def guarded(work: Callable[[], None]) -> int:
    """The exit status of the work; no failure goes without the name of its step and a fix."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        work()
    except (KeyboardInterrupt, _Stopped) as error:
        place = f' in step "{Step.name}"' if Step.name else ""
        again = "nothing is lost: run the same command again"
        print(f"\ninterrupted{place}; {again}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 143
    except FlexopsError as error:
        print(f"flexops: {error}", file=sys.stderr)
        return error.exit_code
    except (Failure, subprocess.CalledProcessError, OSError) as error:
        where = f'step "{Step.name}": ' if Step.name else ""
        fix = getattr(error, "fix", "") or Step.fix or "see the message above"
        if isinstance(error, subprocess.CalledProcessError):
            text = f"{shlex.join(error.cmd)} (exit status {error.returncode})"
        else:
            text = str(error)
        print(
            f"\n{RED}FAILED:{PLAIN} {where}{without_credentials(text)}\n  fix: {fix}",
            file=sys.stderr,
        )
        return 1
    return 0


class _Stopped(BaseException):
    pass


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise _Stopped
