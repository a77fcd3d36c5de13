"""attention, beside torch's own with each of its backends."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexops.ops import attention as op
from flexops.ops import scaled_dot_product_attention as drop_in

from .case import (
    FLEXOPS,
    TORCH,
    Case,
    Function,
    Functions,
    Setup,
    forward_and_backward,
    library,
    small_calls,
)

FAMILY = "attention"


class Shape(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    causal: bool = True


SHAPES = (
    Shape(4, 32, 32, 4096, 128),
    Shape(4, 32, 32, 4096, 128, causal=False),
    Shape(8, 32, 32, 2048, 64),
    Shape(2, 32, 8, 8192, 128),
    Shape(1, 16, 16, 16384, 128),
    Shape(4, 16, 16, 4096, 256),
    Shape(2, 32, 8, 512, 128),
)


def attention(setup: Setup) -> Iterator[Case]:
    for shape in SHAPES:
        length = (
            shape.length
            if setup.device == "cuda"
            else min(shape.length, 1024) // (2 if setup.small else 1)
        )
        batch = shape.batch if setup.device == "cuda" else 1
        q, k, v = (
            setup.randn(batch, length, heads, shape.head_dim, grad=True)
            for heads in (shape.heads, shape.key_heads, shape.key_heads)
        )
        products = (
            4 * batch * shape.heads * length**2 * shape.head_dim // (2 if shape.causal else 1)
        )
        what = (
            f"bf16 {batch}x{length}x{shape.heads}/{shape.key_heads}x{shape.head_dim}"
            f" {'causal' if shape.causal else 'full'}"
        )
        functions = _functions(setup, shape)
        operations = products, products * 5 // 2
        forward, backward = (f"{count / 1e12:.3g} T operations" for count in operations)
        yield from forward_and_backward(
            FAMILY,
            "attention",
            f"attention {what}",
            functions,
            (q, k, v),
            (0, forward),
            (0, backward),
            operations,
        )
    yield from _packed(setup)
    yield from _decoding(setup)
    yield from _small(setup)


PACKED = {
    "4 of equal length": (1, 1, 1, 1),
    "8 of many lengths": (0.1, 1.9, 0.4, 0.05, 1.0, 0.3, 0.2, 0.05),
}


def _packed(setup: Setup) -> Iterator[Case]:
    """As many tokens as four sequences of 4096, packed: to be compared with the first shape, whose
    rows are as long."""
    mean = 4096 if setup.device == "cuda" else 256
    for what, parts in PACKED.items():
        lengths = [int(part * mean) for part in parts]
        ends = torch.tensor(
            [sum(lengths[:i]) for i in range(len(lengths) + 1)],
            dtype=torch.int32,
            device=setup.device,
        )
        longest, products = max(lengths), sum(2 * 32 * length**2 * 128 for length in lengths)
        operations = products, products * 5 // 2
        tensors = tuple(setup.randn(sum(lengths), 32, 128, grad=True) for _ in range(3))

        def ours(
            q: Tensor, k: Tensor, v: Tensor, ends: Tensor = ends, longest: int = longest
        ) -> object:
            return op.attention(
                q,
                k,
                v,
                causal=True,
                cu_seqlens_q=ends,
                cu_seqlens_k=ends,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
            )

        def adapt(varlen: Function, ends: Tensor = ends, longest: int = longest) -> Function:
            # torch before 2.11
            causal: Any = (
                {"window_size": (-1, 0)}
                if "window_size" in inspect.signature(varlen).parameters
                else {"is_causal": True}
            )
            return lambda q, k, v: varlen(q, k, v, ends, ends, longest, longest, **causal)

        torchs = (
            library("torch's varlen_attn", "torch.nn.attention.varlen", "varlen_attn", adapt)
            if setup.device == "cuda"
            else {}
        )
        functions: Functions = {FLEXOPS: ours, **torchs}
        name = f"attention bf16 packed, {what}, {sum(lengths)}x32/32x128 causal"
        forward, backward = (f"{count / 1e12:.3g} T operations" for count in operations)
        yield from forward_and_backward(
            FAMILY, "attention", name, functions, tensors, (0, forward), (0, backward), operations
        )


def _decoding(setup: Setup) -> Iterator[Case]:
    """One query of each sequence and a long cache, in torch's layout."""
    for batch, length in ((32, 8192), (1, 32768)):
        if setup.device != "cuda":
            batch, length = 1, length // 8
        q = setup.randn(batch, 32, 1, 128)
        k = setup.randn(batch, 8, length, 128)
        v = setup.randn(batch, 8, length, 128)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> object:
            return drop_in.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        functions: Functions = {
            FLEXOPS: ours,
            TORCH: torchs,
            **(_backends(torchs) if setup.device == "cuda" else {}),
        }
        size = q.nbytes * 2 + k.nbytes + v.nbytes
        name = f"one query, bf16 {batch}x{length}x32/8x128"
        yield from forward_and_backward(
            FAMILY,
            "scaled_dot_product_attention",
            name,
            functions,
            (q, k, v),
            (size, "q, k, v, output"),
            None,
        )


def _small(setup: Setup) -> Iterator[Case]:
    """Calls that are the host's time, each in its own layout."""

    def rows_first(rows: int) -> Sequence[Tensor]:
        return [setup.randn(1, rows, 4, 64) for _ in range(3)]

    def heads_first(rows: int) -> Sequence[Tensor]:
        return [setup.randn(1, 4, rows, 64) for _ in range(3)]

    def causal(function: Function) -> Function:
        return lambda q, k, v: function(q, k, v, is_causal=True)

    whole = Shape(1, 4, 4, 0, 64)
    yield from small_calls(
        setup, FAMILY, "attention", _functions(setup, whole), rows_first, "4/4x64 causal"
    )
    drop_ins = {
        FLEXOPS: causal(drop_in.scaled_dot_product_attention),
        TORCH: causal(torch.nn.functional.scaled_dot_product_attention),
    }
    yield from small_calls(
        setup, FAMILY, "scaled_dot_product_attention", drop_ins, heads_first, "4/4x64 causal"
    )


def _functions(setup: Setup, shape: Shape) -> Functions:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> object:
        return op.attention(q, k, v, causal=shape.causal)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped: dict[str, Any] = {"enable_gqa": True} if shape.heads != shape.key_heads else {}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, **grouped
        ).transpose(1, 2)

    functions: dict[str, Function] = {FLEXOPS: ours, TORCH: torchs}
    return {**functions, **_backends(torchs)} if setup.device == "cuda" else functions


def _backends(torchs: Function) -> Functions:
    """By each of torch's backends alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: SDPBackend) -> Function:
        def call(*args: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                result: Tensor = torchs(*args)
            return result

        return call

    return {
        "cuDNN": by(SDPBackend.CUDNN_ATTENTION),
        "torch's flash": by(SDPBackend.FLASH_ATTENTION),
    }
