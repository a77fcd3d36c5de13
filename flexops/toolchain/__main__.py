"""``python3 -m flexops.toolchain``: what a build would be done with here, for scripts, on a plain
Python that has neither torch nor typer yet.

With ``--torch`` (and ``--cuda`` or ``--hip``) it answers for a torch that is still to be installed.
One fact a line: its name, then its value; what is absent has no line. Nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import settings
from ..errors import FlexopsError
from . import gpus, resources
from .discovery import assemble, search_context
from .installed_torch import TorchBuild, torch_build
from .model import Toolchain


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or that of the error it printed."""
    options = _parser().parse_args(arguments)
    try:
        context = search_context(settings.current())
        torch = _planned(options) if options.torch else torch_build()
        facts = (*_machine(), *_tools(assemble(context, torch, device="cuda")))
    except FlexopsError as error:
        print(f"flexops: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(f"{name} {value}" for name, value in facts))
    return 0


def _machine() -> Iterator[tuple[str, object]]:
    """The hardware."""
    seen = gpus.machine()
    for gpu in seen.gpus:
        yield "gpu", f"{gpu.name} ({gpu.capability})"
    if seen.driver:
        yield "driver", seen.driver.release
    for name in gpus.local_gfx_targets():
        yield "gpu", f"AMD {name}"
    found = resources.detect()
    yield "cpus", found.cpus
    yield "memory_bytes", found.memory_bytes


def _tools(toolchain: Toolchain) -> Iterator[tuple[str, object]]:
    """The software."""
    via = dict(toolchain.found_via)
    for name, toolkit in (("cuda", toolchain.cuda), ("rocm", toolchain.rocm)):
        if toolkit:
            yield f"{name}_root", toolkit.root
            yield f"{name}_version", toolkit.version.major_minor
            yield f"{name}_via", via[name]
    for name, tool in (
        ("host", toolchain.host),
        ("launcher", toolchain.launcher),
        ("ninja", toolchain.ninja),
    ):
        if tool:
            yield name, tool.path
            yield f"{name}_version", tool.version
    if toolchain.torch:
        yield "torch", toolchain.torch.version
    yield from (("rejected", f"{one.what} {one.path}: {one.reason}") for one in toolchain.rejected)
    yield from (("note", note) for note in toolchain.notes)


def _planned(options: argparse.Namespace) -> TorchBuild:
    """A torch that is not installed yet, as far as choosing tools depends on it."""
    return TorchBuild(options.torch, options.cuda, options.hip, "", True, Path("torch"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m flexops.toolchain",
        description="What a build would be done with on this machine.",
    )
    parser.add_argument(
        "--torch", metavar="X.Y.Z", help="answer for this torch rather than the installed one"
    )
    parser.add_argument("--cuda", metavar="X.Y", help="the CUDA version that --torch is built for")
    parser.add_argument("--hip", metavar="X.Y", help="the ROCm version that --torch is built for")
    return parser


if __name__ == "__main__":
    sys.exit(main())
