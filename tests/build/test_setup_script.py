"""scripts/setup_cuda_dev_environment.sh: in a copy of the checkout, with a Python whose pip only
pretends; one slow test does it for real."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from marks import first_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/setup_cuda_dev_environment.sh"

# Stands for the Python that the script is told to use: real, but for making environments.
FAKE_PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin"
  cp "{tools}/environment-python" "$3/bin/python"
  if [ -e "{tools}/venv-dies" ]; then
    printf '#!/bin/sh\\ncase "$*" in *pip*) echo "No module named pip" >&2; exit 1 ;; esac\\nexec {python} "$@"\\n' >"$3/bin/python"
    case $(cat "{tools}/venv-dies") in disk) echo "No space left on device" >&2; exit 1 ;; *) kill -s "$(cat "{tools}/venv-dies")" "$PPID"; exit 1 ;; esac
  fi
  exit 0
fi
exec {python} "$@"
"""
# Stands for the environment's Python: real, but for installing and for what needs what would be
# installed.
FAKE_ENVIRONMENT_PYTHON = """#!/bin/sh
prefix=$(cd "$(dirname "$0")/.." && pwd)
case "$*" in
  *"pip install"*)
    echo "pip $*" >>"{log}"
    if [ -e "{tools}/pip-fails" ]; then echo "ERROR: no such index" >&2; exit 1; fi
    cp "{tools}/flexops" "$prefix/bin/flexops"
    touch "$prefix/installed" ;;
  *installed.py*--namesake*) cat "{tools}/namesake" 2>/dev/null || true ;;
  *"pip uninstall"*) echo "pip $*" >>"{log}" ;;
  *installed.py*) test -e "$prefix/installed" ;;
  *flexops.demo*) echo demo >>"{log}" ;;
  *) exec {python} "$@" ;;
esac
"""
FAKE_FLEXOPS = """#!/bin/sh
echo "flexops $* [$TORCH_CUDA_ARCH_LIST]" >>"{log}"
while [ $# -gt 0 ]; do
  if [ "$1" = --out ]; then mkdir -p "$2/adam-cpu"; fi
  shift
done
"""
# conda, mamba and micromamba: ... create -p PREFIX -f FILE; pixi: init --import FILE DIR, install
# --manifest-path
FAKE_CONDA = """#!/bin/sh
echo "$(basename "$0") $*" >>"{log}"
prefix=
while [ $# -gt 0 ]; do
  case $1 in
    -p) prefix=$2 ;;
    --manifest-path) prefix=$(dirname "$2")/.pixi/envs/default ;;
  esac
  shift
done
if [ -n "$prefix" ]; then mkdir -p "$prefix/bin" && cp "{tools}/environment-python" "$prefix/bin/python"; fi
"""
FAKE_APT = """#!/bin/sh
echo "apt-get $*" >>"{log}"
"""


@dataclass
class Checkout:
    """A copy of the checkout, and what runs the script in it."""

    root: Path
    tools: Path
    log: Path
    path: str = os.environ["PATH"]

    def run(
        self, *arguments: str, fake: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        python = ["--python", str(self.tools / "python")] if fake else []
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLEXOPS_", "CCACHE_", "CONDA"))
        }
        command = ["bash", SCRIPT, *arguments, *python]
        return subprocess.run(
            command,
            cwd=self.root,
            env={**clean, "PATH": self.path, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1200,
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def files(self) -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    def tool(self, name: str, text: str) -> None:
        path = self.tools / name
        path.write_text(text.format(log=self.log, tools=self.tools, python=sys.executable))
        path.chmod(0o755)

    def without(self, *hidden: str) -> None:
        """Only the system's programs, less these, and our tools before them."""
        system = self.tools / "system"
        system.mkdir()
        for directory in ("/bin", "/usr/bin"):
            for program in Path(directory).iterdir():
                if program.name not in hidden and not (system / program.name).exists():
                    (system / program.name).symlink_to(program)
        # not the system's, beside which hidden programs would be found
        self.tool("python3", '#!/bin/sh\nexec {python} "$@"\n')
        self.path = f"{self.tools}:{system}"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a checkout"
    for name in ("scripts", "flexops", "envs"):
        shutil.copytree(
            ROOT / name,
            root / name,
            ignore=shutil.ignore_patterns("__pycache__", "_aot", "ops", "bench"),
        )
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root / name)
    (root / "csrc").mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    made = Checkout(root, tools, tmp_path / "log")
    made.tool("python", FAKE_PYTHON)
    made.tool("environment-python", FAKE_ENVIRONMENT_PYTHON)
    made.tool("flexops", FAKE_FLEXOPS)
    return made


def test_help_names_every_option(checkout: Checkout) -> None:
    done = checkout.run("--help", fake=False)
    assert done.returncode == 0
    for option in (
        "--target",
        "--prefix",
        "--conda",
        "--yes",
        "--no-root",
        "--dry-run",
        "--print-env",
        "--uninstall",
    ):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--targte", "cpu"], "there is no option --targte"),
        (["--target"], "needs a value"),
        (["--target", "--yes"], "needs a value"),
        (["--toolkit", "x"], "auto, index or system"),
    ],
)
def test_a_wrong_option_is_refused_with_the_way_to_help(
    checkout: Checkout, arguments: list[str], said: str
) -> None:
    done = checkout.run(*arguments, fake=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "--help" in done.stderr


def test_an_unknown_target_names_those_there_are(checkout: Checkout) -> None:
    done = checkout.run("--target", "cu999-sm1")
    assert done.returncode == 1
    assert "cu130-sm90" in done.stderr
    assert "mend:" in done.stderr


def test_a_dry_run_says_everything_and_does_nothing(checkout: Checkout) -> None:
    before = checkout.files()
    done = checkout.run("--dry-run", "--target=cu130-sm90", "--toolkit=index")
    assert done.returncode == 0, done.stderr
    for text in (
        "torch==2.14.1",
        "cuda-toolkit[nvcc,cudart,cccl]==13.0.3",
        "9.0",
        "flexops/_aot",
        ".flexops/env.sh",
        "doctor",
    ):
        assert text in done.stdout
    assert checkout.files() == before
    assert checkout.calls == []


def test_a_dry_run_without_a_compiler_shows_the_plan_with_that_step(checkout: Checkout) -> None:
    programs = [path.name for folder in ("/bin", "/usr/bin") for path in Path(folder).iterdir()]
    checkout.without(*(name for name in programs if re.search(r"g\+\+|c\+\+|clang", name)))
    no_compiler = {"CXX": "", "CC": ""}
    shown = checkout.run("--dry-run", "--target", "cpu", **no_compiler)
    assert shown.returncode == 0, shown.stderr
    assert "missing; install one first: apt-get install g++" in shown.stdout
    for text in ("torch==", "flexops/_aot", "--dry-run: nothing was done"):
        assert text in shown.stdout
    done = checkout.run("--yes", "--no-root", "--target", "cpu", **no_compiler)
    assert done.returncode == 1
    assert "no C++ compiler that this target can use was found" in done.stderr
    assert checkout.calls == []


def test_no_shell_script_needs_dev_fd() -> None:
    """Where it is missing, bash's <(...) opens nothing, and a loop that reads from it sees no
    line."""
    scripts = [
        ROOT / ".ci/run",
        *(path for name in ("scripts", "docker", "recipe") for path in (ROOT / name).rglob("*.sh")),
    ]
    assert len(scripts) > 10
    lines = [f"{path.name}: {line}" for path in scripts for line in path.read_text().splitlines()]
    assert [line for line in lines if re.search(r"(^|\s)[<>]\(", line.partition(" #")[0])] == []


def test_where_no_nvcc_can_be_had_none_is_needed_and_it_says_where_one_comes_from(
    checkout: Checkout,
) -> None:
    done = checkout.run("--dry-run", "--target", "cu121-sm89", CUDA_HOME="/nowhere")
    assert done.returncode == 0, done.stderr
    if "none that matches the target" in done.stdout:
        assert "none needed: torch's NVRTC compiles the kernels" in done.stdout
        assert "cuda-nvcc=12.1" in done.stdout
        assert "the CPU operators and those for 8.9" in done.stdout


def test_the_whole_run_then_a_second_that_changes_nothing(checkout: Checkout) -> None:
    first = checkout.run(
        "--yes", "--no-root", "--target", "cpu", PIP_INDEX_URL="https://index.invalid/simple"
    )
    assert first.returncode == 0, first.stdout + first.stderr
    pins, flexops, build, doctor, demo = checkout.calls
    assert "torch==2.13.0 ninja==" in pins
    assert "index.invalid" not in pins  # pip reads its own settings
    assert f"--no-build-isolation --editable {checkout.root}" in flexops
    assert build.startswith("flexops build --target cpu --out")
    assert doctor.startswith("flexops doctor --target cpu")
    assert demo == "demo"
    assert "Done" in first.stdout

    before = checkout.files()
    second = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "kept" in second.stdout
    # which finds everything there
    assert [call.split()[1] for call in checkout.calls[5:]] == ["build"]
    assert "checked on" in second.stdout
    assert checkout.files() == before

    (checkout.root / "flexops" / "errors.py").open("a").write("\n")
    assert checkout.run("--yes", "--no-root", "--target", "cpu").returncode == 0
    assert checkout.calls[-1] == "demo"  # sources have changed: checked again

    # without --target: what the environment was made for, not what a GPU would suggest
    third = checkout.run("--dry-run")
    assert "was made for" in third.stdout


@pytest.mark.extra
def test_a_cuda_target_sets_its_architectures(checkout: Checkout) -> None:
    done = checkout.run("--yes", "--no-root", "--target", "cu121-sm89", CUDA_HOME="/nowhere")
    assert done.returncode == 0, done.stdout + done.stderr
    build = checkout.calls[2]
    assert build.endswith("[8.9]")
    if "no GPU operators" in done.stderr:
        assert "--device cpu" in build  # the CPU operators still are


def test_a_failing_step_is_named_with_its_mend_and_the_next_run_goes_on(checkout: Checkout) -> None:
    (checkout.tools / "pip-fails").touch()
    failed = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert failed.returncode != 0
    assert "no such index" in failed.stderr
    assert 'step "install the pinned packages"' in failed.stderr
    assert "mend: check the network" in failed.stderr
    (checkout.tools / "pip-fails").unlink()
    done = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("death", first_of("INT", "KILL", "disk"))
def test_an_environment_whose_making_was_interrupted_is_made_anew(
    checkout: Checkout, death: str
) -> None:
    """It has a Python that runs, and no pip: what `python -m venv` leaves when it is stopped
    between the two."""
    (checkout.tools / "venv-dies").write_text(death)
    first = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert first.returncode != 0
    assert (checkout.root / ".venv" / "bin" / "python").exists()
    (checkout.tools / "venv-dies").unlink()
    done = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "did not get to finish" in done.stdout
    assert "No module named pip" not in done.stderr


@pytest.mark.extra
def test_an_environment_that_lost_its_pip_is_made_anew(checkout: Checkout) -> None:
    assert checkout.run("--yes", "--no-root", "--target", "cpu").returncode == 0
    python = checkout.root / ".venv" / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    )
    done = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has no pip" in done.stdout


@pytest.mark.extra
def test_an_uninstall_that_was_interrupted_goes_on(checkout: Checkout) -> None:
    assert checkout.run("--yes", "--no-root", "--target", "cpu").returncode == 0
    checkout.without("rm")
    checkout.tool(
        "rm",
        '#!/bin/sh\n/bin/rm -f "{tools}/../a checkout/.venv/.flexops-setup"\nkill -KILL "$PPID"\n',
    )
    assert checkout.run("--uninstall", "--yes", fake=False).returncode != 0
    (checkout.tools / "rm").unlink()
    (checkout.tools / "system" / "rm").symlink_to("/bin/rm")
    assert checkout.run("--uninstall", "--yes", fake=False).returncode == 0
    assert not (checkout.root / ".venv").exists()
    assert not (checkout.root / ".flexops").exists()


@pytest.mark.parametrize("script", [SCRIPT, "scripts/run_tests.sh"])
@pytest.mark.parametrize("shell", ["dash", "bash --posix", "zsh"])
def test_another_shell_hands_the_script_to_bash(
    checkout: Checkout, script: str, shell: str, require: Callable[..., None]
) -> None:
    program, *options = shell.split()
    require(
        shutil.which(program),
        program,
        f"apt-get install {program}, or sudo bash scripts/run_tests.sh, which does",
    )
    done = subprocess.run(
        [program, *options, script, "--help"],
        cwd=checkout.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--dry-run" in done.stdout or "FLEXOPS_TEST_ENV" in done.stdout


def test_without_bash_there_is_a_sentence(checkout: Checkout, require: Callable[..., None]) -> None:
    dash = shutil.which("dash")
    require(dash, "dash", "apt-get install dash")
    done = subprocess.run(
        [str(dash), SCRIPT, "--help"],
        cwd=checkout.root,
        env={"PATH": str(checkout.tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "this script needs bash: apt-get install bash\n"


def test_fish_is_told_how_to_use_the_environment(
    checkout: Checkout, require: Callable[..., None]
) -> None:
    require(
        shutil.which("fish"),
        "fish",
        "apt-get install fish, or sudo bash scripts/run_tests.sh, which does",
    )
    done = checkout.run("--yes", "--no-root", "--target", "cpu", SHELL="/usr/bin/fish")
    assert done.returncode == 0, done.stderr
    file = checkout.root / ".flexops" / "env.sh"
    command = f"""bash -c "source '{file}'; exec fish\""""
    assert command in done.stdout
    told = subprocess.run(
        ["fish", "-c", f"source {_quoted(file)}"], capture_output=True, text=True, check=False
    )
    assert (told.stderr, told.stdout) == (
        "",
        (
            "flexops: fish cannot read what POSIX shells read; a fish with this environment:"
            f" {command}\n"
        ),
    )
    within = subprocess.run(
        ["bash", "-c", command],
        input="echo $VIRTUAL_ENV",
        capture_output=True,
        text=True,
        check=False,
    )
    assert within.stdout.strip() == str(checkout.root / ".venv"), within.stderr


@pytest.mark.extra
def test_another_target_means_a_new_environment(checkout: Checkout) -> None:
    assert checkout.run("--yes", "--no-root", "--target", "cpu").returncode == 0
    left_over = checkout.root / ".venv" / "left-over"
    left_over.touch()
    assert checkout.run("--yes", "--no-root", "--target", "cu121-sm90").returncode == 0
    assert not left_over.exists()


@pytest.mark.extra
def test_another_project_with_our_import_name_is_the_users_to_decide_about(
    checkout: Checkout,
) -> None:
    (checkout.tools / "namesake").write_text("other 3.2.0")
    done = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert done.returncode == 1
    assert "another project's flexops (3.2.0)" in done.stderr
    assert "pip uninstall flexops" in done.stderr
    # this checkout, from before it was called flexops-torch
    (checkout.tools / "namesake").write_text("ours")
    assert checkout.run("--yes", "--no-root", "--target", "cpu").returncode == 0
    assert [call for call in checkout.calls if call.endswith("uninstall --quiet --yes flexops")]


def test_installed_asks_for_this_checkout_by_its_name(tmp_path: Path) -> None:
    def holds(*arguments: str) -> tuple[int, str]:
        command = [
            sys.executable,
            "-S",
            str(ROOT / "scripts/lib/installed.py"),
            "/our/checkout",
            *arguments,
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.strip() + done.stderr

    def install(name: str, version: str, url: str) -> None:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "direct_url.json").write_text(
            json.dumps({"url": url, "dir_info": {"editable": True}})
        )

    assert holds() == (1, "")
    install("flexops_torch", "0.1.0", "file:///our/checkout")
    assert holds() == (1, "")
    install("flexops_tools", "0.1.0", "file:///our/checkout/tools")
    assert holds() == (0, "")
    assert holds("no-such-package==1") == (1, "")
    install("flexops", "0.1.0", "file:///our/checkout")
    assert (holds(), holds("--namesake")) == ((1, ""), (0, "ours"))
    shutil.rmtree(tmp_path / "flexops-0.1.0.dist-info")
    install("flexops", "3.2.0", "file:///elsewhere")
    assert (holds(), holds("--namesake")) == ((1, ""), (0, "other 3.2.0"))


def test_a_directory_that_it_did_not_make_is_left_alone(checkout: Checkout) -> None:
    mine = checkout.root / "mine" / "file"
    mine.parent.mkdir()
    mine.write_text("precious")
    done = checkout.run("--yes", "--target", "cpu", "--prefix", "mine")
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert mine.read_text() == "precious"


def test_uninstall_removes_what_it_made_and_only_that(checkout: Checkout) -> None:
    before = checkout.files()
    assert checkout.run("--yes", "--no-root", "--target", "cpu", "--prefix", "env").returncode == 0
    (checkout.root / "mine").write_text("precious")
    (checkout.root / ".flexops" / "images").mkdir()
    (checkout.root / ".flexops" / "images" / "log").write_text("another program's")
    shown = checkout.run("--uninstall", "--dry-run", fake=False)
    assert str(checkout.root / "env") in shown.stdout
    assert (checkout.root / "env").exists()
    done = checkout.run("--uninstall", "--yes", fake=False)
    assert done.returncode == 0, done.stderr
    assert checkout.files() == {
        **before,
        str(checkout.root / "mine"): b"precious",
        str(checkout.root / ".flexops/images/log"): b"another program's",
    }
    assert "nothing to remove" in checkout.run("--uninstall", fake=False).stdout


@pytest.mark.extra
def test_an_environment_that_someone_else_put_there_survives_uninstall(checkout: Checkout) -> None:
    assert checkout.run("--yes", "--no-root", "--target", "cpu").returncode == 0
    shutil.rmtree(checkout.root / ".venv")
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv" / "file").touch()
    assert checkout.run("--uninstall", "--yes", fake=False).returncode == 0
    assert (checkout.root / ".venv" / "file").exists()


@pytest.mark.parametrize("shell", first_of("bash", "dash", "zsh"))
def test_the_environment_file_can_be_undone(
    checkout: Checkout, shell: str, require: Callable[..., None]
) -> None:
    require(
        shutil.which(shell),
        shell,
        f"apt-get install {shell}, or sudo bash scripts/run_tests.sh, which does",
    )
    text = checkout.run(
        "--print-env", "--target", "cu130-sm90", "--toolkit", "index", "--prefix", "it's an env"
    ).stdout
    assert not (checkout.root / ".flexops").exists()
    file = checkout.root / "env.sh"
    file.write_text(text)
    program = f"""
      set -u
      export MAX_JOBS=1 CUDA_HOME=/mine
      env | sort >before
      . {_quoted(file)}; . {_quoted(file)}
      env | sort >within
      flexops_env_undo
      env | sort >after
    """
    subprocess.run([shell, "-c", program], cwd=checkout.root, check=True)
    before, within, after = (
        (checkout.root / name).read_text() for name in ("before", "within", "after")
    )
    assert before == after
    assert "TORCH_CUDA_ARCH_LIST=9.0\n" in within
    assert f"CUDA_HOME={checkout.root}/.flexops/cuda\n" in within
    assert "MAX_JOBS=1\n" in within  # what the user has set stays
    assert f"PATH={checkout.root}/it's an env/bin:" in within


def test_what_is_locked_is_installed_by_hash_and_what_is_not_is_said(checkout: Checkout) -> None:
    done = checkout.run("--yes", "--no-root", "--target", "cu126-sm90", CUDA_HOME="/nowhere")
    assert done.returncode == 0, done.stdout + done.stderr
    pins, flexops = checkout.calls[:2]
    lock = checkout.root / ".flexops" / "requirements.lock"
    assert f"--require-hashes --only-binary :all: --requirement {lock}" in pins
    assert "--no-deps" in flexops
    assert "every package by its locked hash" in done.stdout
    versions = [line for line in lock.read_text().splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in versions if line.startswith(("torch=", "setuptools="))] == [
        "setuptools==84.2.1",
        "torch==2.7.1",
    ]

    again = checkout.run(
        "--yes", "--no-root", "--target", "cu126-sm90", "--no-lock", CUDA_HOME="/nowhere"
    )
    assert again.returncode == 0, again.stderr
    assert "not by hash: --no-lock" in again.stdout
    assert any(" torch==2.7.1 ninja==1.13.0 " in call for call in checkout.calls)

    done = checkout.run("--dry-run", "--target", "cpu")
    assert (
        "by version, not by hash: the wheels of cpu are not locked: they come from"
        " https://download.pytorch.org/whl/cpu" in done.stdout
    )


def test_an_index_that_does_not_answer_is_passed_over_and_said(checkout: Checkout) -> None:
    """pip's own settings name one that refuses, one whose name nobody knows, and a folder; the
    target's extra index is not reached either."""
    folder = checkout.tools.as_uri()
    silent = ["http://user:secret@127.0.0.1:9/simple", "https://index.invalid/simple"]
    checkout.tool(
        "environment-python",
        FAKE_ENVIRONMENT_PYTHON.replace('echo "pip $*"', 'echo "pip $PIP_EXTRA_INDEX_URL $*"'),
    )
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = checkout.run(
        "--yes",
        "--no-root",
        "--target",
        "cpu",
        PIP_EXTRA_INDEX_URL=" ".join([*silent, folder]),
        no_proxy="",
        **proxy,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert checkout.calls[0].startswith(f"pip {folder} -m pip install")
    assert "passed over, for it does not answer: http://127.0.0.1:9/simple" in done.stdout
    assert "passed over, for it does not answer: https://index.invalid/simple" in done.stdout
    assert (
        "https://download.pytorch.org/whl/cpu does not answer; going on with the default index"
        in done.stdout
    )
    assert "secret" not in done.stdout + done.stderr


def test_an_index_that_refuses_us_answers(tmp_path: Path) -> None:
    """401 and 404 are answers; so is a folder. A server that takes a connection and says nothing is
    silent, and costs seconds."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None: ...

    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = [
            f"http://me:x@127.0.0.1:{server.server_port}/simple",
            tmp_path.as_uri(),
            f"http://127.0.0.1:{mute.getsockname()[1]}/simple",
        ]
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts/lib/silent_indexes.py"), *urls],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        server.shutdown()
    assert done.stdout.split() == urls[2:]


@pytest.mark.extra
def test_what_an_interrupted_pip_left_is_installed_again(checkout: Checkout) -> None:
    """The part of a wheel that is there without its RECORD, which pip writes last, and what was
    renamed to be replaced."""
    assert checkout.run("--yes", "--no-root", "--target", "cpu").returncode == 0
    site = checkout.tools / "site"
    whole, half = site / "ninja-1.13.0.dist-info", site / "torch-2.13.0.dist-info"
    for info in (whole, half):
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\n")
    (whole / "RECORD").touch()
    (site / "~orch").mkdir()
    code = (
        "import pathlib, sys, installed; print(*sorted(path.name for path in"
        " installed.half_installed(pathlib.Path(sys.argv[1]))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts/lib")}
    told = subprocess.run(
        [sys.executable, "-c", code, str(site)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.split() == ["torch-2.13.0.dist-info", "~orch"]

    finds_it = f"""case "$*" in\n  *--half-installed*) echo "{half}" ;;"""
    checkout.tool("environment-python", FAKE_ENVIRONMENT_PYTHON.replace('case "$*" in', finds_it))
    done = checkout.run("--yes", "--no-root", "--target", "cu126-sm90", CUDA_HOME="/nowhere")
    assert done.returncode == 0, done.stderr
    assert "half installed, so it is installed again: torch-2.13.0.dist-info" in done.stdout
    assert (half.exists(), whole.exists()) == (False, True)


def test_root_rights_are_used_only_with_consent(checkout: Checkout) -> None:
    checkout.without("ccache", "sccache", "sudo", "apt-get", "dnf", "zypper", "pacman")
    checkout.tool("apt-get", FAKE_APT)
    assert checkout.run("--yes", "--no-root", "--target", "cpu").returncode == 0
    assert checkout.run("--target", "cpu").returncode == 0  # nobody there to ask
    assert not [call for call in checkout.calls if call.startswith("apt-get")]
    assert checkout.run("--yes", "--target", "cpu").returncode == 0
    may = os.geteuid() == 0  # without sudo, only root can
    assert bool([call for call in checkout.calls if call == "apt-get install -y -q ccache"]) == may


@pytest.mark.parametrize(
    ("tool", "expected"),
    first_of(
        ("conda", "conda env create -p {prefix} -f {root}/envs/cpu.yml"),
        ("mamba", "mamba env create -p {prefix} -f {root}/envs/cpu.yml"),
        ("micromamba", "micromamba create -p {prefix} -f {root}/envs/cpu.yml"),
        ("pixi", "pixi init --import {root}/envs/cpu.yml {prefix}"),
    ),
)
def test_conda_makes_the_environment_from_envs(
    checkout: Checkout, tool: str, expected: str
) -> None:
    checkout.without("conda", "mamba", "micromamba", "pixi")
    checkout.tool(tool, FAKE_CONDA)
    done = checkout.run("--yes", "--no-root", "--conda", "--target", "cpu", fake=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert checkout.calls[0] == expected.format(prefix=checkout.root / ".venv", root=checkout.root)
    assert "CONDA_PREFIX" in (checkout.root / ".flexops" / "env.posix.sh").read_text()
    again = checkout.run("--yes", "--no-root", "--conda", "--target", "cpu", fake=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len([call for call in checkout.calls if call.startswith(tool)]) == (
        2 if tool == "pixi" else 1
    )


def test_without_any_conda_it_says_how_to_get_one(checkout: Checkout) -> None:
    checkout.without("conda", "mamba", "micromamba", "pixi")
    done = checkout.run("--conda", "--target", "cpu", fake=False)
    assert done.returncode == 1
    assert "miniforge" in done.stderr


@pytest.mark.slow
def test_for_real(checkout: Checkout) -> None:
    """The README's first command, from nothing to a checked environment; takes minutes, and torch's
    wheel from the package index."""
    for name in ("flexops", "csrc", "tools"):
        shutil.rmtree(checkout.root / name, ignore_errors=True)
        shutil.copytree(
            ROOT / name,
            checkout.root / name,
            ignore=shutil.ignore_patterns("__pycache__", "_aot", "*.egg-info"),
        )
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout.root / name)
    done = checkout.run("--yes", "--no-root", "--target", "cpu", fake=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((checkout.root / "flexops" / "_aot").glob("*/*.so"))
    again = checkout.run("--yes", "--no-root", "--target", "cpu", fake=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "is as it should be" in again.stdout


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
