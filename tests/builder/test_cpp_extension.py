"""``CUDAExtension`` and ``BuildExtension``: an unchanged project becomes a wheel without nvcc, whose
library finds its kernels. The driver is ``stand_in/libcuda.c``, which runs nothing."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from extension_tools import ROOT, environment, run
from processes import completed
from setuptools import Distribution

from flexops.builder import BuildExtension, CppExtension, CUDAExtension
from flexops.errors import FlexopsError
from flexops.toolchain.model import HostCompiler

SETUP = """
import os, torch
torch.version.cuda = torch.version.cuda or "13.0"  # a torch for CPUs compiles just as well
from setuptools import setup
from flexops.builder import BuildExtension, CUDAExtension
setup(
    name="project", version="1.0", packages=["project"],
    ext_modules=[CUDAExtension(
        "project._C", ["csrc/module.cpp", "csrc/fill.cu"], define_macros=[("LANES", "32")],
        include_dirs=["csrc"], extra_compile_args={"cxx": ["-O1"], "nvcc": ["--use_fast_math"]},
        extra_link_args=["-L" + os.environ["LIBRARIES"]],
    )],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
"""
KERNEL = """
#include "fill.h"
__global__ void fill_kernel(float* out, int n) {
  if (threadIdx.x < n) out[threadIdx.x] = LANES;
}
void fill(float* out, int n) { fill_kernel<<<1, LANES>>>(out, n); }
"""
MODULE = """
#include <Python.h>
#include <stdexcept>
#include "fill.h"
static PyObject* call(PyObject*, PyObject*) {
  try { fill(nullptr, 7); }
  catch (const std::exception& error) { return PyErr_SetString(PyExc_RuntimeError, error.what()), nullptr; }
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"fill", call, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }
"""
# In an empty cache, where nothing may be compiled.
CALL = """
import torch
from project import _C
_C.fill()
_C.fill()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in (
        ("setup.py", SETUP),
        ("project/__init__.py", ""),
        ("csrc/fill.h", "void fill(float* out, int n);\n"),
        ("csrc/fill.cu", KERNEL),
        ("csrc/module.cpp", MODULE),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def libraries(tmp_path: Path, host_compiler: HostCompiler) -> Path:
    source = ROOT / "tests" / "support" / "stand_in" / "libcuda.c"
    for name, code in (
        ("libcuda.so.1", str(source)),
        ("libc10_cuda.so", "/dev/null"),
        ("libtorch_cuda.so", "/dev/null"),
    ):
        flags = ["-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        command = [str(host_compiler.path), *flags, "-o", str(tmp_path / name), code]
        subprocess.run(command, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "suffix"),
    [({}, sysconfig.get_config_var("EXT_SUFFIX")), ({"no_python_abi_suffix": True}, ".so")],
)
def test_the_name_of_a_library(options, suffix):
    command = BuildExtension.with_options(**options)(Distribution())
    command.ensure_finalized()
    assert command.get_ext_filename("project._C") == f"project/_C{suffix}"


# for the headers of CUDA's runtime, which a torch for CPUs does not bring
@pytest.mark.usefixtures("nvcc_toolkit")
def test_a_wheel_has_kernels_that_its_library_finds(project, libraries):
    known = {
        "LIBRARIES": str(libraries),
        "LD_LIBRARY_PATH": str(libraries),
        "FLEXOPS_DEVICE_COMPILER": "nvrtc",
        "TORCH_CUDA_ARCH_LIST": "8.0;9.0",
    }
    completed(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=project,
        env=environment(libraries / "cache", **known),
    )
    (wheel,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(libraries / "installed")
        names = archive.namelist()
    assert len([name for name in names if name.endswith("kernel.cubin")]) == 2
    assert "project/_C.flexops/programs.json" in names
    log = libraries / "log"
    installed = {"STAND_IN_LOG": str(log), "FLEXOPS_JIT": "0"}
    env = environment(libraries / "empty", **known, **installed)
    env["PYTHONPATH"] += f":{libraries}/installed"
    run(CALL, env)
    launches = [line for line in log.read_text().splitlines() if line.startswith("launch")]
    assert len(launches) == 2
    assert "fill_kernel" in launches[0]
    assert "block 32 1" in launches[0]


def test_an_extension_keeps_what_it_was_given():
    flags = {"cxx": ["-O1"], "nvcc": ["-lineinfo"]}
    for make, device in ((CppExtension, False), (CUDAExtension, True)):
        made = make("a.b", ["a.cpp"], define_macros=[("N", "1")], extra_compile_args=flags, dlink=1)
        assert (made.name, made.sources, made.language) == ("a.b", ["a.cpp"], "c++")
        assert (made.define_macros, made.extra_compile_args) == ([("N", "1")], flags)
        assert made.flexops_with_cuda is device
    assert make("a", ["a.cpp"]).extra_compile_args == []


def test_what_needs_relocatable_device_code_is_rejected():
    with pytest.raises(FlexopsError, match="extension a has dlink_libraries"):
        CUDAExtension("a", ["a.cu"], dlink_libraries=["b"])
