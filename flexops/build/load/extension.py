"""``flexops.load``: what ``torch.utils.cpp_extension.load`` does, keyed by content, faster, and
safe to interrupt.

A source, a header that it reaches, a flag, the compiler, torch or Python changed: built again.
Nothing changed: loaded from the cache, with no subprocess, no lock and no write. The same name may
be loaded again in one process after an edit, and is the new code.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib.machinery
import importlib.util
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, get_args

from ... import _fork, toolchain, trust
from ..._warning import warn
from ...errors import CacheError, CompileError, FlexopsError, NativeUnavailableError, ToolchainError
from ...settings import DeviceCompiler, Settings
from ..plan.extension_plan import (
    SUFFIXES,
    PythonBuild,
    Request,
    arguments,
    is_cuda,
    listed,
    plan_extension,
)
from ..plan.plan import BuildPlan
from ..store.cache import BuildCache, Entry, replace_file, replacing
from ..store.entry import cannot_run
from ..store.manifest import verify
from .loader import open_cache

if TYPE_CHECKING:
    from ...compute_capability import Architecture
    from ..compile.ninja import Progress
    from ..plan.program import Program
    from .extension_nvrtc import Prepared


class ExtensionBuildError(CompileError, RuntimeError):
    """A user's extension does not compile. A ``RuntimeError`` too, because that is what torch
    raises here."""


class SourceNotFoundError(FlexopsError, FileNotFoundError):
    """A source that ``load`` was given is missing."""


class ExtensionImportError(FlexopsError, ImportError):
    """A module was built and cannot be opened: it needs a symbol that nothing defines, or a library
    that is not found, or an earlier build of it has registered the same."""


class ExtensionOpenError(FlexopsError, OSError):
    """The same for a plain library: torch raises an ``OSError`` there."""


class PathError(FlexopsError, ValueError):
    """A path that flexops was given and that no build can use."""


_P = ParamSpec("_P")
_T = TypeVar("_T")
# CPython looks for PyInit_ and so many characters; a file name has at most 255 bytes
_LONGEST_NAME = 200
_lock = _fork.Lock()
_modules: dict[tuple[str, str], ModuleType] = {}
_numbers = itertools.count()
# path of each library opened -> the device code that it asks for
_given: dict[str, tuple[Program, ...]] = {}
# path of each library opened by this process -> key of what it was then
_opened: dict[str, str] = {}


def explained(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Lets what fails in a process that may open no more files say so, whatever failed first: an
    import, the cache, a tool."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except (OSError, ImportError, FlexopsError) as error:
            reason = os.strerror(errno.EMFILE)
            if reason not in str(error) and not _no_descriptor():
                raise
            raise FlexopsError(
                f"no file can be opened: {reason}",
                required="some dozens: for sources, the cache, the compiler's pipes and locks",
                fix="ulimit -n 1024, or close files",
            ) from error

    return call


def _no_descriptor() -> bool:
    """Whether this process has no file descriptor left. Imports nothing, as that would take one."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


@explained
def load(
    name: str,
    sources: str | Path | Sequence[str | Path],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str | Path] | None = None,
    build_directory: str | Path | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,
    device_compiler: Literal["auto", "nvcc", "nvrtc"] | None = None,
) -> ModuleType | str:
    """Compile C++ and CUDA sources, unless that has been done before, and load the result. A
    drop-in for torch's function of this name.

    Args:
        name: of the extension; for a Python module it must be the one that
            ``PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)`` is to get.
        sources: paths of ``.cpp`` and ``.cu`` files; relative ones are relative to the working
            directory.
        extra_cflags, extra_cuda_cflags, extra_ldflags: more arguments for the C++ compiler, nvcc
            (or hipcc) and the linker.
        extra_sycl_cflags, with_sycl: taken for compatibility; SYCL is not supported.
        extra_include_paths: directories for headers, whose edits are noticed too.
        build_directory: a directory that gets a copy of the result, from which it is then loaded.
            The work itself is done in the cache.
        verbose: show every command on standard error.
        with_cuda: use CUDA's headers and libraries; by default if there is a ``.cu`` among the
            sources.
        is_python_module: import the result as a Python module; otherwise it is opened as a plain
            library, whose operators then are in ``torch.ops``.
        is_standalone: build an executable; needs ``is_python_module=False``.
        keep_intermediates: keep compiled objects in the cache, so that an edit of one of several
            sources compiles that one only.
        device_compiler: what compiles ``.cu`` sources: ``nvcc``, ``nvrtc`` (without nvcc:
            docs/splitting.md says what it takes), or ``auto``: nvrtc what it takes, nvcc the rest,
            and what has a ``build_directory``. By default what ``FLEXOPS_DEVICE_COMPILER`` says.

    Returns:
        The module; or the path of the opened library; or, if ``is_standalone``, the path of the
        executable.

    Raises:
        ExtensionBuildError: it does not compile; says the first real error, its cause, what to do
            and where the log is.
        ExtensionImportError, ExtensionOpenError: it compiles, but needs a symbol (named as it was
            written) or a library that is missing.
        SourceNotFoundError: a source is missing.
        ToolchainError: a compiler or toolkit is missing.
    """
    check_request(name, is_python_module, is_standalone, with_sycl or bool(extra_sycl_cflags))
    given = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    if not isinstance(given, Sequence) or not all(
        isinstance(one, (str, os.PathLike)) for one in given
    ):
        raise TypeError(
            f"extension {name}: sources must be a path, or a list of paths, got {sources!r}"
        )
    paths = tuple(map(Path, absolute(given)))
    cflags = arguments("extra_cflags", extra_cflags)
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ValueError(f"extension {name}: the source {path} is listed twice")
        if path.suffix not in SUFFIXES and not any(str(f).startswith("-x") for f in cflags):
            raise ValueError(
                f"extension {name}: {path} has no name of a C++ or CUDA source, such as"
                f" {path.stem}.cpp or {path.stem}.cu"
            )
        if not path.is_file():
            raise SourceNotFoundError(
                f"extension {name}: there is no source {path}",
                required="paths relative to the working directory, or absolute ones",
            )
    if not paths:
        raise ValueError(f"extension {name}: at least one source is required")
    request = Request(
        name=name,
        sources=paths,
        cflags=cflags,
        cuda_cflags=arguments("extra_cuda_cflags", extra_cuda_cflags),
        ldflags=arguments("extra_ldflags", extra_ldflags),
        include_dirs=absolute(
            [path.strip() for path in listed("extra_include_paths", extra_include_paths)]
        ),
        with_cuda=(
            any(is_cuda(str(path), toolchain.torch_build()) for path in paths)
            if with_cuda is None
            else with_cuda
        ),
        is_python_module=is_python_module,
        is_standalone=is_standalone,
        keep_objects=keep_intermediates,
        device_compiler=device_compiler or "",
    )
    return load_request(request, build_directory=build_directory, verbose=verbose)


def load_request(
    request: Request,
    *,
    build_directory: str | Path | None = None,
    verbose: bool = False,
    precompile: bool = False,
) -> ModuleType | str:
    """Have what was asked for, from the cache or built now, and load it. ``precompile``: torch's
    headers first, whatever that takes."""
    if not isinstance(build_directory, (str, os.PathLike, NoneType)):
        raise TypeError(
            f"extension {request.name}: build_directory must be a path, got {build_directory!r}"
        )
    for flag in (*request.cflags, *request.cuda_cflags, *request.ldflags):
        if not _is_writable(flag.replace("\t", " ")):
            raise ValueError(
                f"extension {request.name}: the argument {flag!a} has a newline or what is not"
                " UTF-8, which no build file can hold"
            )
    for text_name, text in request.texts:
        if odd := next((character for character in text if "\ud800" <= character <= "\udfff"), ""):
            raise ValueError(
                f"extension {request.name}: {text_name} has {odd!a}, which is not UTF-8"
            )
    try:
        return _load_request(request, build_directory, verbose, precompile)
    except FileNotFoundError as error:
        gone = next((path for path in request.sources if not path.is_file()), None)
        if gone is None or isinstance(error, FlexopsError):
            raise
        what = f"extension {request.name}: the source {gone} was deleted while it was loaded"
        raise SourceNotFoundError(what, fix="put it back, and run it again") from error


def _load_request(
    request: Request, build_directory: str | Path | None, verbose: bool, precompile: bool
) -> ModuleType | str:
    # not the settings of this process's start: people set TORCH_CUDA_ARCH_LIST between two loads
    chosen = Settings.from_environ(os.environ)
    if verbose:
        chosen = chosen._replace(log="debug")
    if precompile:
        chosen = chosen._replace(pch="1")
    if (
        build_directory
        and _asked(request, chosen) == "auto"
        and toolchain.discover(chosen, device="cuda").cuda
    ):
        # a library that lies elsewhere has to have its kernels in it
        request = request._replace(device_compiler="nvcc")
    entry, programs = obtain(request, chosen)
    try:
        return _loaded(request, chosen, entry, programs, build_directory)
    except (ExtensionImportError, ExtensionOpenError) as error:
        if (
            not programs
            or _asked(request, chosen) != "auto"
            or toolchain.discover(chosen, device="cuda").cuda is None
        ):
            raise
        # device code that the host's half declares and calls, say, for which nvcc has a body
        _say_nvcc(request, error, chosen)
    entry, programs = obtain(request._replace(device_compiler="nvcc"), chosen)
    return _loaded(request, chosen, entry, programs, build_directory)


def _loaded(
    request: Request,
    chosen: Settings,
    entry: Entry,
    programs: tuple[Program, ...],
    build_directory: str | Path | None,
) -> ModuleType | str:
    if chosen.record:
        from . import record

        record.extension(entry.manifest)
    path = entry.library
    if build_directory:
        directory = Path(*absolute([build_directory]))
        path = _installed(entry, directory, shared=chosen.cache_shared, texts=request.texts)
    if request.is_standalone:
        return str(path)
    with _lock.held():
        if _opened.get(str(path), entry.manifest.key) != entry.manifest.key:
            path = entry.library  # the linker gives the old library for a path that it has open
        if programs and _given.setdefault(str(path), programs) != programs:
            path = _copied(path, programs)  # one that is open has the kernels of another text
        _refuse_second_registration(request, path)
        _opened[str(path)] = entry.manifest.key
        try:
            fresh = (request.name, str(path)) not in _modules
            module: ModuleType | str = (
                _imported(request.name, path) if request.is_python_module else _opened_library(path)
            )
            if programs and fresh:
                from . import extension_nvrtc

                extension_nvrtc.attach(path, programs)
            return module
        except (ImportError, OSError) as error:
            if refusal := cannot_run(path):
                raise CacheError(
                    f"extension {request.name} cannot be loaded",
                    found=refusal.reason,
                    fix=refusal.fix,
                ) from error
            from ..compile.diagnose import load_trouble, with_cause

            if found := load_trouble(with_cause(error)):
                kind = (
                    ExtensionImportError if isinstance(error, ImportError) else ExtensionOpenError
                )
                raise kind(
                    f"extension {request.name} was built, but {found.cause}",
                    found=found.error,
                    fix=found.fix,
                ) from error
            raise


def _refuse_second_registration(request: Request, path: Path) -> None:
    """An edited library that registers operators again: torch would end the process."""
    before = [one for one in _opened if os.path.basename(one) == path.name and one != str(path)]
    if not before or str(path) in _opened:
        return
    earlier = {name for one in before for name in _registered(one)}
    if twice := sorted(earlier & _registered(path)):
        kind = ExtensionImportError if request.is_python_module else ExtensionOpenError
        raise kind(
            f"extension {request.name} was built, and this process has an earlier build of it open",
            found=f"TORCH_LIBRARY of {', '.join(twice)}, which a process registers once",
            fix="restart the process",
        )


def _registered(library: str | Path) -> set[str]:
    """The namespaces that a library registers with torch, from the names of its variables."""
    try:
        content = Path(library).read_bytes()
    except OSError:  # removed from the cache since
        return set()
    found = re.findall(rb"TORCH_LIBRARY_(?:FRAGMENT_)?static_init_(\w+?)(?:_\d+)?\0", content)
    return {name.decode() for name in found}


def obtain(request: Request, chosen: Settings) -> tuple[Entry, tuple[Program, ...]]:
    """The cache entry of an extension, built if it is missing; and the device code that its
    library asks for, if NVRTC compiles that."""
    cache = open_cache(chosen)
    tools = toolchain.discover(chosen, device="cuda" if request.with_cuda else "cpu")
    asked = _asked(request, chosen)
    torch = tools.torch
    if request.with_cuda and tools.cuda and torch and torch.cuda:
        from ...toolchain import runtime_headers

        tools = tools._replace(cuda=runtime_headers.complete(tools.cuda, chosen, torch))
    device_code = any(map(is_cuda, request.inputs)) or tools.cuda is None
    if (
        not (request.with_cuda and device_code)
        or asked == "nvcc"
        or torch is None
        or not torch.cuda
    ):
        return _built(request, tools, chosen, cache), ()
    if asked == "nvrtc" or tools.cuda is None:
        prepared = _without_nvcc(request, tools, chosen)
        return (
            _by_nvrtc(prepared, chosen, cache)
            if prepared
            else (_built(request, tools, chosen, cache), ())
        )
    return _by_either(request, tools, chosen, cache)


def _by_either(
    request: Request, tools: toolchain.model.Toolchain, chosen: Settings, cache: BuildCache
) -> tuple[Entry, tuple[Program, ...]]:
    """NVRTC compiles what it surely compiles to what nvcc would; nvcc the rest, which one line
    tells. What nvcc has compiled stays so while it is as it was."""
    plan, _ = _planned(request, tools, chosen)
    if entry := cache.lookup(plan) or cache.fetch(plan):
        return entry, ()
    try:
        if (
            prepared := _without_nvcc(request._replace(device_compiler="nvrtc"), tools, chosen)
        ) is None:
            raise ToolchainError("torch's own headers of CUDA's runtime are missing")
        _require_nvrtc(chosen)
        return _by_nvrtc(prepared, chosen, cache)
    except (ToolchainError, CompileError) as problem:
        _say_nvcc(request, problem, chosen)
    return _built(request, tools, chosen, cache), ()


def _require_nvrtc(chosen: Settings) -> None:
    """Raises ``ToolchainError`` where NVRTC is missing, or not for the architectures that are
    asked for."""
    if re.search(r"\df\b", chosen.arch_list or ""):
        raise ToolchainError(
            f"TORCH_CUDA_ARCH_LIST={chosen.arch_list} has instructions of one family of GPUs"
        )
    if toolchain.device_compiler(chosen).value is None:
        raise ToolchainError("there is no NVRTC")


def _say_nvcc(request: Request, problem: FlexopsError, chosen: Settings) -> None:
    from ..compile.progress import say

    reason = (
        problem.what
        if isinstance(problem, ToolchainError) or not problem.found
        else problem.found.partition("\n")[0]
    )
    say(f"nvcc compiles extension {request.name}, NVRTC does not: {reason}", chosen.log)


def _by_nvrtc(
    prepared: Prepared, chosen: Settings, cache: BuildCache
) -> tuple[Entry, tuple[Program, ...]]:
    from . import extension_nvrtc

    entry = _built(prepared.request, prepared.tools, chosen, cache)
    programs = extension_nvrtc.wanted_of(prepared.programs, entry.library)
    try:
        extension_nvrtc.compile_kernels(programs, cache, chosen)
    except CompileError as error:
        raise _of_extension(error) from error
    return entry, programs


def _asked(request: Request, chosen: Settings) -> str:
    asked = request.device_compiler or chosen.device_compiler
    if asked not in get_args(DeviceCompiler):
        raise ValueError(
            f"extension {request.name}: device_compiler is one of"
            f" {', '.join(get_args(DeviceCompiler))}, not {asked!r}"
        )
    return asked


def _without_nvcc(
    request: Request, tools: toolchain.model.Toolchain, chosen: Settings
) -> Prepared | None:
    """The request as it is built without nvcc; None if there is nothing to build it with.

    Raises:
        ToolchainError: a source or an argument is nvcc's.
    """
    asked, torch = _asked(request, chosen), tools.torch
    if asked == "nvcc" or torch is None or not torch.cuda:
        return None
    from ...toolchain import runtime_headers
    from . import extension_nvrtc

    cuda = runtime_headers.find(chosen, torch) or tools.cuda  # torch's own match it, and are whole
    lacking = toolchain.missing(tools, "cuda") if tools.cuda is None else None
    if cuda is None:
        return None
    try:
        return extension_nvrtc.prepare(request, tools, torch, cuda, chosen.arch_list or "")
    except ToolchainError as problem:
        if lacking is None:
            raise
        found = f"no nvcc; {problem.found}" if problem.found else "no nvcc"
        raise ToolchainError(
            problem.what, found=found, required=problem.required, fix=lacking.fix
        ) from None


def _of_extension(error: CompileError) -> ExtensionBuildError:
    return ExtensionBuildError(
        error.what, found=error.found, required=error.required, fix=error.fix, log=error.log
    )


def _copied(path: Path, programs: tuple[Program, ...]) -> Path:
    """A copy of a library, which the process opens beside the first: its host code is the same, its
    kernels are not."""
    known = next(
        (
            Path(copy)
            for copy, given in _given.items()
            if given == programs and os.path.basename(copy) == path.name
        ),
        None,
    )
    if known is None:
        known = Path(tempfile.mkdtemp(prefix="flexops-loaded-")) / path.name
        atexit.register(shutil.rmtree, known.parent, ignore_errors=True)
        shutil.copy2(path, known)
        _given[str(known)] = programs
    return known


def _built(
    request: Request, tools: toolchain.model.Toolchain, chosen: Settings, cache: BuildCache
) -> Entry:
    plan, notes = _planned(request, tools, chosen)
    if entry := cache.lookup(plan) or cache.fetch(plan):
        return entry
    if not chosen.jit:
        raise NativeUnavailableError(
            f"extension {request.name} is not in the cache, and FLEXOPS_JIT=0 rules out compiling",
            found=str(cache.root),
            fix="unset FLEXOPS_JIT",
        )
    from ..compile.extension_build import build

    for note in notes if chosen.log != "quiet" else ():
        warn(f"extension {request.name}: {note}")
    with _shown(plan.name, chosen) as progress:
        result = build(request, plan, tools, python_build(), cache, chosen, progress)
        if isinstance(result.error, CompileError):
            raise _of_extension(result.error)
        entry = result.require()
    if chosen.log == "debug":
        _show_warnings(entry)
    return entry


def absolute(paths: Sequence[str | Path] | None) -> tuple[str, ...]:
    """Paths as a compiler that runs elsewhere finds them.

    Raises:
        PathError: a name that cannot stand in a build file, or a relative one in a working
            directory that has been removed.
    """
    found = []
    for path in paths or ():
        text = str(path)
        if not _is_writable(text):
            raise PathError(
                f"the path {text!a} cannot be used in a build",
                required="a name in UTF-8 without newlines and tabs",
                fix="rename it",
            )
        try:
            found.append(os.path.abspath(text))
        except FileNotFoundError:
            gone = "no working directory: it has been removed"
            raise PathError(
                f"the path {text} is relative to a directory that is gone",
                found=gone,
                required="an absolute path",
                fix="cd elsewhere",
            ) from None
    return tuple(found)


def _is_writable(text: str) -> bool:
    """Whether a text can stand in a build file: without control characters, and with nothing that
    is not UTF-8 (which Python holds as surrogates)."""
    return all(
        character >= " " and character != "\x7f" and not "\ud800" <= character <= "\udfff"
        for character in text
    )


def python_build() -> PythonBuild:
    """What an extension must know of this Python."""
    version, prefix = sys.version_info, sys.base_prefix
    include = f"{prefix}/include/python{version[0]}.{version[1]}{getattr(sys, 'abiflags', '')}"
    if not os.path.isfile(f"{include}/Python.h"):
        import sysconfig  # takes a millisecond, so only where the usual place is not the place

        include = sysconfig.get_path("include")
    identity = (
        f"{sys.implementation.cache_tag} {'.'.join(map(str, version[:3]))}"
        f" {importlib.machinery.EXTENSION_SUFFIXES[0]}"
    )
    # here, since a start that finds torch broken comes by this module, too
    from ..._torch import pybind_abi

    return PythonBuild(
        identity,
        Path(include),
        tuple(f'-D{name}="{value}"' for name, value in pybind_abi().items()),
    )


def _planned(
    request: Request, tools: toolchain.model.Toolchain, chosen: Settings
) -> tuple[BuildPlan, tuple[str, ...]]:
    """The plan, and how it differs from what was asked for."""
    if request.with_cuda and tools.torch and tools.torch.hip:
        from ..plan.extension_hip import plan_hip_extension

        return (
            plan_hip_extension(
                request,
                tools,
                python_build(),
                architectures=toolchain.gpus.gfx_targets(chosen.rocm_arch_list),
            ),
            (),
        )
    architectures: tuple[Architecture, ...] = ()
    notes = tuple(note for note in tools.notes if note.startswith("CXX="))
    if request.with_cuda and tools.cuda:
        choice = toolchain.resolve_architectures(
            chosen, tools.cuda, detected=toolchain.local_capabilities()
        )
        architectures, notes = choice.architectures, (*notes, *choice.notes)
    return plan_extension(request, tools, python_build(), architectures=architectures), notes


def check_request(name: str, is_python_module: bool, is_standalone: bool, sycl: bool) -> None:
    if is_python_module and is_standalone:
        raise ValueError("is_python_module and is_standalone exclude each other")
    if not isinstance(name, str):
        raise TypeError(f"an extension's name must be text, got {name!r}")
    if len(name.encode(errors="replace")) > _LONGEST_NAME:
        what = f"{name[:20]!r}... cannot name an extension: it has {len(name)} characters"
        raise ValueError(
            f"{what}, and {_LONGEST_NAME} is the most that CPython and file names have room for"
        )
    fit = not is_python_module or (name.isidentifier() and name.isascii())
    if (
        not _is_writable(name)
        or not name
        or os.sep in name
        or name.startswith((".", "-"))
        or not fit
    ):
        raise ValueError(
            f"{name!r} cannot name an extension: it becomes part of C++ code and of file names"
        )
    if sycl:
        raise ToolchainError(
            "flexops.load does not build SYCL sources", fix="torch.utils.cpp_extension.load does"
        )


@contextlib.contextmanager
def _shown(name: str, chosen: Settings) -> Iterator[Progress | None]:
    if chosen.log == "debug":
        yield lambda finished, total, step: print(f"[{finished}/{total}] {step}", file=sys.stderr)
    else:
        from ..compile.progress import shown

        with shown(name, chosen.log) as progress:
            yield progress


def _show_warnings(entry: Entry) -> None:
    """What the compilers said; the commands have been shown while they ran."""
    log = entry.directory / "build.log"
    if not log.exists():  # a signed entry from elsewhere has none
        return
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith(("[", "ninja: ")):
            print(line, file=sys.stderr)


def _installed(
    entry: Entry, directory: Path, *, shared: bool, texts: tuple[tuple[str, str], ...] = ()
) -> Path:
    """The result's copy in the user's build directory; it and what is beside it are renewed only if
    they are of another build.

    Args:
        shared: every user who can write to the directory is trusted.
        texts: name and content of sources that were given as text, which belong there, too.
    """
    target = directory / entry.manifest.library
    try:
        if not shared and (problem := trust.path_problem(str(directory), passage=True)):
            required = "a directory that only you can write to, or FLEXOPS_CACHE_SHARED=1"
            fix = "name another one, or none"
            raise CacheError(
                "build_directory is not safe to load from",
                found=problem,
                required=required,
                fix=fix,
            )
        if verify(directory, entry.manifest, own=not shared) is None:
            return target
        trust.make_directory(str(directory))
        for item in (entry.directory / name for name in entry.files):
            if item.is_file() and item != entry.library:
                _copy(item, directory / item.name)
        for name, text in texts:  # as they were given: an entry from elsewhere may have others
            replace_file(directory / name, text)
        _copy(entry.library, target)  # a library that a process has open must not change under it
    except OSError as error:
        raise CacheError(
            "build_directory cannot be written",
            found=f"{directory}: {error.strerror}",
            fix="name another one, or none",
        ) from error
    return target


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        shutil.copy2(source, temporary)


def _imported(name: str, path: Path) -> ModuleType:
    """The module in a library.

    pybind11 from 3.0 keeps the modules of a process by their specs' names alone and would give the
    first of that name for every other library. So each library gets a spec name of its own: Python
    looks for ``PyInit_`` with the part after the last dot, which is the extension's name.
    """
    known = _modules.get((name, str(path)))
    if known is not None:
        return known
    unique = f"{__package__}.loaded_{next(_numbers)}.{name}"
    loader = importlib.machinery.ExtensionFileLoader(unique, str(path))
    spec = importlib.util.spec_from_file_location(unique, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # before the module's own code runs, whose classes take it for their __module__
    module.__name__ = name
    loader.exec_module(module)
    _modules[name, str(path)] = module
    return module


def _opened_library(path: Path) -> str:
    import torch

    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call, unused-ignore]
    return str(path)
