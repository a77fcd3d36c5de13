"""Everything rendered follows from the matrix: this checkout, a small project, and the command that
keeps it so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from command_line import flexops_command

from flexops import targets
from flexops.errors import TargetError
from flexops.targets import loading
from flexops_tools.targets import checkout as checkouts
from flexops_tools.targets import locks, render

ROOT = Path(__file__).parents[3]
SMALL = ROOT / "tests" / "golden" / "targets.toml"


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A rendered project of the small matrix."""
    render.write(loading.read(SMALL), tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def matrix() -> targets.Matrix:
    return loading.read(SMALL)


def test_this_checkout_follows_its_matrix():
    assert render.compare(targets.load(), ROOT).lines() == []


def test_every_generated_file_says_so(project):
    for path, text in tree(project).items():
        assert render.HEADER in text, path


def test_rendering_again_changes_nothing(project, matrix):
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*") if path.is_file()}
    assert not render.write(matrix, project)
    assert {
        path: path.stat().st_mtime_ns for path in project.rglob("*") if path.is_file()
    } == before


def test_missing_differing_and_stray_files_are_listed_and_fixed(project, matrix):
    (project / "envs/cpu.yml").unlink()
    (project / "envs/cu121-sm89.yml").write_text("edited by hand\n")
    (project / "envs/old.yml").write_text(f"# {render.HEADER}\nname: old\n")
    (project / "envs/mine.yml").write_text(f"# mine\n# {render.HEADER}\n")
    (project / "envs/notes.bin").write_bytes(b"\xff\xfe\x00")
    found = render.compare(matrix, project)
    assert found.lines() == [
        "missing  envs/cpu.yml",
        "differs  envs/cu121-sm89.yml",
        "stray    envs/old.yml",
    ]
    assert render.write(matrix, project) == found
    assert not render.compare(matrix, project)
    assert {path.name for path in (project / "envs").iterdir()} >= {"mine.yml", "notes.bin"}
    assert not (project / "envs/old.yml").exists()


def test_a_page_is_made_when_there_is_none_and_kept_when_there_is(tmp_path, matrix):
    render.write(matrix, tmp_path)
    text = (tmp_path / render.TABLE).read_text()
    assert text == f"# Targets\n\n{render.table(matrix)}\n"
    (tmp_path / render.TABLE).write_text("before\n" + text + "after\n")
    assert not render.write(matrix, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["no markers", f"{render.END} {render.BEGIN}", f"{render.BEGIN} {render.BEGIN} {render.END}"],
)
def test_a_page_without_its_markers_is_an_error(matrix, text):
    with pytest.raises(TargetError, match="no place for the table"):
        render.page(matrix, text)


def test_requirements_work_with_the_default_index_alone_except_for_rocm(matrix):
    for target in matrix.targets:
        options = [
            line for line in render.requirements(target).splitlines() if line.startswith("-")
        ]
        assert bool(options) == (target.accelerator == "rocm")


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def _typer(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("typer")

        self.root = tmp_path
        monkeypatch.setattr(render, "checkout", lambda: tmp_path)
        self.run = lambda *arguments: flexops_command("target", *arguments, catch_exceptions=True)

    def test_check_exits_1_and_lists_then_render_fixes(self):
        checked = self.run("render", "--check")
        assert checked.exit_code == 1
        assert "missing  envs/cu121-sm89.yml" in checked.output
        assert not list(self.root.iterdir())
        assert self.run("render").exit_code == 0
        assert self.run("render", "--check").exit_code == 0
        assert self.run("render").output == "everything follows from the matrix\n"

    def test_list_and_show(self):
        listed = json.loads(self.run("list", "--json").output)
        assert [row["id"] for row in listed] == list(targets.load().ids)
        assert "CUDA 12.1.1" in self.run("list").output
        shown = json.loads(self.run("show", "cu130-sm90", "--json").output)
        assert shown == listed[[row["id"] for row in listed].index("cu130-sm90")]
        assert "least_driver    580" in self.run("show", "cu130-sm90").output
        assert isinstance(self.run("show", "nothing").exception, TargetError)

    def test_detect(self):
        found = json.loads(self.run("detect", "--json").output)
        assert found["id"] in targets.load().ids
        assert found["reason"]
        assert self.run("detect").output.startswith(found["id"] + "\n")


def test_an_installed_package_works_on_the_checkout_of_the_working_directory(tmp_path, monkeypatch):
    installed, clone = tmp_path / "site-packages", tmp_path / "clone"
    for root in (installed, clone):
        (root / "flexops" / "targets").mkdir(parents=True)
        shutil.copy(loading.PATH, root / "flexops" / "targets")
    (clone / "csrc" / "adam").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[3] / "pyproject.toml", clone)
    monkeypatch.setattr(checkouts, "_OWN", installed)
    monkeypatch.chdir(clone / "csrc" / "adam")
    assert render.checkout() == clone
    assert "torch==" in locks.input_text(targets.load().cpu, "header"), "of the clone's pyproject"
    with (clone / "flexops/targets/matrix.toml").open("a") as matrix:
        matrix.write("# edited\n")
    with pytest.raises(TargetError, match="different matrices") as caught:
        render.checkout()
    assert caught.value.fix.startswith("python -m flexops")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match="needs a checkout") as caught:
        render.checkout()
    assert str(tmp_path) in caught.value.found
    assert "cd into a clone" in caught.value.fix


ARGUMENTS = r"^ARG (\w+)"


def test_development_containers_are_the_dockerfiles_stage_for_it():
    matrix = targets.load()
    found = {
        path.parent.name: path for path in (ROOT / ".devcontainer").glob("*/devcontainer.json")
    }
    assert set(found) == {row.toolkit_name for row in matrix.targets}
    for name, path in found.items():
        document = json.loads(path.read_text().partition("\n")[2])
        build = document["build"]
        dockerfile = (path.parent / build["dockerfile"]).resolve()
        assert dockerfile.parent == ROOT / "docker"
        assert (path.parent / build["context"]).resolve() == ROOT
        text = dockerfile.read_text()
        assert f" AS {build['target']}\n" in text
        assert set(build["args"]) <= set(re.findall(ARGUMENTS, text, re.MULTILINE))
        row = matrix.find(build["args"]["TARGET"])
        assert row.toolkit_name == name
        assert set(row.capabilities) <= set(build["args"]["ARCH_LIST"].split(";"))
        assert document["remoteUser"] in (ROOT / "docker/make_user.sh").read_text()


def test_compose_has_a_service_for_each_row_and_starts_none_unasked():
    text = (ROOT / "compose.yaml").read_text()
    services = re.findall(
        r"^  ([\w-]+):\n    image: flexops:(\S+)\n    profiles: \[(\S+)\]\n", text, re.MULTILINE
    )
    assert services == [(row.id, row.id, row.id) for row in targets.load().targets]
    for row in targets.load().targets:
        own = text.partition(f"\n  {row.id}:\n")[2].partition("\n\n")[0]
        dockerfile = (ROOT / re.findall(r"dockerfile: (\S+)", own)[0]).read_text()
        assert set(re.findall(r"^        (\w+):", own, re.MULTILINE)) <= set(
            re.findall(ARGUMENTS, dockerfile, re.MULTILINE)
        )
        assert ("driver: nvidia" in own, "/dev/kfd" in own) == (
            row.accelerator == "cuda",
            row.accelerator == "rocm",
        )
