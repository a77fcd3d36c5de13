"""Signatures of cache entries, made and checked by OpenSSH's ``ssh-keygen -Y``: the keys are the
ones that people have.

What is signed is the manifest, which has the library's SHA-256, its name and its key.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import CacheError
from ...toolchain import proc
from .manifest import Rejection

SUFFIX = ".sig"
NAMESPACE = "flexops-cache"
_SECONDS = 120.0
_INSTALL = "apt-get install openssh-client"


def sign(file: Path, key: Path) -> None:
    """Leave ``<file>.sig`` beside a file.

    Args:
        key: a private key without a passphrase, or a public one whose private part an ssh-agent
            holds.

    Raises:
        CacheError: that key cannot sign.
    """
    try:
        done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, str(file))
    except OSError as error:
        raise CacheError(
            "what was built cannot be signed",
            found=f"ssh-keygen: {error.strerror}",
            required="OpenSSH 8.2 or newer",
            fix=_INSTALL,
        ) from error
    if done.status != 0 or not file.with_name(file.name + SUFFIX).exists():
        required = "a private key without a passphrase, or a public key that ssh-agent has"
        fix = "ssh-keygen -t ed25519 -f KEY -N ''"
        raise CacheError(
            "what was built cannot be signed",
            found=f"FLEXOPS_CACHE_SIGNING_KEY={key}: {_said(done)}",
            required=required,
            fix=fix,
        )


def check(file: Path, content: bytes, trusted: Path) -> Rejection | None:
    """None if ``<file>.sig`` is a signature of ``content`` by one of the keys in ``trusted``, an
    ``allowed_signers`` file (see ssh-keygen(1))."""
    signature = file.with_name(file.name + SUFFIX)
    if not trusted.is_file():
        return Rejection(
            f"FLEXOPS_CACHE_TRUSTED_KEYS={trusted} is no file that can be read",
            "export FLEXOPS_CACHE_TRUSTED_KEYS=<an allowed_signers file>",
        )
    fix = "build it with the team's signing key, or unset FLEXOPS_CACHE_TRUSTED_KEYS"
    if not signature.exists():
        return Rejection(f"{file.parent} is not signed, and FLEXOPS_CACHE_TRUSTED_KEYS is set", fix)
    common = ("-f", str(trusted), "-s", str(signature), "-n", NAMESPACE)
    try:
        signers = _ssh_keygen("find-principals", *common).output.splitlines()
        if signers:
            verified = _ssh_keygen("verify", *common, "-I", signers[0], content=content)
            if verified.status == 0:
                return None
    except OSError as error:
        return Rejection(f"signatures cannot be checked: ssh-keygen: {error.strerror}", _INSTALL)
    return Rejection(
        f"the signature of {file.parent} is not of one of the keys in {trusted}, or not of this"
        " manifest",
        fix,
    )


def _ssh_keygen(action: str, *arguments: str, content: bytes = b"") -> proc.Ended:
    """Without a terminal, which its session lacks, it fails where it would ask for a passphrase."""
    command = ("ssh-keygen", "-Y", action, *arguments)
    return proc.run(command, seconds=_SECONDS, content=content, apart=True)


def _said(done: proc.Ended) -> str:
    if done.status is None:
        return f"no answer after {_SECONDS:.0f} s"
    lines = done.errors.strip().splitlines()
    return lines[-1] if lines else f"ssh-keygen exited {done.status}"
