"""Runs one contender of one case, for a profiler. Run as a script by ``profiling``; prints JSON.

python profile_child.py '{"places": ["benchmarks/scale.py"], "op": "", "case": "bf16", "contender":
"", "device": "cuda"}'
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

CASES = "flexops.cases"
"""Entry points of other distributions: ``f(op, setup)`` yields names and their contenders."""
REFUSED = "flexops refuses: "
"""On standard error, before the parts of an error that needs no traceback."""


def main() -> None:
    sys.path[0] = ""
    import torch

    from flexops.errors import FlexopsError

    request: dict[str, Any] = json.loads(sys.argv[1])
    try:
        call, what = chosen(request)
    except FlexopsError as error:
        sys.exit(
            REFUSED
            + json.dumps([type(error).__name__, error.what, error.found, error.required, error.fix])
        )
    for _ in range(3):
        call()
    on_gpu = request["device"] == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    if request.get("torch"):
        print(json.dumps(by_torch(call, on_gpu)))
        return
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print(what, file=sys.stderr)


def chosen(request: dict[str, Any]) -> tuple[Callable[[], object], str]:
    """The contender to run, and what it does in words."""
    from flexops.errors import SettingsError

    for name, calls in candidates(request):
        if request["case"] in name:
            contender = request["contender"] or next(iter(calls))
            if contender in calls:
                return calls[contender], f"{name}: {contender}"
    what = (
        f"no case with {request['case']!r} in its name and a contender"
        f" {request['contender'] or 'at all'}"
    )
    raise SettingsError(what, fix="omit --case and --contender")


def candidates(request: dict[str, Any]) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    from importlib.metadata import entry_points

    from flexops.bench import own
    from flexops.bench.setup import Setup
    from flexops.errors import SettingsError

    setup = Setup(request["device"], small=bool(request.get("small")))
    for place in request["places"]:
        for one in own.cases_of(place, setup):
            yield one.name, one.calls
    if op := request["op"]:
        points = entry_points(group=CASES)
        if not points:
            raise SettingsError(
                f"the cases of {op} are not part of flexops itself",
                found="no flexops-tools",
                required="flexops-tools of the same version, from a clone of flexops",
                fix="pip install ./tools   # in the clone; or name a file with cases(setup)",
            )
        for point in points:
            yield from point.load()(op, setup)


def by_torch(call: Callable[[], object], on_gpu: bool) -> list[dict[str, str]]:
    """The kernels of a call, in their order; on a CPU the operators, the slowest first."""
    import os
    import tempfile

    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiler:
        call()
        if on_gpu:
            import torch

            torch.cuda.synchronize()
    if not on_gpu:
        events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
        return [
            {
                "kernel": event.key,
                "time": f"{event.self_cpu_time_total:.1f} us",
                "calls": str(event.count),
            }
            for event in events[:20]
        ]
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(os.path.join(folder, "trace.json"))
        with open(os.path.join(folder, "trace.json"), encoding="utf-8") as stream:
            events = [
                event
                for event in json.load(stream)["traceEvents"]
                if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
            ]
    return [kernel(event) for event in sorted(events, key=lambda event: event["ts"])]


def kernel(event: dict[str, Any]) -> dict[str, str]:
    known = event.get("args", {})
    names = {
        "registers per thread": "registers",
        "shared memory": "shared memory",
        "grid": "grid",
        "block": "block",
    }
    names["est. achieved occupancy %"] = "occupancy, %"
    return {
        "kernel": event["name"],
        "time": f"{event['dur']} us",
        **{short: str(known[name]) for name, short in names.items() if name in known},
    }


if __name__ == "__main__":
    main()
