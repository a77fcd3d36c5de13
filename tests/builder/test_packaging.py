"""What setuptools gets of a package with operators, as far as nothing is compiled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from setuptools import Distribution

from flexops import settings, toolchain
from flexops.builder import packaging
from flexops.errors import FlexopsError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the package ``bare``: sources of two families, of which it declares none."""
    for family, name in (("one", "one_cpu.cpp"), ("two", "two_cuda.cpp"), ("two", "two.cuh")):
        (tmp_path / "bare/csrc" / family).mkdir(parents=True, exist_ok=True)
        (tmp_path / "bare/csrc" / family / name).write_text("")
    (tmp_path / "bare/__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "bare", raising=False)
    return tmp_path


def command(place: Path, **more: Any) -> packaging.BuildLibraries:
    found = packaging.extensions("bare", where=place)
    command = packaging.BuildLibraries(Distribution({"ext_modules": found, **more}))
    command.ensure_finalized()
    return command


def test_an_extension_for_each_folder_with_launchers(place):
    (place / "bare/csrc/common").mkdir()
    found = packaging.extensions("bare")
    assert {one.name: [Path(name).name for name in one.sources] for one in found} == {
        "bare._aot.one": ["one_cpu.cpp"],
        "bare._aot.two": ["two_cuda.cpp"],
    }
    with pytest.raises(SystemExit, match="csrc has nothing to build"):
        packaging.extensions("bare", where="elsewhere")


def test_a_source_distribution_has_headers_and_an_editable_install_compiles_nothing(place):
    one = command(place)
    assert {Path(name).name for name in one.get_source_files()} == {
        "one_cpu.cpp",
        "two_cuda.cpp",
        "two.cuh",
    }
    one.inplace = True
    one.run()
    assert one.get_outputs() == []


@pytest.mark.parametrize("registered", [True, False])
def test_a_package_that_registers_no_library_is_warned_of(place, monkeypatch, registered):
    points = {packaging.registered.GROUP: "bare = bare"} if registered else {}
    one, said = command(place, entry_points=points), []
    monkeypatch.setattr(one, "warn", said.append)
    one.inplace = True
    one.run()
    assert len(said) == (not registered)
    assert all('bare = "bare"' in text for text in said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "does not declare what it has sources of"),
        ("import nothing_of_that_name", "cannot be imported, so its declarations"),
        ("raise SystemExit(3)", "cannot be imported, so its declarations"),
    ],
)
def test_declarations_that_are_not_there(place, text, said):
    (place / "bare/__init__.py").write_text(text)
    before = list(sys.path)
    with pytest.raises(FlexopsError, match=said):
        packaging.declared("bare", ["one", "two"], place)
    assert sys.path == before


@pytest.mark.parametrize(
    ("table", "environment", "devices", "architectures"),
    [
        ("", {}, ("cpu", "cuda"), None),
        ('devices = ["cpu"]\narchitectures = "9.0"', {}, ("cpu",), "9.0"),
        (
            'devices = ["cpu"]\narchitectures = "9.0"',
            {"FLEXOPS_AOT_DEVICES": "cuda", "TORCH_CUDA_ARCH_LIST": "8.0"},
            ("cuda",),
            "8.0",
        ),
    ],
)
def test_the_environment_comes_before_the_projects_table(
    place, monkeypatch, table, environment, devices, architectures
):
    (place / "pyproject.toml").write_text(f"[tool.flexops]\n{table}\n")
    chosen = settings.Settings.from_environ({"HOME": str(place), **environment})
    monkeypatch.setattr(settings, "current", lambda: chosen)
    found, asked = packaging._choices()
    assert (asked, found.arch_list) == (devices, architectures)


@pytest.mark.parametrize(
    ("line", "required"),
    [
        ('devices = "cpu"', 'devices = ["cpu", "cuda"]'),
        ('devices = ["tpu"]', "cpu, cuda"),
        ('device = ["cpu"]', "devices, architectures"),
        ('architectures = ["8.0", "9.0"]', 'architectures = "8.0;9.0"'),
        ("architectures = 9.0", '"8.0;9.0"'),
    ],
)
def test_a_setting_of_another_kind_is_told(place, line, required):
    (place / "pyproject.toml").write_text(f"[tool.flexops]\n{line}\n")
    with pytest.raises(FlexopsError) as caught:
        packaging._choices()
    assert required in caught.value.required


@pytest.mark.usefixtures("place")
def test_a_build_that_sees_no_torch_is_an_error(monkeypatch):
    monkeypatch.setattr(toolchain, "torch_build", lambda: None)
    with pytest.raises(FlexopsError, match="sees no torch"):
        packaging._choices()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("compiled", [True, False])
def test_the_tag_of_a_wheel(compiled):
    found = packaging.extensions("bare") if compiled else []
    wheel = packaging.PlatformWheel(Distribution({"name": "bare", "ext_modules": found}))
    wheel.ensure_finalized()
    assert wheel.root_is_pure is not compiled
    assert wheel.get_tag()[:2] == ("py3", "none")
    assert (wheel.get_tag()[2] == "any") is not compiled
