"""The edge: looks at this machine, and hands what it sees to the pure choices in ``select``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..settings import Settings
from . import host as host_search
from . import memo, select, tools
from .compat import Rules, rules
from .context import Search, SearchContext
from .installed_torch import imported_torch, package_dirs, torch_build
from .model import CudaToolkit, Found, RocmToolkit, Toolchain, TorchBuild
from .select import Choice

if TYPE_CHECKING:
    from .nvrtc import DeviceCompiler

T = TypeVar("T")
Device = Literal["cpu", "cuda"]


def discover(settings: Settings, *, device: Device = "cuda") -> Toolchain:
    """Everything a build for that device type needs, chosen to go together.

    What is absent is None in the result; ``missing`` turns that into an error with its fix. With
    ``device="cpu"`` no GPU toolkit is looked for. Tools are asked for their version once; after
    that ``tools.json`` in the cache directory remembers, and nothing is run.
    """
    context = search_context(settings)
    torch = imported_torch() or torch_build(context.site_dirs, memo=context.memo)
    toolchain = assemble(context, torch, device=device)._replace(
        environment=settings.compiler_environment
    )
    if context.memo:
        context.memo.save()
    return toolchain


def device_compiler(settings: Settings) -> Choice[DeviceCompiler]:
    """What compiles flexops' own kernels here: the NVRTC that matches torch, else a matching nvcc;
    with what was rejected, and why.

    Where neither is there ``taken`` is None. Nothing is run unless it comes to nvcc.
    """
    from . import nvrtc

    context = search_context(settings)
    torch = imported_torch() or torch_build(context.site_dirs, memo=context.memo)
    libraries, known = nvrtc.find(context), rules(context.memo)
    choice = _joined(libraries, nvrtc.choose(libraries.usable, torch, known))
    if choice.taken is None:
        from . import cuda as cuda_search

        toolkits = cuda_search.find(context)
        other = _joined(toolkits, select.choose_cuda(toolkits.usable, torch, known))
        taken = (
            Found(nvrtc.from_nvcc(other.taken.value), other.taken.found_via)
            if other.taken
            else None
        )
        choice = Choice(
            taken, choice.rejected + other.rejected, other.notes, choice.tried + other.tried
        )
    if context.memo:
        context.memo.save()
    return choice


def search_context(settings: Settings) -> SearchContext:
    """What a search on this machine looks at."""
    conda = _text(settings.conda_prefix)
    prefixes = filter(None, (_text(settings.virtual_env), conda))
    return SearchContext(
        search_path=tuple(_absolute(settings.search_path)),
        site_dirs=package_dirs(prefixes),
        prefix=sys.prefix,
        conda_prefix=conda,
        cuda_home=_text(settings.cuda_home),
        rocm_home=_text(settings.rocm_home),
        cxx=settings.cxx,
        launcher=settings.launcher,
        image=settings.image,
        machine=os.uname().machine,
        memo=memo.for_cache_dir(str(settings.cache_dir)),
        listings={},
    )


def assemble(context: SearchContext, torch: TorchBuild | None, *, device: Device) -> Toolchain:
    """Search that context and choose. All of ``discover`` that does not depend on this process."""
    known = rules(context.memo)
    cuda, rocm = (
        _accelerators(context, torch, known)
        if device == "cuda"
        else (Choice[CudaToolkit](), Choice[RocmToolkit]())
    )
    compilers = host_search.find(context)
    wished = host_search.refused_wish(context, compilers)
    usable = () if wished else compilers.usable
    host = _joined(
        compilers,
        select.choose_host(usable, cuda.value, torch.cxx_standard if torch else 17, known),
    )
    ninja, launcher = _first(tools.find_ninja(context)), _first(tools.find_launcher(context))
    choices: dict[str, Choice[Any]] = {
        "host": host,
        "cuda": cuda,
        "rocm": rocm,
        "ninja": ninja,
        "launcher": launcher,
    }
    return Toolchain(
        torch=torch,
        host=host.value,
        cuda=cuda.value,
        rocm=rocm.value,
        ninja=ninja.value,
        launcher=launcher.value,
        found_via=tuple(
            (name, choice.taken.found_via) for name, choice in choices.items() if choice.taken
        ),
        rejected=tuple(one for choice in choices.values() for one in choice.rejected),
        notes=tuple(note for choice in choices.values() for note in choice.notes),
        image=context.image,
        machine=context.machine,
        wished=wished,
        tried=tuple(
            (name, where)
            for name, choice in choices.items()
            if choice.taken is None
            for where in choice.tried
        ),
    )


def _accelerators(
    context: SearchContext, torch: TorchBuild | None, known: Rules
) -> tuple[Choice[CudaToolkit], Choice[RocmToolkit]]:
    """CUDA for a CUDA torch, ROCm for a ROCm torch; a torch for neither takes what there is, CUDA
    first."""
    cuda, rocm = Choice[CudaToolkit](), Choice[RocmToolkit]()
    if torch is None or not torch.hip:
        from . import cuda as cuda_search

        toolkits = cuda_search.find(context)
        cuda = _joined(toolkits, select.choose_cuda(toolkits.usable, torch, known))
    if cuda.taken is None and (torch is None or not torch.cuda):
        from . import rocm as rocm_search

        installations = rocm_search.find(context)
        rocm = _joined(installations, select.choose_rocm(installations.usable, torch))
    return cuda, rocm


def _joined(search: Search[T], choice: Choice[T]) -> Choice[T]:
    return Choice(choice.taken, search.rejected + choice.rejected, choice.notes, search.tried)


def _first(search: Search[T]) -> Choice[T]:
    return Choice(search.usable[0] if search.usable else None, search.rejected, (), search.tried)


def _absolute(directories: Iterable[str]) -> Iterator[str]:
    """Each once; a relative entry of PATH is nothing to take a compiler from."""
    return (directory for directory in dict.fromkeys(directories) if os.path.isabs(directory))


def _text(path: Path | None) -> str | None:
    return str(path) if path else None
