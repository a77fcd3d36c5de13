"""Looks for what must never happen, by chance and in numbers: hangs, wrong results, tracebacks, and
code of others that runs.

    python -m flexops_tools.campaign [--rounds N] [--only NAME]... [--json] [--seed N]

With N rounds there are N builds killed, N bits flipped, 1000 N texts read, and so on
(``campaign/``). It needs a C++ compiler and ninja, neither torch nor a GPU. It kills its own
processes only. Exits 1 if anything was found. docs/reliability.md has figures.
"""

# ruff: noqa: E402 - what is imported comes from this checkout, and without torch
from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests/support")]
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # builds need torch's files, if anything, and a fork of a small process is quick

from . import builds as building
from . import texts as reading
from .frame import KINDS, Tally, World, say

PARTS = {**building.PARTS, **reading.PARTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=1000, help="of the parts that count one by one (default 1000)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted(PARTS),
        help="a part to run (repeatable); all if none",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(2**32),
        help="repeats a campaign, as far as chance allows",
    )
    asked = parser.parse_args()
    tallies = [
        tally
        for name in asked.only or PARTS
        for tally in [campaign(name, asked.rounds, asked.seed, quiet=asked.json)]
    ]
    if asked.json:
        print(
            json.dumps(
                {"seed": asked.seed, "parts": [tally.as_dict() for tally in tallies]}, indent=1
            )
        )
    return int(any(tally.faults for tally in tallies))


def campaign(name: str, rounds: int, seed: int, quiet: bool = False) -> Tally:
    """Run one part."""
    part, share = PARTS[name]
    tally = Tally(name)
    folder = Path(tempfile.mkdtemp(prefix=f"flexops-campaign-{name}-"))
    before = os.environ.get("FLEXOPS_CACHE_DIR")
    os.environ["FLEXOPS_CACHE_DIR"] = str(folder / "tools")
    began = time.monotonic()
    try:
        part(
            World(
                folder / "work",
                max(1, round(rounds * share)),
                random.Random(f"{seed} {name}"),
                _made(folder / "work", tally),
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop("FLEXOPS_CACHE_DIR")
        if before is not None:
            os.environ["FLEXOPS_CACHE_DIR"] = before
    tally.seconds = time.monotonic() - began
    if not quiet:
        _print(tally.as_dict(), seed)
    return tally


def _made(folder: Path, tally: Tally) -> Tally:
    folder.mkdir()
    folder.parent.chmod(0o755)
    return tally


def _print(outcome: dict[str, Any], seed: int) -> None:
    counts = ", ".join(f"{outcome[kind]} {kind}" for kind in KINDS)
    say(
        f"{outcome['name']:<9} {outcome['rounds']:>8} rounds in {outcome['seconds']:.0f} s:"
        f" {counts}   (seed {seed})"
    )
    for what, count in sorted(outcome["seen"].items()):
        say(f"            {count:>7}  {what}")
    for fault in outcome["told"][:20]:
        say(f"  {fault}")


if __name__ == "__main__":
    sys.exit(main())
