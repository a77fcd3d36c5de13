"""One miniature channel, and one real build of the CPU variant with a few families, for all tests
of this folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conda_world import HERE, ROOT, CpuBuild, World, copy_of_checkout

from flexops import targets
from flexops_tools import with_extra
from flexops_tools.channel.place import Place
from flexops_tools.channel.run import child
from flexops_tools.targets import conda


@pytest.fixture(scope="session")
def world(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[object, str, str], None]
) -> Iterator[World]:
    """The miniature channel. The folder is gigabytes large, so it does not outlive the run."""
    bindings = all(importlib.util.find_spec(name) for name in ("rattler", "rattler_build"))
    require(bindings, "the rattler bindings", with_extra("conda"))
    root = tmp_path_factory.mktemp("conda")
    try:
        with pytest.MonkeyPatch.context() as patch:
            # on one file system with the prefixes, so that files are linked, not copied
            patch.setenv("RATTLER_CACHE_DIR", str(root / "cache"))
            patch.setenv(
                "PYTHONPATH",
                os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            )
            yield World(root, _upstream(root).url)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _upstream(root: Path) -> Place:
    variants, place = conda.variants(targets.load()), Place(root / "upstream")
    compilers, sysroots = (
        sorted({one.compiler for one in variants}),
        sorted({one.sysroot for one in variants}),
    )
    command = [
        sys.executable,
        HERE / "miniature.py",
        place.channel,
        root / "staging",
        ",".join(compilers),
        ",".join(sysroots),
    ]
    subprocess.run(command, check=True, timeout=3600)
    child("index", {"channel": str(place.channel)})
    return place


@pytest.fixture(scope="session")
def cpu(world: World) -> CpuBuild:
    """Built by the command, with the recipe's tests. With three of the families: all of them take
    minutes. ``test_channel`` builds them with ``-m slow``, setup in every run of CI."""
    checkout = copy_of_checkout(world.root / "few", "adam", "lion", "quant")
    place = Place(world.root / "channel")
    done = world.build(place.channel, "--recipe", checkout / "recipe")
    return CpuBuild(place, place.packages("flexops")[0], done.stdout + done.stderr)
