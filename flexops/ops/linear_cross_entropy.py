"""Cross entropy fused with the linear layer before it: torch's matrix products around the ops of
:mod:`.cross_entropy`, chunk by chunk.

With a soft cap (Gemma 2, arXiv 2408.00118, section 2) the logits are ``c * tanh(y / c)`` of the
layer's ``y``, and their gradient goes on to the layer times ``1 - tanh(y / c)**2``. With class
weights a row's loss, its z-loss included, counts ``class_weight[target]`` times, and a mean is
divided by the sum of these, as in ``torch.nn.functional.cross_entropy``.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from .._torch import product_dtype
from ._arguments import check_device, check_shape, check_tensor, soft_cap, whole
from ._declared import define
from ._register import caller, reference_of
from .cross_entropy import REDUCTIONS, check_arguments, divisor_of, loss_dtype, scaled

_CHUNK_BYTES = (2**28, 2**30)
"""What a chunk of logits may take: as much as the weight, which its gradient's last step takes
anyway, within these bounds."""
_ACCUMULATE = {None: 0, "float32": 1, "native": 2}
_FEW_CHUNKS = 4
"""So many are summed in the weight's own dtype: each but the first adds a rounding to it, where a
single product has one."""


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    chunk_size: int | None = None,
    accumulate: str | None = None,
    return_accuracy: Literal[False] = False,
    return_z_loss: Literal[False] = False,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    chunk_size: int | None = None,
    accumulate: str | None = None,
    return_accuracy: bool = False,
    return_z_loss: bool = False,
) -> Tensor | tuple[Tensor, ...]: ...
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    chunk_size: int | None = None,
    accumulate: str | None = None,
    return_accuracy: bool = False,
    return_z_loss: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``cross_entropy(linear(x, weight, bias), target)`` without ever holding all the logits.

    Rows go through in chunks: a matrix product gives a chunk's logits, which
    :func:`flexops.cross_entropy` turns into their gradient in place, from which matrix products at
    once make the chunk's part of the gradients of ``x``, ``weight`` and ``bias``. So the forward
    pass holds one chunk of logits instead of all of them and their gradient, and the backward pass
    has next to nothing left to do.

    Args:
        x: ``[..., H]``, float32, float16 or bfloat16.
        weight: ``[V, H]``; of another float dtype it is converted to that of ``x``, as a copy.
        target: int64 ``[...]``.
        bias: ``[V]`` or None.
        ignore_index, label_smoothing, z_loss, reduction: as for :func:`flexops.cross_entropy`. With
            "none" the gradients cannot be made before the losses' own are known, so that the
            backward pass computes each chunk's logits once more.
        softcap: ``c > 0`` makes the logits ``c * tanh(logits / c)``, in their own dtype, as models
            do. Takes a second chunk (so chunks are half as large by themselves) and four passes
            over each.
        class_weight: ``[V]``, float32, float16 or bfloat16: how often a row of each class counts.
            Has no gradient; not together with ``label_smoothing``.
        chunk_size: rows a chunk; None picks as many as give logits of the weight's size, but of 256
            MiB at least and 1 GiB at most (matrix products of fewer rows are less efficient), and
            on a GPU no more than half of the memory that is free when a call of such sizes is made
            first.
        accumulate: what the weight's gradient is summed in over chunks. "float32" takes ``4 * V *
            H`` bytes while the forward pass runs, and is as exact with many chunks as with one.
            "native" sums in the weight's own dtype, if that is also the products', in the memory of
            the result: one rounding to it for each chunk. None is "native" for four chunks or
            fewer, and on a GPU whose free memory the float32 sum would not fit, else "float32":
            to get the same bits however full the GPU is, pass one of them, and
            ``chunk_size``. It makes no difference with one chunk, and in float32.
        return_accuracy: also return how often no logit is greater than the target's, reduced as
            losses are, though not weighted: a fraction, a number, or 1 or 0 for each row (0 if it
            is ignored).
        return_z_loss: also return the part of the loss that ``z_loss`` makes.

    Returns:
        float32: a scalar, or ``[...]`` with "none". With ``return_accuracy`` or ``return_z_loss`` a
        tuple ``(loss, accuracy)``, ``(loss, z_loss)`` or ``(loss, accuracy, z_loss)``, in which
        only the loss has a gradient. Neither takes another pass over the logits.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes, devices or numbers are not as above.

    Differentiable once, with respect to ``x``, ``weight`` and ``bias``. Matrix products follow
    autocast: under it they run in its dtype, whatever that of ``x`` and ``weight``. Gradients have
    the dtype of what they belong to.
    """
    where = "flexops.linear_cross_entropy"
    check_arguments("linear_cross_entropy", "x", x, target, label_smoothing, z_loss, reduction)
    check_chunk_size(where, chunk_size)
    _check_options(where, accumulate, softcap)
    check_weights(where, x, weight, bias)
    if class_weight is not None:
        _check_class_weight(where, class_weight, x, weight, label_smoothing)
    shape, code = target.shape, REDUCTIONS[reduction]
    needs = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (x, weight, bias)
    ]
    rows, targets = flat_rows(x, target)
    numbers = (ignore_index, label_smoothing, z_loss, softcap or 0.0, code)
    rest = (
        return_accuracy or return_z_loss,
        chunk_size or 0,
        _ACCUMULATE[accumulate],
        product_dtype(x),
    )
    loss, *_, extras = _FORWARD(rows, weight, bias, targets, class_weight, *numbers, *rest, *needs)
    asked = [
        loss,
        *([extras[0]] if return_accuracy else []),
        *([extras[1]] if return_z_loss else []),
    ]
    results = (
        tuple(each.view(shape) for each in asked) if code == 0 and len(shape) != 1 else tuple(asked)
    )
    return results if return_accuracy or return_z_loss else results[0]


def flat_rows(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, H]`` and ``[N]``."""
    if target.dim() == 1:
        return x, target
    return x.unsqueeze(0).flatten(0, -2), target.reshape(-1)


def check_chunk_size(op: str, chunk_size: int | None) -> None:
    if chunk_size is not None and whole(f"{op}: chunk_size", chunk_size) < 1:
        raise ValueError(f"{op}: chunk_size must be at least 1, or None, got {chunk_size}")


def _check_options(op: str, accumulate: str | None, softcap: float | None) -> None:
    if accumulate not in list(_ACCUMULATE):
        raise ValueError(
            f"{op}: accumulate must be 'float32', 'native' or None, got {accumulate!r}"
        )
    if softcap is not None:
        soft_cap(f"{op}: softcap", softcap, "None")


def _check_class_weight(
    op: str, class_weight: Tensor, x: Tensor, weight: Tensor, label_smoothing: float
) -> None:
    check_tensor(op, "class_weight", class_weight)
    check_device(op, "class_weight", class_weight, "x", x)
    check_shape(op, "class_weight", class_weight, weight.shape[:1])
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: class_weight must not require a gradient: there is none for it")
    if label_smoothing != 0.0:
        raise ValueError(
            f"{op}: label_smoothing must be 0 with class_weight, got {label_smoothing};"
            " torch.nn.functional.cross_entropy has both"
        )


def check_weights(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, name_of_x: str = "x"
) -> None:
    for name, tensor in (("weight", weight), *((("bias", bias),) if bias is not None else ())):
        check_tensor(op, name, tensor)
        check_device(op, name, tensor, name_of_x, x)
    check_shape(op, "weight", weight, ["V", x.shape[-1]], " with at least one class")
    if weight.shape[0] == 0:
        raise ValueError(f"{op}: weight must have at least one class, got {list(weight.shape)}")
    if bias is not None:
        check_shape(op, "bias", bias, weight.shape[:1])


# ---- chunks of the rows of x, [N, H] ----


class _Options(NamedTuple):
    """The operators' arguments behind the tensors. The gradients' operator has the same, with
    losses that are not reduced, and without extras."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: int
    extras: bool
    chunk: int
    accumulate: int
    dtype: torch.dtype
    x_grad: bool
    weight_grad: bool
    bias_grad: bool


_found_free: dict[tuple[Any, ...], int] = {}
"""What was free when a call of these sizes was made first: torch's allocator keeps that memory, and
a driver that works is not asked in every step."""


def _free_bytes(device: torch.device, enough: int, sizes: tuple[Any, ...]) -> int | None:
    """What could be allocated on a GPU before the first call of these sizes, or at least
    ``enough``; None where that is not known, or must not be asked."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    key = (device, enough, *sizes)
    if key not in _found_free:
        _found_free[key] = _ask_free_bytes(device, enough)
    return _found_free[key]


def _ask_free_bytes(device: torch.device, enough: int) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    if free < enough:  # what torch keeps for later is free as well, but takes long to find out
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free


def _chunks(
    rows: int, row_bytes: int, chunk: int, weight_bytes: int, free: int | None = None
) -> list[slice]:
    if chunk < 1:
        least, most = _CHUNK_BYTES
        size = max(min(weight_bytes, most), least)
        fitting = max((size if free is None else min(size, free // 2)) // row_bytes, 64)
        count = max((rows + fitting - 1) // fitting, 1)
        chunk = max((((rows + count - 1) // count + 63) // 64) * 64, 1)
    return [slice(begin, min(begin + chunk, rows)) for begin in range(0, rows, chunk)]


def _sums_wide(
    accumulate: int, chunks: int, elements: int, size: int, chunk_bytes: int, free: int | None
) -> bool:
    """Whether a gradient of as many elements, of ``size`` bytes each, is summed in float32."""
    if accumulate == 0:
        return chunks > _FEW_CHUNKS and (
            free is None or max(4 * elements + chunk_bytes, (4 + size) * elements) <= free
        )
    return accumulate == 1


def plan_chunks(
    x: Tensor, weight: Tensor, dtype: torch.dtype, copies: int, chunk: int, accumulate: int
) -> tuple[list[slice], bool]:
    """The chunks of the rows of ``x``, of which ``copies`` of the logits are held at a time, and
    whether the weight's gradient is summed in float32."""
    classes, elements = weight.shape[0], weight.numel()
    row_bytes = copies * classes * dtype.itemsize
    free = (
        _free_bytes(x.device, 8 * elements + _CHUNK_BYTES[1], (x.shape[0], row_bytes))
        if chunk < 1 or accumulate == 0
        else None
    )
    chunks = _chunks(x.shape[0], row_bytes, chunk, elements * dtype.itemsize, free)
    wide = _sums_wide(
        accumulate,
        len(chunks),
        elements,
        weight.element_size(),
        row_bytes * (chunks[0].stop if chunks else 0),
        free,
    )
    return chunks, wide


class Gradients:
    """Of ``x``, ``weight`` and ``bias``, summed over chunks. Unused ones stay empty.
    The bias's, which is small, stays in float32."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        product: Tensor,
        single: bool,
        wide: bool,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        self.x = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if wanted[0]
            else x.new_empty(0)
        )
        self.product, self.single, self.wanted = product, single, wanted
        self.weight_dtype, self.wide = weight.dtype, loss_dtype(x)
        total = self.wide if wide or weight.dtype != product.dtype else weight.dtype
        # the first chunk's product is written, the others added
        make = torch.empty if total == product.dtype and x.shape[0] else torch.zeros
        self.weight = make(
            weight.shape if wanted[1] and not single else [0], dtype=total, device=weight.device
        )
        self.bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=torch.float64)
        self.begun = False

    def add(self, rows: slice, x: Tensor, of_logits: Tensor) -> None:
        if self.wanted[0]:
            self.x[rows] = of_logits @ self.product
        if self.wanted[1]:
            if self.single:
                self.weight = of_logits.t() @ x
            elif not self.begun and self.weight.dtype == x.dtype:
                torch.mm(of_logits.t(), x, out=self.weight)
            else:
                _add_product(self.weight, of_logits.t(), x)
        if self.wanted[2]:
            self.bias += of_logits.sum(0, dtype=self.wide)
        self.begun = True

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.weight.to(self.weight_dtype), self.bias.to(self.wide)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, rounded to nothing less than ``total``'s dtype where torch can."""
    if a.dtype == total.dtype or not total.is_cuda:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b


def op_for(name: str, x: Tensor) -> Any:
    """The reference for float64, which is for checks of what calls it only."""
    op = getattr(torch.ops.flexops, name).default
    return reference_of(op.name()) if x.dtype == torch.float64 else op


class _Rows(NamedTuple):
    """Of each row its loss and, if they are asked for (else empty), whether no logit is greater
    than the target's, and the logits' log-sum-exp."""

    losses: Tensor
    right: Tensor
    log_sum_exps: Tensor


def _run_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    o: _Options,
    wanted: tuple[bool, bool, bool],
) -> tuple[_Rows, Gradients]:
    """What is known of each row, and the gradients times ``factors``."""
    forward, inplace = op_for("cross_entropy", x), op_for("cross_entropy_", x)
    dtype = torch.float64 if x.dtype == torch.float64 else o.dtype
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    classes, copies = weight.shape[0], 2 if o.softcap and any(wanted) else 1
    chunks, wide = plan_chunks(x, weight, dtype, copies, o.chunk, o.accumulate)
    gradients = Gradients(x, weight, matrix, len(chunks) == 1, wide, wanted)
    losses = x.new_empty(x.shape[0], dtype=loss_dtype(x))
    right, log_sum_exps = (
        torch.empty_like(losses) if o.extras else losses.new_empty(0) for _ in range(2)
    )
    numbers = (o.ignore_index, o.label_smoothing, o.z_loss)
    with torch.autocast(x.device.type, enabled=False):
        for rows in chunks:
            part = x[rows].to(dtype)
            logits = capped = torch.nn.functional.linear(part, matrix, offset)
            if o.softcap:
                capped = logits.div_(o.softcap).tanh_() * o.softcap
            chosen = (
                capped.gather(1, target[rows].clamp(0, classes - 1).unsqueeze(1)).squeeze(1)
                if o.extras
                else None
            )
            if any(wanted):
                by = factors if factors is None or factors.dim() == 0 else factors[rows]
                losses[rows], stats = inplace(capped, target[rows], by, *numbers, 0)
                if o.softcap:  # times 1 - tanh**2
                    torch.ops.aten.tanh_backward.grad_input(capped, logits, grad_input=capped)
                gradients.add(rows, part, capped)
            else:
                losses[rows], stats = forward(capped, target[rows], *numbers, 0)
            if chosen is not None:
                greatest, total = stats.chunk(2)
                right[rows], log_sum_exps[rows] = (
                    (chosen >= greatest).to(right.dtype),
                    greatest + total.log(),
                )
            del logits, capped  # before the next chunk's are made
    return _Rows(losses, right, log_sum_exps), gradients


def _row_weights(
    target: Tensor, class_weight: Tensor, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    weights = class_weight.to(dtype)[target.clamp(0, class_weight.shape[0] - 1)]
    return weights.masked_fill(target == ignore_index, 0.0)


def _extras(
    rows: _Rows, target: Tensor, weights: Tensor | None, divisor: Tensor, o: _Options
) -> Tensor:
    """Accuracy, and the z-loss that is in the loss: ``[2]``, or ``[2, N]`` if losses are not
    reduced."""
    used = target != o.ignore_index
    right = rows.right.masked_fill(~used, 0.0)
    z_losses = (o.z_loss * rows.log_sum_exps.square()).masked_fill(~used, 0.0)
    z_losses = z_losses if weights is None else z_losses * weights
    if o.reduction == 0:
        return torch.stack([right, z_losses])
    return torch.stack(
        [
            right.sum() / divisor_of(target, o.ignore_index, o.reduction, right.dtype),
            z_losses.sum() / divisor,
        ]
    )


# ---- operators ----


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, ...]:
    """The loss, the gradients of ``x``, ``weight`` and ``bias``, what these are still to be divided
    by, and what else was asked for."""
    o, wide = _Options(*numbers), loss_dtype(x)
    wanted = (False, False, False) if o.reduction == 0 else numbers[-3:]
    weights = (
        None if class_weight is None else _row_weights(target, class_weight, o.ignore_index, wide)
    )
    divisor = (
        divisor_of(target, o.ignore_index, o.reduction, wide)
        if weights is None or o.reduction != 2
        else weights.sum()
    )
    rest = torch.where(divisor == 0, 1, divisor)  # where there are no rows, gradients are 0
    # A mean's gradients are divided by the number of rows together with those of the logits, if
    # bfloat16 rounds these more than the reciprocal is rounded; in float32, where that would show,
    # at the end; and in float16, where they may be too small then, in the backward pass.
    factors = weights
    if o.reduction == 2 and o.dtype == torch.bfloat16:
        factors = rest.reciprocal() if weights is None else weights / rest
    rows, gradients = _run_chunks(x, weight, bias, target, factors, o, wanted)
    losses = rows.losses if weights is None else rows.losses * weights
    loss = losses if o.reduction == 0 else losses.sum() / divisor
    results = gradients.results()
    if o.reduction == 2 and o.dtype not in (torch.bfloat16, torch.float16):
        for gradient in results:
            gradient.div_(rest)
    also = _extras(rows, target, weights, divisor, o) if o.extras else losses.new_empty(0)
    return loss, *results, rest if o.dtype == torch.float16 else torch.ones_like(rest), also


def _backward_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    o, factors = _Options._make([*numbers[:4], 0, False, *numbers[4:]]), grad
    if class_weight is not None:
        factors = grad * _row_weights(target, class_weight, o.ignore_index, grad.dtype)
    return _run_chunks(x, weight, bias, target, factors, o, numbers[-3:])[1].results()


def gradients_fake(
    x: Tensor, weight: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    of_x = x.new_empty(x.shape if wanted[0] else [0])
    of_weight = weight.new_empty(weight.shape if wanted[1] else [0])
    return (
        of_x,
        of_weight,
        weight.new_empty([weight.shape[0]] if wanted[2] else [0], dtype=loss_dtype(x)),
    )


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    reduction, extras, dtype = rest[7], rest[8], loss_dtype(x)
    wanted = rest[12:] if reduction != 0 else (False, False, False)
    each = [x.shape[0]] if reduction == 0 else []
    also = x.new_empty([2, *each] if extras else [0], dtype=dtype)
    return (
        x.new_empty(each, dtype=dtype),
        *gradients_fake(x, weight, wanted),
        x.new_empty([], dtype=dtype),
        also,
    )


def _backward_fake(_: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return gradients_fake(x, weight, rest[-3:])


def _setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    ctx.reduction, ctx.numbers = args[9], (*args[5:9], *args[11:])
    ctx.bias_dtype = None if args[2] is None else args[2].dtype
    # gradients have no graph: a second derivative is noticed by the loss's
    ctx.save_for_backward(*(args[:5] if ctx.reduction == 0 else (*results[1:5], results[0])))
    ctx.mark_non_differentiable(*results[1:])


def wanted_gradients(
    ctx: Any, of_x: Tensor, of_weight: Tensor, of_bias: Tensor
) -> tuple[Tensor | None, ...]:
    """Of the first three inputs, for autograd; the others have none."""
    wanted = ctx.needs_input_grad
    return (
        of_x if wanted[0] else None,
        of_weight if wanted[1] else None,
        of_bias.to(ctx.bias_dtype) if wanted[2] else None,
        *[None] * (len(wanted) - 3),
    )


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    if ctx.reduction == 0:
        of_x, of_weight, of_bias = torch.ops.flexops.linear_cross_entropy_backward.default(
            grad, *ctx.saved_tensors, *ctx.numbers
        )
    else:
        *gradients, divisor = ctx.saved_tensors[:4]
        of_x, of_weight, of_bias = (scaled(gradient, grad / divisor) for gradient in gradients)
    return wanted_gradients(ctx, of_x, of_weight, of_bias)


define(
    "linear_cross_entropy",
    _reference,
    _fake,
    setup_context=_setup,
    backward=_backward,
)
define(
    "linear_cross_entropy_backward",
    _backward_reference,
    _backward_fake,
)
_FORWARD = caller(torch.ops.flexops.linear_cross_entropy.default)
