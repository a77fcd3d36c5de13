"""``flexops.patch`` and ``flexops.unpatch``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .._torch import REPLICATES
from ..errors import PatchError
from ..int4 import layers as int4
from ..nn import Int4Experts
from ..nn.linears import REPLACED
from ..report import Report, Row, rows_of
from . import attention as attending
from . import classes, stepping, torch_modules, trl
from . import experts as experts_part
from . import fp8 as fp8_products
from . import generation as generating
from . import residuals as adding
from . import rope as rope_part
from .forwards import given, plain, take_away
from .patterns import PATTERNS, UNCHANGED, Candidate, Pattern
from .probe import Swap, class_of, disagreement, foreign, once, own_class, own_code

_LOOKS_LIKE = re.compile(
    r"(Norm|MLP|FeedForward|Experts|ForCausalLM|ForMaskedLM|LMHeadModel"
    r"|ForConditionalGeneration)$"
)


def patch(
    model: Any,
    *,
    norms: bool = True,
    residuals: bool = True,
    activations: bool = True,
    rope: bool = True,
    attention: bool = True,
    projections: bool = True,
    experts: bool = True,
    loss: bool = True,
    generation: bool = True,
    optimizer: Any = False,
    in_graphs: bool = False,
    weights: Any = None,
    fp8: str | None = None,
) -> Report:
    """Put flexops' operators into a model, in place.

    Args:
        model: a module, such as one of transformers' models, also wrapped by PEFT, or sharded by
            ``fully_shard``. Or a class of transformers' models, or any of its model types
            (``"llama"``): then every model of it is patched as it is constructed, until
            :func:`unpatch`.
        norms: layer and RMS norms.
        residuals: residual additions together with the norm behind them; needs ``norms``.
        activations: gated feed-forward blocks, gelu or silu with the bias before it, causal
            convolutions with their activation (Qwen3-Next, Falcon-H1, Bamba, LFM2), and, without
            gradients, the recurrences of linear attention and Mamba 2 (Qwen 3.5, Granite 4).
        rope: rotary embeddings.
        attention: attention, and the masks for it.
        projections: the linear layers ``q_proj``, ``k_proj`` and ``v_proj`` as one matrix product,
            in training.
        experts: mixtures of experts whose class goes through transformers' experts interface.
        loss: the loss of ``model(..., labels=labels)`` in training, which then returns
            ``logits=None`` unless called with ``skip_logits=False``.
        generation: :class:`flexops.KVCache` in ``model.generate``, and on a GPU each decode step as
            one CUDA graph; needs ``attention``.
        optimizer: True for a :class:`flexops.optim.AdamW` with torch's defaults over the parameters
            that require a gradient; or an optimizer of torch.optim, to have flexops' with its
            groups. It is ``report.optimizer``.
        in_graphs: keep the operators under ``torch.compile``, too. By default what inductor fuses
            itself (norms, residuals, activations, rope) is left to it there; attention and loss are
            not.
        weights: ``"int4"`` quantizes the weights of linear layers and of ``experts`` to 4 bits, in
            groups of 64 inputs with zero points; an :class:`flexops.patching.Int4Config` does so
            with other settings. Embeddings, output layers and routers keep 16 bits. :func:`unpatch`
            cannot bring the 16-bit weights back: load the checkpoint again. Layers of 4 bits that
            compressed-tensors, gptqmodel, auto-gptq or autoawq built are converted in any case,
            with the same values.
        fp8: matrix products of linear layers in training, by :func:`flexops.fp8_linear`:
            ``"rowwise"`` or ``"rowwise_with_gw_hp"``. Output layers, small layers and inputs of few
            rows keep 16-bit products, which the report lists with the reason.

    Returns:
        what was swapped, and what was not, with the reason. ``print`` it, or take ``.json()``.

    Raises:
        PatchError: ``model`` is none of these, the architecture is unknown, or ``weights`` is not
            supported. After any error, also one that a module's own code raises, the model is as it
            was.

    A module's class, name and parameters stay as they are, so that checkpoints, wrapping by class
    and ``isinstance`` do. Copies and pickles of a patched model are patched. What is replaced is
    recognised by its structure, whatever its class, and its replacement computed the same as the
    class's own code on a small input, with its gradients. What computes something else is skipped,
    with the reason in the report; so is code that came with a model (``trust_remote_code``).
    """
    wanted = {
        "norms": norms, "residuals": residuals and norms, "activations": activations,
        "rope": rope, "attention": attention, "projections": projections, "experts": experts,
        "loss": loss, "generation": generation,
    }  # fmt: skip
    if _is_of_classes(model):
        if weights is not None:
            raise PatchError(
                "weights= quantizes a model that has its weights",
                found=f"flexops.patch({model!r}, weights={weights!r})",
                fix="from_pretrained(..., quantization_config=flexops.patching.Int4Config())",
            )
        return classes.patch(
            model, functools.partial(patch, **wanted, in_graphs=in_graphs, fp8=fp8)
        )
    _check_module(model, "patch")
    _check_can_change(model)
    replacements = int4.Replacements(model)
    with _all_or_nothing(model, replacements):
        rows = list(int4.convert(replacements))
        if weights is not None:
            rows += int4.quantize(replacements, int4.Settings.of(weights))
        rows += _replace(model, wanted, in_graphs, fp8)
        made, of_optimizer = _optimizer(model, optimizer)
        if replacements.finish() and "transformers" in sys.modules:
            from ..int4.checkpoints import adopt

            adopt(model)
        if any(row.swapped for row in rows):
            model.__dict__[REPLICATES] = _no_replica
    if loss:
        trl.install()
    return Report(type(model).__name__, rows_of([*rows, *of_optimizer]), made)


def _replace(
    model: nn.Module, wanted: dict[str, bool], in_graphs: bool, fp8: str | None
) -> Iterator[Row]:
    """Modules first, then what spans several of them: residuals, decode steps."""
    inside: set[int] = set()  # activations of blocks that have their row already
    for module in model.modules():
        if id(module) not in inside:
            yield from _visit(module, wanted, in_graphs)
        inside |= _covered(module)
    yield from adding.patch(model, wanted["residuals"], in_graphs)
    if fp8 is not None:
        yield from fp8_products.patch(model, fp8)
    for module in model.modules():
        row = generating.switch(module, "" if wanted["generation"] else "generation=False")
        if row is not None:
            yield row
        if row is not None and row.swapped:
            _tabulate(module)
            stepping.prepare(module)


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


def _no_replica() -> None:
    raise PatchError(
        "torch.nn.DataParallel cannot copy a patched model to other GPUs",
        required="a process for each GPU (DistributedDataParallel), or one GPU",
        fix="torchrun --nproc-per-node=gpu SCRIPT, or CUDA_VISIBLE_DEVICES=0 python SCRIPT",
    )


def _is_of_classes(model: Any) -> bool:
    """Whether it is a class of models, or an architecture's name."""
    return isinstance(model, str) or (isinstance(model, type) and issubclass(model, nn.Module))


def _check_module(model: Any, called: str) -> None:
    if not isinstance(model, nn.Module):
        raise PatchError(
            f"flexops.{called} takes a module, a class of models or an architecture's name",
            found=type(model).__name__,
        )


def _check_can_change(model: nn.Module) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise PatchError(
            "flexops.patch cannot change a module of TorchScript",
            found=type(model).__name__,
            fix="patch the module that was scripted",
        )
    if any(map(is_lazy, itertools.chain(model.parameters(), model.buffers()))):
        raise PatchError(
            "flexops.patch requires a model whose parameters have their shapes",
            found="a lazy module, which gets them in its first forward pass",
            fix="run the model once before",
        )


def unpatch(model: Any) -> int:
    """Take everything back that :func:`patch` has done to a module, or to a class or architecture,
    except 4-bit weights: the 16-bit weights are gone, and these layers keep computing. Returns how
    many modules were restored."""
    if _is_of_classes(model):
        return classes.unpatch(model)
    _check_module(model, "unpatch")
    restored = 0
    for module in model.modules():
        restored += take_away(module)
        attending.switch_back(module)
        generating.switch_back(module)
        module.__dict__.pop(REPLICATES, None)
    return restored


# ---- a module ------------------------------------------------------------------------------------


def _visit(module: nn.Module, wanted: dict[str, bool], in_graphs: bool) -> Iterator[Row]:
    switched = attending.switch(module, "" if wanted["attention"] else "attention=False")
    if switched is not None:
        yield switched
    found, name = _find(module), class_of(module).__name__
    if not found:
        reason = _unknown(module)
        if reason:
            yield Row(name, 1, "-", False, reason)
        return
    for pattern in found:
        operator, swap, reason = judge(module, pattern)
        if given(module) is not None:
            reason = REPLACED
        reason = reason if wanted[pattern.part] else f"{pattern.part}=False"
        if not reason:
            put(swap(module), in_graphs)
        yield Row(name, 1, operator, not reason, reason)


def put(swap: Swap, in_graphs: bool) -> None:
    for part, forward in swap:
        options = {"in_graphs": in_graphs} if hasattr(forward.func, "__wrapped__") else {}
        part.__dict__["forward"] = type(forward)(
            forward.func, *forward.args, **forward.keywords, **options
        )


def _covered(module: nn.Module) -> set[int]:
    """Parts that its own row is about: activations, experts."""
    if own_class(module) is nn.Sequential:
        return set(map(id, torch_modules.fused(module)))
    if experts_part.concerns_dense(module):
        return {id(module.experts)}
    inside = {
        id(child) for child in module.children() if isinstance(child, torch_modules.ACTIVATIONS)
    }
    block = inside and any(pattern.part == "activations" for pattern in _find(module))
    return inside if block else set()


def forward_of(module: nn.Module, part: str) -> Callable[..., Any]:
    """What the patch makes a module's ``forward`` for one part; its class's own if nothing."""
    for pattern in _find(module):
        if pattern.part == part:
            _, swap, reason = judge(module, pattern)
            if not reason:
                return dict(swap(module))[module]  # type: ignore[no-any-return]
    return functools.partial(plain, module)


def judge(module: nn.Module, pattern: Pattern) -> tuple[str, Any, str]:
    """The operator, the replacement, and why it is none."""
    code = own_code(module)
    reason = foreign(own_class(module)) or foreign(code) or pattern.refuse(module)
    if reason:
        return pattern.operator, None, reason
    key = (pattern.part, type(module), code, pattern.key(module))
    candidates = list(pattern.candidates(module))
    chosen, reason = once(key, functools.partial(_verdict, module, pattern, candidates))
    return candidates[chosen][0] or pattern.operator, candidates[chosen][1], reason


def _verdict(module: nn.Module, pattern: Pattern, candidates: list[Candidate]) -> tuple[int, str]:
    """Which replacement computes the same, or why none does."""
    first = ""
    for index, (_, swap, *own) in enumerate(candidates):
        make = own[0] if own else pattern.miniature and functools.partial(pattern.miniature, module)
        if make is None:
            return index, ""
        half = pattern.part in ("norms", "activations")
        without = "logits" if pattern.part == "loss" else ""
        reason = disagreement(make, swap, half, without)
        if not reason:
            return index, ""
        first = first or reason
    return 0, first


def _find(module: nn.Module) -> list[Pattern]:
    """A kind for each part: an attention module may be more than one."""
    return [pattern for pattern in PATTERNS if pattern.concerns(module)]


def _unknown(module: nn.Module) -> str:
    """Said of modules that look as if they had to be known, so that a new release's classes are not
    passed over in silence."""
    cls = own_class(module)
    if cls in UNCHANGED:
        return UNCHANGED[cls]
    if _has_row(module):
        return ""
    if not _LOOKS_LIKE.search(cls.__name__):
        return ""
    if isinstance(module, (nn.ModuleDict, nn.ModuleList)):
        return "its parts have weights of their own; grouped products require one tensor of them"
    parts = list(module.children())
    if parts and all(map(_has_row, parts)):
        return ""
    return "its structure is none that flexops knows"


def _has_row(module: nn.Module) -> bool:
    of_int4 = own_class(module) is Int4Experts or bool(int4.unsupported(module))
    return of_int4 or bool(_find(module))


def _tabulate(model: nn.Module) -> None:
    """Let rotary embeddings look their angles up in decode steps."""
    for module in model.modules() if rope_part.rotates_last(model) else ():
        if rope_part.refusal(module) == "" and given(module) is None:
            module.__dict__["forward"] = functools.partial(rope_part.embedding, module)


# ---- a whole model -------------------------------------------------------------------------------


def _optimizer(model: nn.Module, wanted: Any) -> tuple[Any, Iterable[Row]]:
    if wanted is False or wanted is None:
        return None, ()
    from .. import optim

    if wanted is True:
        parameters = [one for one in model.parameters() if one.requires_grad]
        return optim.AdamW(parameters), (Row("optimizer", 1, "AdamW", True),)
    name, known = type(wanted).__name__, ("Adam", "AdamW", "Adagrad")
    torchs = type(wanted).__module__.partition(".")[0] == "torch"
    if not torchs or not isinstance(wanted, torch.optim.Optimizer) or name not in known:
        reason = f"{name} is none of torch.optim's {', '.join(known)}"
        return wanted, (Row("optimizer", 1, "-", False, reason),)
    groups = [
        {key: value for key, value in group.items() if key in _GROUP}
        for group in wanted.param_groups
    ]
    made = getattr(optim, name)(groups)
    if wanted.state:
        states = {**wanted.state_dict(), "param_groups": made.state_dict()["param_groups"]}
        made.load_state_dict(states)
    return made, (Row("optimizer", 1, name, True),)


_GROUP = (
    "params", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "lr_decay",
    "initial_accumulator_value",
)  # fmt: skip
