"""What ``flexops inspect`` and ``flexops target prove`` compute: occupancy, instructions by kind,
and what is worse than a baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexops.compute_capability import Architecture, ComputeCapability
from flexops.errors import FlexopsError
from flexops.inspection import baseline, cubin, mix
from flexops.inspection.measuring import Measured
from flexops.inspection.occupancy import occupancy
from flexops_tools.proving import baseline_file
from flexops_tools.proving import kernels as proving

HOPPER = ComputeCapability(9, 0)


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "threads", "expected"),
    [
        # NVIDIA's occupancy calculator: 9.0, 32 registers, 256 threads: 8 blocks of 8 warps
        (HOPPER, 32, 0, 256, 1.0),
        (HOPPER, 255, 0, 256, 0.125),  # 65536 / (255 -> 256 registers * 32) = 8 warps, one block
        (HOPPER, 64, 0, 1024, 0.5),
        (HOPPER, 40, 0, 256, 0.75),  # 51 warps fit, 48 in four partitions, 6 blocks
        (HOPPER, 32, 100 * 1024, 256, 0.25),  # 101 KiB with the reserved one: two of 228
        (HOPPER, 16, 0, 32, 0.5),  # 32 blocks at most
        (ComputeCapability(8, 6), 32, 0, 512, 1.0),
        (ComputeCapability(7, 5), 64, 0, 256, 1.0),
        (ComputeCapability(9, 0, "a"), 168, 0, 384, 0.1875),
        (ComputeCapability(15, 0), 32, 0, 256, None),
        (HOPPER, 32, 0, 0, None),
    ],
)
def test_occupancy(capability, registers, shared, threads, expected):
    assert occupancy(capability, registers, shared, threads) == expected


def test_instructions_by_kind():
    ptx = """
.visible .entry scale(.param .u64 a)
{
.reg .f32 %f<3>;
 ld.param.u64 %rd1, [a];
 @%p1 bra $L1;
 ld.global.nc.f32 %f1, [%rd1];
 mul.ftz.f32 %f2, %f1, %f1;
 st.global.f32 [%rd1], %f2;
 bar.sync 0;
$L1:
 ret;
}"""
    assert mix.of_ptx(ptx) == {
        "parameters and constants": 1,
        "branches": 1,
        "global memory": 2,
        "floating point": 1,
        "barriers": 1,
    }
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @P0  BRA `(.L_x_0) ;
        /*0020*/                   LDG.E.CONSTANT R2, desc[UR4][R2.64] ;
        /*0030*/                   HGMMA.64x64x16.F32 R24, gdesc[UR8], R24 ;
        /*0040*/                   FMUL R5, R2, R2 ;
        /*0050*/                   IMAD.MOV.U32 R5, RZ, RZ, R2 ;
        /*0060*/                   STL [R1], R5 ;
        /*0070*/                   NOP ;"""
    assert mix.of_sass(sass) == {
        "parameters and constants": 1,
        "branches": 1,
        "global memory": 1,
        "matrix": 1,
        "floating point": 1,
        "integers, moves, predicates": 1,
        "local memory": 1,
    }


def measured(tmp_path: Path, kernel: str, **resources: int) -> Measured:
    code = tmp_path / "kernel.cubin"
    code.write_bytes(b"code")
    known = dict.fromkeys(baseline.NAMES, 0) | {"registers": 32} | resources
    return Measured("mine", kernel, Architecture(HOPPER), "NVRTC 13.0", known, 256, code)


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        *(({"registers": 39}, False), ({"registers": 40}, True), ({"registers": 20}, False)),
        *(({"spill_stores": 4}, True), ({"stack": 8}, True), ({"shared": 16}, True)),
    ],
)
def test_what_is_worse(tmp_path, now, worse):
    known = baseline.of([measured(tmp_path, "mine::scale<float>")])
    (change,) = baseline.compare(known, [measured(tmp_path, "mine::scale<float>", **now)])
    assert change.worse == worse
    assert ("WORSE" in str(change)) == worse
    assert baseline.compare(known, [measured(tmp_path, "mine::scale<float>")]) == []


def test_new_and_gone_kernels_are_no_regression_and_an_update_takes_them(tmp_path):
    file = tmp_path / "baseline.json"
    baseline_file.write(
        file,
        {},
        [
            measured(tmp_path, "mine::old"),
            measured(tmp_path, "other::kept")._replace(family="other"),
        ],
    )
    known = baseline_file.read(file)
    now = [measured(tmp_path, "mine::fresh", registers=250)]
    changes = baseline.compare(known, now)
    assert [(str(change).rpartition(": ")[2], change.worse) for change in changes] == [
        ("new", False),
        ("gone", False),
    ]
    # there is nothing to hold it against: none may
    assert baseline.compare(known, [measured(tmp_path, "mine::fresh", spill_loads=4)])[0].worse
    baseline_file.write(file, known, now)
    assert baseline_file.read(file) == {
        "NVRTC 13.0 sm_90": {
            "mine mine::fresh": [250, 0, 0, 0, 0],
            "other other::kept": [32, 0, 0, 0, 0],
        }
    }
    with pytest.raises(FlexopsError, match="flexops target prove --update"):
        baseline_file.read(tmp_path / "none.json")


def test_a_report_names_what_spills(tmp_path):
    text = proving.report(
        [
            measured(tmp_path, "mine::scale"),
            measured(
                tmp_path, "mine::hungry", registers=255, stack=16, spill_stores=8, spill_loads=12
            ),
        ]
    )
    assert "| mine | NVRTC 13.0 | sm_90 | 2 | 32, 255, 255 | 1 | 0 |" in text
    assert "| `mine::hungry` | NVRTC 13.0 | sm_90 | 16 | 8, 12 |" in text
    assert "mine::scale" not in text


@pytest.mark.parametrize(
    "code", [b"", b"PTX", b"\x7fELF\x02" + b"\0" * 10, b"\x7fELF\x02" + b"\xff" * 100]
)
def test_what_is_no_cubin_is_rejected(code):
    with pytest.raises(ValueError):
        cubin.most_threads(code, "kernel")


def test_the_baseline_is_committed_for_the_tests_compilers(tmp_path):
    file = Path(__file__).parents[1] / baseline_file.FILE
    known = baseline_file.read(file)
    baseline_file.write(tmp_path / "again.json", known, [])
    assert (tmp_path / "again.json").read_text() == file.read_text()
    assert {
        f"NVRTC {version} sm_{sm}" for version in ("12.1", "13.0") for sm in (80, 86, 89, 90)
    } <= set(known)
    assert all(
        len(values) == len(baseline.NAMES)
        for kernels in known.values()
        for values in kernels.values()
    )
