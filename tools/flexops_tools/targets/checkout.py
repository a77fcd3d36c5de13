"""Where the checkout is that images, conda packages and rendered files are made from."""

from __future__ import annotations

from pathlib import Path

from flexops import _toml, distribution
from flexops.errors import TargetError
from flexops.targets import loading

_OWN = Path(__file__).resolve().parents[3]
_MATRIX = "flexops/targets/matrix.toml"


def checkout() -> Path:
    """Root of the checkout of this package, else of the one that the working directory is in.

    Raises:
        TargetError: neither is a checkout, or the one found has another matrix than flexops.
    """
    here = Path.cwd()
    found = next((one for one in (_OWN, here, *here.parents) if _is_checkout(one)), None)
    if found is None:
        raise TargetError(
            "this needs a checkout of flexops",
            found=f"an installed flexops-tools ({_OWN}); the working directory is {here}",
            required="a working directory inside a checkout",
            fix="cd into a clone of flexops, and run the command again",
        )
    known = Path(loading.PATH)
    if (found / _MATRIX).read_bytes() != known.read_bytes():
        raise TargetError(
            "the installed flexops and the checkout have different matrices of targets",
            found=f"{known}, and {found / _MATRIX}",
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
