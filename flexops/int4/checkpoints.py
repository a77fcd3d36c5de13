"""4-bit weights through ``from_pretrained``: :class:`Int4Config`, the quantizer behind it, and what
registers both with transformers.

``from_pretrained`` builds the model on ``meta``, has the quantizer replace layers, reads tensors
into the modules, and hands the model back to the quantizer. In between, a layer is a
:class:`_Stored`, which holds the checkpoint's own tensors, or an :class:`_Arriving`, which
quantizes its 16-bit weight as soon as it is read. So there is never a 16-bit copy of the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers.auto import (
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .._warning import warn
from ..errors import PatchError
from ..nn import Int4Linear
from ..ops.int4_linear import Int4Weight
from .formats import METHOD, Declared, Format, check_shapes, format_of, weight_of
from .layers import (
    EXPERTS,
    Replacements,
    Settings,
    check_group_size,
    experts,
    heads,
    plain_linears,
    quantize_head,
    quantized_weight,
    saved_config,
    saved_format,
    saved_tensors,
    untie,
    why_kept,
)

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_Entry = tuple[tuple[int, ...], torch.dtype]


@register_quantization_config(METHOD)
class Int4Config(QuantizationConfigMixin):
    """``quantization_config=`` of transformers' ``from_pretrained``, for 4-bit weights on flexops'
    kernels.

    A checkpoint in 16 bits is quantized as it is read, one weight at a time. A checkpoint in 4 bits
    (compressed-tensors ``pack-quantized``, GPTQ, AWQ, or one that flexops wrote) is read as it is,
    without the library that wrote it; then the arguments do not matter.

    Args:
        group_size: 32, 64 or 128 inputs to a scale.
        symmetric: without zero points.
        modules_to_not_convert: names, or ends of names, of linear layers that keep 16 bits.
        head: also quantize the output layer; it then no longer shares the embedding's weight.

    Raises:
        PatchError: no kernel has the group size.
    """

    def __init__(
        self,
        group_size: int = 64,
        symmetric: bool = False,
        modules_to_not_convert: Iterable[str] | str | None = None,
        head: bool = False,
    ) -> None:
        check_group_size(group_size)
        self.quant_method: Any = METHOD
        self.group_size = group_size
        self.symmetric = symmetric
        names = modules_to_not_convert or ()
        self.modules_to_not_convert = (names,) if isinstance(names, str) else tuple(names)
        self.head = head
        self.stored: dict[str, Any] | None = None
        """The config of a 4-bit checkpoint."""

    @classmethod
    def of(cls, stored: Any) -> Int4Config:
        """For a checkpoint in 4 bits.

        Raises:
            PatchError: its format is not supported.
        """
        made = cls()
        made.stored = dict(stored if isinstance(stored, Mapping) else stored.to_dict())
        format_of(made.stored)
        return made

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """From the config of a checkpoint of flexops' own format, or from what :meth:`to_dict` of
        settings returned."""
        names = [one.name for one in fields(Settings)]
        known = {name: config_dict[name] for name in names if name in config_dict}
        made = cls.of(config_dict) if "config_groups" in config_dict else cls(**known)
        return (made, kwargs) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self)) if self.stored is None else copy.deepcopy(self.stored)


class _Stored(nn.Module):
    """A layer with the tensors of a checkpoint, under their names."""

    def __init__(self, linear: nn.Linear, found: Mapping[str, _Entry]) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.names = tuple(name for name in found if name != "bias")
        for name, (shape, dtype) in found.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))
        if "bias" not in found:
            self.bias = linear.bias

    def built(self, where: str, form: Format, declared: Declared, dtype: torch.dtype) -> Int4Linear:
        tensors = {name: getattr(self, name) for name in self.names}
        weight = weight_of(where, form, tensors, self.in_features, self.out_features, declared)
        return _linear(weight, self.bias, dtype)


class _Arriving(nn.Module):
    """A layer that waits for its 16-bit weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.quantized: Int4Weight | None = None

    def built(self, where: str, dtype: torch.dtype) -> Int4Linear:
        if self.quantized is None:
            raise PatchError(
                f"{where}.weight is missing from the checkpoint",
                fix="load the checkpoint that belongs to this model's config",
            )
        return _linear(self.quantized, self.bias, dtype)


def _linear(weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype) -> Int4Linear:
    return Int4Linear.from_packed(weight, None if bias is None else bias.detach().to(dtype))


class _Quantize(ConversionOps):
    """A 16-bit weight, at the moment it is read."""

    def __init__(self, config: Int4Config) -> None:
        self.config = config

    def convert(self, input_dict: dict[str, Any], *_: Any, **given: Any) -> dict[str, Any]:
        model: nn.Module = given["model"]
        missing_keys: set[str] | None = given.get("missing_keys")
        rest = {}
        for name, value in input_dict.items():
            module = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(module, _Arriving):
                rest[name] = value
                continue
            value = value[0] if isinstance(value, list) else value
            module.quantized = quantized_weight(value, Settings.of(self.config))
            module.weight = None  # type: ignore[assignment]
            if missing_keys is not None:
                missing_keys.discard(name)
        return rest


@register_quantizer(METHOD)
class Int4Quantizer(HfQuantizer):
    """What ``from_pretrained`` calls for an :class:`Int4Config`."""

    def __init__(self, quantization_config: Int4Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.config = quantization_config
        self.form: Format | None = None
        self.declared = Declared()

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **_: Any
    ) -> Any:
        if self.pre_quantized:
            self._store(model, checkpoint_files)
        else:
            self._await(model)
        return model

    def _store(self, model: Any, files: Any) -> None:
        """Replace the layers of which the checkpoint has codes; everything is checked before
        anything is read."""
        config = self.config.stored or {}
        self.form, self.declared = format_of(config), Declared.by(config)
        layers = _layers(model, self.form, _entries(files))
        if not layers:
            raise PatchError(
                f"the checkpoint has no layer in {self.form.name}, which its config names",
                required=f"tensors named *.{self.form.codes.name}",
                fix="remove quantization_config from its config.json if its weights have 16 bits",
            )
        for where, found in layers.items():
            linear = model.get_submodule(where)
            sizes = linear.in_features, linear.out_features
            check_shapes(where, self.form, found, *sizes, self.declared)
            model.set_submodule(where, _Stored(linear, found))
            untie(model, where)

    def _await(self, model: Any) -> None:
        config = self.config
        keep = (*config.modules_to_not_convert, *heads(model))
        reasons = {}
        for name, linear in plain_linears(model):
            reasons[name] = why_kept(name, linear, config.group_size, keep)
            if not reasons[name]:
                model.set_submodule(name, _Arriving(linear))
        several = experts(model)
        if several:
            warn(f"flexops: {len(several)} modules, such as {type(several[0]).__name__}: {EXPERTS}")
        unfit = {name: reason for name, reason in reasons.items() if "inputs" in reason}
        if unfit:
            name, reason = next(iter(unfit.items()))
            warn(f"flexops: {len(unfit)} linear layers keep 16 bits, such as {name}: {reason}")

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        devices = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise PatchError(
                "4-bit layers cannot be offloaded to the CPU or the disk",
                found=f"device_map places modules on {', '.join(sorted(devices))}",
                fix='from_pretrained(..., device_map="cuda")',
            )
        dtype = model.dtype
        waiting = [
            name for name, one in model.named_modules() if isinstance(one, (_Stored, _Arriving))
        ]
        for name in waiting:  # by name, so that each layer's tensors are freed once it is replaced
            module = model.get_submodule(name)
            if isinstance(module, _Stored):
                assert self.form is not None
                made = module.built(name, self.form, self.declared, dtype)
            else:
                made = module.built(name, dtype)
            model.set_submodule(name, made)
        if self.config.head and not self.pre_quantized:
            quantize_head(Replacements(model), Settings.of(self.config))
        adopt(model)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        path = param_name.removesuffix(".weight")
        return path != param_name and isinstance(model.get_submodule(path), _Arriving)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return 0.5 + 4 / self.config.group_size
        size: float = super().param_element_size(model, param_name, param)
        return size

    def get_quantize_ops(self) -> _Quantize:
        return _Quantize(self.config)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, str]]:
        """What ``save_pretrained`` writes."""
        if getattr(model, "peft_config", None):  # then adapters alone are saved
            return None, {}
        adopt(model)
        state, form = model.state_dict(), saved_format(model)
        for name, module in model.named_modules():
            if isinstance(module, Int4Linear):
                own = {key for key in module.state_dict() if key != "bias"}
                state = {key: one for key, one in state.items() if key not in
                         {f"{name}.{part}" for part in own}}  # fmt: skip
                saved = saved_tensors(module, form)
                state |= {f"{name}.{key}": one for key, one in saved.items()}
        return state, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # of adapters: the gradient with respect to the input is computed

    @property
    def is_compileable(self) -> bool:
        return True


# ---- a checkpoint's files ----


def _entries(files: Any) -> dict[str, _Entry]:
    """Shapes and dtypes of a checkpoint's tensors, from the heads of its files."""
    from safetensors import SafetensorError, safe_open

    entries: dict[str, _Entry] = {}
    for file in [files] if isinstance(files, str) else files or ():
        if not str(file).endswith(".safetensors"):
            raise PatchError(
                "flexops reads 4-bit weights from safetensors",
                found=str(file),
                fix="write the checkpoint as safetensors, with the library that wrote it",
            )
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (it is no dict)
                    part = opened.get_slice(key)
                    dtype = _DTYPES.get(part.get_dtype(), torch.int64)
                    entries[key] = (tuple(part.get_shape()), dtype)
        except SafetensorError as error:
            raise PatchError(
                "a file of the checkpoint is damaged",
                found=f"{file}: {error}",
                fix="download the checkpoint again",
            ) from None
    return entries


def _layers(
    model: Any, form: Format, entries: Mapping[str, _Entry]
) -> dict[str, dict[str, _Entry]]:
    """The tensors of each layer that has codes, by its name in the model."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    present = model.state_dict()
    names = {}
    for key in entries:
        stem, _, name = key.rpartition(".")
        if name not in (*form.tensors, "bias") or f"{stem}.{form.codes.name}" not in entries:
            if name in form.tensors:
                raise _unknown(form, key, f"there is no {stem}.{form.codes.name}, its codes")
            continue
        if stem not in names:
            renamed, converter = rename_source_key(
                f"{stem}.weight", renamings, converters, model.base_model_prefix, present
            )
            path = renamed.removesuffix(".weight")
            if converter is not None or not _is_linear(model, path):
                raise _unknown(form, key, f"{path} is no linear layer of this model")
            names[stem] = path
    return {
        path: {
            name: entries[key]
            for name in (*form.tensors, "bias")
            if (key := f"{stem}.{name}") in entries
        }
        for stem, path in names.items()
    }


def _is_linear(model: Any, path: str) -> bool:
    try:
        return type(model.get_submodule(path)) is nn.Linear
    except AttributeError:
        return False


def _unknown(form: Format, key: str, reason: str) -> PatchError:
    return PatchError(
        f"flexops cannot place {key} of this {form.name} checkpoint",
        found=reason,
        required="codes of linear layers; experts of a mixture in one tensor are not supported",
        fix="download the checkpoint again, or load it without Int4Config",
    )


# ---- registration ----


def adopt(model: Any) -> None:
    """Have ``save_pretrained`` write the 4-bit layers of a model, or of the model inside of a
    wrapper."""
    model = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), None)
    if model is None:
        return
    config = Int4Config()
    config.stored = saved_config(model)
    model.config.quantization_config = config
    if not isinstance(getattr(model, "hf_quantizer", None), Int4Quantizer):
        model.hf_quantizer = Int4Quantizer(config)
    model.quantization_method, model.is_quantized = METHOD, True


_merge = AutoHfQuantizer.merge_quantization_configs
_default = False


def register_int4(default: bool = True) -> None:
    """Have ``from_pretrained`` read every 4-bit checkpoint of a format that flexops reads as if
    called with ``quantization_config=Int4Config()``; ``default=False`` ends that."""
    global _default
    _default = default


def _merged(stored: Any, given: Any) -> Any:
    """transformers keeps to the checkpoint's config; an :class:`Int4Config` reads it."""
    if isinstance(given, Int4Config):
        return Int4Config.of(stored)
    if given is None and _default:
        try:
            return Int4Config.of(stored)
        except PatchError:  # not ours
            pass
    return _merge(stored, given)


setattr(AutoHfQuantizer, "merge_quantization_configs", staticmethod(_merged))  # noqa: B010
