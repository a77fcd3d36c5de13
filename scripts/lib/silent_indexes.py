"""Prints those of the package indexes URL... that do not answer in a few seconds. All are asked at
once: pip would ask each for minutes, for each package."""

from __future__ import annotations

import ssl
import sys
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

SECONDS = 5.0


def answers(url: str) -> bool:
    """Whether a server is there. What it answers is pip's business: it may know credentials and
    certificates that are not known here."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return True
    page = parts._replace(
        netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/") + "/pip/", fragment=""
    ).geturl()
    try:
        urllib.request.urlopen(page, timeout=SECONDS).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError) as error:
        return isinstance(getattr(error, "reason", error), ssl.SSLError)
    return True


def main(urls: list[str]) -> None:
    silent = set(urls)

    def ask(url: str) -> None:
        if answers(url):
            silent.discard(url)

    # daemons: a name that is being resolved heeds no timeout
    asking = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(SECONDS)
    for url in urls:
        if url in silent:
            print(url)


if __name__ == "__main__":
    main(sys.argv[1:])
