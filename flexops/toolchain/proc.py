"""The one way to run a child process.

``run`` waits for a command and returns what it wrote. ``start``, ``lines`` and ``stop`` serve a
command whose output is read as it comes. ``JsonChild`` is a script that stays alive and answers
requests: a crash, a hang or a lack of memory is then its own.

Each child leads a session, and so a process group: after a time limit or an interruption it is
killed together with what it has started. A fork of another thread waits while a process is started
(``flexops._fork``).
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from .. import _fork

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
_ATTENTIVE_SECONDS = 0.2
_LAST_SECONDS = 5.0

Process = subprocess.Popen[bytes]


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        status: the exit status; below 0, the signal that killed it; None after the time limit.
        output: what it wrote, decoded; with ``apart``, to standard output only.
        errors: with ``apart``, what it wrote to standard error.
    """

    status: int | None
    output: str
    errors: str = ""


def start(
    command: Sequence[str | Path],
    *,
    stdin: int = DEVNULL,
    stdout: int = PIPE,
    stderr: int = STDOUT,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
    inherited: Sequence[int] = (),
) -> Process:
    """Start a command in a session of its own. Raises ``OSError``."""
    with _fork.postponed():  # a forked child would hold the pipe open that Popen waits for
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=directory,
            pass_fds=inherited,
            start_new_session=True,
        )


def run(
    command: Sequence[str | Path],
    *,
    seconds: float | None = None,
    content: bytes | None = None,
    apart: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command to its end.

    Args:
        seconds: the time limit; None or 0 for none.
        content: its standard input, at most a pipe's worth: no fork happens until it has ended.
        apart: keep standard error apart from standard output.

    Raises:
        OSError: it cannot be started.
    """
    with _fork.postponed() if content is not None else contextlib.nullcontext():
        process = start(
            command,
            stdin=DEVNULL if content is None else PIPE,
            stderr=PIPE if apart else STDOUT,
            environment=environment,
        )
        return finish(process, seconds, content)


def finish(process: Process, seconds: float | None = None, content: bytes | None = None) -> Ended:
    """Wait for a process that was started; it is killed after ``seconds``, or on interruption."""
    status: int | None = None
    try:
        texts = process.communicate(content, timeout=seconds or None)
        status = process.returncode
    except subprocess.TimeoutExpired:
        kill_all(process.pid)
        try:
            texts = process.communicate(timeout=_LAST_SECONDS)
        except subprocess.TimeoutExpired:  # a process that has left the group holds the pipe
            texts = b"", b""
    except BaseException:
        kill_all(process.pid)
        raise
    output, errors = ((text or b"").decode("utf-8", "replace") for text in texts)
    return Ended(status, output, errors)


def lines(process: Process, look: Callable[[int], None] | None = None) -> Iterator[str]:
    """What a process writes to its pipe, line by line, until the pipe's end or, if something that
    it started keeps the pipe open, the process's. ``look`` is called with its number in between.

    Not a plain read, which a signal need not end: in a large process another thread may be the one
    that takes it, or a library's handler in front of Python's may have the kernel go on reading.
    Then Ctrl-C would count only after the next line. Here it does within ``_ATTENTIVE_SECONDS``.
    """
    assert process.stdout is not None
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8")("replace"), translate=True
    )
    rest, data = "", b"..."
    while data:
        if look:
            look(process.pid)
        ended = process.poll() is not None  # before the poll, so that its last line is not missed
        if _is_ready(process.stdout, 0 if ended else _ATTENTIVE_SECONDS):
            data = os.read(process.stdout.fileno(), 1 << 16)
        elif ended:
            data = b""
        else:
            continue
        *whole, rest = (rest + decoder.decode(data, final=not data)).split("\n")
        yield from (f"{line}\n" for line in whole)
    if rest:
        yield rest


def stop(process: Process, *numbers: int) -> None:
    """End a process and its group if it still runs, by each of these signals until one has done so
    within three seconds; by default SIGKILL."""
    for number in numbers or (signal.SIGKILL,):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)


def kill_all(leader: int) -> None:
    """Kill a process group and everything below its leader, also what is in other sessions."""
    below = list(descendants(leader))
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    for process in below:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- /proc ----


def children(parent: int) -> Iterator[tuple[int, int, float]]:
    """Of each process that a process has started: its number, its group, the seconds it has run."""
    try:
        with open("/proc/uptime", encoding="ascii") as file:
            now = float(file.read().split()[0])
        processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except (OSError, ValueError):
        return
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                # the name before may hold anything
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == parent:
            yield process, int(fields[2]), now - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def descendants(parent: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have."""
    for process, _, _ in children(parent):
        yield process
        yield from descendants(process)


def command_of(process: int) -> str:
    """How it was started, its arguments separated by blanks; empty if it has ended."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "surrogateescape")
    except OSError:
        return ""


# ---- a worker ----


class JsonChild:
    """A Python script with only the standard library that answers each line of JSON with one. It
    is killed where it does not answer in time, or the request is interrupted.

    Attributes:
        alive: whether it can be asked.
        end: of one that was not stopped here, its exit status (below 0: the signal), and what it
            wrote to standard error.
    """

    def __init__(self, script: Path, *arguments: str, hears: bool = True) -> None:
        """``hears``: keep its standard error, which must fit into a pipe."""
        self.alive = True
        self.end: tuple[int, str] = (0, "")
        self._process = start(
            [sys.executable, "-I", "-S", str(script), *arguments],
            stdin=PIPE,
            stderr=PIPE if hears else DEVNULL,
        )

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """Its answer. Raises ``TimeoutError`` after ``limit`` seconds (0: never),
        ``BrokenPipeError`` if it has ended."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                line = _read_line(process.stdout, limit)
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(_LAST_SECONDS)
                    errors = process.stderr.read() if process.stderr else b""
                    self.end = status, errors.decode(errors="replace")
                raise BrokenPipeError
        except BaseException:  # an interrupt, too: this answer would be taken for the next one's
            self.stop()
            raise
        answer: dict[str, Any] = json.loads(line)
        return answer

    def said(self) -> str:
        """What it has written to standard error since the last request; waits for nothing."""
        stream, said = self._process.stderr, b""
        while stream and _is_ready(stream, 0) and (piece := os.read(stream.fileno(), 1 << 16)):
            said += piece
        return said.decode(errors="replace")

    def stop(self) -> None:
        """End it."""
        self.alive = False
        self._process.kill()
        self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Close the pipes: all that a forked child has of it."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()


def _is_ready(stream: IO[bytes], seconds: float) -> bool:
    """Whether a pipe can be read, or has ended. By poll: select takes 1024 files only."""
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def _read_line(stream: IO[bytes], limit: float) -> bytes:
    """A line of a pipe that nothing else reads; raises ``TimeoutError``."""
    deadline, line = time.monotonic() + limit if limit else float("inf"), b""
    while not line.endswith(b"\n"):
        left = max(0.0, min(_ATTENTIVE_SECONDS, deadline - time.monotonic()))
        if _is_ready(stream, left):
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                return b""
            line += piece
        elif time.monotonic() >= deadline:
            raise TimeoutError
    return line
