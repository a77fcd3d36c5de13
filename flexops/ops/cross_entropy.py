"""Cross entropy of logits and class numbers, with its gradient; and the same fused with the linear layer before it.

For a row ``x`` of ``V`` logits and its class ``t``, with ``lse = log(sum(exp(x)))``::

    loss     = lse - (1 - label_smoothing) * x[t] - label_smoothing * mean(x) + z_loss * lse**2
    gradient = softmax(x) * (1 + 2 * z_loss * lse) - label_smoothing / V - (1 - label_smoothing) * (class == t)

which without ``z_loss`` is what ``torch.nn.functional.cross_entropy`` computes; ``z_loss`` is PaLM's (Chowdhery et al., 2022, section 5). All of it is
computed in float32, and so are losses, whatever the dtype of the logits: 8 bits would tell little of a loss. Gradients have the dtype of the logits.

Rows whose class is ``ignore_index`` have loss and gradient 0 and do not count in a mean; their logits are not looked at. A class that is neither that
nor one of the ``V`` makes its row's loss and gradient NaN: nothing outside of the logits is read, and finding it out on the host would stop a GPU.
The mean over no rows at all is NaN, as in torch, and its gradient 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._register import call, define

_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
_CHUNK_BYTES = (2**28, 2**30)
"""What a chunk of logits may take: as much as the weight, which its gradient's last step takes anyway, within these bounds."""


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Cross entropy between ``logits`` and class numbers. Formulas, ignored and invalid classes: see the module.

    Args:
        logits: ``[..., V]``, float32, float16 or bfloat16, any strides; any ``V`` from 1 to 2**30. Classes are the last dimension.
        target: int64 ``[...]``: a class in ``[0, V)``, or ``ignore_index``, for each row.
        ignore_index: the class number of rows that do not count.
        label_smoothing: 0 to 1.
        z_loss: weight of the squared log-sum-exp, at least 0.
        reduction: "mean" (over the rows that are not ignored), "sum" or "none".
        inplace: **write the gradient over the logits**, in the same pass that computes the loss: the logits are destroyed, and training takes no
            memory beyond them. Whatever else would need their values for its backward pass raises torch's "modified by an inplace operation"; that also
            goes for a second backward pass. Logits are left alone where nothing requires a gradient, and where their rows are not contiguous, not evenly
            spaced or lie over each other.

    Returns:
        float32: a scalar, or ``[...]`` with "none".

    Raises:
        TypeError: ``logits`` or ``target`` is no tensor of the dtypes above.
        ValueError: shapes, devices or numbers are not as above.

    Differentiable once, with respect to ``logits``. Without ``inplace`` the backward pass makes the gradient from the logits, which it keeps, and their
    log-sum-exps. With it the gradient is there already, and multiplied by the loss's own gradient only if that is not 1, which a GPU finds out without
    asking the host. Then float16 rounds the gradient before, not after, a ``GradScaler``'s factor is in it: prefer bfloat16, or ``reduction="sum"``.
    """
    if not isinstance(logits, Tensor) or logits.dtype not in _FLOAT_DTYPES or not isinstance(target, Tensor) or target.dtype != torch.int64:
        raise _wrong_types("flexops.cross_entropy:", logits, target, "logits")
    code = _REDUCTIONS.get(reduction, -1)
    if logits.shape[:-1] != target.shape or logits.dim() == 0 or logits.device != target.device or not logits.shape[-1]:
        raise _wrong_shapes("flexops.cross_entropy:", logits, target, "logits")
    if code < 0 or not 0.0 <= label_smoothing <= 1.0 or not z_loss >= 0.0:
        raise _wrong_options("flexops.cross_entropy:", label_smoothing, z_loss, reduction)
    shape = target.shape
    if len(shape) != 1:
        target, logits = target.reshape(-1), logits.reshape(-1, logits.shape[-1])
    if inplace and logits.requires_grad and torch.is_grad_enabled() and _has_rows(logits):
        loss: Tensor = call(_INPLACE, logits, target, None, ignore_index, label_smoothing, z_loss, code)
    else:
        loss = call(_FORWARD, logits, target, ignore_index, label_smoothing, z_loss, code)[0]
    return loss.view(shape) if code == 0 and len(shape) != 1 else loss


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
    chunk_size: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(x, weight, bias), target)`` without ever holding all the logits.

    Rows go through in chunks: a matrix product gives a chunk's logits, which :func:`cross_entropy` turns into their gradient in place, from which
    matrix products at once make the chunk's part of the gradients of ``x``, ``weight`` and ``bias``. So the forward pass holds one chunk of logits
    instead of all of them and their gradient, and the backward pass has next to nothing left to do. The weight's gradient is summed over chunks in float32
    (which takes ``4 * V * H`` bytes while the forward pass runs, unless it is float32 anyway or there is one chunk).

    Args:
        x: ``[..., H]``, float32, float16 or bfloat16.
        weight: ``[V, H]``; of another float dtype it is converted to that of ``x``, as a copy.
        target: int64 ``[...]``.
        bias: ``[V]`` or None.
        ignore_index, label_smoothing, z_loss, reduction: as for :func:`cross_entropy`. With "none" the gradients cannot be made before the losses' own
            are known, so that the backward pass computes each chunk's logits once more.
        chunk_size: rows a chunk; None picks as many as give logits of the weight's size, but of 256 MiB at least and 1 GiB at most: matrix products
            of fewer rows are less efficient.

    Returns:
        float32: a scalar, or ``[...]`` with "none".

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes, devices or numbers are not as above.

    Differentiable once, with respect to ``x``, ``weight`` and ``bias``. Matrix products follow autocast: under it they run in its dtype, whatever that of
    ``x`` and ``weight``. Gradients have the dtype of what they belong to.
    """
    where = "flexops.linear_cross_entropy:"
    if not isinstance(x, Tensor) or x.dtype not in _FLOAT_DTYPES or not isinstance(target, Tensor) or target.dtype != torch.int64:
        raise _wrong_types(where, x, target, "x")
    code = _REDUCTIONS.get(reduction, -1)
    if x.shape[:-1] != target.shape or x.dim() == 0 or x.device != target.device:
        raise _wrong_shapes(where, x, target, "x")
    if code < 0 or not 0.0 <= label_smoothing <= 1.0 or not z_loss >= 0.0 or (chunk_size is not None and chunk_size < 1):
        raise _wrong_options(where, label_smoothing, z_loss, reduction, chunk_size)
    _check_weights(where, x, weight, bias)
    shape = target.shape
    needs = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    rows, targets = (x, target) if len(shape) == 1 else (x.reshape(-1, x.shape[-1]), target.reshape(-1))
    numbers = (ignore_index, label_smoothing, z_loss, code, chunk_size or 0, _product_dtype(x))
    loss: Tensor = call(torch.ops.flexops.linear_cross_entropy.default, rows, weight, bias, targets, *numbers, *needs)[0]
    return loss.view(shape) if code == 0 and len(shape) != 1 else loss


# ---- what is wrong with arguments ------------------------------------------------------------------------------------------------------------


def _wrong_types(where: str, values: object, target: object, name: str) -> TypeError:
    if not isinstance(values, Tensor) or values.dtype not in _FLOAT_DTYPES:
        found = values.dtype if isinstance(values, Tensor) else type(values).__name__
        return TypeError(f"{where} {name} must be a float32, float16 or bfloat16 tensor, got {found}")
    found = target.dtype if isinstance(target, Tensor) else type(target).__name__
    return TypeError(f"{where} target must be an int64 tensor of class numbers, got {found}")


def _wrong_shapes(where: str, values: Tensor, target: Tensor, name: str) -> ValueError:
    if values.dim() == 0:
        return ValueError(f"{where} {name} must have at least one dimension, got a scalar")
    if values.device != target.device:
        return ValueError(f"{where} target must be on the device of {name}, {values.device}, got {target.device}")
    if values.shape[:-1] != target.shape:
        return ValueError(f"{where} target must have shape {tuple(values.shape[:-1])}, one class for each row of {name}, got {tuple(target.shape)}")
    return ValueError(f"{where} {name} must have at least one class in their last dimension, got shape {tuple(values.shape)}")


def _wrong_options(where: str, label_smoothing: float, z_loss: float, reduction: str, chunk_size: int | None = None) -> ValueError:
    if reduction not in _REDUCTIONS:
        return ValueError(f"{where} reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        return ValueError(f"{where} label_smoothing must be in [0, 1], got {label_smoothing}")
    if not z_loss >= 0.0:
        return ValueError(f"{where} z_loss must be at least 0, got {z_loss}")
    return ValueError(f"{where} chunk_size must be at least 1, or None, got {chunk_size}")


def _check_weights(where: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype not in _FLOAT_DTYPES:
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{where} {name} must be a float32, float16 or bfloat16 tensor, got {found}")
        if tensor.device != x.device:
            raise ValueError(f"{where} {name} must be on x's device, {x.device}, got {tensor.device}")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{where} weight must have shape [V, {x.shape[-1]}] with at least one class, got {tuple(weight.shape)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"{where} bias must have shape [{weight.shape[0]}], got {tuple(bias.shape)}")


def _has_rows(logits: Tensor) -> bool:
    """Whether they can be written over."""
    (rows, classes), (step, inner) = logits.shape, logits.stride()
    return (classes == 1 or inner == 1) and (rows <= 1 or step >= classes)


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# ---- the ops: logits, [N, V], target [N] -----------------------------------------------------------------------------------------------------


def _widen(x: Tensor) -> Tensor:
    """float32; float64 stays, for the reference's own check."""
    return x if x.dtype == torch.float64 else x.float()


def _reduce(losses: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    if reduction == 0:
        return losses
    total = losses.sum()
    return total if weight is None else total * weight


def _weight(target: Tensor, ignore_index: int, reduction: int, dtype: torch.dtype) -> Tensor | None:
    """What a row counts in a mean."""
    return (target != ignore_index).sum().to(dtype).reciprocal() if reduction == 2 else None


def _stats(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Of each row its greatest logit, and the sum of the powers of the distances to it; 0 if it is ignored."""
    greatest = x.amax(1)
    greatest = greatest.masked_fill(greatest == -torch.inf, 0.0)
    total = torch.exp(x - greatest.unsqueeze(1)).sum(1)
    ignored = target == ignore_index
    return greatest.masked_fill(ignored, 0.0), total.masked_fill(ignored, 0.0)


def _losses(x: Tensor, target: Tensor, stats: tuple[Tensor, Tensor], ignore_index: int, label_smoothing: float, z_loss: float) -> Tensor:
    lse = stats[0] + stats[1].log()
    classes = x.shape[1]
    chosen = x.gather(1, target.clamp(0, classes - 1).unsqueeze(1)).squeeze(1)
    losses = lse - (1 - label_smoothing) * chosen + z_loss * lse * lse
    if label_smoothing != 0.0:
        losses = losses - label_smoothing * x.mean(1)
    losses = losses.masked_fill((target < 0) | (target >= classes), torch.nan)
    return losses.masked_fill(target == ignore_index, 0.0)


def _gradient(
    x: Tensor, target: Tensor, stats: tuple[Tensor, Tensor], factor: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """Of each row's loss, times ``factor``."""
    classes, (greatest, total) = x.shape[1], stats
    slope = (1 + 2 * z_loss * (greatest + total.log())) / total
    gradient = torch.exp(x - greatest.unsqueeze(1)) * slope.unsqueeze(1) - label_smoothing / classes
    chosen = target.clamp(0, classes - 1).unsqueeze(1)
    gradient = gradient.scatter_add(1, chosen, gradient.new_full((), label_smoothing - 1.0).expand(chosen.shape))
    if factor is not None:
        gradient = gradient * (factor.unsqueeze(1) if factor.dim() == 1 else factor)
    gradient = gradient.masked_fill(((target < 0) | (target >= classes)).unsqueeze(1), torch.nan)
    return gradient.masked_fill((target == ignore_index).unsqueeze(1), 0.0)


def _cross_entropy_reference(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: int) -> tuple[Tensor, Tensor]:
    x = _widen(logits)
    stats = _stats(x, target, ignore_index)
    losses = _losses(x, target, stats, ignore_index, label_smoothing, z_loss)
    if reduction == 0:
        return losses, torch.cat(stats)
    weight = _weight(target, ignore_index, reduction, x.dtype)
    return _reduce(losses, weight, reduction), torch.cat([*stats, losses, (x.new_ones(()) if weight is None else weight).unsqueeze(0)])


def _cross_entropy_inplace_reference(
    logits: Tensor, target: Tensor, factors: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float, reduction: int
) -> Tensor:
    x = _widen(logits)
    stats = _stats(x, target, ignore_index)
    losses = _losses(x, target, stats, ignore_index, label_smoothing, z_loss)
    weight = _weight(target, ignore_index, reduction, x.dtype)
    factor = weight if factors is None else factors if weight is None else factors * weight
    logits.copy_(_gradient(x, target, stats, factor, ignore_index, label_smoothing, z_loss))
    return _reduce(losses, weight, reduction)


def _cross_entropy_backward_reference(
    grad: Tensor, logits: Tensor, target: Tensor, stats: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: int
) -> Tensor:
    rows = logits.shape[0]
    factor = grad if reduction == 0 else grad * stats[-1]
    pair = (stats[:rows], stats[rows : 2 * rows])
    gradient = _gradient(_widen(logits), target, pair, factor, ignore_index, label_smoothing, z_loss)
    return gradient.to(logits.dtype).contiguous()


def _scale_rows_reference(values: Tensor, factors: Tensor) -> None:
    values.mul_(factors.view(-1, *[1] * (values.dim() - 1)) if factors.dim() else factors)


def _loss_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _cross_entropy_fake(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, dtype, reduction = logits.shape[0], _loss_dtype(logits), rest[-1]
    loss = logits.new_empty([rows] if reduction == 0 else [], dtype=dtype)
    return loss, logits.new_empty([2 * rows if reduction == 0 else 3 * rows + 1], dtype=dtype)


def _cross_entropy_inplace_fake(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty([logits.shape[0]] if rest[-1] == 0 else [], dtype=_loss_dtype(logits))


def _cross_entropy_backward_fake(_: Tensor, logits: Tensor, *__: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _scale_rows_fake(*_: Any) -> None:
    return None


def _cross_entropy_setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.options = args
    ctx.save_for_backward(logits, target, results[1])
    ctx.mark_non_differentiable(results[1])


def _cross_entropy_backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    logits, target, stats = ctx.saved_tensors
    gradient: Tensor = torch.ops.flexops.cross_entropy_backward.default(grad, logits, target, stats, *ctx.options)
    return gradient, None, None, None, None, None


def _inplace_setup(ctx: Any, args: tuple[Any, ...], _: Tensor) -> None:
    logits = args[0]
    torch.autograd.graph.increment_version(logits)  # the op went past autograd: now whoever needs the logits' values finds out
    ctx.save_for_backward(logits)


def _inplace_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return _scaled(gradient, grad), None, None, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """In place, so that a second backward pass, which would do it again, has to find out; while a compiler looks on, as plain arithmetic."""
    if type(gradient) is Tensor and gradient.is_contiguous():
        torch.ops.flexops.scale_rows_.default(gradient, factor)
        torch.autograd.graph.increment_version(gradient)
        return gradient
    factor = factor.unsqueeze(1) if factor.dim() == 1 else factor
    return gradient.mul_(factor) if type(gradient) is Tensor else (gradient * factor).to(gradient.dtype)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, int reduction"
define(
    "cross_entropy",
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}) -> (Tensor, Tensor)",
    _cross_entropy_reference,
    _cross_entropy_fake,
    setup_context=_cross_entropy_setup,
    backward=_cross_entropy_backward,
)
define(
    "cross_entropy",
    f"cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? factors, {_OPTIONS}) -> Tensor",
    _cross_entropy_inplace_reference,
    _cross_entropy_inplace_fake,
    setup_context=_inplace_setup,
    backward=_inplace_backward,
)
define(
    "cross_entropy",
    f"cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor stats, {_OPTIONS}) -> Tensor",
    _cross_entropy_backward_reference,
    _cross_entropy_backward_fake,
)
define("cross_entropy", "scale_rows_(Tensor(a!) values, Tensor factors) -> ()", _scale_rows_reference, _scale_rows_fake)
_FORWARD, _INPLACE = torch.ops.flexops.cross_entropy.default, torch.ops.flexops.cross_entropy_.default  # looked up once: small calls feel it


# ---- with the linear layer: torch's matrix products around the ops above, on x [N, H] -----------------------------------------------------------


def _chunks(rows: int, row_bytes: int, chunk: int, weight_bytes: int) -> list[slice]:
    if chunk < 1:
        least, most = _CHUNK_BYTES
        fitting = max(min(max(weight_bytes, least), most) // row_bytes, 64)
        count = max((rows + fitting - 1) // fitting, 1)
        chunk = max((((rows + count - 1) // count + 63) // 64) * 64, 1)
    return [slice(begin, min(begin + chunk, rows)) for begin in range(0, rows, chunk)]


class _Gradients:
    """Of ``x``, ``weight`` and ``bias``, summed over chunks; those that nobody wants stay empty."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, product: Tensor, chunks: int, wanted: tuple[bool, bool, bool]) -> None:
        self.x = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else x.new_empty(0)
        self.product, self.single, self.wanted = product, chunks == 1, wanted
        self.weight_dtype, self.bias_dtype = weight.dtype, weight.dtype if bias is None else bias.dtype
        wide = _loss_dtype(x)
        self.weight = weight.new_zeros(weight.shape if wanted[1] and not self.single else [0], dtype=wide)
        self.bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=wide)

    def add(self, rows: slice, x: Tensor, of_logits: Tensor) -> None:
        if self.wanted[0]:
            self.x[rows] = of_logits @ self.product
        if self.wanted[1]:
            if self.single:
                self.weight = of_logits.t() @ x
            else:
                _add_product(self.weight, of_logits.t(), x)
        if self.wanted[2]:
            self.bias += of_logits.sum(0, dtype=self.bias.dtype)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.weight.to(self.weight_dtype), self.bias.to(self.bias_dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, rounded to nothing less than ``total``'s dtype where torch can."""
    if a.dtype == total.dtype or not total.is_cuda:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b


def _run_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, factors: Tensor | None,
    numbers: tuple[int, float, float], chunk: int, dtype: torch.dtype, wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, _Gradients]:  # fmt: skip
    """Each row's loss, and the gradients times ``factors``."""
    ops = torch.ops.flexops
    inplace: Any = ops.cross_entropy_.default
    forward: Any = ops.cross_entropy.default
    if x.dtype == torch.float64:  # which is for checks of this function only
        inplace, forward, dtype = _cross_entropy_inplace_reference, _cross_entropy_reference, torch.float64
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    chunks = _chunks(x.shape[0], weight.shape[0] * dtype.itemsize, chunk, weight.numel() * dtype.itemsize)
    gradients = _Gradients(x, weight, bias, matrix, len(chunks), wanted)
    losses = x.new_empty(x.shape[0], dtype=_loss_dtype(x))
    with torch.autocast(x.device.type, enabled=False):
        for rows in chunks:
            part = x[rows].to(dtype)
            logits = torch.nn.functional.linear(part, matrix, offset)
            if any(wanted):
                by = factors if factors is None or factors.dim() == 0 else factors[rows]
                losses[rows] = inplace(logits, target[rows], by, *numbers, 0)
                gradients.add(rows, part, logits)
            else:
                losses[rows] = forward(logits, target[rows], *numbers, 0)[0]
    return losses, gradients


def _linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: int,
    chunk: int, dtype: torch.dtype, x_grad: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    numbers = (ignore_index, label_smoothing, z_loss)
    wanted = (x_grad, weight_grad, bias_grad) if reduction != 0 else (False, False, False)
    weight_of_row = _weight(target, ignore_index, reduction, _loss_dtype(x))
    # float16 would lose what is small of a gradient that is divided by the number of rows: it is divided in the backward pass.
    late = weight_of_row is not None and dtype == torch.float16
    losses, gradients = _run_chunks(x, weight, bias, target, None if late else weight_of_row, numbers, chunk, dtype, wanted)
    factor = weight_of_row.clone() if late and weight_of_row is not None else losses.new_ones(())
    return _reduce(losses, weight_of_row, reduction), *gradients.results(), factor


def _linear_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    chunk: int, dtype: torch.dtype, x_grad: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    numbers = (ignore_index, label_smoothing, z_loss)
    _, gradients = _run_chunks(x, weight, bias, target, grad, numbers, chunk, dtype, (x_grad, weight_grad, bias_grad))
    return gradients.results()


def _gradients_fake(x: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> tuple[Tensor, Tensor, Tensor]:
    of_x = x.new_empty(x.shape if wanted[0] else [0])
    of_weight = weight.new_empty(weight.shape if wanted[1] else [0])
    return of_x, of_weight, (weight if bias is None else bias).new_empty([weight.shape[0]] if wanted[2] else [0])


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    reduction, wanted = rest[4], rest[7:] if rest[4] != 0 else (False, False, False)
    dtype = _loss_dtype(x)
    loss = x.new_empty([x.shape[0]] if reduction == 0 else [], dtype=dtype)
    return loss, *_gradients_fake(x, weight, bias, wanted), x.new_empty([], dtype=dtype)


def _linear_backward_fake(_: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(x, weight, bias, rest[6:])


def _linear_setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    ctx.reduction, ctx.numbers = args[7], (*args[4:7], *args[8:])
    ctx.has_bias = args[2] is not None
    if ctx.reduction == 0:
        ctx.save_for_backward(*(tensor for tensor in args[:4] if tensor is not None))
    else:
        ctx.save_for_backward(*results[1:])
    ctx.mark_non_differentiable(*results[1:])


def _linear_backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    if ctx.reduction == 0:
        x, weight, *rest = ctx.saved_tensors
        bias, target = rest if ctx.has_bias else (None, rest[0])
        gradients = torch.ops.flexops.linear_cross_entropy_backward.default(grad, x, weight, bias, target, *ctx.numbers)
    else:
        *gradients, factor = ctx.saved_tensors
        gradients = [_scaled(gradient, grad * factor) for gradient in gradients]
    wanted = ctx.needs_input_grad[:3]
    return *(gradient if needs else None for gradient, needs in zip(gradients, wanted, strict=True)), *[None] * 10


_LINEAR = "Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float label_smoothing, float z_loss"
_WANTED = "SymInt chunk, ScalarType dtype, bool x_grad, bool weight_grad, bool bias_grad"
define(
    "cross_entropy",
    f"linear_cross_entropy({_LINEAR}, int reduction, {_WANTED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _linear_reference,
    _linear_fake,
    setup_context=_linear_setup,
    backward=_linear_backward,
)
define(
    "cross_entropy",
    f"linear_cross_entropy_backward(Tensor grad, {_LINEAR}, {_WANTED}) -> (Tensor, Tensor, Tensor)",
    _linear_backward_reference,
    _linear_backward_fake,
)


def self_check(device: str) -> float:
    """Random logits, losses and gradients both ways, by whatever kernels calls reach on ``device`` and by the reference.

    For ``flexops doctor``. Returns the largest difference of losses and gradients.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(9, 1031, generator=generator) * 3).to(device)
    target = torch.randint(0, 1031, (9,), generator=generator).to(device)
    target[3] = -100
    numbers = (-100, 0.1, 1e-4, 2)
    ops, one = torch.ops.flexops, logits.new_ones(())
    loss, stats = ops.cross_entropy(logits, target, *numbers)
    gradient, written = ops.cross_entropy_backward(one, logits, target, stats, *numbers), logits.clone()
    fused = ops.cross_entropy_(written, target, None, *numbers)
    expected_loss, expected_stats = _cross_entropy_reference(logits, target, *numbers)
    expected = _cross_entropy_backward_reference(one, logits, target, expected_stats, *numbers)
    differences = (loss - expected_loss, fused - expected_loss, gradient - expected, written - expected)
    return max(float(difference.abs().max()) for difference in differences)
