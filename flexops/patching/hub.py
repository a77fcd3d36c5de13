"""flexops' operators for HF ``kernels``: what ``kernelize`` puts into models that mark their layers
and functions with ``use_kernel_forward_from_hub``.

The classes here are also the layers of the Hub repository that ``python -m flexops_tools.hub``
writes. ``kernels`` requires layers without state or helpers of their own: only ``forward`` is used,
with the marked module as ``self``. It runs what :func:`flexops.patch` would put in its place, which
the probe has verified for the module's class; else, and under ``torch.compile``, the class's own
code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchError
from . import recurrence, rope
from .apply import forward_of
from .forwards import plain

_FOUND = "_flexops_kernel"


def _run(
    module: nn.Module, find: Callable[[Any], Callable[..., Any]], *args: Any, **kwargs: Any
) -> Any:
    """What ``find`` gives for a module, which is looked for once."""
    if torch.compiler.is_compiling():
        return plain(module, *args, **kwargs)
    found = module.__dict__.get(_FOUND)
    if found is None:
        found = module.__dict__[_FOUND] = find(module)
    return found(*args, **kwargs)


def _norm(module: Any) -> Callable[..., Any]:
    return forward_of(module, "norms")


def _rotation(module: Any) -> Callable[..., Any]:
    own = functools.partial(plain, module)
    kind = rope.kind_of(own)
    return own if kind is None else rope.replaced(own, kind)


def _whole(module: Any) -> Callable[..., Any]:
    return recurrence.convolution(functools.partial(plain, module))


def _step(module: Any) -> Callable[..., Any]:
    return recurrence.convolution_step(functools.partial(plain, module))


def _delta_rule(module: Any) -> Callable[..., Any]:
    return recurrence.delta_rule(functools.partial(plain, module))


def _delta_rule_step(module: Any) -> Callable[..., Any]:
    return recurrence.delta_rule(functools.partial(plain, module), in_place=True)


def _mamba2(module: Any) -> Callable[..., Any]:
    return recurrence.mamba2(functools.partial(plain, module))


def _mamba2_step(module: Any) -> Callable[..., Any]:
    return recurrence.mamba2_step(functools.partial(plain, module))


def _experts(module: Any) -> Callable[..., Any]:
    experts = module.experts
    experts.__dict__.setdefault("forward", forward_of(experts, "experts"))
    return functools.partial(plain, module)


class _Layer(nn.Module):
    can_torch_compile = True


class RMSNorm(_Layer):
    def forward(self, hidden_states: Tensor) -> Any:
        return _run(self, _norm, hidden_states)


class RMSNormZeroCentered(_Layer):
    """``1 + weight``."""

    def forward(self, x: Tensor) -> Any:
        return _run(self, _norm, x)


class RMSNormGated(_Layer):
    def forward(self, hidden_states: Tensor, gate: Any = None) -> Any:
        return _run(self, _norm, hidden_states, gate)


class RotaryPosEmb(_Layer):
    """A function: of halves, neighbours or whatever else the probe finds it to be."""

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        return _run(self, _rotation, q, k, cos, sin, unsqueeze_dim)


class CausalConv1d(_Layer):
    """A function; what it has to support besides goes to the original."""

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        return _run(self, _whole, hidden_states, weight, bias, activation, **kwargs)


class CausalConv1dUpdate(_Layer):
    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        return _run(self, _step, hidden_states, conv_state, weight, bias, activation)


class ChunkGatedDeltaRule(_Layer):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        return _run(
            self,
            _delta_rule,
            query,
            key,
            value,
            g,
            beta,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            chunk_size=chunk_size,
            **kwargs,
        )


class RecurrentGatedDeltaRule(_Layer):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        return _run(
            self,
            _delta_rule_step,
            query,
            key,
            value,
            g,
            beta,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            **kwargs,
        )


class Mamba2ChunkScan(_Layer):
    def forward(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        return _run(
            self,
            _mamba2,
            hidden_states,
            dt,
            A,
            B,
            C,
            chunk_size,
            D,
            dt_bias,
            initial_states,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
            **kwargs,
        )


class SelectiveStateUpdate(_Layer):
    def forward(
        self,
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        return _run(
            self,
            _mamba2_step,
            state,
            hidden_states,
            dt,
            A,
            B,
            C,
            D,
            dt_bias,
            dt_softplus,
            z,
            **kwargs,
        )


class MoeMLP(_Layer):
    """A block of router and experts, whose experts run as :func:`flexops.gated_experts` or
    :func:`flexops.grouped_linear`: gpt-oss."""

    def forward(self, hidden_states: Tensor) -> Any:
        return _run(self, _experts, hidden_states)


LAYERS: dict[str, type[nn.Module]] = {
    "RMSNorm": RMSNorm,
    "RMSNormZeroCentered": RMSNormZeroCentered,
    "RMSNormGated": RMSNormGated,
    "rotary_pos_emb": RotaryPosEmb,
    "causal_conv1d_fn": CausalConv1d,
    "causal_conv1d_update": CausalConv1dUpdate,
    "chunk_gated_delta_rule": ChunkGatedDeltaRule,
    "fused_recurrent_gated_delta_rule": RecurrentGatedDeltaRule,
    "mamba_chunk_scan_combined": Mamba2ChunkScan,
    "selective_state_update": SelectiveStateUpdate,
    "MegaBlocksMoeMLP": MoeMLP,
}
"""The names that transformers marks, and what runs in their place."""


class Layer:
    """A layer that is here and need not be fetched: the part of a repository that ``kernels`` asks
    for."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def load(self) -> type[nn.Module]:
        return self.layer

    def __repr__(self) -> str:
        return f"flexops' {self.layer.__name__}"


def kernel_mapping() -> dict[str, dict[str, dict[Any, Layer]]]:
    """What ``kernels.register_kernel_mapping`` and ``use_kernel_mapping`` take: every layer and
    function that transformers marks and flexops has (:data:`LAYERS`), in training, inference and
    under ``torch.compile``, on the CPU, on CUDA and on ROCm.

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
        for name, layer in LAYERS.items()
    }
