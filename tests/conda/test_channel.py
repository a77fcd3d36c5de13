"""Real packages: the CPU variant is built, indexed, solved, installed, examined, upgraded and
removed, with no network."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from conda_world import CpuBuild, World, copy_of_checkout, only_empty
from processes import completed

from flexops import __version__, targets
from flexops.build.describe.catalog import CATALOG
from flexops.errors import ChannelError
from flexops_tools.channel import check, index, verify
from flexops_tools.channel.place import Place, distribution
from flexops_tools.targets import conda

CUDA_RUN = [
    "python >=3.10",
    "pytorch >=2.11",
    "ninja",
    "typer >=0.12",
    "rich >=13",
    "tomli >=2",
    "pytorch * cuda*",
]
VARIANTS = conda.variants(targets.load())

pytestmark = pytest.mark.extra  # it takes a build of the package in a channel of its own


@pytest.mark.slow
def test_the_whole_package_is_small_and_has_every_operator_compiled(world):
    place, prefix = Place(world.root / "whole"), world.root / "installed"
    world.build(place.channel)
    assert place.packages("flexops")[0].stat().st_size <= 2e6
    check.install(place, prefix, upstream=[world.upstream])
    report = json.loads(in_prefix(prefix, "flexops", "doctor", "--json", only=True))
    assert report["status"] == "ok", report
    backends = {op["name"]: op["backend"] for op in report["ops"] if op["device"] == "cpu"}
    assert backends == {spec.name: "aot" for spec in CATALOG}
    shutil.rmtree(prefix)


def files(prefix: Path) -> set[str]:
    return {
        str(path.relative_to(prefix))
        for path in prefix.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def record(prefix: Path) -> dict[str, object]:
    """conda's own note of the installed package."""
    paths = list((prefix / "conda-meta").glob("flexops-*.json"))
    assert len(paths) == 1, paths
    return dict(json.loads(paths[0].read_text()))


def in_prefix(prefix: Path, *command: str, only: bool = False) -> str:
    """Run a program of the prefix as if that were activated; ``only``: with nothing else on PATH,
    no compiler say."""
    environment = check.activated(prefix) | ({"PATH": f"{prefix}/bin"} if only else {})
    environment["FLEXOPS_CACHE_DIR"] = str(prefix.parent / "cache")
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # the installer leaves what Python wrote itself
    program = [str(prefix / "bin" / command[0]), *command[1:]]
    done = completed(program, env=environment, cwd=prefix)
    return done.stdout


def test_the_package_is_small_and_serves_every_python(cpu):
    assert cpu.package.stat().st_size <= 2e6
    assert distribution(cpu.package)[:2] == ("flexops", __version__)
    assert distribution(cpu.package)[2].startswith("cpu_h")
    entry = json.loads((cpu.package.parent / "repodata.json").read_text())["packages.conda"][
        cpu.package.name
    ]
    assert (entry["noarch"], entry["build_number"]) == ("python", 0)
    assert not any(spec.split()[0] in ("python_abi", "libtorch") for spec in entry["depends"]), (
        entry["depends"]
    )
    assert "pytorch >=2.11" in entry["depends"]


def test_the_recipe_s_own_tests_ran(cpu):
    log = (cpu.place.logs / "cpu.log").read_text()
    assert "in use: " in log
    assert "pip check passed" in log
    assert "all tests passed" in log


def test_what_is_being_done_is_said(cpu):
    for phase in ("fetching the source", "compiling the operators", "testing", "indexing"):
        assert f"cpu: {phase}" in cpu.output


def test_an_installation_works_without_a_compiler(cpu, world):
    prefix = world.root / "plain"
    check.install(cpu.place, prefix, upstream=[world.upstream])
    report = json.loads(in_prefix(prefix, "flexops", "doctor", "--json", only=True))
    assert report["status"] == "ok", report
    backends = {op["name"]: op["backend"] for op in report["ops"] if op["device"] == "cpu"}
    assert backends == dict.fromkeys(("adam", "lion", "quant"), "aot")
    shutil.rmtree(prefix)


def test_upgrade_downgrade_and_removal_leave_nothing_behind(cpu, world):
    newer = world.root / "newer"
    checkout = copy_of_checkout(world.root / "checkout", "quant")
    recipe = checkout / "recipe" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("  build: 0\n", "  build: 1\n"))
    (checkout / "flexops" / "added_later.py").write_text("x = 1\n")
    shutil.copytree(cpu.place.channel, newer)
    world.build(newer, "--recipe", checkout / "recipe", "--no-test")

    prefix, upstream = world.root / "changing", [world.upstream]
    check.install(cpu.place, prefix, upstream=upstream, specs=["python", "pytorch"])
    without = files(prefix)
    check.install(cpu.place, prefix, upstream=upstream, specs=["python", "pytorch", "flexops"])
    old = files(prefix)
    assert record(prefix)["build_number"] == 0
    check.install(Place(newer), prefix, upstream=upstream, specs=["python", "pytorch", "flexops"])
    assert record(prefix)["build_number"] == 1
    assert site("flexops/added_later.py") in files(prefix) - old
    assert site("flexops/_aot/adam-cpu/manifest.json") in old - files(prefix)
    in_prefix(prefix, "flexops", "--version")
    check.install(cpu.place, prefix, upstream=upstream, specs=["python", "pytorch", "flexops"])
    assert record(prefix)["build_number"] == 0
    assert files(prefix) == old
    check.install(cpu.place, prefix, upstream=upstream, specs=["python", "pytorch"])
    assert files(prefix) == without
    check.install(cpu.place, prefix, upstream=upstream, specs=[])
    # the installer's own
    assert {path for path in files(prefix) if not path.startswith("conda-meta/")} <= {
        "CACHEDIR.TAG"
    }
    shutil.rmtree(prefix)


def test_run_time_compiling_takes_the_environment_s_compiler(cpu, world):
    prefix = world.root / "compiling"
    check.install(
        cpu.place, prefix, upstream=[world.upstream], specs=["flexops", "gxx_linux-64 15.*"]
    )
    tools = json.loads(in_prefix(prefix, "python", "-c", TOOLS))
    assert tools == {
        "host": f"{prefix}/bin/x86_64-conda-linux-gnu-c++",
        "ninja": f"{prefix}/bin/ninja",
    }
    assert "quant-cpu" in in_prefix(prefix, "flexops", "build", "quant", "--target", "cpu")
    shutil.rmtree(prefix)


TOOLS = """
import json
from flexops import settings, toolchain
tools = toolchain.discover(settings.current(), device="cpu")
print(json.dumps({"host": str(tools.host.path), "ninja": str(tools.ninja.path)}))
"""


@pytest.fixture(scope="module")
def all_variants(cpu: CpuBuild, world: World) -> Place:
    """The real CPU package, and CUDA ones with the recipe's requirements but no files
    (``test_cuda_variant`` holds the requirements true)."""
    from miniature import Miniature  # needs the bindings

    place = Place(world.root / "all")
    shutil.copytree(cpu.place.channel, place.channel)
    channel = Miniature(place.channel, world.root / "staging")
    for one in VARIANTS:
        if one.cuda:
            major = int(one.cuda.partition(".")[0])
            depends = [*CUDA_RUN, f"cuda-version >={major},<{major + 1}.0a0", f"__cuda >={major}"]
            channel.empty("flexops", __version__, f"{one.id}_h0000000_200", depends, number=200)
    index(place)
    return place


@pytest.mark.parametrize(
    ("cuda", "chosen"),
    [
        ("", "cpu"),
        ("12.9", "cuda129"),
        ("13.0", "cuda130"),
        ("13.4", "cuda130"),
        ("12.2", "cuda129"),
        ("11.8", "cpu"),
    ],
)
def test_the_solver_takes_the_newest_cuda_that_the_driver_runs(all_variants, world, cuda, chosen):
    solved = check.solve(
        all_variants, check.Machine("a driver", cuda), VARIANTS, upstream=[world.upstream]
    )
    assert (solved.variant, solved.expected) == (chosen, chosen)
    assert solved.torch.split()[1].startswith(chosen)


@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_one_package_goes_where_each_python_looks(cpu, tmp_path, python):
    check.install(
        cpu.place,
        tmp_path / "prefix",
        upstream=[only_empty(tmp_path, python)],
        specs=["flexops", f"python {python}.*"],
    )
    assert (
        tmp_path
        / "prefix"
        / f"lib/python{python}/site-packages/flexops/_aot/adam-cpu/manifest.json"
    ).is_file()
    assert (
        (tmp_path / "prefix" / "bin" / "flexops")
        .read_text()
        .startswith(f"#!{tmp_path}/prefix/bin/python{python}\n")
    )


def test_a_channel_with_only_the_cpu_variant_serves_every_machine(cpu, world):
    for machine in check.machines(VARIANTS):
        solved = check.solve(cpu.place, machine, VARIANTS, upstream=[world.upstream])
        assert (solved.variant, solved.good) == ("cpu", True)


def test_the_check_command_says_what_each_machine_gets(all_variants, world):
    done = world.flexops(
        "channel", "check", "--channel", all_variants.channel, "--from", world.upstream, cuda=""
    )
    told = done.stdout.splitlines()
    assert told[0] == f"ok   3 packages are what the index of {all_variants.url} says"
    for line, variant in zip(told[1:], ("cpu", "cuda129", "cuda130"), strict=False):
        assert line.startswith("ok")
        assert f"gets {variant}_" in line
    assert "doctor exits 0" in told[-1]
    assert not (all_variants.work / "check").exists()


def damage(package: Path) -> None:
    content = bytearray(package.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    package.write_bytes(content)


def test_a_damaged_package_is_not_indexed(cpu, tmp_path, world):
    place = Place(tmp_path / "channel")
    for name, spoil in (
        ("flipped-1-0.conda", damage),
        ("short-1-0.conda", lambda path: os.truncate(path, 100_000)),
    ):
        target = place.channel / "linux-64" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(cpu.package, target)
        spoil(target)
    with pytest.raises(ChannelError) as caught:
        index(place)
    assert caught.value.what == "2 packages of the channel are damaged"
    assert "flipped-1-0.conda: " in caught.value.found
    assert "short-1-0.conda: " in caught.value.found
    assert caught.value.fix.startswith("rm ")
    assert not list(place.channel.rglob("repodata.json"))
    assert world  # the bindings are there


def test_a_package_damaged_after_indexing_is_found_and_not_installed(cpu, tmp_path, monkeypatch):
    place = Place(tmp_path / "channel")
    shutil.copytree(cpu.place.channel, place.channel)
    damage(place.packages()[0])
    with pytest.raises(ChannelError, match="a package of the channel is damaged"):
        verify(place, place.packages())
    upstream = only_empty(tmp_path)
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ChannelError, match="cannot be installed into") as caught:
        check.install(place, tmp_path / "prefix", upstream=[upstream])
    assert "flexops" in caught.value.found
    assert caught.value.fix


def test_a_missing_dependency_is_named(cpu):
    with pytest.raises(
        ChannelError, match="flexops cannot be installed on a machine with no GPU"
    ) as caught:
        check.solve(cpu.place, check.Machine("no GPU", ""), VARIANTS, upstream=[])
    assert "no candidates were found" in caught.value.found.lower()
    assert "--from" in caught.value.fix


def test_a_cuda_package_on_a_machine_without_a_driver_is_explained(all_variants, world):
    with pytest.raises(ChannelError, match="cannot be installed") as caught:
        check.solve(
            all_variants,
            check.Machine("no GPU", ""),
            VARIANTS,
            upstream=[world.upstream],
            specs=["flexops * cuda130*"],
        )
    assert "__cuda" in caught.value.found
    assert "CONDA_OVERRIDE_CUDA" in caught.value.fix


def test_a_build_whose_dependencies_are_nowhere_says_so_in_one_message(world, tmp_path):
    empty = Place(tmp_path / "empty")
    for folder in ("linux-64", "noarch"):
        (empty.channel / folder).mkdir(parents=True)
        (empty.channel / folder / "repodata.json").write_text(
            '{"packages": {}, "packages.conda": {}}'
        )
    done = world.flexops(
        "channel",
        "build",
        "--variant",
        "cpu",
        "--channel",
        tmp_path / "channel",
        "--from",
        empty.url,
        "--engine",
        "rattler-build",
        code=None,
    )
    assert done.returncode == ChannelError.exit_code
    assert "Traceback" not in done.stderr
    assert "flexops: variant cpu cannot be built" in done.stderr
    assert "no candidates were found for" in done.stderr.lower()
    assert "--from" in done.stderr
    assert f"log: {tmp_path / 'channel-logs' / 'cpu.log'}" in done.stderr
    assert not list((tmp_path / "channel").rglob("*.conda"))


def test_a_compile_that_fails_is_diagnosed(cpu, world, tmp_path):
    checkout = copy_of_checkout(tmp_path / "checkout", "quant")
    (checkout / "csrc" / "quant" / "quant_host.h").write_text("#error this does not compile\n")
    done = world.build(tmp_path / "channel", "--recipe", checkout / "recipe", code=None)
    assert done.returncode == ChannelError.exit_code
    assert "this does not compile" in done.stderr
    assert "log: " in done.stderr
    assert cpu  # first, so that the two builds do not share the processors


def site(path: str) -> str:
    from miniature import SITE

    return f"{SITE}/{path}"
