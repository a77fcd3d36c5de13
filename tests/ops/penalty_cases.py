"""Every differentiable function with the arguments that may require a gradient, and plain PyTorch
for those whose gradient has derivatives or depends on no argument."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from state_scan_cases import by_steps
from torch import Tensor

import flexops
from flexops.ops import fp8_linear
from flexops.ops.experts import add_bias, combine_rows, expert_order, spread_rows


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


TARGET, CHOICES = torch.arange(6) * 5, torch.arange(12).view(6, 2) % 4
ENDS, ORDER = torch.tensor([2, 4, 6], dtype=torch.int32), expert_order(CHOICES, 4)
ROWS, PARTS, HEADS = draw(1, 4, 2, 16), draw(3, 8), draw(1, 2, 4, 16)
INT4 = flexops.quantize_int4(draw(32, 64))
DENSE = flexops.unpack_int4(INT4)


def gated_linear(act: Any) -> Any:
    return lambda gate, up, weight, bias: F.linear(act(gate) * up, weight, bias)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def plain_routes(x: Tensor, bias: Tensor) -> Tensor:
    scores = x.softmax(-1)
    chosen = scores.gather(1, (scores + bias).topk(2).indices)
    return chosen / chosen.sum(-1, keepdim=True)


def plain_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    start = q.new_zeros(1, 2, 4, 4)
    q, k = (one / (one.square().sum(-1, True) + 1e-6).sqrt() for one in (q, k))
    return by_steps(start, q / 2, k, v, (-g.abs()).exp(), beta, True)[0].to(v.dtype)


def plain_mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    start, rates = x.new_zeros(1, 2, 4, 4), F.softplus(dt)
    return by_steps(start, c, b, x, (-a.abs() * rates).exp(), rates, False)[0].to(x.dtype)


def first_part(function: Any, **options: Any) -> Any:
    return lambda *args: function(*args, **options)[0]


def second_part(function: Any, **options: Any) -> Any:
    return lambda *args: function(*args, **options)[1]


PENALTIES: dict[str, tuple[Any, ...]] = {
    "bias_gelu": (flexops.bias_gelu, PARTS, draw(8)),
    "bias_relu2": (flexops.bias_relu2, PARTS, draw(8)),
    "bias_silu": (flexops.bias_silu, PARTS, draw(8)),
    "swiglu": (flexops.swiglu, PARTS, PARTS),
    "geglu": (flexops.geglu, PARTS, PARTS),
    "swiglu_linear": (flexops.swiglu_linear, PARTS, PARTS, draw(4, 8), draw(4)),
    "geglu_linear": (flexops.geglu_linear, PARTS, PARTS, draw(4, 8), draw(4)),
    "attention": (flexops.attention, ROWS, ROWS, ROWS),
    "attention biased": (
        lambda q, k, v, bias, sinks: flexops.attention(q, k, v, bias=bias, sinks=sinks),
        *(ROWS, ROWS, ROWS, draw(1, 2, 4, 4), draw(2)),
    ),
    "attention with slopes": (
        lambda q, slopes: flexops.attention(q, ROWS, ROWS, alibi_slopes=slopes),
        *(ROWS, draw(2)),
    ),
    "attention of tables": (
        lambda q, k, v, table: flexops.attention(
            q, k, v, score_mod=lambda s, _b, h, _q, _k: s + table[h]
        ),
        *(ROWS, ROWS, ROWS, draw(2)),
    ),
    "attention lse": (second_part(flexops.attention, return_lse=True), ROWS, ROWS, ROWS),
    "scaled_dot_product_attention": (
        flexops.scaled_dot_product_attention,
        *(HEADS, HEADS, HEADS, draw(1, 2, 4, 4)),
    ),
    "causal_conv1d": (
        lambda x, weight, bias, states: flexops.causal_conv1d(
            x, weight, bias, activation="silu", initial_states=states
        ),
        *(draw(2, 4, 8), draw(4, 3), draw(4), draw(2, 4, 2)),
    ),
    "cross_entropy": (lambda x: flexops.cross_entropy(x, TARGET), draw(6, 32)),
    "cross_entropy none": (
        lambda x: flexops.cross_entropy(x, TARGET, reduction="none"),
        draw(6, 32),
    ),
    "cross_entropy in place": (
        lambda x: flexops.cross_entropy(x * 1, TARGET, inplace=True),
        draw(6, 32),
    ),
    **{
        f"linear_cross_entropy {reduction}": (
            lambda x, weight, bias, classes, reduction=reduction: flexops.linear_cross_entropy(
                x, weight, TARGET, bias, reduction=reduction, class_weight=classes
            ),
            *(draw(6, 16), draw(32, 16), draw(32), draw(32).abs()),
        )
        for reduction in ("mean", "none")
    },
    "linear_logprobs": (
        lambda x, weight, bias: flexops.linear_logprobs(x, weight, TARGET, bias),
        *(draw(6, 16), draw(32, 16), draw(32)),
    ),
    "linear_logprobs entropy": (
        lambda x, weight: flexops.linear_logprobs(x, weight, TARGET, return_entropy=True)[1],
        *(draw(6, 16), draw(32, 16)),
    ),
    "logprobs": (lambda x: flexops.logprobs(x, TARGET), draw(6, 32)),
    "logprobs entropy": (
        lambda x: flexops.logprobs(x, TARGET, return_entropy=True)[1],
        draw(6, 32),
    ),
    "gated_experts": (
        lambda x, weights, first, second: flexops.gated_experts(x, CHOICES, weights, first, second),
        *(draw(6, 16), draw(6, 2), draw(4, 32, 16), draw(4, 16, 16)),
    ),
    "expert rows": (lambda x: spread_rows(x, ORDER), draw(6, 16)),
    "expert rows, combined": (
        lambda rows, weights: combine_rows(rows, weights, ORDER),
        *(draw(12, 16), draw(6, 2)),
    ),
    "expert biases": (lambda rows, bias: add_bias(rows, bias, ORDER), draw(12, 16), draw(4, 16)),
    "gated_delta_rule": (
        lambda q, k, v, g, beta: flexops.gated_delta_rule(
            q, k, v, -g.abs(), beta, use_qk_l2norm_in_kernel=True
        )[0],
        *(draw(1, 3, 2, 4), draw(1, 3, 2, 4), draw(1, 3, 2, 4), draw(1, 3, 2), draw(1, 3, 2)),
    ),
    "mamba2_scan": (
        lambda x, dt, a, b, c: flexops.mamba2_scan(x, dt, -a.abs(), b, c, dt_softplus=True),
        *(draw(1, 3, 2, 4), draw(1, 3, 2), draw(2), draw(1, 3, 1, 4), draw(1, 3, 1, 4)),
    ),
    "grouped_linear": (
        lambda x, weight: flexops.grouped_linear(x, weight, ENDS),
        *(draw(6, 16), draw(3, 8, 16)),
    ),
    "int4_linear": (
        lambda x, bias: flexops.int4_linear(x, INT4, bias),
        *(draw(2, 64), draw(32)),
    ),
    "fp8_linear": (flexops.fp8_linear, draw(6, 32).round(), draw(16, 32).round(), draw(16).round()),
    "fp8_linear gw_hp": (
        functools.partial(flexops.fp8_linear, recipe="rowwise_with_gw_hp"),
        *(draw(6, 32).round(), draw(16, 32).round(), draw(16).round()),
    ),
    "gated_rms_norm": (flexops.gated_rms_norm, PARTS, PARTS, draw(8)),
    "rms_norm": (flexops.rms_norm, PARTS, draw(8)),
    "layer_norm": (flexops.layer_norm, PARTS, draw(8), draw(8)),
    "add_rms_norm": (first_part(flexops.add_rms_norm), PARTS, PARTS, draw(8)),
    "add_layer_norm": (first_part(flexops.add_layer_norm), PARTS, PARTS, draw(8), draw(8)),
    "rotary_embedding": (
        lambda x, cos, sin: flexops.rotary_embedding(x, None, cos, sin)[0],
        *(HEADS, draw(4, 8), draw(4, 8)),
    ),
    "rotary_embedding in place": (
        lambda x, cos, sin: flexops.rotary_embedding(x * 1, None, cos, sin, inplace=True)[0],
        *(HEADS, draw(4, 8), draw(4, 8)),
    ),
    "route_tokens": (
        lambda x, bias: flexops.route_tokens(x, 2, bias=bias)[0],
        *(draw(6, 8), draw(8)),
    ),
    "scaled_masked_softmax": (flexops.scaled_masked_softmax, PARTS, PARTS),
    "causal_softmax": (flexops.causal_softmax, draw(2, 4, 4)),
    # not public: what patched models call
    "fp8 norm": (
        lambda *args: fp8_linear.fp8_add_rms_norm(*args, 1e-6)[0],
        *(draw(6, 32), draw(6, 32), draw(32)),
    ),
    **{
        f"fp8 gated block {recipe}": (
            lambda *args, recipe=recipe: fp8_linear.fp8_gated_mlp(*args, "silu", recipe),
            *(draw(6, 32), draw(48, 32), draw(48, 32), draw(32, 48)),
        )
        for recipe in fp8_linear.RECIPES
    },
}
PUBLIC = [name for name in PENALTIES if not name.startswith("fp8 ")]  # layers have no transforms
PLAIN = {
    "swiglu_linear": gated_linear(F.silu),
    "geglu_linear": gated_linear(F.gelu),
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
    "expert rows": lambda x: x[ORDER.order.flatten() // 2],
    "expert biases": lambda rows, bias: rows + bias[CHOICES.flatten()[ORDER.order.flatten()]],
    "int4_linear": lambda x, bias: F.linear(x, DENSE.double(), bias),
    "fp8_linear": F.linear,  # whole numbers have codes
    "fp8_linear gw_hp": F.linear,
    "gated_delta_rule": plain_delta_rule,
    "mamba2_scan": plain_mamba2,
    "layer_norm": lambda x, *parts: F.layer_norm(x, x.shape[-1:], *parts),
    "rotary_embedding": plain_rotary,
    "rotary_embedding in place": plain_rotary,
    "route_tokens": plain_routes,
}
"""Of those whose gradient has derivatives, or does not depend on the arguments."""
WITHOUT_GRADIENT = {
    *("attention_with_kvcache", "causal_conv1d_update", "few_rows_linear"),
    *("gated_delta_rule_update", "mamba2_scan_update"),
    *("grad_norm", "rms_norm_quantized"),
    *("dequantize", "dequantize_fp8", "dequantize_int8", "pack_int4", "unpack_int4"),
    *("quantize", "quantize_fp8", "quantize_int4", "quantize_int8"),
}
