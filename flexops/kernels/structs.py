"""Structs that a kernel takes by value: their layout, read from the source, and their bytes."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..build.describe.cpp_text import blanked, closing, parts
from ..build.describe.schema import RESERVED
from ..errors import FlexopsError
from .signature import CPP_TYPES, SCALARS

TENSOR_MAP = "CUtensorMap"
TENSOR_MAP_TEXT = f"struct alignas(64) {TENSOR_MAP} {{ unsigned long long opaque[16]; }};\n"
"""The driver's struct for device code, which has no header of the driver's."""


_MOST_CONSTANT = 65536
_KINDS = sorted(SCALARS, key=len, reverse=True)


class Field(NamedTuple):
    """A member: ``letter`` is of Python's ``struct``, ``length`` that of an array or 0."""

    name: str
    letter: str
    length: int
    offset: int


class StructType(NamedTuple):
    """A struct of a source, as C++ lays it out."""

    name: str
    size: int
    alignment: int
    fields: tuple[Field, ...]

    @property
    def letter(self) -> str:
        """As ``launch.layout`` takes it."""
        return f"{self.size}s@{self.alignment}"

    def pack(self, value: Any) -> bytes:
        """The bytes of a value: those themselves, an object of ``ctypes``, a mapping, a sequence in
        the members' order, or an object with attributes of their names.

        Raises:
            TypeError, ValueError: it does not fit; the member is named.
        """
        if isinstance(value, (bytes, bytearray, ctypes.Structure)):
            content = bytes(value)
            if len(content) != self.size:
                raise ValueError(f"{self.name} has {self.size} bytes, got {len(content)}")
            return content
        memory = bytearray(self.size)
        for field, given in zip(self.fields, self._members(value), strict=True):
            array = given if field.length else (given,)
            if not hasattr(array, "__len__"):
                found = f"got {given!r}"
                raise TypeError(f"{self.name}::{field.name} has {field.length} elements, {found}")
            if field.length and len(array) != field.length:
                found = f"got {len(array)}"
                raise ValueError(f"{self.name}::{field.name} has {field.length} elements, {found}")
            try:
                letters = f"={len(array)}{field.letter}"
                struct.pack_into(letters, memory, field.offset, *array)
            except struct.error as error:
                text = f"{self.name}::{field.name} cannot be {given!r}: {error}"
                raise ValueError(text) from None
        return bytes(memory)

    def _members(self, value: Any) -> Sequence[Any]:
        names = [field.name for field in self.fields]
        if isinstance(value, Mapping):
            if set(value) != set(names):
                found = ", ".join(map(str, value)) or "nothing"
                raise TypeError(f"{self.name} has {', '.join(names)}, got {found}")
            return [value[name] for name in names]
        if isinstance(value, Sequence) and not hasattr(value, "_fields"):
            if len(value) != len(names):
                raise TypeError(f"{self.name} has {', '.join(names)}, got {len(value)} values")
            return value
        if missing := [name for name in names if not hasattr(value, name)]:
            found = f"{value!r} has no {missing[0]}"
            raise TypeError(f"{self.name} has {', '.join(names)}: {found}")
        return [getattr(value, name) for name in names]


def structs(source: str) -> dict[str, StructType]:
    """The structs of a source that have numbers, arrays of numbers and pointers only; and
    ``CUtensorMap``."""
    text = blanked(source)
    found = {TENSOR_MAP: StructType(TENSOR_MAP, 128, 64, ())}
    pattern = r"\bstruct\s+(?:(?:alignas|__align__)\s*\(\s*(\d+)\s*\)\s*)?(\w+)\s*\{"
    for match in re.finditer(pattern, text):
        body = text[match.end() : closing(text, match.end() - 1)]
        if made := _laid_out(match[2], body, int(match[1] or 1)):
            found[match[2]] = made
    return found


def _laid_out(name: str, body: str, alignment: int) -> StructType | None:
    fields: list[Field] = []
    offset = 0
    for declaration in filter(None, map(str.strip, body.split(";"))):
        plain = re.sub(r"\bconst\b|\bstd::|\s+(?=\s)", "", declaration).strip()
        before, pointer, names = plain.rpartition("*")
        kind = "" if pointer else next((one for one in _KINDS if plain.startswith(f"{one} ")), "")
        letter = "Q" if pointer else SCALARS.get(kind, "")
        for one in parts(names.removeprefix(kind)):
            named = re.fullmatch(r"\s*(\w+)\s*(?:\[\s*(\d+)\s*\])?\s*", one)
            if not letter or named is None or "*" in before:
                return None
            size = struct.calcsize("=" + letter)
            offset += -offset % size
            fields.append(Field(named[1], letter, int(named[2] or 0), offset))
            offset += size * int(named[2] or 1)
            alignment = max(alignment, size)
    if not fields:
        return None
    return StructType(name, offset + -offset % alignment, alignment, tuple(fields))


def constant_arrays(given: Mapping[str, Any]) -> str:
    """The C++ of arrays in constant memory.

    Raises:
        FlexopsError: an array that constant memory cannot hold.
    """
    text, size = "", 0
    for name, value in given.items():
        try:
            array = torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise _no_constant(name, str(error).splitlines()[0]) from None
        if array.dtype is torch.int64 and not isinstance(value, torch.Tensor):
            array = array.to(torch.int32) if array.numel() and array.abs().max() < 2**31 else array
        kind = CPP_TYPES.get(str(array.dtype).removeprefix("torch."), "")
        size += array.numel() * array.element_size()
        if ("float" in kind and kind not in SCALARS) or not kind or not array.numel():
            raise _no_constant(name, f"{array.dtype} {list(array.shape)}")
        if not array.isfinite().all() or not array.dim() or not _is_name(name):
            raise _no_constant(name, str(value))
        lengths = "".join(f"[{length}]" for length in array.shape)
        text += f"__constant__ {kind} {name}{lengths} = {_braced(array.tolist(), kind)};\n"
    if size > _MOST_CONSTANT:
        raise _no_constant(", ".join(given), f"{size} bytes")
    return text


def _is_name(text: str) -> bool:
    return text.isidentifier() and text.isascii() and text not in RESERVED


def _braced(values: Any, kind: str) -> str:
    if isinstance(values, list):
        return f"{{{', '.join(_braced(one, kind) for one in values)}}}"
    return f"{values!r}f" if kind == "float" else str(values).lower()


def _no_constant(name: str, found: str) -> FlexopsError:
    return FlexopsError(
        f"flexops.kernel: constants cannot hold {name}",
        found=found,
        required=f"finite float32, float64, integers or bools, at most {_MOST_CONSTANT} bytes",
        fix="a tensor argument for other arrays",
    )
