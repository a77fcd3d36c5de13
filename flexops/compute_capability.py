"""Compute capabilities, and the lists of architectures that people write (``TORCH_CUDA_ARCH_LIST``
and ``--arch``).

Two words are kept apart. A *capability* is what a GPU has: ``9.0``. An *architecture* is what is
compiled for one: machine code (SASS), PTX that a driver compiles later, or both. What a piece of a
list means:

==========================  ========================================================
``8.9``, ``9.0a``           machine code for that capability (``a``: only it)
``10.0f``                   machine code for that capability's family
``sm_90``, ``sm90a``        the same, in nvcc's spelling
``9.0+PTX``, ``sm_90+PTX``  machine code and PTX
``compute_90``              PTX only, as for nvcc
``Hopper``, ``ampere``      the capabilities that torch lists under that name
``native``                  machine code for the GPUs of this machine
``all``, ``all-major``      every (major) capability of the toolkit, and PTX of the newest
==========================  ========================================================

Pieces are separated by ``;``, ``,`` or white space; empty pieces are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, cast

from .errors import ArchitectureError

Suffix = Literal["", "a", "f"]

NAMES: dict[str, str] = {
    "kepler+tesla": "3.7",
    "kepler": "3.5+PTX",
    "maxwell+tegra": "5.3",
    "maxwell": "5.0;5.2+PTX",
    "pascal": "6.0;6.1+PTX",
    "volta+tegra": "7.2",
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere+tegra": "8.7",
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
}
"""Names as torch's ``cpp_extension`` knows them, and what they stand for there."""

ACCEPTED = (
    "9.0, 9.0a, 10.0f, 9.0+PTX, sm_90, compute_90 (PTX), a name such as Hopper, native, all or"
    " all-major; separated by ; , or space"
)

_NVCC_PREFIXES = ("sm_", "sm", "compute_", "compute")


class ComputeCapability(NamedTuple):
    """A GPU's compute capability, with nvcc's optional suffix: ``a`` (exactly this capability) or
    ``f`` (its family). Ordered as numbers."""

    major: int
    minor: int
    suffix: Suffix = ""

    @classmethod
    def parse(cls, text: str) -> ComputeCapability:
        """``"9.0a"``, ``"sm_90a"``, ``"compute_90a"``; raises ``ArchitectureError``.

        No regular expression here and in ``parse_arch_list``: a warm start on a GPU parses, and to
        compile one would take a tenth of it.
        """
        number = text.strip().lower()
        suffix = number[-1:] if number.endswith(("a", "f")) else ""
        number = number.removesuffix(suffix)
        prefix = next((prefix for prefix in _NVCC_PREFIXES if number.startswith(prefix)), "")
        digits = number.removeprefix(prefix)
        major, point, minor = (digits[:-1], ".", digits[-1:]) if prefix else digits.partition(".")
        if not (
            point
            and major.isdecimal()
            and minor.isdecimal()
            and len(major) <= 2
            and len(minor) == 1
        ):
            raise _not_understood(text)
        return cls(int(major), int(minor), cast(Suffix, suffix))

    @property
    def number(self) -> int:
        """``90`` for 9.0: what ``__CUDA_ARCH__`` holds, divided by ten."""
        return self.major * 10 + self.minor

    @property
    def sm(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    @property
    def compute(self) -> str:
        return f"compute_{self.number}{self.suffix}"

    @property
    def base(self) -> ComputeCapability:
        """The same capability without a suffix."""
        return ComputeCapability(self.major, self.minor) if self.suffix else self

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}"


class Architecture(NamedTuple):
    """What is compiled for a capability: machine code (``sass``), ``ptx``, or both."""

    capability: ComputeCapability
    ptx: bool = False
    sass: bool = True

    def __str__(self) -> str:
        if not self.sass:
            return self.capability.compute
        return f"{self.capability}+PTX" if self.ptx else str(self.capability)

    @property
    def code(self) -> str:
        """Of one or the other, as compilers spell it: ``sm_90a`` or ``compute_90``."""
        return self.capability.sm if self.sass else self.capability.compute


Native = Callable[[], Sequence[ComputeCapability]]


def parse_arch_list(
    text: str, *, native: Native | None = None, supported: Sequence[ComputeCapability] | None = None
) -> tuple[Architecture, ...]:
    """Understand a list of architectures as people write it.

    Args:
        text: see the table at the top of this module.
        native: gives the capabilities of the GPUs here; asked only if the list says ``native``.
        supported: what the toolkit can emit; needed only if the list says ``all`` or ``all-major``.

    Returns:
        The architectures, each capability once, in ascending order.

    Raises:
        ArchitectureError: names the piece that is not understood, or says why a word has no meaning
            here; also for a list without any piece.
    """
    pieces = text.replace(";", " ").replace(",", " ").split()
    if not pieces:
        raise ArchitectureError(
            "the architecture list is empty",
            found=repr(text),
            required=ACCEPTED,
            fix='export TORCH_CUDA_ARCH_LIST="9.0"',
        )
    return merge(found for piece in pieces for found in _piece(piece, native, supported))


def format_arch_list(architectures: Iterable[Architecture]) -> str:
    """The list as ``TORCH_CUDA_ARCH_LIST`` has it, ``"8.0;9.0+PTX"``; ``parse_arch_list`` reads it
    back."""
    return ";".join(map(str, architectures))


def merge(architectures: Iterable[Architecture]) -> tuple[Architecture, ...]:
    """Each capability once, in ascending order, with everything that was asked for it."""
    merged: dict[ComputeCapability, Architecture] = {}
    for one in architectures:
        other = merged.get(one.capability, one)
        merged[one.capability] = Architecture(
            one.capability, ptx=one.ptx or other.ptx, sass=one.sass or other.sass
        )
    return tuple(sorted(merged.values()))


def gencodes(architectures: Iterable[Architecture]) -> list[str]:
    """nvcc's ``-gencode`` flags for these architectures. This is the only place that spells
    them."""
    flags = []
    for one in architectures:
        virtual = one.capability.compute
        if one.sass:
            flags.append(f"-gencode=arch={virtual},code={one.capability.sm}")
        if one.ptx:
            flags.append(f"-gencode=arch={virtual},code={virtual}")
    return flags


def runs_on(compiled: Iterable[Architecture | str], device: ComputeCapability) -> bool:
    """Whether a library compiled for these architectures has code that ``device`` can run.

    Machine code runs on the same major and an equal or higher minor; with ``f`` likewise (that is
    its family), with ``a`` on exactly its capability. PTX runs on anything equal or newer; PTX with
    a suffix where machine code with that suffix would. What is for AMD's GPUs (``gfx90a``) runs on
    none of these.
    """
    architectures = (
        part
        for one in compiled
        if not (isinstance(one, str) and one.startswith("gfx"))
        for part in (parse_arch_list(one) if isinstance(one, str) else (one,))
    )
    return any(_runs(one, device) for one in architectures)


def _runs(one: Architecture, device: ComputeCapability) -> bool:
    built, here = one.capability, (device.major, device.minor)
    if built.suffix == "a":
        return (built.major, built.minor) == here
    if (
        (one.sass or built.suffix == "f")
        and built.major == device.major
        and built.minor <= device.minor
    ):
        return True
    return one.ptx and not built.suffix and (built.major, built.minor) <= here


def _piece(
    piece: str, native: Native | None, supported: Sequence[ComputeCapability] | None
) -> Iterable[Architecture]:
    lowered = piece.lower()
    if lowered == "native":
        return _native(native)
    if lowered in ("all", "all-major"):
        return _all(lowered, supported)
    if lowered in NAMES:
        return parse_arch_list(NAMES[lowered])
    name, plus, extra = lowered.partition("+")
    if plus and extra != "ptx":
        raise _not_understood(piece)
    if name in NAMES:
        return _with_ptx(parse_arch_list(NAMES[name]))
    capability = _capability(name, piece)
    ptx_only = name.startswith("compute")
    return (Architecture(capability, ptx=bool(plus) or ptx_only, sass=not ptx_only),)


def _capability(name: str, piece: str) -> ComputeCapability:
    try:
        return ComputeCapability.parse(name)
    except ArchitectureError:
        raise _not_understood(piece) from None


def _with_ptx(architectures: Sequence[Architecture]) -> tuple[Architecture, ...]:
    """PTX of the newest; what runs on one older GPU needs no PTX of its own for a newer one."""
    return (*architectures[:-1], Architecture(architectures[-1].capability, ptx=True))


def _native(native: Native | None) -> Iterable[Architecture]:
    capabilities = native() if native else ()
    if not capabilities:
        raise ArchitectureError(
            "the architecture list says native, but no GPU was found here",
            found="no NVIDIA GPU",
            required="a GPU, or the capability to compile for",
            fix=(
                'export TORCH_CUDA_ARCH_LIST="9.0"   # the capability of the GPU that this will'
                " run on"
            ),
        )
    return [Architecture(capability) for capability in capabilities]


def _all(word: str, supported: Sequence[ComputeCapability] | None) -> Iterable[Architecture]:
    plain = sorted({capability for capability in supported or () if not capability.suffix})
    if not plain:
        raise ArchitectureError(
            f"the architecture list says {word}, but there is no CUDA toolkit that could say what"
            " that is",
            found="no toolkit",
            required="a CUDA toolkit, or capabilities by number",
            fix='export TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"',
        )
    if word == "all-major":
        least: dict[int, ComputeCapability] = {}
        for capability in plain:
            least.setdefault(capability.major, capability)
        plain = sorted(least.values())
    return _with_ptx([Architecture(capability) for capability in plain])


def _not_understood(piece: str) -> ArchitectureError:
    return ArchitectureError(
        f"the architecture {piece!r} is not understood",
        found=piece,
        required=ACCEPTED,
        fix='export TORCH_CUDA_ARCH_LIST="9.0"   # one capability, for example',
    )
