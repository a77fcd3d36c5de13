"""Attention: ``softmax(score(scale q k^T)) v`` per sequence and head, without the matrix of scores
in memory.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022) and
what followed it; the kernels' own pages (``csrc/attention/attention.cuh``) say which. With ``offset
= keys - queries`` of a sequence, query ``i`` and key ``j``::

    s = scale q_i k_j;  s = softcap tanh(s / softcap);  s = s - slope |i + offset - j| + bias
    s = -inf where the query does not see the key
    lse_i = log(sum_j e^s + e^sink);  p = e^(s - lse_i);  o_i = sum_j p v_j

    dp = do_i v_j;  delta_i = do_i o_i - dlse_i;  ds = p (dp - delta_i);  dv_j = sum_i p do_i
    dbias = ds;  dsink = -sum_i e^(sink - lse_i) delta_i
    ds = ds (1 - tanh^2(s / softcap));  dq_i = scale sum_j ds k_j;  dk_j = scale sum_i ds q_i

A query that sees no key has zeros as its output and gradients, and ``-inf`` as its ``lse`` (without
sinks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import builtin
from ._arguments import soft_cap
from ._attention_checks import (
    HALVES,
    Options,
    Window,
    autocast,
    check,
    declined,
    fail,
    is_ragged,
    longest_of,
    padded,
    scale_of,
    window_of,
)  # fmt: skip
from ._attention_reference import (
    backward_fake,
    backward_reference,
    bias_fake,
    bias_reference,
    check_backward,
    delta_of,
    fake,
    noting,
    reference,
    rows_first,
    tables_reference,
)
from ._declared import define
from ._register import caller, once_differentiable
from ._self_check import Make, checking

if TYPE_CHECKING:
    from ._score_mod import ScoreMod


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | str | ScoreMod | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(score(scale q k^T)) v``. Formulas: see the module.

    Args:
        q: ``[batch, length, heads, head_dim]`` or, packed, ``[tokens, heads, head_dim]``; float32,
            bfloat16 or float16, any strides: a slice of a packed projection goes in as it is.
        k: like ``q``, with a length of its own and a number of heads that divides ``q``'s: ``heads
            / key heads`` neighbours share one.
        v: like ``k``; its ``head_dim`` may be another.
        causal: query ``i`` sees keys up to ``i + keys - queries`` (aligned bottom right): the last
            query sees all of them.
        scale: of the product; None is ``head_dim ** -0.5``.
        window: ``(left, right)``: query ``i`` sees only the keys from ``i + keys - queries - left``
            to ``i + keys - queries + right``; None or -1 on a side is no limit there.
        bias: broadcastable to ``[batch, heads, queries, keys]`` (packed: of the longest), never
            expanded in memory. A bool one is True where a key takes part; a float32, bfloat16 or
            float16 one is added. Its gradient, if it requires one, is computed by plain PyTorch, in
            pieces.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, float32 or what is cast to it; no gradient.
        softcap: ``score = softcap tanh(score / softcap)`` before bias and slopes; 0 leaves it out.
        sinks: ``[heads]``, one more score of each row, that has no value. Differentiable.
        cu_seqlens_q: int32, ``[sequences + 1]``: where each sequence of ``q`` begins, and the end,
            for packed tensors; else None.
        cu_seqlens_k: the same of ``k`` and ``v``.
        max_seqlen_q: the longest of ``q``'s; None asks ``cu_seqlens_q``, which waits for the GPU.
        max_seqlen_k: the same of ``k``'s.
        return_lse: give ``lse`` too, which is differentiable.
        deterministic: the same bits every time, backward too, where a GPU adds up ``q``'s gradient
            in any order otherwise. Automatic under ``torch.use_deterministic_algorithms(True)``.
        score_mod: a function ``(score, b, h, q, k) -> score`` of arithmetic on numbers
            (:class:`flexops.ScoreMod` says which), or an expression of the same as text, in place
            of ``softcap``, ``alibi_slopes`` and ``bias``; ``-inf`` leaves a key out. It is compiled
            into the kernels when it is first seen, with its derivative. Under ``torch.compile`` it
            must be a :class:`flexops.ScoreMod`, made outside.

    Returns:
        the output, ``q``'s shape with ``v``'s ``head_dim``, contiguous; with ``return_lse`` also
        the log of the sum of ``e^score``, float32, ``[batch, heads, queries]`` or, packed,
        ``[heads, tokens]``. Under autocast ``q``, ``k`` and ``v`` are cast as for torch's
        attention.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: a shape is not as above, or ``alibi_slopes`` requires a gradient.

    Arithmetic is float32, weights are rounded to the dtype of ``v`` before they are multiplied with
    it. On a GPU, kernels take bfloat16 and float16, and a ``head_dim`` up to 256. Where it is no
    multiple of 8, ``q``, ``k`` and ``v`` are copied to the next multiple, and the output to its own
    columns. All else is plain PyTorch, in pieces, as :func:`flexops.status` then says.
    """
    q, k, v = autocast(q, k, v)
    left, right = (-1, -1) if window is None else window_of(window)
    cap = soft_cap("flexops.attention: softcap", softcap)
    number, modifier = 0, None
    if score_mod is not None:
        if bias is not None or cap or alibi_slopes is not None:
            fail(
                "score_mod must come without softcap, bias and alibi_slopes, which it can compute"
                " itself"
            )
        modifier = _modifier(score_mod)
        number, bias = modifier.number, modifier.words(q.device)
    why, ragged, columns = declined(q, v, number), False, 0
    if not why and is_ragged(q, v):
        ragged, columns, scale = True, v.shape[-1], scale_of(q, scale)
    usual = (
        False,
        0 if causal else right,
        left,
        scale,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        bias,
    )
    options = usual_options(*usual)
    given = alibi_slopes is not None or sinks is not None
    given = given or cu_seqlens_q is not None or cu_seqlens_k is not None
    if number or cap or given or max_seqlen_q is not None or max_seqlen_k is not None:
        packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        of_heads = _in_float32(alibi_slopes), _in_float32(sinks)
        options = (*usual, cap, *of_heads, *packing, number)
    if ragged:
        check(q, k, v, *options)  # in the words of what was given
        q, k, v = padded(q, k, v)
    out, lse = (_composed if why else by_kernels)(q, k, v, *options)
    if modifier is not None and (learned := modifier.learned()):
        out, lse = _with_tables(out, lse, (q, k, v), Options(*options), modifier, learned)
    if out.shape[-1] > columns > 0:
        out = out[..., :columns].contiguous()
    return (out, lse) if return_lse else out


# ---- the operators' arguments, from the public ones ----


def usual_options(
    heads_first: bool,
    right: int,
    left: int,
    scale: float | None,
    deterministic: bool,
    bias: Tensor | None,
) -> tuple[Any, ...]:
    """The operators' arguments behind q, k and v, less what is the default at their end."""
    if bias is not None:
        return heads_first, right, left, scale, deterministic, bias
    if deterministic or scale is not None or left != -1:
        return heads_first, right, left, scale, deterministic
    return heads_first, right


def _packing(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[Any, ...]:
    """Where packed sequences begin, with lengths for those that were left out."""
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return (
            cu_seqlens_q,
            cu_seqlens_k,
            longest_of(cu_seqlens_q, max_seqlen_q),
            longest_of(cu_seqlens_k, max_seqlen_k),
        )
    if max_seqlen_q is not None or max_seqlen_k is not None:
        fail("max_seqlen_q and max_seqlen_k must come with cu_seqlens_q and cu_seqlens_k, got none")
    return cu_seqlens_q, cu_seqlens_k, 0, 0


def _in_float32(of_heads: Tensor | None) -> Tensor | None:
    return (
        of_heads.float() if isinstance(of_heads, Tensor) and of_heads.dtype in HALVES else of_heads
    )


def _modifier(score_mod: Callable[..., Any] | str | ScoreMod) -> ScoreMod:
    from ._score_mod import ScoreMod, made

    return score_mod if isinstance(score_mod, ScoreMod) else made(score_mod)


def _with_tables(
    out: Tensor, lse: Tensor, inputs: tuple[Tensor, ...], options: Options, modifier: ScoreMod,
    learned: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same results, from which gradients reach the tables that a score modifier looks up."""
    if torch.compiler.is_compiling():
        fix = "call attention outside of torch.compile, or detach them"
        fail(f"score_mod must look up tensors without gradients under torch.compile. fix: {fix}")
    tables = [modifier.table(i, out.device) for i in learned]
    plain = (x.detach() for x in inputs)
    found: tuple[Tensor, Tensor] = _OfTables.apply(
        out, lse, *plain, options, modifier, learned, *tables
    )
    return found


class _OfTables(torch.autograd.Function):
    """Output and log sum exp as they are, and the gradients of what a score modifier looks up."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Options,
        modifier: ScoreMod, numbers: list[int], *tables: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, *_tensors_of(options), *tables)
        ctx.options, ctx.modifier = _with_tensors(options, *[None] * 5), modifier
        ctx.numbers = numbers
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        options = _with_tensors(ctx.options, *rest[:5])
        tables = dict(zip(ctx.numbers, rest[5:], strict=True))
        given = torch.zeros_like(out) if grad is None else grad
        found = tables_reference(given, grad_lse, q, k, v, out, lse, options, ctx.modifier, tables)
        return (grad, grad_lse, *[None] * 6, *found.values())


# ---- autograd ----


def _keep(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    if len(args) <= _BIAS:  # no tensors among the options
        ctx.save_for_backward(*args[:3], *results)
        ctx.options = args[3:]
        return
    if len(args) > _ALIBI and ctx.needs_input_grad[_ALIBI]:
        fail("alibi_slopes must not require a gradient: there is none for them")
    options = Options(*args[3:])
    ctx.save_for_backward(*args[:3], *results, *_tensors_of(options))
    ctx.options = _with_tensors(options, *[None] * 5)


def _backward(
    operator: Callable[..., Any], ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = _with_tensors(ctx.options, *tensors) if tensors else ctx.options
    needs = ctx.needs_input_grad
    grad = torch.zeros_like(out) if grad is None else grad
    arguments = (grad, grad_lse, q, k, v, out, lse, *options)
    gradients: list[Tensor | None] = [None] * len(needs)
    if needs[0] or needs[1] or needs[2]:
        dq, dk, dv = operator(*arguments)
        gradients[:3] = dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None
    if tensors and needs[_BIAS]:
        gradients[_BIAS] = torch.ops.flexops.attention_bias_backward(*arguments)
    if tensors and len(needs) > _SINKS and needs[_SINKS]:
        gradients[_SINKS] = _gradient_of_sinks(grad, grad_lse, out, lse, options)
    return tuple(gradients)


# positions of arguments
_BIAS, _ALIBI, _SINKS = (
    3 + Options._fields.index(name) for name in ("bias", "alibi_slopes", "sinks")
)


def _tensors_of(o: Options) -> tuple[Tensor | None, ...]:
    return o.bias, o.alibi_slopes, o.sinks, o.cu_seqlens_q, o.cu_seqlens_k


def _with_tensors(
    options: Options, bias: Any, alibi_slopes: Any, sinks: Any, cu_seqlens_q: Any, cu_seqlens_k: Any
) -> Options:
    return options._replace(
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )


def _gradient_of_sinks(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, options: Options
) -> Tensor:
    if options.heads_first:
        grad, out = rows_first(grad, out)
    assert options.sinks is not None
    lse = lse if lse.dim() == 3 else lse[None]
    of_rows = torch.exp(options.sinks.to(lse.dtype)[:, None] - lse) * delta_of(grad, grad_lse, out)
    return -of_rows.sum((0, 2)).to(options.sinks.dtype)


define(
    "attention_backward",
    backward_reference,
    backward_fake,
    check=check_backward,
    function="attention",
)
define(
    "attention_composed_backward",
    noting(backward_reference, declined, 2, 7),
    backward_fake,
    check=check_backward,
    function="attention",
)
for _name, _instead, _operator in (
    ("attention", reference, torch.ops.flexops.attention_backward),
    (
        "attention_composed",
        noting(reference, declined, 0, 3),
        torch.ops.flexops.attention_composed_backward,
    ),
):
    define(
        _name,
        _instead,
        fake,
        check=check,
        setup_context=_keep,
        backward=functools.partial(_backward, builtin(_operator.default)),
        function="attention",
    )
define(
    "attention_bias_backward",
    bias_reference,
    bias_fake,
    check=check_backward,
    function="attention",
)

# With arguments of the operators, in their order; those behind the last one that matters may be
# left out.
by_kernels = caller(torch.ops.flexops.attention.default)
_composed = caller(torch.ops.flexops.attention_composed.default)


# ---- operations, for torch's counter ----


def _flops(q: Tensor, k: Tensor, v: Tensor, *given: Any, **named: Any) -> int:
    """Two products, as torch counts its own: what a mask leaves out is not taken off. Of packed
    sequences as if all were as long as the longest."""
    named.pop("out_val", None)  # the counter's
    o, batch = Options(*given, **named), q.shape[0]
    (queries, heads), keys = (
        (q.shape[2:0:-1], k.shape[2]) if o.heads_first else (q.shape[-3:-1], k.shape[-3])
    )
    if o.cu_seqlens_q is not None:
        batch, queries, keys = o.cu_seqlens_q.shape[0] - 1, o.max_seqlen_q, o.max_seqlen_k
    count: int = 2 * batch * heads * queries * keys * (q.shape[-1] + v.shape[-1])
    return count


def _flops_backward(*args: Any, **_: Any) -> int:
    """Five products, scores once more among them."""
    q, _k, v = args[2:5]
    forward = _flops(*args[2:5], *args[7:])
    return (
        forward * 5 // 2
        if q.shape[-1] == v.shape[-1]
        else forward // (q.shape[-1] + v.shape[-1]) * (3 * q.shape[-1] + 2 * v.shape[-1])
    )


FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.flexops.attention: _flops,
    torch.ops.flexops.attention_composed: _flops,
    torch.ops.flexops.attention_backward: _flops_backward,
    torch.ops.flexops.attention_composed_backward: _flops_backward,
}
"""See ``_torch.register_flops``."""


@checking(of_halves=1 / 32)
def self_check(make: Make) -> Any:
    """Grouped heads, unequal lengths, a window and a soft cap. A GPU's kernels take 16 bits."""
    dtype = torch.float32 if make.device == "cpu" else torch.bfloat16
    q, k, v, grad = (
        make(2, length, heads, 64, dtype=dtype)
        for length, heads in ((37, 4), (65, 2), (65, 2), (37, 4))
    )
    results = []
    for left, right, softcap in ((-1, -1, 0.0), (20, 0, 15.0)):
        options = (False, right, left, None, True, None, softcap)
        found = by_kernels(q, k, v, *options)
        results += [
            found,
            torch.ops.flexops.attention_backward(grad, None, q, k, v, *found, *options),
        ]
    return results
