"""The command line that the tests of images run, and what it runs on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from processes import completed

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = "flexops-test-base:1"
_NETWORK = "host"  # an engine in a container or a small virtual machine may have no other


def copy_of_checkout(target: Path, *only: str) -> Path:
    """What images are built from; ``only``: with these families alone in the catalogue."""
    for name in ("csrc", "docker", "flexops", "envs", "tools"):
        shutil.copytree(
            REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "_aot")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", ".dockerignore", "LICENSE"):
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, target / name)
    if only:
        with (target / "flexops/build/describe/catalog.py").open("a") as catalog:
            catalog.write(f"CATALOG = tuple(find(name) for name in {only})\n")
    return target


class Image:
    """The command line on a checkout, with the base, index and network of these tests."""

    def __init__(self, index_url: str) -> None:
        bases = ["--build-base", BASE, "--runtime-base", BASE]
        index = ["--index-url", index_url, "--accept-other-torch"]  # whose CPU index may be silent
        self.build_options = [*bases, *index, "--network", _NETWORK]

    def __call__(
        self,
        *arguments: str,
        checkout: Path = REPOSITORY,
        environment: dict[str, str] | None = None,
        code: int | None = 0,
    ) -> subprocess.CompletedProcess[str]:
        variables = self.environment(checkout, environment)
        # In the checkout, because `python -m` looks for flexops in the working directory first.
        return completed(self.command(*arguments), cwd=checkout, env=variables, code=code)

    def build(
        self, *arguments: str, checkout: Path = REPOSITORY, code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        return self("build", *arguments, *self.build_options, checkout=checkout, code=code)

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "flexops", "image", *arguments]

    @staticmethod
    def environment(checkout: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
        path = f"{checkout}{os.pathsep}{checkout / 'tools'}"
        return {**os.environ, "PYTHONPATH": path, **(extra or {})}
