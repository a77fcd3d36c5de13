"""A child process that answers each line of JSON with one: a crash, a hang or a lack of memory is
then its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from .. import _fork

_LAST_SECONDS = 5.0


class JsonChild:
    """A Python script, run with nothing but the standard library. It is killed where it does not
    answer, or who asks is interrupted.

    Attributes:
        alive: whether it can be asked.
        end: of one that ended by itself, its exit status (or less than 0: by which signal), and
            what it said on standard error.
    """

    def __init__(self, script: Path, *arguments: str, hears: bool = True) -> None:
        """``hears``: keep what it says on standard error, of which it must not say much."""
        self.alive = True
        self.end: tuple[int, str] = (0, "")
        errors = subprocess.PIPE if hears else subprocess.DEVNULL
        command = [sys.executable, "-I", "-S", str(script), *arguments]
        with _fork.postponed():  # a child would hold the pipes open that Popen waits for
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def ask(self, asked: dict[str, Any], limit: float) -> dict[str, Any]:
        """Its answer. Raises ``TimeoutError`` after ``limit`` seconds (0: never),
        ``BrokenPipeError`` if it has ended."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
                line = _read_line(process.stdout, limit)
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.end = (
                        process.wait(_LAST_SECONDS),
                        process.stderr.read().decode(errors="replace") if process.stderr else "",
                    )
                raise BrokenPipeError
        except (
            BaseException
        ):  # an interrupt, too: the answer to this would be taken for the next one's
            self.stop()
            raise
        answer: dict[str, Any] = json.loads(line)
        return answer

    def said(self) -> str:
        """What it has said on standard error since this was asked last; waits for nothing."""
        stream, said = self._process.stderr, b""
        while (
            stream
            and select.select([stream], [], [], 0)[0]
            and (piece := os.read(stream.fileno(), 1 << 16))
        ):
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


def _read_line(stream: IO[bytes], limit: float) -> bytes:
    """A line of a pipe that nothing else reads; raises ``TimeoutError``."""
    deadline, line = time.monotonic() + limit if limit else None, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select(
            [stream],
            [],
            [],
            0.2 if deadline is None else max(0.0, min(0.2, deadline - time.monotonic())),
        )
        if ready:
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                return b""
            line += piece
        elif deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError
    return line
