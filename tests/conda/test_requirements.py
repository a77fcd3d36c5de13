"""What the packages require, as conda-forge would have it: its packages export requirements to
those that are built with them, and not all of those fit."""

from __future__ import annotations

import json
import shutil

import pytest
from conda_world import ROOT, World

from flexops import targets
from flexops_tools.channel.place import Place
from flexops_tools.channel.run import child
from flexops_tools.targets import conda

RUN = ["ninja", "pytorch >=2.11", "rich >=13", "tomli >=2", "typer >=0.12"]
SCRIPT = """
for file in __init__.py _aot/x-cpu/manifest.json _csrc/common/x.h; do
  mkdir -p "$(dirname "$SP_DIR/flexops/$file")"
  touch "$SP_DIR/flexops/$file"
done
"""
VARIANTS = conda.variants(targets.load())

pytestmark = pytest.mark.extra  # it takes a channel of its own


@pytest.fixture(scope="module")
def upstream(world: World) -> str:
    """Toolkits that only have names and exports."""
    from miniature import Miniature, toolkits  # needs the bindings

    root = world.root / "toolkits"
    toolkits(root, world.root / "staging", [one.cuda for one in VARIANTS if one.cuda])
    child("index", {"channel": str(root)})
    return Miniature(root, world.root / "staging").url


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: str(one.id))
def test_exports_of_what_compiles_do_not_bind_what_runs(world, upstream, tmp_path, variant):
    """The recipe with a script that compiles nothing: what is required does not hang on that."""
    shutil.copytree(ROOT / "recipe", tmp_path / "recipe")
    (tmp_path / "recipe/build.sh").write_text(SCRIPT)
    for name in ("LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    place = Place(tmp_path / "channel")
    world.build(
        place.channel,
        "--recipe",
        tmp_path / "recipe",
        "--from",
        upstream,
        "--no-test",
        variant=variant.id,
    )
    (package,) = place.packages("flexops")
    depends = json.loads((package.parent / "repodata.json").read_text())["packages.conda"][
        package.name
    ]["depends"]
    # the miniature channel has one, whose version is the floor there
    found = sorted(spec for spec in depends if spec.split()[0] != "python")
    # what libraries need where they run
    built = [
        f"__glibc >={variant.sysroot},<3.0.a0",
        f"libgcc >={variant.compiler}",
        f"libstdcxx >={variant.compiler}",
    ]
    assert found == sorted([*RUN, *built, *cuda(variant)])


def cuda(variant: conda.Variant) -> list[str]:
    major = int(variant.cuda.partition(".")[0] or 0)
    return (
        [f"__cuda >={major}", f"cuda-version >={major},<{major + 1}.0a0", "pytorch * cuda*"]
        if major
        else []
    )
