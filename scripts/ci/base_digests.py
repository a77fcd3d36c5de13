"""Pins the base images of ``matrix.toml`` by digest, as their registries name them today.

    python3 scripts/ci/base_digests.py            what would change; exit 1 if anything would
    python3 scripts/ci/base_digests.py --write    writes build_digest and runtime_digest

It asks ``docker buildx imagetools inspect``, so it needs docker and a network that reaches the
registries. Afterwards: ``flexops target render``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

MATRIX = Path(__file__).resolve().parents[2] / "flexops/targets/matrix.toml"
_BASE = re.compile(
    r'^(build|runtime)_base = "([^"]+)".*\n(?:(?:build|runtime)_digest = .*\n)*', re.MULTILINE
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def pinned(text: str, look_up: Callable[[str], str]) -> str:
    """The matrix with a digest below each base image; ``look_up`` is asked once for each image."""
    known: dict[str, str] = {}

    def pin(match: re.Match[str]) -> str:
        kind, image = match[1], match[2]
        if image not in known:
            known[image] = look_up(image)
        return f'{match[0].splitlines()[0]}\n{kind}_digest = "{known[image]}"\n'

    return _BASE.sub(pin, text)


def registry(image: str) -> str:
    """The digest of an image, for all of its processors."""
    shown = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    done = subprocess.run(shown, capture_output=True, text=True, check=False)
    digest = done.stdout.strip()
    if done.returncode or not _DIGEST.fullmatch(digest):
        sys.exit(
            f"{image}: no digest\n  found: {(done.stderr or digest).strip()}\n"
            "  fix: docker login, or a network that reaches the registry"
        )
    return digest


def main(arguments: list[str]) -> int:
    before = MATRIX.read_text(encoding="utf-8")
    after = pinned(before, registry)
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    print("\n".join(changed) or "every base image is pinned by its digest of today")
    if "--write" in arguments:
        MATRIX.write_text(after, encoding="utf-8")
        return 0
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
