"""A child process that compiles with NVRTC: a crash, a hang or a lack of memory is then its own.
Run as a script, by ``kernel_compiler``.

    python -I -S nvrtc_worker.py LIBNVRTC BUILTINS

Reads jobs from standard input, one JSON object a line, and answers each with one line:

    {"source": "...", "expressions": ["flexops::rope::rotate<float>"],
     "options": ["--gpu-architecture=sm_90"], "ptx": false, "output": "FILE", "headers": []}
    {"symbol": "_ZN7flexops4rope6rotate...", "log": "..."}    the code is in FILE; one symbol a line

``headers``: pairs of a header's name and its text.
    {"error": "...", "log": "..."}

NVRTC holds a lock while it compiles, so what shall run at the same time runs in several of these.
"""

import ctypes
import json
import sys


class Nvrtc:
    def __init__(self, library: str, builtins: str) -> None:
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(library)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, job: dict[str, object]) -> dict[str, str]:
        lib, program = self.library, ctypes.c_void_p()
        source = str(job["source"]).encode("utf-8", "surrogateescape")
        expressions, options = (
            [str(item).encode() for item in job[name]]  # type: ignore[attr-defined]
            for name in ("expressions", "options")
        )
        pairs = [[one.encode() for one in pair] for pair in job["headers"]]  # type: ignore[attr-defined]
        array = ctypes.c_char_p * len(pairs)
        texts, names = array(*[pair[1] for pair in pairs]), array(*[pair[0] for pair in pairs])
        created = lib.nvrtcCreateProgram(
            ctypes.byref(program), source, b"kernel.cu", len(pairs), texts, names
        )
        self._check(created)
        try:
            for expression in expressions:
                self._check(lib.nvrtcAddNameExpression(program, expression))
            status = lib.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*options)
            )
            log = self._get("ProgramLog", program).decode(errors="replace").rstrip("\0\n")
            if status:
                return {"error": lib.nvrtcGetErrorString(status).decode(), "log": log}
            symbols = [self._symbol(program, expression) for expression in expressions]
            with open(str(job["output"]), "wb") as stream:
                stream.write(self._get("PTX" if job["ptx"] else "CUBIN", program))
            return {"symbol": "\n".join(symbols), "log": log}
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _symbol(self, program: ctypes.c_void_p, expression: bytes) -> str:
        symbol = ctypes.c_char_p()
        self._check(self.library.nvrtcGetLoweredName(program, expression, ctypes.byref(symbol)))
        return (symbol.value or b"").decode()

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self.library.nvrtcGetErrorString(status).decode())


def main() -> None:
    nvrtc = None
    for line in sys.stdin:
        try:
            nvrtc = nvrtc or Nvrtc(sys.argv[1], sys.argv[2])
            answer = nvrtc.compile(json.loads(line))
        except (OSError, RuntimeError) as error:
            answer = {"error": str(error), "log": ""}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
