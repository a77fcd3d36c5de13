"""What is wrong inside a package. Runs in a process of its own, for it takes the bindings."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .place import SUFFIXES
from .sealing import sha256


def inspect(package: Path, work: Path) -> Iterator[str]:
    """Every file is compared with its digest, and what the package says it is with its name."""
    from rattler.package_streaming import extract

    with tempfile.TemporaryDirectory(dir=work) as folder:
        try:
            extract(package, Path(folder))
            index = json.loads(Path(folder, "info/index.json").read_text())
            for entry in json.loads(Path(folder, "info/paths.json").read_text())["paths"]:
                file = Path(folder, entry["_path"])
                if entry.get("path_type") == "hardlink" and sha256(file) != entry["sha256"]:
                    yield (
                        f"is damaged: {entry['_path']} is not what it was when the package was made"
                    )
        except Exception as error:  # the bindings raise many types
            yield f"is damaged: {error or type(error).__name__}"
            return
    own = f"{index.get('name')}-{index.get('version')}-{index.get('build')}"
    if package.name not in [f"{own}{suffix}" for suffix in SUFFIXES]:
        yield f"is misnamed: it holds {own}"
