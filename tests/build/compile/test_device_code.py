"""Kernels through NVRTC, as they are compiled at install and at first use. Needs no GPU and no
toolkit.

Of every family and every kernel that its library names: nothing is listed here.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import first_of
from processes import completed

from flexops import settings, toolchain
from flexops.build.compile import device_code, kernel_compiler
from flexops.build.describe import catalog, layout
from flexops.build.load import loader, provider
from flexops.build.plan import kernel_names, kernel_plan
from flexops.build.plan.cache_key import digest_fields
from flexops.build.store.cache import BuildCache
from flexops.compute_capability import Architecture, ComputeCapability, parse_arch_list
from flexops.errors import CompileError, ToolchainError
from flexops.inspection import cubin
from flexops.toolchain import nvrtc
from flexops.toolchain.context import SearchContext
from flexops.toolchain.installed_torch import package_dirs
from flexops.toolchain.nvrtc import DeviceCompiler

CSRC = layout.csrc_root()
SPECS = {spec.name: spec for spec in catalog.CATALOG}
OLDEST, NEWEST = (12, 1), (13, 0)
"""The CUDA versions whose NVRTC the test environment has: of the oldest pinned toolkit, and of the
tests' nvcc."""


@pytest.fixture(scope="module")
def compiler(nvrtc_of: Callable[..., DeviceCompiler]) -> DeviceCompiler:
    return nvrtc_of(NEWEST)


@pytest.fixture(scope="module")
def libraries(host_compiler: Any) -> dict[str, Path]:
    """Every family's library for CUDA: host code, built without a toolkit."""
    assert host_compiler
    results = build_without_kernels()
    return {name: result.require().library for name, result in results.items()}


def build_without_kernels() -> dict[str, Any]:
    from flexops.build.compile import building

    chosen = settings.current()
    plans = [loader.local_plan(spec, "cuda", chosen) for spec in catalog.CATALOG]
    return dict(zip(SPECS, building.obtain(plans, loader.open_cache(chosen)), strict=True))


def plan(
    expression: str, compiler: DeviceCompiler, architecture: str = "9.0", family: str = "rope"
) -> kernel_plan.KernelPlan:
    return kernel_plan.plan_kernel(
        family,
        SPECS[family].cuda_sources,
        expression,
        parse_arch_list(architecture)[0],
        compiler,
        CSRC,
    )


ROTATE = "flexops::rope::rotate<float>"


TYPES = {NEWEST: "bf16", OLDEST: "f16"}
LONG = ("attention", "few_rows", "int4_linear", "kvcache_attention")
"""Their rare kernels take minutes: by the oldest compiler only, which the default run leaves out.
It compiles them to PTX, since what they are made of is in the others as well."""
TWICE = (
    *LONG,
    "activation",
    "few_experts",
    "few_rows_chain",
    "fp8_linear",
    "gated_norm",
    "grouped_linear",
    "int4_few_rows",
    "int4_grouped",
    "norm",
    "norm_backward",
)
"""Families of which each compiler takes one type of 16 bits: the newest bfloat16, the oldest, among
the extra tests, float16. Their kernels are the same but for the name of the type; the other
families, a second or two each, show both."""


@pytest.mark.parametrize(("version", "architecture"), first_of((NEWEST, "9.0"), (OLDEST, "7.5")))
@pytest.mark.parametrize("family", SPECS)
def test_every_kernel_that_a_library_names_compiles(
    family, version, architecture, libraries, nvrtc_of
):
    compiler = nvrtc_of(version)
    names = kernel_names.names_in(libraries[family])
    assert names
    # of attention's hundreds of rare kernels tests/csrc/test_attention.py takes a sample
    left_out = family == "attention" or (family in LONG and version == NEWEST)
    rare = [] if left_out else kernel_names.rare_names_in(libraries[family])
    wanted = parse_arch_list(architecture)[0]
    # attention needs mma.sync of 8.0: the oldest that it runs on, then
    if not SPECS[family].runs_on(wanted.capability):
        wanted = wanted._replace(capability=ComputeCapability(*SPECS[family].least_capability))
    if family not in LONG or version == NEWEST:
        both = names + rare
        some = of_one_type(both, TYPES[version]) if family in TWICE else both
        compile_all(family, some, wanted, compiler)
        return
    compile_all(family, of_one_type(names, "f16"), wanted, compiler)
    step = 5 if family == OF_A_CACHE else 1
    compile_all(family, of_one_type(rare, "f16")[::step], wanted._replace(sass=False), compiler)


OF_A_CACHE = "kvcache_attention"
"""Its rare kernels are those of each shape with other options: the extra tests compile a fifth."""


@pytest.mark.slow
def test_every_rare_kernel_of_attention_over_a_cache_compiles(libraries, nvrtc_of):
    rare = of_one_type(kernel_names.rare_names_in(libraries[OF_A_CACHE]), "f16")
    wanted = parse_arch_list("8.0")[0]._replace(sass=False)
    compile_all(OF_A_CACHE, rare, wanted, nvrtc_of(OLDEST))


@pytest.mark.slow
@pytest.mark.parametrize("family", TWICE)
def test_every_kernel_of_float16_compiles(family, libraries, compiler):
    names = kernel_names.names_in(libraries[family])
    if family not in LONG:
        names += kernel_names.rare_names_in(libraries[family])
    others = sorted(set(names) - set(of_one_type(names, "bf16")))
    assert others
    compile_all(family, others, parse_arch_list("9.0")[0], compiler)


def of_one_type(names: list[str], kept: str) -> list[str]:
    """Without those in the other type of 16 bits that are there in this one, too."""
    other = "f16" if kept == "bf16" else "bf16"
    same = {name: re.sub(rf"\b{other}\b", kept, name) for name in names}
    return [name for name in names if same[name] == name or same[name] not in names]


def compile_all(
    family: str, names: list[str], wanted: Architecture, compiler: DeviceCompiler
) -> None:
    """Those of one header a few at a time, for which it is read once."""
    most = 6
    headers: dict[tuple[str, Architecture], list[kernel_plan.KernelPlan]] = {}
    for name in names:
        if kernel_names.fitted(name, wanted):
            one = plan(name, compiler, str(wanted), family)
            headers.setdefault((one.source, one.architecture), []).append(one)
    programs = [
        together(found[start : start + most])
        for found in headers.values()
        for start in range(0, len(found), most)
    ]
    jobs = device_code.choose_jobs(toolchain.resources.detect(), settings.current().max_jobs)
    for result in device_code.obtain(
        programs, loader.open_cache(settings.current()), jobs=jobs, time_limit=600
    ):
        entry = result.require()
        code = entry.library.read_bytes()
        symbols = entry.manifest.symbol.split("\n")
        assert len(set(symbols)) == max(1, len(result.plan.expressions))
        form = ".text.{}\0" if wanted.sass else ".entry {}("
        assert code.startswith(b"\x7fELF") == wanted.sass
        assert all(form.format(symbol).encode() in code for symbol in symbols)
        assert entry.manifest.kernel == result.plan.expression
        assert entry.manifest.compiler == str(compiler)


def together(plans: list[kernel_plan.KernelPlan]) -> kernel_plan.KernelPlan:
    """One program of kernels of one header."""
    first, *others = plans
    if not others:
        return first
    return first._replace(
        name=f"{first.name}-and-{len(others)}",
        key=digest_fields([("kernel", one.key) for one in plans]),
        expression=" ".join(one.expression for one in plans),
        expressions=tuple(one.expression for one in plans),
    )


LOAD, WAIT, TENSOR_CORE = 0x981, 0x82E, 0x23C
"""LDG; ACQBULK, which ``griddepcontrol.wait`` becomes; HMMA: low bits of an sm_90 instruction."""


@pytest.mark.parametrize("shape", ["0, true", "0, false", "1, false", "2, false"])
@pytest.mark.parametrize("rows", ["kDirect", "kStaged"])
def test_weights_are_asked_for_before_the_kernel_ahead_has_ended(shape, rows, compiler):
    name = f"flexops::few_rows::product<flexops::bf16, {shape}, flexops::few_rows::{rows}, true>"
    kinds = instructions(name, compiler)
    loads = kinds[: kinds.index(WAIT)].count(LOAD)
    assert loads >= 8, f"{loads} of a lane's first loads"
    assert TENSOR_CORE in kinds


@pytest.mark.parametrize("shape", ["0, true", "0, false", "1, false", "2, false"])
@pytest.mark.parametrize("rows", ["kDirect, 1", "kStaged, 2"])
def test_products_by_fma_ask_for_weights_early_and_use_no_tensor_cores(shape, rows, compiler):
    name = f"product_by_fma_hopper<flexops::bf16, {shape}, flexops::few_rows::{rows}>"
    kinds = instructions(f"flexops::few_rows::{name}", compiler)
    wanted = 8 if shape.startswith("0") else 16
    assert kinds[: kinds.index(WAIT)].count(LOAD) == wanted
    assert TENSOR_CORE not in kinds


def instructions(kernel: str, compiler: DeviceCompiler) -> list[int]:
    """What kind each instruction of a kernel is."""
    made = device_code.obtain(
        [plan(kernel, compiler, "9.0", "few_rows")],
        loader.open_cache(settings.current()), jobs=1, time_limit=600,
    )  # fmt: skip
    entry = next(iter(made)).require()
    code = cubin.sections(entry.library.read_bytes())[f".text.{entry.manifest.symbol}"]
    return [one & 0xFFF for (one, _) in struct.iter_unpack("<QQ", code)]


QUICK_FAMILY = "fp8"  # with fewest kernels of those that have all that older GPUs lack


@pytest.mark.extra
@pytest.mark.parametrize(
    "family",
    [
        family if family == QUICK_FAMILY else pytest.param(family, marks=pytest.mark.slow)
        for family in SPECS
    ],
)
def test_gpus_that_newer_toolkits_have_forgotten(family, libraries, nvrtc_of):
    """Pascal and Volta, where the NVRTC still knows them; optimizers' parameters are too large for
    Pascal, and attention needs Ampere."""
    for wanted in parse_arch_list("6.0;6.1;7.0"):
        if SPECS[family].runs_on(wanted.capability):
            compile_all(family, kernel_names.names_in(libraries[family]), wanted, nvrtc_of(OLDEST))


AMPERE = {
    "attention",
    "few_experts",
    "few_rows",
    "few_rows_chain",
    "grouped_linear",
    "int4_few_rows",
    "int4_grouped",
    "int4_linear",
    "kvcache_attention",
    "state_chunks",
}


def test_which_families_older_gpus_run():
    """Of the others plain PyTorch runs, and the loader says why."""
    refused = {
        str(one): {name for name, spec in SPECS.items() if not spec.runs_on(one)}
        for one in (ComputeCapability(6, 1), ComputeCapability(7, 0))
    }
    assert refused == {
        "6.1": {"adagrad", "adam", "adam8bit", "experts", "grad_norm", "lamb", "lion", "muon"}
        | AMPERE,
        "7.0": AMPERE,
    }


@pytest.mark.extra
@pytest.mark.usefixtures("host_compiler")
def test_a_build_for_older_gpus_says_where_no_kernels_run(compilers, tmp_path, require):
    """By the NVRTC that still knows them; a newer one's says which it left out."""
    require(
        {OLDEST, NEWEST} <= set(compilers),
        "NVRTC 12.1 and 13.0",
        "run scripts/run_tests.sh, which installs them",
    )

    def build(version: tuple[int, int], *families: str) -> tuple[dict[str, str], str]:
        home = tmp_path / str(version[0])
        home.mkdir()
        (home / "lib64").symlink_to(compilers[version].path.parent)
        command = [sys.executable, "-m", "flexops", "build", *families, "--device", "cuda",
            "--arch", "6.0;6.1;7.0;7.5"]  # fmt: skip
        environment = {**os.environ, "CUDA_HOME": str(home), "FLEXOPS_LOG": "quiet"}
        done = completed(command, env=environment)
        return {
            line.split()[0]: line for line in done.stdout.splitlines() if "KiB" in line
        }, done.stderr

    said, notes = build(OLDEST, QUICK_FAMILY, "lion", "attention")
    assert " kernels for 6.0, 6.1, 7.0, 7.5" in said[f"{QUICK_FAMILY}-cuda"]
    assert " kernels for 7.0, 7.5" in said["lion-cuda"]
    assert said["lion-cuda"].endswith("none run on 6.0, 6.1, plain PyTorch does")
    assert said["attention-cuda"].endswith(
        "0 kernels; none run on 6.0, 6.1, 7.0, 7.5, plain PyTorch does"
    )
    assert not notes
    said, notes = build(NEWEST, QUICK_FAMILY)
    assert " kernels for 7.5" in said[f"{QUICK_FAMILY}-cuda"]
    assert [line.partition(":")[2].strip().partition(":")[0] for line in notes.splitlines()] == [
        "6.0",
        "6.1",
        "7.0",
    ]


def test_no_kernel_is_left_out(libraries):
    """What headers define as kernels, launchers launch; and the other way round the compiler sees
    to it."""
    named = (kernel_names.names_in, kernel_names.rare_names_in)
    launched = {
        re.sub(r"<.*", "", name)
        for library in libraries.values()
        for names in named
        for name in names(library)
    }
    defined = set()
    for header in CSRC.glob("*/*.cuh"):
        text = re.sub(r"//.*", "", header.read_text())  # a comment may show how one is written
        for match in re.finditer(
            r"__global__ void"
            r" (?:__launch_bounds__\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*)?(\w+)(?:<\w+>)?\(",
            text,
        ):
            namespace = re.findall(r"^namespace ([\w:]+) \{", text[: match.start()], re.MULTILINE)
            defined.add(f"{namespace[-1] if namespace else ''}::{match[1]}")
    assert defined - launched <= {"flexops::doctor::square"}
    assert launched <= defined


def test_libraries_for_cuda_hold_no_device_code_and_need_nothing_of_cuda(libraries):
    for library in libraries.values():
        content = library.read_bytes()
        assert b".nv_fatbin" not in content
        assert b"cudart" not in content
        needed = completed(["readelf", "-d", str(library)]).stdout
        assert not re.search(r"NEEDED.*(cuda|nvrtc)", needed)


def test_the_names_of_clang_are_read_as_well():
    gcc = (
        b"constexpr const char* flexops::detail::kernel_name() [with auto function ="
        b" flexops::rope::rotate<float>]\0"
    )
    clang = b"N7flexops6detail6NameOfIXadL_ZNS_4rope6rotateIfEEvNS2_6ParamsEEEEE"
    assert {kernel_names.expression_of(name) for name in (gcc, clang)} == {ROTATE}
    others = {
        b"N7flexops6detail6NameOfIXadL_ZNS_4norm13forward_shortENS2_7ForwardEEEEE": (
            "flexops::norm::forward_short"
        ),
        b"N7flexops6detail6NameOfIXadL_ZNS_9grad_norm11norm_kernelILb1EEEvNS_5multi6LaunchINS2_8NormRuleIXT_EEEEEEEEE": (
            "flexops::grad_norm::norm_kernel<true>"
        ),
    }
    assert {name: kernel_names.expression_of(name) for name in others} == others


def test_nvrtc_takes_names_as_clang_has_them(tmp_path, compiler):
    names = {
        "lion": "flexops::lion::lion_kernel<(flexops::multi::Mode)0>",
        "norm": "flexops::norm::forward_ragged<flexops::norm::Any>",
    }
    results = device_code.obtain(
        [plan(name, compiler, family=family) for family, name in names.items()],
        BuildCache(tmp_path),
    )
    assert [result.error for result in results] == [None, None]


def test_a_second_build_compiles_nothing_and_an_edit_that_it_reaches_does(tmp_path, compiler):
    cache = BuildCache(tmp_path)
    first, again = (device_code.obtain([plan(ROTATE, compiler)], cache)[0] for _ in range(2))
    assert not first.cached
    assert again.cached
    assert first.require().directory == again.require().directory
    assert "<csrc>/rope/rope.cuh" in first.plan.files
    assert "<csrc>/common/elements.cuh" in first.plan.files
    assert not any("softmax" in name for name in first.plan.files)


def test_what_decides_about_the_code_is_in_its_key(compiler):
    plans = [
        plan(ROTATE, compiler),
        plan("flexops::rope::rotate<flexops::f16>", compiler),
        plan(ROTATE, compiler, "8.0"),
        plan(ROTATE, compiler, "compute_90"),
    ]
    plans.append(plan(ROTATE, compiler._replace(identity="NVRTC 13.0 of 1 bytes")))
    assert len({one.key for one in plans}) == len(plans)
    elsewhere = compiler._replace(
        path=Path("/elsewhere/libnvrtc.so.13"),
        builtins=Path("/elsewhere/libnvrtc-builtins.so.13.0"),
    )
    assert plan(ROTATE, elsewhere).key == plans[0].key


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_fails_in_a_thread_is_raised(tmp_path, compiler, monkeypatch, jobs):
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(device_code, "_single_flight", fail)
    plans = [plan(ROTATE, compiler), plan(ROTATE, compiler, "8.0")]
    with pytest.raises(OSError, match="No space"):
        device_code.obtain(plans, BuildCache(tmp_path), jobs=jobs)


def test_ptx_for_a_gpu_that_the_compiler_does_not_know(tmp_path, compiler):
    """The driver compiles it there; the note says so."""
    choice = toolchain.architectures.resolve(
        None, compiler.version, detected=(ComputeCapability(15, 0),), known=toolchain.compat.rules()
    )
    assert str(choice.architectures[0]).startswith("compute_")
    assert "newer than" in choice.notes[0]
    one = kernel_plan.plan_kernel(
        "rope", SPECS["rope"].cuda_sources, ROTATE, choice.architectures[0], compiler, CSRC
    )
    entry = device_code.obtain([one], BuildCache(tmp_path))[0].require()
    assert f".entry {entry.manifest.symbol}" in entry.library.read_text()


def test_code_of_one_architecture_serves_the_gpus_that_can_run_it():
    assert list(provider.machine_code(ComputeCapability(8, 9)))[:2] == ["sm_89a", "sm_89"]
    assert "sm_80" in list(provider.machine_code(ComputeCapability(8, 9)))
    assert "sm_90" not in list(provider.machine_code(ComputeCapability(8, 9)))
    assert next(provider.ptx(ComputeCapability(9, 0))) == "compute_90"


# ---- bad days ----


def csrc_with(folder: Path, body: str) -> Path:
    """A family of one kernel."""
    (folder / "odd").mkdir(parents=True)
    (folder / "odd" / "odd.cuh").write_text(
        "#pragma once\nnamespace odd {\n__global__ void kernel(const float* x, float* out)"
        f" {{\n{body}\n}}\n}}\n"
    )
    (folder / "odd" / "odd_cuda.cpp").write_text('#include "odd/odd.cuh"\n')
    return folder


def odd_plan(
    csrc: Path, compiler: DeviceCompiler, architecture: str = "9.0"
) -> kernel_plan.KernelPlan:
    return kernel_plan.plan_kernel(
        "odd",
        ("odd/odd_cuda.cpp",),
        "odd::kernel",
        parse_arch_list(architecture)[0],
        compiler,
        csrc,
    )


def failure(result: device_code.KernelResult) -> str:
    with pytest.raises(CompileError) as caught:
        result.require()
    return str(caught.value)


def test_an_error_names_the_kernel_the_line_and_the_compiler(tmp_path, compiler):
    csrc = csrc_with(tmp_path / "csrc", "out[0] = nothing_of_that_name;")
    said = failure(
        device_code.obtain([odd_plan(csrc, compiler)], BuildCache(tmp_path / "cache"))[0]
    )
    assert "odd::kernel" in said
    assert "odd.cuh(4): error" in said
    assert "nothing_of_that_name" in said
    assert "sm_90 with NVRTC 13.0" in said


def test_a_compiler_that_hangs_is_stopped_and_one_that_dies_is_said(tmp_path, compiler):
    cache = BuildCache(tmp_path / "cache")
    one = odd_plan(csrc_with(tmp_path / "csrc", "out[0] = x[0];"), compiler)
    worker = tmp_path / "worker.py"
    ends = {
        "time.sleep(600)": "not done after 1 s",
        "os.kill(os.getpid(), 9)": "signal 9",
        "os._exit(3)": "status 3",
    }
    for end, said in ends.items():
        worker.write_text(f"import os, time; {end}")
        original, kernel_compiler._WORKER = kernel_compiler._WORKER, worker
        try:
            limit = 1 if "sleep" in end else 600
            result = device_code.obtain([one], cache, time_limit=limit)[0]
        finally:
            kernel_compiler._WORKER = original
        assert said in failure(result)
        assert "odd::kernel" in failure(result)
        assert ("fix: more memory" in failure(result)) == ("9" in end), (
            "the system kills what takes too much"
        )
    assert device_code.obtain([one], cache, time_limit=600)[0].entry, "nothing is left of it"


def test_a_compiler_that_runs_out_of_memory_says_so_and_names_the_kernel(
    tmp_path, compiler, monkeypatch
):
    """With a little more memory each time: the library cannot be mapped, then one of the compilers
    in it fails, each in its own words; then it compiles."""
    one = odd_plan(csrc_with(tmp_path / "csrc", "out[0] = x[0];"), compiler)
    worker, real = tmp_path / "worker.py", str(kernel_compiler._WORKER)
    monkeypatch.setattr(kernel_compiler, "_WORKER", worker)
    found, size, step = [], compiler.path.stat().st_size, 4 * 2**20
    for limit in range(size, 4 * size, step):
        worker.write_text(
            f"import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, ({limit},) * 2);"
            f" runpy.run_path({real!r}, run_name='__main__')"
        )
        result = device_code.obtain([one], BuildCache(tmp_path / "cache"), time_limit=600)[0]
        if result.entry:
            break
        said = failure(result)
        assert "odd::kernel" in said
        assert "fix: more memory" in said, said
        found.append(said.partition("found: ")[2].partition("\n  fix:")[0])
    assert result.entry, "nothing is left of it"
    assert any("failed to map" in one for one in found)
    assert any("failed to map" not in one for one in found), found


def test_nvrtcs_own_word_for_no_memory_is_said(tmp_path, host_compiler):
    names = ("CreateProgram", "AddNameExpression", "DestroyProgram", "GetProgramLog")
    source = 'extern "C" {\n' + "".join(f"int nvrtc{name}() {{ return 0; }}\n" for name in names)
    source += (
        "int nvrtcGetProgramLogSize(void*, unsigned long* size) { *size = 1; return 0; }\nint"
        " nvrtcCompileProgram() { return 1; }\n"
    )
    source += (
        "const char* nvrtcGetErrorString(int status) { return status == 1 ?"
        ' "NVRTC_ERROR_OUT_OF_MEMORY" : "another"; }\n}\n'
    )
    (tmp_path / "nvrtc.cpp").write_text(source)
    library = tmp_path / "libnvrtc.so.13"
    subprocess.run(
        [host_compiler.path, "-shared", "-fPIC", str(tmp_path / "nvrtc.cpp"), "-o", str(library)],
        check=True,
    )
    without = DeviceCompiler("nvrtc", library, toolchain.compat.Version((13, 0)), "stub", library)
    said = failure(device_code.obtain([plan(ROTATE, without)], BuildCache(tmp_path / "cache"))[0])
    assert ROTATE in said
    assert "NVRTC_ERROR_OUT_OF_MEMORY" in said
    assert "fix: more memory" in said


def another_version(folder: Path) -> None:
    (folder / "libnvrtc-builtins.so.13.0").rename(folder / "libnvrtc-builtins.so.12.1")


NO_BUILTINS = "libnvrtc-builtins is not beside it"


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "libnvrtc-builtins.so.13.0").unlink(), NO_BUILTINS),
        (lambda folder: (folder / "libnvrtc.so.13").unlink(), ""),
        (
            another_version,
            f"{NO_BUILTINS}, only libnvrtc-builtins.so.12.1, which is another version's",
        ),
    ],
)
def test_an_incomplete_nvrtc_is_passed_over_with_its_reason(tmp_path, break_it, said):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (folder / name).write_bytes(b"")
    context = SearchContext(site_dirs=(str(tmp_path),), root=str(tmp_path / "none"))
    assert [one.value.version.parts for one in nvrtc.find(context).usable] == [(13, 0)]
    break_it(folder)
    search = nvrtc.find(context)
    assert not search.usable
    assert [one.reason for one in search.rejected] == ([said] if said else [])


def test_a_broken_nvrtc_is_one_clear_error(tmp_path):
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (tmp_path / name).write_bytes(b"not a library")
    broken = DeviceCompiler(
        "nvrtc",
        tmp_path / "libnvrtc.so.13",
        toolchain.compat.Version((13, 0)),
        "broken",
        tmp_path / "libnvrtc-builtins.so.13.0",
    )
    said = failure(device_code.obtain([plan(ROTATE, broken)], BuildCache(tmp_path / "cache"))[0])
    assert ROTATE in said
    assert "libnvrtc-builtins.so.13.0" in said
    assert "fix: " in said
    assert '--force-reinstall "nvidia-cuda-nvrtc==13.0.*"' in said


def test_builtins_of_another_minor_are_reported_with_the_fix(tmp_path, compiler, compilers):
    """As half an upgrade leaves them: the library then asks for its own by name, and finds none."""
    (tmp_path / "libnvrtc.so.13").symlink_to(compiler.path)
    (tmp_path / "libnvrtc-builtins.so.13.2").symlink_to(str(compilers[OLDEST].builtins))
    mixed = nvrtc.read(str(tmp_path), SearchContext())
    assert isinstance(mixed, DeviceCompiler)
    said = failure(device_code.obtain([plan(ROTATE, mixed)], BuildCache(tmp_path / "cache"))[0])
    assert "failed to open libnvrtc-builtins.so.13.0" in said
    assert '--force-reinstall "nvidia-cuda-nvrtc==13.2.*"' in said


def test_a_search_path_to_another_nvrtc_changes_nothing(tmp_path, compiler, monkeypatch):
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (tmp_path / name).write_bytes(b"another one")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert device_code.obtain([plan(ROTATE, compiler)], BuildCache(tmp_path / "cache"))[0].entry


def test_of_torchs_cuda_homes_and_condas_torchs_is_taken_and_the_others_have_their_reason(tmp_path):
    from builds import TORCH

    places = {"13.0": "site/nvidia/cu13/lib", "13.2": "conda/lib", "12.8": "home/lib64"}
    for version, place in places.items():
        (tmp_path / place).mkdir(parents=True)
        for name in (f"libnvrtc.so.{version.partition('.')[0]}", f"libnvrtc-builtins.so.{version}"):
            (tmp_path / place / name).write_bytes(b"")
    site, conda, home = (str(tmp_path / name) for name in ("site", "conda", "home"))
    context = SearchContext(
        site_dirs=(site,), conda_prefix=conda, cuda_home=home, root=str(tmp_path / "none")
    )

    def chosen(cuda: str | None) -> tuple[str, dict[str, str]]:
        choice = nvrtc.choose(
            nvrtc.find(context).usable, TORCH._replace(cuda=cuda), toolchain.compat.rules()
        )
        assert choice.value
        versions = {str(tmp_path / place): version for version, place in places.items()}
        return choice.value.version.major_minor, {
            versions[str(one.path.parent)]: one.reason for one in choice.rejected
        }

    other_major = "CUDA 12.8 is of another major than torch's CUDA 13.0"
    assert chosen("13.0") == (
        "13.0",
        {"13.2": "CUDA 13.2 would do; 13.0 is of the same minor as torch", "12.8": other_major},
    )
    assert chosen("13.3")[0] == "13.2"
    assert chosen("13.3")[1]["13.0"] == "CUDA 13.0 would do; 13.2 is nearer to torch"
    assert chosen("12.8")[0] == "12.8"
    assert chosen(None) == (
        "12.8",
        {
            "13.0": "CUDA 13.0 would do; CUDA_HOME has 12.8",
            "13.2": "CUDA 13.2 would do; CUDA_HOME has 12.8",
        },
    )


@pytest.mark.usefixtures("compiler")
def test_of_several_the_one_of_torchs_own_version_is_taken():
    from builds import OLD_TORCH, TORCH

    found = nvrtc.find(SearchContext(site_dirs=package_dirs(()))).usable
    known = toolchain.compat.rules()
    for torch, version in (
        (TORCH, NEWEST),
        (OLD_TORCH, OLDEST),
        (TORCH._replace(cuda=None), NEWEST),
    ):
        choice = nvrtc.choose(found, torch, known)
        assert choice.value
        assert choice.value.version.parts == version
    refused = nvrtc.choose(found, OLD_TORCH, known).rejected
    assert any("another major" in one.reason for one in refused)


def test_where_there_is_no_compiler_the_error_names_the_package(monkeypatch):
    from builds import OLD_TORCH

    from flexops.toolchain.select import Choice

    monkeypatch.setattr(toolchain, "device_compiler", lambda _: Choice(None, (), (), ("nowhere",)))
    monkeypatch.setattr(toolchain, "torch_build", lambda: OLD_TORCH)
    with pytest.raises(ToolchainError) as caught:
        provider.compiler_for(settings.current(), ())
    assert "nvidia-cuda-nvrtc-cu12==12.1.*" in caught.value.fix


def test_a_damaged_cubin_is_compiled_again(tmp_path, compiler):
    cache, one = BuildCache(tmp_path), plan(ROTATE, compiler)
    entry = device_code.obtain([one], cache)[0].require()
    whole = entry.library.read_bytes()
    entry.library.write_bytes(whole[: len(whole) // 2])
    result = device_code.obtain([one], cache)[0]
    assert not result.cached
    assert result.require().library.read_bytes() == whole


def test_processes_that_want_the_same_kernel_compile_it_once(tmp_path, compiler):
    code = (
        "import sys; sys.modules['torch'] = None\nfrom pathlib import Path\nfrom"
        " flexops.build.describe import catalog, layout; from flexops.build.plan import"
        " kernel_plan\nfrom flexops.build.compile import device_code; from"
        " flexops.build.store.cache import BuildCache\nfrom flexops.toolchain.nvrtc import"
        " DeviceCompiler; from flexops.toolchain.version import Version\nfrom"
        " flexops.compute_capability import parse_arch_list\ncompiler = DeviceCompiler('nvrtc',"
        f" Path({str(compiler.path)!r}), Version((13, 0)), {compiler.identity!r},"
        f" Path({str(compiler.builtins)!r}))\nplan = kernel_plan.plan_kernel('rope',"
        f" catalog.find('rope').cuda_sources, {ROTATE!r}, parse_arch_list('9.0')[0], compiler,"
        " layout.csrc_root())\nprint(device_code.obtain([plan],"
        f" BuildCache(Path({str(tmp_path)!r})))[0].cached)\n"
    )
    from builds import child_environment

    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=child_environment()
        )
        for _ in range(3)
    ]
    said = sorted(child.communicate(timeout=600)[0].strip() for child in children)
    assert said == ["False", "True", "True"]


def test_an_interrupt_leaves_no_compiler_behind(tmp_path, compiler):
    csrc = csrc_with(tmp_path / "csrc", "out[0] = x[0];")
    worker = tmp_path / "worker.py"
    worker.write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'a').write(f'{{os.getpid()}} ');"
        " time.sleep(600)"
    )
    plans = [odd_plan(csrc, compiler, architecture) for architecture in ("8.0", "9.0")]

    def interrupt() -> None:
        while not (tmp_path / "pid").exists() or len((tmp_path / "pid").read_text().split()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    original, kernel_compiler._WORKER = kernel_compiler._WORKER, worker
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            device_code.obtain(plans, BuildCache(tmp_path / "cache"), jobs=2)
    finally:
        kernel_compiler._WORKER = original
    for pid in (tmp_path / "pid").read_text().split():
        until = time.monotonic() + 300
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < until, "it still runs"
            time.sleep(0.01)


def test_nvcc_is_the_second_provider_of_the_same_code(tmp_path, nvcc_toolkit, compiler):
    other = nvrtc.from_nvcc(nvcc_toolkit)
    ours, theirs = (
        device_code.obtain([plan(ROTATE, one)], BuildCache(tmp_path))[0].require()
        for one in (compiler, other)
    )
    assert ours.manifest.symbol == theirs.manifest.symbol
    assert theirs.manifest.compiler.startswith("nvcc")
    ptx = [
        device_code.obtain([plan(ROTATE, one, "compute_90")], BuildCache(tmp_path))[0].require()
        for one in (compiler, other)
    ]
    instructions = [
        [
            line.split("//")[0].strip()
            for line in entry.library.read_text().splitlines()
            if line.startswith("\t")
        ]
        for entry in ptx
    ]
    opcodes = [
        [line.split()[0] for line in lines if line and not line.startswith((".", "//"))]
        for lines in instructions
    ]
    assert opcodes[0] == opcodes[1]
