"""Device code: one kernel for one architecture is one artifact, a cubin (or PTX), compiled by NVRTC and kept in the cache as libraries are.

A family's library for CUDA holds no device code. It holds the names of the kernels that its launchers name (``csrc/common/launch.h``), and
``names_in`` reads them from its file: that is the only list of instantiations. Which header a kernel is defined in, the headers' text says.

Kernels compile in child processes (``nvrtc_worker.py``), several at once, each with a time limit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from .. import _fork
from ..compute_capability import Architecture, ComputeCapability
from ..errors import CompileError, FlexopsError
from . import cache_key, counters, includes
from .cache import BuildCache, Entry
from .cache_key import Digests
from .manifest import Manifest, file_crc32
from .spec import OpSpec

if TYPE_CHECKING:
    from ..toolchain.nvrtc import DeviceCompiler
    from ..toolchain.resources import Resources
    from . import election

MIB = 2**20
STEP_BYTES = 600 * MIB
"""A bound on what one NVRTC takes: three times what the largest kernel of ours took."""

# As g++ writes a function template's argument, and as compilers mangle the type that has it; see kernel_name() in csrc/common/launch.h.
_NAME = re.compile(rb"kernel_name\(\) \[with auto function = ([^\]\0]+)\]|(N7flexops6detail6NameOfI\w+E)\0")
_RARE_NAME = re.compile(rb"rare_name\(\) \[with auto function = ([^\]\0]+)\]|(N7flexops6detail10RareNameOfI\w+E)\0")
_HOPPER = ComputeCapability(9, 0, "a")
Roots = tuple[tuple[str, Path], ...]
_WORKER = Path(__file__).resolve().with_name("nvrtc_worker.py")


class KernelPlan(NamedTuple):
    """One kernel for one architecture: everything that decides what its code will be.

    Attributes:
        name: the cache directory's: ``rope-sm_90-`` and a digest of the expression.
        key: of the entry.
        expression: the kernel as C++ names it: ``flexops::rope::rotate<float>``.
        source: the whole program: includes.
        architecture: machine code or PTX, not both.
        compiler: what compiles it.
        roots: what includes are relative to, with their names.
        files: the headers that it reaches, relocatable name -> sha256.
        options: of this kernel alone, as NVRTC spells them.
    """

    name: str
    key: str
    expression: str
    source: str
    architecture: Architecture
    compiler: DeviceCompiler
    roots: Roots
    files: Digests
    options: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        return "kernel.cubin" if self.architecture.sass else "kernel.ptx"


class KernelResult(NamedTuple):
    """What came of one plan; as ``builder.Result``."""

    plan: KernelPlan
    entry: Entry | None = None
    error: FlexopsError | None = None
    seconds: float = 0.0
    cached: bool = False

    def require(self) -> Entry:
        if self.entry is None:
            raise self.error or CompileError(f"{self.plan.expression} could not be compiled")
        return self.entry


def names_in(library: Path) -> list[str]:
    """The kernels that a library launches, as C++ names them, sorted; without those that are compiled at their first launch only (``rare_kernel``)."""
    return sorted({expression_of(match[0]) for match in _NAME.finditer(library.read_bytes())})


def rare_names_in(library: Path) -> list[str]:
    """The others: kernels of dtypes, shapes and options that few calls have."""
    content = library.read_bytes()
    return sorted({expression_of(match[0]) for match in _RARE_NAME.finditer(content)} - {expression_of(match[0]) for match in _NAME.finditer(content)})


def expression_of(name: bytes) -> str:
    """A kernel's expression from the name that its library has for it.

    Raises:
        ValueError: it is no such name.
    """
    match = _NAME.search(name + b"\0") or _RARE_NAME.search(name + b"\0")
    if match is None:
        raise ValueError(f"{name!r} is no kernel's name")
    return match[1].decode() if match[1] else _demangled(match[2].decode())


@functools.cache
def _demangled(mangled: str) -> str:
    """The function that a ``NameOf`` is of: ``flexops::detail::NameOf<&(void flexops::rope::rotate<float>(flexops::rope::Params))>``.

    The ABI's own demangler tells, in the libstdc++ that torch brings. Of a function that is no template's it gives the name alone.
    """
    import ctypes

    runtime = ctypes.CDLL("libstdc++.so.6")
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    made = runtime.__cxa_demangle(mangled.encode(), None, None, None)
    text = ctypes.string_at(made).decode() if made else ""
    ctypes.CDLL(None).free(ctypes.c_void_p(made))
    name = text.partition("NameOf<&")[2].removesuffix(">")
    if not name:
        raise ValueError(f"{mangled} is no kernel's name")
    if not name.startswith("("):
        return name
    name = name[1:-1].removeprefix("void ")
    depth = 0
    for position in range(len(name) - 1, -1, -1):  # the arguments' types are the last parenthesis
        depth += {")": 1, "(": -1}.get(name[position], 0)
        if depth == 0:
            return name[:position]
    raise ValueError(f"{mangled} is no kernel's name")


def fitted(expression: str, architecture: Architecture) -> Architecture | None:
    """The architecture that a kernel is compiled for, to run where ``architecture`` does; None if it does not run there.

    Kernels called ``..._hopper`` use instructions that are Hopper's own, which 9.0a is the name for.
    """
    if not expression.partition("<")[0].endswith("_hopper"):
        return architecture
    return architecture._replace(capability=_HOPPER, ptx=False) if architecture.sass and architecture.capability.base == _HOPPER.base else None


def ahead(names: Sequence[str], architecture: Architecture) -> list[str]:
    """Those of a library's kernels that builds ahead of time make for an architecture.

    On Hopper, ``name_hopper<T, a, b, ...>`` takes the place of ``name<T, a, b, ...>`` in all but odd calls, whose kernel is compiled when it is launched.
    """
    fitting = [name for name in names if fitted(name, architecture)]
    replaced = {_tiling(name) for name in fitting if "_hopper<" in name}
    return [name for name in fitting if "_hopper<" in name or _tiling(name) not in replaced]


def _tiling(expression: str) -> tuple[str, ...]:
    kernel, _, arguments = expression.partition("<")
    return kernel.removesuffix("_hopper"), *arguments.split(", ")[:3]


def artifact_name(family: str, architecture: str, expression: str) -> str:
    """The directory of a kernel's code: ``architecture`` is ``sm_90`` or ``compute_90``."""
    return f"{family}-{architecture}-{hashlib.sha256(expression.encode()).hexdigest()[:12]}"


def single(architectures: Sequence[Architecture]) -> Iterator[Architecture]:
    """Each architecture's machine code and its PTX as architectures of their own."""
    for one in architectures:
        if one.sass:
            yield one._replace(ptx=False)
        if one.ptx:
            yield one._replace(sass=False)


def plan_kernel(
    family: str,
    sources: Sequence[str],
    expression: str,
    architecture: Architecture,
    compiler: DeviceCompiler,
    csrc: Path,
    *,
    roots: Roots = (),
    text: str = "",
) -> KernelPlan:
    """The plan of one kernel.

    Args:
        sources: the family's launchers, relative to the first root: the kernel is in a header that one of them reaches.
        architecture: where it shall run; see ``fitted``.
        csrc: flexops' sources.
        roots: where includes are looked for, each with its name, if that is not ``csrc`` alone.
        text: what comes before the header in the program; see ``provider_texts``.

    Raises:
        CompileError: no such header defines it.
    """
    namespace, _, kernel = expression.partition("<")[0].rpartition("::")
    architecture = fitted(expression, architecture) or architecture
    roots = roots or (("<csrc>", csrc),)
    header = _defining_header(tuple(sources), kernel, roots)
    if not header:
        raise CompileError(f"no header of {family} defines the kernel {expression}", found=", ".join(sources), fix="flexops doctor")
    source = text + f'#include "{header.partition(">/")[2]}"\n' + (f"using namespace {namespace};\n" if namespace else "")  # g++ writes a kernel's arguments so
    files = {name: cache_key.file_digest(_place(name, roots)) for name in (header, *_reached(header, roots))}
    capability = architecture.capability
    spelled = capability.sm if architecture.sass else capability.compute
    fields = [("kernel", expression), ("source", source), ("architecture", spelled), ("compiler", compiler.identity), ("options", " ".join(_OPTIONS))]
    key = cache_key.digest_fields([*fields, *sorted(files.items())])
    return KernelPlan(artifact_name(family, spelled, text + expression), key, expression, source, architecture, compiler, roots, files)


class TextKernel(NamedTuple):
    """A kernel in a source text of somebody's own, which may include our headers, and those of the directories ``include``.

    ``options`` are NVRTC's.
    """

    family: str
    text: str
    expression: str
    csrc: Path
    include: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def spec(self) -> OpSpec:
        """Where its artifacts are, and whose headers can have changed: flexops' own."""
        return OpSpec(self.family, files=())

    def name(self, architecture: str) -> str:
        return artifact_name(self.family, architecture, self._digest(self._reached()))

    def plan(self, architecture: Architecture, compiler: DeviceCompiler) -> KernelPlan:
        reached, roots = self._reached(), self._roots()
        files = {_name_under(path, roots): digest for path, digest in reached.items() if not os.path.isabs(_name_under(path, roots))}
        spelled = architecture.capability.sm if architecture.sass else architecture.capability.compute
        digest = self._digest(reached)
        fields = [("text", digest), ("architecture", spelled), ("compiler", compiler.identity), ("options", " ".join(_OPTIONS)), *sorted(files.items())]
        name, key = artifact_name(self.family, spelled, digest), cache_key.digest_fields(fields)
        return KernelPlan(name, key, self.expression, self.text, architecture, compiler, roots, files, self.options)

    def mend(self, _: ComputeCapability) -> str:
        return "unset FLEXOPS_JIT"

    def _roots(self) -> Roots:
        """The compiler itself looks where it runs for what stands in quotes."""
        own = ((f"<include {number}>", Path(path)) for number, path in enumerate((*self.include, os.getcwd())))
        return (*own, ("<csrc>", self.csrc))

    def _reached(self) -> Digests:
        return {path: cache_key.file_digest(path) for path in includes.own_headers(self.text, os.getcwd(), [str(root) for _, root in self._roots()])}

    def _digest(self, reached: Digests) -> str:
        """Of all but the compiler and the headers of this package: what is found under a name made of it is of this text, whoever compiled it."""
        own = [("header", digest) for path, digest in reached.items() if not path.startswith(f"{self.csrc}/")]
        return cache_key.digest_fields([("kernel", self.expression), ("source", self.text), ("options", "\0".join(self.options)), *own])


def obtain(
    plans: Sequence[KernelPlan], cache: BuildCache, *, jobs: int = 1, time_limit: float = 0.0, progress: Callable[[int, int, str], None] | None = None
) -> list[KernelResult]:
    """The code of the plans, in their order; what is missing is compiled, ``jobs`` at a time.

    Another process compiling the same is waited for.

    Args:
        time_limit: seconds for one kernel; 0 for none.

    Raises:
        CacheError: the cache cannot be written. Failed compiles are in the results.
    """
    found = [cache.read(plan.name, plan.key) for plan in plans]
    results: list[KernelResult | None] = [KernelResult(plan, entry, cached=True) if entry else None for plan, entry in zip(plans, found, strict=True)]
    todo = [number for number, result in enumerate(results) if result is None]
    if todo:
        cache.require_writable()
        _Pool(plans, results, todo, cache, time_limit, progress).run(min(jobs, len(todo)))
        with contextlib.suppress(FlexopsError):
            cache.prune(keep=tuple(result.entry.directory for result in results if result and result.entry))
    return [result or KernelResult(plan) for plan, result in zip(plans, results, strict=True)]


def kept_for(cache: BuildCache, family: str, names: Sequence[str]) -> dict[str, list[str]]:
    """The architectures for which a cache has the code of all these kernels, by the CUDA version that made it. Looks at manifests only."""
    wanted = set(names)
    hopper = str(_HOPPER)
    made: dict[tuple[str, str], set[str]] = {}
    for entry in cache.entries((f"{family}-sm_", f"{family}-compute_")):
        known = entry.manifest
        if known.kernel in wanted:
            made.setdefault((known.cuda_version, known.architectures[0]), set()).add(known.kernel)
    complete: dict[str, list[str]] = {}
    for (version, architecture), kernels in sorted(made.items()):
        one = Architecture(ComputeCapability.parse(architecture), sass=not architecture.startswith("compute_"))
        there = kernels | (made.get((version, hopper), set()) if one.capability.base == _HOPPER.base else set())
        if set(ahead(names, one)) <= there:
            complete.setdefault(version, []).append(architecture)
    return complete


def choose_jobs(resources: Resources, max_jobs: int | None) -> int:
    """How many compilers may run at once: bounded by processors, memory and the user."""
    return max(1, min(resources.cpus, resources.memory_bytes // STEP_BYTES, max_jobs or resources.cpus))


class _Pool:
    """Threads that share a queue of plans; each has a compiler of its own."""

    def __init__(
        self,
        plans: Sequence[KernelPlan],
        results: list[KernelResult | None],
        todo: list[int],
        cache: BuildCache,
        time_limit: float,
        progress: Callable[[int, int, str], None] | None,
    ) -> None:
        self.plans, self.results, self.cache, self.time_limit, self.progress = plans, results, cache, time_limit, progress
        self.total, self.done = len(todo), 0
        from . import election  # a start that compiles nothing does without

        self.ballot = election.between(cache)
        self.queue: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        for number in todo:
            self.queue.put((number, False))
        self.stopped = False
        self.failure: BaseException | None = None
        self.workers: list[_Worker] = []

    def run(self, jobs: int) -> None:
        if jobs == 1:
            self._one_thread()
            if self.failure:  # of a thread that is not the main one
                raise self.failure
            return
        threads = [threading.Thread(target=self._one_thread, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # in naps, so that Ctrl-C is heard
        except BaseException:
            self.stopped = True
            for worker in self.workers:
                worker.stop()
            raise
        if self.failure:
            raise self.failure

    def _one_thread(self) -> None:
        worker: _Worker | None = None
        try:
            while not self.stopped:
                try:
                    number, waits = self.queue.get_nowait()
                except queue.Empty:
                    return
                plan = self.plans[number]
                if worker is None or worker.compiler != plan.compiler or not worker.alive:
                    worker = _Worker(plan.compiler)
                    self.workers.append(worker)
                result = _single_flight(plan, self.cache, worker, self.time_limit, self.ballot, waits)
                if result is None:  # another machine makes it: what nobody makes comes first
                    self.queue.put((number, True))
                    continue
                self.results[number] = result
                self.done += 1
                if self.progress:
                    self.progress(self.done, self.total, plan.expression)
        except BaseException as error:
            self.failure, self.stopped = error, True
            if threading.current_thread() is threading.main_thread():
                raise
        finally:
            if worker:
                worker.stop()


def _single_flight(
    plan: KernelPlan, cache: BuildCache, worker: _Worker, time_limit: float, ballot: election.Election | None, waits: bool
) -> KernelResult | None:
    """One kernel's code; None if another machine makes it and this one is not to wait for that yet."""
    started = time.monotonic()
    remote = functools.partial(cache.fetch_key, plan.name, plan.key)
    with cache.lock(f"{plan.name}-{plan.key}"):
        entry = cache.read(plan.name, plan.key)
        if entry is None and waits and ballot:
            entry = ballot.receive(plan.name, plan.key, functools.partial(cache.read, plan.name, plan.key), remote)
        elif entry is None:
            entry = remote()
            turn = ballot.begin(plan.name, plan.key, remote) if ballot and entry is None else entry
            if turn == "wait":
                return None
            entry = None if isinstance(turn, str) else turn
        if entry:
            return KernelResult(plan, entry, cached=True)
        try:
            cache.require_signer()
            with cache.workspace() as workspace:
                entry = _publish(plan, workspace / "kernel", cache, worker, time_limit)
            if cache.remote:
                cache.remote.publish(cache, entry)
        except CompileError as error:
            return KernelResult(plan, error=error)
        finally:
            counters.count("compiler", cache.root, hit=entry is not None, size=entry.size if entry else 0, seconds=time.monotonic() - started)
            if ballot:
                ballot.deliver(plan.name, plan.key, entry)
    return KernelResult(plan, entry, seconds=time.monotonic() - started)


def _publish(plan: KernelPlan, directory: Path, cache: BuildCache, worker: _Worker, time_limit: float) -> Entry:
    directory.mkdir()
    code = directory / plan.file_name
    symbol, log = worker.compile(plan, code, time_limit)
    if any(digest != cache_key.file_digest(_place(name, plan.roots)) for name, digest in plan.files.items()):
        raise CompileError(f"the headers of {plan.expression} changed while it was being compiled", fix="run it again")
    manifest = Manifest(
        name=plan.name,
        key=plan.key,
        base=plan.key,
        device="cuda",
        library=plan.file_name,
        size=code.stat().st_size,
        crc32=file_crc32(code),
        torch_abi="",
        cuda_version=plan.compiler.version.major_minor,
        architectures=(str(plan.architecture),),
        files=plan.files,
        kernel=plan.expression,
        symbol=symbol,
        compiler=str(plan.compiler),
        resources=resources_in(log, symbol),
    )
    return cache.store(directory, manifest)


# ---- compilers -----------------------------------------------------------------------------------------------------------------------------

# 177: declared and not used, in instantiations that need it not. -v: what resources_in() reads.
_OPTIONS = ("--ptxas-options=-v", "--std=c++17", "-diag-suppress=177")
_RESOURCES = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "shared": r"(\d+) bytes smem",
    "barriers": r"used (\d+) barriers",
}
"""What ptxas tells of a kernel: registers of a thread; bytes of its stack and of what it spills there; bytes of a block's static shared memory."""


def resources_in(log: str, symbol: str) -> dict[str, int]:
    """What a kernel takes, from what ptxas said of it and of the others in its source; empty for PTX, of which ptxas says nothing."""
    _, there, own = log.partition(f"Compiling entry function '{symbol}'")
    if not there:
        return {}
    own = own.partition("Compiling entry function")[0]
    return {name: int(found[1]) if (found := re.search(pattern, own)) else 0 for name, pattern in _RESOURCES.items()}


class _Worker:
    """A child that compiles kernels, one after the other."""

    def __init__(self, compiler: DeviceCompiler) -> None:
        self.compiler = compiler
        self.alive = True
        self.process: subprocess.Popen[bytes] | None = None

    def compile(self, plan: KernelPlan, output: Path, time_limit: float) -> tuple[str, str]:
        """Write the plan's code to ``output``; returns the symbol under which the driver knows the kernel, and what the compiler said.

        Raises ``CompileError``.
        """
        answer = self._nvrtc(plan, output, time_limit) if self.compiler.kind == "nvrtc" else self._nvcc(plan, output, time_limit)
        if "error" in answer:
            raise _failed(plan, answer["error"], answer.get("log", ""))
        return answer["symbol"], answer.get("log", "")

    def stop(self) -> None:
        self.alive = False
        if self.process:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _nvrtc(self, plan: KernelPlan, output: Path, time_limit: float) -> dict[str, str]:
        spelled = plan.architecture.capability.sm if plan.architecture.sass else plan.architecture.capability.compute
        options = [f"--gpu-architecture={spelled}", *_OPTIONS, *plan.options, *(f"-I{path}" for _, path in plan.roots)]
        job = {"source": plan.source, "expression": plan.expression, "options": options, "ptx": not plan.architecture.sass, "output": str(output)}
        if self.process is None:
            command = [sys.executable, "-I", "-S", str(_WORKER), str(self.compiler.path), str(self.compiler.builtins)]
            with _fork.postponed():  # a child would hold the pipes open that Popen waits for
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            line = read_line(self.process.stdout, time_limit)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.stop()
            raise _failed(plan, f"it was not done after {time_limit:.0f} s", "", fix="FLEXOPS_COMPILE_TIMEOUT=0 waits for ever") from None
        if line:
            answer: dict[str, str] = json.loads(line)
            return answer
        returncode = self.process.wait()
        said = self.process.stderr.read().decode(errors="replace") if self.process.stderr else ""
        self.stop()
        return {"error": f"the compiler was ended by signal {-returncode}" if returncode < 0 else f"the compiler ended with status {returncode}", "log": said}

    def _nvcc(self, plan: KernelPlan, output: Path, time_limit: float) -> dict[str, str]:
        source = output.with_suffix(".cu")
        source.write_text(f"{plan.source}const void* flexops_kernel() {{ return reinterpret_cast<const void*>(&{plan.expression}); }}\n", encoding="utf-8")
        capability = plan.architecture.capability
        spelled = ["-cubin", f"-arch={capability.sm}"] if plan.architecture.sass else ["-ptx", f"-arch={capability.compute}"]
        include = [f"-I{path}" for _, path in plan.roots]
        command = [str(self.compiler.path), *spelled, *_OPTIONS, *plan.options, *include, "-o", str(output), str(source)]
        try:
            with _fork.postponed():
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            with process:
                try:
                    said, errors = process.communicate(timeout=time_limit or None)
                finally:
                    process.kill()
        except subprocess.TimeoutExpired:
            return {"error": f"it was not done after {time_limit:.0f} s"}
        finally:
            source.unlink(missing_ok=True)
        if process.returncode:
            return {"error": f"nvcc ended with status {process.returncode}", "log": said + errors}
        return {"symbol": _symbol_in(output), "log": said + errors}


def read_line(stream: IO[bytes], time_limit: float) -> bytes:
    """A line of a pipe that nothing else reads; raises ``TimeoutError``."""
    deadline, line = time.monotonic() + time_limit if time_limit else None, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], 0.2 if deadline is None else max(0.0, min(0.2, deadline - time.monotonic())))
        if ready:
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                return b""
            line += piece
        elif deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError
    return line


def _symbol_in(code: Path) -> str:
    """The one kernel's symbol in a cubin, or in PTX."""
    content = code.read_bytes()
    found = re.search(rb"\.text\.([\w$.]+)\0", content) or re.search(rb"\.entry ([\w$]+)", content)
    return found[1].decode() if found else ""


def _failed(plan: KernelPlan, error: str, log: str, fix: str = "flexops doctor") -> CompileError:
    lines = _error_lines(log)
    found = "\n         ".join([error, *(lines or log.splitlines()[-1:])][:12])
    where = f"{plan.architecture.capability.sm} with {plan.compiler} ({plan.compiler.path})"
    fix = "mend the line named above" if lines else fix
    return CompileError(f"the kernel {plan.expression} could not be compiled for {where}", found=found, fix=fix)


def _error_lines(log: str) -> list[str]:
    """The errors in what a compiler said, each with its line of the source and the caret under it."""
    blocks = re.split(r"\n\s*\n", log)
    return [line for block in blocks if re.match(r".*\berror\b", block) and "detected in the compilation" not in block for line in block.splitlines()[:5]]


# ---- headers -------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def _defining_header(sources: tuple[str, ...], kernel: str, roots: Roots) -> str:
    """The header that defines a kernel, by its relocatable name; "" if none does that the sources reach."""
    for source in sources:
        for header in _reached(f"{roots[0][0]}/{source}", roots):
            with open(_place(header, roots), encoding="utf-8") as stream:
                if re.search(rf"__global__\s[^;{{]*\b{kernel}\s*(?:<\w+>)?\(", stream.read()):
                    return header
    return ""


@functools.cache
def _reached(source: str, roots: Roots) -> tuple[str, ...]:
    path = _place(source, roots)
    with open(path, encoding="utf-8") as stream:
        found = includes.own_headers(stream.read(), os.path.dirname(path), [str(root) for _, root in roots])
    return tuple(_name_under(reached, roots) for reached in found)


def _name_under(path: str, roots: Roots) -> str:
    """``<root>/folder/name`` of a path, by the innermost root; the path itself if it is under none."""
    name, root = max((one for one in roots if path.startswith(f"{one[1]}/")), key=lambda one: len(str(one[1])), default=("", ""))
    return f"{name}{path[len(str(root)) :]}"


def _place(name: str, roots: Roots) -> str:
    """The path of a file called ``<root>/folder/name``."""
    anchor, _, rest = name.partition(">/")
    return next(os.path.join(root, rest) for known, root in roots if known == f"{anchor}>")
