"""``flexops cache remote``: look at the remote cache and keep it in order."""

from __future__ import annotations

import json
import re
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from .. import settings
from ..build.store import cache_archive, remote
from ..build.store.cache import BuildCache
from ..build.store.remote import Object, Remote
from ..errors import CacheError, SettingsError

app = typer.Typer(
    no_args_is_help=True,
    help="Inspect and clean the remote cache (FLEXOPS_CACHE_REMOTE).",
)
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


@app.command("list")
def list_objects(as_json: Json = False) -> None:
    """The entries, with size and date."""
    store = remote.required(settings.current())
    entries = [item for item in store.list() if item.name.endswith(remote.SUFFIX)]
    if as_json:
        typer.echo(
            json.dumps(
                [
                    {"name": item.name, "bytes": item.size, "changed": item.changed or None}
                    for item in entries
                ],
                indent=1,
            )
        )
        return
    for item in entries:
        typer.echo(f"{item.size:>10}  {_date(item)}  {item.name}")
    typer.echo(
        f"{len(entries)} entries, {sum(item.size for item in entries)} bytes in {store.name}"
    )


@app.command()
def check(as_json: Json = False) -> None:
    """Try what a build does: credentials, a look-up, latency, and with FLEXOPS_CACHE_REMOTE_WRITE=1
    a put, a conditional put and a removal. Exits with 1 if something fails."""
    store, failed, rows = remote.required(settings.current()), False, []
    for one in store.check():
        failed |= one.ok is False
        rows.append(one._asdict())
        if not as_json:
            status = {True: "ok", False: "FAILED", None: "-"}[one.ok]
            typer.echo(f"{status:<8}{one.what}: {one.found}")
            if one.fix:
                typer.echo(f"        fix: {one.fix}")
    if as_json:
        typer.echo(json.dumps({"url": store.name, "checks": rows}, indent=1))
    if failed:
        raise typer.Exit(1)


@app.command()
def verify(
    remove: Annotated[
        bool,
        typer.Option(
            "--remove", help="Remove damaged entries, and those without a required signature."
        ),
    ] = False,
) -> None:
    """Fetch every entry and verify it, as a machine that needs it does (with
    FLEXOPS_CACHE_TRUSTED_KEYS, its signature too). Nothing is opened."""
    chosen = settings.current()
    store = remote.required(chosen)
    entries, bad = [item for item in store.list() if item.name.endswith(remote.SUFFIX)], 0
    for item in entries:
        if why := _wrong(store, item, chosen):
            bad += 1
            typer.echo(f"{item.name}: {why}{'; removed' if remove else ''}")
            if remove:
                store.remove(item.name)
    typer.echo(f"{len(entries) - bad} of {len(entries)} entries are whole")
    if bad:
        raise typer.Exit(1)


def _wrong(store: Remote, item: Object, chosen: settings.Settings) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "archive")
        store.download(item.name, file, chosen.cache_max_bytes)
        try:
            cache = BuildCache(
                Path(folder, "cache"),
                max_bytes=chosen.cache_max_bytes,
                shared=True,
                trusted_keys=chosen.cache_trusted_keys,
            )
            held = cache_archive.import_archive(cache, file)
        except CacheError as error:
            return error.reason.replace(folder, "")
        right = len(held) == 1 and remote.is_named_right(item.name, held[0].manifest)
        return "" if right else "holds another entry than its name says"


@app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Remove entries older than this, such as 30d or 12h.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(help="Remove the oldest entries until at most this is left, such as 10G."),
    ] = None,
) -> None:
    """Remove entries by age or size. A store's own lifecycle rules do the same without anybody's
    doing."""
    store = remote.required(settings.current())
    if older_than is None and max_size is None:
        raise SettingsError(
            "nothing says what to remove",
            required="--older-than or --max-size",
            fix="flexops cache remote prune --older-than 30d",
        )
    items = sorted(store.list(), key=lambda item: item.changed)
    if any(not item.changed for item in items):
        raise CacheError(
            f"{store.name} does not say how old its objects are",
            fix="use the registry's own rules for keeping tags",
        )
    gone = to_remove(
        items,
        now=time.time(),
        seconds=_seconds(older_than),
        most=None if max_size is None else settings.parse_size("--max-size", max_size),
    )
    for item in gone:
        store.remove(item.name)
    typer.echo(
        f"removed {len(gone)} of {len(items)} objects ({sum(item.size for item in gone)} bytes)"
    )


def to_remove(
    items: list[Object], *, now: float, seconds: float | None, most: int | None
) -> list[Object]:
    """Of objects, the oldest first: those that are too old, then as many as are too much."""
    gone = [item for item in items if seconds is not None and item.changed < now - seconds]
    left = items[len(gone) :]
    total = sum(item.size for item in left)
    for item in left:
        if most is None or total <= most:
            break
        total -= item.size
        gone.append(item)
    return gone


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})([mhd])", text.strip())
    if match is None:
        raise SettingsError(
            "--older-than is no age",
            found=text[:80],
            required="a number with m, h or d",
            fix="--older-than 30d",
        )
    return int(match[1]) * _UNITS[match[2]]


def _date(item: Object) -> str:
    return (
        datetime.fromtimestamp(item.changed).strftime("%Y-%m-%d %H:%M")
        if item.changed
        else f"{'?':<16}"
    )
