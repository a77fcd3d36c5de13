"""``flexops profile`` and ``flexops sanitize``: NVIDIA's tools, or torch's profiler, over cases
that are there already."""

from __future__ import annotations

import json
import os
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..bench import profiling
from ..build.describe import catalog
from ..builder import registered
from ..errors import FlexopsError, SettingsError, ToolchainError
from ..inspection import mix
from ..toolchain import proc

_OP_HELP = (
    "An operator or family, also of your library (mylib.scale, by its benchmarks/scale.py), or a"
    " file or module with cases."
)


class Tool(str, Enum):
    """compute-sanitizer's tools."""

    memcheck = "memcheck"
    racecheck = "racecheck"
    synccheck = "synccheck"
    initcheck = "initcheck"


class By(str, Enum):
    """What profiles."""

    ncu = "ncu"
    torch = "torch"


def profile(
    op: Annotated[str, typer.Argument(metavar="OP", help=_OP_HELP)],
    case: Annotated[
        str, typer.Option("--case", help="The first case whose name contains this.")
    ] = "",
    contender: Annotated[
        str, typer.Option(help="The contender: flexops, 'torch eager' ...; default: the first one.")
    ] = "",
    by: Annotated[By | None, typer.Option(help="Default: ncu if present, on a GPU.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is a GPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Each kernel of one call: its time, and how busy memory, processors and warps are."""
    import torch

    if device not in (None, "cpu", "cuda"):
        raise SettingsError(
            "there is no such device",
            found=str(device),
            required="cpu or cuda",
            fix="omit --device",
        )
    seen = torch.cuda.is_available()
    if device == "cuda" and not seen:
        found = f"torch {torch.__version__} sees no GPU"
        raise ToolchainError(
            "there is no GPU to profile on",
            found=found,
            required="a GPU, or --device cpu",
            fix="flexops doctor",
        )
    where = device or ("cuda" if seen else "cpu")
    place = op if op.endswith(".py") or Path(op).is_file() else _cases_of(op)
    request = {
        "places": [place] if place else [],
        "op": "" if place else op,
        "case": case,
        "contender": contender,
        "device": where,
    }
    ncu = mix.find_tool("ncu")
    if by is By.ncu and not ncu:
        raise ToolchainError(
            "there is no ncu here",
            found="neither on PATH nor in a toolkit",
            required="Nsight Compute",
            fix="flexops profile --by torch",
        )
    use_ncu = by is By.ncu or (by is None and ncu is not None and where == "cuda")
    rows = profiling.by_ncu(ncu, request) if use_ncu and ncu else profiling.by_torch(request)
    if as_json:
        typer.echo(json.dumps([{**row, "device": where} for row in rows], indent=1))
        return
    for line in profiling.lines(rows):
        typer.echo(line)
    timed = "a GPU" if where == "cuda" else "the CPU" if seen else "the CPU: torch sees no GPU here"
    typer.echo(f"{place or op}, by {'ncu' if use_ncu else 'torch.profiler'}, on {timed}")


def sanitize(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="OP [-- COMMAND...]",
            help="An operator or family; its tests on a GPU, or the command, are run.",
        ),
    ],
    tool: Annotated[Tool, typer.Option(help="What to look for.")] = Tool.memcheck,
) -> None:
    """compute-sanitizer over the contract's cases: accesses out of bounds, races, missing barriers,
    uninitialized memory. Requires a GPU."""
    program = mix.find_tool("compute-sanitizer")
    if program is None:
        fix = "install a CUDA toolkit's compute-sanitizer, or pip install nvidia-cuda-sanitizer-api"
        raise ToolchainError(
            "there is no compute-sanitizer here",
            found="neither on PATH, in a toolkit nor in a wheel",
            required="CUDA's",
            fix=fix,
        )
    command = arguments[1:]  # `--` is gone, as options may stand behind the operator
    options = ["--tool", tool.value, "--target-processes", "all", "--error-exitcode", "99"]
    if not command:
        registered.load_for((arguments[0],))
        spec = catalog.select((arguments[0],))[0]
        quiet = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command = [*quiet, *tests_of(arguments[0])]
        # not torch's, of which tests launch more
        options += ["--kernel-name", f"kns={spec.project.name}"]
    status, said = _echoed([program, *options, *command])
    errors = sum(map(int, re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", said)))
    ended = f"the command ended with status {status}" if status else "no errors"
    typer.echo(f"{tool.value}: {f'{errors} errors' if errors else ended}")
    if status:
        raise typer.Exit(1)


def _echoed(command: list[str]) -> tuple[int, str]:
    """The exit status of a command whose output is printed as it comes, and the output."""
    # Every tensor an allocation of its own: an access beyond it is then beyond memory, and not into
    # a neighbour.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process, said = proc.start(command, environment=environment), []
    try:
        for line in proc.lines(process):
            said.append(line)
            typer.echo(line, nl=False)
        process.wait()
    finally:
        proc.stop(process)
    return process.returncode, "".join(said)


def _cases_of(op: str) -> str:
    """The file or module with cases that is meant; nothing where it is flexops' own operator, whose
    cases are known."""
    registered.load_for((op,))
    if not any(
        op in (spec.project.name, spec.name) for spec in catalog.specs() if not spec.project.own
    ):
        return op if "." in op else ""
    file = f"benchmarks/{catalog.select((op,))[0].family}.py"
    if not Path(file).is_file():
        raise FlexopsError(
            f"no cases of {op} are here",
            found=str(Path.cwd()),
            required=f"{file}, or the name of a file with cases(setup)",
        )
    return file


def tests_of(op: str) -> list[str]:
    """The tests of an operator's family that run on a GPU, in this checkout: those made for this,
    if there are any, since tools slow kernels down a hundredfold.

    Raises:
        FlexopsError: there are none, so a command has to be named.
    """
    (spec,) = catalog.select((op,))[:1]
    names = (
        f"ops/test_{spec.family}.py",
        f"gpu/test_{spec.family}_gpu.py",
        f"test_{spec.family}.py",
    )
    made_for_this = Path("tests", "gpu", f"test_{spec.family}_sanitized_gpu.py")
    found = (
        [str(made_for_this)]
        if made_for_this.is_file()
        else [str(path) for name in names if (path := Path("tests", name)).is_file()]
    )
    if not found:
        fix = f"flexops sanitize {op} -- pytest -k {op}"
        raise FlexopsError(
            f"no tests of {op} are here",
            found=str(Path("tests").absolute()),
            required="a checkout, or a command",
            fix=fix,
        )
    # a capture may not allocate memory, which every tensor does here
    return [*found, "-k", "(cuda or gpu) and not graph"]
