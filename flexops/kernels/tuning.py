"""The candidate that serves a kind of call: measured once on a GPU, and stored in the cache under
the GPU's name."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _torch, settings
from ..build.load import loader, record
from ..build.plan import cache_key
from ..build.store import choices
from ..errors import CompileError, NativeUnavailableError

if TYPE_CHECKING:
    from .schema import KernelSchema

_MOST_KEYS = 1024  # of one kernel: calls that find their candidate
_ROUNDS = 5
_SECONDS_OF_A_ROUND = 5e-4
_FEWEST, _MOST_CALLS = 3, 50
_BUSY_CYCLES = 1_000_000  # while the GPU counts them, the host queues a round

Call = Callable[..., Any]


class Tuner:
    """Chooses among an operator's candidates.

    Args:
        identity: what the candidates are, for the cache.
        runs: what launches each.
        fixed: the number of the one that serves every call.
    """

    def __init__(
        self,
        schema: KernelSchema,
        identity: list[tuple[str, str]],
        runs: Sequence[Call],
        fixed: int | None,
    ) -> None:
        self.schema, self.identity, self.runs, self.fixed = schema, identity, runs, fixed
        self._known: dict[tuple[str, str], int] = {}
        self._lock = threading.RLock()

    def choose(self, key: tuple[Any, ...], args: tuple[Any, ...], found: dict[Any, Call]) -> Call:
        """The candidate for calls with this key, which is kept in ``found``. In a capture nothing
        can be measured: the stored one, else the first one for this call alone.

        Args:
            key: whether algorithms must be deterministic, the device, and what makes a kind.
        """
        number = self.fixed
        if number is None and (key[0] or not settings.current().autotune):
            number = 0
        if number is None:
            number = self._number(key, args)
            if number is None:
                return self.runs[0]
        if len(found) >= _MOST_KEYS:
            found.clear()
        found[key] = self.runs[number]
        return found[key]

    def tune(self, args: tuple[Any, ...], key: tuple[Any, ...]) -> tuple[float, ...]:
        """Measure, and store; seconds of each candidate."""
        times = self._measured(args)
        self._store(key, times)
        return times

    def _number(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> int | None:
        kind = self._kind(key)
        with self._lock:
            if kind not in self._known:
                stored = self._stored(kind)
                if stored is not None:
                    self._known[kind] = stored
                elif torch.cuda.is_current_stream_capturing():
                    return None
                else:
                    self._store(key, self._measured(args))
            return self._known[kind]

    def _kind(self, key: tuple[Any, ...]) -> tuple[str, str]:
        """The GPU's name, and what is alike in calls of one kind."""
        return torch.cuda.get_device_name(key[1]), str([_rounded(one) for one in key[2:]])

    def _measured(self, args: tuple[Any, ...]) -> tuple[float, ...]:
        written = [one.mutable for one in self.schema.arguments]
        own = [
            one.clone() if write and isinstance(one, torch.Tensor) else one
            for one, write in zip(args, written, strict=True)
        ]
        return measure([functools.partial(run, *own) for run in self.runs])

    # ---- in the cache ----

    def _place(self, kind: tuple[str, str]) -> tuple[str, str]:
        gpu, what = kind
        key = cache_key.digest_fields([*self.identity, ("gpu", gpu), ("kind", what)])
        return f"{self.schema.name}-choice-{key[:12]}", key

    def _stored(self, kind: tuple[str, str]) -> int | None:
        name, key = self._place(kind)
        text = choices.read(loader.open_cache(settings.current()), name, key)
        number = json.loads(text)["candidate"] if text else -1
        if not 0 <= number < len(self.runs):
            return None
        record.choice(name, key, text)
        return int(number)

    def _store(self, key: tuple[Any, ...], times: Sequence[float]) -> None:
        kind = self._kind(key)
        number = min(range(len(times)), key=times.__getitem__)
        self._known[kind] = number
        name, place = self._place(kind)
        fact = {
            "operator": self.schema.qualname,
            "gpu": kind[0],
            "kind": kind[1],
            "candidate": number,
            "microseconds": [round(one * 1e6, 2) for one in times if one < math.inf],
        }
        text = json.dumps(fact)
        choices.write(loader.open_cache(settings.current()), name, place, text)
        record.choice(name, place, text)


def content(value: Any, described: set[Any] | None = None) -> str:
    """An option as text, the same in each process. A function is its code, and the values that it
    finds outside of itself.

    Args:
        described: functions that are, or are being described: further mentions are their names.
    """
    described = set() if described is None else described
    if isinstance(value, Mapping):
        return str([(str(name), content(one, described)) for name, one in sorted(value.items())])
    if isinstance(value, (set, frozenset)):
        return str(sorted(content(one, described) for one in value))
    if isinstance(value, (tuple, list)):
        return str([content(one, described) for one in value])
    if isinstance(value, functools.partial):
        return content((value.func, value.args, value.keywords), described)
    if isinstance(value, types.CodeType):
        return content((value.co_code.hex(), value.co_consts, value.co_names), described)
    if isinstance(value, types.FunctionType):
        if value not in described and not value.__module__.startswith("torch"):
            described.add(value)
            parts = (value.__code__, value.__defaults__, value.__kwdefaults__, _outside(value))
            return content(parts, described)
        return value.__qualname__
    if isinstance(value, types.ModuleType):
        return value.__name__
    return re.sub(r" at 0x\w+", "", str(value))


def _outside(function: types.FunctionType) -> dict[str, Any]:
    """The values of a function's global and nonlocal names, where they are known."""
    codes, found = [function.__code__], {}
    for code in codes:
        found.update(
            {name: function.__globals__[name] for name in code.co_names
             if name in function.__globals__}
        )  # fmt: skip
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    for name, cell in zip(codes[0].co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            found[name] = cell.cell_contents
    return found


def _rounded(value: Any) -> Any:
    """A part of a key, alike for calls of one kind."""
    if isinstance(value, (tuple, list)):
        return [_rounded(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return max(value - 1, 0).bit_length()
    return str(value)


def measure(calls: Sequence[Callable[[], Any]]) -> tuple[float, ...]:
    """Seconds of the GPU for each call: the least of several rounds, the calls in turns. Infinity
    for one that this GPU cannot launch, or that is not compiled where nothing may be.

    Raises:
        RuntimeError: of the first one, if none can be launched.
        CompileError: a candidate does not compile.
    """
    counts = dict.fromkeys(range(len(calls)), _FEWEST)
    failed: BaseException | None = None
    for number, call in enumerate(calls):
        try:
            call()
        except CompileError as error:
            raise CompileError(
                f"candidate {number}: {error.what}", found=error.found, fix=error.fix, log=error.log
            ) from None
        except (RuntimeError, NativeUnavailableError) as error:
            failed = failed or error
            del counts[number]
    if not counts and failed:
        raise failed
    least = [math.inf] * len(calls)
    for _ in range(_ROUNDS):
        for number, count in counts.items():
            least[number] = min(least[number], timed(calls[number], count))
            counts[number] = min(
                max(int(_SECONDS_OF_A_ROUND / least[number]), _FEWEST), _MOST_CALLS
            )
    return tuple(least)


def timed(call: Callable[[], Any], count: int) -> float:
    """Seconds of the GPU for a call, of ``count`` that are queued while it is busy."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _torch.keep_gpu_busy(_BUSY_CYCLES)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count
