"""The child processes that compile kernels (``nvrtc_worker.py``, or nvcc), each job with a time limit; and what they say of it, read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .. import _fork
from ..errors import CompileError
from .kernel_plan import OPTIONS, KernelPlan

if TYPE_CHECKING:
    from ..toolchain.nvrtc import DeviceCompiler

_WORKER = Path(__file__).resolve().with_name("nvrtc_worker.py")
_RESOURCES = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "shared": r"(\d+) bytes smem",
    "barriers": r"used (\d+) barriers",
}
"""What ptxas tells of a kernel: registers of a thread; bytes of its stack and of what it spills there; bytes of a block's static shared memory."""


def resources_in(log: str, symbol: str) -> dict[str, int]:
    """What a kernel takes, from what ptxas said of it and of the others in its source; empty for PTX, of which ptxas says nothing."""
    _, there, own = log.partition(f"Compiling entry function '{symbol}'")
    if not there:
        return {}
    own = own.partition("Compiling entry function")[0]
    return {name: int(found[1]) if (found := re.search(pattern, own)) else 0 for name, pattern in _RESOURCES.items()}


class Worker:
    """A child that compiles kernels, one after the other."""

    def __init__(self, compiler: DeviceCompiler) -> None:
        self.compiler = compiler
        self.alive = True
        self.process: subprocess.Popen[bytes] | None = None

    def compile(self, plan: KernelPlan, output: Path, time_limit: float) -> tuple[str, dict[str, int]]:
        """Write the plan's code to ``output``; returns the symbol under which the driver knows the kernel, and what it takes (``resources_in``).

        Raises ``CompileError``.
        """
        answer = self._nvrtc(plan, output, time_limit) if self.compiler.kind == "nvrtc" else self._nvcc(plan, output, time_limit)
        if "error" in answer:
            raise _failed(plan, answer["error"], answer.get("log", ""))
        return answer["symbol"], resources_in(answer.get("log", ""), answer["symbol"])

    def stop(self) -> None:
        self.alive = False
        if self.process:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _nvrtc(self, plan: KernelPlan, output: Path, time_limit: float) -> dict[str, str]:
        options = [f"--gpu-architecture={plan.architecture.code}", *OPTIONS, *plan.options, *(f"-I{path}" for _, path in plan.roots)]
        job = {"source": plan.source, "expression": plan.expression, "options": options, "ptx": not plan.architecture.sass, "output": str(output)}
        if self.process is None:
            command = [sys.executable, "-I", "-S", str(_WORKER), str(self.compiler.path), str(self.compiler.builtins)]
            with _fork.postponed():  # a child would hold the pipes open that Popen waits for
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            line = read_line(self.process.stdout, time_limit)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.stop()
            raise _failed(plan, f"it was not done after {time_limit:.0f} s", "", fix="FLEXOPS_COMPILE_TIMEOUT=0 waits for ever") from None
        if line:
            answer: dict[str, str] = json.loads(line)
            return answer
        returncode = self.process.wait()
        said = self.process.stderr.read().decode(errors="replace") if self.process.stderr else ""
        self.stop()
        return {"error": f"the compiler was ended by signal {-returncode}" if returncode < 0 else f"the compiler ended with status {returncode}", "log": said}

    def _nvcc(self, plan: KernelPlan, output: Path, time_limit: float) -> dict[str, str]:
        source = output.with_suffix(".cu")
        source.write_text(f"{plan.source}const void* flexops_kernel() {{ return reinterpret_cast<const void*>(&{plan.expression}); }}\n", encoding="utf-8")
        made = ("-cubin" if plan.architecture.sass else "-ptx", f"-arch={plan.architecture.code}")
        include = [f"-I{path}" for _, path in plan.roots]
        command = [str(self.compiler.path), *made, *OPTIONS, *plan.options, *include, "-o", str(output), str(source)]
        try:
            with _fork.postponed():
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            with process:
                try:
                    said, errors = process.communicate(timeout=time_limit or None)
                finally:
                    process.kill()
        except subprocess.TimeoutExpired:
            return {"error": f"it was not done after {time_limit:.0f} s"}
        finally:
            source.unlink(missing_ok=True)
        if process.returncode:
            return {"error": f"nvcc ended with status {process.returncode}", "log": said + errors}
        return {"symbol": _symbol_in(output), "log": said + errors}


def read_line(stream: IO[bytes], time_limit: float) -> bytes:
    """A line of a pipe that nothing else reads; raises ``TimeoutError``."""
    deadline, line = time.monotonic() + time_limit if time_limit else None, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], 0.2 if deadline is None else max(0.0, min(0.2, deadline - time.monotonic())))
        if ready:
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                return b""
            line += piece
        elif deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError
    return line


def _symbol_in(code: Path) -> str:
    """The one kernel's symbol in a cubin, or in PTX."""
    content = code.read_bytes()
    found = re.search(rb"\.text\.([\w$.]+)\0", content) or re.search(rb"\.entry ([\w$]+)", content)
    return found[1].decode() if found else ""


def _failed(plan: KernelPlan, error: str, log: str, fix: str = "flexops doctor") -> CompileError:
    lines = _error_lines(log)
    found = "\n         ".join([error, *(lines or log.splitlines()[-1:])][:12])
    where = f"{plan.architecture.capability.sm} with {plan.compiler} ({plan.compiler.path})"
    fix = "mend the line named above" if lines else fix
    return CompileError(f"the kernel {plan.expression} could not be compiled for {where}", found=found, fix=fix)


def _error_lines(log: str) -> list[str]:
    """The errors in what a compiler said, each with its line of the source and the caret under it."""
    blocks = re.split(r"\n\s*\n", log)
    return [line for block in blocks if re.match(r".*\berror\b", block) and "detected in the compilation" not in block for line in block.splitlines()[:5]]
