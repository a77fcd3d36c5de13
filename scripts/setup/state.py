"""What the setup made in this checkout: `.flexops/` and the list of it, for --uninstall."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from .terminal import Failure, Step, ask, heading, note, on_terminal, say

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".flexops"
COMMAND = "bash scripts/setup_cuda_dev_environment.sh"
MARKER = ".flexops-setup"
"""In an environment's directory: it was made by this, for which target."""
_OURS = ("flexops/_aot", "flexops_torch.egg-info", "tools/flexops_tools.egg-info")
_FILES = (
    *("env.sh", "env.posix.sh", "requirements.lock", "bin", "cuda", "cache", "uv"),
    *("lock", "packages", "checked", "checked.date", "made"),
)  # `made` last: an interrupted removal can go on
_locks: list[object] = []


def read(path: Path) -> str:
    """The text of a file; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def replace(path: Path, text: str, *, executable: bool = False) -> None:
    """Write a file atomically; a file that holds that text already is left alone."""
    if path.exists() and read(path) == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    if executable:
        new.chmod(0o755)
    new.replace(path)


def lock() -> None:
    """Two runs at once would install into each other's environment. The lock dies with the
    process."""
    STATE.mkdir(exist_ok=True)
    file = (STATE / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Failure(
            "another run of this script is at work in this checkout", "wait for it to end"
        ) from error
    _locks.append(file)


def made(path: Path) -> None:
    """Remember that this made it, for --uninstall."""
    _write_lines("made", {**_lines("made"), str(path): None})


def is_unfinished(prefix: Path) -> bool:
    """An environment is listed in .flexops/unfinished while it is made, filled or removed: one that
    was interrupted looks whole, and is not."""
    return str(prefix) in _lines("unfinished")


def unfinished(prefix: Path, now: bool) -> None:
    lines = {**_lines("unfinished"), str(prefix): None}
    if not now:
        del lines[str(prefix)]
    _write_lines("unfinished", lines)


def _lines(name: str) -> dict[str, None]:
    return dict.fromkeys(read(STATE / name).splitlines())


def _write_lines(name: str, lines: dict[str, None]) -> None:
    if lines:
        replace(STATE / name, "".join(f"{line}\n" for line in lines))
    else:
        (STATE / name).unlink(missing_ok=True)


def uninstall(*, yes: bool, dry_run: bool) -> None:
    """Remove what `.flexops/made` lists, and only that."""
    Step.fix = "make the paths above writable, then run the same command again"
    if not (STATE / "made").exists():
        say("nothing to remove: this script made nothing in this checkout")
        return
    paths = [path for path in map(Path, _lines("made")) if _is_ours(path)]
    paths += [path for name in _FILES if (path := STATE / name).exists()]
    heading("Will be removed")
    say("\n".join(f"  {path}" for path in paths))
    if (STATE / "packages").exists():
        note("ccache was installed with the system's package manager and stays")
    if dry_run:
        say("--dry-run: nothing was done")
    elif yes or not on_terminal() or ask("Go ahead?", default=False):
        for path in paths:
            if (path / MARKER).exists():
                unfinished(path, True)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (STATE / "unfinished").unlink(missing_ok=True)
        try:
            STATE.rmdir()
        except OSError:
            note(f"{STATE} holds more, which this script did not make; it stays")
        say("removed; in a shell that has sourced env.sh, flexops_env_undo takes its settings back")
    else:
        say("nothing was done")


def _is_ours(path: Path) -> bool:
    """It still is what this made: something in this checkout, or an environment with our marker."""
    if not path.exists():
        return False
    if path in [ROOT / name for name in _OURS]:
        return True
    empty = path.is_dir() and not any(path.iterdir())
    return (path / MARKER).exists() or empty or is_unfinished(path)
