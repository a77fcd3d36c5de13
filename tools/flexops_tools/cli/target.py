"""``flexops target lock|prove|render``: files rendered from the matrix, and tests of its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from flexops import _toml, settings, targets, toolchain
from flexops.build.compile import progress
from flexops.errors import TargetError
from flexops.inspection import baseline
from flexops.inspection.measuring import Measured
from flexops.targets import loading
from flexops.toolchain.compat import rules

from ..proving import baseline_file, hip_proof, torch_proof
from ..proving import kernels as proving
from ..targets import locks, proven, validate
from ..targets import render as rendering

Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


def render(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if anything would change.")
    ] = False,
) -> None:
    """Write everything that follows from the matrix: envs/, docker/, the dev containers, the conda
    variants, and the table of targets."""
    validate.check(_toml.load(loading.PATH), rules())
    matrix, root = targets.load(), rendering.checkout()
    changes = rendering.compare(matrix, root) if check else rendering.write(matrix, root)
    for line in changes.lines():
        typer.echo(line)
    if check and changes:
        typer.echo(
            "these do not follow from flexops/targets/matrix.toml; fix: flexops target render",
            err=True,
        )
        raise typer.Exit(1)
    typer.echo(
        "everything follows from the matrix"
        if check or not changes
        else f"{len(changes.lines())} files changed"
    )


def lock(
    toolkits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOOLKIT]...",
            help="Such as cu130; default: all that the default index serves.",
        ),
    ] = None,
) -> None:
    """Resolve the pip requirements anew and lock them by hash: envs/requirements/<toolkit>.lock."""
    root = rendering.checkout()
    for target in locks.choose(targets.load(), toolkits or ()):
        typer.echo(str(locks.write(target, root).relative_to(root)))


def prove(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...",
            help="Rows whose compiler and GPUs to use; default: every NVRTC here, for four GPUs.",
        ),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", help="A family or operator (repeatable); all if none is named."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One architecture for each NVRTC here.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Write what was measured into the baseline.")
    ] = False,
    of_torch: Annotated[
        bool,
        typer.Option("--torch", help="Test with the torch of this environment instead."),
    ] = False,
    tests: Annotated[
        list[str] | None,
        typer.Option(
            "--tests",
            help="With --torch: arguments for pytest, such as tests/ops (repeatable); on the CPU.",
        ),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a report in Markdown.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile the kernels as rows of the matrix do, and compare registers, spills and shared
    memory with the baseline; exit 1 if any is worse.

    Rows for AMD GPUs are compiled by the hipcc that is here, of whatever ROCm, and are
    not compared.

    With --torch, in an environment that has a row's torch: compile and link every library against
    it, open each, and verify every operator's native results on the CPU against its reference;
    --tests runs tests there, too, and records how many passed and failed in each folder.

    --update writes the measured resources into tests/golden/kernel-resources.json, and what was
    done into tests/golden/tested-with.json, from which `flexops target render` writes the table
    "tested with". Needs no GPU.
    """
    if of_torch:
        _prove_torch(ids or [], tests or [], update, as_json)
        return
    root = rendering.checkout()
    path = root / baseline_file.FILE
    known = baseline_file.read(path) if path.exists() or not update else {}
    chosen = settings.current()
    rows = [targets.load().find(one) for one in ids or ()]
    amd = hip_proof.prove([one.id for one in rows if one.accelerator == "rocm"], op or (), chosen)
    nvidia = [one.id for one in rows if one.accelerator != "rocm"]
    found = _Proof(amd=amd)
    if nvidia or not rows:
        with progress.shown("kernels", "quiet" if as_json or as_markdown else chosen.log) as report:
            measured, changes = proving.prove(
                nvidia, op or (), known, chosen, quick=quick, progress=report
            )
        found = _Proof(measured, changes, amd)
    if not found.measured and not amd:
        raise TargetError(
            "no kernel was compiled, so nothing is proven",
            found=" ".join(f"--op {one}" for one in op or ()),
            required="families with kernels for these architectures",
            fix="flexops target prove --help",
        )
    failed = any(one.error for one in amd)
    if update:
        _keep(root, known, found.measured, amd, whole=not (op or failed))
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    elif as_markdown:
        typer.echo(proving.report(found.measured, amd), nl=False)
    else:
        for line in found.lines():
            typer.echo(line)
    if failed or (found.worse and not update):
        typer.echo(
            "fix: correct the kernels"
            + ("" if failed else "; or, if it is meant: flexops target prove --update"),
            err=True,
        )
        raise typer.Exit(1)


class _Proof(NamedTuple):
    """What was compiled: NVIDIA's kernels with their changes against the baseline, and AMD's."""

    measured: Sequence[Measured] = ()
    changes: Sequence[baseline.Change] = ()
    amd: Sequence[hip_proof.Compiled] = ()

    @property
    def worse(self) -> int:
        return sum(change.worse for change in self.changes)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kernels": [one.as_dict() for one in self.measured],
            "changes": [{**one._asdict(), "worse": one.worse} for one in self.changes],
            "amd": [one._asdict() for one in self.amd],
        }

    def lines(self) -> Iterator[str]:
        for one in self.amd:
            found = one.error or f"{len(one.kernels)} kernels"
            yield f"{one.family} by {one.compiler} for {one.architecture}: {found}"
        new = 0
        for change in self.changes:
            if change.was or change.worse:
                yield str(change)
            else:
                new += 1
        if self.measured or not self.amd:
            others = len(self.changes) - self.worse - new
            yield (
                f"{len(self.measured)} kernels: {self.worse} worse than the baseline, {new} that it"
                f" does not know, {others} others changed"
            )


def _keep(
    root: Path,
    known: baseline.Baseline,
    measured: Sequence[Measured],
    amd: Sequence[hip_proof.Compiled],
    *,
    whole: bool,
) -> None:
    """Write what was measured into the baseline; if it is of all families, into the record of tests
    too."""
    if measured:
        baseline_file.write(root / baseline_file.FILE, known, measured)
    if whole:
        proven.write(root / proven.RECORD, proving.facts(measured, amd, torch_proof.today()))


def _prove_torch(ids: list[str], tests: list[str], update: bool, as_json: bool) -> None:
    torch, root = toolchain.torch_build(), rendering.checkout()
    for row in map(targets.load().find, ids):
        if torch is None or torch.version != proven.build_of(row):
            found = f"torch {torch.version}" if torch else "no torch"
            raise TargetError(
                f"this environment is not {row.id}'s",
                found=found,
                required=row.torch_requirement,
                fix=f"pip install {row.torch_requirement}",
            )

    def say(line: str) -> None:
        typer.echo(line, err=True)

    facts, wrong = torch_proof.prove(settings.current(), say=say)
    if wrong:
        say("\n".join([*wrong, "nothing was written: fix these errors first"]))
        raise typer.Exit(1)
    facts["tests"] = {}

    def keep() -> None:
        if update and torch:
            tested = torch_proof.tested(torch.version, facts, facts["tests"])
            proven.write(root / proven.RECORD, tested)

    keep()
    for suite in tests:
        say(f"pytest {suite}")
        folders, failed = torch_proof.run_tests(suite, root)
        wrong += failed
        facts["tests"] |= folders
        keep()  # each at once: a suite takes minutes
    typer.echo(
        json.dumps(facts, indent=1)
        if as_json
        else "\n".join(f"{name:<17} {value}" for name, value in facts.items())
    )
    if wrong:
        say("\n".join(wrong))
        raise typer.Exit(1)
