"""A Dockerfile, reduced to what one stage needs.

BuildKit skips stages that the wanted one does not build upon; the classic builder, which is what
the SDK speaks to, builds all that stand before it. Sending it only the needed ones gives the same
image for less time and space.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flexops.errors import ImageError

_FROM = re.compile(r"^FROM\s+(\S+)\s+AS\s+(\S+)\s*$", re.MULTILINE)
_COPY_FROM = re.compile(r"^COPY\s+--from=(\S+)", re.MULTILINE)
_SECRET = re.compile(r"(?<=^RUN )--mount=type=secret,\S+ ", re.MULTILINE)
_ARG = re.compile(r"^ARG\s+(\w+)=(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Stage:
    """One stage: its name, its text, and the stages or images it takes from."""

    name: str
    text: str
    needs: frozenset[str]


def stages(text: str) -> tuple[str, tuple[Stage, ...]]:
    """What stands before the first stage, and the stages."""
    starts = list(_FROM.finditer(text))
    head = text[: starts[0].start()] if starts else text
    defaults = dict(_ARG.findall(head))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    return head, tuple(
        _stage(match, text[match.start() : end], defaults)
        for match, end in zip(starts, ends, strict=True)
    )


def _stage(match: re.Match[str], text: str, defaults: dict[str, str]) -> Stage:
    base = re.sub(r"^\$\{(\w+)\}$", lambda name: defaults.get(name[1], name[0]), match[1])
    return Stage(match[2], text, frozenset({base, *_COPY_FROM.findall(text)}))


def without_secrets(text: str) -> str:
    """The Dockerfile for the classic builder, which rejects ``RUN --mount``."""
    return _SECRET.sub("", text)


def only(text: str, wanted: str) -> str:
    """The Dockerfile with the stage ``wanted``, which is the last then, and what it builds upon;
    raises ``ImageError`` if there is no such stage."""
    head, found = stages(text)
    by_name = {stage.name: stage for stage in found}
    if wanted not in by_name:
        raise ImageError(
            f"there is no stage called {wanted!r}",
            required=", ".join(by_name),
            fix="--stage runtime",
        )
    needed, ahead = set(), [wanted]
    while ahead:
        name = ahead.pop()
        if name in by_name and name not in needed:
            needed.add(name)
            ahead += by_name[name].needs
    return head + "".join(stage.text for stage in found if stage.name in needed)
