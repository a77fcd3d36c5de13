"""The record beside a library: nothing damaged is believed, and nothing is opened that would not
run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from builds import OLD_TORCH, TORCH
from processes import completed

from flexops.build.store import manifest as module
from flexops.build.store.manifest import Manifest, judge, needed_versions, verify

MANIFEST = Manifest(
    name="adam-cuda",
    key="k" * 40,
    base="b" * 40,
    device="cuda",
    library="lib.so",
    size=3,
    crc32="0" * 8,
    torch_abi="stable-2.11",
    cuda_version="13.0",
    architectures=("8.0", "9.0"),
    glibc="2.14",
    glibcxx="3.4.21",
    files={"<csrc>/a.cu": "1"},
)


def _fields(text: str) -> Manifest:
    return Manifest.from_json(text)._replace(own_crc32="")


def test_round_trip():
    assert _fields(MANIFEST.to_json()) == MANIFEST


def test_unknown_fields_of_a_later_version_are_left_out():
    assert _fields(json.dumps({**json.loads(MANIFEST.to_json()), "colour": "blue"})) == MANIFEST


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "flexops-0"},
        {"schema": None},
        {"size": "3"},
        {"crc32": None},
        {"library": "../../lib.so"},
        {"name": "../elsewhere"},
        {"key": ""},
        {"key": ".."},
        {"architectures": "9.0"},
        {"architectures": [9]},
        {"architectures": None},
        {"cuda_version": 13},
        {"cuda_version": "thirteen"},
        {"glibcxx": "3..4"},
        {"files": ["a"]},
        {"files": {"a": 1}},
        {"torch_abi": 1},
    ],
)
def test_a_damaged_field_is_rejected(changes):
    with pytest.raises(ValueError, match="manifest"):
        Manifest.from_json(json.dumps({**json.loads(MANIFEST.to_json()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 10**400},
        {"size": True},
        {"size": 3.5},
        {"size": -1},
        {"cuda_version": "9" * 400 + ".0"},
        {"cuda_version": "1²"},
        {"glibc": "2.١"},
        {"architectures": ["y.0"]},
        {"architectures": ["9.0", "8.\x000"]},
        {"architectures": ["native"]},
        {"architectures": ["gfx-1"]},
        {"library": "li\x00b.so"},
        {"library": "lib\n.so"},
        {"name": "n" * 300},
        {"key": "\ud800"},
        {"files": {"<csrc>/a\x00.cu": "1"}},
        {"files": {"\ud800": "1"}},
    ],
)
def test_a_value_that_no_build_writes_is_rejected(changes):
    with pytest.raises(ValueError, match=r"manifest field|JSON"):
        Manifest.from_json(json.dumps({**json.loads(MANIFEST.to_json()), **changes}))


def test_amd_architectures_are_architectures():
    mine = MANIFEST._replace(architectures=("gfx90a", "gfx942"))
    assert _fields(mine.to_json()) == mine


def test_every_flipped_bit_is_noticed():
    """Whatever a flip makes of a manifest, one architecture of another included, it is not believed
    to be what was written."""
    good = MANIFEST._replace(files={"<csrc>/a.cu": "1" * 8}).to_json().encode()
    for position in range(len(good)):
        for bit in range(8):
            flipped = bytearray(good)
            flipped[position] ^= 1 << bit
            try:
                told = Manifest.from_json(flipped.decode())
            except ValueError:
                continue
            assert told.is_damaged() or told._replace(own_crc32="") == _fields(good.decode()), (
                flipped
            )


@pytest.mark.parametrize("text",
    ["", "{", "[]", "null", '"text"', MANIFEST.to_json()[:200], "\x00" * 20, "[" * 100_000,
     '{"a":' * 100_000, "9" * 5000])  # fmt: skip
def test_a_damaged_file_is_rejected(text):
    with pytest.raises(ValueError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "name", ["name", "key", "base", "device", "library", "size", "crc32", "torch_abi"]
)
def test_a_missing_field_is_named(name):
    data = json.loads(MANIFEST.to_json())
    del data[name]
    with pytest.raises(ValueError, match=name):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("changes", "torch", "said"),
    [
        ({}, TORCH, ""),
        ({}, TORCH._replace(cuda=None), ""),
        ({"torch_abi": "torch-2.4-cxx11abi0-cu12.1"}, TORCH, "torch ABI torch-2.4"),
        ({}, OLD_TORCH, "stable-2.11"),
        ({"glibc": "2.99"}, TORCH, "glibc 2.99"),
    ],
)
def test_judgement(changes, torch, said):
    refusal = judge(MANIFEST._replace(**changes), torch)
    assert (
        (refusal.reason if refusal else "") == ""
        if not said
        else said in (refusal.reason if refusal else "")
    )
    assert refusal is None or refusal.fix


def test_symbol_versions_of_this_process(monkeypatch, tmp_path):
    library = tmp_path / "libstdc++.so.6"
    library.write_bytes(b"\x7fELF..GLIBCXX_3.4.21\0GLIBCXX_3.4.30\0")
    monkeypatch.setattr(module, "_libstdcxx", lambda: str(library))
    assert judge(MANIFEST, TORCH) is None
    refusal = judge(MANIFEST._replace(glibcxx="3.4.32"), TORCH)
    assert refusal is not None
    assert "GLIBCXX_3.4.32" in refusal.reason
    assert str(library) in refusal.reason


def test_this_process_knows_its_own_libraries():
    code = (
        "import ctypes, ctypes.util; ctypes.CDLL('libstdc++.so.6'); from flexops.build.store import"
        " manifest as m; print(m._glibc(), m._libstdcxx())"
    )
    said = completed(
        [sys.executable, "-c", "import sys; sys.modules['torch'] = None; " + code]
    ).stdout.split()
    assert said[0].startswith("2.")
    assert "libstdc++" in said[1]


def test_verify(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"abc")
    good = MANIFEST._replace(crc32="352441c2")
    assert verify(tmp_path, good) is None
    library.write_bytes(b"abd")
    swapped = verify(tmp_path, good)
    library.write_bytes(b"ab")
    truncated = verify(tmp_path, good)
    library.unlink()
    gone = verify(tmp_path, good)
    assert all(
        refusal and "lib.so" in refusal.reason and refusal.fix
        for refusal in (swapped, truncated, gone)
    )


def test_needed_versions_of_a_real_library():
    ninja = shutil.which("python3")
    assert ninja
    glibc, _ = needed_versions(Path(ninja).resolve())
    assert glibc == "" or glibc.startswith("2.")
    assert needed_versions(Path(__file__)) == ("", "")
