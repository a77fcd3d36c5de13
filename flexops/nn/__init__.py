"""Modules over flexops' operators, with torch's constructors and state dicts:
``flexops.nn.RMSNorm`` for ``torch.nn.RMSNorm``, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..ops._arguments import number, whole
from ..ops.activation import bias_gelu, bias_silu, geglu, swiglu
from ..ops.fp8_linear import MULTIPLE, RECIPES, fp8_linear
from ..ops.int4_linear import Int4Weight, int4_linear, quantize_int4
from ..ops.linear_cross_entropy import linear_cross_entropy
from ..ops.norm import layer_norm, rms_norm
from ..ops.rope import rotary_embedding
from .experts import Int4Experts

__all__ = [
    "GEGLU",
    "BiasGELU",
    "BiasSiLU",
    "Fp8Linear",
    "Int4Experts",
    "Int4Linear",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
]


def _last_dimension(name: str, shape: int | Sequence[int]) -> None:
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    if len(sizes) != 1 or not isinstance(sizes[0], int) or sizes[0] < 0:
        raise ValueError(
            f"flexops.nn.{name}: normalized_shape must be one number, the last dimension's size,"
            f" got {shape!r}; torch.nn.{name} takes more"
        )


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, by :func:`flexops.layer_norm`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        _last_dimension("LayerNorm", normalized_shape)
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype
        )

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension, by :func:`flexops.rms_norm`. ``eps=None`` is
    float32's, which is torch's for float32 and lower."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        _last_dimension("RMSNorm", normalized_shape)
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(
            x, self.weight, torch.finfo(torch.float32).eps if self.eps is None else self.eps
        )


class SwiGLU(nn.Module):
    """``silu(gate) * up``: of two tensors, or of one that holds both; see :func:`flexops.swiglu`.
    It has no parameters: put it between your linear layers."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"interleaved={self.interleaved}"


class GEGLU(SwiGLU):
    """``gelu(gate) * up``; see :class:`SwiGLU`."""

    def __init__(self, approximate: Any = "none", interleaved: bool = False) -> None:
        super().__init__(interleaved)
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up, approximate=self.approximate, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, {super().extra_repr()}"


class _Biased(nn.Module):
    def __init__(self, features: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))


class BiasGELU(_Biased):
    """``gelu(x + bias)`` behind a linear layer without a bias."""

    def __init__(
        self, features: int, approximate: Any = "none", device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(features, device, dtype)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return bias_gelu(x, self.bias, self.approximate)


class BiasSiLU(_Biased):
    """``silu(x + bias)`` behind a linear layer without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return bias_silu(x, self.bias)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding with its tables: ``query, key = rotary(query, key)``, both
    ``[batch, heads, length, head_dim]``.

    Args:
        dim: how many elements of a head are rotated.
        max_positions: rows of the tables.
        base: the wave lengths run from ``2 pi`` to nearly ``2 pi base``.
        interleaved: pairs are neighbours; else they are half of ``dim`` apart.

    The tables are float32, whatever the model's dtype, and in no state dict.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int = 4096,
        base: float = 10000.0,
        interleaved: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        where = "flexops.nn.RotaryEmbedding:"
        whole(f"{where} dim", dim), whole(f"{where} max_positions", max_positions)
        base = number(f"{where} base", base)
        if dim < 2 or dim % 2 or max_positions < 1 or not base > 0:
            raise ValueError(
                f"{where} dim must be a positive even number, max_positions at least 1 and base"
                f" positive, got {dim}, {max_positions} and {base}"
            )
        self.dim = dim
        self.max_positions = max_positions
        self.base = base
        self.interleaved = interleaved
        frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angles = torch.outer(
            torch.arange(max_positions, dtype=torch.float64, device=device), frequencies
        )
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return rotary_embedding(
            query, key, self.cos, self.sin, positions, interleaved=self.interleaved
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        # .half() and the like are for the model; positions beyond 256 have no bfloat16 cosine
        if self.cos.dtype != torch.float32:
            self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, max_positions={self.max_positions}, base={self.base},"
            f" interleaved={self.interleaved}"
        )


class LinearCrossEntropyLoss(nn.Module):
    """``torch.nn.CrossEntropyLoss`` of ``linear(x, weight, bias)``, which is never there at once;
    see :func:`flexops.linear_cross_entropy`.

    ``loss(hidden, head.weight, target)``: the weight stays the head's own.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.chunk_size = chunk_size

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"


class Fp8Linear(nn.Linear):
    """``torch.nn.Linear`` with matrix products of fp8, by :func:`flexops.fp8_linear`. Parameters
    and state dict are those of ``torch.nn.Linear``.

    Args:
        in_features, out_features: multiples of 16.
        bias, device, dtype: as ``torch.nn.Linear``'s.
        recipe: ``"rowwise"`` or ``"rowwise_with_gw_hp"``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        recipe: str = "rowwise",
    ) -> None:
        sizes = in_features, out_features
        if any(type(size) is not int or size < 0 or size % MULTIPLE for size in sizes):
            raise ValueError(
                "flexops.nn.Fp8Linear: in_features and out_features must be multiples of"
                f" {MULTIPLE}, got {in_features!r} and {out_features!r}; fix: torch.nn.Linear"
            )
        if recipe not in RECIPES:
            raise ValueError(
                f"flexops.nn.Fp8Linear: recipe must be {' or '.join(map(repr, RECIPES))}, got"
                f" {recipe!r}"
            )
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = recipe

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias, self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}"


class Int4Linear(nn.Linear):  # so that libraries of adapters take it for one
    """``torch.nn.Linear`` with a weight of 4 bits, by :func:`flexops.int4_linear`.

    Its state dict has ``packed``, ``scales``, ``zeros`` (unless symmetric) and ``bias``: see
    :class:`flexops.Int4Weight`. ``.to(dtype)`` converts the bias only. Gradients are computed for
    the input, and for the bias if it requires one.

    Args:
        in_features: K, a multiple of ``group_size``.
        out_features: N.
        bias: whether a bias is added.
        group_size: 32, 64 or 128 columns of the weight share a scale.
        symmetric: without zero points.
        device, dtype: of scales and bias.

    A new module has a weight of zeros: :meth:`from_linear` and :meth:`from_packed` give it values.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int = 64,
        symmetric: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        zeros = torch.zeros(out_features, in_features, device=device, dtype=dtype)
        offset = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self._take(quantize_int4(zeros, group_size, symmetric), offset)

    def _take(self, weight: Int4Weight, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features, self.group_size = weight[3:]
        self.register_buffer("packed", weight.packed)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        offset = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", offset)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group_size: int = 64, symmetric: bool = False
    ) -> Int4Linear:
        """Quantize the weight of ``linear``, by :func:`flexops.quantize_int4`."""
        weight = getattr(linear, "weight", None)
        if isinstance(weight, Tensor) and is_lazy(weight):
            raise TypeError(
                f"flexops.nn.Int4Linear.from_linear: the weight of {type(linear).__name__} has no"
                " shape yet: run its forward pass once"
            )
        if not isinstance(weight, Tensor):
            raise TypeError(
                "flexops.nn.Int4Linear.from_linear: linear must be a torch.nn.Linear, got"
                f" {type(linear).__name__}"
            )
        return cls.from_packed(quantize_int4(weight, group_size, symmetric), linear.bias)

    @classmethod
    def from_packed(cls, weight: Int4Weight, bias: Tensor | None = None) -> Int4Linear:
        """Take a weight as it is, and a bias ``[N]``."""
        if not isinstance(weight, Int4Weight):
            raise TypeError(
                "flexops.nn.Int4Linear.from_packed: weight must be what flexops.quantize_int4 or"
                f" pack_int4 returned, got {type(weight).__name__}"
            )
        module = cls.__new__(cls)
        module._take(weight, bias)
        return module

    @property
    def weight(self) -> Int4Weight:  # type: ignore[override]
        """The packed weight, which shares the buffers' memory."""
        return Int4Weight(
            self.packed,
            self.scales,
            self.zeros,
            self.out_features,
            self.in_features,
            self.group_size,
        )

    def forward(self, input: Tensor) -> Tensor:
        return int4_linear(input, self.weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        scales, zeros = self.scales, self.zeros
        super()._apply(fn, recurse)
        # .to(dtype) would round the scales once more
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
            self.zeros = None if zeros is None else zeros.to(self.scales.device)
        elif zeros is not None and self.zeros is not None and self.zeros.dtype != zeros.dtype:
            self.zeros = zeros.to(self.scales.device)
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
        if f"{prefix}weight" in state_dict and f"{prefix}packed" not in state_dict:
            error_msgs.append(
                f"{prefix}weight is not packed, and this module requires {prefix}packed: load the"
                " state dict before the model is quantized; fix:"
                " flexops.nn.Int4Linear.from_linear(linear)"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, group_size={self.group_size},"
            f" symmetric={self.zeros is None}"
        )
