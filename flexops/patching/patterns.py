"""What is swapped for what: one row for each kind of module.

A row names classes as their modules do, says what such a module must be like, gives the replacement
of its ``forward``, and a miniature on which :mod:`.probe` holds the two against each other before
the row is believed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.linear_cross_entropy import linear_cross_entropy
from . import experts, forwards, loss, rope, torch_modules
from .probe import (
    CLASSES,
    INNER,
    LENGTH,
    WIDTH,
    Attention,
    Base,
    Swap,
    bare,
    linear,
    parameter,
    unheard,
)

Miniature = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Pattern:
    """One kind of module.

    Attributes:
        part: which of ``flexops.patch``'s switches turns it off.
        operator: what takes the place of its code; where the module decides which of two, both with
            " / " between them.
        choose: which of those two, for a module; None: not known.
        classes: qualified names. ``*`` stands for every class that has the attributes of ``needs``.
        needs: attributes that such a module has.
        refuse: why this very module stays as it is; "" if it need not.
        swap: the replacements of ``forward``, for it and for its children.
        miniature: a small one of its kind, with arguments.
        concerns: whether there is anything about a module of these classes to swap, or to say.
        variant: what, beside the class, decides what its code does: each is probed.
    """

    part: str
    operator: str
    classes: tuple[str, ...]
    needs: tuple[str, ...]
    swap: Callable[[Any], Swap]
    miniature: Callable[[Any], Miniature]
    refuse: Callable[[Any], str] = lambda _: ""
    variant: Callable[[Any], Any] = lambda _: None
    concerns: Callable[[Any], bool] = lambda _: True
    choose: Callable[[Any], int | None] = lambda _: None

    def operator_of(self, module: Any) -> str:
        chosen = self.choose(module)
        return self.operator if chosen is None else self.operator.split(" / ")[chosen]


def _hf(suffix: str, *names: str) -> tuple[str, ...]:
    """``llama.Llama`` and ``RMSNorm`` name
    ``transformers.models.llama.modeling_llama.LlamaRMSNorm``."""
    split = (name.split(".") for name in names)
    return tuple(
        f"transformers.models.{model}.modeling_{model}.{prefix}{suffix}" for model, prefix in split
    )


_LLAMAS = ("llama.Llama", "mistral.Mistral", "qwen2.Qwen2", "qwen3.Qwen3", "phi3.Phi3")
_GEMMAS = ("gemma2.Gemma2", "gemma3.Gemma3")


def _input() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH)


# ---- norms ---------------------------------------------------------------------------------------


def _too_wide(module: Any) -> str:
    if module.weight is not None and (module.weight.dim() != 1 or module.weight.shape[0] > 65536):
        return (
            f"its weight has shape {tuple(module.weight.shape)}; operators normalize a last"
            " dimension of up to 65536"
        )
    return ""


def _torch_norm(module: Any) -> str:
    if len(module.normalized_shape) != 1:
        return (
            f"it normalizes over {len(module.normalized_shape)} dimensions; operators normalize the"
            " last one"
        )
    return _too_wide(module)


def _tiny_norm(module: Any) -> Any:
    return bare(module, weight=parameter(WIDTH))


def _tiny_torch_norm(module: Any) -> Any:
    made = type(module)(WIDTH, eps=module.eps, elementwise_affine=module.weight is not None)
    for part in made.parameters():
        nn.init.normal_(part)
    return made


def _torch_eps(module: Any) -> float:
    """torch's RMSNorm takes None for the dtype's, which is the weight's where there is one."""
    return module.eps if module.eps is not None else torch.finfo(torch.float32).eps


def _rms(eps: str, offset: float = 0.0) -> Callable[[Any], Swap]:
    return lambda module: [
        (
            module,
            functools.partial(forwards.rms_norm, module, eps=getattr(module, eps), offset=offset),
        )
    ]


# ---- activations ---------------------------------------------------------------------------------


def _kind(act: Any) -> str:
    """Which activation it is, by what it computes: "silu", "none" or "tanh" (gelus), or "" for
    another."""
    if isinstance(act, nn.Module) and any(True for _ in act.parameters()):
        return ""
    x = torch.linspace(-6.0, 6.0, 61, dtype=torch.float32, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = unheard(act)(x)
    except Exception:  # it may want anything
        return ""
    known = {"silu": F.silu(x), "none": F.gelu(x), "tanh": F.gelu(x, approximate="tanh")}
    return next(
        (
            name
            for name, expected in known.items()
            if isinstance(y, Tensor)
            and y.shape == x.shape
            and torch.allclose(y, expected, 1e-5, 1e-5)
        ),
        "",
    )


def _first_if_silu(act: Any) -> int | None:
    return {"silu": 0, "none": 1, "tanh": 1}.get(_kind(act))


def _no_such_activation(name: str) -> Callable[[Any], str]:
    return lambda module: (
        ""
        if _kind(getattr(module, name))
        else f"its activation, {type(getattr(module, name)).__name__}, is neither silu nor gelu"
    )


def _is_gated(module: Any) -> str:
    if not callable(module.act_fn) or not all(
        isinstance(getattr(module, name), nn.Module)
        for name in ("gate_proj", "up_proj", "down_proj")
    ):
        return "its parts are not those of a gated feed-forward block"
    return _no_such_activation("act_fn")(module)


def _gated_swap(module: Any) -> Swap:
    return [
        (
            module,
            functools.partial(
                forwards.gated_mlp,
                module,
                kind=_kind(module.act_fn),
                act=("act_fn", type(module.act_fn)),
            ),
        )
    ]


def _tiny_gated(module: Any) -> Miniature:
    shapes = {"gate_proj": (WIDTH, INNER), "up_proj": (WIDTH, INNER), "down_proj": (INNER, WIDTH)}
    parts: dict[str, Any] = {
        name: linear(*shape, getattr(module, name)) for name, shape in shapes.items()
    }
    parts |= {name: nn.Identity() for name, _ in forwards.dropouts(module)}
    return bare(module, act_fn=unheard(module.act_fn), **parts), (_input(),), {}


def _packed_swap(module: Any) -> Swap:
    kind, act = _kind(module.activation_fn), ("activation_fn", type(module.activation_fn))
    return [(module, functools.partial(forwards.packed_mlp, module, kind=kind, act=act))]


def _tiny_packed(module: Any) -> Miniature:
    linears = {
        "gate_up_proj": linear(WIDTH, 2 * INNER, module.gate_up_proj),
        "down_proj": linear(INNER, WIDTH, module.down_proj),
    }
    return bare(module, activation_fn=unheard(module.activation_fn), **linears), (_input(),), {}


def _mlp(classes: tuple[str, ...], first: str, act: str, second: str) -> Pattern:
    def swap(module: Any) -> Swap:
        activation = getattr(module, act)
        return [
            (
                module,
                functools.partial(
                    forwards.mlp,
                    module,
                    kind=_kind(activation),
                    act=(act, type(activation)),
                    names=(first, second),
                ),
            )
        ]

    def miniature(module: Any) -> Miniature:
        parts = {first: linear(WIDTH, INNER), act: unheard(getattr(module, act))} | (
            {second: linear(INNER, WIDTH)} if second else {}
        )
        return bare(module, **parts), (_input(),), {}

    def refuse(module: Any) -> str:
        reason = (
            ""
            if getattr(getattr(module, first), "bias", None) is not None
            else "its first layer has no bias, so that there is nothing to fuse"
        )
        return reason or _no_such_activation(act)(module)

    needs = (first, act, second) if second else (first, act)
    return Pattern(
        "activations",
        "bias_gelu",
        classes,
        needs,
        swap,
        miniature,
        refuse,
        lambda module: _kind(getattr(module, act)),
    )


def _sequential_swap(module: Any) -> Swap:
    return [(module, functools.partial(torch_modules.sequential, module))]


def _pairs_of(module: Any) -> tuple[Any, ...]:
    return tuple(
        (type(part), getattr(part, "approximate", "")) for part in torch_modules.fused(module)
    )


def _tiny_sequential(module: Any) -> Miniature:
    pairs = ((linear(WIDTH, WIDTH), unheard(act)) for act in torch_modules.fused(module))
    return nn.Sequential(*itertools.chain.from_iterable(pairs)), (_input(),), {}


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
    hidden = torch.ones(
        LENGTH if module.batch_first else 2, LENGTH if module.batch_first else 2, dtype=torch.bool
    ).triu(1)
    return made, (_input(), _input(), _input()), {"need_weights": False, "attn_mask": hidden}


# ---- layers --------------------------------------------------------------------------------------


def _norms(module: Any, *names: str) -> dict[str, Any]:
    """Small norms in place of a layer's."""
    return {
        name: (
            _tiny_torch_norm(norm)
            if isinstance(norm := getattr(module, name), (nn.LayerNorm, nn.RMSNorm))
            else _tiny_norm(norm)
        )
        for name in names
    }


def _layer(forward: Callable[..., Any]) -> Callable[[Any], Swap]:
    """With its norms, because it is by theirs that it adds; so that they are probed with it."""

    def swap(module: Any) -> Swap:
        return [(module, functools.partial(forward, module))]

    return swap


def _tiny_decoder(*norms: str) -> Callable[[Any], Miniature]:
    def miniature(module: Any) -> Miniature:
        dropouts = {
            name: nn.Identity()
            for name in ("resid_attn_dropout", "resid_mlp_dropout")
            if name in module._modules
        }
        made = bare(
            module,
            self_attn=Attention(),
            mlp=linear(WIDTH, WIDTH),
            **_norms(module, *norms),
            **dropouts,
        )
        return (
            made,
            (_input(),),
            {
                "attention_mask": None,
                "position_ids": None,
                "past_key_values": None,
                "position_embeddings": None,
            },
        )

    return miniature


def _tiny_vit(module: Any) -> Miniature:
    norms = _norms(module, "layernorm_before", "layernorm_after")
    return (
        bare(
            module, attention=Attention(), mlp=linear(WIDTH, WIDTH), dropout=nn.Identity(), **norms
        ),
        (_input(), None),
        {},
    )


def _tiny_bert_output(module: Any) -> Miniature:
    return (
        bare(
            module, dense=linear(WIDTH, WIDTH), dropout=nn.Identity(), **_norms(module, "LayerNorm")
        ),
        (_input(), _input()),
        {},
    )


# ---- rotary embedding ----------------------------------------------------------------------------


class _Rotation(nn.Module):
    """What is probed is the function that the attention calls."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function: Any = function

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = self.function(q, k, cos.detach(), sin.detach())
        return torch.cat([q, k], 1)


def _tiny_rotation(module: Any) -> Miniature:
    angles = torch.rand(2, LENGTH, WIDTH // 2) * 6.3
    angles = torch.cat([angles, angles], -1)
    sizes = (torch.randn(2, heads, LENGTH, WIDTH) for heads in (4, 2))
    return _Rotation(rope.original(type(module))), (*sizes, angles.cos(), angles.sin()), {}


def _rotation_swap(module: Any) -> Swap:
    if isinstance(module, _Rotation):
        return [
            (module, functools.partial(_Rotation.forward, _Rotation(rope.apply_rotary_pos_emb)))
        ]
    rope.prepare(type(module))
    return [(module, functools.partial(rope.attention, module))]


def _no_rotation(module: Any) -> str:
    return (
        ""
        if isinstance(module, _Rotation) or rope.original(type(module)) is not None
        else "its code calls no apply_rotary_pos_emb"
    )


# ---- the loss ------------------------------------------------------------------------------------


def _no_such_loss(module: Any) -> str:
    reason = loss.refusal(module.get_output_embeddings())
    if reason:
        return reason
    if (
        getattr(module.config, "final_logit_softcapping", None) is not None
        and "softcap" not in inspect.signature(linear_cross_entropy).parameters
    ):
        return "its logits have a soft cap, which linear_cross_entropy does not take"
    if "_loss_function" in module.__dict__:
        return "it has a loss function of its own"
    if getattr(module, "loss_type", None) not in ("ForCausalLM", "ForMaskedLM", None):
        return f"its loss is {module.loss_type}"
    return ""


def _loss_swap(forward: Callable[..., Any]) -> Callable[[Any], Swap]:
    def swap(module: Any) -> Swap:
        head = module.get_output_embeddings()
        return [
            (module, functools.partial(forward, module)),
            (head, functools.partial(loss.head, head)),
        ]

    return swap


def _tiny_causal(module: Any) -> Miniature:
    config = copy.copy(module.config)
    config.vocab_size = CLASSES
    made = bare(
        module,
        config=config,
        lm_head=linear(WIDTH, CLASSES, module.get_output_embeddings()),
        **{module.base_model_prefix: Base()},
    )
    made.vocab_size = CLASSES
    return made.train(), *_tokens()


def _tiny_masked(module: Any) -> Miniature:
    """With a prediction head that is small itself."""
    config = copy.copy(module.config)
    config.vocab_size = CLASSES
    predictions = bare(
        module.cls.predictions, transform=linear(WIDTH, WIDTH), decoder=linear(WIDTH, CLASSES)
    )
    return (
        bare(
            module, config=config, bert=Base(), cls=bare(module.cls, predictions=predictions)
        ).train(),
        *_tokens(),
    )


def _tokens() -> tuple[tuple[Tensor], dict[str, Tensor]]:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % CLASSES
    labels = tokens.clone()
    labels[0, 2] = -100
    return (tokens,), {"labels": labels}


# ---- the table -----------------------------------------------------------------------------------

_TORCH = "torch.nn.modules.normalization."
PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "norms",
        "rms_norm",
        _hf("RMSNorm", *_LLAMAS),
        ("weight", "variance_epsilon"),
        _rms("variance_epsilon"),
        lambda module: (_tiny_norm(module), (_input(),), {}),
        _too_wide,
    ),
    Pattern(
        "norms",
        "rms_norm (1 + weight)",
        _hf("RMSNorm", *_GEMMAS),
        ("weight", "eps"),
        _rms("eps", 1.0),
        lambda module: (_tiny_norm(module), (_input(),), {}),
        _too_wide,
    ),
    Pattern(
        "norms",
        "rms_norm",
        (f"{_TORCH}RMSNorm",),
        ("weight", "eps", "normalized_shape"),
        lambda module: [
            (
                module,
                functools.partial(forwards.rms_norm, module, eps=_torch_eps(module), offset=0.0),
            )
        ],
        lambda module: (_tiny_torch_norm(module), (_input(),), {}),
        _torch_norm,
    ),
    Pattern(
        "norms",
        "layer_norm",
        (f"{_TORCH}LayerNorm",),
        ("weight", "bias", "eps", "normalized_shape"),
        lambda module: [(module, functools.partial(forwards.layer_norm, module, eps=module.eps))],
        lambda module: (_tiny_torch_norm(module), (_input(),), {}),
        _torch_norm,
    ),
    Pattern(
        "residuals",
        "add_rms_norm",
        _hf("DecoderLayer", *_LLAMAS),
        ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
        _layer(forwards.decoder_layer),
        _tiny_decoder("input_layernorm", "post_attention_layernorm"),
    ),
    Pattern(
        "residuals",
        "add_rms_norm (1 + weight)",
        _hf("DecoderLayer", *_GEMMAS),
        (
            "input_layernorm",
            "self_attn",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "mlp",
            "post_feedforward_layernorm",
        ),
        _layer(forwards.sandwich_layer),
        _tiny_decoder(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    ),
    Pattern(
        "residuals",
        "add_layer_norm",
        _hf("Layer", "vit.ViT"),
        ("layernorm_before", "attention", "layernorm_after", "mlp", "dropout"),
        _layer(forwards.vit_layer),
        _tiny_vit,
    ),
    Pattern(
        "residuals",
        "add_layer_norm",
        (*_hf("SelfOutput", "bert.Bert"), *_hf("Output", "bert.Bert")),
        ("dense", "LayerNorm", "dropout"),
        _layer(forwards.bert_output),
        _tiny_bert_output,
    ),
    Pattern(
        "activations",
        "swiglu_linear / geglu_linear",
        (*_hf("MLP", *_LLAMAS[:-1], *_GEMMAS), "*"),
        ("gate_proj", "up_proj", "down_proj", "act_fn"),
        _gated_swap,
        _tiny_gated,
        _is_gated,
        lambda module: _kind(module.act_fn),
        choose=lambda module: _first_if_silu(module.act_fn),
    ),
    Pattern(
        "activations",
        "bias_gelu / bias_silu",
        ("torch.nn.modules.container.Sequential",),
        (),
        _sequential_swap,
        _tiny_sequential,
        variant=_pairs_of,
        concerns=lambda module: bool(torch_modules.fused(module)),
    ),
    Pattern(
        "attention",
        "attention",
        ("torch.nn.modules.activation.MultiheadAttention",),
        ("in_proj_weight", "out_proj", "bias_k"),
        lambda module: [(module, functools.partial(torch_modules.multihead_attention, module))],
        _tiny_attention,
        _other_attention,
        lambda module: (module.batch_first, module.in_proj_bias is None),
    ),
    Pattern(
        "activations",
        "swiglu_linear / geglu_linear",
        _hf("MLP", "phi3.Phi3"),
        ("gate_up_proj", "down_proj", "activation_fn"),
        _packed_swap,
        _tiny_packed,
        _no_such_activation("activation_fn"),
        lambda module: _kind(module.activation_fn),
        choose=lambda module: _first_if_silu(module.activation_fn),
    ),
    _mlp(_hf("MLP", "phi.Phi", "vit.ViT"), "fc1", "activation_fn", "fc2"),
    _mlp(_hf("MLP", "gpt_neox.GPTNeoX"), "dense_h_to_4h", "act", "dense_4h_to_h"),
    _mlp(_hf("Intermediate", "bert.Bert"), "dense", "intermediate_act_fn", ""),
    Pattern(
        "experts",
        "gated_experts / grouped_linear",
        ("*",),
        ("down_proj", "is_transposed", "has_gate", "has_bias"),
        experts.swap,
        experts.miniature,
        experts.refuse,
        experts.variant,
        experts.concerns,
        experts.choose,
    ),
    Pattern(
        "rope",
        "rotary_embedding",
        _hf("Attention", *_LLAMAS, *_GEMMAS, "phi.Phi", "gpt_neox.GPTNeoX"),
        (),
        _rotation_swap,
        _tiny_rotation,
        _no_rotation,
    ),
    Pattern(
        "loss",
        "linear_cross_entropy",
        _hf("ForCausalLM", *_LLAMAS, *_GEMMAS, "phi.Phi", "gpt_neox.GPTNeoX"),
        ("base_model_prefix", "config"),
        _loss_swap(loss.causal_lm),
        _tiny_causal,
        _no_such_loss,
    ),
    Pattern(
        "loss",
        "linear_cross_entropy",
        _hf("ForMaskedLM", "bert.Bert"),
        ("bert", "cls", "config"),
        _loss_swap(loss.masked_lm),
        _tiny_masked,
        _no_such_loss,
    ),
)
"""In the order in which a module is compared with them: the first that names its class is taken."""

_THREE = (
    "it adds attention, feed-forward and residual at once, and one norm feeds both, so that there"
    " is no sum for a norm to go with"
)
_ALONE = "with no linear layer's bias before it, it is one pass over memory, as torch's own is"
UNCHANGED: dict[str, str] = {
    **dict.fromkeys(
        ("torch.nn.modules.activation.GELU", "torch.nn.modules.activation.SiLU"), _ALONE
    ),
    **dict.fromkeys(_hf("DecoderLayer", "phi.Phi"), _THREE),
    **dict.fromkeys(_hf("Layer", "gpt_neox.GPTNeoX"), _THREE),
}
"""Classes that are known and stay as they are, with the reason."""
