"""What many sources of a run read alike is read once, and changes nothing of what they become."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections import Counter
from pathlib import Path

import pytest
from builds import (
    CCACHE,
    REPOSITORY,
    SQUARE,
    TOOLS,
    answer,
    child_environment,
    paper_plan,
    tiny_plan,
)
from marks import first_of

from flexops import settings, toolchain
from flexops.build.compile import ninja as compiler
from flexops.build.describe import catalog, cpp_text
from flexops.build.describe.spec import BINDING, DECLARATIONS
from flexops.build.load import loader
from flexops.build.plan import cache_key, shared_headers
from flexops.build.plan.plan import BINDING_HEADER, INTRINSICS_HEADER, BuildPlan, Step
from flexops.toolchain import zig

ISA_LEVELS = platform.machine() == "x86_64"
HEADER = "#pragma once\ninline int answer_of_header() { return 42; }\n"


def sharing(folder: Path, count: int, *, compiler: str = "g++") -> list[BuildPlan]:
    """Plans that compile one source, whose first include is a header that they share; with -H, g++
    says what it reads."""
    plans = []
    for number in range(count):
        plan = tiny_plan(folder, name=f"tiny{number}-cpu", compiler=compiler, header=HEADER)
        source = plan.steps[0].inputs[0]
        command = (compiler, "-H", "-fPIC", f"-I{folder}", "-c", source, "-o", "tiny.o")
        plans.append(
            plan._replace(
                steps=(
                    plan.steps[0]._replace(command=command, shared_header="tiny.h"),
                    plan.steps[1],
                )
            )
        )
    return plans


@pytest.mark.usefixtures("host_compiler")
def test_a_header_that_many_sources_share_is_read_once_and_changes_nothing(tmp_path):
    plans = sharing(tmp_path / "tiny", shared_headers.FEWEST)
    together = compiler.run(plans, tmp_path / "together")
    alone = compiler.run(plans[:1], tmp_path / "alone")
    assert together.returncode == alone.returncode == 0, together.output
    taken = re.findall(rf"^! .*/{shared_headers.FOLDER}/0\.h\.gch$", together.output, re.MULTILINE)
    assert len(taken) == len(plans), "g++ took the precompiled one"
    assert ".gch" not in alone.output
    expected = tmp_path / "alone" / plans[0].name
    for plan in plans:
        folder = tmp_path / "together" / plan.name
        assert (folder / "tiny.o").read_bytes() == (expected / "tiny.o").read_bytes()
        reached = [
            cache_key.reached_headers(plan, compiler.depfiles(plan, place))
            for place in (folder, expected)
        ]
        assert reached == [[str(tmp_path / "tiny" / "tiny.h")]] * 2, (
            "the cache key sees the headers within"
        )
        assert "gch" not in (folder / "build.ninja").read_text(), (
            "the file to repeat the build with does without"
        )


def test_few_sources_and_those_of_a_launcher_are_left_alone(tmp_path):
    few = sharing(tmp_path / "tiny", shared_headers.FEWEST - 1)
    assert shared_headers.share(few) == few
    launched = [
        plan._replace(launcher=str(CCACHE.path))
        for plan in sharing(tmp_path / "tiny", shared_headers.FEWEST)
    ]
    assert shared_headers.share(launched) == launched
    other = few[0]._replace(
        name="other-cpu",
        steps=(
            few[0].steps[0]._replace(command=("g++", "-DOTHER", *few[0].steps[0].command[1:])),
            few[0].steps[1],
        ),
    )
    assert shared_headers.share([*few, other]) == [
        *few,
        other,
    ], "other flags may give the header another meaning"


@pytest.mark.usefixtures("host_compiler")
def test_where_no_header_can_be_precompiled_everything_is_built_without(tmp_path):
    fussy = tmp_path / "fussy-g++"
    fussy.write_text(
        '#!/bin/sh\ncase "$*" in *c++-header*) echo "internal compiler error: no room" >&2; exit'
        ' 1;; esac\nexec g++ "$@"\n'
    )
    fussy.chmod(0o755)
    plans = sharing(tmp_path / "tiny", shared_headers.FEWEST, compiler=str(fussy))
    outcome = compiler.run(plans, tmp_path / "work")
    assert outcome.returncode == 0, outcome.output
    assert [answer(tmp_path / "work" / plan.name / "tiny.so") for plan in plans] == [42] * len(
        plans
    )


@pytest.mark.usefixtures("host_compiler")
def test_a_broken_source_among_many_is_the_only_one_that_fails(tmp_path):
    *good, bad = sharing(tmp_path / "tiny", shared_headers.FEWEST + 1)
    broken = tmp_path / "broken.cpp"
    broken.write_text('#include "tiny.h"\nint broken() { return no_such_name; }\n')
    command = tuple(
        str(broken) if word == bad.steps[0].inputs[0] else word for word in bad.steps[0].command
    )
    bad = bad._replace(
        steps=(bad.steps[0]._replace(inputs=(str(broken),), command=command), bad.steps[1])
    )
    outcome = compiler.run([bad, *good], tmp_path / "work")
    assert outcome.failed(bad)
    assert "no_such_name" in outcome.output
    assert not any(outcome.failed(plan) for plan in good)
    assert all((tmp_path / "work" / plan.name / "tiny.so").exists() for plan in good)


@pytest.mark.usefixtures("host_compiler")
def test_half_a_library_of_the_first_attempt_is_made_again(tmp_path):
    plans = sharing(tmp_path / "tiny", shared_headers.FEWEST)
    script = (
        f"if [ -e {tmp_path}/again ]; then g++ -shared tiny.o -o tiny.so; else touch"
        f" {tmp_path}/again; printf half > tiny.so; exit 1; fi"
    )
    killed = plans[0]._replace(
        steps=(plans[0].steps[0], Step("link", "tiny.so", ("tiny.o",), ("sh", "-c", script)))
    )
    outcome = compiler.run([killed, *plans[1:]], tmp_path / "work")
    assert outcome.returncode == 0, outcome.output
    assert answer(tmp_path / "work" / killed.name / "tiny.so") == 42


@pytest.mark.parametrize("spec", [*catalog.CATALOG, SQUARE], ids=lambda spec: spec.name)
def test_every_binding_includes_the_shared_header_first(spec):
    """Else it is compiled in another order with the header precompiled than without, and its
    library is another."""
    name, written = spec.binding or BINDING, dict(spec.texts)
    while name != BINDING_HEADER:
        first = re.search(
            r"^#include (.*)$",
            written.get(name) or (REPOSITORY / "csrc" / name).read_text(),
            re.MULTILINE,
        )
        assert first is not None, f"{name} includes nothing"
        assert first[1].startswith('"'), f"{name} includes {first[1]} before {BINDING_HEADER}"
        name = first[1].strip('"')


def flags(step: Step) -> tuple[str, ...]:
    return step.command[: step.command.index("-c")] if "-c" in step.command else ()


def test_bindings_and_cpu_kernels_share_theirs_in_a_plan_on_paper():
    tools = TOOLS._replace(launcher=None)
    plans = [paper_plan(spec, device, tools) for spec in catalog.CATALOG for device in spec.devices]
    maker, *users = shared_headers.share(plans)
    headers = [text.split('"')[1] for _, text in maker.texts]
    levels = [re.findall(r"FLEXOPS_ISA=(\w+)", " ".join(step.command)) for step in maker.steps]
    made = sorted(zip(headers, levels, strict=True))
    # one that serves both device types counts once
    bindings = Counter(flags(step) for step, _ in {(plan.steps[0], plan.texts) for plan in plans})
    many = [one for one, count in bindings.items() if count >= shared_headers.FEWEST]
    assert many
    assert made == [(BINDING_HEADER, [])] * len(many) + [
        (INTRINSICS_HEADER, ["avx2"]),
        (INTRINSICS_HEADER, ["avx512"]),
    ], "one for each set of flags"
    for plan, before in zip(users, plans, strict=True):
        sharing = [step.output for step in plan.steps if "-fpch-deps" in step.command]
        assert sharing == [
            step.output
            for step in before.steps
            if flags(step) in many
            or ("_avx" in step.output and "-ffp-contract=off" not in step.command)  # few have it
        ]
        both = [
            step.command for step in plan.steps if {"-fpch-deps", DECLARATIONS} <= {*step.command}
        ]
        assert all(command.index("-fpch-deps") < command.index(DECLARATIONS) for command in both), (
            "g++ takes it only before all else"
        )
        assert plan._replace(steps=()) == before._replace(steps=())


@pytest.mark.parametrize("spec", catalog.CATALOG, ids=lambda spec: spec.name)
def test_every_cpu_kernel_reaches_the_intrinsics_with_nothing_before_them_that_could_change_them(
    spec,
):
    """Else it is another with the header precompiled than without: one more declaration, or its
    dependency file names one more header."""
    csrc = REPOSITORY / "csrc"
    for source in spec.cpu_sources:
        reached = cpp_text.own_headers(
            (csrc / source).read_text(), str((csrc / source).parent), [str(csrc)]
        )
        assert str(csrc / INTRINSICS_HEADER) in reached, source
        before = (csrc / source).read_text().partition("#include")[0]
        assert not re.search(r"^\s*#|^using", before, re.MULTILINE), (
            f"{source}: a pragma or a macro comes before its first include"
        )


@pytest.mark.parametrize("wheel", first_of("", "x86_64"), ids=["g++", "zig"])
def test_a_cpu_kernel_is_the_same_with_the_intrinsics_precompiled(
    wheel, tmp_path, host_compiler, monkeypatch, require
):
    assert host_compiler
    require(
        not wheel or importlib.util.find_spec("ziglang"), "zig", f"pip install {zig.REQUIREMENT}"
    )
    chosen = settings.Settings.from_environ(
        {**child_environment(), "FLEXOPS_WHEEL": wheel, "FLEXOPS_COMPILER_LAUNCHER": "none"}
    )
    tools = zig.toolchain_for(chosen) if wheel else toolchain.discover(chosen, device="cpu")
    plan = paper_plan(catalog.find("lion"), "cpu", tools)
    kernels = tuple(step for step in plan.steps if step.shared_header == INTRINSICS_HEADER)
    assert [step.output for step in kernels] == (
        ["lion_cpu_avx2.o", "lion_cpu_avx512.o"] if wheel or ISA_LEVELS else []
    )
    plan = plan._replace(steps=kernels)
    assert compiler.run([plan], tmp_path / "alone").returncode == 0
    monkeypatch.setattr(shared_headers, "FEWEST", 1)
    assert compiler.run([plan], tmp_path / "shared").returncode == 0
    assert len(list((tmp_path / "shared" / shared_headers.FOLDER).glob("*.gch"))) == len(kernels)
    for step in kernels:
        alone, shared = (tmp_path / way / plan.name for way in ("alone", "shared"))
        assert (shared / step.output).read_bytes() == (alone / step.output).read_bytes()
        reached = [
            sorted(cache_key.reached_headers(plan, [folder / f"{step.output}.d"]))
            for folder in (alone, shared)
        ]
        assert reached[0] == reached[1]


def test_what_plans_link_alike_is_made_once():
    tools = TOOLS._replace(launcher=None)
    plans = [paper_plan(spec, "cpu", tools) for spec in catalog.CATALOG[:3]]
    text = compiler.render_ninja(plans, subdirectories=True)
    first, *others = (plan.name for plan in plans)
    assert text.count("-soname,libtorch_cpu.so") == 1
    for name in others:
        assert f"cp ../{first}/torch_stub.so ." in text
        assert (
            f"build {name}/torch_stub.so: {name.replace('-', '_')}_4 {first}/torch_stub.so" in text
        )


@pytest.mark.extra
def test_zig_reads_a_shared_header_once_too(tmp_path, require):
    """A quarter of the processor time that a wheel took to compile went into one header."""
    found = importlib.util.find_spec("ziglang")
    require(found is not None, "zig", f"pip install {zig.REQUIREMENT}")
    host = zig.toolchain_for(
        settings.Settings.from_environ({**child_environment(), "FLEXOPS_WHEEL": "x86_64"})
    ).host
    assert host is not None
    plans = []
    for plan in sharing(tmp_path / "tiny", shared_headers.FEWEST):
        compile_step, link_step = plan.steps
        command = (*host.command, "-fPIC", f"-I{tmp_path / 'tiny'}", "-c", compile_step.inputs[0],
            "-o", "tiny.o")  # fmt: skip
        link = (*host.linker, "-shared", "tiny.o", "-o", "tiny.so")
        plans.append(
            plan._replace(
                steps=(compile_step._replace(command=command), link_step._replace(command=link))
            )
        )
    (tmp_path / "tiny" / "tiny.h").write_text(HEADER + '#warning "read"\n')
    outcome = compiler.run(plans, tmp_path / "work")
    assert outcome.returncode == 0, outcome.output
    assert len(re.findall("warning: .*read", outcome.output)) == 1, outcome.output
    for plan in plans:
        assert answer(tmp_path / "work" / plan.name / "tiny.so") == 42
        reached = cache_key.reached_headers(
            plan, compiler.depfiles(plan, tmp_path / "work" / plan.name)
        )
        assert reached == [str(tmp_path / "tiny" / "tiny.h")], (
            "the cache key sees the header within, and nothing of the run's own"
        )


def test_a_binding_is_compiled_once_for_both_device_types_and_a_launcher_that_is_missing_fails_the_link(
    tmp_path, host_compiler
):
    assert host_compiler
    chosen = settings.Settings.from_environ(
        {**child_environment(), "FLEXOPS_COMPILER_LAUNCHER": "none"}
    )
    cpu, cuda = (
        without_launchers(loader.local_plan(catalog.find("lion"), device, chosen))
        for device in ("cpu", "cuda")
    )
    outcome = compiler.run([cpu, cuda], tmp_path)
    assert (tmp_path / "build.ninja").read_text().count(f"-c {BINDING}") == 1
    for name in ("binding.o", "binding.o.d"):
        assert (tmp_path / cpu.name / name).read_bytes() == (
            tmp_path / cuda.name / name
        ).read_bytes()
    assert outcome.failed(cpu), "nothing stands in for a launcher of the library's own device type"
    assert outcome.failed(cuda)
    for launcher, symbol in (
        ("flexops::baseline::lion_cpu", "flexops_without_cpu"),
        ("flexops::lion_cuda", "flexops_without_cuda"),
    ):
        assert re.search(
            rf"in function `{launcher}\(.*\n.*undefined reference to `{symbol}'", outcome.output
        )


def without_launchers(plan: BuildPlan) -> BuildPlan:
    gone = {step.output for step in plan.steps if step.kind == "host"} - {"binding.o"}
    left = [step for step in plan.steps if step.output not in gone]
    return plan._replace(
        steps=tuple(
            step._replace(
                command=tuple(word for word in step.command if word not in gone),
                inputs=tuple(name for name in step.inputs if name not in gone),
            )
            for step in left
        )
    )
