"""A build is a value: what the plan says for each device, torch, architecture list and machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from builds import CUDA, GIB, HOST, OLD_TORCH, ROOM, SQUARE, TOOLS, TORCH, paper_plan

from flexops.build.describe import catalog
from flexops.build.plan.plan import BuildPlan, Step, for_nvcc, spare_threads
from flexops.errors import ToolchainError
from flexops.toolchain.model import HostCompiler, Version
from flexops.toolchain.resources import Resources

OLD_TOOLS = TOOLS._replace(torch=OLD_TORCH)
ADAM = catalog.find("adam")


def step(plan: BuildPlan, output: str) -> Step:
    return next(step for step in plan.steps if step.output == output)


def test_cpu_plan():
    plan = paper_plan(ADAM, "cpu")
    assert [(step.kind, step.output) for step in plan.steps] == [
        ("host", "binding.o"),
        ("host", "adam_cpu_baseline.o"),
        ("host", "adam_cpu_avx2.o"),
        ("host", "adam_cpu_avx512.o"),
        ("link", "torch_stub.so"),
        ("link", "flexops_adam_cpu.so"),
    ]
    assert plan.architectures == ()
    assert plan.cuda_version == ""
    assert plan.isa_levels == ("baseline", "avx2", "avx512")
    assert not any("cudart" in word or word.startswith("-lcuda") for word in plan.steps[-1].command)


def test_a_written_binding_is_one_object_for_both_device_types_and_the_link_says_which():
    cpu, cuda = (paper_plan(ADAM, device) for device in ("cpu", "cuda"))
    assert step(cpu, "binding.o") == step(cuda, "binding.o")
    assert cpu.alike(step(cpu, "binding.o")) == cuda.alike(step(cuda, "binding.o")) != ()
    said = [
        {word for word in plan.steps[-1].command if "=flexops_" in word} for plan in (cpu, cuda)
    ]
    assert said == [
        {"-Wl,--defsym=flexops_on_cuda=flexops_no", "-Wl,--defsym=flexops_without_cuda=flexops_no"},
        {
            "-Wl,--defsym=flexops_on_cuda=flexops_yes",
            "-Wl,--defsym=flexops_without_cpu=flexops_yes",
        },
    ]
    zig = HostCompiler(
        Path("/zig/zig"), Version((0, 17)), "zig 0.17", "zig", "aarch64-linux-gnu.2.28"
    )
    assert (
        "-DFLEXOPS_DEVICE_CPU=1"
        in step(
            paper_plan(ADAM, "cpu", TOOLS._replace(host=zig, launcher=None)), "binding.o"
        ).command
    )
    by_hand = catalog.find("kvcache_attention")
    assert "-DFLEXOPS_DEVICE_CUDA=1" in step(paper_plan(by_hand, "cuda"), "binding.o").command


def test_isa_levels_are_named_and_nothing_is_native():
    plan = paper_plan(ADAM, "cpu")
    words = [word for one in plan.steps for word in one.command]
    assert "-march=native" not in words
    assert not any(word.startswith("-mavx") for word in step(plan, "adam_cpu_baseline.o").command)
    assert "-mavx512f" not in step(plan, "adam_cpu_avx2.o").command
    assert {"-mavx512f", "-mfma", "-DFLEXOPS_ISA=avx512"} <= set(
        step(plan, "adam_cpu_avx512.o").command
    )


def test_only_the_binding_sees_torch():
    # with the stable ABI not even that: our own header declares what it calls
    for tools, seen in ((TOOLS, []), (OLD_TOOLS, ["binding.o"])):
        plan = paper_plan(ADAM, "cuda", tools)
        assert [
            one.output
            for one in plan.steps
            if any("/py/torch/include" in word for word in one.command)
        ] == seen


def test_zig_compiles_for_another_machine():
    zig = HostCompiler(
        Path("/zig/zig"), Version((0, 17)), "zig 0.17", "zig", "aarch64-linux-gnu.2.28"
    )
    plan = paper_plan(ADAM, "cpu", TOOLS._replace(host=zig, machine="aarch64", launcher=None))
    assert plan.isa_levels == ("baseline",)
    assert [one.output for one in plan.steps] == [
        "binding.o",
        "adam_cpu_baseline.o",
        "torch_stub.so",
        "runtime_stub.so",
        "flexops_adam_cpu.so",
    ]
    assert all(
        one.command[0] == "/zig/zig" and one.command[2:4] == ("-target", "aarch64-linux-gnu.2.28")
        for one in plan.steps
    )
    assert plan.steps[-1].command[1] == "cc", (
        "c++ would link a C++ library of zig's own, whose exceptions torch does not catch"
    )
    assert not any(word.startswith("-m") for one in plan.steps for word in one.command)
    assert plan.trusted_roots == ("/py/torch", "/zig")


def test_stable_abi_where_torch_has_it():
    words = step(paper_plan(ADAM, "cuda"), "binding.o").command
    assert {"-DFLEXOPS_STABLE_ABI=0x020b000000000000", "-std=c++17"} <= set(words)
    assert not any("GLIBCXX_USE_CXX11_ABI" in word for word in words)
    assert "-lc10" not in paper_plan(ADAM, "cuda").steps[-1].command


def test_classic_abi_for_an_older_torch():
    plan = paper_plan(ADAM, "cuda", OLD_TOOLS)
    words = step(plan, "binding.o").command
    assert {"-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0"} <= set(words)
    assert not any("STABLE_ABI" in word for word in words)
    assert plan.torch_abi == "torch-2.4-cxx11abi0-cu12.1"
    assert "-lc10" in plan.steps[-1].command
    assert (
        step(plan, "binding.o").memory_bytes
        > step(paper_plan(ADAM, "cuda"), "binding.o").memory_bytes
    )


def test_cpu_objects_have_the_abi_of_torch():
    for tools, flag in (
        (TOOLS, "-D_GLIBCXX_USE_CXX11_ABI=1"),
        (OLD_TOOLS, "-D_GLIBCXX_USE_CXX11_ABI=0"),
    ):
        assert flag in step(paper_plan(ADAM, "cpu", tools), "adam_cpu_avx2.o").command


def test_a_library_for_cuda_is_host_code_and_needs_no_toolkit():
    """Its kernels are artifacts of their own; which there are, it says itself."""
    plan = paper_plan(ADAM, "cuda", TOOLS._replace(cuda=None))
    assert [(step.kind, step.output) for step in plan.steps] == [
        ("host", "binding.o"),
        ("host", "adam_cuda.o"),
        ("link", "torch_stub.so"),
        ("link", "flexops_adam_cuda.so"),
    ]
    words = [word for one in plan.steps for word in one.command]
    assert not any(
        "nvcc" in word or "cudart" in word or word.startswith("-gencode") or "/cuda/" in word
        for word in words
    )
    assert plan.architectures == ()
    assert plan.cuda_version == ""
    assert plan == paper_plan(ADAM, "cuda"), "a toolkit that is there changes nothing"


def test_static_libraries_are_hidden_and_torch_cuda_is_not_needed():
    link = paper_plan(ADAM, "cuda").steps[-1].command
    assert "-Wl,--exclude-libs,ALL" in link
    assert not {"-lcuda", "-lcudart", "-ltorch_cuda", "-lc10_cuda", "-ltorch_python"} & set(link)


def test_through_the_classic_abi_c_plus_plus_objects_cross_so_a_static_libstdcxx_stays_visible():
    link = paper_plan(ADAM, "cuda", OLD_TOOLS).steps[-1].command
    assert "-Wl,--exclude-libs,ALL" not in link


def test_the_stable_abi_is_linked_against_a_stub_in_the_name_of_torchs_library():
    plan = paper_plan(ADAM, "cuda")
    stub, link = plan.steps[-2:]
    assert stub.output in link.command
    assert stub.output in link.inputs
    assert "-Wl,-soname,libtorch_cpu.so" in stub.command
    assert "-Wl,-z,defs" in link.command
    assert not any(word == "-ltorch_cpu" or "/py/torch/lib" in word for word in link.command)


def test_the_classic_abi_is_all_of_torchs_library():
    plan = paper_plan(ADAM, "cuda", OLD_TOOLS)
    assert [one.output for one in plan.steps if one.kind == "link"] == [plan.library]
    assert "-ltorch_cpu" in plan.steps[-1].command


def test_a_comma_in_the_path_is_kept_from_nvcc_alone():
    assert all(
        "-I/a, b/csrc" in one.command
        for one in paper_plan(ADAM, "cuda", csrc=Path("/a, b/csrc")).steps
        if one.kind == "host"
    )
    assert [for_nvcc(argument) for argument in ("-I/a", "/a", "/a,b")] == ["-I/a", "/a", '"/a,b"']


@pytest.mark.parametrize(
    ("cpus", "gib", "max_jobs", "jobs"),
    [
        (8, 64, None, 8),
        (8, 64, 3, 3),
        (8, 2, None, 2),
        (8, 0.5, None, 1),
        (1, 64, None, 1),
        (2, 64, 16, 2),
        (4, 0, None, 1),
    ],
)
def test_jobs(cpus, gib, max_jobs, jobs):
    plan = paper_plan(ADAM, "cpu", resources=Resources(cpus, int(gib * GIB)), max_jobs=max_jobs)
    assert plan.jobs == jobs


@pytest.mark.parametrize(("cpus", "archs", "threads"), [(8, 1, 1), (8, 3, 3), (2, 3, 2)])
def test_nvcc_gets_the_processors_that_its_neighbours_leave(cpus, archs, threads):
    assert (
        spare_threads((Step("device", "a.o", (), ()),), Resources(cpus, 64 * GIB), archs) == threads
    )


def test_memory_estimate_covers_what_runs_at_once():
    one, two = (paper_plan(ADAM, "cpu", resources=Resources(cpus, 64 * GIB)) for cpus in (1, 2))
    assert 0 < one.memory_bytes < two.memory_bytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"torch": None}, "torch"), ({"host": None}, "compiler"), ({"ninja": None}, "ninja")],
)
def test_what_is_missing_is_said_with_its_fix(changes, said):
    with pytest.raises(ToolchainError) as caught:
        paper_plan(ADAM, "cuda", TOOLS._replace(**changes))
    assert said in caught.value.what
    assert caught.value.fix


def test_every_op_of_the_catalogue_can_be_planned_and_its_sources_are_there():
    for spec in catalog.CATALOG:
        for device in spec.devices:
            plan = paper_plan(spec, device)
            assert all(source.is_file() for source in plan.sources)
            assert plan.name == f"{spec.name}-{device}"


def test_relocatable_names_hide_places():
    plan = paper_plan(SQUARE, "cuda", csrc=Path("/somewhere/csrc"))
    text = "\0".join(
        word for one in plan.steps for word in plan.relocatable("\0".join(one.command)).split("\0")
    )
    for place in ("/somewhere", str(TORCH.root), str(CUDA.root), "/usr/bin/g++"):
        assert place not in text


def test_planning_is_pure():
    assert paper_plan(ADAM, "cuda") == paper_plan(ADAM, "cuda")
    assert Resources(2, 16 * GIB) == ROOM


def test_a_compiler_of_its_own_prefix_brings_its_own_headers():
    conda = HOST._replace(path=Path("/conda/bin/x86_64-conda-linux-gnu-c++"))
    roots = paper_plan(ADAM, "cpu", TOOLS._replace(host=conda)).trusted_roots
    assert {"/conda/lib/gcc", "/conda/x86_64-conda-linux-gnu", str(TORCH.root)} <= set(roots)
    assert not any(Path("/conda/include/mine.h").is_relative_to(root) for root in roots), (
        "what other packages bring is not covered by the compiler"
    )
