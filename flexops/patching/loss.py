"""The loss of ``model(..., labels=labels)`` as a linear cross entropy: the logits of all tokens are
never there at once.

A model's own ``forward`` runs. In place of logits its head gives :class:`Logits`, which remembers
the head's input, and what models do to logits: scale, soft cap, bias, shift, flatten. The cross
entropy of that is computed without logits; anything else that is done to it computes them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import hears_of_parameters_only, is_unheard, product_dtype, tree_map
from ..nn.linears import DTYPES, function_of
from ..ops.linear_cross_entropy import linear_cross_entropy
from .forwards import OfModel, plain

_DEFERS = "_flexops_defers"
_NOT_TRACED = ({"CrossEntropyLoss"}, {"functional", "tanh"}, {"F", "tanh"})
"""Names in a module's code of what torch.compile makes a function of tensors."""
_CONVERSIONS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Logits:
    """``cap(scale * (linear(x, weight) + bias))``, not computed yet.

    Attributes:
        head: the linear layer.
        x: its input.
        dtype: what the logits were converted to; the loss is computed in float32 in any case.
        bias: what was added to the head's result, ``[classes]``.
        scale, softcap: of the logits; a soft cap of 0 is none.
        inside: they are after a soft cap's tanh, and before its product.
    """

    head: Any
    x: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    inside: bool = False

    def _with(self, **changes: Any) -> Logits:
        return replace(self, **changes)

    # ---- what tensors have -----------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        weight = self.head.weight  # Marian's is resized without out_features; ZeRO 3's has no shape
        classes = weight.shape[0] if weight.dim() == 2 else self.head.out_features
        return torch.Size([*self.x.shape[:-1], classes])

    @property
    def device(self) -> torch.device:
        return self.x.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.x.dim()

    def contiguous(self) -> Logits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        like = self.x.new_empty(0, dtype=self.dtype).to(*args, **kwargs)
        if like.device == self.device and like.dtype in DTYPES:
            return self._with(dtype=like.dtype)
        return self.tensor().to(*args, **kwargs)

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if isinstance(shape[0], (tuple, list, torch.Size)) else shape
        if sizes[-1] not in (self.shape[-1], -1) or (sizes[-1] == -1 and len(sizes) == 1):
            return self.tensor().view(*shape)
        return self._with(x=self.x.reshape(*sizes[:-1], self.x.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        """Whole rows of it: ``logits[..., :-1, :]``, ``logits[mask]``."""
        parts = index if isinstance(index, tuple) else (index,)
        whole = slice(None)
        if parts[0] is Ellipsis and parts[-1] == whole and len(parts) > 1:
            return self._with(x=self.x[index])
        of_rows = len(parts) < self.dim() or parts[-1] == whole
        flat = len(parts) == 1 and isinstance(index, Tensor) and index.dim() >= self.dim()
        if of_rows and not flat and all(part is not Ellipsis for part in parts):
            return self._with(x=self.x[index])
        return self.tensor()[index]

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, (int, float)) or self.softcap or not factor:
            return self.tensor() * factor
        scale = self.scale * factor
        scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-6) else scale
        if self.inside:  # f tanh(s y) is a soft cap f of f s y
            return self._with(scale=scale, softcap=float(factor), inside=False)
        return self._with(scale=scale)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if not isinstance(divisor, (int, float)) or not divisor:
            return self.tensor() / divisor
        return self * (1.0 / divisor)

    def __add__(self, bias: Any) -> Any:
        first = isinstance(bias, Tensor) and bias.numel() == bias.shape[-1] == self.shape[-1]
        if not first or self.bias is not None or self.scale != 1.0 or self.softcap or self.inside:
            return self.tensor() + bias
        return self._with(bias=bias.flatten())

    def tanh(self) -> Any:
        return self.tensor().tanh() if self.softcap or self.inside else self._with(inside=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _CONVERSIONS:
            return functools.partial(self.to, _CONVERSIONS[name])
        return getattr(self.tensor(), name)

    # ---- what is computed ------------------------------------------------------------------------

    def tensor(self) -> Tensor:
        """The logits after all."""
        y = self.head(self.x, skip_logits=False)
        y = (y if self.bias is None else y + self.bias).to(self.dtype)
        if self.inside:
            return torch.tanh(y * self.scale)
        if self.softcap:
            return torch.tanh(y * (self.scale / self.softcap)) * self.softcap
        scaled: Tensor = y if self.scale == 1.0 else y * self.scale
        return scaled

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        usual = size_average is None and reduce is None and weight is None
        if not usual or self.inside or target.is_floating_point() or self.x.dim() != 2:
            return F.cross_entropy(
                self.tensor(), target, weight, size_average, ignore_index, reduce, reduction,
                label_smoothing,
            )  # fmt: skip
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        options |= {"softcap": self.softcap} if self.softcap else {}
        options |= {"label_smoothing": label_smoothing} if label_smoothing else {}
        x = self.x if self.scale == 1.0 else self.x * self.scale
        loss: Tensor = self.head(x, target=target, bias=self.bias, scale=self.scale, **options)
        return loss

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and args and isinstance(args[0], Logits):
            return args[0].cross_entropy(*args[1:], **kwargs)
        if func is F.cross_entropy and isinstance(kwargs.get("input"), Logits):
            return kwargs.pop("input").cross_entropy(*args, **kwargs)
        if func in (torch.tanh, torch.Tensor.tanh) and len(args) == 1 and not kwargs:
            return args[0].tanh()
        args, kwargs = tree_map(
            lambda x: x.tensor() if isinstance(x, Logits) else x, (args, kwargs)
        )
        return func(*args, **kwargs)


def _computed(name: str) -> Callable[..., Any]:
    def method(self: Logits, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*args)

    return method


for _name in (
    "len", "iter", "neg", "sub", "rsub", "radd", "rtruediv", "pow", "lt", "le", "gt", "ge",
):  # fmt: skip
    setattr(Logits, f"__{_name}__", _computed(f"__{_name}__"))


def head(
    module: Any,
    x: Tensor,
    *,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    skip_logits: bool = True,
    **options: Any,
) -> Any:
    """A model's last linear layer; with a target, the loss. It is computed here, where FSDP2's
    hooks have gathered the layer's parameters."""
    if target is not None:
        _check_labels(target, len(module.weight), options.get("ignore_index", -100))
        biases = [one for one in (module.bias, bias) if one is not None]
        total = sum(biases[1:], biases[0]) * scale if biases else None
        return linear_cross_entropy(x, module.weight, target, total, **options)
    if skip_logits and getattr(module, _DEFERS, False):
        return Logits(module, x, product_dtype(x))
    return plain(module, x)


def _check_labels(target: Tensor, classes: int, ignored: int) -> None:
    """Raise what torch's cross entropy does; on a GPU, where it stops the process, the loss of such
    labels is NaN."""
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = target[((target < 0) | (target >= classes)) & (target != ignored)]
        if wrong.numel():
            raise IndexError(
                f"Target {int(wrong[0])} is out of bounds: labels are 0 to {classes - 1}, or"
                f" {ignored} for tokens without a loss"
            )


def refusal(head: Any) -> str:
    """Why a head's product stays apart from the loss; "" if it need not."""
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return ""
    return f"its head is no linear layer, but {type(head).__name__}"


def _defers(
    module: Any,
    found: Any,
    skip_logits: bool | None,
    kwargs: dict[str, Any],
    holders: tuple[Any, ...],
) -> bool:
    """Whether the loss can be computed without logits, and nothing has asked for these. A linear
    layer that came after the patch becomes one of ours: ``resize_token_embeddings`` makes one."""
    skip = module.training if skip_logits is None else skip_logits
    kept = kwargs.get("logits_to_keep", 0)
    if not skip or not isinstance(kept, int) or kept:
        return False
    if refusal(found) or "_loss_function" in module.__dict__:
        return False  # a loss function of a user's own requires logits
    if "forward" not in found.__dict__:
        found.__dict__["forward"] = functools.partial(head, found)
    if function_of(found) is not head:
        return False
    # hooks that read logits would get something else
    return hears_of_parameters_only(found) and all(map(is_unheard, holders))


class _Model(OfModel):
    more = ("skip_logits",)


def model(
    module: Any,
    *args: Any,
    holders: tuple[Any, ...] = (),
    in_graphs: bool = True,
    skip_logits: bool | None = None,
    **kwargs: Any,
) -> Any:
    """What a transformers model with a head does, and with labels, in training, ``logits=None`` in
    the output.

    ``skip_logits`` says otherwise: False for logits in training, too; True for none in evaluation.
    """
    usual = in_graphs or not torch.compiler.is_compiling()
    found = module.get_output_embeddings() if usual and kwargs.get("labels") is not None else None
    if found is None or hasattr(found, _DEFERS):  # a model around this one has decided
        return plain(module, *args, **kwargs)
    defers = _defers(module, found, skip_logits, kwargs, holders)
    setattr(found, _DEFERS, defers)  # torch.compile of torch 2.11 traces this, and not __dict__
    try:
        output = plain(module, *args, **kwargs)
    finally:
        delattr(found, _DEFERS)
    return _without_logits(output) if defers else output


def _without_logits(output: Any) -> Any:
    """Also those of a model inside, whose output a wrapper's has."""
    if isinstance(output, tuple):
        return tuple(_without_logits(one) for one in output if not isinstance(one, Logits))
    if not isinstance(output, dict):
        return output
    kept = {name: one for name, one in output.items() if not isinstance(one, Logits)}
    return type(output)(**{name: _without_logits(one) for name, one in kept.items()})


def swap(module: Any) -> list[tuple[nn.Module, Callable[..., Any]]]:
    found = module.get_output_embeddings()
    holders = tuple(
        one
        for one in module.modules()
        if one is not module and one is not found and any(part is found for part in one.modules())
    )
    options: dict[str, Any] = {"holders": holders} if holders else {}
    codes = [inspect.unwrap(type(one).forward) for one in (module, *holders)]
    named: list[set[str]] = [{*one.__code__.co_names} for one in codes if inspect.isfunction(one)]
    if any(some <= names for some in _NOT_TRACED for names in named):
        options["in_graphs"] = False
    return [
        (module, _Model(model, module, **options)),
        (found, functools.partial(head, found)),
    ]
