"""Where a compile looked for headers: should a file come to be there, or go, the same command would
mean something else.

A dependency file names what was read. It cannot name a header that would have come first on the
include path, or one that ``__has_include`` asked for. So these places are worked out after a build,
from the compiler's own search path and from the names in the user's sources, and kept with the
headers: a later look-up needs a ``stat`` for each, and no compiler.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...toolchain import probe
from . import cache_key
from .plan import BuildPlan, Step

_NAME = r'[ \t]*(?:<([^>\n]+)>|"([^"\n]+)")'
# A name that a macro stands for counts as included: it may be.
_NAMED = re.compile(
    r"^[ \t]*#[ \t]*(?:include|include_next|import|define["
    rf" \t]+\w+){_NAME}|__has_include(?:_next)?[ \t]*\({_NAME}",
    re.MULTILINE,
)
_DIRECTORY_FLAGS = ("-I", "-isystem", "-iquote", "-idirafter", "-isysroot", "--sysroot")
_OTHER_FLAGS = ("-nostdinc", "-stdlib=")
_DISTRIBUTION = ("/usr/include/", "/usr/lib/", "/lib/")


class SearchPath(NamedTuple):
    """Where a compile looks for headers, in its order.

    Attributes:
        quote: first, for names in double quotes (after the directory of the file that includes).
        angle: then, and for names in angle brackets.
        missing: directories that its arguments name and that are missing.
    """

    quote: tuple[str, ...] = ()
    angle: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def header_states(plan: BuildPlan, directory: Path, reached: Iterable[str]) -> cache_key.Digests:
    """The digests of the headers that a build in ``directory`` reached or could have, with
    ``ABSENT`` for those that it looked for in vain."""
    asked = places(plan, directory) if plan.watched else ()
    return {plan.relocatable(path): cache_key.file_state(path) for path in asked} | {
        plan.relocatable(path): cache_key.file_digest(path) for path in reached
    }


def present(headers: cache_key.Digests) -> cache_key.Digests:
    """Those that were there."""
    return {name: digest for name, digest in headers.items() if digest != cache_key.ABSENT}


def places(plan: BuildPlan, directory: Path) -> list[str]:
    """The paths that decide, by being there or not, what a build of the plan in ``directory``
    reads; without those that the key's identity covers."""
    known: dict[tuple[str, ...], SearchPath] = {}
    found: set[str] = set()
    for step in plan.steps:
        if step.kind in ("host", "device"):
            command = (_host(plan, step), *_search_flags(step.command))
            if command not in known:
                known[command] = _ask(command)
            found |= _places_of(plan, step, directory, known[command])
    trusted = tuple(root.rstrip("/") + "/" for root in plan.trusted_roots)
    return sorted(path for path in found if not f"{path}/".startswith(trusted))


def hides(directories: Sequence[str], depfile: str, command: Iterable[str]) -> bool:
    """Whether one of the user's directories, which are searched first, has a header of a name that
    was found elsewhere, or was found there.

    Args:
        depfile: what a header that was compiled before has read, as text.
        command: how it was compiled.
    """
    compiler, *flags = command
    places = [f"{directory}/" for directory in _ask((compiler, *_search_flags(flags))).angle]
    for header in map(os.path.normpath, cache_key.parse_depfile(depfile)):
        place = max((place for place in places if header.startswith(place)), key=len, default="")
        name = header[len(place) :]
        if place and any(
            place == f"{directory}/" or os.path.isfile(os.path.join(directory, name))
            for directory in directories
        ):
            return True
    return False


def read_search_path(text: str) -> SearchPath:
    """From what ``g++ -E -v`` or ``clang++ -E -v`` says."""
    quote: list[str] = []
    angle: list[str] = []
    into: list[str] | None = None
    for line in text.splitlines():
        if line.startswith('#include "..."'):
            into = quote
        elif line.startswith("#include <...>"):
            into = angle
        elif line.startswith("End of search list"):
            into = None
        elif into is not None and line.startswith(" "):
            into.append(os.path.normpath(line.strip()))
    missing = re.findall(r'^ignoring nonexistent directory "(.+)"$', text, re.MULTILINE)
    return SearchPath(tuple(quote), tuple(angle), tuple(map(os.path.normpath, missing)))


def names(text: str) -> set[tuple[str, bool]]:
    """Every header that a text could include or ask for, in whichever branch of a condition: its
    name, and whether it stands in double quotes."""
    return {
        (one[0] or one[1] or one[2] or one[3], bool(one[1] or one[3]))
        for one in _NAMED.findall(text.replace("\\\n", ""))
    }


def _places_of(plan: BuildPlan, step: Step, directory: Path, search: SearchPath) -> set[str]:
    depfile = directory / f"{step.output}.d"
    if not depfile.exists():  # it did not come so far
        return set()
    reached = cache_key.parse_depfile(depfile.read_text(encoding="utf-8", errors="surrogateescape"))
    found = {
        path
        for path in map(_first_missing, search.missing)
        if not f"{path}/".startswith(_DISTRIBUTION)
    }
    for source in (*step.inputs, *cache_key.reached_headers(plan, [depfile])):
        text, folder = text_of(plan, source)
        for name, quoted in names(text):
            found |= _up_to(name, (*((folder, *search.quote) if quoted else ()), *search.angle))
    return found | _shadowing(reached, search)


def _up_to(name: str, directories: Iterable[str]) -> set[str]:
    """The file that a name means, and the missing files that would be found before it."""
    passed: list[str] = []
    for directory in directories:
        path = os.path.join(directory, name)
        if directory and os.path.isfile(path):
            # No project puts another <vector> into the compiler's directories, before the one that
            # is there.
            return {path, *(one for one in passed if not one.startswith(_DISTRIBUTION))}
        if directory:
            passed.append(_first_missing(path))
    return set(passed)


def _shadowing(reached: Iterable[str], search: SearchPath) -> set[str]:
    """What would be found before the headers that were reached by others' headers: torch's
    <c10/...>, the compiler's <vector>."""
    places = [f"{directory}/" for directory in search.angle]
    own = [number for number, place in enumerate(places) if not place.startswith(_DISTRIBUTION)]
    parts = {part for header in map(os.path.normpath, reached) if (part := _under(header, places))}
    return {
        _first_missing(os.path.join(search.angle[earlier], name))
        for number, name in parts
        for earlier in own
        if earlier < number
    }


def _under(header: str, places: list[str]) -> tuple[int, str] | None:
    """Which directory of the path a header was found in, and by which name; of a longer name the
    first part, unless a directory before has that, too."""
    number = max(
        (number for number, place in enumerate(places) if header.startswith(place)),
        key=lambda number: len(places[number]),
        default=None,
    )
    if number is None:
        return None
    name = header[len(places[number]) :]
    first = name.partition("/")[0]
    return number, (
        name if any(os.path.exists(place + first) for place in places[:number]) else first
    )


def _first_missing(path: str) -> str:
    """The uppermost missing part of a path: many names in one directory that does not
    exist are one thing to look for."""
    parent = os.path.dirname(path)
    return path if parent == path or os.path.isdir(parent) else _first_missing(parent)


def directories(flags: Iterable[str]) -> list[str]:
    """Those that a command's flags have searched for headers."""
    words = list(_search_flags(flags))
    found = [
        word.removeprefix("-isystem")
        .removeprefix("-iquote")
        .removeprefix("-idirafter")
        .removeprefix("-I")
        for word in words
    ]
    return [word for word in found if word and not word.startswith("-")]


def _search_flags(command: Iterable[str]) -> Iterator[str]:
    words = iter(command)
    for word in words:
        if word in _DIRECTORY_FLAGS:
            yield word
            yield next(words, "").strip('"')
        elif word.startswith((*_DIRECTORY_FLAGS, *_OTHER_FLAGS)):
            yield word.replace('"', "")  # nvcc is given a directory with a comma in double quotes


def _host(plan: BuildPlan, step: Step) -> str:
    """The C++ compiler whose search path counts: nvcc calls it, too."""
    return next((path for path, name in plan.anchors if name == "<c++>"), step.command[0])


def _ask(command: tuple[str, ...]) -> SearchPath:
    try:
        return read_search_path(probe.output(*command, "-E", "-v", "-x", "c++", "/dev/null"))
    except (
        OSError,
        ValueError,
    ):  # a compiler that does not report them: those that its arguments name are known
        given = [word.removeprefix("-isystem").removeprefix("-I") for word in command[1:]]
        return SearchPath((), tuple(path for path in given if os.path.isabs(path)))


def text_of(plan: BuildPlan, source: str) -> tuple[str, str]:
    """What a compile reads, and the directory it is in: none for a text of the plan's, as nothing
    else comes to be in the build's own. Both are empty for what is yet to be made in that,
    translated to HIP."""
    text = dict(plan.texts).get(source)
    if text is not None:
        return text, ""
    return (probe.read_text(source), os.path.dirname(source)) if os.path.isabs(source) else ("", "")
