"""The build cache that the settings name, with the remote store behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import settings
from .cache import BuildCache

if TYPE_CHECKING:
    from .remote import Remote


def open_cache(chosen: settings.Settings) -> BuildCache:
    """The build cache that the settings name; touches nothing."""
    return BuildCache(
        chosen.cache_dir,
        max_bytes=chosen.cache_max_bytes,
        shared=chosen.cache_shared,
        signing_key=chosen.cache_signing_key,
        trusted_keys=chosen.cache_trusted_keys,
        copies=chosen.cache_copies,
        remote=_remote_of(chosen),
    )


def _remote_of(chosen: settings.Settings) -> Remote | None:
    if not chosen.cache_remote:
        return None
    from . import remote

    return remote.of(chosen)
