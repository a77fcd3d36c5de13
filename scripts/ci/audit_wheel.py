"""Whether each wheel's tag is true, by auditwheel: no symbol of a newer glibc, no instruction or
library that its tag does not promise, but torch's.

python scripts/ci/audit_wheel.py WHEEL...
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

OF_TORCH = {"libtorch_cpu.so"}
"""What every process that opens the wheel's libraries has opened before."""


def wrong(tag: str, audit: dict[str, Any]) -> list[str]:
    """Why the wheel is not what its tag says: ``audit`` is what ``auditwheel show --json`` says of
    it."""
    if "sym_tag" not in audit:
        return [audit.get("error", "there is no library in it")]
    found = []
    if _glibc(audit["sym_tag"]) > _glibc(tag):
        found.append(f"its symbols are {audit['sym_tag']}'s: {audit['versioned_symbols']}")
    if others := {*audit["external_libs"]} - OF_TORCH:
        found.append(
            f"it needs libraries that the tag does not promise: {', '.join(sorted(others))}"
        )
    if symbols := audit["policy_upgrades"].get(tag, {}).get("blacklisted_symbols"):
        found.append(f"it needs symbols that the tag does not promise: {symbols}")
    if audit["unsupported_isa"]:
        found.append("it needs instructions that the tag does not promise")
    return found


def _glibc(tag: str) -> tuple[float, ...]:
    match = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    return (int(match[1]), int(match[2])) if match else (float("inf"),)


def main(wheels: list[str]) -> int:
    failed = not wheels
    for wheel in wheels:
        tag = Path(wheel).stem.rpartition("-")[2]
        done = subprocess.run(
            [sys.executable, "-m", "auditwheel", "show", "--json", wheel],
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.stdout.startswith("{"):
            print(f"{wheel}: auditwheel says {done.stderr.strip()}", file=sys.stderr)
            failed = True
            continue
        audit = json.loads(done.stdout)
        problems = wrong(tag, audit)
        print(
            f"{wheel}:"
            f" {'; '.join(problems) or 'true to its tag, with symbols of ' + audit['sym_tag']}"
        )
        failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
