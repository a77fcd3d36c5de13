"""The options, and the order of the steps: run as `python scripts/setup`, by the shell scripts
beside it."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[2])
sys.path.insert(1, f"{sys.path[0]}/tools")
if __name__ == "__main__":  # the package's name, whatever the folder was run as
    __package__ = "scripts.setup"
# A torch is looked at, not imported: where this Python has one, that takes seconds.
sys.modules["torch"] = None  # type: ignore[assignment]

from flexops import targets  # noqa: E402
from flexops.targets import text  # noqa: E402

from . import activation, environment, indexes, state, terminal  # noqa: E402
from .environment import Installer, install_packages, package_manager, program  # noqa: E402
from .plan import Options, Plan, gpu_names, look_around  # noqa: E402
from .state import COMMAND, ROOT, STATE  # noqa: E402
from .terminal import Failure, ask, note, on_terminal, run, say, step, warn  # noqa: E402

AGAIN = "then run the same command again"
TOOLKITS = ("auto", "index", "system")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}\n  fix: {COMMAND} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=COMMAND,
        allow_abbrev=False,
        description="Makes a development environment for one target, compiles the operators for"
        " it, checks them, and writes .flexops/env.sh to source. It prints what it will do before"
        " it does it, and asks on a terminal. Running it again changes nothing and is quick.",
        epilog="What it makes: the environment; .flexops/ (env.sh, caches, links, uv where none is"
        " on PATH); flexops/_aot/ (the compiled operators); flexops_torch.egg-info/,"
        " tools/flexops_tools.egg-info/.",
    )
    limits: dict[str, dict[str, Any]] = {
        "--toolkit": {"choices": TOOLKITS},
        "--jobs": {"type": _jobs},
    }
    for name, metavar, default, described in _VALUES:
        more = limits.get(name, {})
        parser.add_argument(name, metavar=metavar, default=default, help=described, **more)
    for name, described in _SWITCHES.items():
        parser.add_argument(*name.split(), action="store_true", help=described)
    return parser


_VALUES: tuple[tuple[str, str, object, str], ...] = (
    (
        "--target",
        "ID",
        "",
        "a row of the matrix (see --list-targets); default: the best one for this machine. It need"
        " not be this machine's GPU.",
    ),
    (
        "--prefix",
        "DIR",
        "",
        "where the environment is made; default .venv in this checkout",
    ),
    (
        "--python",
        "PATH",
        "",
        "the Python to make it with; default: one that the target's torch has wheels for",
    ),
    (
        "--toolkit",
        "WHERE",
        "auto",
        "auto (default: the machine's nvcc if it matches, else the package index's), index or"
        " system",
    ),
    ("--index-url", "URL", "", "the package index; default: what pip is configured to use"),
    ("--jobs", "N", 0, "MAX_JOBS; default: from processors and memory"),
)
"""Options with a value: name, metavar, default, help."""
_SWITCHES = {
    "--conda": "create it from envs/<target>.yml with mamba, conda, micromamba or pixi; default:"
    " with uv, which is installed if it is missing, or pip",
    "--no-lock": "install by version, not by the hashes in envs/requirements/<toolkit>.lock (for a"
    " mirror with wheels of its own)",
    "--yes -y": "ask nothing, agree to everything, installing ccache with root rights too",
    "--no-root": "never use root rights",
    "--dry-run": "print what would be done, and do nothing",
    "--print-env": "print what .flexops/env.sh holds, for eval; do nothing",
    "--list-targets": "print the targets",
    "--uninstall": "remove what this script made, and only that",
    "--tests": argparse.SUPPRESS,  # scripts/run_tests.sh
    "--system-tools": argparse.SUPPRESS,  # the same
}


def _jobs(value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]*", value):
        raise argparse.ArgumentTypeError(f"takes a whole number, not {value}")
    return int(value)


def main() -> None:
    asked = _parser().parse_args()
    names = Options.__dataclass_fields__
    options = Options(**{name: value for name, value in vars(asked).items() if name in names})
    options.prefix = Path(os.path.abspath(asked.prefix)) if asked.prefix else ROOT / ".venv"
    os.chdir(ROOT)
    if asked.list_targets:
        say(text.listing(targets.load()))
    elif asked.uninstall:
        state.uninstall(yes=options.yes, dry_run=options.dry_run)
    elif asked.print_env:
        say(activation.text_for(look_around(options)).rstrip("\n"))
    elif options.tests:
        _test_environment(look_around(options))
        if asked.system_tools:
            _test_tools()
    else:
        _setup(options)


def _setup(options: Options) -> None:
    started = time.monotonic()
    plan = look_around(options)
    plan.describe()
    if options.dry_run:
        say("\n--dry-run: nothing was done")
        return
    silent = options.yes or plan.verb == "keep" or not on_terminal()
    if not silent and not ask("\nGo ahead?", default=True):
        say("nothing was done")
        return
    state.lock()
    _install_all(plan)
    step("compiler cache", "--no-root goes on without it", lambda: _install_launcher(plan))
    step("write .flexops/env.sh", f"make {STATE} writable; {AGAIN}", lambda: activation.write(plan))
    debug = "the message above names the cause; FLEXOPS_LOG=debug shows every command"
    step("compile the operators ahead of time", f"{debug}; {AGAIN}", lambda: _build(plan))
    date = state.read(STATE / "checked.date").strip()
    if state.read(STATE / "checked").strip() == _checked_digest(plan):
        say()
        note(f"checked on {date}, and nothing has changed since; to check again: flexops doctor")
    else:
        source = "source .flexops/env.sh"
        row = [] if plan.toolkit == "missing" else ["--target", plan.target.id]
        each = f"each finding marked fail names its fix; {source} && flexops doctor"
        step("check (flexops doctor)", each, lambda: _in_environment("flexops", "doctor", *row))
        demo = ("python", "examples/demo.py")
        step("demonstration", f"{source} && {' '.join(demo)}", lambda: _in_environment(*demo))
        state.replace(STATE / "checked", _checked_digest(plan) + "\n")
        state.replace(STATE / "checked.date", time.strftime("%Y-%m-%d %H:%M\n"))
    _summary(plan, time.monotonic() - started)


def _test_environment(plan: Plan) -> None:
    if plan.verb == "keep":
        say(f"test environment: {plan.environment.prefix}, {plan.target.id}, up to date")
        return
    state.lock()
    _install_all(plan)


def _install_all(plan: Plan) -> None:
    """The environment, and everything in it. Until all of it is there, it is listed as unfinished,
    and the next run makes it anew: uv's cache holds what was fetched."""
    env = plan.environment
    if plan.verb == "keep":
        note(f"kept: {env.prefix}")
        return
    if plan.verb == "bring up to date":
        state.unfinished(env.prefix, True)
    else:
        step(
            f"make the environment {env.prefix}",
            f"see the message above; {AGAIN}",
            lambda: environment.make(env, plan.python, plan.kind),
        )
    install = Installer(env, plan.options.index_url)
    network = (
        f"check the network and `{env.python} -m pip config list`; behind a mirror: --index-url URL"
        " (and --no-lock if hashes do not match); out of space: TMPDIR=<a roomy directory>"
    )
    step("install the pinned packages", f"{network}; {AGAIN}", lambda: _install_pins(plan, install))
    see = f"see the message above; {AGAIN}"
    step("install flexops", see, lambda: _install_flexops(plan, install))
    env.mark(plan.kind, plan.digest)
    state.unfinished(env.prefix, False)


def _install_pins(plan: Plan, install: Installer) -> None:
    env, target = plan.environment, plan.target
    needed = 3 if target.accelerator == "cpu" else 10
    free = shutil.disk_usage(env.prefix).free // 2**30
    if free < needed:
        warn(f"{free} GiB are free at {env.prefix}; this target takes up to {needed} GiB")
    note(plan.lock_reason)
    if plan.lock:
        lock = STATE / "requirements.lock"
        state.replace(lock, plan.lock)
        install("--require-hashes", "--only-binary", ":all:", "--requirement", str(lock))
    else:
        # torch works without numpy, but warns; setuptools builds flexops
        _install_by_version(plan, install, [*plan.pins, "numpy", "setuptools>=77"])
    if plan.options.tests:
        install("--requirement", str(_test_requirements(plan)))


def _install_by_version(plan: Plan, install: Installer, pins: list[str]) -> None:
    target, index = plan.target, plan.target.index
    if index and indexes.answering([index])[0]:
        try:
            install(*pins, "--extra-index-url", index)
            return
        except subprocess.CalledProcessError as error:
            if target.index_required or error.returncode < 0:
                raise
            note(f"that did not work with {index}; trying without it")
    elif index and target.index_required:
        raise Failure(
            f"{index} does not answer, and only it has the wheels of {target.id}",
            f"check the network or the proxy settings, {AGAIN}",
        )
    elif index:
        note(f"{index} does not answer; going on with the default index")
    install(*pins)


def _test_requirements(plan: Plan) -> Path:
    """What the tests need. What a CUDA torch has brought of NVIDIA's stays: another NVRTC under the
    same name would no longer be that torch's own."""
    own = set(plan.environment.distributions()) if plan.target.accelerator == "cuda" else set()
    lines = state.read(ROOT / "tests/requirements.txt").splitlines()
    kept = [
        one for one in lines if not one.startswith("nvidia-") or one.partition("==")[0] not in own
    ]
    file = STATE / "tests-requirements.txt"  # beside tests/, which it names a neighbour from
    state.replace(file, "\n".join(kept) + "\n")
    return file


def _install_flexops(plan: Plan, install: Installer) -> None:
    env = plan.environment
    environment.refuse_namesake(env)
    for egg in (ROOT / "flexops_torch.egg-info", ROOT / "tools" / "flexops_tools.egg-info"):
        if not egg.exists() and not plan.options.tests:
            state.made(egg)
    locked = (
        ["--no-deps"] if plan.lock and not plan.options.tests else []
    )  # they are there, by hash
    editable = [word for one in environment.CHECKOUTS for word in ("--editable", str(one))]
    os.environ.pop("FLEXOPS_AOT", None)
    install("--no-build-isolation", *locked, *editable)
    if not env.holds(plan.pins):
        what = "the installation ended well, but the environment does not hold what was asked for"
        raise Failure(what, f"rm -rf {env.prefix}, {AGAIN}")


def _install_launcher(plan: Plan) -> None:
    consent = plan.options.yes
    if plan.launcher_from == "root" and not consent and on_terminal():
        question = f"  Install ccache with {package_manager()}, using root rights?"
        consent = ask(question, default=False)
    if plan.launcher_from == "found":
        note(f"there: {plan.launcher}")
    elif plan.launcher_from == "root" and consent:
        try:
            install_packages("ccache")
            state.replace(STATE / "packages", "ccache\n")
        except subprocess.CalledProcessError:
            warn("ccache could not be installed; going on without it")
        plan.launcher = program("ccache")
    else:
        asked = "(--no-root) " if plan.options.no_root else ""
        note(f"none; with one, recompiling is quicker: {asked}install ccache, then run this again")


def _in_environment(*command: str) -> None:
    """As a shell that has sourced .flexops/env.sh."""
    run(program("bash") or "sh", "-c", '. "$0"; exec "$@"', str(activation.FILE), *command)


def _build(plan: Plan) -> None:
    what = ["--target", plan.target.id]
    if plan.toolkit == "missing":
        warn(f"no GPU operators for {plan.target.id}: {plan.where_toolkit}")
        what = ["--device", "cpu"]
    place = ROOT / "flexops/_aot"
    if not place.exists():
        state.made(place)
    _in_environment("flexops", "build", *what, "--out", str(place))


def _checked_digest(plan: Plan) -> str:
    """Of all that a check depends on: the environment, this machine, the sources, the compiled
    operators."""
    digest = hashlib.sha256()
    tools, driver = plan.tools, plan.hardware.driver
    facts = (plan.digest, plan.toolkit, gpu_names(plan.hardware), driver and driver.release)
    compiler = str(tools.host.version) if tools.host else ""
    digest.update(repr((*map(str, facts), compiler)).encode())
    digest.update(activation.POSIX_FILE.read_bytes())
    files = sorted(
        file
        for place in ("flexops", "csrc")
        for file in (ROOT / place).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )
    for file in files:
        digest.update(f"{file.relative_to(ROOT)} ".encode() + file.read_bytes())
    return digest.hexdigest()


def _summary(plan: Plan, seconds: float) -> None:
    prefix = plan.environment.prefix
    say(f"\n{terminal.BOLD}Done{terminal.PLAIN} in {seconds:.0f} s: {plan.target.id} in {prefix}")
    if plan.toolkit == "missing":
        warn(f"GPU operators run as plain PyTorch until there is a toolkit: {plan.where_toolkit}")
    shell = Path(os.environ.get("SHELL", "")).name
    if shell in ("fish", "csh", "tcsh", "nu", "xonsh", "elvish"):
        use = f"from {shell}, which cannot source .flexops/env.sh; exit takes it back"
        say(f"  {activation.within(shell)}\n      use it {use}")
    else:
        say(
            "  source .flexops/env.sh      use it, in this and every new shell; flexops_env_undo"
            " takes it back"
        )
    say("  flexops doctor              check again at any time")
    say("  bash scripts/run_tests.sh   the tests")


def _test_tools() -> None:
    """Some tests need programs of the system's. Only root installs them unasked, in a container as
    a rule; elsewhere those tests are skipped, and the end of the run prints why."""
    manager = package_manager()
    if os.geteuid() != 0 or not manager:
        return
    ssh = {"apt-get": "openssh-client", "pacman": "openssh"}.get(manager, "openssh-clients")
    needed = {"strace": "strace", "zsh": "zsh", "fish": "fish", "ssh-keygen": ssh}
    needed["sccache" if program("sccache") else "ccache"] = "ccache"
    if manager == "apt-get":
        needed["hipcc"] = "hipcc libamdhip64-dev rocm-device-libs"  # has other names elsewhere
    for names in [package for name, package in needed.items() if not program(name)]:
        say(f"\ninstall {names}")
        try:
            install_packages(*names.split())
        except subprocess.CalledProcessError:
            warn(f"could not be installed: {names}")


if __name__ == "__main__":
    sys.exit(terminal.guarded(main))
