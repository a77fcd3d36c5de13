"""Architecture lists as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexops.compute_capability import (
    Architecture,
    ComputeCapability,
    format_arch_list,
    gencodes,
    parse_arch_list,
    runs_on,
)
from flexops.errors import ArchitectureError

CUDA_13 = [
    ComputeCapability.parse(text)
    for text in ("7.5", "8.0", "8.6", "8.9", "9.0", "9.0a", "10.0", "10.0f", "12.0", "12.1")
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.9", "8.9"),
        ("9.0a", "9.0a"),
        ("10.0f", "10.0f"),
        ("sm_90", "9.0"),
        ("sm90", "9.0"),
        ("SM_90A", "9.0a"),
        ("sm_100f", "10.0f"),
        ("sm_120", "12.0"),
        ("compute_90", "compute_90"),
        ("compute_90a", "compute_90a"),
        ("9.0+PTX", "9.0+PTX"),
        ("9.0+ptx", "9.0+PTX"),
        ("sm_90+PTX", "9.0+PTX"),
        ("Hopper", "9.0+PTX"),
        ("HOPPER", "9.0+PTX"),
        ("ampere", "8.0;8.6+PTX"),
        ("Ampere+Tegra", "8.7"),
        ("Volta", "7.0+PTX"),
        ("Turing", "7.5+PTX"),
        ("Ada", "8.9+PTX"),
        ("Kepler", "3.5+PTX"),
        ("Blackwell", "10.0;10.3;12.0;12.1+PTX"),
        ("8.0;9.0", "8.0;9.0"),
        ("8.0,9.0", "8.0;9.0"),
        ("8.0 9.0", "8.0;9.0"),
        (" 9.0 ; 8.0 ;", "8.0;9.0"),
        ("8.0;;9.0,,", "8.0;9.0"),
        ("9.0;9.0+PTX", "9.0+PTX"),
        ("9.0;compute_90", "9.0+PTX"),
        ("9.0;9.0a", "9.0;9.0a"),
        ("12.0;8.0;10.0", "8.0;10.0;12.0"),
        ("all", "7.5;8.0;8.6;8.9;9.0;10.0;12.0;12.1+PTX"),
        ("all-major", "7.5;8.0;9.0;10.0;12.0+PTX"),
        ("native", "8.6;9.0"),
    ],
)
def test_what_a_list_means(text, expected):
    native = lambda: [ComputeCapability(9, 0), ComputeCapability(8, 6)]  # noqa: E731
    assert format_arch_list(parse_arch_list(text, native=native, supported=CUDA_13)) == expected


@pytest.mark.parametrize("text",
    ["9", "sm_9", "9.0b", "9.0+PTXX", "Hoper", "sm_90x", "9.0.1", "compute", "+PTX",
     "hopper+tegra+ptx2"])  # fmt: skip
def test_an_unknown_piece_is_named(text):
    with pytest.raises(ArchitectureError) as caught:
        parse_arch_list(f"8.0;{text}")
    assert repr(text) in str(caught.value)
    assert "sm_90" in caught.value.required
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", " ", ";", ", ;"])
def test_an_empty_list_is_an_error(text):
    with pytest.raises(ArchitectureError, match="empty"):
        parse_arch_list(text)


def test_words_that_need_something_say_what():
    with pytest.raises(ArchitectureError, match="no GPU was found"):
        parse_arch_list("native")
    with pytest.raises(ArchitectureError, match="no GPU was found"):
        parse_arch_list("native", native=tuple)
    with pytest.raises(ArchitectureError, match="no CUDA toolkit"):
        parse_arch_list("all")


def test_native_is_asked_only_when_the_list_says_so():
    def never() -> list[ComputeCapability]:
        raise AssertionError("asked")

    assert parse_arch_list("9.0", native=never)


capabilities = st.builds(
    ComputeCapability, st.integers(3, 19), st.integers(0, 9), st.sampled_from(["", "a", "f"])
)
architectures = st.builds(
    lambda capability, kind: Architecture(capability, *kind),
    capabilities,
    st.sampled_from([(False, True), (True, True), (True, False)]),
)


@given(st.lists(architectures, min_size=1, unique_by=lambda one: one.capability))
def test_format_and_parse_are_inverse(wanted):
    assert parse_arch_list(format_arch_list(wanted)) == tuple(sorted(wanted))


@given(capabilities)
def test_every_spelling_of_a_capability_parses(capability):
    assert {
        ComputeCapability.parse(text)
        for text in (str(capability), capability.sm, capability.compute)
    } == {capability}


def test_order_is_by_number_not_by_text():
    assert ComputeCapability(9, 0) < ComputeCapability(10, 0)
    assert [str(one) for one in sorted(CUDA_13)] == [
        "7.5",
        "8.0",
        "8.6",
        "8.9",
        "9.0",
        "9.0a",
        "10.0",
        "10.0f",
        "12.0",
        "12.1",
    ]


def test_gencodes():
    assert gencodes(parse_arch_list("8.0;9.0a+PTX;compute_100")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
        "-gencode=arch=compute_100,code=compute_100",
    ]


@pytest.mark.parametrize(
    ("compiled", "device", "runs"),
    [
        (["8.0"], "8.0", True),
        (["8.0"], "8.6", True),
        (["8.6"], "8.0", False),
        (["8.0"], "9.0", False),
        (["9.0"], "8.9", False),
        (["8.0+PTX"], "9.0", True),
        (["8.0+PTX"], "7.5", False),
        (["compute_80"], "8.0", True),
        (["compute_80"], "12.0", True),
        (["9.0a"], "9.0", True),
        (["10.0a"], "10.3", False),
        (["9.0a+PTX"], "10.0", False),
        (["10.0f"], "10.3", True),
        (["10.3f"], "10.0", False),
        (["10.0f"], "12.0", False),
        (["10.0f+PTX"], "12.0", False),
        (["compute_100f"], "10.3", True),
        (["7.5", "8.0", "9.0a"], "8.9", True),
        (["sm_80"], "8.6", True),
        ([], "9.0", False),
    ],
)
def test_what_runs_on_what(compiled, device, runs):
    assert runs_on(compiled, ComputeCapability.parse(device)) is runs
    assert (
        runs_on(
            [one for text in compiled for one in parse_arch_list(text)],
            ComputeCapability.parse(device),
        )
        is runs
    )


def test_code_for_amds_gpus_runs_on_none_of_these():
    assert runs_on(["gfx90a", "9.0"], ComputeCapability.parse("9.0"))
    assert not runs_on(["gfx90a"], ComputeCapability.parse("9.0"))
