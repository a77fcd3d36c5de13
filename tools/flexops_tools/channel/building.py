"""Builds variants of the recipe and puts the packages into a channel."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexops.errors import ChannelError

from ..targets import render
from ..targets.conda import Variant
from .engine import Engine, Job, Wish, choose
from .indexing import index
from .place import Place
from .run import child, last_lines
from .sealing import source_date

OnPhase = Callable[[str], None]

_PHASES = (
    ("Fetching source", "fetching the source"),
    ("Could not find noarch", "solving for the dependencies"),
    ("Resolving environments", "solving for the dependencies"),
    ("Finalized run dependencies", "installing the dependencies"),
    ("Successfully updated the host environment", "compiling"),
    ("-m pip wheel", "compiling"),
    ("running build_ext", "compiling the operators"),
    ("Packaging new files", "packing"),
    ("Collecting tests from", "testing"),
    ("TEST START", "testing"),
)
"""What a line of output says about how far a build is."""

_OWN_ERROR = re.compile(r"^( *)flexops: .*(?:\n\1 +\S.*)*", re.MULTILINE)


@dataclass(frozen=True)
class Built:
    """One package that was built.

    Attributes:
        variant: of the recipe.
        package: the file, in the channel.
        seconds: how long it took, tests included.
        log: all that was said meanwhile.
    """

    variant: str
    package: Path
    seconds: float
    log: Path


def build(
    variants: Sequence[Variant],
    place: Place,
    *,
    upstream: Sequence[str] = ("conda-forge",),
    recipe: Path | None = None,
    overrides: Sequence[Path] = (),
    wish: Wish = "auto",
    test: bool = True,
    on_phase: Callable[[Variant, str], None] = lambda *_: None,
) -> list[Built]:
    """Build each variant, in order, and index the channel after each; the first that fails ends it,
    and what was built before stays.

    Args:
        upstream: channels that dependencies come from.
        recipe: the folder of ``recipe.yaml``; default that of this checkout.
        overrides: further variant files, whose values win.
        test: run the recipe's tests, in environments of their own.

    Raises:
        ChannelError: with the cause, the fix and the log's path.
        TargetError: this is no checkout, so there is no recipe.
    """
    place.require_folder()
    root = recipe.absolute() if recipe else render.checkout() / "recipe"
    program = choose(wish)
    return [
        _build_one(
            variant,
            place,
            program,
            root,
            upstream,
            overrides,
            test,
            lambda phase, one=variant: on_phase(one, phase),  # type: ignore[misc]
        )
        for variant in variants
    ]


def _build_one(
    variant: Variant,
    place: Place,
    program: Engine,
    recipe: Path,
    upstream: Sequence[str],
    overrides: Sequence[Path],
    test: bool,
    on_phase: OnPhase,
) -> Built:
    started = time.monotonic()
    output, log = place.work / variant.id, place.logs / f"{variant.id}.log"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    files = [recipe.parent / variant.path, *(path.absolute() for path in overrides)]
    job = Job(recipe, files, upstream, output, test, _environment(variant))
    try:
        program.build(job, log, lambda line: _tell(line, on_phase))
        made = _made(output)
        if not made:
            raise ChannelError("the build made no package", log=log)
    except ChannelError as error:
        raise _failed(variant, error, log) from error
    except OSError as error:
        raise ChannelError(
            f"variant {variant.id} cannot be built", found=str(error), log=log
        ) from error
    on_phase("indexing")
    packages = [_publish(path, place, recipe) for path in made]
    index(place)
    shutil.rmtree(output, ignore_errors=True)
    return Built(variant.id, packages[0], time.monotonic() - started, log)


def _environment(variant: Variant) -> dict[str, str]:
    """A machine that only builds has no driver: the solver gets one that runs the variant,
    unless the user has set one."""
    return (
        {"CONDA_OVERRIDE_CUDA": os.environ.get("CONDA_OVERRIDE_CUDA") or variant.cuda}
        if variant.cuda
        else {}
    )


def _tell(line: str, on_phase: OnPhase) -> None:
    for sign, phase in _PHASES:
        if sign in line:
            on_phase(phase)


def _failed(variant: Variant, error: ChannelError, log: Path) -> ChannelError:
    if error.fix:
        return error  # it says all there is to say: a tool is missing, say
    return ChannelError(
        f"variant {variant.id} cannot be built",
        found=_said(log, error.found),
        fix="see the log; --from names further channels",
        log=log,
    )


def _said(log: Path, error: str) -> str:
    """flexops' own error in the log, such as a compile that failed; else the end of what was
    said."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    own = _OWN_ERROR.search(text)
    return textwrap.dedent(own[0]).replace("\n", "\n  ") if own else last_lines(error or text)


def _made(output: Path) -> list[Path]:
    """Package files that passed their tests, of whichever sub-folder."""
    return [
        path
        for path in sorted(output.glob("*/*.conda"))
        if path.parent.name not in ("broken", "bld", "src_cache")
    ]


def _publish(path: Path, place: Place, recipe: Path) -> Path:
    """Into the channel, whole or not at all. A package that is there is never replaced.

    Raises:
        ChannelError: another package of that very name is there. The build number is the recipe's:
            to raise it is for whoever changed something.
    """
    target = place.channel / path.parent.name / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    child(
        "seal",
        {
            "package": str(path),
            "target": str(partial),
            "date": source_date(recipe.parent),
            "work": str(place.work),
        },
    )
    if target.exists() and not filecmp.cmp(partial, target, shallow=False):
        partial.unlink()
        raise ChannelError(
            "a published package never changes",
            found=f"{target}, which is not what was built now",
            required=(
                "unchanged inputs, which give the same package again, or a higher build number"
            ),
            fix=(
                f"raise `build:` in {recipe / 'recipe.yaml'}; or build into a fresh folder, with"
                " --channel"
            ),
        )
    os.replace(partial, target)
    return target
