"""What is sent to the engine for a build: the files that `.dockerignore` lets through, the
Dockerfile, and the certificates of one build."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

from flexops.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable

DOCKERFILE = "Dockerfile.this-build"
_CERTIFICATES = "docker/ca-certificates/this-build.crt"


def pack(root: Path, dockerfile: str, ca_bundle: Path | None, out: IO[bytes]) -> None:
    """Write the build context of the checkout ``root`` to ``out``, as a tar. Raises ``ImageError``
    if the CA bundle cannot be read."""
    from docker.utils.build import create_archive

    extra = [(DOCKERFILE, dockerfile)]
    if ca_bundle is not None:
        extra.append((_CERTIFICATES, _certificates(ca_bundle)))
    create_archive(str(root), sorted(_files(root)), fileobj=out, extra_files=extra)


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
