"""The build of a user's extension for AMD GPUs: its CUDA sources are translated in the build
directory, then compiled with hipcc.

The flags are those that ``torch.utils.cpp_extension`` gives with a ROCm torch, in its order.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ...errors import ToolchainError
from ...toolchain import missing
from ...toolchain.model import RocmToolkit, Toolchain, TorchBuild
from . import hipify
from .extension_plan import (
    PythonBuild,
    Request,
    arguments_for_torch,
    base_plan,
    defines,
    system_includes,
    torch_libraries,
)
from .hip import no_architecture
from .plan import HOST_STEP_BYTES, TORCH_HEADER_STEP_BYTES, BuildPlan, Step

_HIP_FLAGS = ("-D__HIP_PLATFORM_AMD__=1", "-DUSE_ROCM=1", "-DHIPBLAS_V2", "-fPIC")
_HIPCC_FLAGS = (
    "-DCUDA_HAS_FP16=1",
    "-D__HIP_NO_HALF_OPERATORS__=1",
    "-D__HIP_NO_HALF_CONVERSIONS__=1",
    "-DHIP_ENABLE_WARP_SYNC_BUILTINS=1",
)


def plan_hip_extension(
    request: Request, toolchain: Toolchain, python: PythonBuild, *, architectures: tuple[str, ...]
) -> BuildPlan:
    """The build of an extension for ``architectures`` such as ``("gfx90a",)``.

    Raises:
        ToolchainError: hipcc, a C++ compiler or torch is missing.
        ArchitectureError: no architecture was given, in no way.
    """
    if error := missing(toolchain, "cuda"):
        raise error
    torch, rocm = toolchain.torch, toolchain.rocm
    if torch is None or rocm is None or toolchain.host is None:
        raise ToolchainError("the ROCm toolchain is incomplete", fix="flexops doctor")
    offload = _offload_flags(request, architectures)
    steps = [_translation(request, torch)]
    for number, source in enumerate(request.inputs):
        steps.append(
            _compile(
                request, toolchain, torch, rocm, python, hipify.wrapper(number, source), offload
            )
        )
    objects = [step.output for step in steps[1:]]
    runtime = (*(f"-L{path}" for path in rocm.library_dirs), "-lamdhip64")
    shared = () if request.is_standalone else ("-shared",)
    link = (
        str(toolchain.host.path),
        *objects,
        *shared,
        *request.ldflags,
        *torch_libraries(request, torch),
        *runtime,
        "-o",
        request.library,
    )
    steps.append(Step("link", request.library, tuple(objects), link, HOST_STEP_BYTES))
    plan = base_plan(
        request,
        toolchain,
        torch,
        python,
        steps,
        [("hipcc", rocm.hipcc.identity), ("architectures", " ".join(offload))],
    )
    return plan._replace(
        device="cuda",
        architectures=architectures,
        trusted_roots=(*plan.trusted_roots, str(rocm.root / "include"), str(rocm.root / "lib")),
        launcher="",  # ccache and sccache do not understand hipcc
        keep_objects=False,
        environment=(*plan.environment, ("HIP_PLATFORM", "amd"), ("ROCM_PATH", str(rocm.root))),
    )


def _offload_flags(request: Request, architectures: tuple[str, ...]) -> tuple[str, ...]:
    mine = request.cuda_cflags
    rdc = () if any("gpu-rdc" in flag for flag in mine) else ("-fno-gpu-rdc",)
    if any("offload-arch" in flag or "amdgpu-target" in flag for flag in mine):
        return rdc
    if not architectures:
        raise no_architecture()
    return (*(f"--offload-arch={name}" for name in architectures), *rdc)


def _translation(request: Request, torch: TorchBuild) -> Step:
    script = Path(hipify.__file__)
    command = (
        sys.executable,
        "-I",
        str(script),
        hipify.order(request.inputs, request.include_dirs, torch.root),
    )
    return Step("hipify", hipify.STAMP, request.inputs, command)


def _compile(
    request: Request,
    toolchain: Toolchain,
    torch: TorchBuild,
    rocm: RocmToolkit,
    python: PythonBuild,
    source: str,
    offload: tuple[str, ...],
) -> Step:
    assert toolchain.host is not None
    # The translated copies of the user's headers come before the originals.
    includes = tuple(
        f"-I{path}" for path in (*hipify.mirrored(request.include_dirs), *request.include_dirs)
    )
    system = (
        *torch.include_dirs,
        torch.include_dirs[0] / "THH",
        *rocm.include_dirs,
        python.include,
    )
    common = (*defines(request), *includes, *system_includes(system))
    output = f"{source}.o"
    tail = ("-c", source, "-o", output)
    language = arguments_for_torch(torch, python)
    if source.endswith(".hip"):
        flags = (
            "-DWITH_HIP",
            *common,
            *request.cflags,
            *_HIP_FLAGS,
            *_HIPCC_FLAGS,
            *language,
            *offload,
            *request.cuda_cflags,
        )
        return Step(
            "device",
            output,
            (hipify.STAMP,),
            (str(rocm.hipcc.path), *flags, *tail),
            TORCH_HEADER_STEP_BYTES,
        )
    return Step(
        "host",
        output,
        (hipify.STAMP,),
        (str(toolchain.host.path), *common, *language, *request.cflags, *_HIP_FLAGS, *tail),
        TORCH_HEADER_STEP_BYTES,
    )
