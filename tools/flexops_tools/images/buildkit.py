"""A build by BuildKit, through the program ``docker``: the SDK has only the classic builder.

``build`` starts ``docker build``, reads its plain progress line by line, and returns what it came
to. The credentials go through the environment of that process, and nowhere else.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from .context import DOCKERFILE
from .engine import environment, no_program
from .failure import Step

KEPT_STAGE = "kept-kernels"
KEPT = f"\nFROM scratch AS {KEPT_STAGE}\nCOPY --from=kernels /opt/kernels /opt/kernels\n"
"""A stage with what was compiled, for the next build."""
SECRET = "index_credentials"
_VARIABLE = "FLEXOPS_INDEX_CREDENTIALS"
_BEGINS = re.compile(r"^#(\d+) \[(\S+) +\d+/\d+\] (.*)")
_LOADS = re.compile(r"^#(\d+) \[internal\] load metadata for (?:docker\.io/(?:library/)?)?(\S+)")
_SAYS = re.compile(r"^#(\d+) (?:\d+\.\d+ (?P<output>.*)|(?P<cached>CACHED)|ERROR:? (?P<error>.*))$")
_ENDS = re.compile(r"^(?:ERROR: )?(?:failed to solve|executor failed|process )")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NO_BUILDKIT = re.compile(r"buildx component|buildkit not supported|requires BuildKit")


@dataclass(frozen=True)
class Job:
    """What ``docker build`` is asked for: the stage ``target``, called ``tag`` if that is given."""

    args: Mapping[str, str]
    credentials: str
    network: str = ""
    no_cache: bool = False
    target: str = "runtime"
    tag: str = ""

    def command(self, root: str, image_file: str) -> list[str]:
        """The command line; the credentials are not in it."""
        options = {"--network": self.network, "--tag": self.tag}
        return [
            *("docker", "build", "--progress", "plain", "--iidfile", image_file),
            *("--file", os.path.join(root, DOCKERFILE), "--target", self.target),
            *(("--secret", f"id={SECRET},env={_VARIABLE}") if self.credentials else ()),
            *(word for name, value in options.items() if value for word in (name, value)),
            *(["--no-cache"] if self.no_cache else []),
            *(w for name, value in self.args.items() for w in ("--build-arg", f"{name}={value}")),
            root,
        ]

    def environment(self) -> dict[str, str]:
        return {**environment(), _VARIABLE: self.credentials}


@dataclass
class Done:
    """A finished build, or one in progress.

    Attributes:
        image: its id; empty if the build failed.
        step: the step that failed, or the last that began.
        error: what docker said last.
        runtime_base: the base image of the stage that runs; the other stages have another.
    """

    image: str = ""
    step: Step | None = None
    error: str = ""
    failed: bool = False
    runtime_base: str = ""
    _bases: dict[str, str] = field(default_factory=dict)
    _steps: dict[str, Step] = field(default_factory=dict)
    _cached: set[str] = field(default_factory=set)

    @property
    def steps(self) -> int:
        return len(self._steps)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def ran(self, words: str) -> bool:
        """Whether a step with these words in its instruction ran, and was not cached."""
        ran = (one for number, one in self._steps.items() if number not in self._cached)
        return any(words in one.instruction for one in ran)

    def take(self, line: str) -> str:
        """Put one line of the progress into what is known; returns what the step said, if so."""
        if begins := _BEGINS.match(line):
            number, instruction = begins[1], begins[3]
            if instruction.startswith("FROM "):
                instruction = f"{instruction} AS {begins[2]}"
            begun = self._steps.setdefault(number, Step(self.steps + 1, 0, instruction))
            if not self.error:  # what ran beside a step that failed is cancelled, and shown then
                self.step = begun
        elif base := _LOADS.match(line):
            runs = base[2] in (self.runtime_base, f"{self.runtime_base}:latest")
            stage = "installed" if runs else "toolchain"
            self._bases[base[1]] = f"FROM {base[2]} AS {stage}"
        elif says := _SAYS.match(line):
            known = self._steps.get(says[1])
            if known and says["output"] is not None:
                output = f"{known.output}{says['output']}\n"
                self._steps[says[1]] = Step(known.number, self.steps, known.instruction, output)
                return str(says["output"])
            if known and says["cached"]:
                self._cached.add(says[1])
            if says["error"] is not None and not self.error:
                self.step, self.error = known, says["error"]
                if says[1] in self._bases:
                    self.step = Step(1, self.steps, self._bases[says[1]])
        elif _ENDS.match(line) or (not self.error and "ERROR" in line):
            self.error = self.error or line
        return ""


def build(job: Job, context: str, log: IO[str], report: Callable[[Step, str], None] | None) -> Done:
    """Build the context, a folder.

    Raises:
        ImageError: there is no BuildKit.
        KeyboardInterrupt: as it came, after the build was stopped.
    """
    if not shutil.which("docker"):
        raise no_program("no docker on PATH")
    done, last = Done(runtime_base=job.args.get("RUNTIME_BASE", "")), ""
    with tempfile.TemporaryDirectory() as folder:
        image_file = Path(folder, "image")
        process = subprocess.Popen(
            job.command(context, str(image_file)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=job.environment(),
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for line in (_COLOUR.sub("", text) for text in process.stdout):
                log.write(line)
                log.flush()
                last = line.strip() or last
                said = done.take(line.rstrip("\n"))
                if done.step and report:
                    report(Step(done.step.number, done.steps, done.step.instruction), said)
            done.failed = process.wait() != 0
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        done.error = done.error or last
        if done.step:
            done.step = replace(done.step, total=done.steps)
        if done.failed and not done.steps and _NO_BUILDKIT.search(done.error):
            raise no_program(done.error)
        if not done.failed:
            done.image = image_file.read_text(encoding="utf-8").strip()
    return done
