"""Which tensors attention's kernels take, and what is wrong with arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._register import check_places

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
_MOST_COLUMNS = 256


def declined(q: Any, v: Any, score_mod: int = 0) -> str:
    """Why kernels do not take such tensors; "" if they do."""
    if not isinstance(q, Tensor) or not isinstance(v, Tensor):
        return ""
    if not q.is_cuda:
        return "a score_mod on a CPU" if score_mod else ""
    if q.dtype not in HALVES:
        return f"{str(q.dtype).removeprefix('torch.')} on a GPU (kernels take bfloat16 and float16)"
    for number in (q.shape[-1], v.shape[-1]) if q.dim() and v.dim() else ():
        if number % 8 or number > _MOST_COLUMNS or number == 0:
            return f"a head_dim of {number} (kernels take multiples of 8 up to {_MOST_COLUMNS})"
    return ""


def declined_backward(q: Tensor, v: Tensor) -> str:
    """The same of the backward kernels, for what forward ones take."""
    if q.is_cuda and max(q.shape[-1], v.shape[-1]) > 128 and torch.cuda.get_device_capability(q.device) in ((8, 6), (8, 9), (12, 0), (12, 1)):
        return "the gradients of a head_dim above 128 (a multiprocessor of this GPU has too little shared memory)"
    return ""


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    device = q.device.type if isinstance(q, Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in FLOATS else x for x in (q, k, v))
    return q, k, v


def fail(message: str, error: type[Exception] = ValueError) -> None:
    raise error(f"flexops.attention: {message}")


def kind_of(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def window_of(window: tuple[int | None, int | None]) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2 or any(x is not None and (not isinstance(x, int) or x < -1) for x in window):
        fail(f"window must be two numbers of keys, left and right, each None or -1 for no limit, got {window!r}")
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


def longest_of(cumulative: Any, given: int | None) -> int:
    if given is not None:
        return given
    if not isinstance(cumulative, Tensor) or cumulative.dim() != 1 or cumulative.numel() < 2:
        return 0
    return int((cumulative[1:] - cumulative[:-1]).max())


def check(
    q: Any, k: Any, v: Any, bias: Any, alibi_slopes: Any, sinks: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, *rest: Any
) -> None:
    named = {"q": q, "k": k, "v": v, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_places("flexops.attention", named)
    if not isinstance(q, Tensor) or q.dtype not in FLOATS:
        fail(f"q must be a float32, bfloat16 or float16 tensor, got {kind_of(q)}", TypeError)
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype != q.dtype:
            fail(f"{name} must be a {q.dtype} tensor, as q, got {kind_of(x)}", TypeError)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        fail("cu_seqlens_q and cu_seqlens_k must both be given, or neither")
    packed = cu_seqlens_q is not None
    form = "[tokens, heads, head_dim], packed" if packed else "[batch, length, heads, head_dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != (3 if packed else 4):
            fail(f"{name} must have shape {form}, got {list(x.shape)}")
    heads, key_heads = q.shape[-2], k.shape[-2]
    if k.shape[-1] != q.shape[-1] or (not packed and k.shape[0] != q.shape[0]):
        batch = "" if packed else f"{q.shape[0]}, "
        fail(f"k must have shape [{batch}any, key heads, {q.shape[-1]}], as q, got {list(k.shape)}")
    if heads and (key_heads == 0 or heads % key_heads):
        fail(f"k must have a number of heads that divides q's {heads}, got {list(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        fail(f"v must have k's shape {list(k.shape)}, head_dim excepted, got {list(v.shape)}")
    batch = q.shape[0]
    if packed:
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if not isinstance(x, Tensor) or x.dtype != torch.int32:
                fail(f"{name} must be an int32 tensor, got {kind_of(x)}", TypeError)
            if x.dim() != 1 or x.shape[0] < 1 or x.shape != cu_seqlens_q.shape:
                fail(f"{name} must have shape [sequences + 1], both the same, got {list(x.shape)}")
        batch = cu_seqlens_q.shape[0] - 1
        for name, number in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if not isinstance(number, int) or number < 0:
                fail(f"{name} must be a number of tokens, got {number!r}")
    softcap, score_mod = (rest[3], rest[5]) if len(rest) > 5 else (0.0, 0)  # torch leaves out what is the default
    lengths = (max_seqlen_q, max_seqlen_k) if packed else (q.shape[1], k.shape[1])
    if not score_mod:
        _check_bias(bias, (batch, heads, *lengths))
    elif softcap or alibi_slopes is not None or (bias is not None and (bias.dtype != torch.int32 or bias.dim() != 1)):
        fail("score_mod must come without softcap and alibi_slopes, and a bias that is int32 words to look things up in")
    _check_of_heads("alibi_slopes", alibi_slopes, ((heads,), (batch, heads)))
    _check_of_heads("sinks", sinks, ((heads,),))
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        fail("alibi_slopes must not require a gradient: there is none for them")


def _check_bias(bias: Any, target: tuple[int, ...]) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor) or bias.dtype not in (torch.bool, *FLOATS):
        fail(f"bias must be a bool, float32, bfloat16 or float16 tensor, got {kind_of(bias)}", TypeError)
    missing = 4 - bias.dim()
    if missing < 0 or any(size not in (1, wanted) for size, wanted in zip(bias.shape, target[missing:], strict=True)):
        fail(f"bias must be broadcastable to [batch, heads, queries, keys], {list(target)}, got {list(bias.shape)}")


def _check_of_heads(name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        fail(f"{name} must be a float32 tensor (or bfloat16 or float16), got {kind_of(x)}", TypeError)
    if tuple(x.shape) not in shapes:
        fail(f"{name} must have shape {' or '.join(str(list(shape)) for shape in shapes)}, got {list(x.shape)}")
