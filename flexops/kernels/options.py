"""The options of a kernel: of one, of each of several steps, of each candidate."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FlexopsError
from .schema import KernelSchema
from .signature import the_kernel

_MAPPINGS = ("args", "template", "shapes", "workspace", "constants", "defines")
_FUNCTIONS = ("check", "reference", "backward", "setup_context", "jvp", "key")
_MOST_OF_A_CLUSTER = 16
_OF_A_STEP = ("name", "grid", "block", "shared", "cluster", "cooperative", "args", "template")
OF_A_CANDIDATE = (*_OF_A_STEP, "defines", "steps")


class KernelOptions(NamedTuple):
    """What ``flexops.kernel`` was given besides source and schema."""

    grid: Any = None
    block: Any = 256
    shared: Any = 0
    cluster: Any = None
    args: Mapping[str, Any] = {}
    template: Mapping[str, Any] = {}
    out: Any = None
    strided: bool = False
    check: Any = None
    shapes: Mapping[str, str] = {}
    cooperative: bool = False
    name: str | None = None
    defines: Mapping[str, object] = {}
    constants: str = ""
    steps: Sequence[Mapping[str, Any]] = ()
    workspace: Mapping[str, Any] = {}
    candidates: Sequence[Mapping[str, Any]] = ()
    key: Any = None
    candidate: int | None = None


def check_kinds(schema: KernelSchema, given: Mapping[str, Any]) -> None:
    """Raise for an option that is of another kind than it must be, by its name."""
    for name, value in given.items():
        a_list = isinstance(value, (list, tuple))
        if name in _MAPPINGS and not isinstance(value, Mapping):
            required = "a mapping of names"
        elif name == "defines" and not all(map(_is_macro, value)):
            required = "a mapping of macros' names"
        elif name in ("steps", "candidates") and not a_list:
            required = "a list of mappings"
        elif name in ("include", "options") and not a_list:
            required = f"a list: [{value!r}]" if isinstance(value, (str, Path)) else "a list"
        elif name in ("include", "options") and not all(isinstance(v, (str, Path)) for v in value):
            required = "a list of paths" if name == "include" else "a list of text"
        elif name == "cooperative" and not isinstance(value, bool):
            required = "True or False"
        elif name in _FUNCTIONS and value is not None and not callable(value):
            required = "a function"
        elif name == "candidate" and value is not None and type(value) is not int:
            required = "a number"
        elif name == "shared" and type(value) is not int and not callable(value):
            required = "a number of bytes, or a function that returns one"
        elif name == "cluster" and value is not None and not _is_cluster(value):
            required = f"one to three numbers, whose product is at most {_MOST_OF_A_CLUSTER}"
        else:
            continue
        raise unfit_options(schema, f"{name} is {value!r}", required)
    for path in given.get("include", ()):
        if not Path(path).is_dir():
            raise unfit_options(schema, f"include names {path}", "directories that exist")


def _is_macro(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*(\(.*\))?", name) is not None


def _is_cluster(given: Any) -> bool:
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    whole = all(type(size) is int and size > 0 for size in sizes)
    return whole and 1 <= len(sizes) <= 3 and math.prod(sizes) <= _MOST_OF_A_CLUSTER


def steps_of(source: str, schema: KernelSchema, options: KernelOptions) -> Iterator[KernelOptions]:
    """The options of each step: its own, and those of the operator's that are for its kernel."""
    used: set[str] = set()
    for given in options.steps:
        step = varied(schema, options, given, _OF_A_STEP)
        if not step.name:
            raise unfit_options(
                schema, f"a step with {', '.join(given) or 'nothing'}", "its kernel's name"
            )
        signature = the_kernel(source, step.name or "", schema.text)
        own = {one.name for one in signature.parameters} | {one.name for one in signature.template}
        used |= own
        args, template = (
            {name: value for name, value in merged.items() if name in own or name not in everywhere}
            for merged, everywhere in (
                (step.args, options.args),
                (step.template, options.template),
            )
        )
        yield step._replace(
            args=args, template=template, out=None, check=None, shapes={}, steps=(), workspace={}
        )
    if lost := sorted({*options.args, *options.template} - used):
        raise unfit_options(
            schema, f"{', '.join(lost)}, which no step has", "parameters of a step's kernel"
        )


def varied(
    schema: KernelSchema, options: KernelOptions, changes: Mapping[str, Any], allowed: Sequence[str]
) -> KernelOptions:
    if not isinstance(changes, Mapping) or (odd := sorted(set(changes) - set(allowed))):
        found = ", ".join(odd) if isinstance(changes, Mapping) else repr(changes)
        raise unfit_options(
            schema, f"a step or candidate with {found}", f"a mapping of {', '.join(allowed)}"
        )
    check_kinds(schema, changes)
    merged = ("args", "template", "defines")
    given: dict[str, Any] = {
        name: {**getattr(options, name), **value} if name in merged else value
        for name, value in changes.items()
    }
    return options._replace(**given)


def unfit_options(schema: KernelSchema, found: str, required: str) -> FlexopsError:
    what = f"flexops.kernel: {schema.text} has options that do not fit together"
    return FlexopsError(what, found=found, required=required, fix="see docs/kernels.md")
