"""The matrix that ships: its rows, and how it is read."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from processes import completed

from flexops import _toml, targets
from flexops.errors import FlexopsError, TargetError


def test_every_target_of_the_design_is_there():
    newest = (80, 89, 90, 100, 120)
    cuda = {
        "cu121": (80, 89, 90),
        "cu126": (80, 89, 90),
        "cu128": (75, *newest),
        "cu130": (75, *newest),
        "cu132": newest,
    }
    expected = {"cpu", "rocm72-gfx90a", "rocm72-gfx942"} | {
        f"{name}-sm{number}" for name, numbers in cuda.items() for number in numbers
    }
    assert set(targets.load().ids) == expected


def test_a_cuda_target_carries_every_pin():
    row = targets.load().find("cu121-sm89")
    assert (row.accelerator, row.toolkit, row.capabilities, row.arch_list, row.torch) == (
        "cuda",
        "12.1.1",
        ("8.9",),
        "8.9",
        "2.4.1",
    )
    assert (row.host_compiler, row.least_driver, row.python_range) == (
        ("9.3", "12"),
        "525",
        ("3.10", "3.12"),
    )
    assert row.build_base == "ubuntu:22.04", "no toolkit: torch's NVRTC compiles the kernels"
    assert row.requirements == ("torch==2.4.1", "ninja==1.13.0")


def test_the_toolkit_is_a_requirement_where_the_index_has_an_nvcc():
    for row in targets.load().targets:
        has_toolkit = any(
            pin.startswith("cuda-toolkit[nvcc,cudart,cccl]==") for pin in row.requirements
        )
        assert has_toolkit == (row.accelerator == "cuda" and row.toolkit.startswith("13."))


def test_a_rocm_torch_cannot_be_mistaken_for_the_default_index_s():
    row = targets.load().find("rocm72-gfx942")
    assert row.torch_requirement == "torch==2.13.0+rocm7.2"
    assert row.index_required
    assert row.arch_list == "gfx942"


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        targets.load().cpu.torch = "1.0"  # type: ignore[misc]


def test_an_unknown_id_names_the_known_ones():
    with pytest.raises(TargetError, match="cu999") as caught:
        targets.load().find("cu999-sm1")
    assert "cu121-sm89" in caught.value.required


def test_toml_is_read_with_pip_s_own_reader_on_a_bare_python_310(tmp_path, monkeypatch):
    pytest.importorskip("pip._vendor.tomli")
    path = tmp_path / "some.toml"
    path.write_text("a = 1")
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    assert _toml.load(path) == {"a": 1}
    monkeypatch.setitem(sys.modules, "pip._vendor.tomli", None)
    with pytest.raises(FlexopsError, match="cannot read TOML"):
        _toml.load(path)


def test_the_matrix_is_there_without_torch_or_anything_installed():
    root = Path(__file__).parents[2]
    code = (
        "from flexops import targets; print(targets.load().ids, targets.detect().reason); assert"
        " not {'torch', 'typer', 'filelock'} & set(sys.modules)"
    )
    # -S: no site-packages
    script = f"import sys; sys.path.insert(0, {str(root)!r}); {code}"
    done = completed([sys.executable, "-S", "-B", "-c", script], cwd="/")
    assert "cu130-sm90" in done.stdout
