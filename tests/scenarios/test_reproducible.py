"""The same sources make the same library, wherever they lie: two checkouts, two caches."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from builds import REPOSITORY, child_environment, copy_csrc, run_child
from marks import first_of


@pytest.mark.parametrize("device", first_of("cpu", "cuda"))
@pytest.mark.usefixtures("host_compiler", "nvcc_toolkit")
def test_libraries_do_not_depend_on_where_they_are_built(tmp_path, device):
    built, kernels = [], []
    for folder in (tmp_path / "here", tmp_path / "in another and longer place"):
        environment = child_environment(
            FLEXOPS_CACHE_DIR=str(folder / "cache"), FLEXOPS_COMPILER_LAUNCHER="none"
        )
        result = run_child(
            "obtain.py",
            {"csrc": str(copy_csrc(folder)), "device": device, "arch": "8.0"},
            environment,
        )
        assert "error" not in result, result
        built.append(Path(result["library"]))
        kernels.append(result["kernels"])
    here, there = (path.read_bytes() for path in built)
    assert str(tmp_path).encode() not in here
    assert hashlib.sha256(here).hexdigest() == hashlib.sha256(there).hexdigest()
    assert built[0].parent.name == built[1].parent.name, "one key"
    assert [[Path(kernel).read_bytes() for kernel in one] for one in kernels[:1]] == [
        [Path(kernel).read_bytes() for kernel in one] for one in kernels[1:]
    ]
    assert bool(kernels[0]) == (device == "cuda")


@pytest.mark.usefixtures("host_compiler", "nvcc_toolkit")
def test_a_path_with_a_blank_and_a_comma_builds(tmp_path):
    folder = tmp_path / "mine, yours"
    environment = child_environment(
        FLEXOPS_CACHE_DIR=str(folder / "cache"), FLEXOPS_COMPILER_LAUNCHER="none"
    )
    result = run_child(
        "obtain.py", {"csrc": str(copy_csrc(folder)), "device": "cuda", "arch": "8.0"}, environment
    )
    assert "error" not in result, result
    recorded = json.loads((Path(result["library"]).parent / "manifest.json").read_text())["files"]
    assert "<csrc>/common/stream.h" in recorded, "the headers that the compiler reached are known"


@pytest.mark.parametrize(
    "source", sorted((REPOSITORY / "csrc").glob("*/*.cuh")), ids=lambda path: path.name
)
def test_no_kernel_is_in_an_anonymous_namespace(source):
    """Compilers put a name of their own for the source into the names of such kernels."""
    # PTX in strings has braces of its own
    open_, text = [], re.sub(r'//.*|"(?:[^"\\\n]|\\.)*"', "", source.read_text())
    for match in re.finditer(r"(namespace\s*)?\{|\}|__global__", text):
        if match[0].endswith("{"):
            open_.append(bool(match[1]))
        elif match[0] == "}":
            open_.pop()
        else:
            assert not any(open_), (
                f"line {text[: match.start()].count(chr(10)) + 1}: give the namespace a name"
            )
