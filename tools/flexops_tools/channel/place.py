"""Where things are: computed here and nowhere else."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from flexops.errors import ChannelError

SUFFIXES = (".conda", ".tar.bz2")
SUBDIRS: Final = ("linux-64", "linux-aarch64", "noarch")
DEFAULT = Path("dist/channel")


@dataclass(frozen=True)
class Place:
    """A channel, and what is kept beside it and never published.

    Attributes:
        channel: the folder that is published: ``<subdir>/*.conda`` and the index. Of a channel on
            the web, only the folders beside it are used.
        address: of a channel on the web, which can be read only; empty for a folder.
    """

    channel: Path
    address: str = ""

    @classmethod
    def parse(cls, text: str) -> Place:
        """What ``--channel`` names: a folder, a ``file://`` one too, or the address of a channel on
        the web.

        Raises:
            ChannelError: it is no channel that flexops can read.
        """
        parts = urlsplit(text) if re.match(r"[a-z][a-z0-9+]*://", text, re.IGNORECASE) else None
        if parts is None:
            return cls(Path(text))
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return cls(Path(unquote(parts.path)))
        if parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc:
            return cls(
                DEFAULT.with_name(
                    re.sub(r"[^\w.-]+", "-", f"{parts.netloc}{parts.path}").strip("-")
                ),
                text.rstrip("/"),
            )
        raise ChannelError(
            "this is not a channel that can be read",
            found=text,
            required="a folder, or an http(s):// address without a user name in it",
        )

    @property
    def url(self) -> str:
        return self.address or self.channel.absolute().as_uri()

    @property
    def logs(self) -> Path:
        return self.channel.with_name(f"{self.channel.name}-logs").absolute()

    @property
    def work(self) -> Path:
        """Builds in progress, and what failed ones left to look at."""
        return self.channel.with_name(f"{self.channel.name}-work").absolute()

    def packages(self, name: str = "") -> list[Path]:
        """Package files in the channel, those called ``name`` if one is given, in order of their
        names."""
        return sorted(
            path
            for subdir in SUBDIRS
            for path in (self.channel / subdir).glob(f"{name}-*" if name else "*")
            if path.name.endswith(SUFFIXES) and (not name or distribution(path)[0] == name)
        )

    def require_folder(self) -> None:
        """Raises ``ChannelError`` unless the channel is a folder, or can become one, that this user
        may write."""
        fix = "name another folder with --channel"
        if self.address:
            how = "build into a folder and copy that to the server (docs/conda.md, Publishing)"
            raise ChannelError(
                "a channel on the web can only be read",
                found=self.address,
                required="a folder",
                fix=how,
            )
        for folder in (self.channel, self.logs, self.work):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                what = (
                    "a file is in the way"
                    if isinstance(error, (FileExistsError, NotADirectoryError))
                    else error.strerror
                )
                raise ChannelError(
                    "the channel cannot be a folder here",
                    found=f"{folder}: {what}",
                    required="a writable folder",
                    fix=fix,
                ) from error
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ChannelError(
                    "the channel cannot be written",
                    found=f"{folder}: no permission",
                    required="a writable folder",
                    fix=fix,
                )


def distribution(path: Path) -> tuple[str, str, str]:
    """Name, version and build string, as a package's file name holds them."""
    stem = path.name
    for suffix in SUFFIXES:
        stem = stem.removesuffix(suffix)
    name, version, build = (*stem.rsplit("-", 2), "", "")[:3]
    return name, version, build
