"""Fails unless the torch in a directory of wheels is built for what the row is for.

``check_torch.py DIRECTORY WANTED [ACCEPT]``: WANTED is ``cpu``, ``cuda13.0`` or ``rocm7.2``. With
ACCEPT a row for the CPU takes any torch: those for a GPU run on a CPU, too, and take gigabytes.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

FIX = """\
  found: {version}, built for {found}
  required: torch built for {wanted}
  fix: --index-url with a mirror of the row's own index; {accept}or see docs/images.md
"""


def built_for(wheel: Path) -> tuple[str, str]:
    """The version of a torch wheel, and what it is built for, as its version.py says."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("torch/version.py").decode()
    fields = dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE))
    if hip := fields.get("hip"):
        return fields["__version__"], "rocm" + ".".join(hip.split(".")[:2])
    return fields["__version__"], f"cuda{fields['cuda']}" if fields.get("cuda") else "cpu"


def main(directory: str, wanted: str, accept: str = "") -> int:
    version, found = built_for(next(Path(directory).glob("torch-*.whl")))
    if found == wanted:
        return 0
    if wanted == "cpu" and accept:
        sys.stderr.write(f"note: torch {version} is built for {found}, which was accepted\n")
        return 0
    option = "--accept-other-torch takes this one; " if wanted == "cpu" else ""
    sys.stderr.write("flexops: the package index has another torch than the row's\n")
    sys.stderr.write(FIX.format(version=version, found=found, wanted=wanted, accept=option))
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
