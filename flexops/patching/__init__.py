"""One line for a whole model: :func:`flexops.patch`."""

from .apply import patch as patch
from .apply import unpatch as unpatch
from .attention import register_attention as register_attention
from .experts import register_experts as register_experts
from .hub import kernel_mapping as kernel_mapping
from .report import Report as Report
from .report import Row as Row
