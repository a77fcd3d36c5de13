"""How ``gptq`` and ``awq`` beside this file were made: tiny Llama models, packed by the libraries
that define the formats, with the hashes of what these libraries dequantize them to.

    pip download --no-deps --no-binary autoawq autoawq==0.2.9 && tar xf autoawq-0.2.9.tar.gz
    pip download --no-deps auto-gptq==0.7.1 && unzip auto_gptq-0.7.1-*.whl -d auto_gptq-0.7.1
    python tests/golden/int4/make.py autoawq-0.2.9 auto_gptq-0.7.1

Neither library imports with transformers 5, so that their files of linear layers are loaded alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
GROUP = 32
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 17,
    "tie_word_embeddings": True,
    "attention_bias": True,
}


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def libraries(awq: Path, gptq: Path) -> tuple[Any, Any, Any]:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules["awq.utils.utils"] = utils = types.ModuleType("awq.utils.utils")
    utils.get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    load("awq.utils.module", awq / "awq/utils/module.py")
    packing = load("awq.utils.packing_utils", awq / "awq/utils/packing_utils.py")
    linear = load("awq.modules.linear.gemm", awq / "awq/modules/linear/gemm.py")
    old = load("qlinear_cuda_old", gptq / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py")
    return packing.dequantize_gemm, linear.WQLinear_GEMM, old.QuantLinear


def parameters(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points from 1 to 15, ``[outputs, groups]``."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=-1e-3), groups.amax(-1).clamp(min=1e-3)
    zeros = (-low / (high - low) * 15).round().clamp(1, 15)
    scales = torch.maximum(-low / zeros, high / (15 - zeros).clamp(min=0.1))
    return scales.clamp(max=0.1).half().float(), zeros


def packed(kind: str, linear: nn.Linear, made: tuple[Any, Any, Any]) -> tuple[Any, Tensor]:
    """The library's module, and its dequantized weight."""
    dequantize, awq_class, gptq_class = made
    scales, zeros = parameters(linear.weight.detach())
    weight = linear.weight.detach().float()
    spread = scales.repeat_interleave(GROUP, 1)
    shift = zeros.repeat_interleave(GROUP, 1)
    codes = (weight / spread + shift).round().clamp(0, 15)
    linear.weight.data = ((codes - shift) * spread).half()
    if kind == "awq":
        module = awq_class.from_linear(
            linear, 4, GROUP, scales=scales.t().contiguous().half(), zeros=zeros.t().contiguous()
        )
        return module, dequantize(module.qweight, module.qzeros, module.scales, 4, GROUP).t()
    module = gptq_class(4, GROUP, linear.in_features, linear.out_features, True)
    module.pack(linear, scales.half(), zeros, None)
    bias, module.bias = module.bias, None
    dense = module(torch.eye(linear.in_features, dtype=torch.float16)).t()
    module.bias = bias
    return module, dense


CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False,
             "sym": False, "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": None},
}  # fmt: skip


def main(awq: str, gptq: str) -> None:
    made = libraries(Path(awq), Path(gptq))
    for kind, config in CONFIGS.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).half()
        nn.init.normal_(model.model.embed_tokens.weight)
        state = {
            name: one.detach().contiguous()
            for name, one in model.state_dict().items()
            if not name.endswith("_proj.weight") and name != "lm_head.weight"
        }
        hashes = {}
        for name, module in model.model.named_modules(prefix="model"):
            if isinstance(module, nn.Linear):
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=0.1)
                quantized, dense = packed(kind, module, made)
                stored = quantized.state_dict()
                if module.bias is None:
                    stored.pop("bias", None)
                state |= {f"{name}.{key}": one.contiguous() for key, one in stored.items()}
                hashes[name] = hashlib.sha256(dense.contiguous().numpy().tobytes()).hexdigest()
        folder = HERE / kind
        folder.mkdir(exist_ok=True)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        described |= {"dtype": "float16", **SIZES, "quantization_config": config}
        (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
        (folder / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
