"""The whole examination: probes, each guarded, then trials, then judgement. Nothing here prints,
and nothing that goes wrong ends it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from . import children, trial
from .facts import BuildTrial, Facts, TargetFact, Unknown, known
from .finding import DoctorReport, Section, fail
from .judgement import judge
from .probes import build as build_probes
from .probes import machine as machine_probes
from .probes import target as target_probe
from .probes import torch as torch_probe

_DEVICES: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")

S = TypeVar("S")
T = TypeVar("T")


def examine(target_id: str | None = None) -> DoctorReport:
    """Look at everything, try everything, judge everything; ``target_id`` names a row of the matrix
    to judge against. Never raises."""
    try:
        facts = gather(target_id)
        ops = () if isinstance(facts.ops, Unknown) else facts.ops
        return DoctorReport(_judged_target(target_id, facts), judge(facts), ops)
    except Exception as error:  # the one thing that doctor must not do is to say nothing
        found = f"the examination itself failed: {type(error).__name__}: {error}"
        finding = fail(
            "doctor", found, "a report", "python -X dev -m flexops.doctor   # and please report it"
        )
        return DoctorReport(target_id, (Section("doctor", (finding,)),))


def gather(target_id: str | None = None) -> Facts:
    """Every fact. torch is imported, and everything tried, in other processes."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        torch = pool.submit(guarded, torch_probe.torch)
        facts = _look(target_id)
        facts = replace(facts, torch=torch.result())
    if isinstance(facts.torch, Unknown) or facts.torch.state != "ok":
        return replace(
            facts,
            builds=tuple(
                BuildTrial(device, skipped="torch cannot be imported") for device in _DEVICES
            ),
        )
    run = _run(facts)
    facts = replace(
        facts, builds=_try_to_build(facts, run), ops=guarded(lambda: trial.ops(run=run))
    )
    # the ops may just have been compiled into it
    return replace(facts, **_look_at_the_cache(facts))


def _run(facts: Facts) -> trial.Run:
    """How trials run: without the variables that were not understood, which every trial would
    otherwise report once more."""
    left_away = () if isinstance(facts.settings, Unknown) else facts.settings.left_away
    return functools.partial(children.run, without=left_away)


def _try_to_build(facts: Facts, run: trial.Run) -> tuple[BuildTrial, ...] | Unknown:
    """The small op on each device type. One thing after the other: times that are reported want the
    machine to themselves."""
    untried = {device: reason for device in _DEVICES if (reason := _cannot_build(facts, device))}
    devices = [device for device in _DEVICES if device not in untried]
    with trial.workplace(_cache_root(facts)) as place:
        built = guarded(lambda: trial.build(devices, place, _arch_list(facts), run=run))
        loaded = (
            built
            if isinstance(built, Unknown)
            else guarded(lambda: trial.load(built, place, run=run))
        )
    if isinstance(loaded, Unknown):
        return loaded
    return (*loaded, *(BuildTrial(device, skipped=reason) for device, reason in untried.items()))


def _cannot_build(facts: Facts, device: Literal["cpu", "cuda"]) -> str:
    """Why there is no sense in trying; empty if there is. Whether that is a fault is judged where
    the tools are."""
    from ..toolchain import missing

    hip = not isinstance(facts.torch, Unknown) and bool(facts.torch.hip)
    tools = facts.cuda_tools if device == "cuda" and hip else facts.cpu_tools
    if isinstance(tools, Unknown):
        return tools.reason
    if (
        device == "cuda"
        and not hip
        and (isinstance(facts.device_compiler, Unknown) or facts.device_compiler.taken is None)
    ):
        return "there is no NVRTC that matches torch"
    error = missing(tools, "cuda" if device == "cuda" and hip else "cpu")
    return error.what if error else ""


def _arch_list(facts: Facts) -> str:
    """What the target's GPUs need, if one was asked for."""
    row = facts.target.row if isinstance(facts.target, TargetFact) else None
    return row.arch_list if row and row.accelerator == "cuda" else ""


def _cache_root(facts: Facts) -> Path | None:
    """Where the small op's own cache goes: into the real one, if that may be used."""
    cache = facts.cache
    return None if isinstance(cache, Unknown) or cache.problem or cache.unwritable else cache.root


def _judged_target(asked: str | None, facts: Facts) -> str | None:
    if asked is not None:
        return asked
    return facts.target.detected if isinstance(facts.target, TargetFact) else None


def guarded(probe: Callable[[], T]) -> T | Unknown:
    """The probe's fact, or why there is none."""
    try:
        return probe()
    except Exception as error:  # a probe looks at a machine that may be broken in any way
        return Unknown(f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])


def _look(target_id: str | None) -> Facts:
    """Every fact but torch's and the trials'."""
    settings = guarded(machine_probes.settings)
    gpu = guarded(machine_probes.gpus)
    cpu_tools = _with(settings, lambda fact: build_probes.tools(fact.settings, "cpu"))
    cuda_tools = _with(settings, lambda fact: build_probes.tools(fact.settings, "cuda"))
    facts = Facts(
        platform=guarded(machine_probes.platform),
        python=guarded(machine_probes.python),
        settings=settings,
        environment=guarded(machine_probes.environment),
        resources=guarded(build_probes.resources),
        gpu=gpu,
        torch=Unknown("not asked yet"),
        cpu_tools=cpu_tools,
        cuda_tools=cuda_tools,
        device_compiler=_with(settings, lambda fact: build_probes.device_compiler(fact.settings)),
        cache=Unknown("not looked at yet"),
        locks=guarded(build_probes.locks),
        libraries=Unknown("not looked at yet"),
        target=guarded(lambda: target_probe.target(target_id, gpu)),
        unregistered=guarded(build_probes.unregistered),
    )
    return replace(facts, **_look_at_the_cache(facts))


def _look_at_the_cache(facts: Facts) -> dict[str, Any]:
    """What changes when something is built: the cache's state, and which libraries there are."""
    settings = facts.settings
    return {
        "cache": _with(settings, lambda fact: build_probes.cache(fact.settings)),
        "libraries": _with(
            facts.cpu_tools, lambda tools: build_probes.libraries(tools, known(settings).settings)
        ),
    }


def _with(fact: S | Unknown, probe: Callable[[S], T]) -> T | Unknown:
    """A probe that needs another's fact."""
    return fact if isinstance(fact, Unknown) else guarded(lambda: probe(fact))
