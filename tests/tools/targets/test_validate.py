"""The matrix: what ships is right, and what is wrong is said, all at once, by row and field."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexops import _toml
from flexops.errors import TargetError
from flexops.targets import loading
from flexops.toolchain.compat import rules
from flexops_tools.targets import validate

SMALL = Path(__file__).parents[2] / "golden" / "targets.toml"
Document = dict[str, Any]


@pytest.fixture
def document() -> Document:
    """A valid matrix with the rows cpu, cu121-sm89, cu130-sm90 and rocm72-gfx90a, to be spoilt."""
    return copy.deepcopy(_toml.load(SMALL))


def faults(document: Document) -> list[str]:
    with pytest.raises(TargetError) as caught:
        validate.check(document, rules())
    return [line.strip() for line in caught.value.what.splitlines()[1:]]


def test_the_small_matrix_is_valid(document):
    validate.check(document, rules())


def test_the_matrix_of_this_checkout_is_valid():
    validate.check(_toml.load(loading.PATH), rules())


def test_a_row_may_overrule_its_toolkit(document):
    document["target"][1]["python"] = "3.11"
    validate.check(document, rules())
    row = loading.merged(document, document["target"][1])
    assert loading.target_of(document, row).python == "3.11"


Spoil = Callable[[Document], object]


def _row(index: int, **fields: object) -> Spoil:
    return lambda document: document["target"][index].update(fields)


def _toolkit(name: str, **fields: object) -> Spoil:
    return lambda document: document["toolkit"][name].update(fields)


@pytest.mark.parametrize(("spoil", "fault"), [
    (_row(1, capabilities="8.9"),
     "target cu121-sm89, capabilities: must be a list of texts, is '8.9'"),
    (_row(1, index_required="yes"),
     "target cu121-sm89, index_required: must be true or false, is 'yes'"),
    (_row(1, colour="red"), "target cu121-sm89, colour: unknown field"),
    (_row(1, toolkit="cu999"), "target cu121-sm89, toolkit: there is no [toolkit.cu999]"),
    (_row(1, id="cu121-sm80"),
     "target cu121-sm80, id: is not that of its contents, which is cu121-sm89"),
    (_row(2, id="cu121-sm89", toolkit="cu121", capabilities=["8.9"]),
     "target cu121-sm89, id: 2 rows have it"),
    (_row(1, id="cu121-sm100", capabilities=["10.0"]),
     "target cu121-sm100, capabilities: CUDA 12.1.1 cannot compile for 10.0"),
    (_row(1, capabilities=["8.9", "9.0"]), "target cu121-sm89, capabilities: must be exactly one"),
    (_row(1, capabilities=["Ada"]),
     "target cu121-sm89, capabilities: 'Ada' is not understood for cuda: write 9.0"),
    (_row(1, torch="2.14.1"), "target cu121-sm89, torch: 2.14.1 is built for CUDA 13.0, not 12.1"),
    (_row(3, torch="2.4.1"), "target rocm72-gfx90a, torch: 2.4.1 is built for ROCm 6.1, not 7.2"),
    (_row(1, torch="2.3.9"), 'target cu121-sm89, torch: there is no [torch."2.3.9"]'),
    (_row(1, python="3.13"),
     "target cu121-sm89, python: torch 2.4.1 and flexops run on 3.10 to 3.12, not 3.13"),
    (_row(1, python="3.9"),
     "target cu121-sm89, python: torch 2.4.1 and flexops run on 3.10 to 3.12, not 3.9"),
    (_row(1, ninja="new"), "target cu121-sm89, ninja: 'new' is not a version"),
    (_row(1, build_digest="abc"), "target cu121-sm89, build_digest: 'abc' is not sha256:"),
    (_row(1, build_base="ubuntu"), "target cu121-sm89, build_base: 'ubuntu' has no tag"),
    (_row(1, index_required=True),
     "target cu121-sm89, index: missing, though index_required is true"),
    (_row(0, capabilities=["9.0"]), "target cpu, capabilities: must be empty for cpu"),
    (_row(1, accelerator="tpu"),
     "target cu121-sm89, accelerator: 'tpu' is none of cpu, cuda, rocm"),
    (_toolkit("cu121", host_compiler=["9.3", "13"]),
     "target cu121-sm89, host_compiler: gcc 13 is newer than nvcc 12.1.1 accepts"),
    (_toolkit("cu130", host_compiler=["9.3", "15"]),
     "target cu130-sm90, host_compiler: gcc 9.3 is too old for torch's C++20 headers"),
    (_toolkit("cu130", host_compiler=["15", "13"]),
     "target cu130-sm90, host_compiler: the newest, 13, is older than the oldest, 15"),
    (_toolkit("cu130", host_compiler=["13"]),
     "toolkit cu130, host_compiler: must be [oldest, newest], two texts"),
    (_toolkit("cu130", least_driver="550.10"),
     "target cu130-sm90, least_driver: 550.10 is older than 580, the least for CUDA 13.x"),
    (_toolkit("cu121", toolkit_source=["index"]),
     "target cu121-sm89, toolkit_source: the package index has no nvcc 12.1.1"),
    (_toolkit("cu121", toolkit_source=["shop"]),
     "target cu121-sm89, toolkit_source: 'shop' is none of"),
    (_toolkit("cu121", version="13.0.1"),
     "target cu121-sm89, toolkit: [toolkit.cu121] is cuda 13.0.1, whose name is cu130"),
    (_toolkit("cu121", version="9.0"), "target cu121-sm89, version: CUDA 9.0 is not supported"),
    (lambda document: document["toolkit"]["cu121"].pop("torch"),
     "target cu121-sm89, torch: missing"),
    (lambda document: document["toolkit"]["cu121"].pop("least_driver"),
     "target cu121-sm89, least_driver: missing"),
    (lambda document: document["torch"]["2.4.1"].pop("python"), "torch 2.4.1, python: missing"),
    (lambda document: document["torch"]["2.4.1"].update(python=["old", "3.12"]),
     "torch 2.4.1, python: must be [oldest, newest], two versions"),
    (lambda document: document["target"].pop(0), "target, accelerator: no row is for cpu"),
    (lambda document: document.update(extra={}), "matrix, extra: unknown table"),
    (lambda document: document.pop("target"), "matrix, target: missing"),
    (lambda document: document.update(target={"id": "x"}),
     "matrix, target: must be [[target]] tables"),
    (lambda document: document.update(torch="2.4.1"), "matrix, torch: must be a table"),
    (lambda document: document["torch"].update({"9.9": 1}), "torch 9.9, (itself): must be a table"),
])  # fmt: skip
def test_a_fault_names_row_and_field(document, spoil, fault):
    spoil(document)
    assert any(found.startswith(fault) for found in faults(document)), faults(document)


def test_all_faults_are_said_at_once(document):
    document["target"][1].update(id="wrong", python="3.13")
    document["target"][2].update(torch="2.4.1")
    fields = [fault.split(":")[0] for fault in faults(document)]
    # torch 2.4.1 has C++17 headers, so that row's host compiler is not at fault
    assert fields == ["target wrong, id", "target wrong, python", "target cu130-sm90, torch"]
