"""Attention's kernels that are compiled at their first launch only: a sample of them through both NVRTCs, and which architecture each kernel needs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexops import settings, toolchain
from flexops.compute_capability import parse_arch_list
from flexops.op_builder import builder, catalog, device_code, kernel_names, kernel_plan, layout, loader, provider, provider_texts
from flexops.op_builder.cache import BuildCache
from flexops.ops.attention import ScoreMod
from flexops.toolchain import nvrtc
from flexops.toolchain.context import SearchContext
from flexops.toolchain.installed_torch import package_dirs

SPEC = catalog.find("attention")


@pytest.fixture(scope="module")
def library(host_compiler: Any) -> Path:  # noqa: ARG001
    chosen = settings.current()
    return builder.obtain([loader.local_plan(SPEC, "cuda", chosen)], loader.open_cache(chosen))[0].require().library


@pytest.mark.parametrize(("version", "architecture", "start"), [((12, 1), "8.9", 5), ((13, 0), "9.0", 11)])
def test_a_sample_of_the_rare_ones_compiles(library: Path, version: tuple[int, int], architecture: str, start: int, tmp_path: Path, require: Any) -> None:
    found = {(one.value.version.major, one.value.version.minor): one.value for one in nvrtc.find(SearchContext(site_dirs=package_dirs(()))).usable}
    require(version in found, f"NVRTC {version[0]}.{version[1]}", "run scripts/run_tests.sh, which installs it")
    one = parse_arch_list(architecture)[0]
    names = [name for name in kernel_names.rare_names_in(library)[start::25] if kernel_names.fitted(name, one)]
    assert len(names) > 3
    plans = [provider.plan_kernel(SPEC, name, one, found[version]) for name in names]
    jobs = device_code.choose_jobs(toolchain.resources.detect(), settings.current().max_jobs)
    for result in device_code.obtain(plans, BuildCache(tmp_path / "cache"), jobs=jobs, time_limit=120):
        entry = result.require()
        assert f".text.{entry.manifest.symbol}\0".encode() in entry.library.read_bytes()


@pytest.mark.parametrize(("version", "architecture"), [((12, 1), "8.0"), ((13, 0), "9.0")])
def test_score_modifiers_compile(library: Path, version: tuple[int, int], architecture: str, tmp_path: Path, require: Any) -> None:
    """One that looks things up, in the kernels of every direction: forward, backward and for few queries."""
    found = {(one.value.version.major, one.value.version.minor): one.value for one in nvrtc.find(SearchContext(site_dirs=package_dirs(()))).usable}
    require(version in found, f"NVRTC {version[0]}.{version[1]}", "run scripts/run_tests.sh, which installs it")
    tables = {"bias": torch.ones(4, 79), "document": torch.arange(40), "keep": torch.ones(40, dtype=torch.bool)}
    score_mod = ScoreMod("max(score + bias[h, q - k + 39], -9) if document[q] == document[k] and keep[k] else -inf", **tables)
    one = parse_arch_list(architecture)[0]
    kernels = {name.partition("<")[0]: name for name in kernel_names.rare_names_in(library) if name.endswith("Defined>") and kernel_names.fitted(name, one)}
    if architecture == "8.0":
        kernels = {kernel: name for kernel, name in kernels.items() if "hopper" not in kernel}
    assert len(kernels) == (3 if architecture == "8.0" else 6)
    plans = [provider.plan_kernel(SPEC, name, one, found[version], provider_texts.of(score_mod.number)) for name in kernels.values()]
    jobs = device_code.choose_jobs(toolchain.resources.detect(), settings.current().max_jobs)
    for result in device_code.obtain(plans, BuildCache(tmp_path / "cache"), jobs=jobs, time_limit=120):
        result.require()


def test_builds_ahead_of_time_have_all_tilings_and_no_modifiers(library: Path) -> None:
    ahead, rare = kernel_names.names_in(library), kernel_names.rare_names_in(library)
    assert not set(ahead) & set(rare)
    assert all(name.endswith("Plain>") for name in ahead if not re.search("_before|_after|_combine", name))
    tilings = [name for name in ahead if name.endswith("Plain>")]
    assert len(rare) == 5 * len(tilings)
    assert {re.sub(r"(Modified<[^>]*> ?|Defined)>$", "Plain>", name) for name in rare} == set(tilings)


def test_hoppers_own_kernels_are_told_by_their_names(library: Path) -> None:
    ampere, hopper, ptx = parse_arch_list("8.9")[0], parse_arch_list("9.0")[0], parse_arch_list("9.0+PTX")[0]._replace(sass=False)
    for name in (*kernel_names.names_in(library), *kernel_names.rare_names_in(library)):
        kernel = name.partition("<")[0].rpartition("::")[2]
        header = kernel_plan.defining_header(tuple(SPEC.cuda_sources), kernel, (("<csrc>", layout.csrc_root()),))
        own = "common/hopper.cuh" in (layout.csrc_root() / header.partition(">/")[2]).read_text()
        assert [kernel_names.fitted(name, one) is None for one in (ampere, hopper, ptx)] == [own, False, own]
        assert str(kernel_names.fitted(name, hopper)) == ("9.0a" if own else "9.0")


def test_builds_for_hopper_leave_out_what_hoppers_own_kernels_do(library: Path) -> None:
    names = kernel_names.names_in(library)
    ampere, hopper, ptx = parse_arch_list("8.9")[0], parse_arch_list("9.0")[0], parse_arch_list("9.0+PTX")[0]._replace(sass=False)
    for one in (ampere, ptx):
        assert kernel_names.ahead(names, one) == [name for name in names if "_hopper<" not in name]
    kept = kernel_names.ahead(names, hopper)
    assert {name for name in names if "_hopper<" in name} < set(kept) < set(names)
    assert not any(re.search(r"::(forward|backward)<", name) for name in kept), "all of their tilings are Hopper's own there"


def test_an_image_for_hopper_counts_as_whole_with_kernels_for_9_0a() -> None:
    def entry(kernel: str, architecture: str) -> Any:
        return SimpleNamespace(manifest=SimpleNamespace(kernel=kernel, cuda_version="13.0", architectures=(architecture,)))

    names = ["a::forward<f>", "a::forward_hopper<f>", "a::before<f>"]
    elsewhere = [entry(name, one) for name in (names[0], names[2]) for one in ("8.0", "compute_90")]
    for entries, expected in (
        ([*elsewhere, entry(names[1], "9.0a"), entry(names[2], "9.0")], ["8.0", "9.0", "compute_90"]),
        ([entry(names[0], "9.0"), entry(names[2], "9.0")], []),
    ):
        cache = SimpleNamespace(entries=lambda _, entries=entries: entries)
        assert device_code.kept_for(cache, "attention", names).get("13.0", []) == expected  # type: ignore[arg-type]
