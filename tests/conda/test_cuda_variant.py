"""The CUDA variant, really compiled for every architecture with the NVRTC of the tests'
environment: no nvcc, no header of CUDA. Slow; no GPU is needed."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conda_world import CpuBuild, World
from test_channel import CUDA_RUN

from flexops import targets
from flexops.build.describe import catalog
from flexops.build.describe.spec import OpSpec
from flexops.compute_capability import ComputeCapability
from flexops.toolchain import nvrtc
from flexops.toolchain.context import SearchContext
from flexops.toolchain.installed_torch import package_dirs
from flexops_tools.channel.place import Place
from flexops_tools.channel.run import child
from flexops_tools.targets import conda

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cuda(world: World, cpu: CpuBuild, require: Callable[..., None]) -> Place:
    """The variant for the release that an NVRTC here is of. torch for CUDA is this environment's
    torch under that name: the stable ABI is the same."""
    from miniature import PYTHON, Miniature

    found = {
        one.value.version.major_minor: one.value.path.parent
        for one in nvrtc.find(SearchContext(site_dirs=package_dirs(()))).usable
    }
    variant = next((one for one in conda.variants(targets.load()) if one.cuda in found), None)
    require(
        variant,
        "NVRTC of a variant's CUDA",
        "pip install nvidia-cuda-nvrtc==13.0.88, or run scripts/run_tests.sh, which does",
    )
    assert variant is not None
    release = variant.cuda
    extra = Miniature(world.root / "cuda-upstream", world.root / "staging")
    extra.add_nvrtc(release, found[release])
    distribution = importlib.metadata.distribution("torch")
    needs = [
        f"python {PYTHON}.*",
        "filelock",
        "typing-extensions",
        "sympy",
        "networkx",
        "jinja2",
        "fsspec",
    ]
    extra.add_cuda_torch(
        release,
        distribution.version.partition("+")[0],
        needs,
        Path(str(distribution.locate_file(""))),
    )
    child("index", {"channel": str(extra.root)})
    place = Place(world.root / "cuda")
    wanted = (
        "--variant",
        variant.id,
        "--channel",
        place.channel,
        "--from",
        extra.url,
        "--from",
        world.upstream,
        "--variant-config",
        world.pins,
    )
    # a thousand kernels; the tests open libraries, for which this torch is not
    world.flexops("channel", "build", *wanted, "--no-test")
    assert cpu
    return place


def test_the_package_is_small_and_asks_for_what_the_solver_tests_assume(cuda):
    (package,) = cuda.packages()
    variant = conda.find(
        conda.variants(targets.load()), package.name.split("-")[2].partition("_")[0]
    )
    assert package.stat().st_size <= 60e6
    entry = json.loads((package.parent / "repodata.json").read_text())["packages.conda"][
        package.name
    ]
    major = int(variant.cuda.partition(".")[0])
    built = [
        f"__glibc >={variant.sysroot},<3.0.a0",
        f"libgcc >={variant.compiler}",
        f"libstdcxx >={variant.compiler}",
    ]
    expected = [*CUDA_RUN, *built, f"cuda-version >={major},<{major + 1}.0a0", f"__cuda >={major}"]
    assert sorted(map(_loosened, entry["depends"])) == sorted(map(_loosened, expected))
    assert (entry["build_number"], entry["noarch"]) == (200, "python")


def _loosened(spec: str) -> str:
    """The miniature channel has one Python, whose version is the floor there."""
    return "python" if spec.startswith("python ") else spec


def test_every_library_holds_every_architecture(cuda, world):
    (package,) = cuda.packages()
    variant = conda.find(
        conda.variants(targets.load()), package.name.split("-")[2].partition("_")[0]
    )
    prefix = world.root / "cuda-installed"
    request = {
        "channels": [cuda.url, _without_files(world, package)],
        "specs": ["flexops"],
        "prefix": str(prefix),
    }
    child("install", request, environment={"CONDA_OVERRIDE_CUDA": variant.cuda})
    manifests = {
        path.parent.name: json.loads(path.read_text())
        for path in prefix.rglob("_aot/*/manifest.json")
    }
    libraries = {name: manifest for name, manifest in manifests.items() if not manifest["kernel"]}
    assert {name.rpartition("-")[2] for name in libraries} == {"cpu", "cuda"}
    for name, manifest in libraries.items():
        expected = (
            [*variant.capabilities[:-1], f"{variant.capabilities[-1]}+PTX"]
            if name.endswith("-cuda")
            else []
        )
        assert manifest["architectures"] == expected, name
        assert manifest["torch_abi"] == "stable-2.11"
    code: dict[tuple[str, str], set[str]] = {}
    for name, manifest in manifests.items():
        if manifest["kernel"]:
            code.setdefault((name.partition("-")[0], manifest["kernel"]), set()).update(
                manifest["architectures"]
            )
    assert {family for family, _ in code} == {
        spec.name for spec in catalog.CATALOG if spec.cuda_sources
    }
    specs = {spec.name: spec for spec in catalog.CATALOG}
    hoppers = {_what(kernel) for _, kernel in code if "_hopper<" in kernel}
    assert hoppers
    for (family, kernel), found in code.items():
        assert found == _architectures(specs[family], kernel, hoppers, variant), kernel


def _what(kernel: str) -> tuple[str, ...]:
    """What a kernel computes, of which dtype and head dimensions: where there is a kernel of
    Hopper's for that, the other is not compiled for 9.0."""
    name, _, arguments = kernel.replace("_hopper<", "<").partition("<")
    return (name, *arguments.split(", ")[:3])


def _architectures(
    spec: OpSpec, kernel: str, hoppers: set[tuple[str, ...]], variant: conda.Variant
) -> set[str]:
    """Every one that the family runs on; of Hopper's own kernels, Hopper's."""
    if "_hopper<" in kernel:
        return {"9.0a"}
    served = {text for text in variant.capabilities if spec.runs_on(ComputeCapability.parse(text))}
    return {*served, ComputeCapability.parse(variant.capabilities[-1]).compute} - (
        {"9.0"} if _what(kernel) in hoppers else set()
    )


def _without_files(world: World, package: Path) -> str:
    from miniature import PYTHON, Miniature

    entry = json.loads((package.parent / "repodata.json").read_text())["packages.conda"][
        package.name
    ]
    channel = Miniature(world.root / "no-files", world.root / "staging")
    names = {spec.split()[0] for spec in entry["depends"]} - {
        "python",
        "pytorch",
        "cuda-version",
        "__cuda",
        "__glibc",
    }
    for name in names:
        channel.empty(name, "99")
    channel.empty("python", f"{PYTHON}.99")
    channel.empty("pytorch", "99", "cuda_0")
    for version in ("12.9", "13.0"):
        channel.empty("cuda-version", version)
    child("index", {"channel": str(channel.root)})
    return channel.url
