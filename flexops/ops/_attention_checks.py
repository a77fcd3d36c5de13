"""Which tensors attention's kernels take, and what is wrong with arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._arguments import check_tensor
from ._register import check_places

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
MOST_COLUMNS = 256


class Options(NamedTuple):
    """The operators' arguments behind q, k and v, by the names that torch has for them. What most
    calls leave alone stands behind what they give: a call hands over no more of them than it has
    to, because each takes the host a tenth of a microsecond."""

    heads_first: bool = False  # [batch, heads, length, head_dim]
    window_right: int = -1
    window_left: int = -1
    scale: float | None = None
    deterministic: bool = False
    bias: Tensor | None = None  # with a score_mod, the words that it looks things up in
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    score_mod: int = 0


def declined(q: Any, v: Any, score_mod: int = 0) -> str:
    """Why kernels do not take such tensors; "" if they do."""
    if not isinstance(q, Tensor) or not isinstance(v, Tensor):
        return ""
    if not q.is_cuda:
        return "a score_mod on a CPU" if score_mod else ""
    if q.dtype not in HALVES:
        return f"{str(q.dtype).removeprefix('torch.')} on a GPU (kernels take bfloat16 and float16)"
    for number in (q.shape[-1], v.shape[-1]) if q.dim() and v.dim() else ():
        if number > MOST_COLUMNS or number == 0:
            return f"a head_dim of {number} (kernels take 1 to {MOST_COLUMNS})"
    return ""


def is_ragged(q: Any, v: Any) -> bool:
    """Whether kernels take these tensors only with columns of zeros at their ends.

    A GPU's kernels load 8 columns at once. ``declined`` must have been asked before.
    """
    if not (isinstance(q, Tensor) and isinstance(v, Tensor)) or not q.is_cuda:
        return False
    return bool(q.dim() and v.dim() and (q.shape[-1] % 8 or v.shape[-1] % 8))


def padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, their columns a multiple of 8: those that are added are zeros, without
    gradients."""
    pad = torch.nn.functional.pad
    return tuple(pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in tensors)


def scale_of(q: Tensor, scale: float | None) -> float:
    """The factor of ``q k^T``: that of q's own columns, however many are added."""
    return float(max(q.shape[-1], 1) ** -0.5) if scale is None else scale


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    device = q.device.type if isinstance(q, Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in FLOATS else x for x in (q, k, v))
    return q, k, v


_NAME = "flexops.attention"


def fail(message: str, error: type[Exception] = ValueError) -> None:
    raise error(f"{_NAME}: {message}")


def kind_of(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


Window = Sequence[int | None] | Tensor
"""Keys on the left and on the right that take part; None or -1: all."""


def window_of(window: Window) -> tuple[int, int]:
    if isinstance(window, Tensor) and window.dim() == 1 and not window.is_floating_point():
        window = window.tolist()
    if (
        not isinstance(window, (tuple, list))
        or len(window) != 2
        or any(x is not None and (not isinstance(x, int) or x < -1) for x in window)
    ):
        fail(
            "window must be two numbers of keys, left and right, each None or -1 for no limit, got"
            f" {window!r}"
        )
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


def longest_of(cumulative: Any, given: int | None) -> int:
    if given is not None:
        return given
    if not isinstance(cumulative, Tensor) or cumulative.dim() != 1 or cumulative.numel() < 2:
        return 0
    return int((cumulative[1:] - cumulative[:-1]).max())


def check(q: Any, k: Any, v: Any, *given: Any, **named: Any) -> None:
    o = Options(*given, **named)  # torch leaves out what is the default
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        **{
            name: getattr(o, name)
            for name in ("bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")
        },
    }
    check_places(_NAME, tensors)
    _check_dtypes(q, k, v)
    packed = o.cu_seqlens_q is not None
    if packed != (o.cu_seqlens_k is not None):
        fail("cu_seqlens_q and cu_seqlens_k must both be given, or neither")
    _check_shapes(q, k, v, packed, o.heads_first)
    row, head = (2, 1) if o.heads_first else (-3, -2)
    batch, heads, lengths = q.shape[0], q.shape[head], (q.shape[row], k.shape[row])
    if packed:
        batch, lengths = _check_packing(o), (o.max_seqlen_q, o.max_seqlen_k)
    if not o.score_mod:
        _check_bias(o.bias, (batch, heads, *lengths))
    elif (
        o.softcap
        or o.alibi_slopes is not None
        or (o.bias is not None and (o.bias.dtype != torch.int32 or o.bias.dim() != 1))
    ):
        fail(
            "score_mod must come without softcap and alibi_slopes, and a bias that is int32 words"
            " to look things up in"
        )
    _check_of_heads("alibi_slopes", o.alibi_slopes, ((heads,), (batch, heads)))
    _check_of_heads("sinks", o.sinks, ((heads,),))
    if o.alibi_slopes is not None and o.alibi_slopes.requires_grad and torch.is_grad_enabled():
        fail("alibi_slopes must not require a gradient: there is none for them")


def _check_dtypes(q: Any, k: Any, v: Any) -> None:
    check_tensor(_NAME, "q", q, FLOATS)
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype != q.dtype:
            fail(f"{name} must be a {q.dtype} tensor, as q, got {kind_of(x)}", TypeError)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, packed: bool, heads_first: bool) -> None:
    if packed and heads_first:
        fail("heads_first must be False with cu_seqlens_q and cu_seqlens_k")
    form = (
        "[tokens, heads, head_dim], packed"
        if packed
        else (
            "[batch, heads, length, head_dim]"
            if heads_first
            else "[batch, length, heads, head_dim]"
        )
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != (3 if packed else 4):
            fail(f"{name} must have shape {form}, got {list(x.shape)}")
    if k.shape[-1] != q.shape[-1] or (not packed and k.shape[0] != q.shape[0]):
        batch, middle = (
            "" if packed else f"{q.shape[0]}, ",
            "key heads, any" if heads_first else "any, key heads",
        )
        fail(f"k must have shape [{batch}{middle}, {q.shape[-1]}], as q, got {list(k.shape)}")
    head = 1 if heads_first else -2
    heads, key_heads = q.shape[head], k.shape[head]
    if heads and (key_heads == 0 or heads % key_heads):
        fail(f"k must have a number of heads that divides q's {heads}, got {list(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        fail(f"v must have k's shape {list(k.shape)}, head_dim excepted, got {list(v.shape)}")


def _check_packing(o: Options) -> int:
    """How many sequences there are."""
    first: Any = o.cu_seqlens_q
    second: Any = o.cu_seqlens_k
    for name, x in (("cu_seqlens_q", first), ("cu_seqlens_k", second)):
        check_tensor(_NAME, name, x, (torch.int32,))
        if x.dim() != 1 or x.shape[0] < 1 or x.shape != first.shape:
            fail(f"{name} must have shape [sequences + 1], both the same, got {list(x.shape)}")
    for name, number in (("max_seqlen_q", o.max_seqlen_q), ("max_seqlen_k", o.max_seqlen_k)):
        if not isinstance(number, int) or number < 0:
            fail(f"{name} must be a number of tokens, got {number!r}")
    return int(first.shape[0]) - 1


def _check_bias(bias: Any, target: tuple[int, ...]) -> None:
    if bias is None:
        return
    check_tensor(_NAME, "bias", bias, (torch.bool, *FLOATS))
    missing = 4 - bias.dim()
    if missing < 0 or any(
        size not in (1, wanted) for size, wanted in zip(bias.shape, target[missing:], strict=True)
    ):
        fail(
            f"bias must be broadcastable to [batch, heads, queries, keys], {list(target)}, got"
            f" {list(bias.shape)}"
        )


def _check_of_heads(name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        fail(
            f"{name} must be a float32 tensor (or bfloat16 or float16), got {kind_of(x)}", TypeError
        )
    if tuple(x.shape) not in shapes:
        fail(
            f"{name} must have shape {' or '.join(str(list(shape)) for shape in shapes)}, got"
            f" {list(x.shape)}"
        )
