"""What holds with the torch that is here: libraries compiled and linked against it, opened in it,
native results on the CPU, and the operators' tests.

Needs no GPU, and a build of torch for CUDA runs without one; where there is one, the kernels run on
it, too.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from flexops import toolchain
from flexops.build.compile.building import Result
from flexops.build.deliver import aot
from flexops.build.describe import catalog
from flexops.build.describe.spec import DeviceType
from flexops.compute_capability import ComputeCapability
from flexops.doctor import children, trial
from flexops.doctor.checks.build import TOLERANCE
from flexops.doctor.facts import OpTrial
from flexops.errors import ToolchainError
from flexops.settings import Settings

from ..targets import proven

_LOAD_SECONDS = 300.0
Say = Callable[[str], None]
Facts = dict[str, Any]
"""What was found, by its name, as ``flexops target prove --torch`` prints it."""


def prove(chosen: Settings, *, say: Say = lambda _: None) -> tuple[Facts, list[str]]:
    """Prove what can be of this environment's torch.

    Returns:
        What is proven, and what is wrong.

    Raises:
        ToolchainError: there is no torch here, or no compiler.
    """
    torch = toolchain.torch_build()
    if torch is None:
        raise ToolchainError(
            "this environment has no torch",
            required="an environment with a row's torch",
            fix="flexops target show ID",
        )
    say(f"torch {torch.version}: compiling and linking")
    specs = [spec for spec in catalog.select(()) if spec.project.own]
    devices: tuple[DeviceType, ...] = ("cpu", "cuda") if torch.cuda else ("cpu",)
    results = aot.build_specs(specs, devices, chosen, kernels=False)
    wrong = [
        f"{result.plan.name} does not compile: {result.error}"
        for result in results
        if result.entry is None
    ]
    say("opening")
    unopened = load(results)
    say("the operators' results")
    trials = trial.ops()
    wrong += [*unopened, *(problem for one in trials if (problem := _problem(one)))]
    here = [result.plan.device for result in results if result.entry is not None]
    facts: Facts = {
        "abi": torch.abi_id,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "compiler": _compiler(chosen),
        "compiled": {device: here.count(device) for device in dict.fromkeys(here)},
        "opened": len(here) - len(unopened),
        "right on the CPU": sum(one.device == "cpu" and not _problem(one) for one in trials),
    }
    if gpus := [one for one in trials if one.device != "cpu"]:
        facts["gpu"] = _gpu(torch.cuda or "") | {"right": sum(not _problem(one) for one in gpus)}
    return facts, wrong


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def tested(version: str, facts: Facts, tests: Mapping[str, str]) -> list[proven.Fact]:
    """What was proven of a torch of this version, for the table "tested with"."""
    found = [(proven.OPERATORS, facts["machine"], "")]
    if gpu := facts.get("gpu"):
        found.append((proven.OPERATORS, gpu["name"], ""))
    found += [(proven.TESTS, folder, outcome) for folder, outcome in tests.items()]
    toolkit, release = proven.toolkit_of_torch(version), version.partition("+")[0]
    return [proven.Fact(toolkit, release, *one, today()) for one in found]


def load(results: Sequence[Result]) -> list[str]:
    """Open each library in a process that has this torch and our operators' schemas; what is wrong
    with those that do not open."""
    libraries = {str(result.entry.library): result.plan.name for result in results if result.entry}
    child = children.run(
        ["-m", __name__, *libraries],
        timeout=_LOAD_SECONDS,
        environment={"FLEXOPS_JIT": "0", "FLEXOPS_LOG": "quiet"},
    )
    replies = {message["library"]: message["error"] for message in child.messages}
    failure = f"its process {child.failure}" if child.failure else "its process said nothing"
    return [
        f"{name} cannot be opened: {error}"
        for library, name in libraries.items()
        if (error := replies.get(library, failure))
    ]


def run_tests(arguments: str, root: Path) -> tuple[dict[str, str], list[str]]:
    """Run the tests that pytest finds for ``arguments`` (``"tests/ops -k parity"``), on the CPU
    only.

    Returns:
        The outcome by folder (``part of`` a folder if it was narrowed), and what is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="flexops-prove-") as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not gpu and not slow and not image",
            f"--junitxml={report}",
            *shlex.split(arguments),
        ]
        done = subprocess.run(command, cwd=root, check=False, stdout=sys.stderr)
        try:
            files = counted(report, root)
        except (OSError, ElementTree.ParseError):
            files = {}
    if not files:
        return {}, [f"pytest {arguments}: status {done.returncode}, and no test ran"]
    words = shlex.split(arguments)
    whole = {one.rstrip("/") for one in words if _is_there(root / one)}
    narrowed = len(whole) < len(words)
    folders: dict[str, list[Facts]] = {}
    for file, one in files.items():
        folder = file.rpartition("/")[0] or "."
        part = narrowed or not any(f"{folder}/".startswith(f"{name}/") for name in whole)
        folders.setdefault("part of " * part + folder, []).append(one)
    wrong = [f"{file}: {name} fails" for file, one in files.items() for name in one["failed"]]
    if done.returncode and not wrong:
        return {}, [f"pytest {arguments}: status {done.returncode}, so not all of its tests ran"]
    return {folder: outcome(ones) for folder, ones in folders.items()}, wrong


def outcome(files: Sequence[Facts]) -> str:
    """How many tests of these files passed, failed and were skipped, in words."""
    counts = {
        "passed": sum(one["passed"] for one in files),
        "failed": sum(len(one["failed"]) for one in files),
        "skipped": sum(sum(one["skipped"].values()) for one in files),
    }
    return ", ".join(
        f"{count} {name}" for name, count in counts.items() if count or name == "passed"
    )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for one
        return False


def counted(report: Path, root: Path) -> dict[str, Facts]:
    """Of a report in JUnit's XML, by file: how many tests passed, which failed, how many were
    skipped for which reason."""
    files: dict[str, Facts] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        depth = next(
            (
                depth
                for depth in range(len(parts), 0, -1)
                if (root / Path(*parts[:depth])).with_suffix(".py").is_file()
            ),
            len(parts),
        )
        one = files.setdefault(
            "/".join(parts[:depth]) + ".py", {"passed": 0, "failed": [], "skipped": {}}
        )
        if case.find("failure") is not None or case.find("error") is not None:
            one["failed"].append("::".join([*parts[depth:], case.get("name") or ""]))
        elif (reason := case.find("skipped")) is not None:
            one["skipped"][reason.get("message", "")] = (
                one["skipped"].get(reason.get("message", ""), 0) + 1
            )
        else:
            one["passed"] += 1
    return files


def _problem(one: OpTrial) -> str:
    """What is wrong with an operator's run; empty if its native kernels gave the reference's
    result."""
    name = f"{one.name} on {one.device}"
    if one.error:
        return f"{name}: {one.error}"
    if one.backend == "reference":
        return f"{name} is not native: {one.reason}"
    return (
        ""
        if one.max_error is not None and one.max_error <= TOLERANCE
        else f"{name} is off by {one.max_error}"
    )


def _compiler(chosen: Settings) -> str:
    host = toolchain.discover(chosen, device="cpu").host
    return f"{host.kind} {host.version}" if host else ""


def _gpu(cuda: str) -> dict[str, Any]:
    import torch

    capability = ComputeCapability(*torch.cuda.get_device_capability())
    return {"name": torch.cuda.get_device_name(), "capability": str(capability), "cuda": cuda}


def _load_in_child(libraries: Sequence[str]) -> None:
    from flexops import ops
    from flexops.build.load import loader

    assert ops  # their schemas are what the libraries' kernels are for

    for library in libraries:
        error = ""
        try:
            loader.open_library(Path(library), None)
        except (OSError, RuntimeError) as problem:
            error = " ".join(str(problem).split())[:400]
        children.say({"library": library, "error": error})


if __name__ == "__main__":
    _load_in_child(sys.argv[1:])
