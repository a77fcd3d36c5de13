"""Whether what is at hand makes a row's build, and whether a library is one. Pure: explicit values
in, the reason out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ToolchainError
from .model import Target

if TYPE_CHECKING:
    from ..toolchain.model import TorchBuild, Version


def unfit(row: Target, torch: TorchBuild | None, compiler: Version | None) -> ToolchainError | None:
    """Why a build with these would not be the row's, as an error to raise; None if it would.

    Args:
        torch: that the build is made for.
        compiler: CUDA's or ROCm's version of what compiles device code; of no matter for a CPU row.
    """
    found = torch_of(torch)
    wanted = f"torch {row.torch}"
    fits = torch is not None and torch.release.parts[:3] == _numbers(row.torch)
    # any wheel of the default index runs on a CPU, and gives its kernels the same ABI
    if row.accelerator == "cpu":
        fits = fits and torch is not None and not torch.hip
    else:
        name = "CUDA" if row.accelerator == "cuda" else "ROCm"
        wanted += (
            f" built for {name} {row.toolkit_minor}, and a compiler of {name} {row.toolkit_minor}"
        )
        built_for = (torch.cuda if row.accelerator == "cuda" else torch.hip) if torch else None
        has = f"a compiler of {name} {compiler.major_minor}" if compiler else "no compiler for GPUs"
        found += f", and {has}"
        fits = (
            fits
            and _is_minor(built_for, row)
            and compiler is not None
            and _is_minor(compiler.major_minor, row)
        )
    if fits:
        return None
    other = (
        f'; `flexops build --arch "{row.arch_list}"` compiles with what is here, and for that'
        if row.accelerator == "cuda"
        else ""
    )
    return ToolchainError(
        f"this environment is not that of {row.id}, so what it compiles would not be {row.id}'s",
        found=found,
        required=wanted,
        fix=(
            f"bash scripts/setup_cuda_dev_environment.sh --target {row.id} --prefix"
            f" .venv-{row.id}{other}"
        ),
    )


def is_of(row: Target, torch_abi: str, compiler: str) -> bool:
    """Whether a library with that ABI (``TorchBuild.abi_id``), compiled by that version, is one
    that the row's own build could have made.

    C++11 ABIs are not compared: packages of the same torch differ in it.
    """
    from ..toolchain.model import Version

    release = Version.parse(row.torch)
    if release >= Version((2, 11)) and row.accelerator != "rocm":
        fits = torch_abi.startswith("stable-")
    else:
        accelerator = {
            "cpu": "",
            "cuda": f"cu{row.toolkit_minor}",
            "rocm": f"rocm{row.toolkit_minor}",
        }[row.accelerator]
        fits = (
            torch_abi.startswith(f"torch-{release.major_minor}-")
            and accelerator in torch_abi.rpartition("-")[2]
        )
    return fits and (row.accelerator != "cuda" or _is_minor(compiler, row))


def torch_of(torch: TorchBuild | None) -> str:
    """A torch in words: its version and what it is built for."""
    if torch is None:
        return "no torch"
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "the CPU"
    return f"torch {torch.version} built for {built}"


def _is_minor(version: str | None, row: Target) -> bool:
    return version is not None and _numbers(version)[:2] == _numbers(row.toolkit)[:2]


def _numbers(text: str) -> tuple[int, ...]:
    from ..toolchain.model import Version

    try:
        return Version.parse(text).parts[:3]
    except ValueError:
        return ()
