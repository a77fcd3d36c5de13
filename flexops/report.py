"""What a patch did: one row for each kind of module, with the reason where nothing was changed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

FAMILIES = {
    **dict.fromkeys(
        ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"), ("norm", "norm_backward")
    ),
    **dict.fromkeys(
        ("swiglu_linear", "geglu_linear", "bias_gelu", "bias_relu2", "bias_silu"), ("activation",)
    ),
    "gated_rms_norm": ("gated_norm",),
    "rotary_embedding": ("rope",),
    "attention": ("attention",),
    "linear_cross_entropy": ("cross_entropy",),
    **dict.fromkeys(("projections", "generation"), ("few_rows", "kvcache_attention")),
    "int4_linear": ("int4_linear",),
    "int4_grouped_linear": (
        "int4_grouped",
        "int4_linear",
        "experts",
        "grouped_linear",
        "few_experts",
    ),
    **dict.fromkeys(
        ("gated_experts", "grouped_linear"), ("experts", "grouped_linear", "few_experts")
    ),
    "route_tokens": ("experts",),
    "causal_conv1d": ("causal_conv1d",),
    **dict.fromkeys(("gated_delta_rule", "mamba2_scan"), ("state_scan", "state_chunks")),
    "fp8_linear": ("fp8_linear", "activation"),
}
"""What has the kernels of the operators that rows name."""


@dataclass(frozen=True)
class Row:
    """What became of the modules of one class.

    Attributes:
        module: the class's name; ``optimizer`` for that.
        count: how many there are.
        operator: the replacement of its own code.
        swapped: whether it was replaced.
        reason: why not, or a note.
    """

    module: str
    count: int
    operator: str
    swapped: bool
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What :func:`flexops.patch` did to a model. ``str(report)`` is a table.

    Attributes:
        model: the model's class.
        rows: replaced modules first, then skipped ones.
        optimizer: the optimizer that was asked for with ``optimizer=``, else None.
    """

    model: str
    rows: tuple[Row, ...]
    optimizer: Any = field(default=None, compare=False)

    @property
    def swapped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.swapped)

    @property
    def not_swapped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.swapped)

    def families(self) -> tuple[str, ...]:
        """What has the kernels that the patched model's operators launch, forward and backward."""
        operators = (name for row in self.swapped for name in re.findall(r"\w+", row.operator))
        return tuple(sorted({family for name in operators for family in FAMILIES.get(name, ())}))

    def json(self) -> str:
        return json.dumps(
            {"model": self.model, "rows": [asdict(row) for row in self.rows]}, indent=2
        )

    def __str__(self) -> str:
        if not self.rows:
            return f"flexops.patch({self.model}): it has no module that flexops supports"
        swapped, left = (
            sum(row.count for row in rows) for rows in (self.swapped, self.not_swapped)
        )
        head = f"flexops.patch({self.model}): {swapped} replaced, {left} skipped"
        modules = max(len(row.module) for row in self.rows)
        operators = max(len(row.operator) for row in self.rows)
        lines = [
            f"  {'replaced' if row.swapped else 'skipped':8}  {row.count:>4} x"
            f" {row.module:<{modules}}  {row.operator:<{operators}}  {row.reason}".rstrip()
            for row in self.rows
        ]
        return "\n".join([head, *lines])


def rows_of(outcomes: Iterable[Row]) -> tuple[Row, ...]:
    """Outcomes of single modules, those that are alike in one row."""
    counts: dict[tuple[bool, str, str, str], int] = {}
    for one in outcomes:
        key = (not one.swapped, one.module, one.operator, one.reason)
        counts[key] = counts.get(key, 0) + one.count
    found = [
        Row(module, count, operator, not refused, reason)
        for (refused, module, operator, reason), count in counts.items()
    ]
    return tuple(sorted(found, key=lambda row: not row.swapped))
