"""The child processes that compile kernels (``nvrtc_worker.py``, or nvcc), each job with a time
limit; and what they say of it, read."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CompileError
from ...toolchain import proc
from ..plan.device_library import CUDA_ROOT
from ..plan.kernel_names import alike
from ..plan.kernel_plan import OPTIONS, KernelPlan

if TYPE_CHECKING:
    from ...toolchain.nvrtc import DeviceCompiler

CORRECT_USE = "correct how"
_WORKER = Path(__file__).resolve().with_name("nvrtc_worker.py")
_NO_MEMORY = (
    r"[Oo]ut of memory|OUT_OF_MEMORY|Memory allocation failure|[Cc]annot allocate memory|failed to"
    r" map segment|bad_alloc|MemoryError|signal 9$"
)
"""How the library and the three compilers in it say so, and the system for them."""
_RESOURCES = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "shared": r"(\d+) bytes smem",
    "barriers": r"used (\d+) barriers",
}
"""What ptxas reports of a kernel: registers of a thread; bytes of its stack and of what it spills
there; bytes of a block's static shared memory."""


def resources_in(log: str, symbol: str) -> dict[str, int]:
    """What a kernel takes, from what ptxas said of it and of the others in its source; empty for
    PTX, of which ptxas says nothing."""
    _, there, own = log.partition(f"Compiling entry function '{symbol}'")
    if not there:
        return {}
    own = own.partition("Compiling entry function")[0]
    return {
        name: int(found[1]) if (found := re.search(pattern, own)) else 0
        for name, pattern in _RESOURCES.items()
    }


class Worker:
    """Compiles kernels, one after the other."""

    def __init__(self, compiler: DeviceCompiler) -> None:
        self.compiler = compiler
        self._child: proc.JsonChild | None = None
        self._nvcc_process: proc.Process | None = None

    @property
    def alive(self) -> bool:
        return self._child is None or self._child.alive

    def compile(
        self, plan: KernelPlan, output: Path, time_limit: float
    ) -> tuple[str, dict[str, int]]:
        """Write the plan's code to ``output``; returns the symbol under which the driver knows the
        kernel, and what it takes (``resources_in``).

        Raises ``CompileError``.
        """
        answer = (
            self._nvrtc(plan, output, time_limit)
            if self.compiler.kind == "nvrtc"
            else self._nvcc(plan, output, time_limit)
        )
        if "error" in answer:
            raise _failed(plan, answer["error"], answer.get("log", ""))
        if plan.symbols:
            _require_same(plan, answer["symbol"].split("\n"))
        return answer["symbol"], resources_in(answer.get("log", ""), answer["symbol"])

    def stop(self) -> None:
        if self._child:
            self._child.stop()
        if (nvcc := self._nvcc_process) and nvcc.poll() is None:
            proc.kill_all(nvcc.pid)

    def _nvrtc(self, plan: KernelPlan, output: Path, time_limit: float) -> dict[str, str]:
        usual = [
            one
            for one in OPTIONS
            if not (
                one.startswith("--std=") and any(mine.startswith("--std=") for mine in plan.options)
            )
        ]
        options = [
            f"--gpu-architecture={plan.architecture.code}",
            *usual,
            *plan.options,
            *(f"-I{path}" for _, path in plan.roots),
        ]
        job: dict[str, object] = {
            "source": plan.source,
            "expressions": plan.expressions or (plan.expression,),
            "options": options,
        }
        job |= {"ptx": not plan.architecture.sass, "output": str(output), "headers": plan.texts}
        if self._child is None:
            library, builtins = str(self.compiler.path), str(self.compiler.builtins)
            self._child = proc.JsonChild(_WORKER, library, builtins)
        try:
            answer: dict[str, str] = self._child.ask(job, time_limit)
            if "error" in answer:  # the assembler in the library says why on standard error
                answer["log"] = "\n".join(
                    filter(None, (answer["log"], self._child.said().rstrip()))
                )
            return answer
        except TimeoutError:
            raise _failed(
                plan,
                f"it was not done after {time_limit:.0f} s",
                "",
                fix="FLEXOPS_COMPILE_TIMEOUT=0 waits for ever",
            ) from None
        except BrokenPipeError:
            status, said = self._child.end
            return {
                "error": (
                    f"the compiler was ended by signal {-status}"
                    if status < 0
                    else f"the compiler ended with status {status}"
                ),
                "log": said,
            }

    def _nvcc(self, plan: KernelPlan, output: Path, time_limit: float) -> dict[str, str]:
        source = output.with_suffix(".cu")
        source.write_text(
            f"{plan.source}const void* flexops_kernel() {{ return reinterpret_cast<const"
            f" void*>(&{plan.expression}); }}\n",
            encoding="utf-8",
        )
        made = ("-cubin" if plan.architecture.sass else "-ptx", f"-arch={plan.architecture.code}")
        include = [f"-I{path}" for _, path in plan.roots]
        command = [
            str(self.compiler.path),
            *made,
            *OPTIONS,
            *plan.options,
            *include,
            "-o",
            str(output),
            str(source),
        ]
        try:
            self._nvcc_process = proc.start(command)
            done = proc.finish(self._nvcc_process, time_limit)
        finally:
            source.unlink(missing_ok=True)
        if done.status is None:
            return {"error": f"it was not done after {time_limit:.0f} s"}
        if done.status:
            return {"error": f"nvcc ended with status {done.status}", "log": done.output}
        return {"symbol": _symbol_in(output), "log": done.output}


def _require_same(plan: KernelPlan, symbols: list[str]) -> None:
    """Host and device have each compiled a half of a source: what both call a kernel has its
    template's arguments and its parameters' types in it."""
    for expression, host, device in zip(plan.expressions, plan.symbols, symbols, strict=True):
        if alike(host) != alike(device):
            found = f"{host} for the host compiler, {device} for {plan.compiler}"
            what = (
                f"{plan.expression}: the kernel {expression} is not one and the same to both"
                " compilers"
            )
            raise CompileError(what, found=found, required="nvcc for such a source")


def _symbol_in(code: Path) -> str:
    """The one kernel's symbol in a cubin, or in PTX."""
    content = code.read_bytes()
    found = re.search(rb"\.text\.([\w$.]+)\0", content) or re.search(rb"\.entry ([\w$]+)", content)
    return found[1].decode() if found else ""


def _failed(plan: KernelPlan, error: str, log: str, fix: str = "flexops doctor") -> CompileError:
    lines = _error_lines(log)
    found = "\n         ".join([error, *(lines or log.splitlines()[-1:])][:12])
    where = f"{plan.architecture.capability.sm} with {plan.compiler} ({plan.compiler.path})"
    if re.search(_NO_MEMORY, f"{log}\n{error}"):
        fix = (
            "more memory (`ulimit -v`, the container's limit), or fewer compilers at once: export"
            " MAX_JOBS=1"
        )
    elif (
        plan.compiler.kind == "nvrtc" and "libnvrtc" in error + log
    ):  # damaged, or its other half is another version's
        from ...toolchain.diagnosis import nvrtc_fix

        fix = nvrtc_fix(plan.compiler.version)
    elif lines and (user := _use_of(plan, lines[0], log)):
        fix = f"{CORRECT_USE} {user} uses what that header declares"
    elif lines:
        fix = "correct the line named above" + (
            "; if nvcc takes it, NVRTC lacks what it names: device_compiler='nvcc'"
            if plan.expressions
            else ""
        )
    return CompileError(
        f"the kernel {plan.expression} could not be compiled for {where}", found=found, fix=fix
    )


def _use_of(plan: KernelPlan, line: str, log: str) -> str:
    """The place in the source that led to an error in a header of CUDA's; "" for other errors."""
    theirs = [str(path) for name, path in plan.roots if name.startswith(CUDA_ROOT)]
    if not any(line.startswith(f"{path}/") for path in theirs):
        return ""
    places = re.findall(r"at line (\d+) of (\S+)", log)
    own = [
        f"{os.path.basename(path)}({number})"
        for number, path in places
        if not any(path.startswith(f"{root}/") for root in theirs)
    ]
    return own[0] if own else "the source"


def _error_lines(log: str) -> list[str]:
    """The errors in what a compiler said, each with its line of the source and the caret under
    it."""
    blocks = re.split(r"\n\s*\n", log)
    return [
        line
        for block in blocks
        if re.match(r".*\berror\b", block) and "detected in the compilation" not in block
        for line in block.splitlines()[:5]
    ]
