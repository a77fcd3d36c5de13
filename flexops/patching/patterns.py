"""What is replaced by what: one row for each kind of module.

A row recognises a module by its structure (parameters, parts, epsilon, activation), whatever its
name, and gives the replacements of its ``forward`` that may be meant. :mod:`.probe` compares each
with the class's own code on a small input, and the first that computes the same is believed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import Int4Linear
from ..nn.linears import is_linear
from . import experts, forwards, loss, projections, recurrence, rope, routers, torch_modules
from .probe import (
    CLASSES,
    LENGTH,
    WIDTH,
    Base,
    Miniature,
    Swap,
    arguments,
    by,
    linear,
    own_class,
    settings,
    small,
    small_sizes,
    unheard,
    values_of,
)

Candidate = tuple[Any, ...]
"""An operator's name ("" for that of its row), a function that gives the replacements of
``forward`` for a module and its parts, and, where it has to be tried with arguments of its own, one
that gives a miniature."""


@dataclass(frozen=True)
class Pattern:
    """One kind of module.

    Attributes:
        part: which of ``flexops.patch``'s switches turns it off.
        operator: what the report names where nothing is replaced.
        concerns: whether a module is of this kind, by its structure.
        candidates: the replacements that may be meant, in the order in which they are tried.
        miniature: a small one of its kind, with arguments; None: every part computes what it did.
        refuse: why this very module is not replaced; "" if it may be.
        differs: what, beside class and settings, decides what its code does: each is probed.
    """

    part: str
    operator: str
    concerns: Callable[[Any], bool]
    candidates: Callable[[Any], Iterator[Candidate]]
    miniature: Callable[[Any], Miniature] | None
    refuse: Callable[[Any], str] = lambda _: ""
    differs: Callable[[Any], Any] = lambda _: None

    def key(self, module: Any) -> Any:
        return (settings(module), self.differs(module))


def _input(*shape: int) -> Tensor:
    return torch.randn(shape or (2, LENGTH, WIDTH))


def _required(module: Any) -> int:
    """How many arguments without a default a module's ``forward`` takes."""
    usual = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = arguments(module).values()
    return sum(one.kind in usual and one.default is one.empty for one in found)


def _only(swap: Callable[[Any], Swap]) -> Callable[[Any], Iterator[Candidate]]:
    """One candidate, whatever the module."""
    return lambda _: iter([("", swap)])


# ---- norms ---------------------------------------------------------------------------------------


def _epsilons(module: Any) -> list[float]:
    named = [
        value
        for name, value in vars(module).items()
        if "eps" in name and isinstance(value, float) and 0 < value < 0.1
    ]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        # the dtype's, which is the weight's where there is one
        return [torch.finfo(torch.float32).eps]
    return named or [1e-5, 1e-6]


def looks_like_norm(module: Any) -> bool:
    names = {name for name, one in module._parameters.items() if one is not None}
    return (
        not module._modules
        and names <= {"weight", "bias"}
        and (names or "norm" in type(module).__name__.lower())
        and ("norm" in type(module).__name__.lower() or any("eps" in one for one in vars(module)))
        and type(module).forward is not nn.Module.forward
        and {*module._buffers} <= {"weight", "eps", "variance_epsilon"}  # no batch's statistics
        and "num_groups" not in vars(module)
        and _required(module) <= 2
    )


def _no_norm(module: Any) -> str:
    shape = getattr(module, "normalized_shape", (1,))
    if isinstance(shape, (tuple, list, torch.Size)) and len(shape) != 1:
        return f"it normalizes over {len(shape)} dimensions; operators normalize the last one"
    weight = module._parameters.get("weight")
    if weight is not None and (weight.dim() != 1 or weight.shape[0] > 65536):
        return (
            f"its weight has shape {tuple(weight.shape)}; operators normalize a last"
            " dimension of up to 65536"
        )
    return ""


def _groups(module: Any) -> list[int]:
    """Into how many parts a gated norm may cut a row."""
    weight, own = module._parameters.get("weight"), vars(module)
    found = [own["n_groups"]] if isinstance(own.get("n_groups"), int) else []
    if isinstance(own.get("group_size"), int) and weight is not None:
        found.append(weight.shape[0] // own["group_size"])
    return [1, *(one for one in found if one > 1)]


def _norm_candidates(module: Any) -> Iterator[Candidate]:
    makes: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
        (f"{forward.__name__}{' (1 + weight)' if offset else ''}", forward, {"offset": offset})
        for forward, offset in itertools.product(forwards.NORMS, (0.0, 1.0))
    ]
    if len(arguments(module)) > 1:  # a gate, too
        orders = itertools.product(("silu", "sigmoid"), (False, True), _groups(module))
        makes = [
            (
                "gated_rms_norm",
                forwards.gated_rms_norm,
                {"activation": activation, "gate_first": first, "groups": groups},
            )
            for activation, first, groups in orders
        ]
    for eps in _epsilons(module):
        for name, forward, options in makes:
            yield name, by(forward, eps=eps, **options)
        if getattr(module, "data_format", "") == "channels_first":  # of pictures
            make = functools.partial(_tiny_picture_norm, module)
            yield "layer_norm", by(forwards.picture_norm, eps=eps), make


def tiny_norm(module: Any) -> Any:
    """Also of those without weights, for which ``normalized_shape`` has the width."""
    own = vars(module)
    widths = [n for one in module._parameters.values() if one is not None for n in one.shape]
    widths += [n for key, n in own.items() if type(n) is int and re.search("hidden|dim", key)]
    made = small(module, dict.fromkeys(widths, WIDTH))
    if "normalized_shape" in own:
        made.normalized_shape = (WIDTH,)
    if own.get("group_size"):
        made.group_size = WIDTH // max(1, min(WIDTH, _groups(module)[-1]))
    return made


def _tiny_norm(module: Any) -> Miniature:
    """Rows so small that the epsilon counts, and large ones."""
    x = _input() * torch.logspace(-3.5, 1.0, LENGTH)[:, None]
    args = (x, _input()) if len(arguments(module)) > 1 else (x,)
    return tiny_norm(module), args, {}


def _tiny_picture_norm(module: Any) -> Miniature:
    return tiny_norm(module), (_input(2, WIDTH, LENGTH, LENGTH),), {}


# ---- feed-forward blocks -------------------------------------------------------------------------


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "none": F.gelu,
    "tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: x.relu().square(),
}


def _kind(act: Any) -> str:
    """Which activation it is, by what it computes: "silu", "relu2", "none", "tanh" or "quick"
    (gelus), or "" for another."""
    if isinstance(act, nn.Module) and any(True for _ in act.parameters()):
        return ""
    x = torch.linspace(-6.0, 6.0, 61, dtype=torch.float32, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = unheard(act)(x)
    except (Exception, SystemExit):  # it may require anything
        return ""
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return ""
    same = (name for name, known in _KINDS.items() if torch.allclose(y, known(x), 1e-5, 1e-5))
    return next(same, "")


def _activation(module: Any) -> tuple[str, Any]:
    """A block's one activation: a part without parameters, or a function; ("", None) if its code
    calls one that it does not hold."""
    found = [
        (name, one)
        for name, one in (*module._modules.items(), *vars(module).items())
        if callable(one)
        and not name.startswith("_")
        and name != "forward"
        and not isinstance(one, (nn.Dropout, nn.Identity, nn.Unfold, type))
        and not (isinstance(one, nn.Module) and (one._parameters or one._modules))
    ]
    return found[0] if len(found) == 1 else ("", None)


def _linears(module: Any) -> dict[str, Any]:
    return {
        name: one
        for name, one in module._modules.items()
        if is_linear(one) or type(one) is Int4Linear
    }


def _sizes(one: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    a, b = one.weight.shape
    return (a, b) if type(one).__name__ == "Conv1D" else (b, a)


def _is_block(module: Any) -> bool:
    """Linear layers and an activation, a function of one tensor."""
    if isinstance(module, nn.Sequential):
        return False
    linears = _linears(module)
    act, _ = _activation(module)
    rest = [
        name
        for name, one in module._modules.items()
        if name not in linears and name != act and not isinstance(one, (nn.Dropout, nn.Identity))
    ]
    if not linears or rest or len(linears) > 3 or module._parameters or module._buffers:
        return False
    if any("heads" in one or one == "groups" for one in vars(module)):  # attention
        return False
    one = len(arguments(module)) == 1
    return _required(module) == 1 and (bool(act) or (len(linears) > 1 and one))


def _no_block(module: Any) -> str:
    (name, act), linears = _activation(module), _linears(module)
    known = not name or _kind(act)
    if not (known and list(_block_candidates(module))):
        if len(linears) < 3 and next(iter(linears.values())).bias is None:
            return "its first layer has no bias, so that there is nothing to fuse"
        if not known:
            return f"its activation, {type(act).__name__}, is not one of silu, gelu and relu2"
        return "its parts are not those of a feed-forward block"
    return ""


def _block_candidates(module: Any) -> Iterator[Candidate]:
    linears, (name, act) = _linears(module), _activation(module)
    drops = [*_drops(module), ""]
    for kind in [_kind(act)] if name else ["silu", "none", "tanh", "quick", "relu2"]:
        gated = "swiglu_linear" if kind == "silu" else "geglu_linear"
        biased = f"bias_{kind}" if kind in ("silu", "relu2") else "bias_gelu"
        glu = kind not in ("quick", "relu2")
        for names in itertools.permutations(linears):
            shapes = [_sizes(linears[one]) for one in names]
            inner, last = shapes[0][1], shapes[-1][0]
            found: list[tuple[str, str]] = []
            if glu and len(names) == 3 and shapes[0] == shapes[1] and inner == last:
                found.append((gated, "gated"))
            if glu and len(names) == 2 and inner == 2 * last:
                found += [(gated, "packed"), (gated, "packed, up first")]
            fits = len(names) == 1 or (len(names) == 2 and inner == last)
            if fits and (kind == "relu2" or linears[names[0]].bias is not None):
                found.append((biased, "plain"))
            options = {"kind": kind, "act": (name, type(act)), "names": names}
            for (operator, form), *places in itertools.product(found, drops, drops):
                yield operator, by(forwards.block, form=form, drops=(*places,), **options)


def _drops(module: Any) -> dict[str, Any]:
    """The names of what may drop something, with one that does, each at a rate of its own: parts,
    or rates of dropout."""
    parts = [name for name, one in module._modules.items() if isinstance(one, nn.Dropout)]
    rates = [name for name, one in vars(module).items() if "drop" in name and type(one) is float]
    found = {name: 1 / (n + 2) for n, name in enumerate((*parts, *rates))}
    return found | {name: nn.Dropout(found[name]) for name in parts}


def _tiny_block(module: Any) -> Miniature:
    linears = [_sizes(one) for one in _linears(module).values()]
    sizes = small_sizes(*itertools.chain(*linears))
    made = small(module, sizes)
    for name, one in _drops(module).items():
        setattr(made, name, one)
    return made.eval(), (_input(2, LENGTH, sizes[linears[0][0]]),), {}


def _tiny_sequential(_: Any) -> Miniature:
    acts = nn.GELU(), nn.GELU("tanh"), nn.SiLU()
    parts = ((linear(WIDTH, WIDTH), act) for act in acts)
    return nn.Sequential(*itertools.chain.from_iterable(parts)), (_input(),), {}


# ---- attention of torch's own --------------------------------------------------------------------


def _other_attention(module: Any) -> str:
    if not module.kdim == module.vdim == module.embed_dim:
        return "its keys or values are of another width than its queries"
    return (
        "it adds keys and values of its own"
        if module.bias_k is not None or module.add_zero_attn
        else ""
    )


def _tiny_attention(module: Any) -> Miniature:
    made = type(module)(
        WIDTH, 2, bias=module.in_proj_bias is not None, batch_first=module.batch_first
    )
    length = LENGTH if module.batch_first else 2
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return made, (_input(), _input(), _input()), {"need_weights": False, "attn_mask": hidden}


# ---- the loss ------------------------------------------------------------------------------------


def _has_loss(module: Any) -> bool:
    if not hasattr(type(module), "get_output_embeddings") or not hasattr(module, "config"):
        return False
    if "labels" not in arguments(module):
        return False
    try:
        return module.get_output_embeddings() is not None
    except (Exception, SystemExit):  # a wrapper's may look into what it has not
        return False


def _no_loss(module: Any) -> str:
    if "_loss_function" in module.__dict__:
        return "it has a loss function of its own"
    return loss.refusal(module.get_output_embeddings())


def _small_config(config: Any, classes: int) -> Any:
    made = copy.copy(config)
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            setattr(made, name, _small_config(value, classes))
        elif re.match("(image|video)_token_", name) or (  # no token stands for a picture
            type(value) is int and (name == "vocab_size" or value == classes)
        ):
            setattr(made, name, CLASSES)
        elif name == "num_query_tokens":
            setattr(made, name, LENGTH)
    if getattr(made, "is_encoder_decoder", False):
        made.decoder_start_token_id = made.pad_token_id = 0
    return made


def _below_head(module: Any, head: Any, sizes: dict[int, int]) -> Any:
    """A small copy of what is between a model and its head."""
    if module is None or isinstance(module, nn.Dropout):
        return module and nn.Identity()
    if module is head:
        return linear(WIDTH, CLASSES, head)
    parts = list(module.modules())
    if not any(part is head for part in parts) and any(
        isinstance(part, (nn.Embedding, nn.ModuleList)) for part in parts
    ):
        if isinstance(module, nn.Embedding):
            return Base(module).embedding
        return nn.ModuleList() if isinstance(module, nn.ModuleList) else Base(module)
    if is_linear(module) or type(module) is Int4Linear:
        return linear(WIDTH, WIDTH, module)
    if looks_like_norm(module):
        return tiny_norm(module)
    own = (n for one in module._parameters.values() if one is not None for n in one.shape)
    sizes = {n: min(n, WIDTH) for n in own} | sizes
    below = {name: _below_head(one, head, sizes) for name, one in module._modules.items()}
    made = small(module, sizes, **below)
    if "config" in vars(module):
        made.config = _small_config(module.config, head.out_features)
    return made


def _loss_candidates(module: Any) -> Iterator[Candidate]:
    """With tokens alone, and with what stands for a picture."""
    for pictures in (False, True):
        make = functools.partial(_tiny_model, module, pictures)
        yield "linear_cross_entropy", loss.swap, make


def _tiny_model(module: Any, pictures: bool) -> Miniature:
    head = module.get_output_embeddings()
    made = _below_head(module, head, {head.out_features: CLASSES, head.in_features: WIDTH})
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % CLASSES
    labels = tokens.clone()
    labels[0, 2] = -100
    named = {"input_ids": tokens, "labels": labels, "return_dict": True}
    if pictures:
        named |= dict.fromkeys(("image_embeds", "flattened_patches"), _input())
        named |= {"pixel_values": _input(2, 1, 1, LENGTH, WIDTH), "qformer_input_ids": tokens}
    accepted = arguments(module)
    return made.train(), (), {name: one for name, one in named.items() if name in accepted}


# ---- the table -----------------------------------------------------------------------------------

PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "norms", "rms_norm / layer_norm", looks_like_norm, _norm_candidates, _tiny_norm, _no_norm
    ),
    Pattern(
        "activations",
        "bias_gelu / bias_silu",
        lambda module: own_class(module) is nn.Sequential and bool(torch_modules.fused(module)),
        _only(by(torch_modules.sequential)),
        _tiny_sequential,
    ),
    Pattern(
        "activations",
        "swiglu_linear / geglu_linear / bias_gelu / bias_silu / bias_relu2",
        _is_block,
        _block_candidates,
        _tiny_block,
        _no_block,
        lambda module: _kind(_activation(module)[1]),
    ),
    Pattern(
        "activations",
        "causal_conv1d / gated_delta_rule / mamba2_scan",
        recurrence.concerns,
        recurrence.candidates,
        None,
        recurrence.refuse,
    ),
    Pattern(
        "projections",
        "projections of q, k, v as one product",
        projections.concerns,
        _only(projections.swap),
        None,
        projections.refuse,
    ),
    Pattern(
        "attention",
        "attention",
        lambda module: own_class(module) is nn.MultiheadAttention,
        _only(by(torch_modules.multihead_attention)),
        _tiny_attention,
        _other_attention,
    ),
    Pattern(
        "experts",
        "gated_experts / grouped_linear",
        experts.concerns,
        experts.candidates,
        experts.miniature,
        experts.refuse,
        experts.variant,
    ),
    Pattern(
        "experts",
        "grouped_linear",
        lambda module: experts.concerns_grouped(module) and _required(module) == 2,
        experts.grouped_candidates,
        None,
    ),
    Pattern(
        "experts",
        "experts by grouped_linear",
        experts.concerns_dense,
        _only(by(experts.dense)),
        experts.dense_miniature,
        experts.refuse_dense,
    ),
    Pattern(
        "experts",
        "route_tokens",
        routers.concerns,
        routers.candidates,
        routers.miniature,
    ),
    Pattern(
        "rope",
        "rotary_embedding",
        lambda module: rope.original(module) is not None,
        _only(rope.swap),
        None,
        rope.refuse,
    ),
    Pattern(
        "loss",
        "linear_cross_entropy",
        _has_loss,
        _loss_candidates,
        None,
        _no_loss,
        lambda module: values_of(module.config),  # soft caps and scales
    ),
)
"""A module may match more than one: attention has rotary embedding."""

UNCHANGED: dict[type, str] = dict.fromkeys(
    (nn.GELU, nn.SiLU),
    "with no linear layer's bias before it, it is one pass over memory, as torch's own is",
)
"""Classes that are known and stay as they are, with the reason."""
