"""A check that runs nothing proves nothing: builds a small op and loads it again, and runs every op
against its reference.

All of it happens in other processes (``python -m flexops.doctor.trial ...``), with the real
builder, cache and loader. The small op goes into a cache of its own, made for the occasion on the
real cache's file system, so that the build is really one from nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .. import trust
from . import children
from .children import Child
from .facts import BuildTrial, OpTrial

if TYPE_CHECKING:
    from ..build.describe.spec import DeviceType, OpSpec
    from ..settings import Settings

BUILD_SECONDS = 180.0
OPS_SECONDS = 600.0
# A cached object would make a build from nothing look better than it is; the launcher is still gone
# through.
_SMALL_SCHEMA = "doctor_square(Tensor x) -> Tensor"
_FROM_NOTHING = {"CCACHE_RECACHE": "1", "SCCACHE_RECACHE": "1"}

Run = Callable[..., Child]


# ---- in the parent ----


@contextlib.contextmanager
def workplace(cache_root: Path | None) -> Iterator[Path]:
    """A directory for the small op's cache: inside the real cache if that can be written, so that
    its file system is what is tried."""
    place = _inside(cache_root) if cache_root else None
    place = place or Path(tempfile.mkdtemp(prefix="flexops-doctor-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _inside(cache_root: Path) -> Path | None:
    try:
        trust.make_directory(str(cache_root / ".tmp"))
        if trust.path_problem(str(cache_root / ".tmp"), passage=True):
            return None  # other users could swap what is built there
        return Path(tempfile.mkdtemp(prefix="doctor-", dir=cache_root / ".tmp"))
    except OSError:
        return None


def build(
    devices: Sequence[str], place: Path, arch_list: str = "", *, run: Run = children.run
) -> dict[str, BuildTrial]:
    """Build the small op for each device type. ``arch_list``: what to compile for, if not for the
    GPU that is here."""
    if not devices:
        return {}
    child = run(
        ["-m", __name__, "build", arch_list, *devices],
        timeout=BUILD_SECONDS,
        environment=_environment(place),
    )
    replies = {message.pop("device"): message for message in child.messages}
    failure = _failure(child)
    return {device: _build_trial(device, replies.get(device), failure) for device in devices}


def load(
    built: dict[str, BuildTrial], place: Path, *, run: Run = children.run
) -> tuple[BuildTrial, ...]:
    """Load what was built in a new process, and run it where its device is here."""
    devices = [device for device, one in built.items() if not one.error]
    if not devices:
        return tuple(built.values())
    child = run(
        ["-m", __name__, "load", "", *devices],
        timeout=BUILD_SECONDS,
        environment=_environment(place),
    )
    replies = {message.pop("device"): message for message in child.messages}
    failure = _failure(child)
    return tuple(
        _loaded_trial(one, replies.get(device), failure) if device in devices else one
        for device, one in built.items()
    )


def ops(*, run: Run = children.run) -> tuple[OpTrial, ...]:
    """Run every op on every device. A crash costs the op that was running, not those that come
    after it."""
    results: dict[tuple[str, str], OpTrial] = {}
    while True:
        done = [f"{name}@{device}" for name, device in results]
        child = run(
            ["-m", __name__, "ops", *done],
            timeout=OPS_SECONDS,
            environment={"FLEXOPS_LOG": "quiet"},
        )
        planned, begun, fresh = _read_ops(child)
        results |= fresh
        if not child.failure:
            break
        crashed = begun or OpTrial("all", "cpu", "reference")
        results[crashed.name, crashed.device] = _crashed(crashed, child)
        if begun is None or set(planned) <= set(results):
            break
    return tuple(results.values())


def _environment(place: Path) -> dict[str, str]:
    return {**_FROM_NOTHING, "FLEXOPS_CACHE_DIR": str(place), "FLEXOPS_LOG": "quiet"}


def _read_ops(
    child: Child,
) -> tuple[list[tuple[str, str]], OpTrial | None, dict[tuple[str, str], OpTrial]]:
    planned: list[tuple[str, str]] = []
    begun: OpTrial | None = None
    results: dict[tuple[str, str], OpTrial] = {}
    for message in child.messages:
        if "planned" in message:
            planned = [(name, device) for name, device in message["planned"]]
        elif message.pop("begun", False):
            begun = OpTrial(**message)
        else:
            begun = None
            result = OpTrial(**message)
            results[result.name, result.device] = result
    return planned, begun, results


def _crashed(begun: OpTrial, child: Child) -> OpTrial:
    noise = (
        f" ({child.last_line})"
        if child.returncode and child.returncode < 0 and child.last_line
        else ""
    )
    error = f"its process {child.failure}{noise}"
    return OpTrial(begun.name, begun.device, begun.backend, begun.reason, begun.fix, None, error)


def _failure(child: Child) -> str:
    return f"its process {child.failure}" if child.failure else "its process said nothing"


def _build_trial(device: str, reply: dict[str, Any] | None, failure: str) -> BuildTrial:
    if reply is None:
        return BuildTrial(device, error=failure)
    return BuildTrial(device, **{**reply, "architectures": tuple(reply.get("architectures", ()))})


def _loaded_trial(built: BuildTrial, reply: dict[str, Any] | None, failure: str) -> BuildTrial:
    from dataclasses import replace

    return replace(built, **(reply if reply is not None else {"error": failure}))


# ---- in the child ----


def small_op() -> OpSpec:
    from ..build.describe.schema import declare
    from ..build.describe.spec import OpSpec

    return OpSpec(
        "doctor",
        isa_levels=("baseline",),
        signatures=(declare(_SMALL_SCHEMA, dtypes={"x": "float32"}),),
    )


def _one_architecture(chosen: Settings) -> str | None:
    """One of the architectures that a build would be for: more would only take longer."""
    from .. import toolchain
    from ..build.load import provider

    torch = toolchain.torch_build()
    if torch and torch.hip:
        return None
    return str(
        provider.compiler_for(
            chosen, toolchain.local_capabilities(), asked=chosen.arch_list
        ).architectures[0]
    )


def _build_in_child(arch_list: str, device: str) -> dict[str, Any]:

    from .. import settings
    from ..build.deliver import aot

    started = time.perf_counter()
    chosen = settings.current()
    if device == "cuda":
        chosen = chosen._replace(arch_list=arch_list or chosen.arch_list)
        chosen = chosen._replace(arch_list=_one_architecture(chosen))
    result = aot.build_specs((small_op(),), (cast("DeviceType", device),), chosen)[0]
    architectures = result.architectures or result.require().manifest.architectures
    return {
        "build_seconds": round(time.perf_counter() - started, 3),
        "architectures": list(architectures),
    }


def _load_in_child(_: str, device: str) -> dict[str, Any]:
    import torch

    from .. import settings, toolchain
    from ..build.load import loader

    started = time.perf_counter()
    entry = loader.open_cache(settings.current()).lookup(
        loader.local_plan(small_op(), cast("DeviceType", device), settings.current())
    )
    if entry is None:
        return {"error": "what was built is not found again"}
    build = toolchain.torch_build()
    loader.open_library(
        entry.library, small_op() if device == "cuda" and not (build and build.hip) else None
    )
    seconds = time.perf_counter() - started
    error = _run_small_op(device) if device == "cpu" or torch.cuda.is_available() else None
    return {"load_seconds": round(seconds, 5), "max_error": error}


def _run_small_op(device: str) -> float:
    import torch

    x = torch.arange(-5, 1000, dtype=torch.float32, device=device)
    return float((torch.ops.flexops.doctor_square(x) - x * x).abs().max())


def _define_small_op() -> object:
    """The result must be kept: with it goes the definition."""
    import torch

    library = torch.library.Library("flexops", "FRAGMENT")
    library.define(_SMALL_SCHEMA)
    return library


def _each_device(
    work: Callable[[str, str], dict[str, Any]], arch_list: str, devices: Sequence[str]
) -> None:
    from ..errors import FlexopsError

    for device in devices:
        try:
            message = work(arch_list, device)
        except FlexopsError as error:
            message = {"error": error.reason, "fix": error.fix}
        except Exception as error:  # torch's and the system's; the finding names it
            message = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        children.say({"device": device, **message})


def _ops_in_child(done: Sequence[str]) -> None:
    import warnings

    warnings.simplefilter("ignore")  # that an op falls back is a result here
    import torch

    from .. import ops as own
    from ..build.describe import catalog
    from ..builder import registered

    unread = registered.load()
    gpus = (
        [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    there: dict[str, list[str]] = {"cpu": ["cpu"], "cuda": gpus}
    planned = [
        (spec.name, device)
        for spec in catalog.specs()
        for kind in spec.devices
        for device in there[kind]
    ]
    children.say({"planned": planned})
    for name, device in planned:
        if f"{name}@{device}" not in done:
            _run_op(_self_checks(own, name), name, device)
    for library, error in unread.items():
        if f"{library}@cpu" not in done:
            fix = f'python -c "import {library}"'
            children.say(
                {
                    "name": library,
                    "device": "cpu",
                    "backend": "reference",
                    "reason": error,
                    "fix": fix,
                    "error": "its library cannot be imported",
                }
            )


def _self_checks(own: Any, name: str) -> list[Callable[[str], float]]:
    """Of a family of flexops' or of a registered library; none for one that declares none: then it
    is only loaded."""
    from ..builder import library

    return library.self_checks.get(name, []) if "." in name else [getattr(own, name).self_check]


def _run_op(checks: Sequence[Callable[[str], float]], name: str, device: str) -> None:
    from ..errors import FlexopsError

    result: dict[str, Any] = {
        "name": name,
        "device": device,
        "backend": "reference",
        "reason": "",
        "fix": "",
    }
    children.say({"begun": True, **result, "reason": "while its library was being had"})
    try:
        result |= _backend(name, device.partition(":")[0])
        children.say({"begun": True, **result})
        differences = [float(check(device)) for check in checks]
        result["max_error"] = max(differences) if differences else None
    except FlexopsError as error:
        result |= {"error": error.what, "reason": error.found, "fix": error.fix}
    except Exception as error:  # an op that raises is a finding, whatever it raises
        result["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    children.say(result)


def _backend(name: str, kind: str) -> dict[str, str]:
    """Where the op's kernels come from, after asking for them as its first call would."""
    from ..build.load import loader

    loader.ensure(name, kind)
    status = next(one for one in loader.status() if (one.op, one.device) == (name, kind))
    return {"backend": status.backend, "reason": status.reason, "fix": status.fix}


def main(arguments: Sequence[str]) -> None:
    """``build ARCH_LIST DEVICE...`` | ``load ARCH_LIST DEVICE...`` | ``ops [DONE...]``."""
    what, rest = arguments[0], list(arguments[1:])
    if what == "ops":
        _ops_in_child(rest)
    elif what == "build":
        _each_device(_build_in_child, rest[0], rest[1:])
    else:
        kept = _define_small_op()
        _each_device(_load_in_child, rest[0], rest[1:])
        del kept


if __name__ == "__main__":
    main(sys.argv[1:])
