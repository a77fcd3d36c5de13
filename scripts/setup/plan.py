"""Looks at the machine and decides what will be done. Changes nothing."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flexops import settings, targets
from flexops.errors import FlexopsError
from flexops.targets import Target
from flexops.toolchain import gpus, resources
from flexops.toolchain.discovery import assemble, search_context
from flexops.toolchain.model import Toolchain, TorchBuild
from flexops_tools.targets import requirements

from . import environment as environments
from .environment import Environment, package_manager, program
from .indexes import without_credentials
from .state import COMMAND, MARKER, ROOT, STATE, is_unfinished, read
from .terminal import Failure, Step, fact, heading, note

GIB = 2**30
LEAST_PYTHON = "3.10"
TEST_REQUIREMENTS = ("tests/requirements.txt", "docs/requirements.txt")
_PROBE = """import sys
from importlib.util import find_spec as found
print("%d.%d" % sys.version_info[:2], bool(found("pip") or found("ensurepip") and found("venv")))"""


@dataclass
class Options:
    """What the command line says."""

    target: str = ""
    prefix: Path = ROOT / ".venv"
    conda: bool = False
    python: str = ""
    toolkit: str = "auto"
    index_url: str = ""
    no_lock: bool = False
    jobs: int = 0
    yes: bool = False
    no_root: bool = False
    dry_run: bool = False
    tests: bool = False


@dataclass
class Plan:
    """Every decision.

    Attributes:
        toolkit: where the compiler for GPUs comes from: none, found, index, conda, nvrtc (of torch)
            or missing. For CUDA one is for people's own .cu sources: flexops' kernels are compiled
            by torch's NVRTC.
        pins: what is installed by version, or as `lock` says, by hash.
        launcher_from: found, root (is available with root rights) or none.
        verb: what happens to the environment: make, make anew, bring up to date, or keep.
    """

    options: Options
    target: Target
    reason: str
    notes: tuple[str, ...]
    tools: Toolchain
    hardware: gpus.Machine
    resources: resources.Resources
    environment: Environment
    toolkit: str = "none"
    toolkit_root: str = ""
    pins: list[str] = field(default_factory=list)
    python: str = ""
    python_version: str = ""
    launcher: str = ""
    launcher_from: str = "none"
    jobs: int = 1
    lock: str = ""
    lock_reason: str = ""
    kind: str = ""
    digest: str = ""
    verb: str = "make"
    verb_reason: str = ""

    @property
    def host(self) -> str:
        return str(self.tools.host.path) if self.tools.host else ""

    @property
    def torch_wraps_compilers(self) -> bool:
        """torch from 2.13 puts ccache before the compilers itself."""
        return tuple(map(int, self.target.torch.split(".")[:2])) >= (2, 13)

    @property
    def compiler_fix(self) -> str:
        """How to get the C++ compiler that is missing; empty if one is found."""
        if self.tools.host or self.options.conda:
            return ""
        least, newest = self.target.host_compiler
        versions = f", at least {least}" * bool(least) + f" and at most {newest}" * bool(newest)
        return f"apt-get install g++ (or: dnf install gcc-c++){versions}; or --conda, with its own"

    @property
    def where_toolkit(self) -> str:
        """Where a toolkit is that neither the machine nor the package index has."""
        minor = self.target.toolkit_minor
        if self.target.accelerator == "rocm":
            return (
                f"ROCm {minor} comes with its own installer, or work in the image"
                f" {self.target.build_base}"
            )
        return (
            f"an nvcc {minor} comes from conda: run this with --conda, or: conda install -c"
            f" conda-forge cuda-nvcc={minor}"
        )

    def describe(self) -> None:
        """The machine, the target, and what will be done."""
        _describe_machine(self)
        heading("Target")
        fact(self.target.id, self.reason)
        note("\n".join(self.notes))
        heading("What will be done")
        if self.compiler_fix:
            fact("C++ compiler", f"missing; install one first: {self.compiler_fix}")
        prefix = self.environment.prefix
        if self.verb == "keep":
            fact("environment", f"{prefix} is as it should be: kept")
        else:
            made = f"{self.environment.conda}, envs/{self.target.id}.yml, "
            how = f"({made * self.options.conda}Python {self.python_version})"
            reason = f": {self.verb_reason}" if self.verb_reason else ""
            fact("environment", f"{self.verb} {prefix} {how}{reason}")
            index = f", from {without_credentials(self.options.index_url)}" * bool(
                self.options.index_url
            )
            fact("install", f"{' '.join(self.pins)}, flexops (editable) and its needs{index}")
            fact("", self.lock_reason)
            _describe_toolkit(self)
        if self.launcher_from == "root":
            asked = "" if self.options.yes else " (you are asked first)"
            manager = package_manager()
            fact("compiler cache", f"install ccache with {manager}, with root rights{asked}")
        elif self.launcher:
            fact("compiler cache", f"use {self.launcher}")
        else:
            fact("compiler cache", "none; everything works without, recompiling takes longer")
        fact("settings", f"write {STATE}/env.sh, to source; caches in {STATE}/cache")
        fact("operators", f"compile {_operators(self)} into flexops/_aot")
        fact("check", "flexops doctor, then a demonstration, unless nothing has changed")


def look_around(options: Options) -> Plan:
    """Everything that decides what will be done."""
    leave_own_environment(options.prefix)
    environment = Environment(options.prefix, environments.choose_conda() if options.conda else "")
    Step.name, Step.fix = "pick the target", f"{COMMAND} --list-targets"
    target, reason, notes = _target(options, environment)
    Step.name, Step.fix = "look for compilers and toolkits", "set what the message above names"
    plan = Plan(
        options,
        target,
        reason,
        notes,
        _tools(target),
        gpus.machine(),
        resources.detect(),
        environment,
    )
    if plan.compiler_fix and not options.dry_run:
        rejected = "".join(f"; {one.path}: {one.reason}" for one in plan.tools.rejected)
        raise Failure(
            f"no C++ compiler that this target can use was found{rejected}", plan.compiler_fix
        )
    Step.name = "find a Python"
    _choose_toolkit(plan)
    _choose_python(plan)
    _choose_launcher(plan)
    _choose_jobs(plan)
    _choose_lock(plan)
    _judge(plan)
    Step.name = Step.fix = ""
    return plan


def leave_own_environment(prefix: Path) -> None:
    """A shell that has sourced .flexops/env.sh gets the same answers as one that has not."""
    entries = os.environ.get("PATH", os.defpath).split(":")
    own = (f"{STATE}/", f"{prefix}/")
    os.environ["PATH"] = ":".join(entry for entry in entries if not entry.startswith(own))
    file = os.environ.pop("FLEXOPS_ENV_FILE", "")
    for line in read(Path(file)).splitlines() if file else ():
        if line.startswith(("_flexops_set ", "_flexops_default ")):
            _, name, value = shlex.split(line)[:3]
            if name != "PATH" and os.environ.get(name) == value:
                del os.environ[name]


def _target(options: Options, environment: Environment) -> tuple[Target, str, tuple[str, ...]]:
    matrix = targets.load()
    before = environment.marker("kind").partition(",")[0]
    name, reason = options.target or before, "as --target says"
    if not name:
        # one whose torch has wheels for the Python at hand; conda brings any
        version = None
        if options.conda:
            version = ""
        elif options.python and (probed := _probe(options.python)):
            version = probed[0]
        found = targets.detect(matrix, python=version)
        return found.target, found.reason, found.notes
    if not options.target:
        reason = f"what {environment.prefix} was made for; --target makes another"
    try:
        return matrix.find(name), reason, ()
    except FlexopsError as error:
        known = ", ".join(matrix.ids)
        raise Failure(f"there is no target called {name}; known: {known}", Step.fix) from error


def _tools(target: Target) -> Toolchain:
    """The compilers that a torch of that target, still to be installed, would be used with."""
    minor = target.toolkit_minor
    cuda = minor if target.accelerator == "cuda" else None
    hip = minor if target.accelerator == "rocm" else None
    torch = TorchBuild(target.torch, cuda, hip, "", True, Path("torch"))
    return assemble(search_context(settings.current()), torch, device="cuda")


def _choose_toolkit(plan: Plan) -> None:
    target, asked = plan.target, plan.options.toolkit
    plan.pins = [pin for pin in target.requirements if pin != target.toolkit_requirement]
    pin, minor = target.toolkit_requirement, target.toolkit_minor
    if target.accelerator == "cpu":
        if plan.options.tests:  # a torch without CUDA compiles CUDA sources with any nvcc
            plan.pins.append(targets.load().find("cu130-sm90").toolkit_requirement)
        return
    found = plan.tools.cuda if target.accelerator == "cuda" else plan.tools.rocm
    fits = found and (found.version.major_minor == minor or not pin or asked == "system")
    before = pin and plan.environment.toolkit(minor.partition(".")[0])  # of an earlier run
    if plan.options.conda and target.accelerator == "cuda":
        plan.toolkit = "conda"
    elif found and fits and asked != "index" and not (asked == "auto" and before):
        plan.toolkit, plan.toolkit_root = "found", str(found.root)
    elif pin and asked != "system":
        plan.toolkit, plan.toolkit_root = "index", str(STATE / "cuda")
        plan.pins.append(pin)
    else:
        plan.toolkit = "nvrtc" if target.accelerator == "cuda" else "missing"


def _choose_python(plan: Plan) -> None:
    options, target = plan.options, plan.target
    if options.conda:
        plan.python_version = target.python
        return
    least, newest = target.python_range
    wanted = f"Python {least} to {newest}, which torch {target.torch} has wheels for"
    package = f"apt-get install python{target.python} python{target.python}-venv"
    if options.python:
        plan.python = program(options.python)
        probed = _probe(plan.python) if plan.python else None
        if not probed or not _within(probed[0], least, newest):
            what = f"Python {probed[0]}" if probed else "no working Python"
            fix = "leave --python away, or name another"
            raise Failure(f"{options.python} is {what}; required: {wanted}", fix)
        candidates = [plan.python]
    else:
        own = plan.environment
        version = (_probe(str(own.python)) or ("",))[0]
        if not is_unfinished(own.prefix) and own.marker("kind") == f"{target.id}, Python {version}":
            plan.python, plan.python_version = str(own.python), version
            return
        candidates = list(_candidates(least, newest))
    lacking = ""
    for path in candidates:
        version, able = _probe(path) or ("", False)
        if _within(version, least, newest):
            if able or environments.find_uv():
                plan.python, plan.python_version = path, version
                return
            lacking = lacking or version
    if lacking:
        what = f"Python {lacking} cannot make environments: pip, or venv and ensurepip, are missing"
        raise Failure(what, f"apt-get install python{lacking}-venv")
    raise Failure(
        f"found no {wanted}", f"{package}; or: uv python install {target.python}; or --conda"
    )


def _candidates(least: str, newest: str) -> Iterator[str]:
    """Paths to look at, best first: what people call python3, then the newest."""
    yield from filter(None, (program("python3"), program("python")))
    home = Path.home()
    pyenv = os.environ.get("PYENV_ROOT", str(home / ".pyenv"))
    for minor in range(int(newest[2:]), int(least[2:]) - 1, -1):
        name = f"python3.{minor}"
        places = (
            *("/usr/bin", "/usr/local/bin", f"{pyenv}/versions/3.{minor}.*/bin"),
            f"{home}/.local/share/uv/python/cpython-3.{minor}.*/bin",
        )
        yield from filter(None, (program(name),))
        for place in places:
            yield from glob.glob(f"{place}/{name}")


def _probe(python: str) -> tuple[str, bool] | None:
    """Its version, and whether it can make an environment; None if it does not run (a pyenv shim
    without its Python, for example)."""
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^(\d+\.\d+) (True|False)$", done.stdout, re.MULTILINE)
    return (found[1], found[2] == "True") if found else None


def _within(version: str, least: str, newest: str) -> bool:
    numbers = [tuple(map(int, one.split("."))) for one in (least, version or "0", newest)]
    return numbers == sorted(numbers)


def _choose_launcher(plan: Plan) -> None:
    if os.environ.get("FLEXOPS_COMPILER_LAUNCHER") == "none":
        return
    if plan.tools.launcher:
        plan.launcher_from, plan.launcher = "found", str(plan.tools.launcher.path)
    elif plan.options.conda:
        plan.launcher_from, plan.launcher = "found", str(plan.environment.root / "bin/ccache")
    elif not plan.options.no_root and package_manager() and (os.geteuid() == 0 or program("sudo")):
        plan.launcher_from = "root"


def _choose_jobs(plan: Plan) -> None:
    """A compile that includes torch's headers takes 2 to 3 GiB. What env.sh says already is kept:
    free memory differs from run to run."""
    cpus = plan.resources.cpus
    before = re.search(r"^_flexops_default MAX_JOBS (\d+)$", read(STATE / "env.posix.sh"), re.M)
    by_memory = max(1, min(cpus, plan.resources.memory_bytes // (3 * GIB)))
    kept = int(before[1]) if before and int(before[1]) <= cpus else 0
    plan.jobs = plan.options.jobs or kept or by_memory


def _choose_lock(plan: Plan) -> None:
    reason = ""
    if plan.options.conda:
        reason = f"conda resolves envs/{plan.target.id}.yml"
    elif plan.options.no_lock:
        reason = "--no-lock"
    else:
        try:
            plan.lock = requirements.installed(plan.target, ROOT, toolkit=plan.toolkit == "index")
        except FlexopsError as error:
            reason = error.what
    plan.lock_reason = (
        f"by version, not by hash: {reason}"
        if reason
        else "every package by its locked hash; nothing else is taken"
    )


def _judge(plan: Plan) -> None:
    """What becomes of the environment. Another target or Python means a new one, so that nothing of
    the old remains in it."""
    environment, prefix = plan.environment, plan.environment.prefix
    conda = ", conda" * plan.options.conda
    plan.kind = f"{plan.target.id}, Python {plan.python_version}{conda}"
    plan.digest = _digest(plan)
    if not prefix.exists():
        return
    kind = environment.marker("kind")
    if is_unfinished(prefix):
        plan.verb, plan.verb_reason = "make anew", "an earlier run did not get to finish it"
    elif not (prefix / MARKER).exists():
        if not prefix.is_dir() or any(prefix.iterdir()):
            what = f"{prefix} exists and was not made by this script, so it is left alone"
            raise Failure(what, "--prefix DIR, or remove it yourself")
    elif kind != plan.kind:
        plan.verb, plan.verb_reason = "make anew", f"it is of another kind ({kind or 'unknown'})"
    elif not environment.runs():
        plan.verb, plan.verb_reason = "make anew", "its Python does not run"
    else:
        major = plan.target.toolkit_minor.partition(".")[0]
        whole = environment.holds(plan.pins) and (
            plan.toolkit != "index" or environment.toolkit(major)
        )
        same = environment.marker("digest") == plan.digest
        plan.verb = "keep" if same and whole else "bring up to date"


def _digest(plan: Plan) -> str:
    files = [ROOT / "setup.py", ROOT / f"envs/{plan.target.id}.yml"]
    files += [checkout / "pyproject.toml" for checkout in environments.CHECKOUTS]
    files += [ROOT / name for name in TEST_REQUIREMENTS * plan.options.tests]
    texts = ["2", plan.kind, str(ROOT), *plan.pins, plan.lock, *map(read, files)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _describe_machine(plan: Plan) -> None:
    tools, driver = plan.tools, plan.hardware.driver
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)', read(Path("/etc/os-release")), re.M)
    system = release[1] if release else platform.system()
    cards = ", ".join(gpu_names(plan.hardware))
    heading("This machine")
    fact(
        "system",
        f"{system}, {platform.machine()}, {plan.resources.cpus} processors,"
        f" {plan.resources.memory_bytes // GIB} GiB of memory free",
    )
    known = f", driver {driver.release}" if driver else ""
    fact("GPU", f"{cards or 'none found'}{known}")
    host = f"{tools.host.path} ({tools.host.version})" if tools.host else "none that fits"
    fact("C++ compiler", host)
    if plan.target.accelerator != "cpu":
        found = tools.cuda or tools.rocm
        text = (
            f"{found.root} ({found.version.major_minor})"
            if found
            else "none that matches the target"
        )
        fact("toolkit", text)
    fact("compiler cache", str(tools.launcher.path) if tools.launcher else "none")
    fact("Python", f"{plan.python or 'from conda'} ({plan.python_version})")
    note("\n".join(f"not taken: {one.what} {one.path}: {one.reason}" for one in tools.rejected))
    note("\n".join(tools.notes))


def gpu_names(hardware: gpus.Machine) -> list[str]:
    amd = [f"AMD {name}" for name in gpus.local_gfx_targets()]
    return [f"{gpu.name} ({gpu.capability})" for gpu in hardware.gpus] + amd


def _describe_toolkit(plan: Plan) -> None:
    minor = plan.target.toolkit_minor
    texts = {
        "found": f"use {plan.toolkit_root}",
        "index": f"install nvcc {minor} from the package index, into the environment",
        "conda": f"install nvcc {minor} into the environment",
        "nvrtc": "none needed: torch's NVRTC compiles the kernels (for .cu sources of your own,"
        f" {plan.where_toolkit})",
        "missing": f"none: {plan.where_toolkit}",
    }
    if plan.toolkit in texts:
        fact("toolkit", texts[plan.toolkit])


def _operators(plan: Plan) -> str:
    if plan.toolkit == "missing":
        return "the CPU operators only (no toolkit for the GPU ones)"
    gpu = f" and those for {plan.target.arch_list}" if plan.target.arch_list else ""
    return f"the CPU operators{gpu}"
