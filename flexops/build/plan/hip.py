"""The build of an op for AMD GPUs: the same sources, compiled as HIP. ``csrc/common`` hides the
difference, so nothing is hipified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import ArchitectureError, ToolchainError
from ...toolchain import missing
from ...toolchain.model import HostCompiler, RocmToolkit, Toolchain, TorchBuild
from ...toolchain.resources import Resources
from ..describe.spec import BINDING, OpSpec
from .plan import (
    BINDING_HEADER,
    DEVICE_STEP_BYTES,
    TORCH_HEADER_STEP_BYTES,
    BuildPlan,
    Step,
    binding_flags,
    declared,
    include_flags,
    library_name,
    plan_of,
)


def plan_hip_op(
    spec: OpSpec,
    toolchain: Toolchain,
    *,
    csrc: Path,
    resources: Resources,
    max_jobs: int | None = None,
    architectures: tuple[str, ...],
) -> BuildPlan:
    """The build of one op's library for ``architectures`` such as ``("gfx90a",)``.

    Raises:
        ToolchainError: hipcc, a C++ compiler or torch is missing.
        ArchitectureError: no architecture was given.
    """
    if error := missing(toolchain, "cuda"):
        raise error
    torch, host, rocm = toolchain.torch, toolchain.host, toolchain.rocm
    if torch is None or host is None or rocm is None:
        raise ToolchainError("the ROCm toolchain is incomplete", fix="flexops doctor")
    if not architectures:
        raise no_architecture()
    common = (*include_flags(spec, csrc), "-DFLEXOPS_DEVICE_CUDA=1", "-fPIC", "-fvisibility=hidden")
    offload = [f"--offload-arch={name}" for name in architectures]
    steps = [
        _binding_step(spec, csrc, host, torch, common),
        *_device_steps(spec, csrc, rocm, (*common, *declared(spec), *offload)),
    ]
    objects = [step.output for step in steps]
    steps.append(_link_step(library_name(spec, "cuda"), objects, host, torch, rocm))
    recipe = Path(__file__).resolve()
    identity = (("hipcc", rocm.hipcc.identity), ("architectures", " ".join(architectures)))
    plan = plan_of(
        spec,
        "cuda",
        toolchain,
        steps,
        csrc=csrc,
        resources=resources,
        max_jobs=max_jobs,
        compiles="cuda",
        identity=identity,
    )
    return plan._replace(
        trusted_roots=(str(torch.root), str(rocm.root / "include" / "hip"), str(rocm.root / "lib")),
        architectures=architectures,
        environment=(("HIP_PLATFORM", "amd"), ("ROCM_PATH", str(rocm.root))),
        recipe=(recipe, recipe.with_name("plan.py")),
    )


def _binding_step(
    spec: OpSpec, csrc: Path, host: HostCompiler, torch: TorchBuild, common: Sequence[str]
) -> Step:
    own = spec.project.roots(csrc)[0][1]
    binding = str(own / spec.binding) if spec.binding else BINDING
    flags = ("-O1", *common, "-DUSE_ROCM", "-D__HIP_PLATFORM_AMD__=1", *binding_flags(torch))
    command = (str(host.path), *flags, "-c", binding, "-o", "binding.o")
    header = BINDING_HEADER if host.kind == "gcc" else ""
    return Step(
        "host", "binding.o", (binding,), command, TORCH_HEADER_STEP_BYTES, shared_header=header
    )


def _device_steps(
    spec: OpSpec, csrc: Path, rocm: RocmToolkit, flags: Sequence[str]
) -> Iterator[Step]:
    own = spec.project.roots(csrc)[0][1]
    compiler = (str(rocm.hipcc.path), "-x", "hip", "-std=c++17", "-O3")
    for source in spec.cuda_sources:
        path, output = str(own / source), f"{Path(source).stem}.hip.o"
        command = (*compiler, *flags, "-c", path, "-o", output)
        yield Step("device", output, (path,), command, DEVICE_STEP_BYTES)


def _link_step(
    library: str, objects: Sequence[str], host: HostCompiler, torch: TorchBuild, rocm: RocmToolkit
) -> Step:
    places = (f"-L{path}" for path in (torch.library_dir, *rocm.library_dirs))
    libraries = (*places, "-ltorch_cpu", "-lc10", "-lamdhip64")
    command = (str(host.path), "-shared", *objects, "-o", library, *libraries)
    return Step("link", library, tuple(objects), command)


def no_architecture() -> ArchitectureError:
    found = "no GPU here, PYTORCH_ROCM_ARCH unset"
    return ArchitectureError(
        "no AMD architecture to compile for",
        found=found,
        fix='export PYTORCH_ROCM_ARCH="gfx90a;gfx942"',
    )
