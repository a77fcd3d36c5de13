"""4-bit linear layers in a model: those that other libraries built become
:class:`flexops.nn.Int4Linear`, and plain ones are quantized on request."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchError
from ..nn import Int4Experts, Int4Linear
from ..nn.experts import Gate, biases_of, matrices, why_not
from ..nn.experts import quantized as in_parts
from ..nn.linears import DTYPES, REPLACED, function_of, is_bare
from ..ops.int4_linear import GROUP_SIZES, Int4Weight, int4_codes, pack_int4, quantize_int4
from ..report import Row
from .formats import FORMATS, OWN, WRITTEN, Format, Words, weight_of

OPERATOR = "int4_linear"
OF_EXPERTS = "int4_grouped_linear"
WRITTEN_AS = "pack-quantized"
ROUTERS = frozenset(("router", "gate", "shared_expert_gate"))
_BY_NAME = {one.name: one for one in FORMATS}

HOSTS: dict[str, str] = {
    "gptqmodel.nn_modules.qlinear.torch.TorchLinear": "GPTQ",
    "gptqmodel.nn_modules.qlinear.torch.TorchQuantLinear": "GPTQ",
    "gptqmodel.nn_modules.qlinear.tritonv2.TritonV2Linear": "GPTQ",
    "gptqmodel.nn_modules.qlinear.tritonv2.TritonV2QuantLinear": "GPTQ",
    "gptqmodel.nn_modules.qlinear.torch_awq.AwqTorchLinear": "AWQ GEMM",
    "gptqmodel.nn_modules.qlinear.gemm_awq.AwqGEMMLinear": "AWQ GEMM",
    "gptqmodel.nn_modules.qlinear.gemm_awq_triton.AwqGEMMTritonLinear": "AWQ GEMM",
    "auto_gptq.nn_modules.qlinear.qlinear_cuda_old.QuantLinear": "GPTQ",
    "auto_gptq.nn_modules.qlinear.qlinear_cuda.QuantLinear": "GPTQ",
    "auto_gptq.nn_modules.qlinear.qlinear_triton.QuantLinear": "GPTQ",
    "awq.modules.linear.gemm.WQLinear_GEMM": "AWQ GEMM",
}
"""Classes that keep a checkpoint's tensors as they are, and the format. Other classes of these
libraries bring them into the layout of a kernel of theirs."""
_LIBRARIES = ("gptqmodel.nn_modules.", "auto_gptq.nn_modules.", "awq.modules.")
_EXPERTS = "transformers.integrations.mxfp4.Mxfp4GptOssExperts"


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _format_of(module: nn.Module) -> Format | None:
    """The format of a layer that another library built; None: it is no such layer."""
    if isinstance(module, nn.Linear) and hasattr(module, "weight_packed"):
        return _BY_NAME["compressed-tensors pack-quantized"]
    name = HOSTS.get(_name(module))
    # gptqmodel brings zero points to version 2 where its kernel needs them so
    version = getattr(module, "qzero_format", None)
    if name == "GPTQ" and callable(version) and version() == 2:
        name = "GPTQ v2"
    return None if name is None else _BY_NAME[name]


def unsupported(module: nn.Module) -> str:
    """Why a layer of these libraries stays."""
    name = _name(module)
    if name == _EXPERTS or (name.startswith(_LIBRARIES) and hasattr(module, "qweight")):
        return "its weights are in the layout of this class's kernel; load it with Int4Config"
    return ""


def _sizes(module: Any) -> tuple[int, int]:
    """Inputs and outputs; auto-gptq's names are others."""
    return (
        getattr(module, "in_features", None) or module.infeatures,
        getattr(module, "out_features", None) or module.outfeatures,
    )


def _converted(
    where: str, module: nn.Module, form: Format, dtype: torch.dtype | None
) -> Int4Linear:
    tensors = {
        name: tensor for name in form.tensors if (tensor := getattr(module, name, None)) is not None
    }
    bits = getattr(module, "bits", getattr(module, "w_bit", 4))
    if bits != 4:
        raise PatchError(f"{where} has weights of {bits} bits", required="4 bits")
    scheme = getattr(module, "quantization_scheme", None)
    for part in ("input_activations", "output_activations"):
        if getattr(scheme, part, None) is not None:
            raise PatchError(f"{where} quantizes its activations, too", required="weights alone")
    weight = weight_of(where, form, tensors, *_sizes(module))
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return Int4Linear.from_packed(weight, bias if bias is None or dtype is None else bias.to(dtype))


@dataclass(frozen=True)
class Settings:
    """How weights are quantized; see :class:`flexops.patching.Int4Config`."""

    group_size: int = 64
    symmetric: bool = False
    modules_to_not_convert: tuple[str, ...] = ()
    head: bool = False

    @classmethod
    def of(cls, weights: Any) -> Settings:
        """From ``weights=`` of :func:`flexops.patch`."""
        if weights == "int4":
            return cls()
        names = [one.name for one in fields(cls)]
        if not all(hasattr(weights, name) for name in names):
            raise PatchError(
                "flexops.patch does not support these weights",
                found=f"weights={weights!r}",
                required='"int4", or an Int4Config',
                fix='flexops.patch(model, weights="int4")',
            )
        return cls(**{name: getattr(weights, name) for name in names})


class Replacements:
    """Modules of a model that others take the place of, and a way back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._originals: list[tuple[str, nn.Module]] = []
        self._replaced = False
        self._tied: Callable[[], None] | None = None

    def put(self, name: str, module: nn.Module) -> None:
        self._replaced = True
        self._originals.append((name, self.model.get_submodule(name)))
        self.model.set_submodule(name, module.train(self.model.training))

    def untie(self, name: str) -> None:
        """A layer that no longer shares the weight of another one."""
        self._tied = untie(self.model, name)

    def decompress(self) -> None:
        """Have compressed-tensors compute the 16-bit weights of the layers that are left. It would
        do so in the first forward pass, where it cannot replace the forwards of patched modules.
        """
        compressor = getattr(getattr(self.model, "hf_quantizer", None), "compressor", None)
        if compressor is not None and hasattr(self.model, "ct_decompress_hook"):
            compressor.decompress_model(self.model)
            self._originals.clear()  # a compressed layer could not be put back

    def undo(self) -> None:
        for name, module in reversed(self._originals):
            self.model.set_submodule(name, module)
        self._originals.clear()
        if self._tied is not None:
            self._tied()

    def finish(self) -> bool:
        """Nothing can fail from here on. Returns whether all 4-bit layers are of flexops now, and
        some are new."""
        left = any(
            _format_of(module) is not None or unsupported(module) for module in self.model.modules()
        )
        if not self._replaced or left:
            return False
        for module in self.model.modules():
            # compressed-tensors would compute 16-bit weights in the first forward pass
            hook = module.__dict__.pop("ct_decompress_hook", None)
            if hook is not None:
                hook.remove()
        return True


def convert(replacements: Replacements) -> Iterator[Row]:
    """Layers of 4 bits that other libraries built; and those of ours, which stay."""
    model = replacements.model
    dtype: Any = getattr(model, "dtype", None)  # of a model of transformers
    for name, module in list(model.named_modules()):
        if isinstance(module, Int4Linear):
            yield Row("Int4Linear", 1, OPERATOR, True, "had 4 bits before")
            continue
        if isinstance(module, Int4Experts):
            yield Row("Int4Experts", 1, OF_EXPERTS, True, "had 4 bits before")
            continue
        form, reason = _format_of(module), unsupported(module)
        if form is None and not reason:
            continue
        if form is not None and not name:
            reason = "it is the whole model: put it into another module"
        elif form is not None:
            try:
                replacements.put(name, _converted(name, module, form, dtype))
            except PatchError as error:
                reason = " ".join(str(error).split())
        operator = OF_EXPERTS if _name(module) == _EXPERTS else OPERATOR
        yield Row(type(module).__name__, 1, operator, not reason, reason)
    if any(hasattr(module, "quantization_scheme") for module in model.modules()):
        replacements.decompress()


def quantize(replacements: Replacements, settings: Settings) -> Iterator[Row]:
    """Plain linear layers, except those to keep.

    The 16-bit weights live until all layers are quantized, so that an error leaves the model as it
    was.
    """
    check_group_size(settings.group_size)
    model = replacements.model
    keep = (*settings.modules_to_not_convert, *heads(model))
    if settings.head:
        quantize_head(replacements, settings)
        yield Row("Linear", 1, OPERATOR, True, "the output layer")
    for name, module in plain_linears(model):
        reason = why_kept(name, module, settings.group_size, keep)
        if not reason:
            replacements.put(name, quantized(module, settings))
        yield Row("Linear", 1, OPERATOR, not reason, reason)
    for name, module in experts(model):
        reason = why_experts_kept(name, module, settings)
        if not reason:
            replacements.put(name, quantized_experts(module, settings))
        yield Row(type(module).__name__, 1, OF_EXPERTS, not reason, reason)


def experts(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and modules, of those with matrices of several experts in one parameter."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
        and any(
            one is not None and one.dim() == 3 and one.shape[0] > 1
            for one in module._parameters.values()
        )
    ]


def why_experts_kept(name: str, module: Any, settings: Settings) -> str:
    """Why experts keep their 16-bit weights; "" if they need not."""
    if is_named(name, settings.modules_to_not_convert):
        return "it is named in modules_to_not_convert: its weights keep 16 bits"
    if name.endswith(".base_layer"):
        return "it has adapters of its weights, which require 16 bits"
    if not name:
        return "it is the whole model: put it into another module"
    if "forward" in module.__dict__ and getattr(function_of(module), "__name__", "") != "experts":
        return REPLACED
    return why_not(module, settings.group_size)


def quantized_experts(module: Any, settings: Settings) -> Int4Experts:
    first, last = (quantized_matrices(one, settings) for one in matrices(module))
    return Int4Experts(first, last, len(module.down_proj), biases_of(module), Gate.of(module))


def quantized_matrices(weight: Tensor, settings: Settings) -> Int4Weight:
    """``[experts, rows, columns]``, in 4 bits."""
    return in_parts(weight, functools.partial(quantized_weight, settings=settings))


def quantized(linear: nn.Linear, settings: Settings) -> Int4Linear:
    return Int4Linear.from_packed(quantized_weight(linear.weight, settings), linear.bias)


def quantized_weight(weight: Tensor, settings: Settings) -> Int4Weight:
    """As :func:`flexops.quantize_int4`, with whole zero points, which other software reads, too."""
    made = quantize_int4(weight, settings.group_size, settings.symmetric)
    if made.zeros is None or not made.k:
        return made
    _, scales, zeros = int4_codes(made)
    assert zeros is not None
    zeros = zeros.round_().clamp_(0, 15)
    codes = weight.detach().float().unflatten(1, (-1, settings.group_size))
    codes = (codes / scales.float().unsqueeze(-1)).add_(zeros.unsqueeze(-1)).round_().clamp_(0, 15)
    return pack_int4(
        codes.nan_to_num_(0).to(torch.uint8).flatten(1),
        scales,
        zeros.nan_to_num_(0),
        group_size=settings.group_size,
    )


def quantize_head(replacements: Replacements, settings: Settings) -> None:
    """The output layer, too. It no longer shares the embedding's weight."""
    model: Any = replacements.model
    output: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    head = output() if callable(output) else None
    name = next((name for name, module in model.named_modules() if module is head), "")
    if type(head) is not nn.Linear or not name:
        raise PatchError(
            "head=True quantizes the output layer",
            found=f"{type(model).__name__} with {type(head).__name__} as its output layer",
            required="a plain linear layer",
            fix="head=False",
        )
    reason = why_kept(name, head, settings.group_size, ())
    if reason:
        raise PatchError(f"{name} cannot be quantized", found=reason, fix="head=False")
    replacements.put(name, quantized(head, settings))
    replacements.untie(name)


def untie(model: Any, name: str) -> Callable[[], None]:
    """Have a model of transformers forget that a layer shares the weight of another module.
    Returns what restores that."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    key = f"{name}.weight"
    left = {one: other for one, other in tied.items() if key not in (one, other)}
    configs = [model.config, model.config.get_text_config()] if len(left) < len(tied) else []
    before = [one.tie_word_embeddings for one in configs]

    def restore() -> None:
        if configs:
            model.all_tied_weights_keys = tied
        for one, value in zip(configs, before, strict=True):
            one.tie_word_embeddings = value

    if configs:
        model.all_tied_weights_keys = left
    for one in configs:
        one.tie_word_embeddings = False
    return restore


def plain_linears(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and layers, without those of adapters, of which only the base layer counts."""
    adapted = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name
        and not any(name.startswith(f"{one}.") and name != f"{one}.base_layer" for one in adapted)
    ]


def why_kept(name: str, module: Any, group_size: int, keep: tuple[str, ...]) -> str:
    """Why a linear layer keeps its 16-bit weight; "" if it need not."""
    if is_named(name, keep):
        return "an embedding, a head or named in modules_to_not_convert: its weight keeps 16 bits"
    if ROUTERS.intersection(name.split(".")):
        return "it chooses experts: its weight keeps 16 bits"
    if not is_bare(module) or module.weight.dtype not in DTYPES:
        return "it has hooks, another forward, or a weight that is no parameter of 16 or 32 bits"
    if module.in_features % group_size:
        return f"its {module.in_features} inputs are not a multiple of group_size={group_size}"
    return ""


def is_named(name: str, names: tuple[str, ...]) -> bool:
    """Whether a module's name is one of these, or ends in one."""
    return any(name == one or name.endswith(f".{one}") for one in names)


def heads(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers that share their weight with another module, and of output layers."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            holders.setdefault(id(weight), []).append(name)
    shared = [name for names in holders.values() if len(names) > 1 for name in names]
    output: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    head = output() if callable(output) else None
    return (*shared, *(name for name, module in model.named_modules() if module is head and name))


def check_group_size(group_size: int) -> None:
    if group_size not in GROUP_SIZES:
        raise PatchError(
            "no kernel of flexops has this group size",
            found=f"group_size={group_size}",
            required=f"one of {', '.join(map(str, GROUP_SIZES))}",
            fix="Int4Config(group_size=64)",
        )


# ---- checkpoints that flexops writes ----


def saved_tensors(weight: Int4Weight, form: Format, names: list[str]) -> dict[str, Tensor]:
    """A weight in a format that flexops writes: the same number of its rows under each name."""
    codes, scales, zeros = int4_codes(weight)
    written: dict[str, Tensor] = {}
    rows = weight.n // len(names)
    for index, name in enumerate(names):
        some = slice(index * rows, (index + 1) * rows)
        tensors = {
            form.codes.name: form.codes.pack(codes[some]),
            form.scales[0]: scales[some].clone(),
            "weight_shape": torch.tensor([rows, weight.k]),
        }
        if zeros is not None and isinstance(form.zeros, Words):
            tensors[form.zeros_name] = form.zeros.pack(zeros[some].to(torch.uint8))
        elif zeros is not None and weight.zeros is not None:
            tensors[form.zeros_name] = zeros[some].to(weight.zeros.dtype).clone()
        written |= {f"{name}.{key}": one for key, one in tensors.items()}
    return written


def saved_format(model: nn.Module, fused: bool = False) -> Format:
    """:data:`WRITTEN`, unless a zero point lies between two codes, or experts are ``fused``."""
    modules = [one for one in model.modules() if isinstance(one, (Int4Linear, Int4Experts))]
    zeros = [
        zero for one in modules for name, zero in one.named_buffers() if name.endswith("zeros")
    ]
    known = [one for one in zeros if not one.is_meta]
    whole = all(bool(((one == one.round()) & (one >= 0) & (one <= 15)).all()) for one in known)
    return WRITTEN if whole and not fused else OWN


def saved_config(model: nn.Module, kept: list[str], fused: bool) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint with the 4-bit layers of a model, in the words of
    compressed-tensors. ``kept``: names of what has 16 bits beside linear layers; ``fused``: see
    :func:`saved_format`."""
    kinds: dict[tuple[int, bool], list[str]] = {}
    ignored = list(kept)
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            kinds.setdefault((module.group_size, module.zeros is None), []).append(name)
        elif isinstance(module, Int4Experts) and not module.mxfp4:
            for one in (module.gate_up, module.down):
                kind = one.group_size, one.zeros is None
                kinds.setdefault(kind, []).append(inside(name))
        elif isinstance(module, nn.Linear):
            ignored.append(name)
    groups = {}
    for index, ((group_size, symmetric), names) in enumerate(sorted(kinds.items())):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else list(dict.fromkeys(names)),
            "format": WRITTEN_AS,
            "weights": {**weights, "symmetric": symmetric, "dynamic": False},
        }
    form = saved_format(model, fused)
    rest = {"version": 1} if form is OWN else {"quantization_status": "compressed"}
    return {
        "quant_method": form.method,
        "format": WRITTEN_AS,
        "config_groups": groups,
        "ignore": ignored,
        **rest,
    }


def inside(name: str) -> str:
    """In the words of compressed-tensors: all layers of a module."""
    return f"re:{re.escape(name)}\\..*"
