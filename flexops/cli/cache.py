"""``flexops cache``: look at the build cache and keep it in order."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from .. import settings
from ..op_builder import cache_archive, loader
from ..op_builder.cache import BuildCache, Entry

app = typer.Typer(no_args_is_help=True, help="Look at the build cache and keep it in order.")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _cache() -> BuildCache:
    return loader.open_cache(settings.current())


@app.command()
def info(as_json: Json = False) -> None:
    """Where the cache is, what it holds, its bound, and what is wrong with it."""
    state = _cache().info()
    if as_json:
        facts = {"root": str(state.root), "entries": state.entries, "bytes": state.size, "max_bytes": state.max_size}
        typer.echo(json.dumps({**facts, "quarantined": state.quarantined, "problem": state.problem or None}, indent=1))
        return
    typer.echo(f"{state.root}\n{state.entries} entries, {_size(state.size)} of at most {_size(state.max_size)} (FLEXOPS_CACHE_MAX_SIZE)")
    if state.quarantined:
        typer.echo(f"{state.quarantined} damaged entries put aside; `flexops cache clear` removes them")
    if state.problem:
        typer.echo(f"not used: {state.problem}")


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """The entries, the least recently used first."""
    entries = _cache().entries()
    if as_json:
        typer.echo(json.dumps([_as_dict(entry) for entry in entries], indent=1))
        return
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
        what = ", ".join(entry.manifest.architectures or entry.manifest.isa_levels)
        typer.echo(f"{entry.manifest.name:<24} {entry.manifest.key[:12]}  {_size(entry.size):>10}  {used}  {what}")


@app.command()
def prune(max_size: Annotated[str | None, typer.Option(help="Bound to prune to, such as 500M; default FLEXOPS_CACHE_MAX_SIZE.")] = None) -> None:
    """Remove the least recently used entries until the cache is within its bound."""
    bound = None if max_size is None else settings.parse_size("--max-size", max_size)
    _say_removed(_cache().prune(max_bytes=bound))


@app.command()
def clear(names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Entries to remove, as `list` names them; all if none.")] = None) -> None:
    """Remove entries."""
    _say_removed(_cache().clear(tuple(names or ())))


@app.command()
def export(file: Annotated[Path, typer.Argument(help="The archive to write (.tar.gz).")]) -> None:
    """Write every entry to an archive, for another machine with the same torch ABI."""
    entries = cache_archive.export(_cache(), file)
    typer.echo(f"{len(entries)} entries -> {file}")


@app.command("import")
def import_archive(file: Annotated[Path, typer.Argument(help="An archive that `flexops cache export` wrote.")]) -> None:
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


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
