"""flexops' operators for HF ``kernels``: what ``kernelize`` puts into models that mark their layers
with ``use_kernel_forward_from_hub``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchError
from ..ops.norm import rms_norm
from .rope import apply_rotary_pos_emb


class RMSNorm(nn.Module):
    """In place of the layers called ``RMSNorm``: transformers' have a ``weight`` and either name of
    the epsilon."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(
            hidden_states,
            self.weight,
            self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps,  # type: ignore[arg-type]
        )


class RotaryPosEmb(nn.Module):
    """In place of the function called ``rotary_pos_emb``."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class Layer:
    """A layer that is here and need not be fetched: the part of a repository that ``kernels`` asks
    for."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def load(self) -> type[nn.Module]:
        return self.layer

    def __repr__(self) -> str:
        return f"flexops' {self.layer.__name__}"


_LAYERS: dict[str, type[nn.Module]] = {"RMSNorm": RMSNorm, "rotary_pos_emb": RotaryPosEmb}


def kernel_mapping() -> dict[str, dict[str, dict[Any, Layer]]]:
    """What ``kernels.register_kernel_mapping`` and ``use_kernel_mapping`` take: RMS norms and
    rotary embeddings by flexops, in training, inference and under ``torch.compile``, on the CPU, on
    CUDA and on ROCm.

    Raises:
        PatchError: ``kernels`` is not installed.
    """
    try:
        from kernels import Mode
    except ImportError as error:
        raise PatchError(
            "HF's kernels, whose mapping this is, cannot be imported",
            found=str(error),
            fix='pip install "kernels>=0.16,<0.17"',
        ) from error
    devices = ("cpu", "rocm" if torch.version.hip else "cuda")
    modes = (Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE)
    return {
        name: {device: {mode: Layer(layer) for mode in modes} for device in devices}
        for name, layer in _LAYERS.items()
    }
