"""Every op as HIP, for AMD GPUs: compiled and linked by the commands of a ROCm build, with the
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
    return {spec.name: result for spec, result in zip(SPECS, build(SPECS), strict=True)}


@pytest.mark.extra
@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
def test_ops_compile_for_amd_gpus(built, name):
    entry = built[name].require()
    assert entry.manifest.architectures == (ARCHITECTURE,)
    library = entry.library.read_bytes()
    assert f"hipv4-amdgcn-amd-amdhsa--{ARCHITECTURE}".encode() in library
    assert hip_proof.kernels(library)


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
