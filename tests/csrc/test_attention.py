"""Attention's kernels that are compiled at their first launch only: a sample of them through both
NVRTCs, and which architecture each kernel needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import score_mod_cases
import torch
from marks import first_of
from processes import completed

from flexops import settings, toolchain
from flexops.build.compile import building, device_code
from flexops.build.describe import catalog, layout
from flexops.build.load import loader, provider, provider_texts
from flexops.build.plan import kernel_names, kernel_plan
from flexops.build.store.cache import BuildCache, Entry
from flexops.compute_capability import parse_arch_list
from flexops.ops._score_mod import ScoreMod

SPEC = catalog.find("attention")


@pytest.fixture(scope="module")
def library(host_compiler: Any) -> Path:  # noqa: ARG001
    chosen = settings.current()
    return (
        building.obtain([loader.local_plan(SPEC, "cuda", chosen)], loader.open_cache(chosen))[0]
        .require()
        .library
    )


def compiled(plans: list[kernel_plan.KernelPlan], tmp_path: Path) -> list[Entry]:
    jobs = device_code.choose_jobs(toolchain.resources.detect(), settings.current().max_jobs)
    cache = BuildCache(tmp_path / "cache")
    return [one.require() for one in device_code.obtain(plans, cache, jobs=jobs, time_limit=120)]


@pytest.mark.parametrize(
    ("version", "architecture", "start", "step"),
    first_of(((13, 0), "9.0", 11, 50), ((12, 1), "8.9", 5, 25)),
)
def test_a_sample_of_the_rare_ones_compiles(
    library, version, architecture, start, step, tmp_path, nvrtc_of
):
    one = parse_arch_list(architecture)[0]
    names = [
        name
        for name in kernel_names.rare_names_in(library)[start::step]
        if kernel_names.fitted(name, one)
    ]
    assert len(names) > 3
    plans = [provider.plan_kernel(SPEC, name, one, nvrtc_of(version)) for name in names]
    for entry in compiled(plans, tmp_path):
        assert f".text.{entry.manifest.symbol}\0".encode() in entry.library.read_bytes()


LOOKED_UP = (
    "max(score + bias[h, q - k + 39], -9) if document[q] == document[k] and keep[k] else -inf"
)
LONG = (
    "sin(exp(tanh(sqrt(abs(score)) / 9))) * sigmoid(log(score * score + 1)) * cos(score) +"
    f" ({LOOKED_UP})"
)


@pytest.mark.parametrize(
    ("version", "architecture", "text", "at_once"),
    first_of(((13, 0), "9.0", LOOKED_UP, 0), ((13, 0), "9.0", LONG, 8), ((12, 1), "8.0", LONG, 8)),
)
def test_score_modifiers_compile(library, version, architecture, text, at_once, tmp_path, nvrtc_of):
    """Some that look things up, in the kernels of every direction: forward, backward and for few
    queries."""
    tables = {
        "bias": torch.ones(4, 79),
        "document": torch.arange(40),
        "keep": torch.ones(40, dtype=torch.bool),
    }
    score_mod = ScoreMod(text, **tables)
    assert f"FLEXOPS_SCORES_AT_ONCE {at_once}\n" in provider_texts.of(score_mod.number)
    one = parse_arch_list(architecture)[0]
    kernels = {
        name.partition("<")[0]: name
        for name in kernel_names.rare_names_in(library)
        if name.endswith("Defined>") and kernel_names.fitted(name, one)
    }
    if architecture == "8.0":
        kernels = {kernel: name for kernel, name in kernels.items() if "hopper" not in kernel}
    assert len(kernels) == (3 if architecture == "8.0" else 6)
    plans = [
        provider.plan_kernel(
            SPEC, name, one, nvrtc_of(version), provider_texts.of(score_mod.number)
        )
        for name in kernels.values()
    ]
    compiled(plans, tmp_path)


@pytest.mark.extra
@pytest.mark.parametrize(
    ("version", "architecture", "kernel", "step"),
    [
        ((12, 1), "8.0", "backward", 1),
        ((13, 0), "9.0", "forward_hopper", 4),
        pytest.param((13, 0), "9.0", "forward_hopper", 1, marks=pytest.mark.slow),
    ],
)
def test_functions_of_flex_attention_compile(
    library, version, architecture, kernel, step, tmp_path, nvrtc_of
):
    """The backward kernel for 8.0 has the derivative, too; of the forward one for 9.0a a sample
    shows that it takes them. To PTX: kernels above show that it becomes machine code."""
    one = parse_arch_list(architecture)[0]._replace(sass=False)
    names = [
        name
        for name in kernel_names.rare_names_in(library)
        if f"::{kernel}<" in name and name.endswith("Defined>")
    ]
    numbers = sorted({ScoreMod(function).number for function in score_mod_cases.FUNCTIONS.values()})
    assert len(numbers) > 50
    plans = [
        provider.plan_kernel(SPEC, names[0], one, nvrtc_of(version), provider_texts.of(number))
        for number in numbers[::step]
    ]
    compiled(plans, tmp_path)


LOOP = """
#include "attention/attention_softmax.cuh"
#include <cstdio>
namespace flexops::attention {
template <int kAtOnce> struct Numbered {
  static constexpr bool kPlain = false;
  float operator()(float score, int row, int key, float& slope) const { return slope = score + 100 * row + key / 128.0f, slope; }
  float value(float score, int row, int key) const { float slope; return (*this)(score, row, key, slope); }
};
template <> inline constexpr int kScoresAtOnce<Numbered<8>> = 8;
template <int kAtOnce, int N> void run(float (&scores)[N], float (&gradient)[N], float (&both)[N]) {
  const float delta[2] = {3, 5};
  for (int i = 0; i < N; ++i) scores[i] = i, gradient[i] = 2 * i, both[i] = i;
  modify(scores, Numbered<kAtOnce>(), 7, 11);
  modify(both, gradient, delta, Numbered<kAtOnce>(), 7, 11);
}
template <int N> int differences() {
  float all[3][N], looped[3][N];
  run<0>(all[0], all[1], all[2]), run<8>(looped[0], looped[1], looped[2]);
  int found = 0;
  for (int i = 0; i < 3 * N; ++i) found += all[i / N][i % N] != looped[i / N][i % N];
  return found;
}
}  // namespace flexops::attention
int main() { printf("%d %d %d", flexops::attention::differences<8>(), flexops::attention::differences<40>(), flexops::attention::differences<88>()); }
"""


def test_a_loop_over_scores_gives_each_its_place(tmp_path, host_compiler):
    """Of a long modifier, code for eight scores is gone through again with the registers moved: run
    on the CPU, it does what code for all of them does."""
    (tmp_path / "loop.cpp").write_text(LOOP)
    command = [
        str(host_compiler.path),
        "-std=c++17",
        "-O1",
        f"-I{layout.csrc_root()}",
        str(tmp_path / "loop.cpp"),
        "-o",
        str(tmp_path / "loop"),
    ]
    subprocess.run(command, check=True)
    assert completed([str(tmp_path / "loop")]).stdout == "0 0 0"


def test_builds_ahead_of_time_have_all_tilings_but_no_modifiers_and_no_backward_of_float16(
    library,
):
    ahead, rare = kernel_names.names_in(library), kernel_names.rare_names_in(library)
    assert not set(ahead) & set(rare)
    assert all(
        name.endswith("Plain>")
        for name in ahead
        if not re.search("_before|_after|_combine|_sums", name)
    )
    modified = [name for name in rare if re.search("Modified|Defined", name)]
    of_float16 = {name.replace("bf16", "f16") for name in ahead}
    assert (
        of_float16 - set(ahead)
        == {name for name in of_float16 if "::backward" in name}
        == set(rare) - set(modified)
    )
    tilings = {name for name in (*ahead, *rare) if name.endswith("Plain>")}
    assert len(modified) == 5 * len(tilings)
    assert {
        re.sub(r"(Modified<[^>]*> ?|Defined)>$", "Plain>", name) for name in modified
    } == tilings


def test_hoppers_own_kernels_are_recognized_by_their_names(library):
    ampere, hopper, ptx = (
        parse_arch_list("8.9")[0],
        parse_arch_list("9.0")[0],
        parse_arch_list("9.0+PTX")[0]._replace(sass=False),
    )
    for name in (*kernel_names.names_in(library), *kernel_names.rare_names_in(library)):
        kernel = name.partition("<")[0].rpartition("::")[2]
        header = kernel_plan.defining_header(
            tuple(SPEC.cuda_sources), kernel, (("<csrc>", layout.csrc_root()),)
        )
        own = "common/wgmma.cuh" in (layout.csrc_root() / header.partition(">/")[2]).read_text()
        assert [kernel_names.fitted(name, one) is None for one in (ampere, hopper, ptx)] == [
            own,
            False,
            own,
        ]
        assert str(kernel_names.fitted(name, hopper)) == ("9.0a" if own else "9.0")


def test_builds_for_hopper_leave_out_what_hoppers_own_kernels_do(library):
    names = kernel_names.names_in(library)
    ampere, hopper, ptx = (
        parse_arch_list("8.9")[0],
        parse_arch_list("9.0")[0],
        parse_arch_list("9.0+PTX")[0]._replace(sass=False),
    )
    for one in (ampere, ptx):
        assert kernel_names.ahead(names, one) == [name for name in names if "_hopper<" not in name]
    kept = kernel_names.ahead(names, hopper)
    assert {name for name in names if "_hopper<" in name} < set(kept) < set(names)
    assert not any(re.search(r"::(forward|backward)<", name) for name in kept), (
        "all of their tilings are Hopper's own there"
    )


def test_an_image_for_hopper_counts_as_whole_with_kernels_for_9_0a():
    def entry(kernel: str, architecture: str) -> Any:
        return SimpleNamespace(
            manifest=SimpleNamespace(
                kernel=kernel, cuda_version="13.0", architectures=(architecture,)
            )
        )

    names = ["a::forward<f>", "a::forward_hopper<f>", "a::before<f>"]
    elsewhere = [entry(name, one) for name in (names[0], names[2]) for one in ("8.0", "compute_90")]
    for entries, expected in (
        (
            [*elsewhere, entry(names[1], "9.0a"), entry(names[2], "9.0")],
            ["8.0", "9.0", "compute_90"],
        ),
        ([entry(names[0], "9.0"), entry(names[2], "9.0")], []),
    ):
        cache = SimpleNamespace(entries=lambda _, entries=entries: entries)
        assert device_code.kept_for(cache, "attention", names).get("13.0", []) == expected  # type: ignore[arg-type]
