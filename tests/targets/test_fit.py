"""What is a row's build, and what is not: torch and compiler must be the row's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexops import targets
from flexops.build.describe import catalog
from flexops.errors import FlexopsError
from flexops.targets.fit import is_of, unfit
from flexops.toolchain.model import TorchBuild, Version


def torch(version: str, *, cuda: str | None = None, hip: str | None = None) -> TorchBuild:
    return TorchBuild(
        version, cuda, hip, "", Version.parse(version) >= Version((2, 7)), Path("/torch")
    )


OWN = {
    "cpu": (torch("2.13.0+cpu"), None),
    "cu121": (torch("2.4.1+cu121", cuda="12.1"), "12.1"),
    "cu126": (torch("2.7.1+cu126", cuda="12.6"), "12.6"),
    "cu128": (torch("2.10.0+cu128", cuda="12.8"), "12.8"),
    "cu130": (torch("2.14.1+cu130", cuda="13.0"), "13.0"),
    "cu132": (torch("2.15.0+cu132", cuda="13.2"), "13.2"),
    "rocm72": (torch("2.13.0+rocm7.2", hip="7.2.53211"), "7.2"),
}


@pytest.mark.parametrize("row", targets.load().targets, ids=lambda row: row.id)
def test_only_the_rows_own_torch_and_compiler_make_its_build(row):
    for name, (build, compiler) in OWN.items():
        refusal = unfit(row, build, Version.parse(compiler) if compiler else None)
        own = name == row.toolkit_name
        assert (refusal is None) == own, name
        assert is_of(row, build.abi_id, compiler or "") == (
            own or (row.accelerator == "cpu" and build.stable_abi)
        ), name
        if refusal is not None:
            assert f"scripts/setup_cuda_dev_environment.sh --target {row.id}" in refusal.fix
            assert build.version in refusal.found
            assert row.torch in refusal.required


def test_what_comes_close_is_not_it():
    row = targets.load().find("cu130-sm90")
    mine = OWN["cu130"][0]
    assert unfit(row, mine, Version((13, 0))) is None
    for build, compiler in [
        (None, Version((13, 0))),
        (mine, None),
        (mine, Version((13, 2))),
        (torch("2.14.1+cpu"), Version((13, 0))),  # cross-compiling is what --arch is for
        (torch("2.13.0+cu130", cuda="13.0"), Version((13, 0))),
    ]:
        refusal = unfit(row, build, compiler)
        assert refusal is not None
        assert '--arch "9.0"' in refusal.fix
    # the default index's wheel runs on a CPU, too
    assert unfit(targets.load().cpu, torch("2.13.0+cu130", cuda="13.0"), None) is None


def test_an_operators_name_means_its_family():
    assert {spec.name for spec in catalog.select(("swiglu", "rms_norm", "adam"))} == {
        "activation",
        "norm",
        "adam",
    }
    assert catalog.select(("all",)) == catalog.select(()) == catalog.CATALOG
    for spec in catalog.CATALOG:
        assert [catalog.select((name,)) for name in (spec.family, *spec.ops)] == [(spec,)] * (
            1 + len(spec.ops)
        )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("swiglo", "swiglu"),
        ("rmsnorm", "rms_norm"),
        ("flash_attention", "kvcache_attention or attention"),
        ("adamw", "adam"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name, near):
    with pytest.raises(FlexopsError) as caught:
        catalog.select((name,))
    assert caught.value.found.startswith(f"did you mean {near}")
    assert "norm_backward" in caught.value.required


def test_the_help_of_build_lists_every_operator():
    from flexops.cli.build import NAMES

    for spec in catalog.CATALOG:
        assert spec.name in NAMES
    for op in ("swiglu", "rms_norm", "rotary_embedding", "quantize_fp8", "causal_softmax"):
        assert op in NAMES
    with pytest.raises(FlexopsError, match="nothing_of_that_name"):
        catalog.select(("adam", "nothing_of_that_name"))
