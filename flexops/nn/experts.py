"""Experts of a mixture whose weights have 4 bits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import is_grad_enabled, is_unheard
from ..ops._arguments import FLOAT_DTYPES
from ..ops.activation import geglu, swiglu
from ..ops.experts import Order, add_bias, check_choices, combine_rows, expert_order, spread_rows
from ..ops.few_experts import check_mxfp4, few_experts_int4, fits_int4, weights_for
from ..ops.int4_grouped import int4_grouped_linear
from ..ops.int4_linear import TILE_N, Int4Weight, quantize_int4
from .expert_parts import few_options, flag, gate_of, has_flags, has_norm, parts_of

_SUFFIXES = ("packed", "scales", "zeros")


class Gate(NamedTuple):
    """What experts compute between their two products.

    Attributes:
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"`` of the gate, times up; ``"clamped"``:
            gpt-oss's; ``""``: anything else.
        interleaved, alpha, limit: of ``"clamped"``, see :mod:`flexops.ops.few_experts`.
        own: a class's own code, which is then called. For experts without a gate: their activation.
    """

    activation: Any = "silu"
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    own: Any = None

    @staticmethod
    def of(experts: Any) -> Gate:
        """That of a module of transformers."""
        if not flag(experts, "has_gate"):
            return Gate("", own=experts.act_fn)
        options = few_options(experts) or {"activation": ""}
        if options["activation"] in ("silu", "gelu", "gelu_tanh"):
            return Gate(**options)
        return Gate(**options, own=gate_of(_without_weights(experts)))

    def __call__(self, packed: Tensor) -> Tensor:
        if self.own is not None:
            made: Tensor = self.own(packed)
            return made
        if self.activation == "silu":
            return swiglu(packed)
        return geglu(packed, approximate="tanh" if self.activation == "gelu_tanh" else "none")


def _without_weights(module: Any) -> Any:
    """A module with the same settings, for the code of its gate."""
    made = copy.copy(module)
    made._parameters = {}
    made.__dict__.pop("forward", None)
    return made


class Int4Experts(nn.Module):
    """A module of experts of transformers with weights of 4 bits: it is called as that one is,
    ``experts(hidden_states, top_k_index, top_k_weights)``.

    Its state dict has ``packed``, ``scales`` and ``zeros`` (unless symmetric) of both weights, as
    ``gate_up_packed`` and ``down_packed``: see :class:`flexops.Int4Weight`; MXFP4's codes are
    ``gate_up_mxfp4`` and ``down_mxfp4``. Biases have the names that they had. ``.to(dtype)``
    converts the biases only. Gradients are computed for ``hidden_states``, ``top_k_weights`` and
    for biases that require one.

    Args:
        gate_up: ``[experts * rows, hidden]``, the matrices of all experts one behind the other; an
            expert's rows, a multiple of 16, are those of gates and ups, as :class:`Gate` expects
            them, or of ups alone.
        down: ``[experts * hidden, inner]``, the same of the second product.
        experts: how many there are.
        biases: ``[experts, rows]`` and ``[experts, hidden]``, or None, by their names.
        gate: what is between the products; None for ``silu(gate) * up``.
        mxfp4: codes are MXFP4's numbers, in groups of 32 and without zero points; see
            :mod:`flexops.ops.few_experts`.

    Raises:
        ValueError: the rows of a weight are not ``experts`` matrices of a multiple of 16 rows,
            ``down`` does not have ``hidden`` rows, or weights cannot be MXFP4's.

    :meth:`from_experts` quantizes a module's weights.
    """

    gate_up_packed: Tensor
    gate_up_scales: Tensor
    gate_up_zeros: Tensor | None
    down_packed: Tensor
    down_scales: Tensor
    down_zeros: Tensor | None

    def __init__(
        self,
        gate_up: Int4Weight,
        down: Int4Weight,
        experts: int,
        biases: dict[str, Tensor] | None = None,
        gate: Gate | None = None,
        *,
        mxfp4: bool = False,
    ) -> None:
        super().__init__()
        for name, one in (("gate_up", gate_up), ("down", down)):
            if experts < 1 or one.n % (experts * TILE_N):
                raise ValueError(
                    f"flexops.nn.Int4Experts: {name} must have a multiple of {TILE_N} rows for each"
                    f" of {experts} experts, got {one.n} rows"
                )
            if mxfp4:
                check_mxfp4(f"flexops.nn.Int4Experts: {name}", one)
        if down.n != experts * gate_up.k:
            raise ValueError(
                f"flexops.nn.Int4Experts: down must have {gate_up.k} rows for each of {experts}"
                f" experts, as gate_up has columns, got {down.n} rows"
            )
        self.num_experts, self.gate, self.mxfp4 = experts, gate or Gate(), mxfp4
        self._sizes = {"gate_up": gate_up[3:], "down": down[3:]}
        """Rows, columns and group size."""
        for name, one in (("gate_up", gate_up), ("down", down)):
            for suffix, tensor in zip(self._suffixes, one[:3], strict=True):
                self.register_buffer(f"{name}_{suffix}", tensor)
        self.bias_names = tuple(biases or ())
        for name, bias in (biases or {}).items():
            self.register_parameter(name, nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def from_experts(
        cls, experts: Any, group_size: int = 64, symmetric: bool = False
    ) -> Int4Experts:
        """Quantize the weights of a module of transformers, by :func:`flexops.quantize_int4`.

        Raises:
            ValueError: it cannot be quantized, with the reason.
        """
        reason = why_not(experts, group_size)
        if reason:
            raise ValueError(
                f"flexops.nn.Int4Experts.from_experts: {type(experts).__name__}: {reason}"
            )
        quantize = functools.partial(quantize_int4, group_size=group_size, symmetric=symmetric)
        first, last = (quantized(one, quantize) for one in matrices(experts))
        return cls(first, last, len(experts.down_proj), biases_of(experts), Gate.of(experts))

    @property
    def has_gate(self) -> bool:
        """Whether the first product has rows of gates, too."""
        return bool(self._sizes["gate_up"][0] == 2 * self.num_experts * self._sizes["down"][1])

    @property
    def _suffixes(self) -> tuple[str, str, str]:
        """Of buffers. A state dict says which codes it has."""
        return ("mxfp4", *_SUFFIXES[1:]) if self.mxfp4 else _SUFFIXES

    @property
    def gate_up(self) -> Int4Weight:
        """The packed weight of the first product, which shares the buffers' memory."""
        return self._weight("gate_up")

    @property
    def down(self) -> Int4Weight:
        """That of the second."""
        return self._weight("down")

    def _weight(self, name: str) -> Int4Weight:
        packed, scales, zeros = (getattr(self, f"{name}_{suffix}") for suffix in self._suffixes)
        return Int4Weight(packed, scales, zeros, *self._sizes[name])

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Of the two products."""
        if not self.bias_names:
            return None, None
        first, last = (getattr(self, name) for name in self.bias_names)
        return first, last

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
    ) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        choices = top_k_index.reshape(x.shape[0], -1)
        out = self._computed(x, choices, top_k_weights.reshape(choices.shape))
        return out.view(hidden_states.shape)

    def _computed(self, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        gate_up, down, biases = self.gate_up, self.down, self.biases
        if not torch.compiler.is_compiling():
            check_choices(choices, self.num_experts)
            if self._takes_few(x, choices, weights):
                options = {name: one for name, one in self.gate._asdict().items() if name != "own"}
                given = x, choices, weights_for(x, weights), gate_up, down, biases
                return few_experts_int4(*given, mxfp4=self.mxfp4, **options)
        order = expert_order(choices, self.num_experts)
        inner = self.gate(self._product(spread_rows(x, order), gate_up, biases[0], order))
        return combine_rows(self._product(inner, down, biases[1], order), weights, order)

    def _product(
        self, rows: Tensor, weight: Int4Weight, bias: Tensor | None, order: Order
    ) -> Tensor:
        out = int4_grouped_linear(rows, weight, order.offsets, mxfp4=self.mxfp4)
        return out if bias is None else add_bias(out, bias, order)

    def _takes_few(self, x: Tensor, choices: Tensor, weights: Tensor) -> bool:
        tensors = x, weights, *self.biases
        keeps = is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
        alike = all(one is None or one.dtype == x.dtype for one in self.biases)
        usual = self.has_gate and bool(self.gate.activation) and alike and not keeps
        return usual and fits_int4(x, choices, self.gate_up, self.down)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        names = [f"{name}_{suffix}" for name in self._sizes for suffix in _SUFFIXES[1:]]
        before = {name: self._buffers[name] for name in names}
        super()._apply(fn, recurse)
        for name, one in before.items():
            made = self._buffers[name]
            # .to(dtype) would round the scales once more
            if one is not None and made is not None and made.dtype != one.dtype:
                self._buffers[name] = one.to(made.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = f"{prefix}down_{self._suffixes[0]}"
        if f"{prefix}down_proj" in state_dict and own not in state_dict:
            error_msgs.append(
                f"{prefix}down_proj is not packed, and this module requires {own}:"
                " load the state dict before the model is quantized; fix:"
                " flexops.nn.Int4Experts.from_experts(experts)"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        (rows, hidden, group_size), (_, inner, _) = self._sizes["gate_up"], self._sizes["down"]
        return (
            f"experts={self.num_experts}, hidden={hidden}, rows={rows // self.num_experts},"
            f" inner={inner}, bias={bool(self.bias_names)}, group_size={group_size},"
            f" symmetric={self.gate_up_zeros is None}{', mxfp4=True' if self.mxfp4 else ''}"
        )


# ---- from modules of transformers ----


def matrices(experts: Any) -> tuple[Tensor, Tensor]:
    """``[experts, rows, columns]`` of both products, which reduce columns."""
    parts = parts_of(experts)
    return parts.first[0], parts.last[0]


def biases_of(experts: Any) -> dict[str, Tensor]:
    """By their names."""
    first = "gate_up_proj_bias" if flag(experts, "has_gate") else "up_proj_bias"
    names = (first, "down_proj_bias") if flag(experts, "has_bias") else ()
    return {name: getattr(experts, name) for name in names}


_AT_ONCE = 1 << 26
"""Elements that are quantized together: some tensors of as many float32 are made."""


def quantized(weight: Tensor, quantize: Callable[[Tensor], Int4Weight]) -> Int4Weight:
    """``[experts, rows, columns]`` in 4 bits, some experts at a time."""
    count = max(_AT_ONCE // weight[0].numel(), 1)
    return joined([quantize(some.flatten(0, 1)) for some in weight.split(count)])


def joined(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Matrices of a multiple of 16 rows, one behind the other."""
    tensors = zip(*(one[:3] for one in weights), strict=True)
    packed, scales, zeros = (None if one[0] is None else torch.cat(one) for one in tensors)
    assert packed is not None
    assert scales is not None
    return Int4Weight(packed, scales, zeros, sum(one.n for one in weights), *weights[0][4:])


def why_not(experts: Any, group_size: int) -> str:
    """Why the weights of a module cannot have 4 bits; "" if they can."""
    if not has_flags(experts) or not hasattr(experts, "down_proj"):
        return "its class does not go through transformers' experts interface"
    if has_norm(experts):
        return "a norm follows each of its experts"
    first = "gate_up_proj" if flag(experts, "has_gate") else "up_proj"
    weights = [experts._parameters.get(name) for name in (first, "down_proj")]
    if not is_unheard(experts) or any(type(one) is not nn.Parameter for one in weights):
        return "it has hooks, or weights that are no parameters"
    if any(one.dim() != 3 or one.dtype not in FLOAT_DTYPES for one in weights):
        return "its weights are not one 3-D parameter of 16 or 32 bits each"
    if len(weights[0]) != len(weights[1]):
        return "some of its experts have no down_proj"
    for one in matrices(experts):
        rows, columns = one.shape[1:]
        if rows % TILE_N:
            return f"its {rows} outputs are not a multiple of {TILE_N}"
        if columns % group_size:
            return f"its {columns} inputs are not a multiple of group_size={group_size}"
    return ""
