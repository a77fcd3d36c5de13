"""``flexops.patch`` and ``flexops.unpatch``."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import PatchError
from . import attention as attending
from . import forwards, int4, torch_modules
from . import projections as projecting
from .patterns import PATTERNS, UNCHANGED, Pattern
from .probe import Swap, disagreement
from .report import Report, Row, rows_of

_verdicts: dict[tuple[int, type, Any], str] = {}
"""What the probe found, for each row of the table, class and variant: it is asked once in a
process."""
_LOOKS_LIKE = ("RMSNorm", "LayerNorm", "MLP", "DecoderLayer", "FeedForward", "ForCausalLM")


def patch(
    model: Any,
    *,
    norms: bool = True,
    residuals: bool = True,
    activations: bool = True,
    rope: bool = True,
    attention: bool = True,
    projections: bool = True,
    loss: bool = True,
    optimizer: Any = False,
    in_graphs: bool = False,
    weights: Any = None,
) -> Report:
    """Put flexops' operators into a model, in place.

    Args:
        model: a module, such as one of transformers' models, also wrapped by PEFT, or sharded by
            ``fully_shard``. Or a class of transformers' models, or the name of an architecture
            (``"llama"``): then every model of it is patched as it is constructed, until
            :func:`unpatch`.
        norms: layer and RMS norms.
        residuals: residual additions together with the norm behind them; needs ``norms``.
        activations: gated feed-forward blocks, and gelu or silu with the bias before it.
        rope: rotary embeddings.
        attention: attention, and the masks for it.
        projections: the linear layers ``q_proj``, ``k_proj`` and ``v_proj`` as one matrix product,
            in training.
        loss: the loss of ``model(..., labels=labels)`` in training, which then returns
            ``logits=None`` unless called with ``skip_logits=False``.
        optimizer: True for a :class:`flexops.optim.AdamW` with torch's defaults over the parameters
            that require a gradient; or an optimizer of torch.optim, to have flexops' with its
            groups. It is ``report.optimizer``.
        in_graphs: keep the operators under ``torch.compile``, too. By default what inductor fuses
            itself (norms, residuals, activations, rope) is left to it there; attention and loss are
            not.
        weights: ``"int4"`` quantizes the weights of linear layers to 4 bits, in groups of 64 inputs
            with zero points; an :class:`flexops.patching.Int4Config` does so with other settings.
            Embeddings and output layers keep 16 bits. :func:`unpatch` cannot bring the 16-bit
            weights back: load the checkpoint again. Layers of 4 bits that compressed-tensors,
            gptqmodel, auto-gptq or autoawq built are converted in any case, with the same values.

    Returns:
        what was swapped, and what was not, with the reason. ``print`` it, or take ``.json()``.

    Raises:
        PatchError: ``model`` is none of these, the architecture is unknown, or ``weights`` is not
            supported. After any error, also one that a module's own code raises, the model is as it
            was.

    A module's class, name and parameters stay as they are, so that checkpoints, wrapping by class
    and ``isinstance`` do. Copies and pickles of a patched model are patched. What is swapped is
    known by its class, and its replacement computed the same as the class's own code on a small
    input, with its gradients; a class that is not known, or whose code computes something else in
    this release, stays as it is, and the report says so.
    """
    wanted = {
        "norms": norms,
        "residuals": residuals and norms,
        "activations": activations,
        "rope": rope,
        "attention": attention,
    }
    wanted |= {"projections": projections, "loss": loss}
    if isinstance(model, str) or (isinstance(model, type) and issubclass(model, nn.Module)):
        from . import classes

        if weights is not None:
            raise PatchError(
                "weights= quantizes a model that has its weights",
                found=f"flexops.patch({model!r}, weights={weights!r})",
                fix="from_pretrained(..., quantization_config=flexops.patching.Int4Config())",
            )
        return classes.patch(model, functools.partial(patch, **wanted, in_graphs=in_graphs))
    if not isinstance(model, nn.Module):
        raise PatchError(
            "flexops.patch takes a module, a class of models or an architecture's name",
            found=type(model).__name__,
        )
    replacements = int4.Replacements(model)
    with _all_or_nothing(model, replacements):
        outcomes = list(int4.convert(replacements))
        if weights is not None:
            outcomes += int4.quantize(replacements, int4.Settings.of(weights))
        inside: set[int] = set()  # activations of blocks that have their row already
        for module in model.modules():
            if id(module) not in inside:
                outcomes += _visit(module, wanted, in_graphs)
            inside |= _covered(module)
        outcomes += [row for module in model.modules() for row in _project(module, projections)]
        if wanted["residuals"] and not in_graphs:
            _link(model)
        made, rows = _optimizer(model, optimizer)
        if replacements.finish() and "transformers" in sys.modules:
            from .int4_loading import adopt

            adopt(model)
    return Report(type(model).__name__, rows_of([*outcomes, *rows]), made)


@contextlib.contextmanager
def _all_or_nothing(model: nn.Module, replacements: int4.Replacements) -> Iterator[None]:
    """An error on the way, such as a module's property that raises, leaves the model as it was."""
    before = [
        (module, module.__dict__.get("forward"), attending.is_switched(module))
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        replacements.undo()
        for module, forward, switched in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
            if not switched:
                attending.switch_back(module)
        raise


def unpatch(model: Any) -> int:
    """Take everything back that :func:`patch` has done to a module, or to a class or architecture,
    except 4-bit weights: the 16-bit weights are gone, and these layers keep computing. Returns how
    many modules were restored."""
    if isinstance(model, str) or (isinstance(model, type) and issubclass(model, nn.Module)):
        from . import classes

        return classes.unpatch(model)
    restored = 0
    for module in model.modules():
        if is_ours(module.__dict__.get("forward")):
            del module.__dict__["forward"]
            restored += 1
        attending.switch_back(module)
    return restored


def is_ours(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and str(
        getattr(forward.func, "__module__", "")
    ).startswith(__package__ or "")


# ---- a module ------------------------------------------------------------------------------------


def _visit(module: nn.Module, wanted: dict[str, bool], in_graphs: bool) -> Iterator[Row]:
    switched = attending.switch(module, "" if wanted["attention"] else "attention=False")
    if switched is not None:
        yield switched
    found = _find(module)
    name = type(module).__name__
    if found is None:
        reason = _unknown(module)
        if reason:
            yield Row(name, 1, "-", False, reason)
        return
    index, pattern = found
    reason = "" if wanted[pattern.part] else f"{pattern.part}=False"
    reason = reason or _refused(module, index, pattern)
    if not reason:
        for part, forward in pattern.swap(module):
            options = {"in_graphs": in_graphs} if hasattr(forward.func, "__wrapped__") else {}
            part.__dict__["forward"] = functools.partial(
                forward.func, *forward.args, **forward.keywords, **options
            )
    yield Row(name, 1, pattern.operator_of(module), not reason, reason)


def _covered(module: nn.Module) -> set[int]:
    """Its activations of which its own row tells."""
    if _own_class(module) is nn.Sequential:
        return set(map(id, torch_modules.fused(module)))
    found = _find(module)
    is_block = found is not None and found[1].part == "activations"
    return (
        {id(child) for child in module.children() if isinstance(child, torch_modules.ACTIVATIONS)}
        if is_block
        else set()
    )


def _refused(module: nn.Module, index: int, pattern: Pattern) -> str:
    """Why a module stays as it is."""
    present = module.__dict__.get("forward")
    if present is not None and not is_ours(present):
        return "its forward was replaced before, by something else"
    missing = [name for name in pattern.needs if not hasattr(module, name)]
    if missing:
        return f"it has no {' and no '.join(missing)}, as this kind of module had"
    reason = pattern.refuse(module)
    if reason:
        return reason
    key = (index, _own_class(module), pattern.variant(module))
    if key not in _verdicts:
        _verdicts[key] = disagreement(
            lambda: pattern.miniature(module), functools.partial(_swaps, pattern)
        )
    return _verdicts[key]


def _swaps(pattern: Pattern, tiny: nn.Module) -> Swap:
    """Also of the norms within a small layer, since it is by theirs that it adds."""
    norms = [
        swap
        for child in tiny.children()
        if (found := _find(child)) is not None and found[1].part == "norms"
        for swap in found[1].swap(child)
    ]
    return [*pattern.swap(tiny), *norms]


def _own_class(module: nn.Module) -> type:
    """The class whose code a module runs: FSDP2, say, puts one of its own before it."""
    return next(cls for cls in type(module).__mro__ if "forward" in cls.__dict__)


@functools.cache
def _rows_for(cls: type) -> tuple[int, ...]:
    name = f"{cls.__module__}.{cls.__qualname__}"
    return tuple(
        index
        for index, pattern in enumerate(PATTERNS)
        if name in pattern.classes or "*" in pattern.classes
    )


def _find(module: nn.Module) -> tuple[int, Pattern] | None:
    cls = _own_class(module)
    name = f"{cls.__module__}.{cls.__qualname__}"
    for index in _rows_for(cls):
        pattern = PATTERNS[index]
        if (
            name in pattern.classes or all(hasattr(module, need) for need in pattern.needs)
        ) and pattern.concerns(module):
            return index, pattern
    return None


def _unknown(module: nn.Module) -> str:
    """Said of modules that look as if they had to be known, so that a new release's classes are not
    passed over in silence."""
    cls = _own_class(module)
    known = UNCHANGED.get(f"{cls.__module__}.{cls.__qualname__}", "")
    return known or (
        "flexops does not know this class" if cls.__name__.endswith(_LOOKS_LIKE) else ""
    )


def _project(module: nn.Module, wanted: bool) -> Iterator[Row]:
    """What each linear layer computes stays, so that there is nothing to probe. In graphs they are
    left alone."""
    reason = projecting.refusal(module)
    if reason is None:
        return
    linears = tuple(getattr(module, name) for name in projecting.NAMES)
    if not reason and any(
        (present := one.__dict__.get("forward")) is not None and not is_ours(present)
        for one in linears
    ):
        reason = "a projection's forward was replaced before, by something else"
    reason = reason if wanted else "projections=False"
    for one in () if reason else linears:
        one.__dict__["forward"] = functools.partial(projecting.projection, one, siblings=linears)
    yield Row(type(module).__name__, 1, "one product for q, k, v", not reason, reason)


# ---- a whole model -------------------------------------------------------------------------------


def _link(model: nn.Module) -> None:
    """Tell each layer of a stack which norm its output meets next."""
    for parent in model.modules():
        layers, last = getattr(parent, "layers", None), getattr(parent, "norm", None)
        if not isinstance(layers, nn.ModuleList):
            continue
        nexts = [*(getattr(layer, "input_layernorm", None) for layer in list(layers)[1:]), last]
        for layer, norm in zip(layers, nexts, strict=True):
            forward: Any = layer.__dict__.get("forward")
            linked = is_ours(forward) and forward.func in (
                forwards.decoder_layer,
                forwards.sandwich_layer,
            )
            if linked and norm is not None and is_ours(norm.__dict__.get("forward")):
                layer.__dict__["forward"] = functools.partial(
                    forward.func, *forward.args, **{**forward.keywords, "ahead": (norm,)}
                )


def _optimizer(model: nn.Module, wanted: Any) -> tuple[Any, Iterable[Row]]:
    if wanted is False or wanted is None:
        return None, ()
    from .. import optim

    if wanted is True:
        made = optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad]
        )
        return made, (Row("optimizer", 1, "AdamW", True),)
    name = type(wanted).__name__
    known: dict[str, Callable[..., Any]] = {
        "Adam": optim.Adam,
        "AdamW": optim.AdamW,
        "Adagrad": optim.Adagrad,
    }
    if (
        not isinstance(wanted, torch.optim.Optimizer)
        or type(wanted).__module__.partition(".")[0] != "torch"
        or name not in known
    ):
        return wanted, (
            Row("optimizer", 1, "-", False, f"{name} is none of torch.optim's {', '.join(known)}"),
        )
    made = known[name](
        [
            {key: value for key, value in group.items() if key in _GROUP}
            for group in wanted.param_groups
        ]
    )
    if wanted.state:
        made.load_state_dict(
            {**wanted.state_dict(), "param_groups": made.state_dict()["param_groups"]}
        )
    return made, (Row("optimizer", 1, name, True),)


_GROUP = (
    "params",
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "lr_decay",
    "initial_accumulator_value",
)
