"""What a run needs compiled, written down as it loads and launches it (``FLEXOPS_RECORD=FILE``);
``warm`` makes exactly that elsewhere.

A line of JSON for each thing, once for each process: several may write to one file, because a line
is one write to its end.

    {"library": "rope", "device": "cpu"}
    {"kernel": "flexops::rope::rotate<float>", "family": "rope", "capability": "9.0"}
    {"kernel": "scale<float>", "family": "kernel", "text": "...", "include": [], "options": [],
     "capability": "9.0"}                          a user's source
    {"choice": "softmax-choice-...", "key": "...", "text": "..."}    among candidates of a kernel
    {"extension": "my_kernels", "key": "..."}      of ``flexops.load``
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _json, settings
from ...errors import FlexopsError

if TYPE_CHECKING:
    from ...compute_capability import ComputeCapability
    from ..store.manifest import Manifest
    from .provider import AnyKernel

_written: set[str] = set()


class Record(NamedTuple):
    """What was written down, each once, sorted.

    Attributes:
        libraries: (family, device).
        kernels: (family, expression).
        texts: the lines of kernels in a user's text.
        extensions: (name, key) of ``flexops.load``.
        choices: (name, key, text) among candidates of kernels.
        capabilities: of the GPUs on which kernels were launched.
    """

    libraries: tuple[tuple[str, str], ...]
    kernels: tuple[tuple[str, str], ...]
    texts: tuple[dict[str, Any], ...]
    extensions: tuple[tuple[str, str], ...]
    choices: tuple[tuple[str, str, str], ...]
    capabilities: tuple[str, ...]


def library(family: str, device: str) -> None:
    """A family's library was opened."""
    _write({"library": family, "device": device})


def kernel(launched: AnyKernel, capability: ComputeCapability) -> None:
    """A kernel was made ready for a GPU."""
    from ..plan.kernel_plan import TextKernel

    if settings.current().record is None:
        return
    fact: dict[str, Any] = {
        "kernel": launched.expression,
        "family": launched.spec.name,
        "capability": str(capability),
    }
    if isinstance(launched, TextKernel):
        fact |= {
            "text": launched.text,
            "include": list(launched.include),
            "options": list(launched.options),
        }
    _write(fact)


def extension(made: Manifest) -> None:
    """A user's extension was loaded."""
    _write({"extension": made.name, "key": made.key})


def choice(name: str, key: str, text: str) -> None:
    """A candidate was chosen, now or before."""
    _write({"choice": name, "key": key, "text": text})


def _write(fact: dict[str, Any]) -> None:
    path = settings.current().record
    line = json.dumps(fact)
    if path is None or line in _written:
        return
    _written.add(line)
    with contextlib.suppress(OSError):  # it is not what the run is for
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)


def read(paths: Iterable[Path]) -> Record:
    """What runs have written down, of all these files together.

    Raises:
        FlexopsError: one cannot be read, or has a line that is none of these.
    """
    libraries: set[tuple[str, str]] = set()
    kernels: set[tuple[str, str]] = set()
    texts: dict[str, dict[str, Any]] = {}
    extensions: set[tuple[str, str]] = set()
    choices: set[tuple[str, str, str]] = set()
    capabilities: set[str] = set()
    for place, line in _lines(paths):
        try:
            fact = _json.parse(line)
            if "library" in fact:
                libraries.add((str(fact["library"]), str(fact["device"])))
            elif "extension" in fact:
                extensions.add((str(fact["extension"]), str(fact["key"])))
            elif "choice" in fact:
                choices.add((str(fact["choice"]), str(fact["key"]), str(fact["text"])))
            else:
                capabilities.add(str(fact["capability"]))
                if "text" in fact:
                    texts[json.dumps({**fact, "capability": ""}, sort_keys=True)] = fact
                else:
                    kernels.add((str(fact["family"]), str(fact["kernel"])))
        except (ValueError, KeyError, TypeError) as error:
            required = "lines that FLEXOPS_RECORD wrote"
            raise FlexopsError(
                "this is not a record of a run",
                found=place,
                required=required,
                fix="record it again",
            ) from error
    own = tuple(texts[key] for key in sorted(texts))
    return Record(
        tuple(sorted(libraries)),
        tuple(sorted(kernels)),
        own,
        tuple(sorted(extensions)),
        tuple(sorted(choices)),
        tuple(sorted(capabilities)),
    )


def _lines(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Each line, with its place in words."""
    for path in paths:
        try:
            lines = _json.read(path).splitlines()
        except OSError as error:
            raise FlexopsError(
                "the record cannot be read",
                found=f"{path}: {error.strerror}",
                fix="FLEXOPS_RECORD=FILE <what is to start warm>",
            ) from error
        yield from ((f"{path}:{number}", line) for number, line in enumerate(lines, 1))
