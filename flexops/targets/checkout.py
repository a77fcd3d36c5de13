"""Where the checkout is that images, conda packages and rendered files are made from."""

from __future__ import annotations

from pathlib import Path

from .. import _toml, distribution
from ..errors import TargetError

_PACKAGE = Path(__file__).resolve().parents[2]
_MATRIX = "flexops/targets/matrix.toml"


def checkout() -> Path:
    """Root of the checkout of this package, else of the one that the working directory is in.

    Raises:
        TargetError: neither is a checkout, or the one found has another matrix than this package.
    """
    if _is_checkout(_PACKAGE):
        return _PACKAGE
    here = Path.cwd()
    found = next((one for one in (here, *here.parents) if _is_checkout(one)), None)
    if found is None:
        raise TargetError(
            "this needs a checkout of flexops",
            found=f"an installed flexops ({_PACKAGE}); the working directory is {here}",
            required="a working directory inside a checkout",
            fix="cd into a clone of flexops, and run the command again",
        )
    if (found / _MATRIX).read_bytes() != (_PACKAGE / _MATRIX).read_bytes():
        raise TargetError(
            "the installed flexops and the checkout have different matrices of targets",
            found=f"{_PACKAGE / _MATRIX}, and {found / _MATRIX}",
            required="the same matrix",
            fix="python -m flexops ..., in the checkout, which runs the checkout's flexops",
        )
    return found


def _is_checkout(root: Path) -> bool:
    try:
        project = _toml.load(root / "pyproject.toml").get("project", {})
    except (OSError, ValueError):
        return False
    named = project.get("name") == distribution.NAME
    return named and (root / "csrc").is_dir() and (root / _MATRIX).is_file()
