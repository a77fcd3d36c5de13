"""Images on a real engine: built, checked, run in every way that they must work; and builds that
cannot succeed.

The image is the row `cpu`; its base and its package index are made on this machine. CUDA rows are
built by the same Dockerfile template, and by hand.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from image_command import BASE, REPOSITORY, Image, copy_of_checkout
from processes import completed
from wheel_index import CREDENTIALS

from flexops import targets
from flexops.build.describe.catalog import CATALOG
from flexops.doctor.checks.build import TOLERANCE
from flexops_tools.images import naming
from flexops_tools.targets.image_files import labels

pytestmark = [pytest.mark.image, pytest.mark.extra]
SECRET = CREDENTIALS.partition(":")[2]


def run(engine: Any, name: str, *command: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of a container."""
    container = engine.containers.create(name, list(command), **options)
    try:
        container.start()
        code = container.wait(timeout=1200)["StatusCode"]
        return code, container.logs(stderr=False).decode(), container.logs(stdout=False).decode()
    finally:
        container.remove(force=True)


def containers(engine: Any) -> set[str]:
    """All of them: so nothing else may be built on the engine while these tests run."""
    # without a look at each, which may be gone by then
    return {one["Id"] for one in engine.api.containers(all=True)}


# ---- an image that works ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"user": "0:0"},
        {"user": "43210:54321"},
        {"read_only": True, "tmpfs": {"/cache": "exec,mode=1777"}},
        {"read_only": True, "user": "43210:54321", "volumes": ["flexops-test-cache:/cache"]},
        {"network_mode": "none"},
    ],
    ids=["plain", "root", "any-user", "read-only", "read-only-any-user-volume", "no-network"],
)
def test_the_default_command_reports_and_exits_0(engine, cpu_image, options):
    code, out, err = run(engine, cpu_image, **options)
    assert code == 0, out + err
    assert "target cpu" in out
    assert "compiled at install" in out


def test_operators_run_native_and_torch_is_quiet(engine, cpu_image):
    script = (
        "import torch, flexops; q = flexops.quantize(torch.randn(4, 64)); print([(s.op, s.backend)"
        " for s in flexops.status() if s.op == 'quant'])"
    )
    code, out, err = run(
        engine,
        cpu_image,
        "python",
        "-c",
        script,
        environment={"FLEXOPS_FALLBACK": "forbid"},
        user="43210:0",
        read_only=True,
    )
    assert (code, err) == (0, ""), err
    assert "('quant', 'aot')" in out


def test_image_check_finds_it_in_order(image, cpu_image, checkout):
    done = image("check", "cpu", "--tag", cpu_image, "--json", checkout=checkout)
    found = json.loads(done.stdout)
    assert {one["id"] for one in found["findings"] if one["status"] == "fail"} == set()
    statuses = {one["id"]: one["status"] for one in found["findings"]}
    assert (
        statuses["labels"]
        == statuses["image-clean"]
        == statuses["image-added"]
        == statuses["doctor-read-only"]
        == "ok"
    )
    assert abs(sum(layer["size"] for layer in found["layers"]) - found["size"]) < 1e6


def test_its_labels_say_what_is_in_it(engine, cpu_image):
    found = engine.images.get(cpu_image).labels
    assert labels(targets.load().cpu).items() <= found.items()
    assert found["org.opencontainers.image.base.name"] == BASE
    assert {
        f"org.opencontainers.image.{name}" for name in ("revision", "source", "created", "vendor")
    } <= found.keys()
    script = (
        "import platform, torch, importlib.metadata as m; print(platform.python_version(),"
        " torch.__version__, m.version('ninja'))"
    )
    _, out, _ = run(engine, cpu_image, "python", "-c", script)
    assert [found[f"dev.flexops.{name}"] for name in ("python", "torch", "ninja")] == out.split()


def test_nothing_of_the_build_reaches_it(engine, cpu_image, index_url):
    image = engine.images.get(cpu_image)
    told = json.dumps([image.attrs["Config"], image.history()])
    index = index_url.rpartition("@")[2]
    assert index not in told
    script = (
        f"grep -rlE --exclude-dir=proc --exclude-dir=sys '{index}' /etc /opt /home /root /var"
        " 2>/dev/null; which g++ cc nvcc; ls /opt"
    )
    _, out, _ = run(engine, cpu_image, "sh", "-c", script, user="0")
    assert out.split() == ["docker", "flexops"]


def test_credentials_of_an_index_are_kept_nowhere(engine, cpu_image, checkout):
    """The engine's own files are searched, if this user may read them."""
    assert {cpu_image, naming.kernels("cpu")} <= {
        tag for one in engine.images.list() for tag in one.tags
    }
    for one in engine.api.images(all=True):  # stages that no image derives from, too
        told = json.dumps([engine.api.inspect_image(one["Id"]), engine.api.history(one["Id"])])
        assert CREDENTIALS not in told
    log = (checkout / ".flexops/images/cpu-runtime.log").read_text()
    assert SECRET not in log
    root = Path(engine.info()["DockerRootDir"])
    if os.geteuid() == 0 and root.is_dir():
        places = [str(root / name) for name in ("image", "buildkit", "containers", "overlay2")]
        search = ["grep", "-rlF", "--include=*.json", "--include=*.db", "--include=*.conf"]
        found = completed([*search, SECRET, *places], code=None)
        assert found.stdout == ""


def test_who_runs_it_can_change_nothing_of_it(engine, cpu_image):
    script = (
        "find / -xdev -type f -writable -not -path '/proc/*' 2>/dev/null; find / -xdev -type f"
        " -perm /6000 2>/dev/null; echo 'and that is all'"
    )
    for user in ("", "43210:54321"):
        _, out, err = run(engine, cpu_image, "sh", "-c", script, **({"user": user} if user else {}))
        assert out == "and that is all\n", out + err


def test_it_lists_its_contents_and_has_the_locked_pip(engine, cpu_image):
    script = (
        "cat /opt/flexops/share/flexops/sbom.json; echo; echo ---; pip list --format json;"
        " dpkg-query --show libc6 | cut -f 2"
    )
    code, out, err = run(engine, cpu_image, "sh", "-c", script)
    assert code == 0, err
    listed, _, known = out.partition("\n---\n")
    document = json.loads(listed)
    assert document["bomFormat"] == "CycloneDX"
    components = {(one["name"], one["version"]) for one in document["components"]}
    packages, libc = known.splitlines()
    installed = {(one["name"], one["version"]) for one in json.loads(packages)}
    assert installed <= components
    assert ("libc6", libc) in components
    (locked,) = re.findall(
        r"^pip==(\S+)", (REPOSITORY / "docker" / "pip.lock").read_text(), re.MULTILINE
    )
    assert dict(installed)["pip"] == locked


def test_where_it_cannot_compile_it_names_the_image_that_can(engine, cpu_image):
    code, _, err = run(
        engine,
        cpu_image,
        "python",
        "-c",
        "import flexops; flexops.load_inline('x', 'int f() { return 1; }', functions='f')",
    )
    assert code == 1
    assert "flexops image build cpu --stage dev" in err


def test_the_first_process_passes_signals_on(engine, cpu_image):
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
        " print('ready', flush=True); time.sleep(1200)"
    )
    container = engine.containers.run(cpu_image, ["python", "-c", script], detach=True)
    try:
        deadline = time.monotonic() + 300
        while b"ready" not in container.logs() and time.monotonic() < deadline:
            time.sleep(0.1)
        container.stop(timeout=300)
        assert container.wait()["StatusCode"] == 7, (
            "not 137, with which the engine ends what lets the time pass"
        )
    finally:
        container.remove(force=True)


@pytest.fixture(scope="module")
def dev_image(image: Image, checkout: Path) -> str:
    """`flexops:cpu-test-dev`, built from the checkout's copy."""
    image.build("cpu", "--stage", "dev", "--tag", "flexops:cpu-test-dev", checkout=checkout)
    return "flexops:cpu-test-dev"


def test_a_dev_image_compiles(engine, dev_image):
    command = ["flexops", "build", "quant", "--target", "cpu", "--json"]
    code, out, err = run(engine, dev_image, *command, user="43210:54321")
    assert code == 0, out + err
    assert [one["error"] for one in json.loads(out)] == [None]
    code, out, _ = run(engine, dev_image, "cat", "/opt/flexops/share/flexops/sbom.json")
    assert {"g++", "torch"} <= {one["name"] for one in json.loads(out)["components"]}
    assert engine.images.get(dev_image).labels["org.opencontainers.image.base.name"] == BASE


def test_a_projects_wheel_is_made_in_a_dev_image_and_runs_where_nothing_compiles(
    engine, dev_image, cpu_image, tmp_path
):
    """The way of a project's release: a container without a GPU, without a network, as nobody in
    particular."""
    tmp_path.chmod(0o777)
    mounted = {
        "volumes": [f"{tmp_path}:/work"],
        "working_dir": "/work",
        "network_mode": "none",
        "user": "43210:54321",
        "environment": {"HOME": "/tmp"},
    }
    made = (
        "cd /tmp && flexops new scaler --family shrink && python -m pip wheel --no-deps"
        " --no-build-isolation --wheel-dir /work /tmp/scaler"
    )
    code, out, err = run(engine, dev_image, "sh", "-c", made, **mounted)
    assert code == 0, out + err
    [wheel] = tmp_path.glob("scaler-*.whl")
    program = (
        "import flexops, scaler, torch; print(scaler.shrink(torch.ones(3), 0.5).tolist(), *[one for"
        " one in flexops.status() if 'shrink' in str(one)])"
    )
    use = (
        f"python -m pip install --no-deps --no-index --target /tmp/site /work/{wheel.name} &&"
        f' PYTHONPATH=/tmp/site python -c "{program}"'
    )
    mounted["environment"] |= {"FLEXOPS_JIT": "0", "FLEXOPS_FALLBACK": "forbid"}
    code, out, err = run(engine, cpu_image, "sh", "-c", use, **mounted)
    assert code == 0, out + err
    assert "[0.5, 0.5, 0.5]" in out
    assert "device='cpu', backend='aot'" in out


@pytest.mark.slow
def test_an_image_of_every_family(image, tmp_path):
    everything = copy_of_checkout(tmp_path)
    image.build("cpu", "--tag", "flexops:cpu-test-all", checkout=everything)
    done = image("check", "cpu", "--tag", "flexops:cpu-test-all", "--json")
    assert {f"image-{spec.name}-cpu" for spec in CATALOG if spec.cpu_sources} <= {
        one["id"] for one in json.loads(done.stdout)["findings"] if one["status"] == "ok"
    }


# ---- the entrypoint, in a container of the base alone ----


def enter(engine: Any, base: str, *command: str, **options: Any) -> tuple[int, str, str]:
    mounted = [f"{REPOSITORY / 'docker/entrypoint.sh'}:/e.sh:ro", *options.pop("volumes", ())]
    environment = {"HOME": "/home/flexops", "FLEXOPS_IMAGE_TARGET": "cpu"}
    options |= {"volumes": mounted, "environment": environment, "network_mode": "none"}
    return run(engine, base, "sh", "/e.sh", *command, **options)


@pytest.mark.parametrize("command", [("doctor",), ("doctor", "--json"), ("flexops", "doctor")])
def test_a_read_only_container_names_the_mount(engine, base, command):
    code, _, err = enter(engine, base, *command, read_only=True)
    assert code == 1
    assert "no directory of this container is writable" in err
    assert "fix: docker run --read-only --tmpfs /cache:exec,mode=1777" in err
    tmpfs = {"/cache": "exec,mode=1777"}
    script = "touch $TMPDIR/file && echo $TMPDIR"
    code, out, err = enter(engine, base, "sh", "-c", script, read_only=True, tmpfs=tmpfs)
    assert (code, out, err) == (0, "/cache/0/tmp\n", "")
    code, out, err = enter(engine, base, "echo", "hello", read_only=True)
    assert (code, out, err) == (0, "hello\n", ""), "what writes nothing needs no mount"


def test_a_mounted_workspace_of_another_user_is_named(engine, base, tmp_path, require):
    require(os.geteuid() == 0, "root, to give a directory away", "run the tests as root")
    os.chown(tmp_path, 1234, 1234)
    options: dict[str, Any] = {"volumes": [f"{tmp_path}:/workspace"], "working_dir": "/workspace"}
    _, _, err = enter(engine, base, "touch", "made", user="10001:10001", **options)
    assert "/workspace belongs to user 1234:1234" in err
    assert 'fix: docker run --user "$(id -u):$(id -g)"' in err
    options = {"volumes": [f"{tmp_path}:/workspace"], "working_dir": "/workspace"}
    code, _, err = enter(engine, base, "touch", "made", user="1234:1234", **options)
    assert (code, err) == (0, "")
    assert (tmp_path / "made").stat().st_uid == 1234
    options = {"volumes": [f"{tmp_path}:/workspace:ro"], "working_dir": "/workspace"}
    assert enter(engine, base, "true", user="10001:10001", **options) == (0, "", "")


# ---- the wheel, and nothing else ----

ALONE = """
command -v python3 >/dev/null || exit 7
for tool in cc c++ gcc g++ clang nvcc hipcc zig ninja; do ! command -v $tool || exit 9; done
python3 -m venv /tmp/bare && cd /tmp && export PATH=/tmp/bare/bin:/usr/bin:/bin
pip install --quiet --no-index --find-links /wheels /wheel/*.whl numpy >&2 || exit 8
python -I /check_ops.py >&2 && flexops doctor --json
"""


@pytest.mark.slow
def test_the_wheel_alone_computes_with_every_operator(engine, base, wheels, tmp_path, require):
    """Python, torch and the wheel, no network and nothing to compile with: each library is in use,
    each operator what its reference is."""
    script = [
        "bash",
        str(REPOSITORY / "scripts/build_wheel.sh"),
        "--arch",
        platform.machine(),
        "--out",
        str(tmp_path),
    ]
    subprocess.run(
        script, env={**os.environ, "PYTHON": sys.executable}, check=True, stdout=subprocess.DEVNULL
    )
    mounted = [
        f"{tmp_path}:/wheel:ro",
        f"{wheels}:/wheels:ro",
        f"{REPOSITORY / 'recipe/check_ops.py'}:/check_ops.py:ro",
    ]
    code, out, err = run(engine, base, "sh", "-c", ALONE, network_mode="none", volumes=mounted)
    require(
        code != 7,
        "a base image with Python",
        "sudo apt-get install mmdebstrap, and run these tests as root",
    )
    assert code == 0, out + err
    told = json.loads(out)
    assert told["status"] == "ok", out
    trials = {one["name"]: one for one in told["ops"]}
    assert trials.keys() == {spec.name for spec in CATALOG}
    assert {one["backend"] for one in trials.values()} == {"aot"}
    assert all(one["max_error"] <= TOLERANCE for one in trials.values()), trials


# ---- rebuilding ----


def test_a_rebuild_of_the_same_is_the_same_image(image, engine, checkout, cpu_image):
    """Also when it starts from the libraries of the build before, which that one did not have."""
    first = engine.images.get(cpu_image).id
    assert engine.images.get(naming.kernels("cpu"))
    image.build("cpu", "--tag", "flexops:cpu-test-again", checkout=checkout)
    assert engine.images.get("flexops:cpu-test-again").id == first


def test_an_edit_rebuilds_what_depends_on_it(image, checkout, cpu_image):
    """Neither downloads anything; a Python file compiles nothing, and a kernel its own library
    only."""

    def rebuilt() -> str:
        done = image.build("cpu", "--tag", cpu_image, "--json", checkout=checkout)
        return Path(json.loads(done.stdout)[0]["log"]).read_text()

    def step(log: str, instruction: str) -> list[str]:
        """What BuildKit printed of that step, without its number; a second build, which keeps the
        kernels, may follow in the log."""
        log = log.split("#1 [internal] load build definition")[1]
        begins = rf"^#(\d+) \[.* RUN .*{re.escape(instruction)}"
        (number,) = set(re.findall(begins, log, re.MULTILINE))
        return re.findall(rf"^#{number} (?:\d+\.\d+ )?(.*)", log, re.MULTILINE)

    def compiled(log: str) -> list[str]:
        lines = step(log, "-m flexops.build")
        return [line.split(":")[0] for line in lines if re.match(r"[\w-]+: [\d.]+ s$", line)]

    (checkout / "flexops/ops/quant.py").open("a").write("\n# edited\n")
    log = rebuilt()
    assert "CACHED" in step(log, "fetch_wheels.sh")
    assert "CACHED" in step(log, "install_wheels.sh runtime")
    assert compiled(log) == []
    # an earlier run's edit may be in the kernels' image
    (checkout / "csrc/quant/quant_cpu.cpp").open("a").write(f"\n// {os.urandom(8).hex()}\n")
    log = rebuilt()
    assert "CACHED" in step(log, "install_wheels.sh runtime")
    assert compiled(log) == ["quant-cpu"]


# ---- builds that cannot succeed ----


def test_a_broken_kernel_shows_the_compilers_error(engine, image, checkout, cpu_image, tmp_path):
    broken = tmp_path / "checkout"
    shutil.copytree(checkout, broken)
    source = broken / "csrc/quant/quant_cpu.cpp"
    source.write_text(source.read_text() + "\nint broken = no_such_thing;\n")
    before, tagged = containers(engine), engine.images.get(cpu_image).id
    done = image.build("cpu", "--tag", cpu_image, checkout=broken, code=10)
    assert "no_such_thing" in done.stderr
    assert "quant_cpu.cpp" in done.stderr
    assert "log: " in done.stderr
    assert SECRET not in done.stderr
    assert engine.images.get(cpu_image).id == tagged
    assert containers(engine) == before


def test_a_base_that_is_not_available(image):
    done = image(
        "build",
        "cpu",
        "--build-base",
        "registry.invalid/no/such:base",
        "--runtime-base",
        BASE,
        code=10,
    )
    assert "the base image is not available" in done.stderr
    assert "registry.invalid/no/such:base" in done.stderr
    assert "fix: --build-base" in done.stderr


def test_a_base_without_the_rows_compiler_is_rejected_before_anything_is_downloaded(image):
    done = image(
        "build",
        "rocm72-gfx942",
        "--build-base",
        BASE,
        "--runtime-base",
        BASE,
        "--network",
        "none",
        code=10,
    )
    assert "no hipcc" in done.stderr
    assert "fix: --build-base" in done.stderr


def test_an_index_that_cannot_be_reached(image):
    done = image(
        "build",
        "cpu",
        "--build-base",
        BASE,
        "--runtime-base",
        BASE,
        "--index-url",
        "http://127.0.0.1:9/simple",
        "--network",
        "host",
        code=10,
    )
    assert "no way to the network" in done.stderr or "lacks a package" in done.stderr
    assert "--index-url" in done.stderr


def test_no_engine_is_one_clear_error(image):
    done = image(
        "check", "cpu", environment={"DOCKER_HOST": "unix:///nowhere/docker.sock"}, code=10
    )
    assert "no container engine answers" in done.stderr
    assert "fix: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_socket_that_may_not_be_used(image, tmp_path, require):
    require(
        os.geteuid() == 0,
        "root, to become another user",
        "run the tests as root",
        "test_images.py recognizes such an error by its text",
    )
    # What is needed is imported as root, because another user may not be able to read this Python.
    script = (
        "import os, docker.transport, docker.errors, flexops_tools.images.engine as e; os.setgroups([]);"
        " os.setgid(65534); os.setuid(65534); e.connect()"
    )
    done = completed(
        [sys.executable, "-c", script], cwd=tmp_path, env=image.environment(REPOSITORY), code=None
    )
    assert "may not use the container engine" in done.stderr
    assert "usermod -aG docker" in done.stderr


def test_ctrl_c_stops_the_engine_too(engine, image, checkout):
    before = containers(engine)
    command = Image.command(
        "build", "cpu", "--tag", "flexops:interrupted", "--no-cache", *image.build_options
    )
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command, cwd=checkout, env=Image.environment(checkout), start_new_session=True, **streams
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "RUN" in line:  # a step that runs for seconds
            break
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "nothing was tagged" in err
    assert "Traceback" not in err
    deadline = time.monotonic() + 300
    while containers(engine) - before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert containers(engine) == before
    assert not [one for one in engine.images.list() if "flexops:interrupted" in one.tags]
