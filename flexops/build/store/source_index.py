"""Finds a family's library in the remote cache by what it is made from: for machines that have no
compiler, or would rather not look for theirs.

The document ``<library>/<digest>.entry.json`` says which entry was made from these sources for this
torch and this system. It only leads there: the entry is verified and judged as any other that
another user's compiler made.
"""

from __future__ import annotations

import hashlib
import os
import platform
from typing import TYPE_CHECKING

from ..describe import cpp_text, layout
from ..plan import cache_key
from ..plan.kernel_plan import name_under
from .manifest import is_plain

if TYPE_CHECKING:
    from ...toolchain.model import TorchBuild
    from ..describe.spec import DeviceType, OpSpec
    from .cache import BuildCache, Entry

_KIND = "entry"


def digest(spec: OpSpec, device: DeviceType, torch: TorchBuild) -> str:
    """What decides whether a library made elsewhere would serve here: sources, torch's ABI, machine
    and C library."""
    roots = spec.project.roots(layout.csrc_root())
    sources = (
        *((spec.binding,) if spec.binding else ()),
        *(spec.cpu_sources if device == "cpu" else spec.cuda_sources),
    )
    folders = [str(root) for _, root in roots]
    files: dict[str, str] = {}
    for name, text in spec.texts:
        files[name] = hashlib.sha256(text.encode()).hexdigest()
        files |= {
            name_under(header, roots): cache_key.file_digest(header)
            for header in cpp_text.own_headers(text, "", folders)
        }
    for source in sources:
        path = os.path.join(roots[0][1], source)
        with open(path, encoding="utf-8") as stream:
            reached = cpp_text.own_headers(stream.read(), os.path.dirname(path), folders)
        files |= {name_under(name, roots): cache_key.file_digest(name) for name in (path, *reached)}
    system = f"{platform.machine()} {' '.join(platform.libc_ver())}"
    return cache_key.digest_fields(
        [
            ("library", f"{spec.name}-{device}"),
            ("torch", torch.abi_id),
            ("system", system),
            *sorted(files.items()),
        ]
    )


def fetch(spec: OpSpec, device: DeviceType, torch: TorchBuild, cache: BuildCache) -> Entry | None:
    """The library, which is then in the local cache; None if there is none."""
    if cache.remote is None or torch.hip:  # for AMD GPUs it also depends on the architectures
        return None
    name = f"{spec.name}-{device}"
    found = cache.remote.hint(cache, name, digest(spec, device, torch), _KIND)
    key = found[0].get("key") if found else None
    return cache.fetch_key(name, key) if isinstance(key, str) and is_plain(key) else None


def publish(
    spec: OpSpec, device: DeviceType, torch: TorchBuild, cache: BuildCache, entry: Entry
) -> None:
    """Let others find an entry that is in the remote cache."""
    if cache.remote and not torch.hip:
        cache.remote.leave(
            cache,
            entry.manifest.name,
            digest(spec, device, torch),
            _KIND,
            {"key": entry.manifest.key},
            replace="",
        )
