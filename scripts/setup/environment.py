"""The environment: one directory, from one lock, filled by uv, or by pip where uv cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from . import indexes
from .state import MARKER, ROOT, STATE, made, read, replace, unfinished
from .terminal import Failure, note, on_terminal, run, warn

CONDA_TOOLS = ("mamba", "conda", "micromamba", "pixi")
_UV_PLACE = STATE / "uv"
_PIP = {
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}
# Some programs of a release lie in a distribution of their own, where the checkout has it.
CHECKOUTS = tuple(one for one in (ROOT, ROOT / "tools") if (one / "pyproject.toml").exists())


class Environment:
    """What is in a prefix.

    Attributes:
        prefix: its directory.
        conda: the program of conda's family that makes it; empty: uv or venv.
        root: where its bin/ is; with pixi, inside of the workspace.
    """

    def __init__(self, prefix: Path, conda: str) -> None:
        self.prefix, self.conda = prefix, conda
        self.root = prefix / ".pixi/envs/default" if conda == "pixi" else prefix
        self.python = self.root / "bin/python"

    def site(self) -> Path | None:
        return next(self.root.glob("lib/python3.*/site-packages"), None)

    def runs(self) -> bool:
        try:
            return not subprocess.run([self.python, "-c", ""], capture_output=True).returncode
        except OSError:
            return False

    def marker(self, key: str) -> str:
        lines = read(self.prefix / MARKER).splitlines()
        return next((line[len(key) + 1 :] for line in lines if line.startswith(f"{key}=")), "")

    def mark(self, kind: str, digest: str) -> None:
        replace(self.prefix / MARKER, f"kind={kind}\ndigest={digest}\n")

    def toolkit(self, major: str) -> Path | None:
        """Where the package index's CUDA toolkit is."""
        site = self.site()
        root = site / f"nvidia/cu{major}" if site else None
        return root if root and (root / "bin/nvcc").exists() else None

    def distributions(self) -> dict[str, Distribution]:
        site = self.site()
        found = distributions(path=[str(site)]) if site else ()
        return {_normal(one.metadata["Name"] or ""): one for one in found}

    def holds(self, pins: Iterable[str]) -> bool:
        """Whether the pins and this checkout, editable, are installed in it."""
        there = self.distributions()
        if not (self.root / "bin/flexops").exists() or "flexops" in there:
            return False
        for pin in pins:
            name, _, wanted = pin.partition("==")
            name = _normal(name.partition("[")[0])
            if self.conda and name == "ninja":
                continue  # conda's is no Python package
            if name not in there or _numbers(there[name].version) != _numbers(wanted):
                return False
        origins = [_origin(one) for one in there.values()]
        return all(str(checkout) in origins for checkout in CHECKOUTS)


def make(environment: Environment, python: str, kind: str) -> None:
    """Make the directory anew, of that kind: the target's name and, after a comma, the Python. It
    is listed as unfinished until everything is installed."""
    STATE.mkdir(exist_ok=True)
    unfinished(environment.prefix, True)
    if environment.prefix.exists() and any(environment.prefix.iterdir()):
        shutil.rmtree(environment.prefix)
    made(environment.prefix)
    prefix = str(environment.prefix)
    file = str(ROOT / f"envs/{kind.partition(',')[0]}.yml")
    agree = {"CONDA_ALWAYS_YES": "true", "MAMBA_ALWAYS_YES": "true"}
    if environment.conda == "micromamba":
        run("micromamba", "create", "-p", prefix, "-f", file, variables=agree)
    elif environment.conda == "pixi":
        run("pixi", "init", "--import", file, prefix)
        run("pixi", "install", "--manifest-path", f"{prefix}/pixi.toml")
    elif environment.conda:
        run(environment.conda, "env", "create", "-p", prefix, "-f", file, variables=agree)
    else:
        uv = find_uv() or get_uv(python)
        if uv:
            options, variables = _for_uv(indexes.pip_settings())
            command = [uv, "venv", "--quiet", "--seed", "--python", python]
            try:
                run(*command, *options, prefix, variables=variables)
            except subprocess.CalledProcessError:
                warn("uv could not make it; going on with venv")
        if not _has(environment.python, "pip"):
            run(python, "-m", "venv", "--clear", prefix)
    environment.mark(kind, "")


def find_uv() -> str:
    """A uv on PATH, or the one that an earlier run got; empty if there is none that runs."""
    for one in (shutil.which("uv"), str(_UV_PLACE / "bin/uv")):
        try:
            if one and not subprocess.run([one, "--version"], capture_output=True).returncode:
                return one
        except OSError:
            pass
    return ""


def get_uv(python: str | Path) -> str:
    """uv by that Python's pip, into .flexops/uv; empty if there is no pip or it has no uv."""
    if not _has(python, "pip"):
        return ""
    shutil.rmtree(_UV_PLACE, ignore_errors=True)
    note("pip install uv")
    command = [*_pip(python), "install", "-qq", "--target", str(_UV_PLACE), "uv"]
    try:
        run(*command, variables={**_PIP, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0"})
    except subprocess.CalledProcessError:
        note("pip could not install it")
    uv = find_uv()
    if not uv:
        warn("there is no uv that runs here; going on with pip, which takes longer")
    return uv


class Installer:
    """Installs into an environment: by uv, and by pip what uv cannot install, for example from an
    index that only pip has the credentials for."""

    def __init__(self, environment: Environment, index_url: str) -> None:
        self.python = str(environment.python)
        self.uv = find_uv() or get_uv(self.python)
        self.index = ["--index-url", index_url] if index_url else []
        self.pip_variables = dict(_PIP)
        settings = indexes.pip_settings()
        if extra := settings.get("extra-index-url"):
            good, silent = ([], []) if "proxy" in settings else indexes.answering(extra.split())
            for url in silent:
                text = indexes.without_credentials(url)
                note(f"passed over, because it does not answer: {text}")
            if silent:
                # pip takes an empty variable for none, and reads its files: the main index serves
                main = index_url or settings.get("index-url") or indexes.DEFAULT
                settings["extra-index-url"] = " ".join(good) or main
                self.pip_variables["PIP_EXTRA_INDEX_URL"] = settings["extra-index-url"]
        self.uv_options, self.uv_variables = _for_uv(settings)

    def __call__(self, *arguments: str) -> None:
        shown = indexes.without_credentials(" ".join(arguments))
        arguments = (*self.index, *arguments)
        if self.uv:
            note(f"uv pip install {shown}")
            quiet = [] if on_terminal() else ["--quiet"]
            options = ["--python", self.python, *quiet, *self.uv_options]
            try:
                run(self.uv, "pip", "install", *options, *arguments, variables=self.uv_variables)
                return
            except subprocess.CalledProcessError as error:
                if error.returncode < 0:  # stopped
                    raise
                warn("uv could not install that; pip tries")
        note(f"pip install {shown}")
        quiet = [] if on_terminal() else ["--quiet", "--progress-bar", "off"]
        run(*_pip(self.python), "install", *quiet, *arguments, variables=self.pip_variables)


def _for_uv(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """pip's settings for uv, and a cache in the checkout where none can be made at home."""
    options, variables = indexes.for_uv(settings)
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "uv")
    there = next(one for one in (home, *home.parents) if one.exists())
    if not os.environ.get("UV_CACHE_DIR") and not (there.is_dir() and os.access(there, os.W_OK)):
        variables["UV_CACHE_DIR"] = str(STATE / "cache/uv")
    return options, variables


def refuse_namesake(environment: Environment) -> None:
    """Another distribution called flexops, another project's, has the same import name: whether it
    goes is the user's decision."""
    if found := environment.distributions().get("flexops"):
        raise Failure(
            f"{environment.prefix} holds another project's flexops ({found.version}), which has"
            " the same import name",
            f"{environment.python} -m pip uninstall flexops, or --prefix DIR for another"
            " environment",
        )


def choose_conda() -> str:
    for name in CONDA_TOOLS:
        if shutil.which(name):
            return name
    raise Failure(
        "none of mamba, conda, micromamba and pixi was found",
        "install one (https://github.com/conda-forge/miniforge), or leave --conda away",
    )


def _pip(python: str | Path) -> list[str]:
    return [str(python), "-m", "pip"]


def _has(python: str | Path, module: str) -> bool:
    try:
        command = [str(python), "-c", f"import {module}"]
        return not subprocess.run(command, capture_output=True).returncode
    except OSError:
        return False


def _origin(one: Distribution) -> str:
    try:
        origin = json.loads(one.read_text("direct_url.json") or "{}")
    except ValueError:
        return ""
    editable = origin.get("dir_info", {}).get("editable")
    return unquote(urlsplit(origin.get("url", "")).path) if editable else ""


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


def _numbers(text: str) -> list[int] | str:
    """``13.0.3.0`` and ``13.0.3`` are the same release; a local part (``+cpu``) does not matter."""
    try:
        parts = [int(part) for part in text.split("+")[0].split(".")]
    except ValueError:
        return text
    while parts and parts[-1] == 0:
        parts.pop()
    return parts


def program(name: str) -> str:
    return shutil.which(name) or ""


def package_manager() -> str:
    return next(filter(program, ("apt-get", "dnf", "zypper", "pacman")), "")


def install_packages(*names: str) -> None:
    """With the system's package manager; raises ``CalledProcessError``."""
    root = []
    if os.geteuid() != 0:
        root = ["sudo"] if on_terminal() else ["sudo", "-n"]  # without a terminal, no password
    root += ["env", "DEBIAN_FRONTEND=noninteractive"]
    manager = package_manager()
    command = {
        "apt-get": ["install", "-y", "-q"],
        "dnf": ["install", "-y"],
        "zypper": ["--non-interactive", "install"],
        "pacman": ["-S", "--noconfirm"],
    }[manager]
    try:
        run(*root, manager, *command, *names, quiet=True)
    except subprocess.CalledProcessError:
        if manager != "apt-get":
            raise
        run(*root, manager, "update", "-q", quiet=True)
        run(*root, manager, *command, *names, quiet=True)
