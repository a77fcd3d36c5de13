"""4-bit weights through ``from_pretrained``: :class:`Int4Config`, the quantizer behind it, and what
registers both with transformers.

``from_pretrained`` builds the model on ``meta``, has the quantizer replace layers, reads tensors
into the modules, and hands the model back to the quantizer. In between, a layer is a
:class:`_Stored`, which holds the checkpoint's own tensors, or an :class:`_Arriving`, which
quantizes its 16-bit weight as soon as it is read. So there is never a 16-bit copy of the weights.
Experts of a mixture are a :class:`_StoredExperts`, which has a :class:`_Stored` for each layer of
each expert, or an :class:`_ArrivingExperts`; those of MXFP4 are a :class:`.mxfp4.StoredExperts`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
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
from ..nn import Int4Experts, Int4Linear
from ..nn.expert_parts import flag
from ..nn.experts import Gate, biases_of, joined
from ..ops.int4_linear import Int4Weight, pack_int4
from . import mxfp4
from .expert_layers import Places, Product, anchored, places, put
from .formats import (
    METHOD,
    MXFP4,
    Codes,
    Declared,
    Experts,
    Format,
    check_shapes,
    codes_of,
    format_of,
    weight_of,
)
from .layers import (
    ROUTERS,
    Replacements,
    Settings,
    check_group_size,
    experts,
    heads,
    inside,
    plain_linears,
    quantize_head,
    quantized_matrices,
    quantized_weight,
    saved_config,
    saved_format,
    saved_tensors,
    untie,
    why_experts_kept,
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
    (compressed-tensors ``pack-quantized``, GPTQ, AWQ, MXFP4, or one that flexops wrote) is read as
    it is, without the library that wrote it; then the arguments do not matter.

    Args:
        group_size: 32, 64 or 128 inputs to a scale.
        symmetric: without zero points.
        modules_to_not_convert: names, or ends of names, of linear layers and modules of experts
            that keep 16 bits.
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

    def __init__(self, in_features: int, out_features: int, found: Mapping[str, _Entry]) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.names = tuple(name for name in found if name != "bias")
        for name, (shape, dtype) in found.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))

    @staticmethod
    def of(linear: nn.Linear, found: Mapping[str, _Entry]) -> _Stored:
        made = _Stored(linear.in_features, linear.out_features, found)
        if "bias" not in found:
            made.bias = linear.bias
        return made

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.names}

    def built(self, where: str, form: Format, declared: Declared, dtype: torch.dtype) -> Int4Linear:
        sizes = self.in_features, self.out_features
        weight = weight_of(where, form, self.tensors(), *sizes, declared)
        return _linear(weight, self.bias, dtype)  # type: ignore[arg-type]


class _StoredExperts(nn.Module):
    """Experts with the tensors of a checkpoint: a :class:`_Stored` for each layer, by the name that
    it has in the checkpoint."""

    def __init__(
        self, path: str, experts: Any, stored: Places, found: Mapping[str, Mapping[str, _Entry]]
    ) -> None:
        super().__init__()
        self.count, self.gate, self.stored = len(experts.down_proj), Gate.of(experts), stored
        self.biases = tuple(biases_of(experts))
        for name in self.biases:
            self.register_parameter(name, getattr(experts, name))
        for product in (stored.gate_up, stored.down):
            for name in product.layers:
                layer = _Stored(product.columns, product.rows, found[name])
                put(self, name.removeprefix(f"{path}."), layer)

    def built(
        self, where: str, form: Format, declared: Declared, dtype: torch.dtype
    ) -> Int4Experts:
        first, last = (
            self._weight(where, product, form, declared)
            for product in (self.stored.gate_up, self.stored.down)
        )
        return _experts(self, first, last, dtype)

    def _weight(self, where: str, product: Product, form: Format, declared: Declared) -> Int4Weight:
        together = max(len(product.layers) // self.count, 1)  # gate and up are one matrix
        weights, parts = [], []
        for name in product.layers:
            above, _, own = name.removeprefix(f"{where}.").rpartition(".")
            # taken out of the module, so that its tensors are freed once they are read
            layer: Any = self.get_submodule(above)._modules.pop(own)
            sizes = layer.in_features, layer.out_features
            parts.append(codes_of(name, form, layer.tensors(), *sizes, declared))
            if len(parts) == together:
                weights.append(_packed(parts))
                parts = []
        return joined(weights)


def _packed(parts: list[Codes]) -> Int4Weight:
    """Layers of the same inputs as one."""
    codes, scales, zeros = (
        None if each[0] is None else torch.cat(each)
        for each in zip(*(one[:3] for one in parts), strict=True)
    )
    assert codes is not None
    assert scales is not None
    return pack_int4(codes, scales, zeros, group_size=parts[0].group_size)


class _Arriving(nn.Module):
    """A layer that waits for its 16-bit weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.awaited = ("weight",)
        self.quantized: Int4Weight | None = None

    def take(self, _: str, weight: Tensor, settings: Settings) -> None:
        self.quantized = quantized_weight(weight, settings)
        self.weight = None  # type: ignore[assignment]

    def built(self, where: str, dtype: torch.dtype) -> Int4Linear:
        if self.quantized is None:
            raise _missing(where, "weight")
        return _linear(self.quantized, self.bias, dtype)


class _ArrivingExperts(nn.Module):
    """Experts that wait for their 16-bit weights."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.count, self.gate = len(experts.down_proj), Gate.of(experts)
        self.transposed = flag(experts, "is_transposed")
        self.biases = tuple(biases_of(experts))
        self.awaited = ("gate_up_proj" if flag(experts, "has_gate") else "up_proj", "down_proj")
        self.quantized: dict[str, Int4Weight] = {}
        for name in (*self.awaited, *self.biases):
            self.register_parameter(name, getattr(experts, name))

    def take(self, name: str, weight: Tensor, settings: Settings) -> None:
        weight = weight.transpose(1, 2) if self.transposed else weight
        self.quantized[name] = quantized_matrices(weight, settings)
        setattr(self, name, None)

    def built(self, where: str, dtype: torch.dtype) -> Int4Experts:
        for name in self.awaited:
            if name not in self.quantized:
                raise _missing(where, name)
        first, last = (self.quantized[name] for name in self.awaited)
        return _experts(self, first, last, dtype)


def _missing(where: str, name: str) -> PatchError:
    return PatchError(
        f"{where}.{name} is missing from the checkpoint",
        fix="load the checkpoint that belongs to this model's config",
    )


def _linear(weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype) -> Int4Linear:
    return Int4Linear.from_packed(weight, None if bias is None else bias.detach().to(dtype))


def _experts(waiting: Any, first: Int4Weight, last: Int4Weight, dtype: torch.dtype) -> Int4Experts:
    biases = {name: getattr(waiting, name).detach().to(dtype) for name in waiting.biases}
    return Int4Experts(first, last, waiting.count, biases, waiting.gate)


_ARRIVING = (_Arriving, _ArrivingExperts)
_STORED = (_Stored, _StoredExperts)


class _Quantize(ConversionOps):
    """A 16-bit weight, at the moment it is read."""

    def __init__(self, config: Int4Config) -> None:
        self.config = config

    def convert(self, input_dict: dict[str, Any], *_: Any, **given: Any) -> dict[str, Any]:
        model: nn.Module = given["model"]
        missing_keys: set[str] | None = given.get("missing_keys")
        rest = {}
        for name, value in input_dict.items():
            path, own = name.rpartition(".")[::2]
            module: Any = model.get_submodule(path)
            if not isinstance(module, _ARRIVING) or own not in module.awaited:
                rest[name] = value
                continue
            value = value[0] if isinstance(value, list) else value
            module.take(own, value, Settings.of(self.config))
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
        form, entries = format_of(config), _entries(files)
        if isinstance(form, Experts):
            made = mxfp4.stored(model, entries, _renaming(model))
            if not made:
                raise _without_codes(form, "*_blocks")
        else:
            self.form, self.declared = form, Declared.by(config)
            made = self._stored(model, form, entries)
        for where, module in made.items():
            model.set_submodule(where, module)
            untie(model, where)

    def _stored(
        self, model: Any, form: Format, entries: Mapping[str, _Entry]
    ) -> dict[str, nn.Module]:
        of_experts = places(model)
        layers = _layers(model, form, entries, of_experts)
        if not layers:
            raise _without_codes(form, f"*.{form.codes.name}")
        made: dict[str, nn.Module] = {}
        for path, several in of_experts.items():
            for one in several:
                if any(name in layers for name in (*one.gate_up.layers, *one.down.layers)):
                    found = _expert_layers(path, one, form, layers, self.declared)
                    made[path] = _StoredExperts(path, model.get_submodule(path), one, found)
        for where, tensors in layers.items():
            linear = model.get_submodule(where)
            sizes = linear.in_features, linear.out_features
            check_shapes(where, form, tensors, *sizes, self.declared)
            made[where] = _Stored.of(linear, tensors)
        return made

    def _await(self, model: Any) -> None:
        config = self.config
        keep = (*config.modules_to_not_convert, *heads(model))
        reasons = {}
        for name, linear in plain_linears(model):
            reasons[name] = why_kept(name, linear, config.group_size, keep)
            if not reasons[name]:
                model.set_submodule(name, _Arriving(linear))
        kept = []
        for name, module in experts(model):
            reason = why_experts_kept(name, module, Settings.of(config))
            if not reason:
                model.set_submodule(name, _ArrivingExperts(module))
            elif "modules_to_not_convert" not in reason:
                kept.append((name, reason))
        if kept:
            name, reason = kept[0]
            warn(f"flexops: {len(kept)} modules of experts keep 16 bits, such as {name}: {reason}")
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
        within = tuple(
            f"{name}." for name, one in model.named_modules() if isinstance(one, _StoredExperts)
        )
        waiting = [
            name
            for name, one in model.named_modules()
            if isinstance(one, (*_STORED, *_ARRIVING, mxfp4.StoredExperts))
            and not name.startswith(within)
        ]
        for name in waiting:  # by name, so that each layer's tensors are freed once it is replaced
            module: Any = model.get_submodule(name)
            if isinstance(module, _STORED):
                assert self.form is not None
                made: nn.Module = module.built(name, self.form, self.declared, dtype)
            else:
                made = module.built(name, dtype)
            model.set_submodule(name, made)
            del module
        if self.config.head and not self.pre_quantized:
            quantize_head(Replacements(model), Settings.of(self.config))
        adopt(model)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        path, own = param_name.rpartition(".")[::2]
        module = model.get_submodule(path)
        return isinstance(module, _ARRIVING) and own in module.awaited

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return 0.5 + 4 / self.config.group_size
        size: float = super().param_element_size(model, param_name, param)
        return size

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        return anchored(weight_conversions) if self.pre_quantized else weight_conversions

    def get_quantize_ops(self) -> _Quantize:
        return _Quantize(self.config)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, str]]:
        """What ``save_pretrained`` writes."""
        if getattr(model, "peft_config", None):  # then adapters alone are saved
            return None, {}
        adopt(model)
        if mxfp4.of_model(model):
            return _state_of_mxfp4(model), {}
        of_experts = _written(model)
        state, form = model.state_dict(), saved_format(model, _are_fused(of_experts))
        for name, module in model.named_modules():
            if isinstance(module, Int4Linear):
                weights = {"": (module.weight, [name])}
            elif isinstance(module, Int4Experts):
                one = of_experts[name]
                weights = {"gate_up_": (module.gate_up, one.gate_up.layers),
                           "down_": (module.down, one.down.layers)}  # fmt: skip
            else:
                continue
            for prefix, (weight, names) in weights.items():
                for part in ("packed", "scales", "zeros"):
                    state.pop(f"{name}.{prefix}{part}", None)
                state |= saved_tensors(weight, form, names)
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
    model: Any,
    form: Format,
    entries: Mapping[str, _Entry],
    of_experts: Mapping[str, list[Places]],
) -> dict[str, dict[str, _Entry]]:
    """The tensors of each layer that has codes, by its name in the model."""
    several = {
        f"{name}.weight": True
        for one in itertools.chain(*of_experts.values())
        for name in (*one.gate_up.layers, *one.down.layers)
    }
    renamed_by, names = _renaming(model, several), {}
    for key in entries:
        stem, _, name = key.rpartition(".")
        if name not in (*form.tensors, "bias") or f"{stem}.{form.codes.name}" not in entries:
            if name in form.tensors:
                raise _unknown(form, key, f"there is no {stem}.{form.codes.name}, its codes")
            continue
        if stem not in names:
            renamed = renamed_by(f"{stem}.weight")
            path = renamed.removesuffix(".weight")
            if renamed not in several and not _is_linear(model, path):
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


def _renaming(model: Any, more: Mapping[str, Any] = {}) -> Callable[[str], str]:
    """What gives a tensor of a checkpoint its name in the model. ``more``: names that the model has
    beside those of its state dict."""
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    present = {**model.state_dict(), **more}

    def renamed(key: str) -> str:
        name: str = rename_source_key(key, renamings, [], model.base_model_prefix, present)[0]
        return name

    return renamed


def _expert_layers(
    path: str,
    stored: Places,
    form: Format,
    layers: dict[str, dict[str, _Entry]],
    declared: Declared,
) -> dict[str, dict[str, _Entry]]:
    """Take the tensors of a module of experts out of ``layers``, and check them."""
    taken = {}
    for product in (stored.gate_up, stored.down):
        kinds = {}
        for name in product.layers:
            if name not in layers:
                raise _missing(name, form.codes.name)
            found = taken[name] = layers.pop(name)
            check_shapes(name, form, found, product.columns, product.rows, declared)
            if "bias" in found:
                raise _unknown(form, f"{name}.bias", "single experts of this model have no biases")
            kinds[found[form.scales[0]], form.zeros_name in found] = name
        if len(kinds) > 1:
            first, other = list(kinds.items())[:2]
            raise PatchError(
                f"{path} has experts whose scales or zero points differ in shape or dtype",
                found="; ".join(
                    f"{name}: {list(shape)}, {dtype}, {'with' if zeros else 'no'} zero points"
                    for ((shape, dtype), zeros), name in (first, other)
                ),
                required="the same of all experts, of gates and of ups",
                fix="quantize the model again, with one scheme for all experts",
            )
    return taken


def _is_linear(model: Any, path: str) -> bool:
    try:
        return type(model.get_submodule(path)) is nn.Linear
    except AttributeError:
        return False


def _without_codes(form: Format | Experts, names: str) -> PatchError:
    return PatchError(
        f"the checkpoint has no layer in {form.name}, which its config names",
        required=f"tensors named {names}",
        fix="remove quantization_config from its config.json if its weights have 16 bits",
    )


def _unknown(form: Format, key: str, reason: str) -> PatchError:
    return PatchError(
        f"flexops cannot place {key} of this {form.name} checkpoint",
        found=reason,
        required="codes of linear layers, or of all experts of a mixture",
        fix="download the checkpoint again, or load it without Int4Config",
    )


# ---- registration ----


def adopt(model: Any) -> None:
    """Have ``save_pretrained`` write the 4-bit layers of a model, or of the model inside of a
    wrapper."""
    model = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), None)
    if model is None:
        return
    config, before = Int4Config(), getattr(model.config, "quantization_config", None)
    config.stored = _saved_config(model, getattr(before, "stored", None))
    model.config.quantization_config = config
    if not isinstance(getattr(model, "hf_quantizer", None), Int4Quantizer):
        model.hf_quantizer = Int4Quantizer(config)
    model.quantization_method, model.is_quantized = METHOD, True


def _saved_config(model: Any, before: Any) -> dict[str, Any]:
    if mxfp4.of_model(model) and not _others(model):
        return mxfp4.saved_config(before)
    of_experts = _written(model)
    kept = _routers(model) if of_experts else []
    kept += [inside(name) for name, _ in experts(model)]
    return saved_config(model, kept, _are_fused(of_experts))


def _others(model: Any) -> list[str]:
    """Names of 4-bit layers that have no place in an MXFP4 checkpoint."""
    return [
        name
        for name, one in model.named_modules()
        if isinstance(one, Int4Linear) or (isinstance(one, Int4Experts) and not one.mxfp4)
    ]


def _state_of_mxfp4(model: Any) -> dict[str, Tensor]:
    others = _others(model)
    if others:
        raise PatchError(
            f"no format of checkpoints has experts in {MXFP4.name} and other layers in 4 bits",
            found=f"{len(others)} other layers in 4 bits, such as {others[0]}",
            fix="load the checkpoint again and save it before flexops.patch(model,"
            ' weights="int4"), which quantizes the other layers each time',
        )
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, Int4Experts):
            for key, _ in module.named_buffers():
                state.pop(f"{name}.{key}")
            state |= {f"{name}.{key}": one for key, one in mxfp4.saved_tensors(module).items()}
    return state


def _written(model: Any) -> dict[str, Places]:
    """The layers that are written for each module of experts."""
    return {
        name: several[0]
        for name, several in places(model).items()
        if isinstance(model.get_submodule(name), Int4Experts)
    }


def _are_fused(of_experts: Mapping[str, Places]) -> bool:
    return any(one.fused for one in of_experts.values())


def _routers(model: Any) -> list[str]:
    """Names in a checkpoint, for other software, where routers are linear layers."""
    weights = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ROUTERS
        and isinstance(module._parameters.get("weight"), Tensor)
    }
    return [name.removesuffix(".weight") for name in revert_weight_conversion(model, weights)]


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
