"""From what the compilers said to the first real error, its cause and its fix."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..plan import kernel_names

_ERROR_LINE = re.compile(
    r"(\berror\s*:|\bfatal error\b|\berror #|undefined reference|cannot find -l|No space left on"
    r" device|Disk quota|File size limit|Killed|nvcc fatal"
    r"|died due to signal|Permission denied|^flexops: )",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"^(\[\d+/\d+\]|FAILED:|ninja: (?!error)|compilation terminated|\d+ errors? detected|make\b)"
)


@dataclass(frozen=True)
class Diagnosis:
    """The first line that is an error, its likely cause and what to do."""

    error: str
    cause: str
    fix: str


@dataclass(frozen=True)
class Rule:
    """What a message that matches ``pattern`` means."""

    pattern: str
    cause: str
    fix: str


# docs/troubleshooting.md is rendered from these (flexops_tools.docs).
RULES: tuple[Rule, ...] = (
    Rule(
        r"No space left on device|Disk quota exceeded|File size limit exceeded|File too large",
        "the disk is full",
        "free some space, or move the cache: export FLEXOPS_CACHE_DIR=<dir>; large temporary files"
        " go to TMPDIR",
    ),
    Rule(
        r"Killed.*(cc1plus|cicc|ptxas|nvcc|program)|fatal error: Killed|died due to signal"
        r" 9|virtual memory exhausted|[Cc]annot allocate memory|out of memory",
        "the compiler ran out of memory",
        "export MAX_JOBS=1",
    ),
    Rule(
        r"^flexops: stopped, because",
        "a compiler exceeded its time limit",
        "export FLEXOPS_COMPILE_TIMEOUT=<seconds> (0: no limit)",
    ),
    Rule(
        r"^flexops: ninja was ended",
        "the build was killed",
        "run it again; if memory was short: export MAX_JOBS=1",
    ),
    Rule(
        r"(Instruction|Feature) '[^']+'.*(\.target|architecture) '?sm_\d+",
        "an instruction that the requested architectures lack, or have only with the suffix a"
        " (wgmma: 9.0a, tcgen05: 10.0a)",
        'export TORCH_CUDA_ARCH_LIST="9.0a"   # the architecture list; with the suffix the code'
        " runs on exactly that capability",
    ),
    Rule(
        r"unsupported GNU version|unsupported clang version",
        "the host compiler is newer than this nvcc accepts",
        "install an older g++ (for example `apt-get install g++-12`) or set CXX to one",
    ),
    Rule(
        r"Unsupported gpu architecture|not supported.*gpu-architecture|Value '.*' is not defined"
        r" for option 'gpu-(architecture|code)'",
        "this nvcc cannot emit an architecture that was asked for",
        'export TORCH_CUDA_ARCH_LIST="<your GPU>", or use a newer CUDA toolkit',
    ),
    Rule(
        r"C\+\+(20|17) or later|You need C\+\+(17|20) to compile PyTorch|unrecognized command.line"
        r" option.*-std=c\+\+20",
        "the host compiler is too old for torch's headers",
        "install g++ 11.3 or newer and set CXX to it",
    ),
    Rule(
        r"cuda_runtime(_api)?\.h: No such file|cuda_fp16\.h: No such file",
        "the CUDA runtime headers are missing",
        'pip install "cuda-toolkit[nvcc,cudart,cccl]" in torch\'s CUDA version',
    ),
    Rule(
        r"Python\.h: No such file",
        "the Python headers are missing",
        "apt-get install python3-dev (or the -devel package of your Python)",
    ),
    Rule(
        r"cannot find -lcudart_static",
        "the static CUDA runtime is missing",
        'pip install "cuda-toolkit[cudart]" in torch\'s CUDA version',
    ),
    Rule(
        r"cannot find -l(\S+)",
        "a library to link with was not found",
        "add its directory to extra_ldflags with -L",
    ),
    Rule(
        r"(\S+): No such file or directory",
        "a file that a source includes was not found",
        "add its directory to the include paths",
    ),
    Rule(
        r"'(LaunchConfig|blocks|ceil_div|kernel|launch|last_error)' (does not name a type|was not"
        r" declared|has not been declared)",
        "a launcher does not include what launches kernels",
        '#include "common/launch.h"',
    ),
    Rule(
        r"'(TensorView|TensorViews|TensorRow|Dtype)' (does not name a type|was not declared|has not"
        r" been declared)",
        "a name of flexops' headers is not known there: its header is not included, or the launcher"
        " is in another namespace than the library's",
        "#include the kernels' header, and open the library's own namespace; `using namespace"
        " flexops` in that one makes the names known",
    ),
    Rule(
        r"'(baseline|avx2|avx512)' is not a namespace-name",
        "a kernel for the CPU does not include flexops' headers before `using namespace"
        " flexops::FLEXOPS_ISA`",
        '#include "common/cpu_elements.h"   # or "common/cpu.h", at the top',
    ),
    Rule(
        r"_cpu\.cpp:.*('\w+' is not a member of 'std'|'(a?(sin|cos|tan)h?|atan2|sqrt|cbrt|exp[2m1]*"
        r"|log[12p0]*|pow|f?abs|f?max|f?min|fma|fmod|floor|ceil|trunc|l?l?r(ound|int)|nearbyint"
        r"|hypot|erfc?|isnan|isinf|isfinite)f?' was not declared in this scope)",
        "a kernel for the CPU calls an undeclared function: those of C's and C++'s mathematics are"
        " not declared, because each instruction set needs its own",
        "take the compiler's own: __builtin_sqrtf, __builtin_expf, __builtin_fabsf ... for floats;"
        " else declare it, or include its C header",
    ),
    Rule(
        r"undefined reference",
        "a symbol is declared and defined nowhere",
        "add the source or library that defines it",
    ),
    Rule(
        r"Permission denied",
        "a file or directory may not be used",
        "check the owner and mode of the path named",
    ),
)

LOAD_RULES: tuple[Rule, ...] = (
    Rule(
        r"undefined symbol: (\w[\w.$@]*)",
        "it needs a symbol that nothing defines",
        "define it in one of the sources, or name the library that does in extra_ldflags; check its"
        ' spelling, namespace and extern "C"',
    ),
    Rule(
        r"(\S+): cannot open shared object file",
        "it needs a library that is not found",
        "name its directory: extra_ldflags=['-Wl,-rpath,<directory>'], or LD_LIBRARY_PATH",
    ),
    Rule(
        r"does not define module export function \((\w+)\)",
        "it is no Python module of its name",
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) in a source, functions= of load_inline, or"
        " is_python_module=False",
    ),
    Rule(
        r'generic_type: type "([^"]+)" is already registered',
        "an earlier build of it, or another extension, has registered a class in this process",
        "py::class_<T>(m, name, py::module_local()), of which each build has its own; or restart"
        " the process",
    ),
)

_GENERAL = RULES[:4]
_MOST_ERRORS = 5
_SILENCE = "the compiler said nothing"


def diagnose(output: str) -> Diagnosis:
    """The first real error in a build's output, and those of the other sources that failed. Output
    with no known error yields its last line."""
    steps = output.split("FAILED: ")
    found = [_first(step) for step in steps[1:] or steps]
    # A full disk or a killed compiler explains every other message, wherever it stands; so the
    # rules' order goes before the lines'.
    general = min(
        found,
        key=lambda one: next(
            (number for number, rule in enumerate(_GENERAL) if rule.cause == one.cause),
            len(_GENERAL),
        ),
    )
    errors = list(
        dict.fromkeys([general.error, *(one.error for one in found if one.error != _SILENCE)])
    )
    more = [f"and {len(errors) - _MOST_ERRORS} more"] if len(errors) > _MOST_ERRORS else []
    return Diagnosis("\n    ".join([*errors[:_MOST_ERRORS], *more]), general.cause, general.fix)


def _first(output: str) -> Diagnosis:
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not _NOISE.match(line.strip())
    ]
    errors = [line for line in lines if _ERROR_LINE.search(line) and " -c " not in line]
    for rule in _GENERAL:
        for line in errors:
            if re.search(rule.pattern, line):
                return Diagnosis(line, rule.cause, rule.fix)
    first = errors[0] if errors else lines[-1] if lines else _SILENCE
    for rule in RULES:
        if re.search(rule.pattern, first):
            return Diagnosis(first, rule.cause, rule.fix)
    return Diagnosis(first, "the source does not compile", "correct the line named above")


def with_cause(error: BaseException) -> str:
    """An error with what caused it: torch says of a library only that it could not be loaded."""
    return "; ".join(str(one) for one in (error, error.__cause__) if one)


def load_trouble(said: str) -> Diagnosis | None:
    """What the dynamic linker's refusal of a library means; None for other errors."""
    for rule in LOAD_RULES:
        if match := re.search(rule.pattern, said):
            name = demangled(match[1])
            symbol = (
                match[0]
                if rule is LOAD_RULES[1]
                else match[1]
                if name == match[1]
                else f"{name} ({match[1]})"
            )
            return Diagnosis(symbol, rule.cause, rule.fix)
    return None


def demangled(symbol: str) -> str:
    """A C++ symbol as it was written; others themselves."""
    return kernel_names.demangled(symbol) if symbol.startswith("_Z") else symbol
