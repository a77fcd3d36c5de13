"""The workflows: linted, pinned, without rights that they do not need, and made of this
repository's own scripts."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import completed

from flexops import targets
from flexops.targets import loading
from flexops_tools.targets import image_files

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
NAMES = {path.stem for path in WORKFLOWS}
ISA_OF_RUNNER = {"ubuntu-24.04": "x86_64", "ubuntu-24.04-arm": "aarch64"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return completed(command, cwd=ROOT, env={**os.environ, **environment}, code=None)


def uses(path: Path) -> list[str]:
    return re.findall(r"uses: (.*)", path.read_text())


def steps(path: Path) -> list[str]:
    return re.findall(r"run: (.*)", path.read_text())


@pytest.fixture
def tool(require: Callable[..., None]) -> Callable[[str], str]:
    def find(name: str) -> str:
        found = shutil.which(
            name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )
        require(
            found,
            name,
            "pip install -r tests/requirements.txt",
            "" if os.uname().machine == "x86_64" else "there is no package of it for this machine",
        )
        return str(found)

    return find


def test_what_there_is():
    assert {"ci", "conda", "docs", "images", "wheels"} == NAMES


def test_actionlint_finds_nothing(tool):
    done = run(tool("actionlint"), "-no-color", *map(str, WORKFLOWS))
    assert done.returncode == 0, done.stdout


def test_zizmor_finds_nothing(tool):
    done = run(tool("zizmor"), "--offline", "--pedantic", "--no-progress", "--quiet", str(GITHUB))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda one: one.stem)
def test_every_action_is_pinned_by_commit_and_says_which_version_that_is(path):
    for one in uses(path):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one), one


def test_an_action_has_one_pin():
    pins: dict[str, set[str]] = {}
    for one in (one for path in WORKFLOWS for one in uses(path)):
        pins.setdefault(one.partition("@")[0], set()).add(one)
    assert {name: found for name, found in pins.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda one: one.stem)
def test_every_step_is_a_script_of_this_repository(path):
    found = steps(path)
    assert found
    for one in found:
        root = r"(?:sudo -H (?:--preserve-env=\w+ )?)?"
        script = re.fullmatch(root + r"(?:bash|python3) (\S+)(?: .*)?", one)
        assert script, one
        assert (ROOT / script[1]).is_file(), one


def test_ci_runs_the_commands_of_the_readme_in_their_order_then_what_they_leave_out():
    section = (ROOT / "README.md").read_text().partition("## Work on it")[2].partition("\n## ")[0]
    commands = [
        line.partition("#")[0].strip() for line in section.splitlines() if line.startswith("bash ")
    ]
    assert [command.split()[1] for command in commands] == [
        "scripts/setup_cuda_dev_environment.sh",
        "scripts/run_tests.sh",
    ]
    performed = [
        line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("bash ")
    ]
    assert performed == [*commands, "bash scripts/run_tests.sh --rest"]


def test_the_two_runs_of_ci_are_the_whole():
    script = (ROOT / "scripts/run_tests.sh").read_text()
    marks = dict(re.findall(r"(''|--all|--rest)\) run_part '(.*?)'", script))
    for slow, extra in itertools.product((False, True), repeat=2):
        taken = {
            name: bool(eval(marks[name], {"slow": slow, "extra": extra}))
            for name in ("''", "--all", "--rest")
        }
        assert (taken["''"] or taken["--rest"]) == taken["--all"] == (not slow)
        assert not (taken["''"] and taken["--rest"])


def test_the_oldest_and_the_newest_torch_are_tested():
    found = re.search(r"target: \[(.*)\]", (GITHUB / "workflows/ci.yml").read_text())
    assert found
    matrix = targets.load()
    versions = {row.id: tuple(map(int, row.torch.split("."))) for row in matrix.targets}
    assert [versions[name] for name in found[1].split(", ")] == [
        min(versions.values()),
        max(versions.values()),
    ]


def test_the_images_jobs_are_the_matrix():
    done = run(sys.executable, "scripts/ci/matrix.py")
    outputs = {
        name: json.loads(value)
        for name, _, value in (line.partition("=") for line in done.stdout.splitlines())
    }
    rows = targets.load().targets
    assert outputs["rows"] == [row.id for row in rows]
    assert [(one["row"], one["machine"]) for one in outputs["builds"]] == [
        (row.id, machine) for row in rows for machine in row.machines
    ]
    assert all(ISA_OF_RUNNER[one["runner"]] == one["machine"] for one in outputs["builds"])
    assert {one["row"] for one in outputs["builds"] if one["machine"] == "aarch64"} == {
        "cpu",
        "cu130-sm90",
        "cu130-sm100",
        "cu132-sm90",
        "cu132-sm100",
    }


def publish(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # by a Python without torch, as on the runners
    path = f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}"
    settings = {"DRY_RUN": "1", "IMAGE": "ghcr.io/someone/flexops", "PATH": path, **environment}
    return run("bash", "scripts/ci/publish_image.sh", *arguments, **settings)


def test_an_image_is_checked_and_then_pushed_by_digest_with_sbom_and_provenance():
    done = publish("build", "cu130-sm90", "aarch64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    loaded, checked, pushed = (
        next(number for number, line in enumerate(lines) if words in line)
        for words in (" --load ", "image check cu130-sm90", "push=true")
    )
    assert loaded < checked < pushed, "nothing is pushed that was not checked"
    name = "flexops:cu130-sm90-aarch64"
    assert f"tags={name}" in lines[loaded]
    assert lines[checked].endswith(f"--tag {name}")
    assert not [line for line in lines[: checked + 1] if "push" in line]
    for setting in (
        "platform=linux/arm64",
        "tags=ghcr.io/someone/flexops ",
        "output=type=image,push-by-digest=true,name-canonical=true,push=true",
        "attest=type=provenance,mode=max",
        "attest=type=sbom",
    ):
        assert f"--set cu130-sm90.{setting}" in lines[pushed] + " "


def test_an_image_that_fails_its_check_is_not_pushed(tmp_path):
    for name, text in {
        "docker": f'echo "$@" >>{tmp_path}/calls',
        "python3": (
            'case "$*" in *venv*) mkdir -p "$3/bin"; '
            f'cp {tmp_path}/failing "$3/bin/python";; *) exec {sys.executable} "$@";; esac'
        ),
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "failing").write_text('#!/bin/sh\ncase "$*" in *check*) exit 1;; esac\n')
    (tmp_path / "failing").chmod(0o755)
    places = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "DIGESTS": str(tmp_path / "d")}
    root = tmp_path / "checkout"
    for name in ("flexops", "scripts", "tools", "recipe"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, root)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    commit = ["git", *author, "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(commit, cwd=root, check=True)
    command = ["bash", str(root / "scripts/ci/publish_image.sh"), "build", "cpu", "x86_64"]
    variables = {**os.environ, **places, "IMAGE": "ghcr.io/someone/flexops"}
    completed(command, env=variables, code=1)
    calls = (tmp_path / "calls").read_text()
    assert " --load " in calls
    assert "push" not in calls


def test_the_owner_is_in_lower_case_as_registries_want_it(tmp_path):
    (tmp_path / "cpu-x86_64").write_text("sha256:1\n")
    (tmp_path / "cpu-aarch64").write_text("sha256:2\n")
    done = publish("join", "cpu", IMAGE="ghcr.io/SomeOne/flexops", DIGESTS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ghcr.io/someone/flexops@sha256:1" in done.stdout
    assert "SomeOne" not in done.stdout + publish("build", "cpu", "x86_64", IMAGE="a/B/c").stdout


def test_machines_of_a_row_are_joined_by_digest_and_a_tag_adds_its_version(tmp_path):
    digests = {"DIGESTS": str(tmp_path)}
    for number, machine in enumerate(("x86_64", "aarch64")):
        missing = publish("join", "cu130-sm90", **digests)
        assert missing.returncode == 2
        assert f"cu130-sm90 has no digest for {machine}" in missing.stderr
        (tmp_path / f"cu130-sm90-{machine}").write_text(f"sha256:{number}\n")
    parts = "ghcr.io/someone/flexops@sha256:0 ghcr.io/someone/flexops@sha256:1"
    plain = publish("join", "cu130-sm90", GITHUB_REF="refs/heads/main", **digests).stdout.strip()
    create = "docker buildx imagetools create --tag ghcr.io/someone/flexops:cu130-sm90"
    assert plain == f"{create} {parts}"
    tagged = publish("join", "cu130-sm90", GITHUB_REF="refs/tags/v0.2.0", **digests).stdout
    assert "--tag ghcr.io/someone/flexops:cu130-sm90-0.2.0" in tagged


def test_room_is_made_on_hosted_runners_only(tmp_path):
    (tmp_path / "usr/share/dotnet").mkdir(parents=True)
    (tmp_path / "usr/share/other").mkdir()
    script = ("bash", "scripts/ci/free_disk.sh")
    assert run(*script, FREE_DISK_ROOT=str(tmp_path), RUNNER_ENVIRONMENT="").returncode == 0
    assert (tmp_path / "usr/share/dotnet").is_dir()
    done = run(*script, FREE_DISK_ROOT=str(tmp_path), RUNNER_ENVIRONMENT="github-hosted")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "usr/share").iterdir()] == ["other"]
    text = (GITHUB / "workflows/images.yml").read_text()
    assert text.index("free_disk.sh") < text.index("publish_image.sh build")


def test_base_images_are_pinned_by_the_registrys_digest(tmp_path):
    module = runpy.run_path(str(ROOT / "scripts/ci/base_digests.py"))
    asked: list[str] = []

    def look_up(image: str) -> str:
        asked.append(image)
        return f"sha256:{hashlib.sha256(image.encode()).hexdigest()}"

    text = Path(loading.PATH).read_text()
    path = tmp_path / "matrix.toml"
    path.write_text(module["pinned"](text, look_up))
    rows = loading.read(path).targets
    assert len(asked) == len(set(asked)) == 3, "each image once"
    for row in rows:
        assert row.build_digest == look_up(row.build_base)
        assert row.runtime_digest == look_up(row.runtime_base)
        assert image_files.build_args(row)["BUILD_BASE"] == f"{row.build_base}@{row.build_digest}"
    again = module["pinned"](path.read_text(), lambda _: "sha256:" + "0" * 64)
    path.write_text(again)
    assert {row.build_digest for row in loading.read(path).targets} == {"sha256:" + "0" * 64}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("build", "cu121-sm89", "aarch64"), "cu121-sm89 is not for aarch64"),
        (("build", "cu121-sm89"), "not understood"),
        ((), "not understood"),
    ],
)
def test_what_is_asked_wrongly_is_rejected(arguments, said):
    done = publish(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_bake_file_has_every_row_that_is_published():
    bake = (ROOT / "docker/docker-bake.hcl").read_text()
    for row in targets.load().ids:
        assert f'target "{row}" {{' in bake


def test_releases_packages_go_into_the_folder_of_their_platform(tmp_path):
    """Both ways: what is attached to a release is named by its platform, and the channel puts it
    back."""
    for platform in ("linux-64", "linux-aarch64"):
        (tmp_path / "packages" / platform).mkdir(parents=True)
        (tmp_path / "packages" / platform / "flexops-0.2.0-cpu_h1_0.conda").write_text(platform)
    programs = tmp_path / "bin"
    programs.mkdir()
    gh = programs / "gh"
    gh.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\ncase "$*" in *view*) exit 1;; *--notes-file*)'
        f" cat >{tmp_path}/notes;; esac\n"
    )
    gh.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = run(
        "bash",
        "scripts/ci/attach_to_release.sh",
        str(tmp_path / "packages"),
        GITHUB_REF="refs/tags/v9.9.9",
        PATH=path,
    )
    assert done.returncode == 1, "there is no such section in the changelog"
    gh.write_text(gh.read_text().replace("exit 1", "exit 0"))
    done = run(
        "bash",
        "scripts/ci/attach_to_release.sh",
        str(tmp_path / "packages"),
        GITHUB_REF="refs/tags/v9.9.9",
        PATH=path,
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "release edit v9.9.9 --draft=false" in calls, "users cannot reach a draft's files"
    assert calls[-1] == "workflow run docs.yml --ref main", "which makes the channel"
    uploads = [
        line.split()[3]
        for line in (tmp_path / "calls").read_text().splitlines()
        if " upload " in line
    ]
    assert [Path(one).name for one in uploads] == [
        "linux-64--flexops-0.2.0-cpu_h1_0.conda",
        "linux-aarch64--flexops-0.2.0-cpu_h1_0.conda",
    ]
    script = (ROOT / "scripts/ci/build_conda.sh").read_text()
    function = script[
        script.index("place() {") : script.index("\n}\n", script.index("place() {")) + 3
    ]
    for one in uploads:
        placed: Any = run("bash", "-euc", f'{function}\nplace "{one}" "{tmp_path / "channel"}"')
        assert placed.returncode == 0, placed.stderr
    assert {
        path.parent.name: path.read_text() for path in (tmp_path / "channel").rglob("*.conda")
    } == {
        "linux-64": "linux-64",
        "linux-aarch64": "linux-aarch64",
    }


def test_issue_forms_ask_for_doctor_s_report():
    form = (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text()
    assert "flexops doctor --json" in form
