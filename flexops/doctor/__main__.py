"""``python -m flexops.doctor``: the same as ``flexops doctor``, with nothing but the standard
library."""

from __future__ import annotations

import argparse
import sys

from . import report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flexops.doctor", description=report.HELP)
    parser.add_argument("--json", action="store_true", help=report.JSON_HELP)
    parser.add_argument("--target", metavar="ID", help=report.TARGET_HELP)
    parser.add_argument("--strict", action="store_true", help=report.STRICT_HELP)
    options = parser.parse_args()
    return report.run(options.target, as_json=options.json, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
