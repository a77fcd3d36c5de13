"""Keeps secrets of the environment out of everything that flexops prints, logs or raises.

``redacted`` shortens a URL, ``split_credentials`` takes one apart. ``scrubbed`` cleans a text that
another program wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from .errors import FlexopsError

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"KEY|SECRET|TOKEN|PASS|CREDENTIAL|SIGNATURE|CONNECTION_STRING", re.IGNORECASE
)
_PATH_NAME = re.compile(r"^FLEXOPS_|_(FILE|PATH|DIR)$|^GOOGLE_APPLICATION_CREDENTIALS$")
_LEAST = 4  # shorter values occur in ordinary words
_MOST = 300


def redacted(url: str) -> str:
    """A URL without user, password, query and fragment.

    An ``@`` behind the first ``/``, ``?`` or ``#`` may end a password that holds one of them. Then
    nothing but the scheme is left.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return HIDDEN if "@" in url else re.split("[?#]", url)[0]
    place = re.split("[/?#]", rest)[0]
    tail = rest[len(place) :]
    if "@" in tail:
        return f"{scheme}://{HIDDEN}"
    return f"{scheme}://{place.rpartition('@')[2]}{re.split('[?#]', tail)[0]}"


def split_credentials(url: str) -> tuple[str, str]:
    """A URL without its ``user:password``, and these; a URL that has none, and ``""``. Raises
    ``FlexopsError`` where they cannot be separated, because a password holds a ``/``."""
    scheme, separator, rest = url.partition("://")
    place, _, path = rest.partition("/")
    if separator and "@" in path:
        raise FlexopsError(
            "the user and password in a URL cannot be separated from it",
            found=f"an @ behind the first / of {redacted(url)}",
            fix="percent-encode /, ?, # and @ in them: %2F, %3F, %23, %40",
        )
    credentials, at, _ = place.rpartition("@")
    if not (separator and at):
        return url, ""
    return f"{scheme}://{rest[len(credentials) + 1 :]}", credentials


def scrubbed(text: str, environ: Mapping[str, str] | None = None) -> str:
    """What another program said, in one line of at most 300 characters, without secrets.

    Removed are users and queries of URLs, authorization headers, the values of variables whose
    names say that they are secret, and passwords and queries of URLs that are in a variable.
    """
    found = set(_secrets(os.environ if environ is None else environ))
    for secret in sorted(found, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = re.sub(r"://[^\s\"'<>]*@", "://", text)
    text = re.sub(r"[?#][^\s\"'>)]*", "", text)
    text = re.sub(r"(?i)\b(authorization|bearer|basic)\b(?! realm).*", rf"\1 {HIDDEN}", text)
    pairs = r"(?i)\b(signature|credential|token|password|secret)\b\s*[:=]\s*\S+"
    text = re.sub(pairs, rf"\1={HIDDEN}", text)
    return " ".join(text.split())[:_MOST]


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        if _SECRET_NAME.search(name) and not _PATH_NAME.search(name):
            yield from _spellings(value)
        rest = value.partition("://")[2]
        if "@" in rest:
            yield from _spellings(rest.rpartition("@")[0].partition(":")[2])
            # where an @ is part of the query, or the user's name is the secret
            yield from _spellings(rest.partition("@")[0])
        for part in re.split("[?&#]", rest)[1:]:
            yield from _spellings(part.partition("=")[2] or part)


def _spellings(secret: str) -> Iterator[str]:
    """As it is, and as a client may write it in a URL."""
    decoded = {secret, unquote(secret), unquote_plus(secret)}
    for one in decoded | {quote(one, safe="") for one in decoded} | set(map(quote_plus, decoded)):
        if len(one) >= _LEAST:
            yield one
