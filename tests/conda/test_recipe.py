"""The recipe and its variants: what they say is what the code says, and rattler-build understands
it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conda_world import ROOT
from processes import completed

import flexops
from flexops import __version__, _toml, targets
from flexops.targets import loading
from flexops.toolchain.compat import rules
from flexops.toolchain.model import TorchBuild
from flexops_tools import with_extra
from flexops_tools.targets import conda

RECIPE = (ROOT / "recipe" / "recipe.yaml").read_text()
RENDER = """
import json, os, sys
from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig
found = []
where = RenderConfig(PlatformConfig(target_platform=sys.argv[1]))
for one in Stage0Recipe.from_file(sys.argv[2]).render(VariantConfig.from_files(sys.argv[3:]), where):
    build, recipe = one.recipe.build, json.dumps(one.recipe.to_dict(), default=str)
    found.append({"variant": one.variant, "number": build.number, "string": str(build.string), "recipe": recipe})
print(json.dumps(found), flush=True)
os._exit(0)
"""

Rendered = list[dict[str, object]]


def context(name: str) -> str:
    found = re.search(rf'^  {name}: "?([^"\n]+)"?$', RECIPE, re.MULTILINE)
    assert found, name
    return found[1]


@pytest.fixture(scope="module")
def render(require: Callable[[object, str, str], None]) -> Callable[..., Rendered]:
    """What rattler-build makes of the recipe with some variant files."""

    def run(
        *variants: str, recipe: Path = ROOT / "recipe" / "recipe.yaml", platform: str = "linux-64"
    ) -> Rendered:
        command = [
            sys.executable,
            "-c",
            RENDER,
            platform,
            str(recipe),
            *(str(ROOT / name) for name in variants),
        ]
        done = completed(command, code=None)
        require(
            "No module named 'rattler_build'" not in done.stderr,
            "the rattler bindings",
            with_extra("conda"),
        )
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    return run


def test_the_recipe_s_version_is_flexops_():
    assert context("version") == __version__


def test_the_floor_of_torch_is_where_the_stable_abi_begins():
    least = context("least_pytorch")
    built = [
        TorchBuild(f"{version}.0+cpu", None, None, "", True, Path("/torch"))
        for version in (least, f"2.{int(least.split('.')[1]) - 1}")
    ]
    assert [torch.abi_id.startswith("stable-") for torch in built] == [True, False]
    assert built[0].abi_id == f"stable-{least}"


def test_the_requirements_are_those_of_the_wheel():
    wanted = _toml.load(ROOT / "pyproject.toml")["project"]["dependencies"]
    assert '  "ninja",' in (ROOT / "pyproject.toml").read_text().splitlines(), (
        "recipe/build.sh takes this line out"
    )
    for requirement in wanted:
        name, bound = re.match(r"([\w-]+)(>=[\d.]+)?", requirement).groups()  # type: ignore[union-attr]
        if name != "torch":
            assert f"    - {name} {bound}\n" in RECIPE if bound else f"    - {name}\n" in RECIPE, (
                requirement
            )


def test_every_variant_is_one_build(render):
    builds = render(conda.ALL)
    assert sorted(str(one["string"]).split("_")[0] for one in builds) == sorted(
        one.id for one in conda.variants(targets.load())
    )
    for one in builds:
        expected = 0 if str(one["string"]).startswith("cpu_") else 200
        assert (one["number"], str(one["string"]).rpartition("_")[2]) == (expected, str(expected))
        assert "python" not in one["variant"]  # type: ignore[operator]


@pytest.mark.parametrize("variant", conda.variants(targets.load()), ids=lambda one: str(one.id))
def test_a_variant_s_own_file_wins_over_the_one_beside_the_recipe(render, variant):
    (alone,) = render(conda.ALL, variant.path)
    (same,) = render(variant.path)
    assert alone["string"] == same["string"]
    used = dict(alone["variant"])  # type: ignore[call-overload]
    assert (used["cuda_compiler_version"], used.get("cuda_arch_list", "None")) == (
        variant.cuda or "None",
        variant.arch_list or "None",
    )
    assert (used["cxx_compiler_version"], used["c_stdlib_version"]) == (
        variant.compiler,
        variant.sysroot,
    )
    text = str(alone["recipe"])
    assert ("cuda-nvrtc-dev" in text, "__cuda" in text, "nvcc" in text) == (
        bool(variant.cuda),
        bool(variant.cuda),
        False,
    )


def test_every_variant_is_built_for_aarch64_too(render):
    builds = {
        str(one["string"]).split("_")[0]: str(one["recipe"])
        for one in render(conda.ALL, platform="linux-aarch64")
    }
    assert set(builds) == {one.id for one in conda.variants(targets.load())}
    for name, recipe in builds.items():
        assert "gxx_linux-aarch64" in recipe, name
        assert "linux-64" not in recipe, name


def test_the_cuda_variants_are_conda_forge_s_with_every_architecture():
    found = {one.id: one for one in conda.variants(targets.load())}
    assert list(found) == ["cpu", "cuda129", "cuda130"]
    assert {one.arch_list for one in found.values() if one.cuda} == {
        "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
    }


PINNING = {
    "c_compiler": ["gcc"],
    "cxx_compiler": ["gxx"],
    "cuda_compiler": ["cuda-nvcc"],
    "c_stdlib": ["sysroot"],
    "python_min": ["3.10"],
    "c_compiler_version": ["14", "14", "14"],
    "cxx_compiler_version": ["14", "14", "14"],
    "fortran_compiler_version": ["14", "14", "14"],
    "c_stdlib_version": ["2.17", "2.17", "2.17"],
    "cuda_compiler_version": ["None", "12.9", "13.0"],
    "docker_image": ["alma9", "alma9", "alma9"],
}
ZIPPED = [key for key, values in PINNING.items() if len(values) > 1]


def test_a_feedstock_needs_the_one_key_that_the_pinning_does_not_know(render, tmp_path):
    """As docs/conda.md has it: no variants file beside the recipe, and nothing of what
    conda-forge's pinning zips, which a rerender would reject."""
    told = (ROOT / "docs/conda.md").read_text().partition("### A feedstock")[2]
    own = told.partition("```yaml\n")[2].partition("```")[0]
    assert re.findall(r"^(\w+):", own, re.MULTILINE) == ["cuda_arch_list"]
    assert not {"cuda_arch_list"} & PINNING.keys()
    (tmp_path / "own.yaml").write_text(own)
    (tmp_path / "pinning.yaml").write_text(json.dumps({**PINNING, "zip_keys": [ZIPPED]}))
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "recipe.yaml").write_text(RECIPE)
    builds = render(
        str(tmp_path / "pinning.yaml"),
        str(tmp_path / "own.yaml"),
        recipe=tmp_path / "recipe" / "recipe.yaml",
    )
    assert sorted(str(one["string"]).split("_")[0] for one in builds) == [
        "cpu",
        "cuda129",
        "cuda130",
    ]
    known = {one.id: one for one in conda.variants(targets.load())}
    for one in builds:
        variant = known[str(one["string"]).split("_")[0]]
        assert json.dumps({"CUDA_ARCH_LIST": variant.arch_list or "None"})[1:-1] in str(
            one["recipe"]
        )


def test_the_feedstock_s_linter_can_read_it():
    """It evaluates every expression by jinja2, with no variant: ``cuda_compiler_version`` is
    undefined there, and has no methods."""
    from jinja2 import DebugUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        variable_start_string="${{", variable_end_string="}}", undefined=DebugUndefined
    )
    environment.filters["split"] = lambda text, separator=None: text.split(separator)
    for name in ("compiler", "stdlib", "pin_compatible"):
        environment.globals[name] = lambda what, **_: f"{what} of some kind"
    environment.globals["env"] = SimpleNamespace(get=lambda name, default="": default or name)
    values: dict[str, str] = {}
    for name, value in re.findall(
        r'^  (\w+): "?([^"\n].*?)"?$',
        RECIPE.partition("context:\n")[2].partition("\npackage:")[0],
        re.MULTILINE,
    ):
        values[name] = environment.from_string(value).render(values)
    assert values["device"] == "cuda{{ cuda_compiler_version }}"
    assert "__cuda >=" in environment.from_string(RECIPE).render(values)


def test_the_package_says_who_made_it_what_it_is_and_under_which_licence(render):
    about = json.loads(str(render(conda.ALL)[0]["recipe"]))["about"]
    project = _toml.load(ROOT / "pyproject.toml")["project"]
    assert (about["license"], about["summary"]) == (project["license"], project["description"])
    assert all(
        about[field]
        for field in ("homepage", "repository", "documentation", "description", "license_file")
    ), about
    assert project["urls"] == {
        name.capitalize(): about[name] for name in ("homepage", "repository", "documentation")
    }


def test_what_is_said_to_be_in_it_is_there():
    """Fused attention is not: what is said of attention is said of operators that exist."""
    words = re.findall(
        r"[a-z]+", RECIPE.partition("description: |")[2].partition("license:")[0].lower()
    )
    assert "attention" not in words or "attention" in dir(flexops)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"cuda": "12.8"}, "conda cuda129, cuda: is 12.8, so the variant's name is cuda128"),
        ({"compiler": "15"}, "conda cuda129, compiler: gcc 15 is newer than nvcc 12.9 accepts"),
        (
            {"capabilities": ["8.0", "13.0"]},
            "conda cuda129, capabilities: CUDA 12.9 cannot compile for 13.0",
        ),
        ({"capabilities": ["9.0", "8.0"]}, "conda cuda129, capabilities: must be in order"),
        ({"capabilities": []}, "conda cuda129, capabilities: are needed with cuda"),
        ({"sysroot": 2.17}, "conda cuda129, sysroot: 2.17 is not a version"),
        ({"glibc": "2.17"}, "conda cuda129, glibc: unknown field"),
    ],
)
def test_what_is_wrong_with_a_variant_is_said(change, fault):
    document = _toml.load(loading.PATH)
    row = {**document["conda"]["cuda129"], **change}
    found = [
        f"{where}, {field}: {what}"
        for where, field, what in conda.faults({"conda": {"cuda129": row}}, rules())
    ]
    assert found
    assert found[0].startswith(fault), found


def test_the_environments_are_read_by_conda_s_own_parser(require):
    lines = [
        line
        for path in sorted((ROOT / "envs").glob("*.yml"))
        for line in path.read_text().splitlines()
    ]
    specs = [
        line[4:]
        for line in lines
        if line.startswith("  - ") and ":" not in line and line != "  - conda-forge"
    ]
    code = (
        "import json, os, sys, rattler\nfor spec in json.load(sys.stdin): rattler.MatchSpec(spec,"
        " strict=True)\nos._exit(0)"
    )
    done = completed([sys.executable, "-c", code], input=json.dumps(specs), code=None)
    require(
        "No module named 'rattler'" not in done.stderr, "the rattler bindings", with_extra("conda")
    )
    assert done.returncode == 0, done.stderr
    assert len(specs) > 100
