"""4-bit linear layers in a model: those that other libraries built become
:class:`flexops.nn.Int4Linear`, and plain ones are quantized on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchError
from ..nn import Int4Linear
from ..nn.linears import DTYPES, is_bare
from ..ops.int4_linear import GROUP_SIZES, Int4Weight, int4_codes, pack_int4, quantize_int4
from ..report import Row
from .formats import FORMATS, OWN, WRITTEN, Format, Words, weight_of

OPERATOR = "int4_linear"
WRITTEN_AS = "pack-quantized"
_ROUTERS = frozenset(("router", "gate", "shared_expert_gate"))
EXPERTS = "its matrices of several experts are one parameter, and keep 16 bits"
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


def _unsupported(module: nn.Module) -> str:
    """Why a layer of these libraries stays."""
    if _name(module).startswith(_LIBRARIES) and hasattr(module, "qweight"):
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
            _format_of(module) is not None or _unsupported(module)
            for module in self.model.modules()
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
        form, reason = _format_of(module), _unsupported(module)
        if form is None and not reason:
            continue
        if form is not None and not name:
            reason = "it is the whole model: put it into another module"
        elif form is not None:
            try:
                replacements.put(name, _converted(name, module, form, dtype))
            except PatchError as error:
                reason = " ".join(str(error).split())
        yield Row(type(module).__name__, 1, OPERATOR, not reason, reason)
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
    for module in experts(model):
        yield Row(type(module).__name__, 1, OPERATOR, False, EXPERTS)


def experts(model: nn.Module) -> list[nn.Module]:
    """Modules with matrices of several experts in one parameter."""
    return [
        module
        for module in model.modules()
        if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
        and any(
            one is not None and one.dim() == 3 and one.shape[0] > 1
            for one in module._parameters.values()
        )
    ]


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
    if any(name == one or name.endswith(f".{one}") for one in keep):
        return "an embedding, a head or named in modules_to_not_convert: its weight keeps 16 bits"
    if _ROUTERS.intersection(name.split(".")):
        return "it chooses experts: its weight keeps 16 bits"
    if not is_bare(module) or module.weight.dtype not in DTYPES:
        return "it has hooks, another forward, or a weight that is no parameter of 16 or 32 bits"
    if module.in_features % group_size:
        return f"its {module.in_features} inputs are not a multiple of group_size={group_size}"
    return ""


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


def saved_tensors(module: Int4Linear, form: Format) -> dict[str, Tensor]:
    """A layer's weight in a format that flexops writes."""
    codes, scales, zeros = int4_codes(module.weight)
    written = {
        form.codes.name: form.codes.pack(codes),
        form.scales[0]: scales,
        "weight_shape": torch.tensor(module.weight.shape),
    }
    if zeros is not None and isinstance(form.zeros, Words):
        written[form.zeros_name] = form.zeros.pack(zeros.to(torch.uint8))
    elif zeros is not None and module.zeros is not None:
        written[form.zeros_name] = zeros.to(module.zeros.dtype)
    return written


def saved_format(model: nn.Module) -> Format:
    """:data:`WRITTEN`, unless a zero point lies between two codes."""
    zeros = [one.zeros for one in model.modules() if isinstance(one, Int4Linear)]
    known = [one for one in zeros if one is not None and not one.is_meta]
    whole = all(bool(((one == one.round()) & (one >= 0) & (one <= 15)).all()) for one in known)
    return WRITTEN if whole else OWN


def saved_config(model: nn.Module) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint with the 4-bit layers of a model, in the words of
    compressed-tensors."""
    kinds: dict[tuple[int, bool], list[str]] = {}
    ignored = []
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            kinds.setdefault((module.group_size, module.zeros is None), []).append(name)
        elif isinstance(module, nn.Linear):
            ignored.append(name)
    groups = {}
    for index, ((group_size, symmetric), names) in enumerate(sorted(kinds.items())):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else names,
            "format": WRITTEN_AS,
            "weights": {**weights, "symmetric": symmetric, "dynamic": False},
        }
    form = saved_format(model)
    rest = {"version": 1} if form is OWN else {"quantization_status": "compressed"}
    return {
        "quant_method": form.method,
        "format": WRITTEN_AS,
        "config_groups": groups,
        "ignore": ignored,
        **rest,
    }
