"""Reads what a cubin, an ELF file, says of its kernel. Only what no tool is needed for."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAX_THREADS, _REQUIRED_THREADS = 0x05, 0x10  # EIATTR_...
_SIZED = 0x04  # an attribute with its length


def sections(code: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit ELF file that are in it; raises ``ValueError`` for anything else."""
    if code[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    try:
        start, size, count, names = (
            *struct.unpack_from("<Q", code, 40),
            *struct.unpack_from("<HHH", code, 58),
        )
        headers = [
            struct.unpack_from("<IIQQQQ", code, start + number * size) for number in range(count)
        ]
        texts = headers[names][4]
        return {
            code[texts + one[0] : code.index(b"\0", texts + one[0])].decode(): code[
                one[4] : one[4] + one[5]
            ]
            for one in headers
            if one[1] != 8
        }
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError("a damaged ELF file") from error


def most_threads(code: bytes, symbol: str) -> int:
    """The threads of a block that ``__launch_bounds__`` allows; 0 if there are none."""
    for kind, value in _attributes(sections(code).get(f".nv.info.{symbol}", b"")):
        if kind in (_MAX_THREADS, _REQUIRED_THREADS) and len(value) >= 12:
            x, y, z = struct.unpack_from("<III", value)
            return int(x * y * z)
    return 0


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + 4 <= len(info):
        form, kind, length = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == _SIZED:
            yield kind, info[position : position + length]
            position += length
