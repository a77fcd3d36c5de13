"""The gated RMS norm of linear-attention and state-space models (Mamba 2: Dao and Gu, arXiv
2405.21060), by the kernels of :mod:`.norm` and :mod:`.activation`: one pass for the norm, one for
the gate."""

from __future__ import annotations

from torch import Tensor

from .activation import swiglu
from .norm import rms_norm


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm_first: bool = True,
    groups: int = 1,
) -> Tensor:
    """``rms_norm(x) * weight * silu(gate)``, or with ``norm_first=False`` ``rms_norm(x *
    silu(gate)) * weight``.

    Args:
        x: ``[..., H]``, float32, float16 or bfloat16.
        gate: the shape and dtype of ``x``.
        weight: ``[H]`` or None.
        eps: added to the mean square.
        norm_first: as Qwen3-Next has it; False: as Mamba 2 and Bamba have it.
        groups: the last dimension is normalized in so many equal parts, each by itself.

    Returns:
        the shape and dtype of ``x``. Each of the two passes computes in float32 and rounds its
        result to the dtype of ``x``.

    Raises:
        TypeError: a tensor is not of these dtypes.
        ValueError: shapes are not as above.

    Differentiable once, with respect to ``x``, ``gate`` and ``weight``.
    """
    where = "flexops.gated_rms_norm:"
    for name, one in (("x", x), ("gate", gate)):
        if not isinstance(one, Tensor):
            raise TypeError(f"{where} {name} must be a tensor, got {type(one).__name__}")
    if gate.shape != x.shape:
        raise ValueError(
            f"{where} gate must have x's shape {list(x.shape)}, got {list(gate.shape)}"
        )
    if x.dim() == 0 or groups < 1 or x.shape[-1] % groups != 0:
        raise ValueError(
            f"{where} groups must divide the last dimension of x, got {groups} for shape"
            f" {list(x.shape)}"
        )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{where} weight must have shape {list(x.shape[-1:])}, got {list(weight.shape)}"
        )
    if not norm_first:
        return _norm(swiglu(gate, x), weight, eps, groups)
    return swiglu(gate, _norm(x, weight, eps, groups))


def _norm(x: Tensor, weight: Tensor | None, eps: float, groups: int) -> Tensor:
    if groups == 1:
        return rms_norm(x, weight, eps)
    parts = rms_norm(x.unflatten(-1, (groups, -1)), None, eps).flatten(-2)
    return parts if weight is None else (parts * weight).to(x.dtype)
