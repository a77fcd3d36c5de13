"""One line for a whole model: :func:`flexops.patch`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..int4.checkpoints import Int4Config as Int4Config
    from ..int4.checkpoints import register_int4 as register_int4
    from ..report import Report as Report
    from ..report import Row as Row
    from .apply import patch as patch
    from .apply import unpatch as unpatch
    from .attention import register_attention as register_attention
    from .experts import register_experts as register_experts
    from .hub import kernel_mapping as kernel_mapping

_PLACES = {
    "patch": ".apply",
    "unpatch": ".apply",
    "register_attention": ".attention",
    "register_experts": ".experts",
    "kernel_mapping": ".hub",
    "Int4Config": "..int4.checkpoints",
    "register_int4": "..int4.checkpoints",
    "Report": "..report",
    "Row": "..report",
}


def __getattr__(name: str) -> Any:
    """Imported at its first use (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name], __name__), name)
