"""Whether the files that a build read are those whose contents its key names.

A compiler says only when it is done which headers it has read, and their contents are read for the
key after that. So a file that was replaced in between would have the old code stored under its new
content. What the sources' text includes is known before the compile, and is looked at before and
after it. Of the others the dates decide, of content and of the file's entry in its file system: a
file that keeps its date when it is copied or moved has a new date there. Clocks of servers differ,
and dates may be in the future: what they leave unclear is compiled once more, with all headers
known.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ..describe import cpp_text
from . import search
from .cache_key import ABSENT, FileStamp, file_stamp
from .plan import BuildPlan

Verdict = Literal["same", "unclear", "changed"]

_TICK = 2.0
"""Seconds by which a file's date may be before a clock's: FAT's dates are even."""


class Before:
    """The files of a build as they were before it; made before anything of it is looked up.

    Args:
        plans: what is built.
        headers: further files that an earlier build of them has read.
    """

    def __init__(self, plans: Sequence[BuildPlan], headers: Iterable[str] = ()) -> None:
        self._began = time.time() - _TICK
        paths = {*_included(plans), *headers, *(str(one) for plan in plans for one in plan.sources)}
        self._stamps: Mapping[str, FileStamp] = {path: file_stamp(path) for path in paths}

    def verdict(self, paths: Iterable[str]) -> Verdict:
        """What came of the files meanwhile.

        Returns:
            ``same``: they are as they were; ``changed``: one has another content; ``unclear``: one
            may have been another file for a time.
        """
        verdict: Verdict = "same"
        for path in paths:
            before, after = self._stamps.get(path), file_stamp(path)
            if after.digest == ABSENT or (before and before.digest != after.digest):
                return "changed"
            if before != after if before else self._is_recent(path):
                verdict = "unclear"
        return verdict

    def _is_recent(self, path: str) -> bool:
        seen = os.stat(path)
        return max(seen.st_mtime, seen.st_ctime) >= self._began


def _included(plans: Sequence[BuildPlan]) -> set[str]:
    """The headers that the sources' text includes, less those that the key's identity covers."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for plan in plans:
        trusted = tuple(root.rstrip("/") + "/" for root in plan.trusted_roots)
        for step in plan.steps:
            places = search.directories(step.command)
            own = tuple(path for path in places if not f"{path}/".startswith(trusted))
            known = found.setdefault(own, {})
            for source in step.inputs if step.kind != "link" else ():
                # one that cannot be read has the compiler say so
                with contextlib.suppress(OSError):
                    cpp_text.own_headers(*search.text_of(plan, source), own, known)
    return {path for known in found.values() for path in known}
