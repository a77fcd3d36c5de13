"""The parts of ``flexops_tools.channel`` that need no bindings: choosing an engine,
which variant a machine should get."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from conda_world import ROOT
from processes import completed

from flexops import targets
from flexops.errors import ChannelError, SettingsError
from flexops.settings import Settings
from flexops_tools.channel import build, building, check, engine, run
from flexops_tools.channel.place import Place, distribution
from flexops_tools.targets import conda

CPU, CUDA129, CUDA130 = conda.variants(targets.load())

FAKE = """#!{python}
import os, pathlib, sys
if sys.argv[1:] == ["--version"]:
    print("conda-build {version}"); sys.exit()
print("fake conda-build", *sys.argv[1:])
print("override", os.environ.get("CONDA_OVERRIDE_CUDA", "none"))
print("Packaging new files")
output = pathlib.Path(sys.argv[sys.argv.index("--output-folder") + 1]) / "linux-64"
output.mkdir(parents=True)
(output / "flexops-0.1.0-cpu_h1_0.conda").write_text("a package")
sys.exit({code})
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A conda-build that does as told; returns the function that installs it."""

    def install(version: str = "26.1.0", code: int = 0) -> Path:
        path = tmp_path / "bin" / "conda-build"
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE.format(python=sys.executable, version=version, code=code))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
        return path

    return install


@pytest.fixture
def unindexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake package can be neither sealed nor indexed."""
    monkeypatch.setattr(
        building, "child", lambda _, request: shutil.copy(request["package"], request["target"])
    )
    monkeypatch.setattr(building, "index", lambda place: len(place.packages()))


@pytest.mark.usefixtures("unindexed")
def test_conda_build_is_taken_where_it_is_installed(fake, tmp_path):  # type: ignore[no-untyped-def]
    path = fake()
    assert engine.choose("auto") == engine.Engine("conda-build", (str(path),))
    phases: list[str] = []
    place = Place(tmp_path / "channel")
    (built,) = build(
        [CUDA130],
        place,
        upstream=["one", "two"],
        overrides=[tmp_path / "pins.yaml"],
        test=False,
        on_phase=lambda _, phase: phases.append(phase),
    )
    told = built.log.read_text()
    files = f"-m {ROOT}/recipe/variants/cuda130.yaml -m {tmp_path}/pins.yaml"
    output = place.work / "cuda130"
    options = (
        f"--override-channels --output-folder {output} --package-format 2 --no-include-recipe"
        " --no-test"
    )
    assert f"fake conda-build {ROOT}/recipe {files} -c one -c two {options}\n" in told
    assert "override 13.0" in told
    assert phases == ["packing", "indexing"]
    assert built.package == place.channel / "linux-64" / "flexops-0.1.0-cpu_h1_0.conda"
    assert built.package.read_text() == "a package"
    assert not output.exists()


def test_a_conda_build_that_fails_is_one_error_and_its_log_is_kept(fake, tmp_path):  # type: ignore[no-untyped-def]
    fake(code=3)
    place = Place(tmp_path / "channel")
    with pytest.raises(ChannelError, match="variant cpu cannot be built") as caught:
        build([CPU], place)
    assert caught.value.log == place.logs / "cpu.log"
    assert "fake conda-build" in (place.logs / "cpu.log").read_text()
    assert not list(place.channel.rglob("*.conda"))


def test_an_old_conda_build_is_not_taken(fake):  # type: ignore[no-untyped-def]
    fake("25.11.3")
    assert engine.choose("auto").name == "rattler-build"
    with pytest.raises(ChannelError, match="conda-build cannot be used") as caught:
        engine.choose("conda-build")
    assert (caught.value.found.endswith("conda-build 25.11.3"), "26" in caught.value.required) == (
        True,
        True,
    )


def test_without_conda_build_rattler_build_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engine.choose("auto") == engine.choose("rattler-build") == engine.Engine("rattler-build")
    with pytest.raises(ChannelError) as caught:
        engine.choose("conda-build")
    assert caught.value.found == "no conda-build on PATH"


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
