"""What is sent to the engine for a build: the files that `.dockerignore` lets through, the
Dockerfile, and the certificates of one build."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from flexops.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable

DOCKERFILE = "Dockerfile.this-build"
_CERTIFICATES = "docker/ca-certificates/this-build.crt"


def write(root: Path, dockerfile: str, ca_bundle: Path | None, folder: Path) -> None:
    """Copy the build context of the checkout ``root`` into ``folder``. Raises ``ImageError`` if the
    CA bundle cannot be read."""
    texts = {DOCKERFILE: dockerfile}
    if ca_bundle is not None:
        texts[_CERTIFICATES] = _certificates(ca_bundle)
    for name in _files(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name, follow_symlinks=False)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _files(root: Path) -> Iterable[str]:
    from docker.utils.build import exclude_paths

    lines = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    found: Iterable[str] = exclude_paths(str(root), patterns)
    # Directories go along with their files; alone they would only make the context depend on what
    # else lies around.
    return (
        path
        for path in found
        if not (root / path).is_dir() and path not in (".dockerignore", "Dockerfile")
    )


def _certificates(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ImageError(
            "the CA bundle cannot be read",
            found=f"{path}: {error.strerror}",
            fix="--ca-bundle FILE   # of PEM certificates",
        ) from error
    if "BEGIN CERTIFICATE" not in text:
        raise ImageError(
            "the CA bundle holds no certificate",
            found=str(path),
            required="a file of PEM certificates",
            fix="--ca-bundle FILE",
        )
    return text
