"""Makes what a run has recorded, and nothing else: into the cache, an archive, or the remote cache,
before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from ... import toolchain
from ...errors import CacheError, FlexopsError
from ...settings import Settings
from ..compile import building, device_code
from ..compile.ninja import Progress
from ..describe import catalog, layout
from ..describe.spec import DeviceType
from ..load import loader, provider
from ..load.record import Record
from ..plan import kernel_names, kernel_plan
from ..store import cache_archive, choices, remote
from ..store.cache import Entry
from ..store.manifest import is_plain
from . import aot


class Made(NamedTuple):
    """One thing that a record names. ``cached``: it was there, here or elsewhere. One of ``entry``
    and ``error`` is None."""

    name: str
    entry: Entry | None
    error: FlexopsError | None
    cached: bool


def make(
    wanted: Record,
    chosen: Settings,
    *,
    arch_list: str | None = None,
    progress: Progress | None = None,
) -> list[Made]:
    """Have everything that a record names in the local cache.

    Args:
        arch_list: architectures to make kernels for; by default those of the GPUs on which they
            were launched.

    Raises:
        FlexopsError: a family that is not known, a compiler that is missing. What cannot be
            compiled is in the results.
    """
    return [
        *_libraries(wanted, chosen, progress),
        *_kernels(wanted, chosen, arch_list, progress),
        *_extensions(wanted, chosen),
        *_choices(wanted, chosen),
    ]


def make_families(
    families: Sequence[str],
    chosen: Settings,
    *,
    arch_list: str | None = None,
    progress: Progress | None = None,
) -> list[Made]:
    """Have the libraries of these families in the local cache, and all kernels that are compiled
    ahead of time: those of a run, and more.

    Raises:
        FlexopsError: as :func:`make`.
    """
    cache, found = loader.open_cache(chosen), []
    for result in aot.build(tuple(families), chosen, arch_list=arch_list, progress=progress):
        device = result.plan.device
        loader.share(
            catalog.find(result.plan.name.removesuffix(f"-{device}")), device, cache, result.entry
        )
        found.append(
            Made(
                result.plan.name,
                result.entry,
                None if result.entry else result.error,
                result.cached,
            )
        )
        found += [
            Made(
                f"{one.plan.expression} for {one.plan.architecture}",
                one.entry,
                one.error,
                one.cached,
            )
            for one in result.kernels
        ]
    return found


def _libraries(wanted: Record, chosen: Settings, progress: Progress | None) -> list[Made]:
    cache = loader.open_cache(chosen)
    pairs = [
        (catalog.find(family), cast("DeviceType", device)) for family, device in wanted.libraries
    ]
    results = building.obtain(
        [loader.local_plan(spec, device, chosen) for spec, device in pairs],
        cache,
        progress=progress,
        debug=chosen.log == "debug",
    )
    for (spec, device), result in zip(pairs, results, strict=True):
        loader.share(spec, device, cache, result.entry)
    return [Made(result.plan.name, result.entry, result.error, result.cached) for result in results]


def _kernels(
    wanted: Record, chosen: Settings, arch_list: str | None, progress: Progress | None
) -> list[Made]:
    if not wanted.kernels and not wanted.texts:
        return []
    choice = provider.compiler_for(chosen, (), asked=arch_list or ";".join(wanted.capabilities))
    csrc = layout.csrc_root()
    kernels: list[provider.AnyKernel] = [
        provider.FamilyKernel(catalog.find(family), expression)
        for family, expression in wanted.kernels
    ]
    for one in wanted.texts:
        kernels.append(
            kernel_plan.TextKernel(
                one["family"],
                one["text"],
                one["kernel"],
                csrc,
                tuple(one["include"]),
                tuple(one["options"]),
            )
        )
    plans = {}
    for architecture in kernel_names.single(choice.architectures):
        for kernel in kernels:
            if kernel_names.fitted(kernel.expression, architecture):
                plan = kernel.plan(architecture, choice.compiler)
                plans[plan.name, plan.key] = plan
    jobs = device_code.choose_jobs(toolchain.resources.detect(), chosen.max_jobs)
    cache = loader.open_cache(chosen)
    results = device_code.obtain(
        list(plans.values()), cache, jobs=jobs, time_limit=chosen.compile_timeout, progress=progress
    )
    return [
        Made(
            f"{result.plan.expression} for {result.plan.architecture}",
            result.entry,
            result.error,
            result.cached,
        )
        for result in results
    ]


def _extensions(wanted: Record, chosen: Settings) -> list[Made]:
    """Only ``flexops.load`` knows what those are made from: they are taken from the caches."""
    cache, found = loader.open_cache(chosen), []
    for name, key in wanted.extensions:
        entry = (
            (cache.read(name, key) or cache.fetch_key(name, key))
            if is_plain(name) and is_plain(key)
            else None
        )
        missing = CacheError(
            f"extension {name} is not in the cache",
            required=key,
            fix="run what loads it once, here",
        )
        found.append(Made(name, entry, None if entry else missing, True))
    return found


def _choices(wanted: Record, chosen: Settings) -> list[Made]:
    """Those that were measured elsewhere."""
    cache, found = loader.open_cache(chosen), []
    for name, key, text in wanted.choices:
        entry = choices.write(cache, name, key, text) if is_plain(name) and is_plain(key) else None
        missing = CacheError(f"the choice {name} cannot be stored", fix="flexops cache info")
        found.append(Made(name, entry, None if entry else missing, False))
    return found


def archive(made: Sequence[Made], chosen: Settings, file: Path) -> int:
    """Write what was made to an archive for `flexops cache import`; returns of how many entries.
    Raises ``CacheError``."""
    return len(
        cache_archive.export(
            loader.open_cache(chosen), file, [one.entry for one in made if one.entry]
        )
    )


def publish(made: Sequence[Made], chosen: Settings) -> int:
    """Put what was made, or was here already, into the remote cache; returns how many entries are
    there now.

    Raises:
        CacheError: none is named, or it cannot be written to.
    """
    store, cache = remote.required(chosen), loader.open_cache(chosen)
    entries = [one.entry for one in made if one.entry]
    for number, entry in enumerate(entries):
        if not store.publish(cache, entry):
            found = (
                f"{number} of {len(entries)} entries are there; {store.problem or store.unwritten}"
            )
            fix = "export FLEXOPS_CACHE_REMOTE_WRITE=1"
            raise CacheError(
                f"the remote cache {store.name} cannot be written", found=found, fix=fix
            )
    return len(entries)
