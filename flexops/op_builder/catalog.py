"""The ops that flexops ships: the one list that AOT, JIT, doctor and the benchmarks walk."""

from __future__ import annotations

from ..errors import FlexopsError
from .spec import OpSpec

CATALOG: tuple[OpSpec, ...] = (
    OpSpec(
        "activation",
        ops=(
            *("bias_gelu", "bias_gelu_backward", "bias_silu", "bias_silu_backward"),
            *("swiglu", "swiglu_backward", "geglu", "geglu_backward"),
        ),
        cpu_sources=("activation/activation_cpu.cpp",),
        cuda_sources=("activation/activation_biased_cuda.cpp", "activation/activation_gated_cuda.cpp"),
    ),
    OpSpec("adagrad", ops=("adagrad_",), cpu_sources=("adagrad/adagrad_cpu.cpp",), cuda_sources=("adagrad/adagrad_cuda.cpp",)),
    OpSpec("adam", ops=("adam_", "adam_copy_"), cpu_sources=("adam/adam_cpu.cpp",), cuda_sources=("adam/adam_cuda.cpp",)),
    OpSpec("adam8bit", ops=("adam8bit_",), cpu_sources=("adam8bit/adam8bit_cpu.cpp",), cuda_sources=("adam8bit/adam8bit_cuda.cpp",)),
    OpSpec(
        "fp8",
        ops=("quantize_fp8", "quantize_fp8_scaled", "dequantize_fp8", "quantize_int8", "dequantize_int8"),
        cpu_sources=("fp8/fp8_cpu.cpp",),
        cuda_sources=("fp8/fp8_cuda.cpp",),
    ),
    OpSpec("grad_norm", ops=("grad_norm", "clip_grads_"), cpu_sources=("grad_norm/grad_norm_cpu.cpp",), cuda_sources=("grad_norm/grad_norm_cuda.cpp",)),
    OpSpec("lamb", ops=("lamb_", "lamb_moments_", "lamb_apply_"), cpu_sources=("lamb/lamb_cpu.cpp",), cuda_sources=("lamb/lamb_cuda.cpp",)),
    OpSpec("lion", ops=("lion_",), cpu_sources=("lion/lion_cpu.cpp",), cuda_sources=("lion/lion_cuda.cpp",)),
    OpSpec("quant", ops=("quantize", "dequantize"), cpu_sources=("quant/quant_cpu.cpp",), cuda_sources=("quant/quant_cuda.cpp",)),
    OpSpec("rope", ops=("rotary_embedding", "rotary_embedding_"), cpu_sources=("rope/rope_cpu.cpp",), cuda_sources=("rope/rope_cuda.cpp",)),
    OpSpec(
        "softmax",
        ops=("scaled_masked_softmax", "causal_softmax", "softmax_backward"),
        cpu_sources=("softmax/softmax_cpu.cpp",),
        cuda_sources=("softmax/softmax_cuda.cpp", "softmax/softmax_backward_cuda.cpp"),
    ),
    OpSpec(
        "cross_entropy",
        ops=("cross_entropy", "cross_entropy_", "cross_entropy_backward", "scale_rows_"),
        cpu_sources=("cross_entropy/cross_entropy_cpu.cpp",),
        cuda_sources=("cross_entropy/cross_entropy_cuda.cpp",),
    ),
    OpSpec(
        "norm",
        ops=(
            *(f"{name}{way}" for name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm") for way in ("", "_plain", "_forward")),
            *("rms_norm_quantized", "add_rms_norm_quantized"),
        ),
        cpu_sources=("norm/norm_cpu.cpp",),
        cuda_sources=("norm/norm_cuda.cpp",),
    ),
    OpSpec(
        "norm_backward",
        ops=("layer_norm_backward", "rms_norm_backward"),
        cpu_sources=("norm_backward/norm_backward_cpu.cpp",),
        cuda_sources=("norm_backward/norm_backward_cuda.cpp",),
    ),
)

def find(name: str) -> OpSpec:
    """The spec called ``name``; raises ``FlexopsError`` naming the ones there are."""
    for spec in CATALOG:
        if spec.name == name:
            return spec
    families = ", ".join(spec.name for spec in CATALOG)
    raise FlexopsError(f"there is no op called {name!r}", required=f"{families}; or an operator of theirs, such as swiglu", fix="flexops build --help")


def select(names: tuple[str, ...]) -> tuple[OpSpec, ...]:
    """The specs of ``names`` (their own, or those of their operators), in catalogue order; no names, or ``all`` (or ``1``), means every op."""
    named = [name for name in names if name not in ("all", "1")]
    wanted = [next((spec for spec in CATALOG if name in spec.ops), None) or find(name) for name in named]
    return tuple(spec for spec in CATALOG if spec in wanted) if named and named == list(names) else CATALOG
