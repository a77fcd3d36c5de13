"""Whether an artifact was made from the sources that are here now."""

from __future__ import annotations

import hashlib

from ..describe import layout
from ..describe.spec import OpSpec
from ..plan import cache_key
from ..store.entry import Entry
from ..store.manifest import Rejection


def stale(entry: Entry, spec: OpSpec) -> Rejection | None:
    """Whether the sources have changed since the library was made from them (in a checkout that is
    being worked on).

    A project's installed library was made with the headers and by the rules of another flexops,
    perhaps, which is as good: ``judge`` compares their ABI.
    """
    places = dict(spec.project.roots(layout.csrc_root())) | {"<build>": layout.recipe_root()}
    if not spec.project.own and entry.directory.parent == spec.project.aot:
        places = {f"<{spec.project.name}>": spec.project.csrc}
    if not entry.manifest.kernel and (refusal := _made_of_less(entry, spec)):
        return refusal
    for name, digest in entry.manifest.files.items():
        anchor, separator, rest = name.partition(">")
        if anchor + separator not in places:
            continue  # a header of the compiler that built it, which need not be on this machine
        try:
            current = cache_key.file_digest(f"{places[anchor + separator]}{rest}")
        except OSError:
            current = ""
        if current != digest:
            return Rejection(
                f"{rest.lstrip('/') or name} has changed since it was built", "flexops build"
            )
    return None


def _made_of_less(entry: Entry, spec: OpSpec) -> Rejection | None:
    """Whether a library was not made from all that its family has today: sources, and what the
    declarations say."""
    files, root = entry.manifest.files, spec.project.roots(layout.csrc_root())[0][0]
    for name, text in spec.texts:
        if files.get(name) != hashlib.sha256(text.encode()).hexdigest():
            return Rejection(
                f"the declaration of {spec.name}'s operators has changed since it was built",
                "flexops build",
            )
    sources = spec.cpu_sources if entry.manifest.device == "cpu" else spec.cuda_sources
    new = next(
        (
            source
            for source in (spec.binding, *sources)
            if source and f"{root}/{source}" not in files
        ),
        None,
    )
    return Rejection(f"{new} was missing when it was built", "flexops build") if new else None
