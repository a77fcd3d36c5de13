"""``flexops cache``: look at the build cache and keep it in order."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import settings
from ..build.load import loader
from ..build.store import cache_archive, counters
from ..build.store.cache import BuildCache, Entry
from ..errors import CacheError
from ..settings import size_in_words
from . import remote

app = typer.Typer(no_args_is_help=True, help="Inspect and clean the build cache.")
app.add_typer(remote.app, name="remote")
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
_UNBOUNDED = 10_000


def _cache() -> BuildCache:
    return loader.open_cache(settings.current())


@app.command()
def info(as_json: Json = False) -> None:
    """Where the cache is, what it holds, its bound, and what is wrong with it."""
    state = _cache().info()
    if as_json:
        facts = {
            "root": str(state.root),
            "entries": state.entries,
            "bytes": state.size,
            "max_bytes": state.max_size,
        }
        typer.echo(
            json.dumps(
                {**facts, "quarantined": state.quarantined, "problem": state.problem or None},
                indent=1,
            )
        )
        return
    typer.echo(
        f"{state.root}\n{state.entries} entries, {size_in_words(state.size)} of at most"
        f" {size_in_words(state.max_size)} (FLEXOPS_CACHE_MAX_SIZE)"
    )
    if state.quarantined:
        typer.echo(
            f"damaged entries put aside: {state.quarantined}; `flexops cache clear` removes them"
        )
    if state.problem:
        typer.echo(f"not used: {state.problem}")


@app.command()
def stats(
    as_json: Json = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print Prometheus' text format.")
    ] = False,
) -> None:
    """What cold starts got from where, of every process that used this cache: hits, misses, bytes
    and seconds. Warm starts write nothing down."""
    totals = counters.of_cache(_cache().root)
    if as_json:
        typer.echo(json.dumps(totals, indent=1))
    elif prometheus:
        typer.echo(counters.prometheus(totals), nl=False)
    else:
        for tier in counters.WRITTEN:
            row = totals[tier]
            typer.echo(
                f"{tier:<10} {row['hits']:>7.0f} hits {row['misses']:>7.0f} misses"
                f" {size_in_words(row['bytes']):>10} {row['seconds']:>9.1f} s"
            )


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """The entries, the least recently used first."""
    entries = _cache().entries()
    if as_json:
        typer.echo(json.dumps([_as_dict(entry) for entry in entries], indent=1))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", overflow="fold")
    table.add_column("key", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("last used", no_wrap=True)
    table.add_column("for", overflow="fold")
    for entry in entries:
        what = ", ".join(entry.manifest.architectures or entry.manifest.isa_levels)
        table.add_row(
            entry.manifest.name,
            entry.manifest.key[:12],
            size_in_words(entry.size),
            _date(entry.last_used),
            what,
        )
    if entries:
        # A line for each entry where a program reads them; else as wide as the terminal, or
        # COLUMNS.
        Console(
            width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _UNBOUNDED,
            highlight=False,
            markup=False,
        ).print(table)


@app.command()
def prune(
    max_size: Annotated[
        str | None,
        typer.Option(help="Bound to prune to, such as 500M; default FLEXOPS_CACHE_MAX_SIZE."),
    ] = None,
) -> None:
    """Remove the least recently used entries until the cache is within its bound."""
    bound = None if max_size is None else settings.parse_size("--max-size", max_size)
    _say_removed(_cache().prune(max_bytes=bound))


@app.command()
def clear(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Entries to remove, as `list` names them; all if none."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove entries."""
    cache, wanted = _cache(), tuple(names or ())
    known = sorted({entry.manifest.name for entry in cache.entries()})
    if unknown := sorted(set(wanted) - set(known)):
        found = f"{', '.join(unknown)}; {cache.root} holds {', '.join(known) or 'nothing'}"
        raise CacheError(
            "no entries are called so",
            found=found,
            required="names as `flexops cache list` shows them",
            fix="flexops cache list",
        )
    if not yes:
        chosen = [entry for entry in cache.entries() if not wanted or entry.manifest.name in wanted]
        _ask(
            f"Remove {len(chosen)} entries ({size_in_words(sum(entry.size for entry in chosen))})"
            f" from {cache.root}?"
        )
    _say_removed(cache.clear(wanted))


def _ask(question: str) -> None:
    """Continue if the answer is yes; without a terminal, name the option that confirms."""
    try:
        answer = typer.confirm(question, err=True)
    except typer.Abort:
        typer.echo("", err=True)
        raise CacheError(
            "nothing was removed: no answer", fix="flexops cache clear --yes"
        ) from None
    if not answer:
        raise typer.Exit(1)


@app.command()
def export(file: Annotated[Path, typer.Argument(help="The archive to write (.tar.gz).")]) -> None:
    """Write every entry to an archive, for another machine with the same torch ABI."""
    entries = cache_archive.export(_cache(), file)
    typer.echo(f"{len(entries)} entries -> {file}")


@app.command("import")
def import_archive(
    file: Annotated[Path, typer.Argument(help="An archive that `flexops cache export` wrote.")],
) -> None:
    """Add the entries of an archive. They are code that will run: import only what you trust."""
    entries = cache_archive.import_archive(_cache(), file)
    typer.echo(f"{len(entries)} entries <- {file}")


def _say_removed(entries: list[Entry]) -> None:
    typer.echo(f"removed {len(entries)} entries")


def _as_dict(entry: Entry) -> dict[str, object]:
    manifest = entry.manifest
    return {
        "name": manifest.name,
        "key": manifest.key,
        "device": manifest.device,
        "bytes": entry.size,
        "last_used": entry.last_used,
        "torch_abi": manifest.torch_abi,
        "cuda_version": manifest.cuda_version or None,
        "architectures": list(manifest.architectures),
        "isa_levels": list(manifest.isa_levels),
        "directory": str(entry.directory),
    }


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):  # no date, on whatever clock
        return "?"
