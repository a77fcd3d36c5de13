"""Candidates of ``flexops.kernel``: what is measured, what is stored, and what is not. The GPU's
clock is stood in for."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flexops
from flexops import _torch, settings
from flexops.build.deliver import warm
from flexops.build.load import record
from flexops.build.store import cache_archive
from flexops.build.store.cache import BuildCache
from flexops.errors import CompileError, FlexopsError, NativeUnavailableError
from flexops.kernels import tuning

COPY = """
template <int kThreads> __global__ void copy(const float* x, float* out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i < n) out[i] = x[i];
}"""
SIZES = (32, 64, 128)
CANDIDATES = [{"block": size, "template": {"kThreads": size}} for size in SIZES]


class Machine:
    """A GPU whose candidates take ``seconds``; ``measured`` counts them, ``ran`` has calls."""

    def __init__(self, cache: Path) -> None:
        self.seconds: list[Any] = [3.0, 1.0, 2.0]
        self.name, self.capturing, self.measured, self.cache = "GPU one", False, 0, cache
        self.ran: list[int] = []

    def kernel(self, **options: Any) -> flexops.Kernel:
        made = flexops.kernel(
            COPY, "tuned::copy(Tensor x) -> Tensor", **{"candidates": CANDIDATES, **options}
        )
        assert made._code.tuner
        made._code.tuner.runs = [self._run(number) for number in range(len(made.candidates))]
        return made

    def _run(self, number: int) -> Any:
        def run(_: torch.Tensor) -> int:
            if isinstance(self.seconds[number], Exception):
                raise self.seconds[number]
            self.ran.append(number)
            return number

        return run

    def timed(self, call: Any, _: int) -> float:
        self.measured += 1
        return float(self.seconds[call()])

    def chosen(self, kernel: flexops.Kernel, x: torch.Tensor) -> int:
        return int(kernel._code.run(x))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "cache")
    monkeypatch.setenv("FLEXOPS_CACHE_DIR", str(made.cache))
    monkeypatch.setattr(_torch, "current_gpu", lambda: -1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: made.name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(tuning, "timed", made.timed)
    settings.current.cache_clear()
    yield made
    settings.current.cache_clear()


def test_the_fastest_is_measured_once_for_a_kind_and_stored_for_the_gpu(machine):
    copy = machine.kernel()
    assert [machine.chosen(copy, torch.ones(size)) for size in (1000, 1000, 1024)] == [1, 1, 1]
    once = machine.measured
    assert machine.chosen(copy, torch.ones(1025)) == 1
    assert machine.measured == 2 * once
    machine.seconds = [1.0, 2.0, 3.0]
    again = machine.kernel()
    assert machine.chosen(again, torch.ones(1024)) == 1
    assert machine.measured == 2 * once, "it was stored"
    machine.name = "GPU two"
    assert machine.chosen(machine.kernel(), torch.ones(1024)) == 0
    other = machine.kernel(defines={"OTHER": 1})
    machine.name, machine.seconds = "GPU one", [2.0, 2.0, 1.0]
    assert machine.chosen(other, torch.ones(1024)) == 2
    facts = [json.loads(one.library.read_text()) for one in BuildCache(machine.cache).entries()]
    assert sorted(fact["gpu"] for fact in facts) == ["GPU one"] * 3 + ["GPU two"]
    assert sorted(fact["candidate"] for fact in facts) == [0, 1, 1, 2]


ROWS = 4


def _blocks(rows: int) -> int:
    return rows // ROWS


def test_an_edited_function_is_another_kernel(machine):
    """Its constants, names, helpers, globals and closure count; where it was defined does not."""

    def of(rows: int) -> Any:
        return lambda x: next(x.numel() // rows for _ in "1")

    def itself(x: torch.Tensor) -> int:
        return itself(x[1:]) if x.numel() in (5, 6) else _blocks(x.numel()) + 1

    made: list[Any] = [
        lambda x: x.numel() // 4,
        lambda x: x.numel() // 2,
        lambda x: x.shape[0] // 4,
        of(4),
        of(2),
        functools.partial(lambda rows, x: x.numel() // rows, 4),
        itself,
    ]
    keys = {tuning.content(one) for one in made}
    assert len(keys) == len(made)
    assert tuning.content(of(4)) == tuning.content(made[3])
    assert tuning.content(lambda x: x.numel() // 4) == tuning.content(made[0])
    for name, value in (("ROWS", 8), ("_blocks", lambda rows: rows)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(globals(), name, value)
            assert tuning.content(itself) not in keys
    x = torch.ones(8)
    assert machine.chosen(machine.kernel(grid=made[0]), x) == 1
    once = machine.measured
    assert machine.chosen(machine.kernel(grid=lambda x: x.numel() // 4), x) == 1
    assert machine.measured == once
    assert machine.chosen(machine.kernel(grid=made[1]), x) == 1
    assert machine.measured == 2 * once


def test_the_text_of_a_function_is_that_of_every_process():
    code = (
        "from flexops.kernels import tuning; import torch\n"
        "def f(x, y=object()): return torch.arange(3) if x in {'a', 'b', 'c'} else y\n"
        "print(tuning.content([f, {'b': f, 'a': object, 'c': object()}]))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(texts) == 1


def test_a_key_of_its_own(machine):
    copy = machine.kernel(key=lambda x: x.shape[0] % 2)
    for size in (2, 400, 6000):
        machine.chosen(copy, torch.ones(size))
    once = machine.measured
    machine.chosen(copy, torch.ones(3))
    assert machine.measured == 2 * once


def test_where_nothing_is_measured(machine, monkeypatch):
    x = torch.ones(8)
    assert machine.chosen(machine.kernel(candidate=2), x) == 2
    copy = machine.kernel()
    torch.use_deterministic_algorithms(True)
    try:
        assert machine.chosen(copy, x) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    machine.capturing = True
    assert machine.chosen(copy, x) == 0
    monkeypatch.setenv("FLEXOPS_AUTOTUNE", "0")
    settings.current.cache_clear()
    assert machine.chosen(machine.kernel(), x) == 0
    assert machine.measured == 0
    monkeypatch.delenv("FLEXOPS_AUTOTUNE")
    settings.current.cache_clear()
    machine.capturing = False
    assert machine.chosen(copy, x) == 1, "neither is kept for later calls"


def test_what_cannot_be_launched_is_left_out(machine):
    x = torch.ones(8)
    machine.seconds = [RuntimeError("too many registers"), 2.0, NativeUnavailableError("JIT=0")]
    copy = machine.kernel()
    assert machine.chosen(copy, x) == 1
    (entry,) = BuildCache(machine.cache).entries()
    assert json.loads(entry.library.read_text())["microseconds"] == [2e6]
    machine.seconds = [RuntimeError("the first"), RuntimeError("b"), RuntimeError("c")]
    with pytest.raises(RuntimeError, match="the first"):
        machine.chosen(machine.kernel(), torch.ones(100))
    machine.seconds[1] = CompileError("copy could not be compiled", found="line 3")
    with pytest.raises(CompileError, match="candidate 1: copy could not be compiled"):
        machine.chosen(machine.kernel(), torch.ones(100))


def test_a_damaged_or_foreign_choice_is_measured_again(machine):
    x = torch.ones(8)
    assert machine.chosen(machine.kernel(), x) == 1
    (entry,) = BuildCache(machine.cache).entries()
    entry.library.write_text('{"candidate": 0}')
    once = machine.measured
    assert machine.chosen(machine.kernel(), x) == 1
    assert machine.measured == 2 * once


def test_choices_are_exported_and_recorded(machine, monkeypatch, tmp_path):
    """By an archive of the cache, and by a record, from which another machine has it."""
    monkeypatch.setenv("FLEXOPS_RECORD", str(tmp_path / "record.jsonl"))
    settings.current.cache_clear()
    x = torch.ones(8)
    assert machine.chosen(machine.kernel(), x) == 1
    once = machine.measured
    cache_archive.export(BuildCache(machine.cache), tmp_path / "archive")
    cache_archive.import_archive(BuildCache(tmp_path / "imported"), tmp_path / "archive")
    for place in ("imported", "warmed"):
        monkeypatch.setenv("FLEXOPS_CACHE_DIR", str(tmp_path / place))
        monkeypatch.setenv("FLEXOPS_JIT", "0")
        settings.current.cache_clear()
        if place == "warmed":
            made = warm.make(record.read([tmp_path / "record.jsonl"]), settings.current())
            assert [one.error for one in made] == [None]
        machine.seconds = [1.0, 2.0, 3.0]
        assert machine.chosen(machine.kernel(), x) == 1
    assert machine.measured == once


@pytest.mark.usefixtures("machine")
def test_what_is_written_is_copied_before():
    add = flexops.kernel(
        "__global__ void add(float* y, int64_t n) { if (threadIdx.x < n) y[threadIdx.x] += 1; }",
        "tuned::add(Tensor(a!) y) -> ()",
        candidates=[{"block": 32}, {"block": 64}],
    )
    seen: list[torch.Tensor] = []
    assert add._code.tuner
    add._code.tuner.runs = [lambda y: seen.append(y.add_(1)) or 0] * 2
    y = torch.zeros(3)
    add._code.run(y)
    assert torch.equal(y, torch.ones(3)), "only the call itself writes it"
    assert len(seen) > 2


def test_times_are_in_the_order_of_candidates(machine):
    times = tuning.measure([lambda: 0, lambda: 1, lambda: 2])
    assert times == (3.0, 1.0, 2.0)
    machine.seconds[1] = RuntimeError()

    def fails() -> int:
        raise RuntimeError

    assert tuning.measure([lambda: 0, fails]) == (3.0, math.inf)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"candidates": [{"blocks": 32}]}, "a step or candidate with blocks"),
        ({"candidates": [32]}, "a step or candidate with 32"),
        ({"candidates": [{"block": 4096}]}, "block x from 1 to 1024"),
        ({"candidates": CANDIDATES, "candidate": 3}, "candidate 3"),
        ({"block": 32, "template": {"kThreads": 32}, "key": len}, "key without candidates"),
    ],
)
def test_candidates_that_do_not_fit(options, said):
    with pytest.raises(FlexopsError, match=said):
        flexops.kernel(COPY, "tuned::copy(Tensor x) -> Tensor", **options)
    fixed = flexops.kernel(COPY, "tuned::copy(Tensor x) -> Tensor", candidates=CANDIDATES)
    with pytest.raises(FlexopsError, match="tensors that are on no GPU"):
        fixed.tune(torch.ones(3))
    assert fixed.expression(torch.ones(3)) == "copy<32>, copy<64>, copy<128>"
    assert [one.expression(torch.ones(3)) for one in fixed.candidates[1:]] == [
        "copy<64>",
        "copy<128>",
    ]
