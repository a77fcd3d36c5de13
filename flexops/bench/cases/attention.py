"""attention, beside torch's own with each of its backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import attention as op
from .case import FLEXOPS, TORCH, Case, Function, Functions, Setup, forward_and_backward

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
        length = shape.length if setup.device == "cuda" else min(shape.length, 1024) // (2 if setup.small else 1)
        batch = shape.batch if setup.device == "cuda" else 1
        q, k, v = (setup.randn(batch, length, heads, shape.head_dim, grad=True) for heads in (shape.heads, shape.key_heads, shape.key_heads))
        products = 4 * batch * shape.heads * length**2 * shape.head_dim // (2 if shape.causal else 1)
        what = f"bf16 {batch}x{length}x{shape.heads}/{shape.key_heads}x{shape.head_dim} {'causal' if shape.causal else 'full'}"
        functions = _functions(setup, shape)
        forward, backward = (f"{operations / 1e12:.3g} T operations" for operations in (products, products * 5 // 2))
        yield from forward_and_backward(FAMILY, "attention", f"attention {what}", functions, (q, k, v), (0, forward), (0, backward))


def _functions(setup: Setup, shape: Shape) -> Functions:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> object:
        return op.attention(q, k, v, causal=shape.causal)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped: dict[str, Any] = {"enable_gqa": True} if shape.heads != shape.key_heads else {}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, **grouped).transpose(1, 2)

    functions: dict[str, Function] = {FLEXOPS: ours, TORCH: torchs}
    if setup.device == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def by(backend: SDPBackend) -> Function:
            def call(*args: Tensor) -> Tensor:
                with sdpa_kernel(backend):
                    return torchs(*args)

            return call

        functions |= {"cuDNN": by(SDPBackend.CUDNN_ATTENTION), "torch's flash": by(SDPBackend.FLASH_ATTENTION)}
    return functions
