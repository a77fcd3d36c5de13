"""Which torch a build is for, read from its files: torch may be broken, absent from sys.path (build
isolation) or simply slow to import."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .. import settings
from .memo import Memo
from .version import Version

# compiled only when it is used
_FIELD = (
    r"^(__version__|cuda|hip|git_version)\s*(?::[^=\n]+)?=\s*(?:None|'([^'\n]*)'|\"([^\"\n]*)\")"
)
# c10::Error's constructor takes a std::string; its mangled name shows which of libstdc++'s two
# strings that is. The wheels are ABI=0 up to 2.6 and ABI=1 from 2.7, other people's builds are what
# they are.
_NEW_STRING = b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_string"
_OLD_STRING = b"_ZN3c105ErrorC1ENS_14SourceLocationESs"
_FIRST_NEW_STRING = Version((2, 7))


class TorchBuild(NamedTuple):
    """The torch to build against, known from its files; ``import torch`` is not needed to know it.

    Attributes:
        version: the full version string, for example ``"2.14.1+cu130"``.
        cuda: ``torch.version.cuda``: the CUDA version it was built for, None for a CPU or ROCm
            build.
        hip: ``torch.version.hip``, likewise.
        git_version: commit torch was built from.
        cxx11_abi: what ``torch.compiled_with_cxx11_abi()`` says.
        root: the installed package's directory, with include/ and lib/.
    """

    version: str
    cuda: str | None
    hip: str | None
    git_version: str
    cxx11_abi: bool
    root: Path

    @property
    def release(self) -> Version:
        return Version.parse(self.version)

    @property
    def stable_abi(self) -> bool:
        """Whether bindings use torch's stable ABI (from 2.11; unproven on ROCm, so not there)."""
        return self.release >= Version((2, 11)) and self.hip is None

    @property
    def abi_id(self) -> str:
        """Which torches a library built against this one runs with: enters cache keys and
        manifests.

        ``stable-2.11`` for every torch with the stable ABI; otherwise this very torch minor, its
        C++ ABI and its accelerator.
        """
        if self.stable_abi:
            return "stable-2.11"
        accelerator = f"cu{self.cuda}" if self.cuda else f"rocm{self.hip}" if self.hip else "cpu"
        return f"torch-{self.release.major_minor}-cxx11abi{int(self.cxx11_abi)}-{accelerator}"

    @property
    def requirement(self) -> str:
        """What pip is to install for libraries built against this torch: ``abi_id`` as a pin."""
        return "torch>=2.11" if self.stable_abi else f"torch=={self.release.major_minor}.*"

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        base = self.root / "include"
        return (base, base / "torch" / "csrc" / "api" / "include")

    @property
    def library_dir(self) -> Path:
        return self.root / "lib"

    @property
    def cxx_standard(self) -> int:
        """The C++ standard that its headers need: 20 from torch 2.13, else 17."""
        return 20 if self.release >= Version((2, 13)) else 17


def torch_build(
    site_dirs: Iterable[str] | None = None, *, memo: Memo | None = None
) -> TorchBuild | None:
    """The torch of this process if it is imported, else the one whose files are found first; None
    when there is none.

    Args:
        site_dirs: where to look, and nowhere else; default: this process's own torch, then
            ``package_dirs()``.
        memo: saves looking into torch's library for its C++ ABI.
    """
    if site_dirs is None:
        if imported := imported_torch():
            return imported
        wishes = settings.current()
        site_dirs = package_dirs(
            str(prefix) for prefix in (wishes.virtual_env, wishes.conda_prefix) if prefix
        )
    for site in site_dirs:
        if build := read(f"{site}/torch", memo):
            return build
    return None


def read(root: str, memo: Memo | None = None) -> TorchBuild | None:
    """The torch whose package directory is ``root``; None when there is none or its version cannot
    be read."""
    try:
        with open(f"{root}/version.py", encoding="utf-8") as file:
            fields = {
                match[1]: match[2] or match[3]
                for match in re.finditer(_FIELD, file.read(), re.MULTILINE)
            }
        version = fields.get("__version__") or ""
        Version.parse(version)
    except (OSError, ValueError):
        return None
    return TorchBuild(
        version,
        fields.get("cuda"),
        fields.get("hip"),
        fields.get("git_version") or "",
        _cxx11_abi(root, version, memo),
        Path(root),
    )


def package_dirs(prefixes: Iterable[str] = ()) -> tuple[str, ...]:
    """Directories that hold Python packages: ``sys.path``, then those of this environment, then
    those of ``prefixes``.

    pip's build isolation takes this environment's own off ``sys.path``; ``python -m build`` runs in
    an environment of its own, where ``VIRTUAL_ENV`` still names the one it was called from.
    """
    python = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    hidden = (f"{prefix}/{python}" for prefix in (sys.prefix, *prefixes))
    return tuple(
        dict.fromkeys(
            entry
            for entry in (*sys.path, *hidden, *_configured())
            if entry and os.path.isdir(entry)
        )
    )


def _configured() -> Iterator[str]:
    """What sysconfig says, where that is not the common layout (Debian's dist-packages). Costs a
    millisecond, so only if it may be needed."""
    if not os.path.isdir(
        f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    ):
        import sysconfig

        yield from (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def imported_torch() -> TorchBuild | None:
    """What the torch in this process says of itself; None when it is missing or only half
    imported."""
    torch: Any = sys.modules.get("torch")
    try:
        version = torch.version
        return TorchBuild(
            str(torch.__version__),
            version.cuda,
            version.hip,
            version.git_version or "",
            bool(torch.compiled_with_cxx11_abi()),
            Path(torch.__file__).parent,
        )
    except (AttributeError, TypeError):
        return None


def _cxx11_abi(root: str, version: str, memo: Memo | None) -> bool:
    library = f"{root}/lib/libc10.so"
    try:
        seen: bool | None = (
            memo.recall("cxx11-abi", library, _strings_of) if memo else _strings_of(library)
        )
    except OSError:
        seen = None
    return Version.parse(version) >= _FIRST_NEW_STRING if seen is None else seen


def _strings_of(library: str) -> bool | None:
    with open(library, "rb") as file:
        content = file.read()
    if _NEW_STRING in content:
        return True
    return False if _OLD_STRING in content else None
