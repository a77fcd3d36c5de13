"""``flexops inspect``: what kernels take of a GPU, their code, and what an edit changed. Needs no
GPU."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console

from .. import settings, toolchain
from ..build.compile import device_code
from ..build.describe import catalog
from ..build.load import loader, provider
from ..builder import registered
from ..errors import SettingsError
from ..inspection import baseline, mix
from ..inspection.measuring import Measured, measure, sources_of

_DEFAULT_ARCH = "9.0"


def inspect(
    op: Annotated[
        str,
        typer.Argument(
            metavar="OP",
            help=(
                "A family or an operator, or another project's library or family (mylib,"
                " mylib.scale)."
            ),
        ),
    ],
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel", help="Only kernels whose name contains this, such as 'rotate<float>'."
        ),
    ] = "",
    arch: Annotated[
        str | None,
        typer.Option(
            help=(
                "GPU architectures, such as '8.0;9.0'; by default those of the GPUs here, else 9.0."
            )
        ),
    ] = None,
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX.")] = False,
    sass: Annotated[
        bool, typer.Option("--sass", help="Print the machine code (nvdisasm or cuobjdump).")
    ] = False,
    instructions: Annotated[
        bool,
        typer.Option(
            "--mix",
            help=(
                "Count instructions by kind: of machine code if there is a disassembler, else of"
                " PTX."
            ),
        ),
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="REV",
            help="Compare with the kernels of this commit, compiled by the same compiler.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Registers, spills, shared memory, occupancy and instructions of an operator's kernels."""
    chosen = settings.current()
    asked = arch or chosen.arch_list or (None if toolchain.local_capabilities() else _DEFAULT_ARCH)
    choice = provider.compiler_for(chosen, toolchain.local_capabilities(), asked=asked)
    registered.load_for((op,))
    specs = catalog.select((op,))
    with Console(stderr=True).status("flexops: compiling kernels"):
        found = measure(specs, choice.architectures, choice.compiler, chosen, kernel=kernel)
        if not found:
            raise SettingsError(
                f"{op} has no kernel with {kernel!r} in its name",
                found=", ".join(spec.name for spec in specs),
                fix=f"flexops inspect {op}",
            )
        before: list[Measured] = []
        if diff:
            with sources_of(diff, specs[0].project.csrc) as csrc:
                before = measure(
                    specs, choice.architectures, choice.compiler, chosen, csrc=csrc, kernel=kernel
                )
    if diff:
        _show_difference(baseline.compare(baseline.of(before), found), diff, as_json, before, found)
    elif as_json:
        typer.echo(json.dumps([one.as_dict() for one in found], indent=1))
    elif ptx or sass or instructions:
        for one in found:
            typer.echo(f"// {one.kernel}  {one.architecture}  {one.compiler}")
            typer.echo(
                _mix(one) if instructions else mix.disassembly(one.code) if sass else _ptx(one)
            )
    else:
        for line in table(found):
            typer.echo(line)


def table(found: list[Measured]) -> list[str]:
    """Columns of what each kernel takes."""
    head = ("kernel", "arch", "regs", "stack", "spills", "shared", "block", "occupancy", "code")
    rows = [
        (
            one.kernel,
            str(one.architecture),
            *(str(one.resources.get(name, "-")) for name in ("registers", "stack")),
            f"{one.resources.get('spill_stores', 0)}/{one.resources.get('spill_loads', 0)}",
            str(one.resources.get("shared", "-")),
            str(one.threads or "-"),
            "-" if one.occupancy is None else f"{one.occupancy:.0%}",
            f"{one.code.stat().st_size / 1024:.1f}K",
        )
        for one in found
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    note = (
        "spills: bytes stored/loaded. block: the most threads that launch bounds allow; occupancy:"
        " with that many, without dynamic shared memory."
    )
    return [
        *(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        ),
        note,
    ]


def _show_difference(
    changes: list[baseline.Change],
    revision: str,
    as_json: bool,
    before: list[Measured],
    now: list[Measured],
) -> None:
    if as_json:
        typer.echo(
            json.dumps(
                [{**change._asdict(), "worse": change.worse} for change in changes], indent=1
            )
        )
        return
    for change in changes:
        typer.echo(str(change))
    known = {(one.kernel, one.architecture): one for one in before}
    other = 0
    for one in now:
        was = known.get((one.kernel, one.architecture))
        other += (
            was is not None
            and baseline.numbers(was) == baseline.numbers(one)
            and was.code.read_bytes() != one.code.read_bytes()
        )
    same = len(now) - len([change for change in changes if change.now]) - other
    typer.echo(
        f"since {revision}: {len(changes)} with other resources, {other} with the same resources"
        f" and other code, {same} as they were"
    )


def _ptx(one: Measured) -> str:
    """The kernel's PTX, by the compiler that made the machine code."""
    chosen = settings.current()
    spec = catalog.find(one.family)
    fit = one.architecture._replace(sass=False, ptx=True)
    compiler = provider.compiler_for(chosen, (), asked=str(fit)).compiler
    plan = provider.plan_kernel(spec, one.kernel, fit, compiler)
    entry = device_code.obtain(
        [plan], loader.open_cache(chosen), time_limit=chosen.compile_timeout
    )[0].require()
    return entry.library.read_text(encoding="utf-8").rstrip("\0")


def _mix(one: Measured) -> str:
    has_tool = mix.find_tool("nvdisasm") or mix.find_tool("cuobjdump")
    counts: Counter[str] = (
        mix.of_sass(mix.disassembly(one.code)) if has_tool else mix.of_ptx(_ptx(one))
    )
    total = sum(counts.values())
    lines = [
        f"  {kind:<28}{count:>7}  {count / total:>4.0%}" for kind, count in counts.most_common()
    ]
    return "\n".join(
        [
            *lines,
            (
                f"  {total} instructions of"
                f" {'machine code' if has_tool else 'PTX (no disassembler here)'}, each counted"
                " once"
            ),
        ]
    )
