"""scripts/setup_cuda_dev_environment.sh: in a copy of the checkout, with a uv and a pip that only
pretend; one slow test does it for real."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from marks import first_of
from processes import completed

from scripts.setup import indexes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/setup_cuda_dev_environment.sh"

# Stands for uv, for the Python that the script uses by its option and for the environment's Python: what
# installs leaves the metadata of what it would install. The files uv-fails, pip-fails and
# install-dies, beside it, make it fail.
FAKE = """
import json, os, pathlib, re, shutil, signal, sys

tools, log = pathlib.Path({tools!r}), pathlib.Path({log!r})
program, *words = sys.argv[1:]

def make(prefix):
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(tools / "environment-python", prefix / "bin" / "python")

def install(prefix, words):
    site = prefix / "lib/python3.99/site-packages"
    if "--requirement" in words:
        words = words + pathlib.Path(words[words.index("--requirement") + 1]).read_text().split()
    for name, version in re.findall(r"([\\w-]+)(?:\\[.*?\\])?==([\\d.]+)", " ".join(words)):
        add(site, name, version)
    if "--editable" in words:
        root = pathlib.Path(words[words.index("--editable") + 1])
        info = add(site, "flexops_torch", "0.1.0")
        url = dict(url=root.as_uri(), dir_info=dict(editable=True))
        (info / "direct_url.json").write_text(json.dumps(url))
        shutil.copy(tools / "flexops", prefix / "bin" / "flexops")
    if "cuda-toolkit" in " ".join(words):
        for file in ("bin/nvcc", "lib/libcudart.so.13"):
            (site / "nvidia/cu13" / file).parent.mkdir(parents=True, exist_ok=True)
            (site / "nvidia/cu13" / file).touch()

def add(site, name, version):
    info = site / (name + "-" + version + ".dist-info")
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: " + name + "\\nVersion: " + version + "\\n")
    return info

def record(words):
    told = [name + "=" + os.environ[name] for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_CACHE_DIR") if name in os.environ and program == "uv"]
    log.open("a").write(" ".join([*told, program, *words]) + "\\n")
    die = tools / "install-dies"
    if die.exists():
        os.kill(os.getppid(), signal.Signals[die.read_text()])
        sys.exit(1)
    if (tools / (program + "-fails")).exists():
        sys.exit("ERROR: no such index")

if program == "uv" and words[0] == "venv":
    make(pathlib.Path(words[-1]))
elif program == "uv" and words[:2] == ["pip", "install"]:
    record(words)
    install(pathlib.Path(words[words.index("--python") + 1]).parents[1], words)
elif words[:2] == ["-m", "venv"]:
    make(pathlib.Path(words[-1]))
elif words[:3] == ["-m", "pip", "install"] and "--target" in words:
    record(words[1:])
    place = pathlib.Path(words[words.index("--target") + 1]) / "bin"
    place.mkdir(parents=True)
    shutil.copy(tools / "uv-program", place / "uv")
elif words[:3] == ["-m", "pip", "install"]:
    record(words[1:])
    install(pathlib.Path(os.environ["FAKE_PYTHON"]).parents[1], words)
elif words[:1] == ["examples/demo.py"]:
    log.open("a").write("demo\\n")
elif program != "uv":
    os.execv(sys.executable, [sys.executable, *words])
"""
FAKE_PROGRAM = """#!/bin/sh
FAKE_PYTHON="$0" exec {python} "{tools}/fake.py" NAME "$@"
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
        self, *arguments: str, fake: bool = True, code: int | None = 0, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """The test fails if the script exits with another code than ``code``."""
        python = ["--python", str(self.tools / "python")] if fake else []
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLEXOPS_", "CCACHE_", "CONDA", "PIP_", "UV_"))
        } | {"PIP_CONFIG_FILE": os.devnull}
        command = ["bash", SCRIPT, *arguments, *python]
        return completed(
            command,
            cwd=self.root,
            env={**clean, "PATH": self.path, **environ},
            stdin=subprocess.DEVNULL,
            code=code,
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
    text = FAKE.replace("{tools!r}", repr(str(tools))).replace("{log!r}", repr(str(made.log)))
    (tools / "fake.py").write_text(text)
    for name in ("python", "environment-python"):
        made.tool(name, FAKE_PROGRAM.replace("NAME", "pip"))
    made.tool("uv", FAKE_PROGRAM.replace("NAME", "uv"))
    made.tool("flexops", FAKE_FLEXOPS)
    made.path = f"{tools}:{made.path}"
    return made


def test_help_names_every_option_and_imports_no_torch(checkout):
    (checkout.tools / "torch.py").write_text("raise SystemExit('imported')\n")
    done = checkout.run("--help", fake=False, PYTHONPATH=str(checkout.tools))
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
        (["--targte", "cpu"], "--targte"),
        (["--target"], "expected one argument"),
        (["--target", "--yes"], "expected one argument"),
        (["--toolkit", "x"], "'auto', 'index', 'system'"),
    ],
)
def test_a_wrong_option_is_rejected_with_the_way_to_help(checkout, arguments, said):
    done = checkout.run(*arguments, fake=False, code=2)
    assert said in done.stderr
    assert "--help" in done.stderr


def test_an_unknown_target_names_those_there_are(checkout):
    done = checkout.run("--target", "cu999-sm1", code=1)
    assert "cu130-sm90" in done.stderr
    assert "fix:" in done.stderr


def test_a_dry_run_says_everything_and_does_nothing(checkout):
    before = checkout.files()
    done = checkout.run("--dry-run", "--target=cu130-sm90", "--toolkit=index")
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


def test_a_variable_that_is_not_understood_is_an_error_not_a_traceback(checkout):
    done = checkout.run("--dry-run", FLEXOPS_FALLBACK="perhaps", code=None)
    assert done.returncode != 0
    assert "FLEXOPS_FALLBACK" in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_without_a_compiler_shows_the_plan_with_that_step(checkout):
    programs = [path.name for folder in ("/bin", "/usr/bin") for path in Path(folder).iterdir()]
    checkout.without(*(name for name in programs if re.search(r"g\+\+|c\+\+|clang", name)))
    no_compiler = {"CXX": "", "CC": ""}
    shown = checkout.run("--dry-run", "--target", "cpu", **no_compiler)
    assert "missing; install one first: apt-get install g++" in shown.stdout
    for text in ("torch==", "flexops/_aot", "--dry-run: nothing was done"):
        assert text in shown.stdout
    done = checkout.run("--yes", "--no-root", "--target", "cpu", **no_compiler, code=1)
    assert "no C++ compiler that this target can use was found" in done.stderr
    assert checkout.calls == []


def test_no_shell_script_needs_dev_fd():
    """Where it is missing, bash's <(...) opens nothing, and a loop that reads from it sees no
    line."""
    scripts = [
        ROOT / ".ci/run",
        *(path for name in ("scripts", "docker", "recipe") for path in (ROOT / name).rglob("*.sh")),
    ]
    assert len(scripts) > 10
    lines = [f"{path.name}: {line}" for path in scripts for line in path.read_text().splitlines()]
    assert [line for line in lines if re.search(r"(^|\s)[<>]\(", line.partition(" #")[0])] == []


def test_where_no_nvcc_can_be_had_none_is_needed_and_it_says_where_one_comes_from(checkout):
    done = checkout.run("--dry-run", "--target", "cu121-sm89", CUDA_HOME="/nowhere")
    if "none that matches the target" in done.stdout:
        assert "none needed: torch's NVRTC compiles the kernels" in done.stdout
        assert "cuda-nvcc=12.1" in done.stdout
        assert "the CPU operators and those for 8.9" in done.stdout


def test_the_whole_run_then_a_second_that_changes_nothing(checkout):
    first = checkout.run(
        "--yes", "--no-root", "--target", "cpu", PIP_INDEX_URL="https://index.invalid/simple"
    )
    pins, flexops, build, doctor, demo = checkout.calls
    # uv reads no settings of pip's
    assert pins.startswith("UV_DEFAULT_INDEX=https://index.invalid/simple ")
    assert "uv pip install" in pins
    assert "torch==2.13.0 ninja==" in pins
    assert f"--no-build-isolation --editable {checkout.root}" in flexops
    assert build.startswith("flexops build --target cpu --out")
    assert doctor.startswith("flexops doctor --target cpu")
    assert demo == "demo"
    assert "Done" in first.stdout

    before = checkout.files()
    second = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert "kept" in second.stdout
    # which finds everything there
    assert [call.split()[1] for call in checkout.calls[5:]] == ["build"]
    assert "checked on" in second.stdout
    assert checkout.files() == before

    (checkout.root / "flexops" / "errors.py").open("a").write("\n")
    checkout.run("--yes", "--no-root", "--target", "cpu")
    assert checkout.calls[-1] == "demo"  # sources have changed: checked again

    # without --target: what the environment was made for, not what a GPU would suggest
    third = checkout.run("--dry-run", code=None)
    assert "was made for" in third.stdout


@pytest.mark.extra
def test_a_cuda_target_sets_its_architectures(checkout):
    done = checkout.run("--yes", "--no-root", "--target", "cu121-sm89", CUDA_HOME="/nowhere")
    build = checkout.calls[2]
    assert build.endswith("[8.9]")
    if "no GPU operators" in done.stderr:
        assert "--device cpu" in build  # the CPU operators still are


def test_a_failing_step_is_named_with_its_fix_and_the_next_run_goes_on(checkout):
    for installer in ("uv", "pip"):
        (checkout.tools / f"{installer}-fails").touch()
    failed = checkout.run("--yes", "--no-root", "--target", "cpu", code=None)
    assert failed.returncode != 0
    assert "no such index" in failed.stderr
    assert 'step "install the pinned packages"' in failed.stderr
    assert "fix: check the network" in failed.stderr
    secret = ("--index-url", "https://user:secret@index.invalid/simple")
    failed = checkout.run("--yes", "--no-root", "--target", "cpu", *secret, code=1)
    assert "https://index.invalid/simple" in failed.stderr
    assert "secret" not in failed.stdout + failed.stderr
    (checkout.tools / "pip-fails").unlink()
    done = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert "uv could not install that; pip tries" in done.stderr


@pytest.mark.parametrize("uv_is_to_be_had", first_of(True, False))
def test_a_missing_uv_is_installed_and_pip_serves_where_it_cannot_be(checkout, uv_is_to_be_had):
    checkout.without("uv")
    (checkout.tools / "uv").rename(checkout.tools / "uv-program")
    if not uv_is_to_be_had:
        program = checkout.tools / "uv-program"
        program.write_text("#!/bin/sh\nexit 1\n")  # a wheel for another machine
    done = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert "pip install -qq --target" in checkout.calls[0]
    installers = {call.split()[0] for call in checkout.calls if " torch==" in call}
    assert installers == {"uv" if uv_is_to_be_had else "pip"}
    assert ("going on with pip" in done.stderr) != uv_is_to_be_had


@pytest.mark.extra
def test_without_a_home_uv_has_its_cache_in_the_checkout(checkout):
    (checkout.tools / "home").touch()
    checkout.run(
        "--yes",
        "--no-root",
        "--target",
        "cpu",
        HOME=str(checkout.tools / "home"),
        XDG_CACHE_HOME="",
    )
    assert checkout.calls[0].startswith(f"UV_CACHE_DIR={checkout.root}/.flexops/cache/uv uv pip")


@pytest.mark.extra
@pytest.mark.parametrize("death", first_of("INT", "TERM", "KILL"))
def test_an_environment_whose_making_was_interrupted_is_made_anew(checkout, death):
    """It has a Python that runs, and a part of the packages: no look at it shows which."""
    (checkout.tools / "install-dies").write_text(f"SIG{death}")
    first = checkout.run("--yes", "--no-root", "--target", "cpu", code=None)
    assert first.returncode == {"INT": 130, "TERM": 143, "KILL": -9}[death]
    assert ("run the same command again" in first.stderr) == (death != "KILL")
    left = checkout.root / ".venv" / "bin" / "half-a-package"
    left.touch()
    (checkout.tools / "install-dies").unlink()
    done = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert "did not get to finish" in done.stdout
    assert not left.exists()


@pytest.mark.extra
def test_an_environment_whose_python_is_gone_is_made_anew(checkout):
    checkout.run("--yes", "--no-root", "--target", "cpu")
    (checkout.root / ".venv" / "bin" / "python").unlink()
    done = checkout.run("--yes", "--no-root", "--target", "cpu")
    assert "its Python does not run" in done.stdout


@pytest.mark.extra
def test_an_uninstall_that_was_interrupted_goes_on(checkout):
    """What is half removed has lost its marker, and is listed as unfinished."""
    checkout.run("--yes", "--no-root", "--target", "cpu")
    prefix = checkout.root / ".venv"
    (prefix / ".flexops-setup").unlink()
    checkout.run("--uninstall", "--yes", "--dry-run", fake=False)
    (checkout.root / ".flexops" / "unfinished").write_text(f"{prefix}\n")
    checkout.run("--uninstall", "--yes", fake=False)
    assert not prefix.exists()
    assert not (checkout.root / ".flexops").exists()


@pytest.mark.parametrize("script", [SCRIPT, "scripts/run_tests.sh"])
@pytest.mark.parametrize("shell", ["dash", "bash --posix", "zsh"])
def test_any_shell_runs_the_script(checkout, script, shell, program):
    name, *options = shell.split()
    done = completed([program(name), *options, script, "--help"], cwd=checkout.root, code=None)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--dry-run" in done.stdout or "FLEXOPS_TEST_ENV" in done.stdout


def test_without_a_python_there_is_a_sentence(checkout):
    programs = [path.name for folder in ("/bin", "/usr/bin") for path in Path(folder).iterdir()]
    checkout.without(*(name for name in programs if name.startswith("python")))
    for name in ("python", "python3", "uv"):
        (checkout.tools / name).unlink()
    done = checkout.run("--help", fake=False, HOME="/nowhere", PYENV_ROOT="/nowhere", code=1)
    assert "no Python 3.10 or newer" in done.stderr
    assert "fix: apt-get install python3" in done.stderr
    # uv has one, or gets one
    checkout.tool("uv", '#!/bin/sh\nshift 4; exec {python} "$@"\n')
    done = checkout.run("--help", fake=False, HOME="/nowhere", PYENV_ROOT="/nowhere")
    assert "--dry-run" in done.stdout


@pytest.mark.extra
def test_fish_is_shown_how_to_use_the_environment(checkout, program):
    program("fish")
    done = checkout.run("--yes", "--no-root", "--target", "cpu", SHELL="/usr/bin/fish")
    file = checkout.root / ".flexops" / "env.sh"
    command = f"""bash -c "source '{file}'; exec fish\""""
    assert command in done.stdout
    told = completed(["fish", "-c", f"source {_quoted(file)}"], code=None)
    assert (told.stderr, told.stdout) == (
        "",
        (
            "flexops: fish cannot read what POSIX shells read; a fish with this environment:"
            f" {command}\n"
        ),
    )
    within = completed(["bash", "-c", command], input="echo $VIRTUAL_ENV", code=None)
    assert within.stdout.strip() == str(checkout.root / ".venv"), within.stderr


@pytest.mark.extra
def test_another_target_means_a_new_environment(checkout):
    checkout.run("--yes", "--no-root", "--target", "cpu")
    left_over = checkout.root / ".venv" / "left-over"
    left_over.touch()
    checkout.run("--yes", "--no-root", "--target", "cu121-sm90")
    assert not left_over.exists()


@pytest.mark.extra
def test_another_project_with_our_import_name_is_the_users_to_decide_about(checkout):
    checkout.run("--yes", "--no-root", "--target", "cpu")
    info = checkout.root / ".venv/lib/python3.99/site-packages/flexops-3.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flexops\nVersion: 3.2.0\n")
    done = checkout.run("--yes", "--no-root", "--target", "cpu", code=1)
    assert "another project's flexops (3.2.0)" in done.stderr
    assert "pip uninstall flexops" in done.stderr


@pytest.mark.extra
def test_what_was_changed_in_the_environment_is_installed_again(checkout):
    checkout.run("--yes", "--no-root", "--target", "cpu")
    site = checkout.root / ".venv/lib/python3.99/site-packages"
    for change in ("ninja-*", "flexops_torch-*"):
        (found,) = site.glob(change)
        shutil.rmtree(found)
        done = checkout.run("--yes", "--no-root", "--target", "cpu")
        assert "bring up to date" in done.stdout
        assert found.exists()


def test_a_directory_that_it_did_not_make_is_left_alone(checkout):
    mine = checkout.root / "mine" / "file"
    mine.parent.mkdir()
    mine.write_text("precious")
    done = checkout.run("--yes", "--target", "cpu", "--prefix", "mine", code=1)
    assert "was not made by this script" in done.stderr
    assert mine.read_text() == "precious"


@pytest.mark.extra
def test_uninstall_removes_what_it_made_and_only_that(checkout):
    before = checkout.files()
    checkout.run("--yes", "--no-root", "--target", "cpu", "--prefix", "env")
    (checkout.root / "mine").write_text("precious")
    (checkout.root / ".flexops" / "images").mkdir()
    (checkout.root / ".flexops" / "images" / "log").write_text("another program's")
    shown = checkout.run("--uninstall", "--dry-run", fake=False, code=None)
    assert str(checkout.root / "env") in shown.stdout
    assert (checkout.root / "env").exists()
    checkout.run("--uninstall", "--yes", fake=False)
    assert checkout.files() == {
        **before,
        str(checkout.root / "mine"): b"precious",
        str(checkout.root / ".flexops/images/log"): b"another program's",
    }
    assert "nothing to remove" in checkout.run("--uninstall", fake=False, code=None).stdout


@pytest.mark.extra
def test_an_environment_that_someone_else_put_there_survives_uninstall(checkout):
    checkout.run("--yes", "--no-root", "--target", "cpu")
    shutil.rmtree(checkout.root / ".venv")
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv" / "file").touch()
    checkout.run("--uninstall", "--yes", fake=False)
    assert (checkout.root / ".venv" / "file").exists()


@pytest.mark.parametrize("shell", first_of("bash", "dash", "zsh"))
def test_the_environment_file_can_be_undone(checkout, shell, program):
    program(shell)
    text = checkout.run(
        "--print-env",
        "--target",
        "cu130-sm90",
        "--toolkit",
        "index",
        "--prefix",
        "it's an env",
        code=None,
    ).stdout
    assert not (checkout.root / ".flexops").exists()
    file = checkout.root / "env.sh"
    file.write_text(text)
    script = f"""
      set -u
      export MAX_JOBS=1 CUDA_HOME=/mine
      env | sort >before
      . {_quoted(file)}; . {_quoted(file)}
      env | sort >within
      flexops_env_undo
      env | sort >after
    """
    subprocess.run([shell, "-c", script], cwd=checkout.root, check=True)
    before, within, after = (
        (checkout.root / name).read_text() for name in ("before", "within", "after")
    )
    assert before == after
    assert "TORCH_CUDA_ARCH_LIST=9.0\n" in within
    assert f"CUDA_HOME={checkout.root}/.flexops/cuda\n" in within
    assert "MAX_JOBS=1\n" in within  # what the user has set stays
    assert f"PATH={checkout.root}/it's an env/bin:" in within


@pytest.mark.extra
def test_what_is_locked_is_installed_by_hash_and_what_is_not_is_said(checkout):
    done = checkout.run("--yes", "--no-root", "--target", "cu126-sm90", CUDA_HOME="/nowhere")
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
    assert "not by hash: --no-lock" in again.stdout
    assert any(" torch==2.7.1 ninja==1.13.0 " in call for call in checkout.calls)

    done = checkout.run("--dry-run", "--target", "cpu", code=None)
    assert (
        "by version, not by hash: the wheels of cpu are not locked: they come from"
        " https://download.pytorch.org/whl/cpu" in done.stdout
    )


@pytest.mark.extra
def test_an_index_that_does_not_answer_is_passed_over_and_said(checkout):
    """pip's own settings name one that rejects, one whose name is unknown, and a folder; the
    target's extra index is not reached either."""
    folder = checkout.tools.as_uri()
    silent = ["http://user:secret@127.0.0.1:9/simple", "https://index.invalid/simple"]
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
    assert checkout.calls[0].startswith(f"UV_INDEX={folder} uv pip install")
    assert "passed over, because it does not answer: http://127.0.0.1:9/simple" in done.stdout
    assert "passed over, because it does not answer: https://index.invalid/simple" in done.stdout
    assert (
        "https://download.pytorch.org/whl/cpu does not answer; going on with the default index"
        in done.stdout
    )
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.extra
def test_an_index_that_rejects_us_answers(tmp_path):
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
        answers, silent = indexes.answering(urls)
        server.shutdown()
    assert (answers, silent) == (urls[:2], urls[2:])


def test_uv_is_given_the_settings_that_pip_reads(tmp_path):
    """From every file and variable that pip takes them from, by pip's own order."""
    files = {
        "xdg/pip/pip.conf": "[global]\nindex-url = https://system.invalid/simple\nretries = 1\n",
        "home/.config/pip/pip.conf": "[global]\nextra-index-url =\n  https://a.invalid/simple\n"
        "  https://b.invalid/simple\nretries = 2\ntrusted-host = a.invalid\n",
        "named.conf": "[install]\nfind-links = /one\n  /two\n[global]\ncert = /global.pem\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environ = {
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_DIRS": str(tmp_path / "xdg"),
        "PIP_CONFIG_FILE": str(tmp_path / "named.conf"),
        "PIP_INDEX_URL": "https://variable.invalid/simple",
        "PIP_NO_INDEX": "1",
        "PIP_TIMEOUT": "",
        "UV_HTTP_RETRIES": "9",
    }
    settings = indexes.pip_settings(environ, str(tmp_path))
    command = [sys.executable, "-m", "pip", "config", "list"]
    told = completed(command, env={**environ, "PATH": os.defpath})
    for line in told.stdout.splitlines():  # pip's view: the last of a name's lines wins
        name, _, value = line.partition("=")
        name = name.rpartition(".")[2]
        if name in ("extra-index-url", "find-links", "trusted-host"):
            assert settings[name] == " ".join(value.strip("'").replace("\\n", " ").split())
    options, variables = indexes.for_uv(settings, environ)
    assert options == ["--no-index"]
    assert {**variables, "UV_SYSTEM_CERTS": "true"} == {
        "UV_DEFAULT_INDEX": "https://variable.invalid/simple",
        "UV_INDEX": "https://a.invalid/simple https://b.invalid/simple",
        "UV_FIND_LINKS": "/one,/two",
        "UV_INSECURE_HOST": "a.invalid",
        "SSL_CERT_FILE": "/global.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_SYSTEM_CERTS": "true",
    }
    # what the user has set for uv is the user's
    _, variables = indexes.for_uv(settings, {**environ, "UV_INDEX": "https://mine.invalid"})
    assert not {"UV_DEFAULT_INDEX", "UV_INDEX"} & set(variables)
    assert indexes.pip_settings({"PIP_CONFIG_FILE": os.devnull}, "/nowhere").keys() == {
        "config-file"
    }


def test_no_password_of_an_index_is_printed():
    for text in ("--index-url https://me:s3/cr@et@host/simple", "-i https://s3cret@host/simple x"):
        assert "cr" not in indexes.without_credentials(text)
        assert "https://host/simple" in indexes.without_credentials(text)


@pytest.mark.extra
def test_root_rights_are_used_only_with_consent(checkout):
    checkout.without("ccache", "sccache", "sudo", "apt-get", "dnf", "zypper", "pacman")
    checkout.tool("apt-get", FAKE_APT)
    checkout.run("--yes", "--no-root", "--target", "cpu")
    checkout.run("--target", "cpu")  # no terminal to ask
    assert not [call for call in checkout.calls if call.startswith("apt-get")]
    checkout.run("--yes", "--target", "cpu")
    may = os.geteuid() == 0  # without sudo, only root can
    assert bool([call for call in checkout.calls if call == "apt-get install -y -q ccache"]) == may


@pytest.mark.extra
@pytest.mark.parametrize(
    ("tool", "expected"),
    first_of(
        ("conda", "conda env create -p {prefix} -f {root}/envs/cpu.yml"),
        ("mamba", "mamba env create -p {prefix} -f {root}/envs/cpu.yml"),
        ("micromamba", "micromamba create -p {prefix} -f {root}/envs/cpu.yml"),
        ("pixi", "pixi init --import {root}/envs/cpu.yml {prefix}"),
    ),
)
def test_conda_makes_the_environment_from_envs(checkout, tool, expected):
    checkout.without("conda", "mamba", "micromamba", "pixi")
    checkout.tool(tool, FAKE_CONDA)
    checkout.run("--yes", "--no-root", "--conda", "--target", "cpu", fake=False)
    assert checkout.calls[0] == expected.format(prefix=checkout.root / ".venv", root=checkout.root)
    assert "CONDA_PREFIX" in (checkout.root / ".flexops" / "env.posix.sh").read_text()
    checkout.run("--yes", "--no-root", "--conda", "--target", "cpu", fake=False)
    assert len([call for call in checkout.calls if call.startswith(tool)]) == (
        2 if tool == "pixi" else 1
    )


def test_without_any_conda_it_says_how_to_get_one(checkout):
    checkout.without("conda", "mamba", "micromamba", "pixi")
    done = checkout.run("--conda", "--target", "cpu", fake=False, code=1)
    assert "miniforge" in done.stderr


@pytest.mark.slow
def test_for_real(checkout):
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
    checkout.run("--yes", "--no-root", "--target", "cpu", fake=False)
    assert list((checkout.root / "flexops" / "_aot").glob("*/*.so"))
    again = checkout.run("--yes", "--no-root", "--target", "cpu", fake=False)
    assert "is as it should be" in again.stdout


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
