"""From the long output of a build, a solve or an installation to the few lines that say what is
wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Explanation(NamedTuple):
    """What went wrong, in a sentence; what was said about it; what mends it."""

    what: str
    found: str
    fix: str = ""


_SOLVER = "Cannot solve the request because of:"
_LOST = re.compile(
    r"No candidates were found for (?P<spec>[^\n]+?)\.?$|(?P<tree>[^\s│├└─][^\n]*?), for which no"
    r" candidates were found",
    re.MULTILINE,
)
_DAMAGE = (
    "digest",
    "hash mismatch",
    "checksum",
    "corrupt",
    "is not what it was",
    "invalid gzip",
    "invalid zip",
    "Could not find EOCD",
    "unexpected end",
)
_SHOWN = 8
"""Lines of a failed command that are shown."""

_OURS = re.compile(r"^\s*flexops: (?P<text>\S.*)")


def explain(output: str, asked: Sequence[str] = ()) -> Explanation:
    """The first cause that is recognised in ``output``, best known first. ``asked``: the specs that
    somebody wanted together."""
    known = (
        _unsolvable(output, asked)
        or _own_error(output)
        or _script(output)
        or _damage(output)
        or _unreachable(output)
    )
    return known or Explanation("it failed", last_lines(output), "see the log")


def _unsolvable(output: str, asked: Sequence[str]) -> Explanation | None:
    _, found, after = output.partition(_SOLVER)
    if not found:
        return None
    tree = after.strip().split("\n\n")[0].strip()
    lost = [match["spec"] or match["tree"] for match in _LOST.finditer(tree)]
    virtual = sorted({spec.strip() for spec in lost if spec.strip().startswith("__")})
    if lost and len(virtual) == len(set(lost)):
        name = virtual[0].split()[0]
        fix = (
            "CONDA_OVERRIDE_CUDA=13.0, where the GPU's driver is not to be seen"
            if name == "__cuda"
            else ""
        )
        return Explanation(f"this machine does not have {', '.join(virtual)}", tree, fix)
    for spec in asked:  # the solver leaves out what a spec rules out, and then does not find it
        ruled_out = [
            one
            for one in lost
            if one.split()[0] == spec.split()[0] and one != spec and one.removesuffix(" *") != spec
        ]
        if ruled_out:
            return Explanation(
                f"{spec} rules out {ruled_out[0]}, which is required",
                tree,
                f"ask for {ruled_out[0]}, or leave {spec} out",
            )
    if len(set(lost)) == 1:
        return Explanation(
            f"no channel has {lost[0].strip().removesuffix(' *')}",
            tree,
            "name a channel that has it with --from",
        )
    return Explanation(
        "the requirements cannot be met together",
        tree,
        "loosen one of them, or name further channels with --from",
    )


def _own_error(output: str) -> Explanation | None:
    """An error of flexops itself (a compile that failed, a compiler that is missing), said in the
    middle of pip's output."""
    lines = output.splitlines()
    for position, line in enumerate(lines):
        if match := _OURS.match(line):
            told = [match["text"]]
            indent = len(line) - len(line.lstrip())
            for following in lines[position + 1 :]:
                if not re.match(rf"\s{{{indent + 1},}}\S", following):
                    break
                told.append(following.strip())
            details = dict(part.partition(": ")[::2] for part in told[1:])
            rest = "; ".join(
                f"{label}: {text}" for label, text in details.items() if label != "fix" and text
            )
            return Explanation(told[0], rest, details.get("fix", ""))
    return None


def _script(output: str) -> Explanation | None:
    """A command of the recipe's script or of its tests that failed: the command, and what it
    said."""
    tested = any(sign in output for sign in ("failed package content tests", "Test failed"))
    what = "it was built, but its tests fail" if tested else "its script failed"
    before, failed, _ = output.partition("Script failed with status")
    if not failed:
        return Explanation(what, last_lines(output), "see the log") if tested else None
    lines = [line for line in before.splitlines() if line.strip()]
    command = max(
        (position for position, line in enumerate(lines) if line.startswith("+ ")),
        default=len(lines) - 3,
    )
    said = lines[max(command, 0) :]
    shown = said if len(said) <= _SHOWN else [said[0], *said[1 - _SHOWN :]]
    return Explanation(what, "\n    ".join(line.strip() for line in shown), "see the log")


def _damage(output: str) -> Explanation | None:
    for line in output.splitlines():
        if any(sign.lower() in line.lower() for sign in _DAMAGE):
            named = next(
                (
                    text.strip()
                    for text in output.splitlines()
                    if ".conda" in text or ".tar.bz2" in text
                ),
                "",
            )
            found = line.strip() if named in line else f"{named}: {line.strip()}"
            return Explanation(
                "a package is damaged", found, "build or download it again, and index the channel"
            )
    return None


def _unreachable(output: str) -> Explanation | None:
    for line in output.splitlines():
        if "error sending request" in line or "dns error" in line:
            return Explanation(
                "a channel cannot be reached",
                line.strip(),
                "check the network, or name a channel that is reachable with --from",
            )
    return None


def last_lines(output: str, count: int = 3) -> str:
    """The end of ``output``, blank lines left out."""
    return "\n    ".join([line.strip() for line in output.splitlines() if line.strip()][-count:])
