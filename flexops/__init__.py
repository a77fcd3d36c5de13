"""flexops: fused PyTorch operators, and everything it takes to have them compiled, matched and
checked.

Importing flexops registers its operators with torch. It touches no GPU, starts no process, writes
nothing and compiles nothing: that happens when an operator is first called on a device. Where torch
itself cannot be imported, flexops still imports, so that ``flexops doctor`` can say why; its
operators then raise ``TorchUnavailableError``.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import builder as builder
    from . import nn as nn
    from . import optim as optim
    from . import patching as patching
    from .build.load.extension import load as load
    from .build.load.extension_inline import load_inline as load_inline
    from .build.load.loader import FallbackWarning as FallbackWarning
    from .build.load.loader import OpStatus as OpStatus
    from .build.load.loader import status as status
    from .build.store.counters import cache_stats as cache_stats
    from .generation.cache import KVCache as KVCache
    from .generation.generate import generate as generate
    from .kernels.definition import Kernel as Kernel
    from .kernels.definition import kernel as kernel
    from .kernels.tensor_map import tensor_map as tensor_map
    from .ops._score_mod import ScoreMod as ScoreMod
    from .ops.activation import bias_gelu as bias_gelu
    from .ops.activation import bias_relu2 as bias_relu2
    from .ops.activation import bias_silu as bias_silu
    from .ops.activation import geglu as geglu
    from .ops.activation import swiglu as swiglu
    from .ops.adagrad import adagrad_ as adagrad_
    from .ops.adam import adam_ as adam_
    from .ops.adam import adam_copy_ as adam_copy_
    from .ops.adam8bit import adam8bit_ as adam8bit_
    from .ops.attention import attention as attention
    from .ops.causal_conv1d import causal_conv1d as causal_conv1d
    from .ops.causal_conv1d import causal_conv1d_update as causal_conv1d_update
    from .ops.cross_entropy import cross_entropy as cross_entropy
    from .ops.experts import gated_experts as gated_experts
    from .ops.few_rows import few_rows_linear as few_rows_linear
    from .ops.fp8 import dequantize_fp8 as dequantize_fp8
    from .ops.fp8 import dequantize_int8 as dequantize_int8
    from .ops.fp8 import quantize_fp8 as quantize_fp8
    from .ops.fp8 import quantize_int8 as quantize_int8
    from .ops.fp8_linear import fp8_linear as fp8_linear
    from .ops.gated_linear import geglu_linear as geglu_linear
    from .ops.gated_linear import swiglu_linear as swiglu_linear
    from .ops.gated_norm import gated_rms_norm as gated_rms_norm
    from .ops.grad_norm import clip_grads_ as clip_grads_
    from .ops.grad_norm import grad_norm as grad_norm
    from .ops.grouped_linear import grouped_linear as grouped_linear
    from .ops.int4_linear import Int4Weight as Int4Weight
    from .ops.int4_linear import int4_linear as int4_linear
    from .ops.int4_linear import pack_int4 as pack_int4
    from .ops.int4_linear import quantize_int4 as quantize_int4
    from .ops.int4_linear import unpack_int4 as unpack_int4
    from .ops.kvcache_attention import attention_with_kvcache as attention_with_kvcache
    from .ops.lamb import lamb_ as lamb_
    from .ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .ops.linear_logprobs import linear_logprobs as linear_logprobs
    from .ops.lion import lion_ as lion_
    from .ops.logprobs import logprobs as logprobs
    from .ops.norm import add_layer_norm as add_layer_norm
    from .ops.norm import add_rms_norm as add_rms_norm
    from .ops.norm import layer_norm as layer_norm
    from .ops.norm import rms_norm as rms_norm
    from .ops.norm_quantized import rms_norm_quantized as rms_norm_quantized
    from .ops.quant import QuantizedTensor as QuantizedTensor
    from .ops.quant import dequantize as dequantize
    from .ops.quant import quantize as quantize
    from .ops.rope import rotary_embedding as rotary_embedding
    from .ops.routing import route_tokens as route_tokens
    from .ops.scaled_dot_product_attention import (
        scaled_dot_product_attention as scaled_dot_product_attention,
    )
    from .ops.softmax import causal_softmax as causal_softmax
    from .ops.softmax import scaled_masked_softmax as scaled_masked_softmax
    from .ops.state_scan import gated_delta_rule as gated_delta_rule
    from .ops.state_scan import gated_delta_rule_update as gated_delta_rule_update
    from .ops.state_scan import mamba2_scan as mamba2_scan
    from .ops.state_scan import mamba2_scan_update as mamba2_scan_update
    from .patching import patch as patch
    from .patching import unpatch as unpatch

from ._version import __version__

_NAMES = {
    "builder": ("builder",),
    "kernels.definition": ("Kernel", "kernel"),
    "kernels.tensor_map": ("tensor_map",),
    "nn": ("nn",),
    "build.store.counters": ("cache_stats",),
    "build.load.extension": ("load",),
    "build.load.extension_inline": ("load_inline",),
    "build.load.loader": ("FallbackWarning", "OpStatus", "status"),
    "ops.activation": ("bias_gelu", "bias_relu2", "bias_silu", "geglu", "swiglu"),
    "ops.adagrad": ("adagrad_",),
    "ops.adam": ("adam_", "adam_copy_"),
    "ops.adam8bit": ("adam8bit_",),
    "generation.cache": ("KVCache",),
    "generation.generate": ("generate",),
    "ops._score_mod": ("ScoreMod",),
    "ops.attention": ("attention",),
    "ops.causal_conv1d": ("causal_conv1d", "causal_conv1d_update"),
    "ops.cross_entropy": ("cross_entropy",),
    "ops.experts": ("gated_experts",),
    "ops.few_rows": ("few_rows_linear",),
    "ops.fp8": ("dequantize_fp8", "dequantize_int8", "quantize_fp8", "quantize_int8"),
    "ops.fp8_linear": ("fp8_linear",),
    "ops.gated_linear": ("geglu_linear", "swiglu_linear"),
    "ops.gated_norm": ("gated_rms_norm",),
    "ops.grad_norm": ("clip_grads_", "grad_norm"),
    "ops.grouped_linear": ("grouped_linear",),
    "ops.int4_linear": (
        "Int4Weight",
        "int4_linear",
        "pack_int4",
        "quantize_int4",
        "unpack_int4",
    ),
    "ops.kvcache_attention": ("attention_with_kvcache",),
    "ops.lamb": ("lamb_",),
    "ops.linear_cross_entropy": ("linear_cross_entropy",),
    "ops.linear_logprobs": ("linear_logprobs",),
    "ops.logprobs": ("logprobs",),
    "ops.lion": ("lion_",),
    "ops.norm": ("add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"),
    "ops.norm_quantized": ("rms_norm_quantized",),
    "ops.quant": ("QuantizedTensor", "dequantize", "quantize"),
    "ops.rope": ("rotary_embedding",),
    "ops.routing": ("route_tokens",),
    "ops.scaled_dot_product_attention": ("scaled_dot_product_attention",),
    "ops.softmax": ("causal_softmax", "scaled_masked_softmax"),
    "ops.state_scan": (
        "gated_delta_rule",
        "gated_delta_rule_update",
        "mamba2_scan",
        "mamba2_scan_update",
    ),
    "optim": ("optim",),
    "patching": ("patch", "patching", "unpatch"),
}
"""What is public, by the module that has it: the imports above, which type checkers read, once
more."""

_PUBLIC = {name: module for module, names in _NAMES.items() for name in names}
_NEED_TORCH = ("generation", "kernels", "nn", "ops", "optim", "patching")

__all__ = ["__version__", *_PUBLIC]

_torch_error: Exception | None = None


def __getattr__(name: str) -> Any:
    """Resolve a public name at its first use (PEP 562), so that importing flexops stays cheap."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flexops' has no attribute {name!r}")
    module = _PUBLIC[name]
    if _torch_error is not None and module.split(".")[0] in _NEED_TORCH:
        from .errors import TorchUnavailableError

        raise TorchUnavailableError(
            f"flexops.{name} needs torch, which cannot be imported",
            found=str(_torch_error),
            fix="flexops doctor",
        ) from _torch_error
    found = import_module(f".{module}", __name__)
    value = found if module == name else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def _is_command_line() -> bool:
    """True in ``flexops ...`` and ``python -m flexops...``, which must start, and report, where
    torch is slow, broken or absent."""
    if not hasattr(sys, "orig_argv"):  # Python 3.9, which doctor says is too old
        return sys.argv[:1] == ["-m"]
    arguments = sys.orig_argv[1:]
    for position, argument in enumerate(arguments):
        if argument == "-m":
            return (
                arguments[position + 1 : position + 2] != []
                and arguments[position + 1].split(".")[0] == "flexops"
            )
        if not argument.startswith("-") and arguments[max(position - 1, 0)] not in ("-X", "-W"):
            return argument.rpartition("/")[2] == "flexops"
    return False


def _define_operators() -> None:
    """With the garbage collector at rest: to look once, in mid-import, at the million objects that
    torch leaves it would take longer than all the rest."""
    collects = gc.isenabled()
    gc.disable()
    try:
        import_module(".ops._declared", __name__).declare_all()
    finally:
        if collects:
            gc.enable()


def _refuse_unfit_python(version: tuple[int, ...], platform: str) -> None:
    """Say in words what else would be a missing module of the standard library."""
    from .errors import FlexopsError

    if version < (3, 10):
        found = ".".join(map(str, version[:3]))
        fix = "python3.12 -m venv .venv && . .venv/bin/activate"
        raise ImportError(
            str(
                FlexopsError(
                    "flexops does not run on this Python",
                    found=found,
                    required="3.10 or newer",
                    fix=fix,
                )
            )
        )
    if platform == "win32":
        raise ImportError(
            str(
                FlexopsError(
                    "flexops does not run on Windows",
                    found=platform,
                    required="Linux",
                    fix="wsl --install   # WSL 2 is Linux",
                )
            )
        )


if not _is_command_line():
    _refuse_unfit_python(sys.version_info[:3], sys.platform)
    try:
        import_module("torch")
    except Exception as error:  # ImportError, OSError, or any other of a damaged torch
        _torch_error = error
    else:
        _define_operators()
