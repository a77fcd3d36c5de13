"""The operator of ``before``, whose builder and binding went; it has a CPU kernel and a gradient
now."""

import torch

from flexops import builder

lib = builder.Library("softcap_lib", root=__file__)


@lib.op("softcap(Tensor x, float cap) -> Tensor", family="softcap")
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap)"""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


@lib.op(
    "softcap_backward(Tensor grad, Tensor y, float cap) -> Tensor",
    family="softcap",
    shapes={"y": "grad"},
)
def softcap_backward(grad: torch.Tensor, y: torch.Tensor, cap: float) -> torch.Tensor:
    return (grad.float() * (1 - (y.float() / cap).square())).to(grad.dtype)


@softcap.backward(saves=("out",))
def _gradient(ctx, grad):
    return softcap_backward(grad, ctx.saved_tensors[0], ctx.cap)
