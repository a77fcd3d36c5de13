"""Whose files these are. Code is opened only from where only this user and root could have
put it, nor can swap it after it was looked at.

That is decided by owners and write bits: of the file, of the directories that hold it, and of every
directory on the way there, because a user who can rename one of those decides what is found at the
path. So what was verified is what is opened, although both go by path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

_MOST_LINKS = 40  # the kernel's own bound
_NOBODY = 65534  # what the kernel shows for owners that a user namespace does not know


def problem(status: os.stat_result) -> str:
    """What lets another user change a file or directory, such as ``"belongs to user id 7, ..."``;
    "" if nothing does.

    A sticky bit does not help: it lets everybody add files.
    """
    me = os.geteuid()
    if status.st_uid not in (me, 0):
        return f"belongs to user id {status.st_uid}, not to you ({me}) or root"
    writers = _writers(status)
    return f"can be written by {writers} (mode {stat.filemode(status.st_mode)})" if writers else ""


def path_problem(path: str, *, passage: bool = False) -> str:
    """Who else could change a directory, or put another one in its place; "" if none could, or it
    is missing.

    Args:
        passage: the directory may itself be one to which others may add files, as those on the way
            to it.

    Raises:
        OSError: something on the way to it cannot be looked at.
    """
    try:
        for place, status, last in _passed(path):
            if wrong := problem(status) if last and not passage else _passage_problem(status):
                return (
                    f"{place} {wrong}"
                    if last
                    else f"{place} {wrong}, who could put another directory in the place of {path}"
                )
    except FileNotFoundError:
        pass  # what is there of the way is fine
    return ""


def make_directory(path: str, mode: int = 0o755) -> None:
    """``mkdir -p``, but new directories are writable for this user only, whatever the umask."""
    if not os.path.isdir(path):
        make_directory(os.path.dirname(path))
        try:
            os.mkdir(path, mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        except FileExistsError:
            if not os.path.isdir(path):
                raise


def _passage_problem(status: os.stat_result) -> str:
    """The same of a directory or link on the way. Here a sticky bit does help, and the group that a
    user is alone in does no harm.

    Nor does who owns flexops itself, such as the host's user whose checkout root works on in a
    container: that is whose code runs anyway.
    """
    if (
        status.st_uid not in (os.geteuid(), 0)
        and not _is_unmapped(status.st_uid)
        and status.st_uid != os.stat(__file__).st_uid
    ):
        return f"belongs to user id {status.st_uid}"
    writers = (
        "" if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX else _writers(status)
    )
    if not writers or (writers == "its group" and _is_private(status.st_gid, status.st_uid)):
        return ""
    return f"can be written by {writers} (mode {stat.filemode(status.st_mode)})"


def _writers(status: os.stat_result) -> str:
    return (
        "everybody"
        if status.st_mode & stat.S_IWOTH
        else "its group"
        if status.st_mode & stat.S_IWGRP
        else ""
    )


def _passed(path: str) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Every directory and link that opening a path goes through, and whether it is the last."""
    ahead, place, links = _parts(path), "/", 0
    yield place, os.lstat(place), not ahead
    while ahead:
        part = ahead.pop()
        if part == "..":
            place = os.path.dirname(place)
            continue
        step = os.path.join(place, part)
        status = os.lstat(step)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(step)
            ahead += _parts(target)
            place = "/" if target.startswith("/") else place
            yield step, status, False
        else:
            place = step
            yield place, status, not ahead


def _parts(path: str) -> list[str]:
    """The names in a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _is_private(group: int, owner: int) -> bool:
    """Whether a group has its owner as the only member, as many systems give one to every user (and
    make files that it may write to)."""
    import grp
    import pwd

    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:  # a container need not know its user's name
        name = ""
    try:
        found = grp.getgrgid(group)
    except KeyError:
        return group == owner
    return (group == owner or found.gr_name == name) and set(found.gr_mem) <= {name}


def _is_unmapped(user: int) -> bool:
    """Whether that is how a user namespace shows files of the host's root, say, who is nobody in
    it."""
    if user != _NOBODY:
        return False
    try:
        with open("/proc/self/uid_map", encoding="ascii") as table:
            ranges = [tuple(map(int, line.split())) for line in table]
    except (OSError, ValueError):
        return False
    return not any(first <= user < first + count for first, _, count in ranges)
