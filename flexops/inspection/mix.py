"""Instructions by kind: of PTX, which any NVRTC writes, and of machine code, where there is a
disassembler."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

from ..errors import ToolchainError
from ..toolchain import proc

KINDS: tuple[tuple[str, str, str], ...] = (
    # kind, what PTX's instructions of it begin with, what SASS's do; the first that fits counts
    ("matrix", r"mma|wgmma|wmma", r"[HIDQB]?G?MMA|WARPGROUP"),
    (
        "global memory",
        r"ld\.global|st\.global|ld\.nc|red\.global|atom",
        r"LDG|STG|RED|ATOMG?\b|LD\.|ST\.|LD\b|ST\b",
    ),
    (
        "shared memory",
        r"ld\.shared|st\.shared|ldmatrix|stmatrix|atom\.shared",
        r"LDS|STS|LDSM|STSM|ATOMS",
    ),
    ("asynchronous copy", r"cp\.", r"LDGSTS|UTMA|UBLKCP|LDGDEPBAR|DEPBAR"),
    ("local memory", r"ld\.local|st\.local", r"LDL|STL"),
    ("parameters and constants", r"ld\.param|ld\.const|st\.param", r"LDC|ULDC"),
    ("special functions", r"ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh", r"MUFU"),
    ("conversion", r"cvt", r"F2F|F2I|I2F|I2I|F2FP|FRND"),
    (
        "floating point",
        r"(fma|add|sub|mul|div|min|max|neg|abs)\.(\w+\.)*(f|bf)",
        r"[FDH](ADD|MUL|FMA|MNMX|SETP?|SEL|CHK)",
    ),
    ("shuffles and votes", r"shfl|vote|redux|match", r"SHFL|VOTE|REDUX|MATCH"),
    ("barriers", r"bar|mbarrier|membar|fence", r"BAR|SYNCS|MEMBAR|FENCE|WARPSYNC|ERRBAR|CCTL"),
    ("branches", r"bra|call|ret|exit", r"BRA|BRX|CALL|RET|EXIT|BSSY|BSYNC|JMP"),
    ("integers, moves, predicates", r"", r""),
)


def of_ptx(text: str) -> Counter[str]:
    """The instructions of a kernel's PTX, as they stand: a loop's count once."""
    lines = (line.strip() for line in text.partition(".entry")[2].splitlines())
    words = (
        re.sub(r"^@!?%\w+\s+", "", line)
        for line in lines
        if line.endswith(";") and not line.startswith((".", "//", "ret"))
    )
    return _counted((word.split()[0].rstrip(";") for word in words if word), 1)


def of_sass(listing: str) -> Counter[str]:
    """The instructions of what nvdisasm or cuobjdump writes."""
    found = re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]+)", listing)
    return _counted((match[1] for match in found if not match[1].startswith("NOP")), 2)


def disassembly(cubin: Path) -> str:
    """What the machine code says.

    Raises:
        ToolchainError: there is no disassembler, or it fails.
    """
    for name, options in (("nvdisasm", ["-c"]), ("cuobjdump", ["-sass"])):
        if tool := find_tool(name):
            done = proc.run([tool, *options, str(cubin)], seconds=120, apart=True)
            if done.status:
                raise ToolchainError(f"{name} fails", found=done.errors.strip() or str(done.status))
            return done.output
    raise ToolchainError(
        "there is no disassembler here",
        found="neither nvdisasm nor cuobjdump",
        fix="pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",
    )


def find_tool(name: str) -> str | None:
    """A program of CUDA's: on PATH, in a toolkit, in the environment's wheels."""
    from .. import settings, toolchain

    if found := shutil.which(name):
        return found
    chosen = settings.current()
    places = [*filter(None, [chosen.cuda_home]), Path("/usr/local/cuda")]
    places += [
        path
        for site in toolchain.discovery.search_context(chosen).site_dirs
        for path in sorted(Path(site, "nvidia").glob("*"))
    ]
    return next((str(path) for place in places if (path := place / "bin" / name).is_file()), None)


def _counted(words: object, column: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for word in words:  # type: ignore[attr-defined]
        kind = next(row[0] for row in KINDS if re.match(row[column], word))
        counts[kind] += 1
    return counts
