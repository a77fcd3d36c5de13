"""The parts of ``flexops_tools.channel`` that need no bindings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conda_world import ROOT
from processes import completed

from flexops import targets
from flexops.errors import ChannelError, SettingsError
from flexops.settings import Settings
from flexops_tools.channel import check, run
from flexops_tools.channel.place import Place, distribution
from flexops_tools.targets import conda

CPU, CUDA129, CUDA130 = conda.variants(targets.load())


def test_missing_bindings_name_the_way_to_get_them(monkeypatch):
    monkeypatch.setattr(run, "BINDINGS", {"no_such_module": "py-nothing"})
    with pytest.raises(ChannelError, match="not installed") as caught:
        run.child("solve", {})
    assert (caught.value.found, caught.value.fix) == (
        "no py-nothing",
        "pip install './tools[conda]'   # in the clone",
    )


@pytest.mark.parametrize(
    ("cuda", "there", "variant"),
    [
        ("", "cpu cuda129 cuda130", "cpu"),
        ("12.9", "cpu cuda129 cuda130", "cuda129"),
        ("13.0", "cpu cuda129 cuda130", "cuda130"),
        ("14.1", "cpu cuda129 cuda130", "cuda130"),
        ("13.0", "cpu cuda129", "cuda129"),
        ("11.8", "cpu cuda129 cuda130", "cpu"),
        ("13.0", "cpu", "cpu"),
    ],
)
def test_which_variant_a_machine_should_get(cuda, there, variant):
    assert (
        check.expected(check.Machine("it", cuda), (CPU, CUDA129, CUDA130), there.split()) == variant
    )


def test_a_package_says_for_which_devices_it_is_compiled():
    assert Settings.from_environ({"FLEXOPS_AOT_DEVICES": "cuda,cpu"}).aot_devices == ("cpu", "cuda")
    assert Settings.from_environ({}).aot_devices == ()
    with pytest.raises(SettingsError, match="FLEXOPS_AOT_DEVICES"):
        Settings.from_environ({"FLEXOPS_AOT_DEVICES": "cpu,gpu"})


def test_names_of_packages():
    assert distribution(Path("a-b-c-1.0-cpu_h1_0.conda")) == ("a-b-c", "1.0", "cpu_h1_0")
    assert distribution(Path("a-1.0-0.tar.bz2")) == ("a", "1.0", "0")


def test_only_packages_of_the_name_are_counted(tmp_path):
    for name in (
        "flexops-1-0.conda",
        "flexops-extra-1-0.conda",
        "flexops-1-0.conda.partial",
        "repodata.json",
    ):
        path = tmp_path / "linux-64" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    place = Place(tmp_path)
    assert [path.name for path in place.packages("flexops")] == ["flexops-1-0.conda"]
    assert len(place.packages()) == 2


def test_doctor_s_findings_in_a_line_each():
    report = json.loads(
        '{"findings": [{"id": "torch", "status": "ok", "found": "2.13"}, {"id": "ninja", "status":'
        ' "warn", "found": "none"}]}'
    )
    assert check.findings(report) == ("warn: ninja: none",)


def test_the_command_imports_neither_torch_nor_the_bindings():
    code = (
        "import sys; sys.orig_argv[1:] = ['-m', 'flexops']; import flexops.cli._app;"
        " print(*{'torch', 'rattler', 'rattler_build'} & set(sys.modules))"
    )
    done = completed([sys.executable, "-c", code], cwd=ROOT)
    assert done.stdout.split() == []
