"""One line for a whole model: :func:`flexops.patch`."""

from typing import TYPE_CHECKING, Any

from .apply import patch as patch
from .apply import unpatch as unpatch
from .attention import register_attention as register_attention
from .experts import register_experts as register_experts
from .hub import kernel_mapping as kernel_mapping
from .report import Report as Report
from .report import Row as Row

if TYPE_CHECKING:
    from .int4_loading import Int4Config as Int4Config
    from .int4_loading import register_int4 as register_int4


def __getattr__(name: str) -> Any:
    """What imports transformers, at its first use (PEP 562)."""
    if name in ("Int4Config", "register_int4"):
        from . import int4_loading

        return getattr(int4_loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
