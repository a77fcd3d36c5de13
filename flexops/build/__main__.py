"""``python -m flexops.build cpu|cuda|rocm``: compile every operator into the build cache, where
there is no command line yet.

An image's build runs this on the part of the package that compiling depends on, so that its layer
with the libraries outlives edits to the rest.
"""

from __future__ import annotations

import sys

from .. import settings
from ..errors import CompileError, FlexopsError
from .deliver import aot


def main(accelerator: str) -> int:
    """The exit code: 0 if every library was built, else that of the first error, after all of
    them."""
    try:
        results = aot.build(
            (), settings.current(), devices=("cpu",) if accelerator == "cpu" else ("cpu", "cuda")
        )
    except FlexopsError as error:
        print(f"flexops: {error}", file=sys.stderr)
        return error.exit_code
    for result in results:
        if result.error:
            print(
                f"flexops: {result.plan.name}: {result.error}{_log(result.error)}", file=sys.stderr
            )
        else:
            print(
                f"{result.plan.name}: {'was there' if result.cached else f'{result.seconds:.1f} s'}"
            )
    return next((result.error.exit_code for result in results if result.error), 0)


def _log(error: FlexopsError) -> str:
    """The compilers' own words: where this runs, the log's file does not outlive the failure."""
    if isinstance(error, CompileError) and error.log and error.log.is_file():
        return "\n" + error.log.read_text(encoding="utf-8", errors="replace")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
