"""The whole matrix of toolchain decisions, on explicit values: no machine is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from flexops.compute_capability import ComputeCapability, format_arch_list
from flexops.errors import ArchitectureError, ToolchainError
from flexops.toolchain import compat, missing, select, supported_capabilities, toolkit_fix
from flexops.toolchain.architectures import resolve
from flexops.toolchain.driver import DriverCuda, DriverRelease
from flexops.toolchain.model import (
    CudaToolkit,
    Found,
    HostCompiler,
    Rejected,
    RocmToolkit,
    Tool,
    Toolchain,
    TorchBuild,
    Version,
)

RULES = compat.rules()


def torch_for(
    cuda: str | None = None, hip: str | None = None, version: str = "2.14.1"
) -> TorchBuild:
    return TorchBuild(version, cuda, hip, "", True, Path("/torch"))


def toolkit(version: str, via: str = "PATH") -> Found[CudaToolkit]:
    root = Path(f"/cuda-{version}-{via.replace('/', '_')}")
    return Found(
        CudaToolkit(
            root,
            Version.parse(version),
            Tool(root / "bin/nvcc", Version.parse(version), f"nvcc {version}"),
            (),
            (),
        ),
        via,
    )


def rocm(version: str, via: str = "/opt/rocm") -> Found[RocmToolkit]:
    return Found(
        RocmToolkit(
            Path(f"/rocm-{version}"),
            Version.parse(version),
            Tool(Path("hipcc"), Version.parse(version), ""),
            (),
            (),
        ),
        via,
    )


def compiler(
    version: str, via: str = "g++ on PATH", kind: Literal["gcc", "clang"] = "gcc"
) -> Found[HostCompiler]:
    return Found(
        HostCompiler(Path(f"/{kind}-{version}"), Version.parse(version), f"{kind} {version}", kind),
        via,
    )


@pytest.mark.parametrize(
    ("torch_cuda", "present", "taken", "rejected"),
    [
        # nvcc of another major first on PATH
        ("13.0", [("12.1", "PATH"), ("13.0", "/usr/local")], ("13.0", "/usr/local"), ["12.1"]),
        ("12.1", [("13.0", "site-packages")], None, ["13.0"]),
        (
            "13.0",
            [("12.1", "CUDA_HOME"), ("13.0", "site-packages")],
            ("13.0", "site-packages"),
            ["12.1"],
        ),
        # an explicit wish that fits
        ("13.0", [("13.2", "CUDA_HOME"), ("13.0", "site-packages")], ("13.2", "CUDA_HOME"), []),
        (
            "12.6",
            [("12.8", "PATH"), ("12.6", "/usr/local"), ("12.4", "conda")],
            ("12.6", "/usr/local"),
            [],
        ),
        ("12.6", [("12.1", "PATH"), ("12.8", "/usr/local")], ("12.8", "/usr/local"), []),
        # equally near: the newer
        ("12.6", [("12.4", "PATH"), ("12.8", "/usr/local")], ("12.8", "/usr/local"), []),
        # the first found
        ("13.0", [("13.0", "site-packages"), ("13.0", "PATH")], ("13.0", "site-packages"), []),
        (None, [("12.4", "PATH"), ("13.0", "/usr/local")], ("13.0", "/usr/local"), []),
        (None, [("12.4", "CUDA_HOME"), ("13.0", "/usr/local")], ("12.4", "CUDA_HOME"), []),
        (None, [("10.2", "PATH")], None, ["10.2"]),
        ("13.0", [], None, []),
    ],
)
def test_the_toolkit_that_matches_torch(torch_cuda, present, taken, rejected):
    choice = select.choose_cuda([toolkit(*one) for one in present], torch_for(torch_cuda), RULES)
    assert (choice.taken and (str(choice.taken.value.version), choice.taken.found_via)) == taken
    assert [str(one.path).split("-")[1] for one in choice.rejected] == rejected
    assert all(one.reason for one in choice.rejected)


def test_a_minor_mismatch_is_a_note():
    assert (
        "another minor" in select.choose_cuda([toolkit("13.2")], torch_for("13.0"), RULES).notes[0]
    )
    assert not select.choose_cuda([toolkit("13.0")], torch_for("13.0"), RULES).notes


def test_exceptions_are_rows():
    document = {
        "cuda": {"11.8": {}},
        "suggested": "",
        "mainstream": [],
        "integrated": [],
        "pair": [{"toolkit": "12.0", "torch": "12", "accept": False, "reason": "it miscompiles"}],
    }
    rules = compat.Rules(document)
    assert rules.toolkit_for_torch(Version((12, 0)), Version((12, 8))) == (False, "it miscompiles")
    assert rules.toolkit_for_torch(Version((12, 1)), Version((12, 8))).accepted


@pytest.mark.parametrize(
    ("cuda", "standard", "present", "taken"),
    [
        # the newest is rejected, an older one taken
        ("12.1", 17, [compiler("14.2"), compiler("12.2"), compiler("11.4")], "12.2"),
        ("13.0", 20, [compiler("14.2"), compiler("12.2")], "14.2"),
        ("13.0", 20, [compiler("11.2")], None),
        ("13.0", 20, [compiler("11.3")], "11.3"),
        ("11.8", 17, [compiler("12.2")], None),
        (None, 17, [compiler("15.1"), compiler("12.2")], "15.1"),
        ("13.0", 20, [compiler("12.2"), compiler("11.4", "CXX")], "11.4"),
        ("12.1", 17, [compiler("12.2"), compiler("14.0", "CXX")], "12.2"),
        ("13.0", 20, [compiler("14.2"), compiler("13.3", "conda")], "13.3"),
        ("13.0", 20, [compiler("18.1", "clang++ on PATH", "clang"), compiler("12.2")], "12.2"),
        ("13.0", 20, [compiler("18.1", "clang++ on PATH", "clang"), compiler("16.0")], "18.1"),
        ("13.0", 20, [], None),
    ],
)
def test_the_newest_compiler_that_nvcc_accepts(cuda, standard, present, taken):
    choice = select.choose_host(present, toolkit(cuda).value if cuda else None, standard, RULES)
    assert (str(choice.value.version) if choice.value else None) == taken
    assert taken or len(choice.rejected) == len(present)


def test_a_refused_cxx_is_a_note():
    choice = select.choose_host(
        [compiler("14.0", "CXX"), compiler("12.2")], toolkit("12.1").value, 17, RULES
    )
    assert "newer than nvcc 12.1 accepts" in choice.notes[0]
    assert "/gcc-14.0" in choice.notes[0]


def test_rocm():
    choice = select.choose_rocm(
        [rocm("5.2.21153"), rocm("7.1.0"), rocm("7.2.1")], torch_for(hip="7.2.26015")
    )
    assert choice.value
    assert str(choice.value.version) == "7.2.1"
    assert [str(one.path) for one in choice.rejected] == ["/rocm-5.2.21153"]
    assert "another minor" in select.choose_rocm([rocm("7.1.0")], torch_for(hip="7.2")).notes[0]
    assert select.choose_rocm([rocm("5.2")], torch_for(hip="7.2")).value is None


@pytest.mark.parametrize(
    ("asked", "cuda", "detected", "expected", "notes"),
    [
        ("8.9;9.0", "13.0", "", "8.9;9.0", 0),
        (None, "13.0", "9.0", "9.0", 0),
        (None, "13.0", "8.0 8.0 9.0", "8.0;9.0", 0),
        ("8.9", "13.0", "9.0", "8.9", 0),
        ("native", "13.0", "8.6", "8.6", 0),
        (None, "13.0", "", "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX", 1),  # unset, and no GPU
        (None, "12.1", "", "7.5;8.0;8.6;8.9;9.0+PTX", 1),
        (None, "12.6", "10.0", "compute_90", 1),  # a GPU newer than the toolkit
        ("9.0;12.0", "12.6", "", "9.0+PTX", 1),
        ("10.3", "12.8", "", "10.0", 1),  # same major, older minor: machine code runs there
        ("10.0f", "12.8", "", "10.0", 1),
        ("9.0a", "11.8", "", "9.0", 1),
        ("7.0;8.0", "13.0", "", "8.0", 1),  # dropped by CUDA 13
        ("Hopper", "13.0", "", "9.0+PTX", 0),
        ("8.8", "13.0", "", "8.8", 0),
        ("10.1", "13.0", "", "10.0", 1),
        (None, "13.0", "14.0", "compute_121", 1),  # a GPU newer than any that is known
        ("14.0", "13.0", "14.0", "compute_121", 1),
        ("9.0", "13.7", "", "9.0", 0),  # a toolkit that no row knows yet
    ],
)
def test_architectures_as_far_as_nvcc_can_emit_them(asked, cuda, detected, expected, notes):
    here = [ComputeCapability.parse(text) for text in detected.split()]
    choice = resolve(asked, Version.parse(cuda), detected=here, known=RULES)
    assert format_arch_list(choice.architectures) == expected
    assert len(choice.notes) == notes


@pytest.mark.parametrize(
    ("asked", "cuda"),
    [
        ("7.0", "13.0"),
        ("3.5;5.0", "13.0"),
        ("native", "13.0"),
        ("nonsense", "13.0"),
        ("13.0", "13.0"),
        ("9.0;13.0", "12.6"),
    ],
)
def test_nothing_to_compile_is_an_error_with_its_fix(asked, cuda):
    with pytest.raises(ArchitectureError) as caught:
        resolve(asked, Version.parse(cuda), detected=[], known=RULES)
    assert caught.value.found
    assert caught.value.required
    assert "TORCH_CUDA_ARCH_LIST" in caught.value.fix


@pytest.mark.parametrize(
    ("release", "cuda", "accepted", "word"),
    [
        ("580.65.06", "13.0", True, ""),
        ("600.10", "12.1", True, ""),
        ("560.28.03", "13.0", False, "older than 580"),
        ("525.60.13", "12.1", True, "PTX"),
        ("580.65.06", "13.2", True, "PTX"),
        ("520.61.05", "12.1", False, "525"),
        ("580.65.06", "13.4", True, ""),  # its own driver is not known
    ],
)
def test_drivers(release, cuda, accepted, word):
    verdict = compat.driver_supports(DriverRelease.parse(release), Version.parse(cuda))
    assert (verdict.accepted, bool(verdict)) == (accepted, accepted)
    assert word in verdict.reason


def test_the_drivers_two_numbers_do_not_compare():
    assert DriverRelease(Version((13, 0))) != DriverCuda(Version((13, 0)))  # type: ignore[comparison-overlap]
    assert str(DriverRelease.parse("580.65.06")) == "580.65.06"


def test_the_facts_are_in_order():
    for one in RULES.toolkits:
        facts = RULES.facts(one)
        assert facts.version == one
        assert list(facts.capabilities) == sorted(set(facts.capabilities))
        assert (
            facts.least_driver is None or facts.least_driver.version >= facts.family_driver.version
        )
    newest = [RULES.facts(one).max_gcc for one in RULES.toolkits]
    assert newest == sorted(newest) == [11, 12, 13, 13, 14, 14, 15, 15, 16]
    assert RULES.facts(Version((12, 5))).version == Version((12, 4))
    assert "9.0a" not in map(str, supported_capabilities(Version((11, 8))))
    assert min(supported_capabilities(Version((13, 0)))) == ComputeCapability(7, 5)
    with pytest.raises(ToolchainError, match="not supported"):
        supported_capabilities(Version((10, 2)))


def test_what_is_missing_comes_with_its_fix():
    ninja, host = Tool(Path("ninja"), Version((1, 11)), ""), compiler("12.2").value
    whole = Toolchain(torch=torch_for("13.0"), host=host, cuda=toolkit("13.0").value, ninja=ninja)
    assert missing(whole) is None
    assert missing(whole._replace(cuda=None), "cpu") is None

    refused = whole._replace(
        cuda=None, rejected=(Rejected("CUDA toolkit", Path("/usr/local/cuda-12"), "another major"),)
    )
    error = missing(refused)
    assert error
    assert "/usr/local/cuda-12: another major" in error.found
    assert 'pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"' in error.fix

    for cpu_torch in (torch_for(None), torch_for("13.0")):  # hipcc compiles for a ROCm torch only
        assert missing(whole._replace(torch=cpu_torch, cuda=None, rocm=rocm("7.2").value))

    nowhere = missing(
        whole._replace(cuda=None, tried=(("cuda", "PATH (nvcc on PATH)"), ("host", "other")))
    )
    assert nowhere
    assert "looked at: PATH (nvcc on PATH)" in nowhere.found
    assert "other" not in nowhere.found

    for gone, word, fix in (
        (whole._replace(torch=None), "torch", "pip install torch"),
        (whole._replace(host=None), "C++ compiler", "apt-get install g++"),
        (whole._replace(ninja=None), "ninja", "pip install ninja"),
        (whole._replace(torch=torch_for(hip="7.2"), cuda=None), "ROCm", "rocm"),
        (whole._replace(torch=torch_for(), cuda=None), "CUDA toolkit", "pip install"),
    ):
        error = missing(gone)
        assert error
        assert word in error.what
        assert fix in error.fix


def test_too_new_a_compiler_names_the_one_to_install():
    refusal = Rejected(
        "C++ compiler",
        Path("/usr/bin/g++"),
        "gcc 14.2.0 is newer than nvcc 12.1 accepts (gcc 12 at most)",
    )
    lacking = Toolchain(
        torch=torch_for("12.1", version="2.4.1"), cuda=toolkit("12.1").value, rejected=(refusal,)
    )
    error = missing(lacking)
    assert error
    assert error.fix == "apt-get install g++-12"
    assert "not newer than g++ 12" in error.required


@pytest.mark.parametrize(
    ("cuda", "words"),
    [
        ("12.1", "conda install"),
        ("12.1", "nvidia/cuda:12.1.1-devel"),
        ("12.8", "cuda-nvcc"),
        ("13.2", "==13.2.*"),
    ],
)
def test_where_an_nvcc_comes_from(cuda, words):
    assert words in toolkit_fix(cuda)


def test_a_standard_that_no_rule_is_for_is_named():
    with pytest.raises(ToolchainError, match=r"no rule for C\+\+0") as caught:
        RULES.compiler_for_standard(compiler("12.2").value, 0)
    assert "C++17" in str(caught.value)
