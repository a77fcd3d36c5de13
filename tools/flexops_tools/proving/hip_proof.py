"""Families' libraries compiled for a row's AMD GPUs by the hipcc that is here, which need not be of
the row's ROCm: Debian's takes no AMD GPU and no ROCm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexops import targets
from flexops.build.compile import building
from flexops.build.compile.building import Result
from flexops.build.describe import catalog, layout
from flexops.build.describe.spec import OpSpec
from flexops.build.load import loader
from flexops.build.plan.hip import plan_hip_op
from flexops.errors import ToolchainError
from flexops.settings import Settings
from flexops.toolchain import discovery, resources, rocm

INSTALL = "sudo apt-get install hipcc libamdhip64-dev rocm-device-libs"
_DESCRIPTOR = re.compile(rb"(_Z\w+)\.kd\0")
"""Each kernel in a code object has a descriptor of this name, in its table of symbols."""


class Compiled(NamedTuple):
    """A family's library for one architecture: the kernels in it, by their mangled names; or why it
    does not compile."""

    family: str
    architecture: str
    compiler: str
    kernels: list[str]
    error: str


def prove(ids: Sequence[str], families: Sequence[str], chosen: Settings) -> list[Compiled]:
    """Compile flexops' own families for these rows' architectures, but those that have no kernels
    for AMD GPUs.

    Raises:
        ToolchainError: see ``build``.
    """
    specs = [spec for spec in catalog.select(tuple(families)) if spec.project.own and spec.hip]
    architectures = dict.fromkeys(
        one for name in ids for one in targets.load().find(name).capabilities
    )
    return [one for architecture in architectures for one in _compiled(specs, architecture, chosen)]


def _compiled(specs: Sequence[OpSpec], architecture: str, chosen: Settings) -> Iterator[Compiled]:
    compiler, results = build(specs, architecture, chosen)
    for spec, result in zip(specs, results, strict=True):
        held = kernels(result.entry.library.read_bytes()) if result.entry else []
        yield Compiled(
            spec.name,
            architecture,
            compiler,
            held,
            "" if held else str(result.error or "there is no kernel in its library"),
        )


def build(specs: Sequence[OpSpec], architecture: str, chosen: Settings) -> tuple[str, list[Result]]:
    """Compile and link these families as a ROCm build does.

    Returns:
        The compiler, ``hipcc 5.2`` say, and the libraries, which failed ones are among.

    Raises:
        ToolchainError: there is no hipcc here, or no torch, whose headers bindings read; any
            torch's do.
    """
    context = discovery.search_context(chosen)
    here, headers = rocm.find(context).usable, discovery.discover(chosen, device="cpu").torch
    if not here or headers is None:
        found = ", ".join(
            what for what, there in (("no hipcc", here), ("no torch", headers)) if not there
        )
        raise ToolchainError(
            f"nothing can be compiled for {architecture} here",
            found=found,
            required="hipcc and any torch",
            fix=INSTALL,
        )
    version = here[0].value.version
    tools = discovery.assemble(
        context, headers._replace(cuda=None, hip=str(version)), device="cuda"
    )
    plans = [
        plan_hip_op(
            spec,
            tools,
            csrc=layout.csrc_root(),
            resources=resources.detect(),
            max_jobs=chosen.max_jobs,
            architectures=(architecture,),
        )
        for spec in specs
    ]
    return f"hipcc {version.major_minor}", building.obtain(plans, loader.open_cache(chosen))


def kernels(library: bytes) -> list[str]:
    """The kernels in a library, by their mangled names."""
    return sorted({match.decode() for match in _DESCRIPTOR.findall(library)})
