"""``flexops warm``: what a run has recorded, or a model's operators may launch, compiled before the
next one starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .. import settings
from ..build.compile import progress
from ..build.deliver import warm as warming
from ..build.load import record
from ..errors import SettingsError


def warm(
    records: Annotated[
        list[Path] | None,
        typer.Option("--record", help="A file that FLEXOPS_RECORD wrote (repeatable)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_CONFIG",
            help="Without a run: the kernels of flexops.patch's operators in this model.",
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help=('GPU architectures, such as "8.0;9.0"; default: those of the recorded run.')
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(help="Also write the result to this archive, for `flexops cache import`."),
    ] = None,
    to_remote: Annotated[
        bool, typer.Option("--remote", help="Also store the result in FLEXOPS_CACHE_REMOTE.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Compile exactly what a recorded run launched. FLEXOPS_JIT=0 FLEXOPS_FALLBACK=forbid then
    verifies that a start compiles nothing."""
    if not records and not model:
        required = "--record FILE or --model MODEL_CONFIG"
        raise SettingsError(
            "neither a record nor a model is given",
            required=required,
            fix="FLEXOPS_RECORD=FILE <what is to start warm>",
        )
    chosen = settings.current()
    wanted = record.read(records or ())
    families = _families(model) if model else ()
    with progress.shown("what is to start warm", "quiet" if as_json else chosen.log) as report:
        made = warming.make(wanted, chosen, arch_list=arch, progress=report)
        if families:
            made += warming.make_families(families, chosen, arch_list=arch, progress=report)
    if as_json:
        typer.echo(
            json.dumps(
                [
                    {
                        "name": one.name,
                        "cached": one.cached,
                        "error": str(one.error) if one.error else None,
                    }
                    for one in made
                ],
                indent=1,
            )
        )
    else:
        for one in made:
            typer.echo(
                f"{one.name}:"
                f" {f'FAILED {one.error}' if one.error else 'was there' if one.cached else 'made'}"
            )
    if archive:
        count = warming.archive(made, chosen, archive)
        typer.echo(f"{count} entries -> {archive}", err=as_json)
    if to_remote:
        count = warming.publish(made, chosen)
        typer.echo(f"{count} entries in the remote cache", err=as_json)
    if failed := [one.error for one in made if one.error]:
        raise typer.Exit(failed[0].exit_code)


def _families(model: str) -> tuple[str, ...]:
    from ..patching import from_config

    return from_config.report(model).families()
