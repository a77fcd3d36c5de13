"""A header that many sources of one run read first, with the same flags: g++ or zig reads it once,
for all of them.

Where torch has no stable ABI, its headers take five of a binding's eight seconds, and all families
together have 30 bindings; CPU kernels read AVX-512's intrinsics, a fifth of what compiling them
takes. To precompile a header takes as long as three of its readers save, so a few go without, and
nothing is kept after the run. With zig the C++ library's headers are heavy enough: half of a
binding's second and a half.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cache_key import SHARED_HEADERS as FOLDER
from .plan import BuildPlan, Step

FEWEST = 5


def share(plans: Sequence[BuildPlan]) -> list[BuildPlan]:
    """The plans, with one in front that precompiles what at least ``FEWEST`` of their steps share;
    as they are if there is nothing like that.

    A launcher such as ccache knows a source by all that it reads and does not get along with
    precompiled headers: its plans are left to it.
    """
    readers: dict[tuple[str, ...], set[object]] = {}
    for plan in plans:
        for step in plan.steps:
            readers.setdefault(_reading(plan, step), set()).add(
                plan.alike(step) or (plan.name, step.output)
            )
    shared = [reading for reading, each in readers.items() if reading and len(each) >= FEWEST]
    if not shared:
        return list(plans)
    making, texts = [], []
    for number, (header, *flags) in enumerate(shared):
        command = (*flags, "-x", "c++-header", f"{number}.h", "-o", f"{number}.h.gch")
        making.append(Step("host", f"{number}.h.gch", (), command))
        texts.append((f"{number}.h", f'#include "{header}"\n'))
    maker = plans[0]._replace(
        name=FOLDER, steps=tuple(making), library="", sources=(), launcher="", texts=tuple(texts)
    )
    return [
        maker,
        *(
            plan._replace(steps=tuple(_using(shared, plan, step) for step in plan.steps))
            for plan in plans
        ),
    ]


def _reading(plan: BuildPlan, step: Step) -> tuple[str, ...]:
    """The header that the step could share, and the compiler with its flags; nothing if there is
    none."""
    if not step.shared_header or plan.launcher:
        return ()
    return (step.shared_header, *step.command[: step.command.index("-c")])


def _using(shared: list[tuple[str, ...]], plan: BuildPlan, step: Step) -> Step:
    reading = _reading(plan, step)
    if reading not in shared:
        return step
    header, flags = f"../{FOLDER}/{shared.index(reading)}.h", len(reading) - 1
    # Before all else, or g++ does not take it, and reads the header itself. With -fpch-deps its
    # dependency file names what the precompiled header's did, which clang's does automatically.
    listed = () if "-target" in step.command else ("-fpch-deps",)
    command = (*step.command[:flags], "-include", header, *listed, *step.command[flags:])
    return step._replace(inputs=(*step.inputs, f"{header}.gch"), command=command)
