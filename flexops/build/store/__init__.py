"""Finished artifacts under their keys: the local cache, archives, signatures, the remote store."""
