"""From facts to findings: which check gets which facts, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from .checks import build, machine, target, tools
from .facts import Facts, NotKnownError, TargetFact, Unknown, known
from .finding import Finding, Section, fail, warn

if TYPE_CHECKING:
    from ..targets import Target

_DECISIVE = ("torch", "build", "op")

Judge = Callable[[Facts], "Finding | Iterable[Finding]"]


def judge(facts: Facts) -> tuple[Section, ...]:
    """Every finding. A check whose facts are not known, or that fails itself, becomes a finding
    that says so."""
    return tuple(
        section
        for title, checks in SECTIONS
        if (section := _section(title, checks, facts)).findings
    )


def _section(title: str, checks: tuple[tuple[str, Judge], ...], facts: Facts) -> Section:
    return Section(
        title, tuple(finding for name, check in checks for finding in _guarded(name, check, facts))
    )


def _guarded(name: str, check: Judge, facts: Facts) -> list[Finding]:
    try:
        outcome = check(facts)
        return [outcome] if isinstance(outcome, Finding) else list(outcome)
    except NotKnownError as error:
        return [
            _unjudged(name, f"could not be looked at: {error}", "a machine that can be looked at")
        ]
    except Exception as error:  # a fault in a check must not cost the others
        return [
            _unjudged(
                name, f"could not be judged: {type(error).__name__}: {error}", "a check that works"
            )
        ]


def _unjudged(name: str, found: str, required: str) -> Finding:
    """A warning; but where it is unknown whether torch, builds or ops work, it may not be said that
    they do."""
    fix = f"flexops doctor --json   # please report it: the {name} check of flexops failed here"
    return (fail if name in _DECISIVE else warn)(name, found, required, fix)


# ---- what several checks need to know ----


def _ops(device: str = "") -> tuple[str, ...]:
    """The ops, or those with kernels for a device type: on another they are plain PyTorch, and
    nothing is missing."""
    from ..build.describe.catalog import CATALOG

    return tuple(spec.name for spec in CATALOG if not device or device in spec.devices)


def _must_build(facts: Facts, device: str) -> bool:
    """Whether some op has no library for that device type yet."""
    libraries = () if isinstance(facts.libraries, Unknown) else facts.libraries
    return not tools.has_library(libraries, device, _ops(device))


def _gpu_here(facts: Facts) -> bool:
    """A GPU of the kind that torch is built for."""
    if isinstance(facts.gpu, Unknown) or isinstance(facts.torch, Unknown):
        return False
    vendor = "amd" if facts.torch.hip else "nvidia" if facts.torch.cuda else ""
    return any(one.vendor == vendor for one in facts.gpu.gpus)


def _row(facts: Facts) -> Target | None:
    return facts.target.row if isinstance(facts.target, TargetFact) else None


def _needed(facts: Facts) -> bool:
    return _must_build(facts, "cpu") or (_gpu_here(facts) and _must_build(facts, "cuda"))


def _host_compiler_here(facts: Facts) -> bool:
    return not isinstance(facts.cpu_tools, Unknown) and facts.cpu_tools.host is not None


def _jit(facts: Facts) -> bool:
    return known(facts.settings).settings.jit


# ---- the checks ----


def _python(facts: Facts) -> Finding:
    installer = "" if isinstance(facts.platform, Unknown) else facts.platform.installer
    return machine.python(known(facts.python), _host_compiler_here(facts), installer)


def _gpu(facts: Facts) -> Finding:
    row = _row(facts)
    return machine.gpu(
        known(facts.gpu),
        known(facts.torch),
        known(facts.platform),
        known(facts.environment),
        row.accelerator if row else "",
    )


def _toolkit(facts: Facts) -> Finding:
    return tools.toolkit(
        known(facts.cuda_tools),
        known(facts.torch),
        gpu=_gpu_here(facts),
        needed=_must_build(facts, "cuda"),
        jit=_jit(facts),
    )


def _device_compiler(facts: Facts) -> Finding:
    return tools.device_compiler(
        known(facts.device_compiler),
        known(facts.torch),
        gpu=_gpu_here(facts),
        needed=_must_build(facts, "cuda"),
        jit=_jit(facts),
    )


def _host_compiler(facts: Facts) -> Finding:
    return tools.host_compiler(
        known(facts.cpu_tools), known(facts.cuda_tools), needed=_needed(facts), jit=_jit(facts)
    )


def _launcher(facts: Facts) -> Finding:
    installer = "" if isinstance(facts.platform, Unknown) else facts.platform.installer
    return tools.launcher(
        known(facts.cpu_tools),
        installer,
        known(facts.settings).settings.launcher,
    )


def _architectures(facts: Facts) -> Finding:
    row = _row(facts)
    suggested = row.arch_list if row and row.accelerator == "cuda" else ""
    found, torch = known(facts.device_compiler), known(facts.torch)
    # an image that is to run elsewhere has no compiler
    builds = bool(torch.cuda) and _host_compiler_here(facts)
    return build.architectures(
        known(facts.settings).settings,
        found.value,
        known(facts.gpu).gpus,
        builds=builds,
        suggested=suggested,
    )


def _libraries(facts: Facts) -> Iterator[Finding]:
    return build.libraries(known(facts.libraries), _ops(), jit=_jit(facts))


def _builds(facts: Facts) -> list[Finding]:
    return [build.build_trial(one) for one in known(facts.builds)]


def _op_trials(facts: Facts) -> list[Finding]:
    fallback = "warn" if isinstance(facts.settings, Unknown) else facts.settings.settings.fallback
    return [build.op_trial(one, fallback) for one in known(facts.ops)]


def _target_row(facts: Facts) -> Iterator[Finding]:
    """The pins of the row that was asked for; nothing when none was."""
    row = _row(facts)
    if row is None:
        return
    ops = _ops("cpu" if row.accelerator == "cpu" else "cuda")
    libraries = known(facts.libraries)
    compiled = set(ops) <= target.compiled_ops(row, libraries)
    yield target.torch(row, known(facts.torch))
    yield target.python(row, known(facts.python))
    if row.accelerator == "cpu":
        yield target.host_compiler(row, known(facts.cpu_tools), compiled=compiled)
    else:
        chosen = known(facts.settings).settings
        rocm = row.accelerator == "rocm"
        yield target.toolkit(
            row,
            known(facts.cuda_tools).rocm if rocm else known(facts.device_compiler).value,
            compiled=compiled,
        )
        yield target.host_compiler(
            row, known(facts.cuda_tools if rocm else facts.cpu_tools), compiled=compiled
        )
        yield from target.gpu(row, known(facts.gpu))
        yield target.architectures(
            row, chosen.rocm_arch_list if row.accelerator == "rocm" else chosen.arch_list
        )
    yield target.libraries(row, libraries, ops)


SECTIONS: tuple[tuple[str, tuple[tuple[str, Judge], ...]], ...] = (
    (
        "machine",
        (
            ("platform", lambda facts: machine.platform(known(facts.platform))),
            ("python", _python),
            ("package", lambda facts: machine.package(known(facts.python))),
            ("settings", lambda facts: machine.settings(known(facts.settings))),
            ("environment", lambda facts: machine.environment(known(facts.environment))),
            ("gpu", _gpu),
            ("driver", lambda facts: machine.driver(known(facts.gpu), known(facts.torch))),
        ),
    ),
    (
        "torch",
        (
            ("torch", lambda facts: machine.torch(known(facts.torch))),
            (
                "torch-gpu",
                lambda facts: machine.torch_gpu(
                    known(facts.torch), known(facts.gpu), known(facts.environment)
                ),
            ),
            (
                "cuda-libraries",
                lambda facts: tools.cuda_libraries(known(facts.torch), known(facts.environment)),
            ),
        ),
    ),
    (
        "tools",
        (
            ("device-compiler", _device_compiler),
            ("toolkit", _toolkit),
            ("host-compiler", _host_compiler),
            (
                "ninja",
                lambda facts: tools.ninja(
                    known(facts.cpu_tools), needed=_needed(facts), jit=_jit(facts)
                ),
            ),
            ("launcher", _launcher),
        ),
    ),
    (
        "building",
        (
            (
                "cache",
                lambda facts: build.cache(
                    known(facts.cache), needed=_needed(facts) and _jit(facts)
                ),
            ),
            ("cache-damage", lambda facts: build.quarantine(known(facts.cache))),
            ("torch-locks", lambda facts: build.stale_locks(known(facts.locks))),
            ("architectures", _architectures),
            (
                "jobs",
                lambda facts: build.jobs(known(facts.settings).settings, known(facts.resources)),
            ),
            ("libraries", _libraries),
            ("build", _builds),
        ),
    ),
    (
        "operators",
        (
            ("op", _op_trials),
            ("op-unregistered", lambda facts: build.unregistered(known(facts.unregistered))),
        ),
    ),
    (
        "target",
        (
            ("target", lambda facts: target.target(known(facts.target))),
            ("target-pins", _target_row),
        ),
    ),
)
"""Titles, and in each the name (of the finding, if its facts are not known) and the check."""
