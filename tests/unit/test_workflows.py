"""The workflows: linted, pinned, without rights that they do not need, and made of this repository's own scripts."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexops import targets

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
NAMES = {path.stem for path in WORKFLOWS}
ISA_OF_RUNNER = {"ubuntu-24.04": "x86_64", "ubuntu-24.04-arm": "aarch64"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment})


def uses(path: Path) -> list[str]:
    return re.findall(r"uses: (.*)", path.read_text())


def steps(path: Path) -> list[str]:
    return re.findall(r"run: (.*)", path.read_text())


@pytest.fixture
def tool(require: Callable[..., None]) -> Callable[[str], str]:
    def find(name: str) -> str:
        found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        require(found, name, "pip install -r tests/requirements.txt", "" if os.uname().machine == "x86_64" else "there is no package of it for this machine")
        return str(found)

    return find


def test_what_there_is() -> None:
    assert {"ci", "conda", "docs", "images", "wheels"} == NAMES


def test_actionlint_finds_nothing(tool: Callable[[str], str]) -> None:
    done = run(tool("actionlint"), "-no-color", *map(str, WORKFLOWS))
    assert done.returncode == 0, done.stdout


def test_zizmor_finds_nothing(tool: Callable[[str], str]) -> None:
    done = run(tool("zizmor"), "--offline", "--pedantic", "--no-progress", "--quiet", str(GITHUB))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda one: one.stem)
def test_every_action_is_pinned_by_commit_and_says_which_version_that_is(path: Path) -> None:
    for one in uses(path):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one), one


def test_an_action_has_one_pin() -> None:
    pins: dict[str, set[str]] = {}
    for one in (one for path in WORKFLOWS for one in uses(path)):
        pins.setdefault(one.partition("@")[0], set()).add(one)
    assert {name: found for name, found in pins.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda one: one.stem)
def test_every_step_is_a_script_of_this_repository(path: Path) -> None:
    found = steps(path)
    assert found
    for one in found:
        script = re.fullmatch(r"(?:sudo -H )?(?:bash|python3) (\S+)(?: .*)?", one)
        assert script, one
        assert (ROOT / script[1]).is_file(), one


def test_ci_runs_the_commands_of_the_readme_in_their_order_then_what_they_leave_out() -> None:
    section = (ROOT / "README.md").read_text().partition("## Work on it")[2].partition("\n## ")[0]
    commands = [line.partition("#")[0].strip() for line in section.splitlines() if line.startswith("bash ")]
    assert [command.split()[1] for command in commands] == ["scripts/setup_cuda_dev_environment.sh", "scripts/run_tests.sh"]
    performed = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("bash ")]
    assert performed == [*commands, "bash scripts/run_tests.sh --rest"]


def test_the_two_runs_of_ci_are_the_whole() -> None:
    script = (ROOT / "scripts/run_tests.sh").read_text()
    marks = dict(re.findall(r"(''|--all|--rest)\) run_part '(.*?)'", script))
    for slow, extra in itertools.product((False, True), repeat=2):
        taken = {name: bool(eval(marks[name], {"slow": slow, "extra": extra})) for name in ("''", "--all", "--rest")}
        assert (taken["''"] or taken["--rest"]) == taken["--all"] == (not slow)
        assert not (taken["''"] and taken["--rest"])


def test_the_oldest_and_the_newest_torch_are_tested() -> None:
    found = re.search(r"target: \[(.*)\]", (GITHUB / "workflows/ci.yml").read_text())
    assert found
    matrix = targets.load()
    versions = {row.id: tuple(map(int, row.torch.split("."))) for row in matrix.targets}
    assert [versions[name] for name in found[1].split(", ")] == [min(versions.values()), max(versions.values())]


def test_the_images_jobs_are_the_matrix() -> None:
    done = run(sys.executable, "scripts/ci/matrix.py")
    outputs = {name: json.loads(value) for name, _, value in (line.partition("=") for line in done.stdout.splitlines())}
    rows = targets.load().targets
    assert outputs["rows"] == [row.id for row in rows]
    assert [(one["row"], one["machine"]) for one in outputs["builds"]] == [(row.id, machine) for row in rows for machine in row.machines]
    assert all(ISA_OF_RUNNER[one["runner"]] == one["machine"] for one in outputs["builds"])
    assert {one["row"] for one in outputs["builds"] if one["machine"] == "aarch64"} == {"cpu", "cu130-sm90", "cu130-sm100", "cu132-sm90", "cu132-sm100"}


def publish(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("bash", "scripts/ci/publish_image.sh", *arguments, DRY_RUN="1", IMAGE="ghcr.io/someone/flexops", **environment)


def test_an_image_is_built_with_sbom_and_provenance_and_named_by_its_machine() -> None:
    done = publish("build", "cu130-sm90", "aarch64")
    assert done.returncode == 0, done.stderr
    bake = done.stdout.splitlines()[-1]
    assert bake.startswith("docker buildx bake -f docker/docker-bake.hcl cu130-sm90 --push")
    for setting in ("platform=linux/arm64", "tags=ghcr.io/someone/flexops:cu130-sm90-aarch64", "attest=type=provenance,mode=max", "attest=type=sbom"):
        assert f"--set cu130-sm90.{setting}" in bake


def test_machines_of_a_row_are_joined_and_a_tag_adds_its_version() -> None:
    parts = "ghcr.io/someone/flexops:cu130-sm90-x86_64 ghcr.io/someone/flexops:cu130-sm90-aarch64"
    plain = publish("join", "cu130-sm90", GITHUB_REF="refs/heads/main").stdout.strip()
    assert plain == f"docker buildx imagetools create --tag ghcr.io/someone/flexops:cu130-sm90 {parts}"
    tagged = publish("join", "cu130-sm90", GITHUB_REF="refs/tags/v0.2.0").stdout
    assert "--tag ghcr.io/someone/flexops:cu130-sm90-0.2.0" in tagged


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("build", "cu121-sm89", "aarch64"), "cu121-sm89 is not for aarch64"), (("build", "cu121-sm89"), "not understood"), ((), "not understood")],
)
def test_what_is_asked_wrongly_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = publish(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_bake_file_has_every_row_that_is_published() -> None:
    bake = (ROOT / "docker/docker-bake.hcl").read_text()
    for row in targets.load().ids:
        assert f'target "{row}" {{' in bake


def test_releases_packages_go_into_the_folder_of_their_platform(tmp_path: Path) -> None:
    """Both ways: what is attached to a release is named by its platform, and the channel puts it back."""
    for platform in ("linux-64", "linux-aarch64"):
        (tmp_path / "packages" / platform).mkdir(parents=True)
        (tmp_path / "packages" / platform / "flexops-0.2.0-cpu_h1_0.conda").write_text(platform)
    programs = tmp_path / "bin"
    programs.mkdir()
    gh = programs / "gh"
    gh.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\ncase "$*" in *view*) exit 1;; *--notes-file*) cat >{tmp_path}/notes;; esac\n')
    gh.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", "scripts/ci/attach_to_release.sh", str(tmp_path / "packages"), GITHUB_REF="refs/tags/v9.9.9", PATH=path)
    assert done.returncode == 1, "there is no such section in the changelog"
    gh.write_text(gh.read_text().replace("exit 1", "exit 0"))
    done = run("bash", "scripts/ci/attach_to_release.sh", str(tmp_path / "packages"), GITHUB_REF="refs/tags/v9.9.9", PATH=path)
    assert done.returncode == 0, done.stderr
    uploads = [line.split()[3] for line in (tmp_path / "calls").read_text().splitlines() if " upload " in line]
    assert [Path(one).name for one in uploads] == ["linux-64--flexops-0.2.0-cpu_h1_0.conda", "linux-aarch64--flexops-0.2.0-cpu_h1_0.conda"]
    script = (ROOT / "scripts/ci/build_conda.sh").read_text()
    function = script[script.index("place() {") : script.index("\n}\n", script.index("place() {")) + 3]
    for one in uploads:
        placed: Any = run("bash", "-euc", f'{function}\nplace "{one}" "{tmp_path / "channel"}"')
        assert placed.returncode == 0, placed.stderr
    assert {path.parent.name: path.read_text() for path in (tmp_path / "channel").rglob("*.conda")} == {
        "linux-64": "linux-64", "linux-aarch64": "linux-aarch64",
    }  # fmt: skip


def test_issue_forms_ask_for_doctor_s_report() -> None:
    form = (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text()
    assert "flexops doctor --json" in form
