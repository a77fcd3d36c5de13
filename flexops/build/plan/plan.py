"""A build is a value: ``OpSpec + Toolchain + architectures -> BuildPlan``, by pure functions.

Commands are written with absolute paths. For the cache key those paths are replaced by the names of
their anchors (``<csrc>``, ``<torch>``, ``<cuda>`` ...), so that a reinstalled toolkit or a moved
checkout of the same content has the same key.

NamedTuples, for the reason that ``toolchain/model.py`` gives; ``value._replace(...)`` makes a
changed copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...errors import ToolchainError
from ..describe import layout
from ..describe.spec import BINDING, DECLARATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...toolchain.model import HostCompiler, Toolchain, TorchBuild
    from ...toolchain.resources import Resources
    from ..describe.spec import DeviceType, OpSpec

MIB = 2**20
# Bounds on the peak memory of one compiler and its children, three times and more what g++ 12 and
# nvcc 13 took for the first ops (the stable ABI 130 MiB, a CPU kernel 150, a classic binding 560,
# nvcc 190 and 20 for each further thread), because other compilers and kernels take more.
HOST_STEP_BYTES = 900 * MIB
DEVICE_STEP_BYTES = 700 * MIB
TORCH_HEADER_STEP_BYTES = 3072 * MIB

ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
}
# libstdc++'s guard of what C++17 adds to <cmath> (Bessel functions and the like): a third of what a
# launcher takes to compile. nvcc includes it before every source and reads it five times: half a
# second of each. No kernel uses it; with another library the name means nothing.
WITHOUT_SPECIAL_FUNCTIONS = "-D_GLIBCXX_BITS_SPECFUN_H=1"

# Which torch's conventions bindings keep to: 2.11's, whatever torch is here; major in the highest
# byte, minor in the next. None of its headers is needed.
STABLE_ABI_FLAGS = ("-DFLEXOPS_STABLE_ABI=0x020b000000000000",)
BINDING_HEADER = "common/binding.h"  # what every binding includes first
# what every CPU kernel reaches, with nothing before it that could change it
INTRINSICS_HEADER = "common/cpu_intrinsics.h"
TORCH_LIBRARY, TORCH_STUB = "libtorch_cpu.so", "torch_stub.so"
RUNTIME_LIBRARY, RUNTIME_STUB = "libstdc++.so.6", "runtime_stub.so"
_RECIPE = Path(__file__).resolve()


class Step(NamedTuple):
    """One command of a build.

    Attributes:
        kind: ``host`` and ``device`` compile, ``link`` links, ``hipify`` translates sources and
            writes its own dependency file.
        output: the file it makes, relative to the build directory.
        inputs: what it reads: sources as absolute paths, earlier outputs as relative ones.
        command: argv without launcher, dependency flags and parallelism, so that none of these
            changes the key.
        memory_bytes: an upper bound on its resident memory.
        speed: further flags that make it faster and leave the result as it is; not part of the key.
        launched: whether the launcher (ccache) runs it.
        shared_header: what the source may as well include first, if many sources do so with the
            same flags: ``shared_headers.py`` has it read once for them all.
    """

    kind: Literal["host", "device", "link", "hipify"]
    output: str
    inputs: tuple[str, ...]
    command: tuple[str, ...]
    memory_bytes: int = HOST_STEP_BYTES
    speed: tuple[str, ...] = ()
    launched: bool = True
    shared_header: str = ""


class BuildPlan(NamedTuple):
    """Everything needed to build one library, and to name the result.

    Attributes:
        name: the cache directory's name, such as ``adam-cuda``.
        steps: in dependency order; the last one makes ``library``.
        library: file name of the result.
        sources: the files compiled, absolute.
        anchors: (path, name) pairs that make commands relocatable; longest path first.
        identity: labelled facts that decide whether two builds are the same: compilers, torch ABI,
            architectures.
        trusted_roots: directories whose headers are covered by ``identity`` and are not hashed.
        jobs: compile processes at once.
        nvcc_threads: threads within each nvcc.
        device, torch_abi, cuda_version, architectures, isa_levels: what the manifest records and
            the loader judges.
        texts: (file name, content) of sources that are no files yet: they are written into the
            build directory, where steps read them.
        keep_objects: keep each compiled object in the cache too, so that after an edit only what it
            reaches is compiled again.
        recipe: the files that decided on the commands; part of the key and recorded, so that the
            loader notices a change without planning anew.
        libraries: what the linker is given besides: their contents (or sizes and dates) are part of
            the key.
        watched: whether headers may come to be that the same commands would read instead: see
            ``search``.
        timeout: seconds after which a command is stopped; 0 for never. Not part of the key.
    """

    name: str
    steps: tuple[Step, ...]
    library: str
    sources: tuple[Path, ...]
    anchors: tuple[tuple[str, str], ...]
    identity: tuple[tuple[str, str], ...]
    trusted_roots: tuple[str, ...]
    jobs: int
    nvcc_threads: int
    device: DeviceType
    torch_abi: str
    cuda_version: str = ""
    architectures: tuple[str, ...] = ()
    isa_levels: tuple[str, ...] = ()
    launcher: str = ""
    ninja: str = "ninja"
    environment: tuple[tuple[str, str], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    keep_objects: bool = False
    recipe: tuple[Path, ...] = ()
    timeout: int = 0
    libraries: tuple[Path, ...] = ()
    watched: bool = False

    @property
    def memory_bytes(self) -> int:
        """The plan's own estimate of a build's peak memory: its ``jobs`` largest steps at once."""
        largest = sorted((step.memory_bytes for step in self.steps), reverse=True)
        return sum(largest[: self.jobs])

    def alike(self, step: Step) -> tuple[tuple[str, ...], ...]:
        """What a stub or a source that the builder wrote is made of: where another plan has a step
        with the same, one is made for both. Else nothing."""
        from_others = {other.output for other in self.steps}.intersection(step.inputs)
        if (
            from_others
            or not step.inputs
            or step.kind not in ("link", "host")
            or (step.kind == "host" and not self.texts)
        ):
            return ()
        return (step.command, *(self.texts if step.kind == "host" else ()))

    def relocatable(self, text: str) -> str:
        """``text`` with every anchor's path replaced by its name."""
        for path, name in self.anchors:
            text = text.replace(path, name)
        return text


def plan_op(
    spec: OpSpec,
    device: DeviceType,
    toolchain: Toolchain,
    *,
    csrc: Path,
    resources: Resources,
    max_jobs: int | None = None,
) -> BuildPlan:
    """The build of one op's library for one device type: host code, for CUDA too (``device_code``
    has the rest).

    Raises:
        ToolchainError: a part of the toolchain that this build needs is missing.
    """
    torch, steps = _require(toolchain), _compile_steps(spec, device, toolchain, csrc)
    objects = [step.output for step in steps]
    if torch.stable_abi:
        steps += _stub_steps(toolchain, csrc)
    steps.append(_link_step(spec, device, toolchain, objects))
    plan = plan_of(
        spec, device, toolchain, steps, csrc=csrc, resources=resources, max_jobs=max_jobs
    )
    return plan._replace(isa_levels=_isa_levels(spec, toolchain)) if device == "cpu" else plan


def plan_of(
    spec: OpSpec,
    device: DeviceType,
    toolchain: Toolchain,
    steps: Sequence[Step],
    *,
    csrc: Path,
    resources: Resources,
    max_jobs: int | None,
    compiles: DeviceType = "cpu",
    identity: tuple[tuple[str, str], ...] = (),
) -> BuildPlan:
    """The plan with these steps.

    Args:
        compiles: ``cuda`` if a device compiler is among the commands.
        identity: of that.
    """
    torch = toolchain.torch
    host = toolchain.host
    places = anchors(toolchain, compiles, *own_anchors(spec, csrc))
    assert torch is not None
    assert host is not None
    return BuildPlan(
        name=f"{spec.name}-{device}",
        steps=tuple(steps),
        library=library_name(spec, device),
        sources=own_sources(spec, device, csrc),
        texts=spec.texts,
        anchors=places,
        identity=(
            ("host compiler", host.identity),
            ("torch", torch.abi_id),
            *identity,
            *environment_identity(toolchain, places),
        ),
        trusted_roots=(str(torch.root), *compiler_roots(host)),
        jobs=choose_jobs(tuple(steps), resources, max_jobs),
        nvcc_threads=1,
        device=device,
        torch_abi=torch.abi_id,
        launcher=str(toolchain.launcher.path) if toolchain.launcher else "",
        ninja=str(toolchain.ninja.path) if toolchain.ninja else "ninja",
        recipe=(_RECIPE,),
    )


def library_name(spec: OpSpec, device: DeviceType) -> str:
    return f"{spec.project.name}_{spec.family}_{device}.so"


def own_anchors(spec: OpSpec, csrc: Path) -> tuple[tuple[Path, str], ...]:
    """Where the spec's sources, flexops' headers and the modules that made the plan are."""
    return (
        *((path, name) for name, path in spec.project.roots(csrc)),
        (layout.recipe_root(), "<build>"),
    )


def include_flags(spec: OpSpec, csrc: Path) -> tuple[str, ...]:
    """Includes, and the namespace of the operators."""
    namespace = () if spec.project.own else (f"-DFLEXOPS_NAMESPACE={spec.project.name}",)
    return (*(f"-I{path}" for _, path in spec.project.roots(csrc)), *namespace)


def declared(spec: OpSpec) -> tuple[str, ...]:
    """What lets launchers see how a binding that the builder writes calls them."""
    return () if spec.binding else ("-include", DECLARATIONS)


def own_sources(spec: OpSpec, device: DeviceType, csrc: Path) -> tuple[Path, ...]:
    """Every file that is compiled."""
    own = spec.project.roots(csrc)[0][1]
    return tuple(
        own / source
        for source in (
            *((spec.binding,) if spec.binding else ()),
            *(spec.cpu_sources if device == "cpu" else spec.cuda_sources),
        )
    )


def choose_jobs(steps: tuple[Step, ...], resources: Resources, max_jobs: int | None) -> int:
    """How many compilers may run at once: bounded by processors, memory and the user."""
    compiles = [step for step in steps if step.kind != "link"]
    by_memory = resources.memory_bytes // max((step.memory_bytes for step in compiles), default=1)
    return max(1, min(resources.cpus, by_memory, max_jobs or resources.cpus))


def spare_threads(steps: tuple[Step, ...], resources: Resources, architectures: int) -> int:
    """Threads for each nvcc: the processors that the device compiles leave over, of use only with
    several architectures."""
    device_steps = sum(step.kind == "device" for step in steps)
    return max(1, min(architectures, resources.cpus // max(1, device_steps)))


def anchors(
    toolchain: Toolchain, device: DeviceType, *own: tuple[Path, str]
) -> tuple[tuple[str, str], ...]:
    """(path, name) pairs for everything of the toolchain that a command mentions by path, longest
    path first."""
    pairs = [(str(path), name) for path, name in own]
    if toolchain.torch:
        pairs.append((str(toolchain.torch.root), "<torch>"))
    if toolchain.host:
        pairs.append((str(toolchain.host.path), "<c++>"))
    if device == "cuda" and toolchain.cuda:
        pairs += [(str(toolchain.cuda.nvcc.path), "<nvcc>"), (str(toolchain.cuda.root), "<cuda>")]
    if device == "cuda" and toolchain.rocm:
        pairs += [(str(toolchain.rocm.hipcc.path), "<hipcc>"), (str(toolchain.rocm.root), "<rocm>")]
    return tuple(sorted(pairs, key=lambda pair: -len(pair[0])))


def environment_identity(
    toolchain: Toolchain, places: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """The variables that compilers and linkers read by themselves; empty on most machines."""
    text = "\0".join(f"{name}={value}" for name, value in toolchain.environment)
    for path, name in places:
        text = text.replace(path, name)
    return (("environment", text),) if text else ()


def compiler_roots(host: HostCompiler) -> tuple[str, ...]:
    """Where a compiler that is not the system's keeps its own headers, which its identity
    covers."""
    if host.kind == "zig":
        return (str(host.path.parent),)
    prefix = host.path.parent.parent
    # x86_64-conda-linux-gnu-c++ keeps its libstdc++ and libc under <prefix>/<triple>
    triple = "-".join(host.path.name.split("-")[:-1])
    roots = [prefix / "lib" / "gcc", prefix / "lib64" / "gcc", prefix / "include" / "c++"]
    return tuple(map(str, [*roots, prefix / triple] if triple.count("-") >= 2 else roots))


def for_nvcc(argument: str) -> str:
    """A directory, or ``-I`` and a directory, as nvcc takes it: at a comma it begins another
    directory, unless that stands in double quotes."""
    if "," not in argument:
        return argument
    return f'-I"{argument[2:]}"' if argument.startswith("-I") else f'"{argument}"'


def binding_flags(torch: TorchBuild) -> tuple[str, ...]:
    """What a binding needs to see torch: the stable ABI where torch has it, else this torch's own
    C++ headers."""
    # which has no C++ header of torch in it, so the older standard does: its library compiles
    # faster
    if torch.stable_abi:
        return ("-std=c++17", *STABLE_ABI_FLAGS)
    return (
        f"-std=c++{torch.cxx_standard}",
        *(f"-isystem{path}" for path in torch.include_dirs),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}",
    )


def _require(toolchain: Toolchain) -> TorchBuild:
    from ...toolchain import missing

    if error := missing(toolchain, "cpu"):  # host code only
        raise error
    if toolchain.torch is None:  # missing() has just ruled it out; this is for the type checker
        raise ToolchainError("torch was not found")
    return toolchain.torch


def _compile_steps(
    spec: OpSpec, device: DeviceType, toolchain: Toolchain, csrc: Path
) -> list[Step]:
    torch, host = toolchain.torch, toolchain.host
    assert torch is not None  # _require() was first
    assert host is not None
    # With the maps __FILE__ is the same from wherever the sources are compiled, and so is the
    # library.
    maps = [f"-ffile-prefix-map={path}=csrc" for _, path in spec.project.roots(csrc)]
    common = (*host.command, "-fPIC", "-fvisibility=hidden", *include_flags(spec, csrc), *maps)
    only = f"-DFLEXOPS_DEVICE_{device.upper()}=1"
    own = spec.project.roots(csrc)[0][1]
    binding = str(own / spec.binding) if spec.binding else BINDING
    # A binding only checks and forwards: optimising it further costs build time and gains nothing.
    flags = (
        *common,
        *(
            ("-DFLEXOPS_DEVICE_ANY=1", "-ffunction-sections")
            if _serves_all(spec, host)
            else (only,)
        ),
        "-O1",
        *binding_flags(torch),
    )
    # The classic C++ headers of an older torch weigh several times what the stable ABI's do.
    memory = HOST_STEP_BYTES if torch.stable_abi else TORCH_HEADER_STEP_BYTES
    header = BINDING_HEADER if host.kind in ("gcc", "zig") else ""
    steps = [
        Step(
            "host",
            "binding.o",
            (binding,),
            (*flags, "-c", binding, "-o", "binding.o"),
            memory,
            shared_header=header,
        )
    ]
    plain = (*common, only, "-std=c++17", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}")
    if device == "cuda":
        levels: dict[str, tuple[str, ...]] = {"": ("-O1", WITHOUT_SPECIAL_FUNCTIONS)}
    else:
        levels = {
            f"_{isa}": ("-O3", f"-DFLEXOPS_ISA={isa}", *ISA_FLAGS[isa])
            for isa in _isa_levels(spec, toolchain)
        }
    for source in spec.cpu_sources if device == "cpu" else spec.cuda_sources:
        for level, flags in levels.items():
            output = f"{Path(source).stem}{level}.o"
            apart = ("-ffp-contract=off",) if spec.apart and device == "cpu" else ()
            files = "-c", str(own / source), "-o", output
            command = (*plain, *flags, *apart, *files, *declared(spec))
            shared = (
                INTRINSICS_HEADER
                if host.kind in ("gcc", "zig") and spec.project.own and ISA_FLAGS.get(level[1:])
                else ""
            )
            steps.append(Step("host", output, (str(own / source),), command, shared_header=shared))
    return steps


def _isa_levels(spec: OpSpec, toolchain: Toolchain) -> tuple[str, ...]:
    """The levels that the spec names are x86-64's; elsewhere there is one (csrc/common/cpu.h)."""
    return spec.isa_levels if toolchain.machine == "x86_64" else ("baseline",)


def _stub_steps(toolchain: Toolchain, csrc: Path) -> list[Step]:
    """A library with libtorch_cpu.so's name and the functions of the stable ABI that bindings may
    call, to link against in the place of the real one.

    To read that takes the linker half a second, ten times what all the rest does. A function that
    is not declared is not found here either. For zig, which has no libstdc++, one with its name
    likewise.
    """
    host = toolchain.host
    header = str(csrc / "common" / "torch_abi.h")
    runtime = str(csrc / "common" / "cxx_runtime.c")
    assert host is not None
    stub = ("-shared", "-nostdlib", "-fPIC", "-w")
    command = (
        *host.command,
        *stub,
        f"-Wl,-soname,{TORCH_LIBRARY}",
        "-DFLEXOPS_TORCH_BODY={return(0);}",
        "-x",
        "c++",
        header,
        "-o",
        TORCH_STUB,
    )
    steps = [Step("link", TORCH_STUB, (header,), command)]
    if host.kind == "zig":
        steps.append(
            Step(
                "link",
                RUNTIME_STUB,
                (runtime,),
                (
                    *host.linker,
                    *stub,
                    f"-Wl,-soname,{RUNTIME_LIBRARY}",
                    runtime,
                    "-o",
                    RUNTIME_STUB,
                ),
            )
        )
    return steps


def _link_step(spec: OpSpec, device: DeviceType, toolchain: Toolchain, objects: list[str]) -> Step:
    torch, host, library = toolchain.torch, toolchain.host, library_name(spec, device)
    assert torch is not None
    assert host is not None
    # Stripped (-s): a third smaller, and the whole file is read and hashed at every start.
    command = [*host.linker, "-shared", "-s", *objects, "-o", library]
    stubs: list[str] = []
    # Static libraries are hidden, so that two copies in one process never bind to one another's
    # symbols: libstdc++, where g++ links it so (with the stable ABI only: through the classic one
    # C++ objects cross). What is not used of them goes.
    if torch.stable_abi:
        stubs, rest = (
            ([TORCH_STUB, RUNTIME_STUB], "-lm")
            if host.kind == "zig"
            else ([TORCH_STUB], "-Wl,--exclude-libs,ALL")
        )
        command += [*stubs, rest]
    else:
        command += [f"-L{torch.library_dir}", "-ltorch_cpu", "-lc10"]
    # A missing launcher is found here, and not when the library is opened. (-ldl: a
    # library of its own in glibc before 2.34.)
    command += [
        "-Wl,--gc-sections",
        "-Wl,-z,defs",
        "-ldl",
        *(_for_device(device) if _serves_all(spec, host) else ()),
    ]
    return Step("link", library, (*objects, *stubs), tuple(command))


def _serves_all(spec: OpSpec, host: HostCompiler) -> bool:
    """Whether the binding's object is for every device type. zig's linker, which knows no
    ``--defsym``, could not tell it which."""
    return spec.one_binding and host.kind != "zig"


def _for_device(device: DeviceType) -> tuple[str, ...]:
    """What the linker defines for a binding that is compiled once for all device types
    (csrc/common/device_type.h)."""
    answer, other = ("flexops_yes", "cpu") if device == "cuda" else ("flexops_no", "cuda")
    return (
        f"-Wl,-u,{answer}",
        f"-Wl,--defsym=flexops_on_cuda={answer}",
        f"-Wl,--defsym=flexops_without_{other}={answer}",
    )
