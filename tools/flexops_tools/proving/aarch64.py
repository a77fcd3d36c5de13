"""The aarch64 wheel's operators on the CPU, on a machine that has no such processor: doctor's
self-checks and operators' tests under qemu-user.

    python -m flexops_tools.proving.aarch64 --work DIR [--wheel FILE] [--torch 2.10.0]
        [-- PYTEST_ARGUMENTS...]

Needs qemu-aarch64-static and mmdebstrap (Debian: qemu-user-static, mmdebstrap), ziglang, a package
index, and 1.5 GB in DIR, which the next run finds again. flexops comes from the wheel that
``scripts/build_wheel.sh --arch aarch64`` makes: the very libraries that people install, compiled by
zig. Nothing is compiled under emulation, and nothing may stand in for a native kernel.

torch is the newest whose wheel for aarch64 on the package index is one for the CPU: those for CUDA,
from 2.11 on, need gigabytes of libraries to be imported. 2.10 has every function of the stable C
ABI that the libraries call, which is looked at first, but calls itself older than the least that
they are for: so its copy here reports 2.11.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from flexops.doctor.checks.build import TOLERANCE

from . import torch_proof

ROOT = Path(__file__).resolve().parents[3]

DEBIAN, PYTHON = "bookworm", "3.11"
PACKAGES = (
    "python3.11",
    "libgomp1",
    "libstdc++6",
    "libffi8",
    "zlib1g",
    "libssl3",
    "libbz2-1.0",
    "liblzma5",
    "libsqlite3-0",
)
IMPORTED = (
    "numpy<2.4",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "filelock",
    "typing_extensions",
    "setuptools",
    "typer",
    "rich",
)
TESTS = (
    "tests/ops --ignore tests/ops/test_sharded.py -k 'native_is_what or native_gives or"
    " gradients_are_float64s or empty or strides or refuses or same_bits'"
)
TRIAL = (
    "import json; from flexops.doctor import trial; print(json.dumps([one.as_dict() for one in"
    " trial.ops()]))"
)


def make_root(work: Path) -> Path:
    """Debian's Python for aarch64, unpacked: nothing of it is installed."""
    root = work / "root"
    if not (root / "usr/bin" / f"python{PYTHON}").exists():
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(
            [
                "mmdebstrap",
                "--quiet",
                "--variant=extract",
                "--arch=arm64",
                f"--include={','.join(PACKAGES)}",
                DEBIAN,
                str(root),
            ],
            check=True,
        )
    return root


def make_site(work: Path, torch: str) -> Path:
    """torch, what it imports, and what the tests need."""
    site = work / f"site-{torch}"
    if (site / "complete").exists():
        return site
    shutil.rmtree(site, ignore_errors=True)
    pins = re.findall(
        r"^(?:pytest|hypothesis)==[\w.]+",
        (ROOT / "tests/requirements.txt").read_text(),
        re.MULTILINE,
    )
    tags = [
        part
        for tag in ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
        for part in ("--platform", tag)
    ]
    for packages in (["--no-deps", f"torch=={torch}"], [*IMPORTED, *pins]):
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(site),
            *tags,
            "--python-version",
            PYTHON,
            "--only-binary=:all:",
        ]
        subprocess.run([*command, *packages], check=True)
    lacking = sorted(abi_functions() - symbols(site / "torch/lib/libtorch_cpu.so"))
    if lacking:
        sys.exit(
            f"torch {torch} lacks {', '.join(lacking)} of the stable ABI\n  fix: --torch 2.10.0"
        )
    version = site / "torch/version.py"
    version.write_text(version.read_text().replace(f"'{torch}", "'2.11.0"))
    (site / "complete").touch()
    return site


def abi_functions() -> set[str]:
    """The functions of torch's stable C ABI that bindings call."""
    return set(
        re.findall(r"\b((?:aoti_)?torch_\w+)\(", (ROOT / "csrc/common/torch_abi.h").read_text())
    )


def symbols(library: Path) -> set[str]:
    text = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in text.splitlines()}


def install_flexops(work: Path, wheel: Path | None) -> Path:
    place = work / "flexops"
    if wheel is None:
        command = [
            "bash",
            str(ROOT / "scripts/build_wheel.sh"),
            "--arch",
            "aarch64",
            "--out",
            str(work),
        ]
        subprocess.run(command, check=True, env={**os.environ, "PYTHON": sys.executable})
        wheel = max(work.glob("flexops_torch-*aarch64.whl"), key=lambda path: path.stat().st_mtime)
    shutil.rmtree(place, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    shutil.copytree(ROOT / "tests", place / "tests")
    return place


def make_interpreter(work: Path, root: Path, site: Path, place: Path) -> Path:
    """A command that is Python for aarch64, also for the processes that it starts:
    ``sys.executable`` is this script."""
    script = work / "python"
    emulated = (
        f'{shutil.which("qemu-aarch64-static")} -L "{root}" -0 "$0" "{root}/usr/bin/python{PYTHON}"'
    )
    settings = {
        "PYTHONHOME": root / "usr",
        "PYTHONPATH": f"{place}:{site}",
        "OMP_NUM_THREADS": 1,
        "PYTHONDONTWRITEBYTECODE": 1,
    }
    script.write_text(
        "#!/bin/bash\n"
        + "".join(f'export {name}="{value}"\n' for name, value in settings.items())
        + f'exec {emulated} "$@"\n'
    )
    script.chmod(0o755)
    return script


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--torch", default="2.10.0")
    parser.add_argument("--wheel", type=Path, help="instead of building it")
    parser.add_argument("tests", nargs="*", help=f"for pytest; default: {TESTS}")
    chosen = parser.parse_args(arguments)
    for program, package in (
        ("qemu-aarch64-static", "qemu-user-static"),
        ("mmdebstrap", "mmdebstrap"),
        ("nm", "binutils"),
    ):
        if shutil.which(program) is None:
            parser.error(f"{program} is not here; fix: apt-get install {package}")
    work = chosen.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    root = make_root(work)
    site = make_site(work, chosen.torch)
    place = install_flexops(work, chosen.wheel)
    python = make_interpreter(work, root, site, place)
    environment = {
        **os.environ,
        "FLEXOPS_JIT": "0",
        "FLEXOPS_CACHE_DIR": str(work / "cache"),
        "FLEXOPS_LOG": "quiet",
    }
    output = subprocess.run(
        [str(python), "-c", TRIAL],
        check=True,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    trials = json.loads(output.splitlines()[-1])
    wrong = [
        one
        for one in trials
        if one["backend"] != "aot" or one["max_error"] is None or one["max_error"] > TOLERANCE
    ]
    for one in wrong:
        print(one, file=sys.stderr)
    report = work / "report.xml"
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu and not slow and not image",
        f"--junitxml={report}",
    ]
    status = subprocess.run(
        [*command, *(chosen.tests or shlex.split(TESTS))], cwd=place, env=environment, check=False
    ).returncode
    files = torch_proof.counted(report, place)
    passed = sum(one["passed"] for one in files.values())
    failed = [f"{file} {name}" for file, one in files.items() for name in one["failed"]]
    print(
        f"{len(trials) - len(wrong)} of {len(trials)} families right; {passed} tests passed,"
        f" {len(failed)} failed: {'; '.join(failed)}"
    )
    return 1 if wrong or not trials else status


if __name__ == "__main__":
    sys.exit(main())
