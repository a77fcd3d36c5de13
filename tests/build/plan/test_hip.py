"""Ops as HIP, for AMD GPUs: compiled and linked by the commands of a ROCm build, with the
distribution's hipcc. What the result computes, only an AMD GPU can show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from builds import SQUARE
from command_line import flexops_command
from processes import completed

from flexops import settings
from flexops.build.compile.building import Result
from flexops.build.describe import catalog, layout
from flexops.build.describe.spec import OpSpec
from flexops.toolchain import discovery, rocm
from flexops_tools.proving import hip_proof

# ROCm 5.2, which Debian has, knows no gfx942; both have wavefronts of 64 lanes
ARCHITECTURE = "gfx90a"
SPECS = (*(spec for spec in catalog.CATALOG if spec.hip), SQUARE)
# of a kind each: lists of tensors, logits, convolutions, norms, codes, positions; the others take
# minutes
SOME = ("adam", "causal_conv1d", "cross_entropy", "norm", "quant", "rope", SQUARE.name)


@pytest.fixture(scope="module")
def build(require: Any) -> Callable[[Sequence[OpSpec]], list[Result]]:
    """Builds ops at once, by this machine's tools as they would be beside a torch for its ROCm:
    bindings need torch's headers, which any torch has."""
    chosen = settings.current()
    require(
        rocm.find(discovery.search_context(chosen)).usable,
        "a hipcc",
        f"{hip_proof.INSTALL}, or sudo bash scripts/run_tests.sh, which does",
    )
    return lambda specs: hip_proof.build(specs, ARCHITECTURE, chosen)[1]


@pytest.fixture(scope="module")
def built(build: Callable[[Sequence[OpSpec]], list[Result]]) -> dict[str, Result]:
    specs = [spec for spec in SPECS if spec.name in SOME]
    return {spec.name: result for spec, result in zip(specs, build(specs), strict=True)}


def assert_holds_kernels(result: Result) -> None:
    entry = result.require()
    assert entry.manifest.architectures == (ARCHITECTURE,)
    library = entry.library.read_bytes()
    assert f"hipv4-amdgcn-amd-amdhsa--{ARCHITECTURE}".encode() in library
    assert hip_proof.kernels(library)


@pytest.mark.extra
@pytest.mark.parametrize("name", SOME)
def test_ops_compile_for_amd_gpus(built, name):
    assert_holds_kernels(built[name])


@pytest.mark.slow
def test_all_other_ops_compile_for_amd_gpus(build):
    others = [spec for spec in SPECS if spec.name not in SOME]
    assert len(others) > len(SOME)
    for result in build(others):
        assert_holds_kernels(result)


@pytest.mark.extra
def test_a_row_is_proven_as_far_as_it_compiles(built):
    """By the command; the libraries are those that were compiled before."""
    done = flexops_command(
        "target", "prove", "rocm72-gfx90a", "--op", "rope", "--json", catch_exceptions=True
    )
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["amd"]
    assert (found["family"], found["architecture"]) == ("rope", ARCHITECTURE)
    assert found["compiler"].startswith("hipcc ")
    assert found["kernels"] == hip_proof.kernels(built["rope"].require().library.read_bytes())


@pytest.mark.extra
def test_a_projects_operator_whose_binding_the_builder_writes(build, monkeypatch):
    monkeypatch.syspath_prepend(str(layout.example_root()))
    # what looks at all families later in this process does not find it
    monkeypatch.setattr(catalog, "_others", dict(catalog._others))
    import mylib

    spec = catalog.find("mylib.scale")
    assert mylib.scale
    assert not spec.binding
    entry = build([spec])[0].require()
    assert f"hipv4-amdgcn-amd-amdhsa--{ARCHITECTURE}".encode() in entry.library.read_bytes()
    defined = completed(["nm", "-DC", "--defined-only", str(entry.library)]).stdout
    assert "scale_kernel" in defined
