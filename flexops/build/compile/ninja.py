"""Runs build plans with ninja, in a directory of their own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import trust
from ...errors import ToolchainError
from ...toolchain import proc
from ..plan.plan import BuildPlan, Step
from ..plan.shared_headers import share

Progress = Callable[[int, int, str], None]
"""Called with (steps finished, steps in all, what is being made)."""

# nvcc's front ends (cudafe++, cicc) fill two gigabytes each when a source includes torch: a seventh
# of their processor time less (docs/benchmarks).
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_STATUS = "@flexops %f %t "
_STATUS_LINE = re.compile(r"^@flexops (\d+) (\d+) (.*)$")
_STOPPED = re.compile(
    r"^ninja: build stopped: (?:subcommands? failed|cannot make progress)", re.MULTILINE
)
TIMED_OUT = "flexops: stopped, because it took longer than"
KILLED = "flexops: ninja was ended by"


@dataclass(frozen=True)
class Outcome:
    """How a run of ninja ended: its exit status and everything that the compilers said."""

    returncode: int
    output: str

    @property
    def complete(self) -> bool:
        """Whether ninja came to its own end, so that it has named every step that failed. One that
        was killed or interrupted has not."""
        return self.returncode == 0 or (
            self.returncode > 0 and _STOPPED.search(self.output) is not None
        )

    def failed(self, plan: BuildPlan, output: str = "") -> bool:
        """Whether one of the plan's own steps failed, or the one that makes ``output``: a linker
        that was killed leaves half a library behind."""
        if not self.complete:
            return True
        path = re.escape(f"{plan.name}/{output}")
        return (
            self.returncode != 0
            and re.search(rf"^FAILED: .*(?<![\w.-]){path}", self.output, re.MULTILINE) is not None
        )


def run(
    plans: Sequence[BuildPlan],
    directory: Path,
    *,
    progress: Progress | None = None,
    debug: bool = False,
) -> Outcome:
    """Build every plan in ``directory/<plan name>/``, all in one ninja run so that their steps
    share the processors.

    A plan that fails does not stop the others (``-k 0``): look at which libraries exist. What a
    failed step left is removed, and everything if ninja itself was ended, because then it is not
    known
    what was being written. Everything said is in each one's ``build.log``. The process that runs
    ninja may be interrupted at any moment: the compilers are stopped with it.
    """
    together = share(plans)
    outcome = _build(together, directory, progress, debug)
    # it may be the shared headers' fault: the rest is made without them
    if len(together) > len(plans) and outcome.returncode and outcome.complete:
        outcome = _build(plans, directory, progress, debug)
    for plan in plans:
        (directory / plan.name / "build.ninja").write_text(render_ninja([plan]), encoding="utf-8")
        (directory / plan.name / "build.log").write_text(outcome.output, encoding="utf-8")
    return outcome


def _build(
    plans: Sequence[BuildPlan], directory: Path, progress: Progress | None, debug: bool
) -> Outcome:
    for plan in plans:
        (directory / plan.name).mkdir(parents=True, exist_ok=True)
        for name, text in plan.texts:
            (directory / plan.name / name).write_text(text, encoding="utf-8")
    there = frozenset(
        f"{plan.name}/{step.output}"
        for plan in plans
        for step in plan.steps
        if (directory / plan.name / step.output).exists()
    )
    (directory / "build.ninja").write_text(
        render_ninja(plans, subdirectories=True, there=there), encoding="utf-8"
    )
    # each is what the memory allows for that plan's largest step
    jobs = min(plan.jobs for plan in plans)
    command = [
        plans[0].ninja,
        "-C",
        str(directory),
        "-j",
        str(jobs),
        "-k",
        "0",
        *(["-v"] if debug else []),
    ]
    environment = dict(plans[0].environment)
    if any(step.kind == "device" for plan in plans for step in plan.steps):
        environment["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", _HUGE_PAGES)
    # In TMPDIR other users might swap files, and hipcc's clang leaves a folder for each source.
    if "ROCM_PATH" in environment or trust.path_problem(tempfile.gettempdir(), passage=True):
        environment["TMPDIR"] = str(directory)
    outcome = _run_ninja(command, environment, progress, _Watch(plans))
    for plan in plans if outcome.returncode else ():
        for step in plan.steps:
            if outcome.failed(plan, step.output):
                (directory / plan.name / step.output).unlink(missing_ok=True)
    return outcome


def render_ninja(
    plans: Sequence[BuildPlan], *, subdirectories: bool = False, there: frozenset[str] = frozenset()
) -> str:
    """A ninja file for the plans, each in a directory of its name if there are several, less the
    outputs that are ``there`` already.

    A build starts in an empty directory (but for objects kept from earlier), so ninja is given no
    depfiles: those that the compilers write serve the cache key.
    """
    lines = [
        "ninja_required_version = 1.5",
        "# Written by flexops. `ninja -v` in this directory repeats the build by hand.",
    ]
    # Ninja starts what is ready in this order: GPU sources take longest, and one that is left for
    # the end keeps a single processor busy.
    steps = [(plan, number, step) for plan in plans for number, step in enumerate(plan.steps)]
    alike: dict[tuple[tuple[str, ...], ...], str] = {}
    for plan, number, step in sorted(steps, key=lambda item: item[2].kind != "device"):
        folder = f"{plan.name}/" if subdirectories else ""
        if folder + step.output in there:
            continue
        rule = re.sub(r"\W", "_", f"{plan.name}_{number}")
        inputs = [name if os.path.isabs(name) else folder + name for name in step.inputs]
        command = full_command(plan, step)
        if same := plan.alike(step):
            first = alike.setdefault(same, folder + step.output)
            if first != folder + step.output:
                command = (
                    "cp",
                    f"../{first}",
                    *([f"../{first}.d"] if step.kind == "host" else ()),
                    ".",
                )
                inputs = [first]
        enter = f"cd {shlex.quote(plan.name)} && " if subdirectories else ""
        lines += [
            f"rule {rule}",
            f"  command = {(enter + shlex.join(command)).replace('$', '$$')}",
            f"  description = {plan.name}: {step.output}",
            f"build {_path(folder + step.output)}: {rule} {' '.join(map(_path, inputs))}",
        ]
    return "\n".join([*lines, ""])


def full_command(plan: BuildPlan, step: Step) -> tuple[str, ...]:
    """A step's argv with what does not enter the key: launcher, dependency file and parallelism."""
    if step.kind in ("link", "hipify"):
        return step.command
    launcher = (plan.launcher,) if plan.launcher and step.launched else ()
    threads = (
        (f"--threads={plan.nvcc_threads}",)
        if step.kind == "device" and plan.nvcc_threads > 1
        else ()
    )
    return (*launcher, *step.command, *step.speed, *threads, "-MD", "-MF", f"{step.output}.d")


def depfiles(plan: BuildPlan, directory: Path) -> list[Path]:
    """The dependency files that a finished build of the plan left in its directory."""
    return [directory / f"{step.output}.d" for step in plan.steps if step.kind != "link"]


class _Watch:
    """Stops the steps of a ninja that take longer than their plans allow. Before the first of them
    can, it does nothing."""

    def __init__(self, plans: Sequence[BuildPlan]) -> None:
        self._limit = max(plan.timeout for plan in plans)
        self._steps = [(plan, step) for plan in plans for step in plan.steps]
        self._next = time.monotonic() + self._limit
        self.stopped: dict[str, str] = {}
        """What was stopped: output, and the line that says so."""

    def look(self, ninja: int) -> None:
        if self._limit == 0 or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1
        for child, group, seconds in list(proc.children(ninja)):
            # A step has a group of its own, with all that it starts.
            if seconds > self._limit and group == child and child not in (ninja, os.getpgrp()):
                self._note(proc.command_of(child))
                proc.kill_all(child)

    def _note(self, command: str) -> None:
        for plan, step in self._steps:
            if any(
                text in command
                for text in (
                    shlex.join(full_command(plan, step)),
                    " ".join(full_command(plan, step)),
                )
            ):
                made = f"the link of {step.output}" if step.kind == "link" else step.output
                source = next((name for name in step.inputs if not name.endswith(".o")), made)
                self.stopped[f"{plan.name}/{step.output}"] = (
                    f"{TIMED_OUT} {self._limit} s (FLEXOPS_COMPILE_TIMEOUT): {source}\n"
                )


def _run_ninja(
    command: list[str], environment: Mapping[str, str], progress: Progress | None, watch: _Watch
) -> Outcome:
    # The launcher must not let the private directory's name into its hash; the compilers' messages
    # must be in one language to be understood.
    environ = {
        **os.environ,
        "CCACHE_NOHASHDIR": "1",
        "LC_ALL": "C",
        **environment,
        "NINJA_STATUS": _STATUS,
    }
    try:
        process = proc.start(command, environment=environ)
    except OSError as error:
        raise ToolchainError(
            "ninja cannot be started",
            found=f"{command[0]}: {error.strerror}",
            fix="pip install ninja",
        ) from error
    said: list[str] = []
    try:
        for line in proc.lines(process, watch.look):
            if match := _STATUS_LINE.match(line):
                if progress:
                    progress(int(match[1]), int(match[2]), match[3])
                line = f"[{match[1]}/{match[2]}] {match[3]}\n"
            said.append(line)
            if line.startswith("FAILED: "):
                said += [note for output, note in watch.stopped.items() if output in line.split()]
        if (status := process.wait()) < 0:
            said.append(f"{KILLED} {proc.signal_name(-status)}\n")
        elif any(line.startswith("ninja: build stopped: interrupted") for line in said):
            said.append(f"{KILLED} a signal\n")
        return Outcome(status, "".join(said))
    finally:
        # interrupted: ninja stops its compilers when it is terminated
        proc.stop(process, signal.SIGTERM, signal.SIGKILL)
        if process.stdout:
            process.stdout.close()


def _path(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
