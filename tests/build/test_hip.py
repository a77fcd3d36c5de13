"""Every op as HIP, for AMD GPUs: compiled and linked by the commands of a ROCm build, with the distribution's hipcc. What the result computes, only an AMD
GPU can show."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from builds import SQUARE

from flexops import settings
from flexops.op_builder import builder, catalog, layout, loader
from flexops.op_builder.builder import Result
from flexops.op_builder.hip import plan_hip_op
from flexops.op_builder.spec import OpSpec
from flexops.toolchain import discovery, resources, rocm

ARCHITECTURE = "gfx90a"  # ROCm 5.2, which Debian has, knows no gfx942; both have wavefronts of 64 lanes
SPECS = (*(spec for spec in catalog.CATALOG if spec.hip), SQUARE)
INSTALL = "apt-get install hipcc libamdhip64-dev rocm-device-libs, or sudo bash scripts/run_tests.sh, which does"


@pytest.fixture(scope="module")
def build(require: Any) -> Callable[[Sequence[OpSpec]], list[Result]]:
    """Builds ops at once, by this machine's tools as they would be beside a torch for its ROCm: bindings need torch's headers, which any torch has."""
    chosen = settings.current()
    context = discovery.search_context(chosen)
    here, torch = rocm.find(context).usable, discovery.discover(chosen, device="cpu").torch
    require(here, "a hipcc", INSTALL)
    assert torch is not None
    tools = discovery.assemble(context, torch._replace(cuda=None, hip=str(here[0].value.version)), device="cuda")

    def build(specs: Sequence[OpSpec]) -> list[Result]:
        plans = [plan_hip_op(spec, tools, csrc=layout.csrc_root(), resources=resources.detect(), architectures=(ARCHITECTURE,)) for spec in specs]
        return builder.obtain(plans, loader.open_cache(chosen))

    return build


@pytest.fixture(scope="module")
def built(build: Callable[[Sequence[OpSpec]], list[Result]]) -> dict[str, Result]:
    return {spec.name: result for spec, result in zip(SPECS, build(SPECS), strict=True)}


@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
def test_ops_compile_for_amd_gpus(built: dict[str, Result], name: str) -> None:
    entry = built[name].require()
    assert entry.manifest.architectures == (ARCHITECTURE,)
    assert f"hipv4-amdgcn-amd-amdhsa--{ARCHITECTURE}".encode() in entry.library.read_bytes()


def test_a_projects_operator_whose_binding_the_builder_writes(build: Callable[[Sequence[OpSpec]], list[Result]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(layout.example_root()))
    monkeypatch.setattr(catalog, "_others", dict(catalog._others))  # what looks at all families later in this process does not find it
    import mylib

    spec = catalog.find("mylib.scale")
    assert mylib.scale
    assert not spec.binding
    entry = build([spec])[0].require()
    assert f"hipv4-amdgcn-amd-amdhsa--{ARCHITECTURE}".encode() in entry.library.read_bytes()
    defined = subprocess.run(["nm", "-DC", "--defined-only", str(entry.library)], capture_output=True, text=True, check=True).stdout
    assert "scale_kernel" in defined
