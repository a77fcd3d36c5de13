"""``find_package(flexops)``: a project that CMake builds, from a checkout and from an installed
package; run with torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from builds import REPOSITORY
from marks import first_of
from processes import completed

from flexops import __version__
from flexops.build.describe import layout
from flexops.build.plan import plan
from flexops.toolchain.model import HostCompiler

LISTS = """
cmake_minimum_required(VERSION 3.18)
project(mine LANGUAGES CXX)
execute_process(COMMAND ${Python_EXECUTABLE} -m flexops cmake-dir OUTPUT_VARIABLE flexops_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
find_package(flexops CONFIG REQUIRED)
message(STATUS "found ${flexops_VERSION} in ${flexops_INCLUDE_DIR}")
add_library(mine MODULE binding.cpp)
target_link_libraries(mine PRIVATE flexops::binding)
target_compile_definitions(mine PRIVATE FLEXOPS_DEVICE_CPU=1 FLEXOPS_NAMESPACE=mine)
flexops_cpu_sources(mine scale_cpu.cpp)
"""
BINDING = """
#include "common/binding.h"
#include "common/cpu.h"
namespace flexops {
FLEXOPS_ISA_DECLARE(int scale_cpu(const TensorView& x, double factor, const TensorView& out))
static Tensor scale(Tensor x, double factor) {
  FLEXOPS_CHECK(x.dtype() == Dtype::f32 && x.is_contiguous(), "mine::scale: x must be float32 and contiguous");
  Tensor out = empty_like_contiguous(x, x.dtype());
  const TensorView from{x.data(), x.dtype(), x.dim(), x.numel(), x.sizes(), x.strides()};
  const TensorView to{out.data(), out.dtype(), out.dim(), out.numel(), out.sizes(), out.strides()};
  FLEXOPS_CHECK(FLEXOPS_ISA_CALL(scale_cpu)(from, factor, to) == static_cast<int>(cpu_isa()), "mine::scale: compiled for another level than called");
  return out;
}
FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "scale", scale); }
}  // namespace flexops
"""
KERNEL = """
#include "common/cpu_elements.h"
namespace flexops::FLEXOPS_ISA {
int scale_cpu(const TensorView& x, double factor, const TensorView& out) {
  for (int64_t i = 0; i < x.numel; ++i) store(out.as<float>(), i, load(x.as<float>(), i) * static_cast<float>(factor));
#if defined(__AVX512F__)
  return 2;
#elif defined(__AVX2__)
  return 1;
#else
  return 0;
#endif
}
}  // namespace flexops::FLEXOPS_ISA
"""
CALL = """
import torch
torch.library.define("mine::scale", "(Tensor x, float factor) -> Tensor")
torch.ops.load_library("libmine.so")
x = torch.linspace(-1, 1, 7)
assert torch.equal(torch.ops.mine.scale(x, 3.0), x * 3.0)
try:
    torch.ops.mine.scale(x.double(), 3.0)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def cmake(require: Callable[..., None]) -> str:
    found = shutil.which(
        "cmake", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    )
    require(found, "cmake", "pip install cmake, or run scripts/run_tests.sh, which does")
    return str(found)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in (
        ("CMakeLists.txt", LISTS),
        ("binding.cpp", BINDING),
        ("scale_cpu.cpp", KERNEL),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def configure(
    cmake: str, project: Path, host: HostCompiler, *python_path: Path
) -> subprocess.CompletedProcess[str]:
    options = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_CXX_COMPILER={host.path}",
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, python_path))}
    return completed(
        [cmake, "-S", str(project), "-B", str(project / "build"), *options],
        env=environment,
        cwd=project,
        code=None,
    )


@pytest.mark.parametrize("installed", first_of(False, True), ids=["checkout", "installed"])
def test_a_library_that_cmake_builds(cmake, project, host_compiler, tmp_path, installed):
    place, headers = REPOSITORY, REPOSITORY / "csrc"
    if installed:
        place = tmp_path / "site"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps",
            "--no-build-isolation", "--target", str(place), str(REPOSITORY)]  # fmt: skip
        subprocess.run(command, check=True)
        headers = place / "flexops" / "_csrc"
    done = configure(cmake, project, host_compiler, place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"found {__version__} in {headers}" in done.stdout
    if installed:
        return  # the same files from another place
    done = completed([cmake, "--build", str(project / "build")])
    done = completed([sys.executable, "-c", CALL], cwd=project / "build")
    assert "mine::scale: x must be float32 and contiguous" in done.stdout


MAJOR, MINOR, PATCH = (int(part) for part in __version__.split("."))


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (f"{__version__} EXACT", True),
        (f"{MAJOR}.{MINOR}", True),
        ("", True),
        (f"{MAJOR}.{MINOR + 1}", False),
        (f"{MAJOR}.{MINOR - 1}", False),
        (f"{MAJOR + 1}", False),
        (f"{MAJOR}.{MINOR}.{PATCH + 9}", False),
    ],
)
def test_versions_that_go_with_this_one(cmake, project, asked, found):
    lists = project / "CMakeLists.txt"
    lists.write_text(f"cmake_minimum_required(VERSION 3.18)\nproject(mine LANGUAGES NONE)\nfind_package(flexops {asked} CONFIG)\n"
                     'message(STATUS "found=${flexops_FOUND}")\n')  # fmt: skip
    place = f"-Dflexops_DIR={layout.cmake_root()}"
    done = completed([cmake, "-S", str(project), "-B", str(project / "build"), place])
    assert f"found={int(found)}" in done.stdout, done.stdout + done.stderr


def test_the_flags_are_the_builders():
    text = (layout.cmake_root() / "flexops-config.cmake").read_text()
    for level, flags in plan.ISA_FLAGS.items():
        assert f"set(flexops_ISA_FLAGS_{level} {' '.join(flags) or chr(34) * 2})" in text
    assert all(flag.removeprefix("-D") in text for flag in plan.STABLE_ABI_FLAGS)
