"""Compiled objects kept in the cache, so that after an edit only what the edit reaches is compiled
again.

An object is an entry like any other: the artifact of a plan of one step, under the key of that
plan. A compiler launcher such as ccache does the same where there is one; it cannot with
precompiled headers, and many machines have none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ...errors import CacheError
from ..plan import cache_key, edits, search
from ..plan.cache_key import Digests
from ..plan.plan import BuildPlan, Step
from .cache import BuildCache, places_today
from .manifest import Manifest, file_crc32

NAME = "kept-objects"
"""Name of the cache directory that holds them."""


def restore(plan: BuildPlan, directory: Path, cache: BuildCache) -> frozenset[str]:
    """Put the plan's objects that are in the cache into its build directory.

    Each gets a dependency file that names today's headers. In a shared cache any member could
    have made them: what is signed is linked from those only that a trusted key signed.

    Returns:
        The names of the objects that are there now.
    """
    restored: set[str] = set()
    if cache.shared and cache.signing_key and not cache.trusted_keys:
        return frozenset()
    for step in _compiles(plan):
        single = _single(plan, step)
        entry = cache.lookup(single)
        if entry is None:
            continue
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            headers = places_today(
                plan, entry.manifest.files.keys() - cache_key.source_digests(single).keys()
            )
            (directory / f"{step.output}.d").write_text(
                f"{step.output}: {' '.join(map(_escape, headers))}\n", encoding="utf-8"
            )
            _link_or_copy(entry.library, directory / step.output)
            restored.add(step.output)
    return frozenset(restored)


def keep(
    plan: BuildPlan,
    directory: Path,
    cache: BuildCache,
    sources: Digests,
    before: edits.Before,
    restored: frozenset[str],
) -> None:
    """Store the objects that a build left in its directory, less the ``restored``.

    A convenience: what cannot be stored is not.
    """
    for step in _compiles(plan):
        built = directory / step.output
        single = _single(plan, step)
        with contextlib.suppress(OSError, CacheError):
            if step.output in restored or built.stat().st_nlink > 1:  # it was in a cache
                continue
            mine = cache_key.source_digests(single)
            reached = cache_key.reached_headers(single, [directory / f"{step.output}.d"])
            headers = search.header_states(single, directory, reached)
            seen = [*map(str, single.sources), *places_today(single, search.present(headers))]
            edited = any(sources.get(name) != digest for name, digest in mine.items())
            if not edited and before.verdict(seen) == "same":
                _store(single, step, built, cache, mine, headers)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system, or another user's
        shutil.copy2(source, target)


def _store(
    single: BuildPlan,
    step: Step,
    built: Path,
    cache: BuildCache,
    sources: Digests,
    headers: Digests,
) -> None:
    folder = built.parent.parent / f".{built.parent.name}-{step.output}"
    folder.mkdir()
    os.link(built, folder / step.output)
    cache.publish(folder, manifest_of(single, folder, sources, headers), headers)


def manifest_of(plan: BuildPlan, directory: Path, sources: Digests, headers: Digests) -> Manifest:
    """What every artifact of a plan's build in ``directory`` is filed under."""
    base, library = cache_key.base_key(plan, sources), directory / plan.library
    return Manifest(
        name=plan.name,
        key=cache_key.full_key(base, headers),
        base=base,
        device=plan.device,
        library=plan.library,
        size=library.stat().st_size,
        crc32=file_crc32(library),
        torch_abi=plan.torch_abi,
        files={**sources, **search.present(headers)},
    )


def _compiles(plan: BuildPlan) -> list[Step]:
    return [step for step in plan.steps if step.kind in ("host", "device")]


def _single(plan: BuildPlan, step: Step) -> BuildPlan:
    """The plan of that step alone: the same object in two extensions is one entry."""
    return plan._replace(
        name=NAME,
        steps=(step,),
        library=step.output,
        sources=tuple(source for source in plan.sources if str(source) in step.inputs),
        libraries=(),
        texts=tuple((name, text) for name, text in plan.texts if name in step.inputs),
    )


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "\\ ").replace("#", "\\#")
