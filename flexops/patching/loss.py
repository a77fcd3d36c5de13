"""The loss of ``model(..., labels=labels)`` as a linear cross entropy: the logits of all tokens are
never there at once."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import hears_of_parameters_only, is_unheard
from ..ops.linear_cross_entropy import linear_cross_entropy
from .forwards import plain


def head(module: Any, x: Tensor, *, target: Tensor | None = None, **options: Any) -> Any:
    """A model's last linear layer; with a target, the loss. It is computed here, where FSDP2's
    hooks have gathered the layer's parameters."""
    if target is None:
        return plain(module, x)
    return linear_cross_entropy(x, module.weight, target, module.bias, **options)


def refusal(head: Any) -> str:
    """Why a head's product stays apart from the loss; "" if it need not."""
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return ""
    return f"its head is no linear layer, but {type(head).__name__}"


def _is_replaced(module: Any) -> bool:
    """Whether a module is a head of ours. A linear layer that came after the patch becomes one:
    ``resize_token_embeddings`` makes a new head."""
    if refusal(module):
        return False
    if "forward" not in module.__dict__:
        module.__dict__["forward"] = functools.partial(head, module)
    present = module.__dict__["forward"]
    return isinstance(present, functools.partial) and present.func is head


def _takes_labels(
    module: Any, skip_logits: bool | None, logits_to_keep: Any, labels: Tensor | None
) -> bool:
    """Whether the loss can be had without logits, and they are not requested."""
    skip = module.training if skip_logits is None else skip_logits
    keeps_none = isinstance(logits_to_keep, int) and logits_to_keep == 0
    if labels is None or not skip or not keeps_none:
        return False
    if not _is_replaced(module.get_output_embeddings()):
        return False
    # hooks that want logits would get the loss
    if not hears_of_parameters_only(module.get_output_embeddings()):
        return False
    return "_loss_function" not in module.__dict__  # a user's, which requires logits


def causal_lm(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    *args: Any,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    skip_logits: bool | None = None,
    return_dict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """What transformers' causal language models do, and with labels, in training, ``logits=None``
    in the output.

    ``skip_logits`` says otherwise: False for logits in training, too; True for none in evaluation.
    Where logits are made the loss is made of them, by the model's own code.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    inputs = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "inputs_embeds": inputs_embeds,
    }
    if args or not _takes_labels(module, skip_logits, logits_to_keep, labels):
        if args:
            positional: tuple[Any, ...] = (input_ids, attention_mask, position_ids, *args)
            given = {
                "past_key_values": past_key_values,
                "inputs_embeds": inputs_embeds,
                "labels": labels,
                "use_cache": use_cache,
            }
            rest = {name: value for name, value in given.items() if value is not None}
        else:
            positional, rest = (input_ids,), {**inputs, "labels": labels, "use_cache": use_cache}
        if return_dict is not None:
            rest["return_dict"] = return_dict
        if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            rest["logits_to_keep"] = logits_to_keep
        return plain(module, *positional, **rest, **kwargs)
    outputs = getattr(module, module.base_model_prefix)(
        input_ids, **inputs, use_cache=use_cache, return_dict=True, **kwargs
    )
    assert labels is not None
    loss: Any = _loss(module, outputs.last_hidden_state, labels, **kwargs)
    found = CausalLMOutputWithPast(
        loss=loss,
        logits=None,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
    wants_dict = (
        return_dict if return_dict is not None else getattr(module.config, "return_dict", True)
    )
    return found if wants_dict else found.to_tuple()


def masked_lm(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Any = None,
    labels: Tensor | None = None,
    skip_logits: bool | None = None,
    return_dict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """The same for BERT's masked tokens, whose targets are where they are."""
    from transformers.modeling_outputs import MaskedLMOutput

    inputs = {
        "attention_mask": attention_mask,
        "token_type_ids": token_type_ids,
        "position_ids": position_ids,
        "inputs_embeds": inputs_embeds,
        "encoder_hidden_states": encoder_hidden_states,
        "encoder_attention_mask": encoder_attention_mask,
    }
    if (
        not _takes_labels(module, skip_logits, 0, labels)
        or not is_unheard(module.cls)
        or not is_unheard(module.cls.predictions)
    ):
        form = {} if return_dict is None else {"return_dict": return_dict}
        return plain(module, input_ids, **inputs, labels=labels, **form, **kwargs)
    assert labels is not None
    outputs = module.bert(input_ids, **inputs, return_dict=True, **kwargs)
    predictions = module.cls.predictions
    loss: Any = predictions.decoder(
        predictions.transform(outputs[0]), target=labels.to(outputs[0].device)
    )
    found = MaskedLMOutput(
        loss=loss, logits=None, hidden_states=outputs.hidden_states, attentions=outputs.attentions
    )
    return (
        found
        if (getattr(module.config, "return_dict", True) if return_dict is None else return_dict)
        else found.to_tuple()
    )


def _loss(
    module: Any,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ``ForCausalLMLoss``: token i + 1 is the target of position i."""
    target = (
        shift_labels
        if shift_labels is not None
        else F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    )
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": "mean" if num_items_in_batch is None else "sum",
    }
    softcap = getattr(module.config, "final_logit_softcapping", None)
    if softcap is not None:
        options["softcap"] = softcap
    loss: Tensor = module.get_output_embeddings()(
        hidden, target=target.to(hidden.device), **options
    )
    if num_items_in_batch is None:
        return loss
    return loss / (
        num_items_in_batch.to(loss.device)
        if isinstance(num_items_in_batch, Tensor)
        else num_items_in_batch
    )
