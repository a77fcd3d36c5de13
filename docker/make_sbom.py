"""Prints what is in the image that this runs in, as a CycloneDX document: the Python packages, by
cyclonedx-py, and the system's, by dpkg."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import Any

_CYCLONEDX = "/opt/sbom/bin/cyclonedx-py"
_DPKG = [
    "dpkg-query",
    "--show",
    "--showformat",
    "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n",
]


def system_components(listed: str, distribution: str, release: str) -> list[dict[str, str]]:
    """The components of dpkg's list: a line for each package, with state, name, version and
    architecture."""
    found = []
    for line in listed.splitlines():
        state, name, version, architecture = line.split("\t")
        if state == "installed":
            quoted = version.replace(":", "%3A").replace("+", "%2B")
            purl = (
                f"pkg:deb/{distribution}/{name}@{quoted}"
                f"?arch={architecture}&distro={distribution}-{release}"
            )
            found.append(
                {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
            )
    return found


def _said(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    document: dict[str, Any] = json.loads(
        _said(_CYCLONEDX, "environment", "--output-reproducible", sys.executable)
    )
    base = platform.freedesktop_os_release()
    document["components"] += system_components(
        _said(*_DPKG), base["ID"], base.get("VERSION_ID", "")
    )
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
