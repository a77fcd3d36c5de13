"""The ways in which a tensor's elements may lie in memory, and what is no strided tensor at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .case import Args, Case


def every_second(x: Tensor) -> Tensor:
    wide = x.new_zeros(*x.shape, 2)
    wide[..., 0] = x
    return wide[..., 0]


def padded_rows(x: Tensor) -> Tensor:
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def misaligned(x: Tensor) -> Tensor:
    moved = x.new_zeros(x.numel() + 1)[1:].view(x.shape)
    return moved.copy_(x)


def broadcast(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second element": every_second,
    "padded rows": padded_rows,
    "transposed": transposed,
    "misaligned": misaligned,
    "broadcast": broadcast,
}


def laid_out(args: Args, layout: Callable[[Tensor], Tensor]) -> Args:
    return tuple(
        layout(arg) if isinstance(arg, Tensor) and arg.dim() and arg.numel() else arg
        for arg in args
    )


def smaller(args: Args) -> Iterator[tuple[int, Tensor]]:
    """Each tensor but the first, by position, with one element along a dimension; memory of NaN
    follows, which a kernel that reads beyond it takes."""
    first = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor)), len(args))
    for position, arg in enumerate(args):
        if position == first or not isinstance(arg, Tensor) or not arg.is_floating_point():
            continue
        for dim in range(arg.dim()):
            if arg.shape[dim] > 1:
                part = arg.narrow(dim, 0, 1)
                behind = part.new_full((part.numel() + arg.numel(),), float("nan"))
                behind[: part.numel()] = part.reshape(-1)
                yield position, behind[: part.numel()].view(part.shape)


def layouts_of(case: Case) -> list[str]:
    return [name for name in LAYOUTS if case.broadcasts or name != "broadcast"]


def not_dense(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in the ways to hold one that torch has beside the usual."""
    yield tensor.to_sparse()
    if tensor.dim() == 2:
        yield tensor.to_sparse_csr()
    yield torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)
    if tensor.dtype == torch.float32 and tensor.is_cpu:
        yield torch.nested.nested_tensor([tensor, tensor])
        yield torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
        yield tensor.to_mkldnn()
