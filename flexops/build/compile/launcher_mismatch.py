"""A launcher that is not as its operator's schema says: what the linker or compiler reported, in
words. Only failed builds import this."""

from __future__ import annotations

import re
from pathlib import Path

from .diagnose import Diagnosis, demangled

_UNDEFINED = re.compile(
    r"(?:undefined reference to [`']|undefined symbol: )([\w:]+::)(\w+_(?:cpu|cuda|host))\("
)
_AMBIGUOUS = re.compile(
    r"ambiguating new declaration of '([^']*\b(\w+_(?:cpu|cuda))\([^']*)'|functions that differ"
    r" only in their return type()"
)


def explain(output: str, declarations: str, directory: Path) -> Diagnosis | None:
    """What is wrong with a launcher; None if that is not what failed.

    Args:
        declarations: what the binding expects of launchers: the header that was written for them.
        directory: the build's, with the objects that were compiled.
    """
    if match := _UNDEFINED.search(output):
        name, scope = match[2], _as_written(match[1])
        found = sorted(_defined(name, directory)) or [f"no function {scope}{name} in the sources"]
    elif match := _AMBIGUOUS.search(output):
        name, scope, found = match[2] or "", "", [_as_written(match[1] or "another type of result")]
    else:
        return None
    required = next(
        (
            line.rstrip(";").replace(f" {name}(", f" {scope}{name}(")
            for line in declarations.splitlines()
            if f" {name}(" in line
        ),
        "",
    )
    said = f"{'; '.join(found)}\n    required: {required}" if required else found[0]
    return Diagnosis(
        said,
        f"the launcher {name} is not as the schema says",
        "write it as required (docs/builder.md), or correct the schema",
    )


def _defined(name: str, directory: Path) -> set[str]:
    """The functions of that name that the compiled sources have, whatever they take."""
    pattern = re.compile(rb"_Z\w*?" + name.encode() + rb"\w*")
    objects = [path for path in directory.glob("*.o") if path.name != "binding.o"]
    names = {match.decode() for path in objects for match in pattern.findall(path.read_bytes())}
    return {
        _as_written(text)
        for text in map(demangled, names)
        if re.search(rf"\b{name}\([^()]*\)$", text)
    }


def _as_written(text: str) -> str:
    text = re.sub(r"([\w:]+) const([&*])", r"const \1\2", text)
    text = re.sub(r"::(?:baseline|avx2|avx512)::", "::FLEXOPS_ISA::", text)
    return re.sub(r"\blong\b(?! (?:long|double|int))", "int64_t", text)
