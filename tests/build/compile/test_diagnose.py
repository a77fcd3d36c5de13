"""From what compilers say to the first real error, its cause and its fix."""

from __future__ import annotations

import pytest

from flexops.build.compile.diagnose import diagnose

SYNTAX = """[1/3] adam-cuda: binding.o
FAILED: adam-cuda/adam.cu.o
cd adam-cuda && nvcc -O3 -c /src/adam.cu -o adam.cu.o
/src/adam.cu(41): warning #177-D: variable "x" was declared but never referenced
/src/adam.cu(42): error: identifier "theads" is undefined
  theads = 3;
  ^

1 error detected in the compilation of "/src/adam.cu".
ninja: build stopped: subcommand failed.
"""


@pytest.mark.parametrize(("output", "error", "cause", "fix"), [
    (SYNTAX, '/src/adam.cu(42): error: identifier "theads" is undefined', "does not compile",
     "line named"),
    ("a.cpp:3:10: fatal error: missing.h: No such file or directory", "a.cpp:3:10", "was not found",
     "include path"),
    ("s_cuda.cpp:7:9: error: 'LaunchConfig' does not name a type", "LaunchConfig",
     "does not include", '#include "common/launch.h"'),
    ("s_cuda.cpp:7:30: error: 'TensorView' does not name a type", "TensorView", "another namespace",
     "own namespace"),
    ("<command-line>: error: 'baseline' is not a namespace-name", "baseline", "for the CPU",
     '#include "common/cpu_elements.h"'),
    ("b.cpp:1:10: fatal error: Python.h: No such file or directory", "Python.h", "Python headers",
     "python3-dev"),
    (("x.cpp:1:2: error: a\ncc1plus: fatal error: error writing to /tmp/c.s: No space"
      " left on device"), "No space", "disk is full", "FLEXOPS_CACHE_DIR"),
    ("a.cpp:9:1: error: b\ng++: fatal error: Killed signal terminated program cc1plus", "Killed",
     "out of memory", "MAX_JOBS=1"),
    ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "signal 9", "out of memory",
     "MAX_JOBS=1"),
    ("/u/host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later",
     "unsupported GNU", "newer than this nvcc", "older g++"),
    ("nvcc fatal   : Unsupported gpu architecture 'compute_70'", "compute_70", "cannot emit",
     "TORCH_CUDA_ARCH_LIST"),
    (("/t/all.h:4:2: error: #error C++20 or later compatible compiler is required to use"
      " PyTorch."), "C++20", "too old", "11.3"),
    ("/usr/bin/ld: cannot find -lcudart_static: No such file or directory", "-lcudart_static",
     "static CUDA runtime", "cuda-toolkit"),
    ("/usr/bin/ld: cannot find -lfoo: No such file or directory", "-lfoo", "library to link", "-L"),
    ("a.o: in function `f':\na.cpp:(.text+0x5): undefined reference to `g()'",
     "undefined reference", "defined nowhere", "defines it"),
    (("ptxas a.ptx, line 21; error   : Instruction 'wgmma.fence' not supported on .target"
      " 'sm_90'"), "wgmma.fence", "suffix a", "TORCH_CUDA_ARCH_LIST"),
    ("flexops: ninja was ended by SIGKILL", "SIGKILL", "killed", "run it again"),
    ("sh: 1: /usr/bin/g++: Permission denied", "Permission denied", "may not be used",
     "owner and mode"),
])  # fmt: skip
def test_known_troubles(output, error, cause, fix):
    found = diagnose(output)
    assert error in found.error
    assert cause in found.cause
    assert fix in found.fix


def test_a_command_line_is_not_an_error():
    found = diagnose(
        "FAILED: a/a.o\ncd a && g++ -Werror=return-type -DMSG='error: no' -c a.cpp -o"
        " a.o\na.cpp:1:1: error: real\n"
    )
    assert found.error == "a.cpp:1:1: error: real"


@pytest.mark.parametrize(
    "output", ["", "\n\n", "[1/2] x\nninja: build stopped: subcommand failed.\n"]
)
def test_silence_is_said(output):
    assert diagnose(output).error == "the compiler said nothing"


def test_the_last_line_speaks_where_no_error_is_known():
    assert diagnose("strange\nstranger\n").error == "stranger"


def test_the_first_error_of_each_source_that_failed():
    steps = [
        f"FAILED: x/{name}.o\ng++ -c {name}.cpp -o {name}.o\n{name}.cpp:1:1: error: in"
        f" {name}\n{name}.cpp:2:1: error: follows\n"
        for name in "abcdefg"
    ]
    found = diagnose("".join(steps))
    assert found.error.splitlines() == [
        "a.cpp:1:1: error: in a",
        *(f"    {name}.cpp:1:1: error: in {name}" for name in "bcde"),
        "    and 2 more",
    ]
    assert len(diagnose("".join(steps[:5])).error.splitlines()) == 5
    full = diagnose(
        steps[0]
        + "FAILED: x/full.o\ncc1plus: fatal error: error writing to /tmp/c.s: No space left on"
        " device\n"
    )
    assert full.cause == "the disk is full"
    assert full.error.startswith("cc1plus")


def test_a_typo_in_a_cpu_kernel_is_no_missing_mathematics():
    place = "FAILED: a.o\nscale_cpu.cpp:9:3: error: "
    typo = diagnose(f"{place}'tt' was not declared in this scope; did you mean 't'?\n")
    assert typo.fix == "correct the line named above"
    for name in (
        "'sqrtf' was not declared in this scope",
        "'log1p' was not declared in this scope",
    ):
        assert "__builtin_sqrtf" in diagnose(f"{place}{name}\n").fix
    assert "__builtin_sqrtf" in diagnose(f"{place}'max' is not a member of 'std'\n").fix
