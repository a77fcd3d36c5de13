"""Which directories CUDA's headers are taken from, in trees made for the purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexops.toolchain import device_headers
from flexops.toolchain.context import SearchContext
from flexops.toolchain.model import Version
from flexops.toolchain.nvrtc import DeviceCompiler

RUNTIME = ("cuda_fp16.h", "cuda_runtime_api.h")
CCCL = ("cuda/std/version", "cuda/std/__cccl/version.h")


def write(folder: Path, *names: str, cuda: int = 13000) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = f"#define CUDART_VERSION {cuda}\n#define CCCL_VERSION 3000001\n"
        (folder / name).write_text(text)


def compiler(version: str) -> DeviceCompiler:
    return DeviceCompiler(
        "nvrtc", Path("/libnvrtc.so"), Version.parse(version), "NVRTC", Path("/b")
    )


@pytest.mark.parametrize(
    ("places", "found"),
    [
        # a CUDA torch from the index has no CCCL: a package of it, else a toolkit
        ({"site/nvidia/cu13/include": RUNTIME}, ["site/nvidia/cu13/include"]),
        (
            {
                "site/nvidia/cu13/include": RUNTIME,
                "site/cuda/cccl/headers/include": CCCL,
                "toolkit/include": (*RUNTIME, "crt/host_config.h", "crt/mma.h"),
                "toolkit/include/cccl": CCCL,
            },
            ["site/nvidia/cu13/include", "site/cuda/cccl/headers/include", "toolkit/include"],
        ),
        (
            {
                "site/nvidia/cu13/include": RUNTIME,
                "site/nvidia/cu13/include/cccl": CCCL,
                "site/cuda/cccl/headers/include": CCCL,
            },
            ["site/nvidia/cu13/include", "site/nvidia/cu13/include/cccl"],
        ),
        # before CUDA 13 each package has a folder of its own
        (
            {
                "site/nvidia/cuda_runtime/include": RUNTIME,
                "site/nvidia/cuda_cccl/include": CCCL,
                "site/nvidia/curand/include": ("curand_kernel.h",),
            },
            ["site/nvidia/cuda_cccl/include", "site/nvidia/cuda_runtime/include",
             "site/nvidia/curand/include"],
        ),
    ],
)  # fmt: skip
def test_each_part_comes_from_the_first_place_that_has_it(tmp_path, places, found):
    for place, names in places.items():
        write(tmp_path / place, *names)
    context = SearchContext(
        site_dirs=(str(tmp_path / "site"),),
        cuda_home=str(tmp_path / "toolkit"),
        root=str(tmp_path),
    )
    roots = device_headers.find(context, compiler("13.0"), tmp_path)
    assert [str(one.path.relative_to(tmp_path)) for one in roots] == found
    assert all(one.parts and one.origin and str(tmp_path) not in one.identity for one in roots)


def test_headers_of_another_major_are_not_taken(tmp_path):
    write(tmp_path / "nvidia/cu12/include", *RUNTIME, cuda=12080)
    write(tmp_path / "nvidia/cu12/include/cccl", *CCCL)
    context = SearchContext(site_dirs=(str(tmp_path),), root=str(tmp_path))
    assert device_headers.find(context, compiler("13.0"), tmp_path) == ()


def test_bundled_headers_are_used_where_nvrtc_has_written_them(tmp_path):
    folder = tmp_path / "nvrtc-headers-13.3"
    write(folder, ".nvrtc_headers_version", *RUNTIME)
    write(folder / "cccl", *CCCL)
    context = SearchContext(root=str(tmp_path))
    roots = device_headers.find(context, compiler("13.3"), tmp_path)
    assert [one.path for one in roots] == [folder, folder / "cccl"]
    assert {one.origin for one in roots} == {"bundled in NVRTC 13.3"}


@pytest.mark.parametrize(
    ("header", "cuda", "fix"),
    [
        ("cub/cub.cuh", "13.0", 'pip install "nvidia-cuda-cccl==13.0.*"'),
        ("cuda/std/array", "12.8", 'pip install "nvidia-cuda-cccl-cu12==12.8.*"'),
        ("cuda_bf16.h", "13.0", 'pip install "nvidia-cuda-runtime==13.0.*"'),
        ("cute/tensor.hpp", "13.0", "include=[<the include directory of CUTLASS>]"),
        (
            "torch/extension.h",
            "13.0",
            "remove the include, of which device code uses nothing (flexops.load compiles it)",
        ),
        ("memory", "13.0", "do without <memory>, a header of C++ for code of the host"),
        ("mine.h", "13.0", ""),
    ],
)
def test_a_missing_header_has_a_fix(header, cuda, fix):
    assert device_headers.fix_for(header, cuda) == fix
