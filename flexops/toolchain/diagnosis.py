"""Errors of a toolchain that lacks something: found, required, and the command that fixes
it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from ..errors import ToolchainError
from .compat import rules
from .model import Rejected, Toolchain, TorchBuild, Version

if TYPE_CHECKING:
    from .nvrtc import DeviceCompiler
    from .select import Choice


def missing(toolchain: Toolchain, device: Literal["cpu", "cuda"] = "cuda") -> ToolchainError | None:
    """The first thing that a build for this device type requires and this toolchain lacks, as an
    error to raise; None when all is there."""
    error = _missing(toolchain, device)
    # which has no compiler on purpose, and no user who may install one
    if error and toolchain.image and toolchain.torch:
        error.fix = (
            f"flexops image build {toolchain.image} --stage dev && docker run --rm -it -v"
            f' "$PWD:/workspace" flexops:{toolchain.image}-dev bash   # outside of this image: the'
            " one with compilers"
        )
    return error


def _missing(toolchain: Toolchain, device: Literal["cpu", "cuda"]) -> ToolchainError | None:
    if toolchain.torch is None:
        return ToolchainError(
            "torch is not installed",
            found=f"no torch for {sys.executable}",
            required="torch",
            fix=f"{sys.executable} -m pip install torch",
        )
    if device == "cuda" and toolchain.torch.hip and toolchain.rocm is None:
        return _no_rocm(toolchain, toolchain.torch)
    if device == "cuda" and not toolchain.torch.hip and toolchain.cuda is None:
        return _no_cuda(toolchain, toolchain.torch)
    if toolchain.host is None:
        return _no_compiler(toolchain)
    if toolchain.ninja is None:
        return ToolchainError(
            "ninja was not found",
            found=_found(toolchain, "ninja"),
            required="ninja 1.10 or newer",
            fix=f"{sys.executable} -m pip install ninja",
        )
    return None


def no_device_compiler(choice: Choice[DeviceCompiler], torch: TorchBuild | None) -> ToolchainError:
    """What to say where nothing compiles device code."""
    cuda = Version.parse(torch.cuda) if torch and torch.cuda else Version.parse(rules().suggested)
    matching = f" that matches torch {torch.version}" if torch and torch.cuda else ""
    looked = ", ".join(choice.tried)
    return ToolchainError(
        f"no NVRTC and no nvcc{matching} was found to compile kernels with",
        found=_refusals(choice.rejected) or f"nothing; looked at: {looked}",
        required=(
            f"NVRTC of CUDA {cuda.major}.x, best {cuda.major_minor} (every CUDA torch from a"
            " package index brings it)"
        ),
        fix=nvrtc_fix(cuda),
    )


def nvrtc_fix(cuda: Version) -> str:
    """The command that installs NVRTC of that CUDA version, also where pip believes that it is
    there."""
    package = f"nvidia-cuda-nvrtc-cu{cuda.major}" if cuda.major < 13 else "nvidia-cuda-nvrtc"
    return f'{sys.executable} -m pip install --force-reinstall "{package}=={cuda.major_minor}.*"'


def toolkit_fix(cuda: str) -> str:
    """The command that installs an nvcc of that CUDA version (``"13.0"``): from the package index
    where it has one, else from conda."""
    version = Version.parse(cuda)
    if version.major >= 13:
        return (
            f"{sys.executable} -m pip install"
            f' "cuda-toolkit[nvcc,cudart,cccl]=={version.major_minor}.*"'
        )
    conda = (
        f"conda install -c conda-forge cuda-version={version.major_minor} cuda-nvcc cuda-cudart-dev"
        " cuda-cudart-static cuda-cccl"
    )
    return (
        f"{conda}   # or work in NVIDIA's image"
        f" nvidia/cuda:{version.major_minor}.1-devel-ubuntu22.04"
    )


def _no_cuda(toolchain: Toolchain, torch: TorchBuild) -> ToolchainError:
    if torch.cuda is None:
        return ToolchainError(
            "no CUDA toolkit was found",
            found=_found(toolchain, "cuda", "CUDA toolkit"),
            required="nvcc, the CUDA headers and libcudart_static.a, of any supported version",
            fix=toolkit_fix(rules().suggested),
        )
    version = Version.parse(torch.cuda)
    return ToolchainError(
        f"no CUDA toolkit that matches torch {torch.version} was found",
        found=_found(toolchain, "cuda", "CUDA toolkit"),
        required=(
            f"CUDA {version.major}.x, best {version.major_minor}: nvcc, the headers and"
            " libcudart_static.a"
        ),
        fix=toolkit_fix(torch.cuda),
    )


def _no_rocm(toolchain: Toolchain, torch: TorchBuild) -> ToolchainError:
    version = Version.parse(torch.hip or "")
    return ToolchainError(
        f"no ROCm that matches torch {torch.version} was found",
        found=_found(toolchain, "rocm", "ROCm"),
        required=(
            f"ROCm {version.major}.x, best {version.major_minor}: hipcc, the HIP headers and"
            " libamdhip64.so"
        ),
        fix=(
            f"apt-get install rocm-hip-sdk   # of ROCm {version.major_minor}; or work in"
            f" rocm/dev-ubuntu-24.04:{version.major_minor}-complete"
        ),
    )


def _no_compiler(toolchain: Toolchain) -> ToolchainError:
    standard = toolchain.torch.cxx_standard if toolchain.torch else 17
    if toolchain.wished:
        required, fix = (
            "a g++ or clang++: its path, or its name on PATH",
            "unset CXX   # then the best that is here is taken",
        )
        return ToolchainError(
            "CXX names a C++ compiler that cannot be used",
            found=toolchain.wished,
            required=required,
            fix=fix,
        )
    newest = rules().newest_gcc(toolchain.cuda.version) if toolchain.cuda else None
    refused = any(one.what == "C++ compiler" for one in toolchain.rejected)
    required = (
        f"g++ that reads C++{standard} headers ({'11.3' if standard >= 20 else '9.3'} or newer)"
    )
    if newest and toolchain.cuda:
        required += f", and not newer than g++ {newest}, for nvcc {toolchain.cuda.version}"
    package = f"g++-{newest}" if refused and newest else "g++"
    what = "no C++ compiler that can be used was found" if refused else "no C++ compiler was found"
    return ToolchainError(
        what,
        found=_found(toolchain, "host", "C++ compiler"),
        required=required,
        fix=f"apt-get install {package}",
    )


def _found(toolchain: Toolchain, field: str, what: str = "") -> str:
    """What was refused; where nothing was even that, everywhere it was looked for."""
    refused = _refusals(one for one in toolchain.rejected if one.what == (what or field))
    looked = ", ".join(where for name, where in toolchain.tried if name == field)
    return refused or (f"nothing; looked at: {looked}" if looked else "nothing")


def _refusals(rejected: Iterable[Rejected]) -> str:
    return "; ".join(f"{one.path}: {one.reason}" for one in rejected)
