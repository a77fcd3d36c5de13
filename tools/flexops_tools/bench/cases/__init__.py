"""What ``flexops bench ops`` measures: a module for each kind of operator, all listed in
``SOURCES``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from flexops.errors import SettingsError

from .case import Case as Case
from .case import Setup as Setup


class Source(NamedTuple):
    """Where a family's cases come from: ``<module>.<maker>(setup)``; the public functions that they
    are about; and another family that they measure, such as that of gradients."""

    family: str
    module: str
    maker: str
    functions: tuple[str, ...]
    beside: str = ""

    @property
    def families(self) -> tuple[str, ...]:
        return (self.family, self.beside) if self.beside else (self.family,)

    def cases(self, setup: Setup) -> Iterator[Case]:
        maker: Callable[[Setup], Iterator[Case]] = getattr(
            import_module(f".{self.module}", __name__), self.maker
        )
        return maker(setup)


SOURCES: tuple[Source, ...] = (
    Source(
        "norm",
        "norm",
        "norm",
        ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "rms_norm_quantized"),
        "norm_backward",
    ),
    Source(
        "activation",
        "activation",
        "activation",
        ("bias_gelu", "bias_silu", "swiglu", "geglu", "swiglu_linear"),
    ),
    Source("rope", "rope", "rope", ("rotary_embedding",)),
    Source("softmax", "softmax", "softmax", ("scaled_masked_softmax", "causal_softmax")),
    Source("attention", "attention", "attention", ("attention",)),
    Source(
        "cross_entropy", "cross_entropy", "cross_entropy", ("cross_entropy", "linear_cross_entropy")
    ),
    Source("grouped_linear", "experts", "grouped_linear", ("grouped_linear",)),
    Source("experts", "experts", "experts", ("gated_experts",)),
    Source("logprobs", "logprobs", "logprobs", ("logprobs", "linear_logprobs")),
    Source(
        "causal_conv1d", "causal_conv1d", "causal_conv1d", ("causal_conv1d", "causal_conv1d_update")
    ),
    Source("gated_norm", "causal_conv1d", "gated_norm", ("gated_rms_norm",)),
    Source(
        "state_scan",
        "state_scan",
        "state_scan",
        (
            "gated_delta_rule",
            "gated_delta_rule_update",
            "mamba2_scan",
            "mamba2_scan_update",
        ),
        "state_chunks",
    ),
    Source(
        "kvcache_attention", "kvcache_attention", "kvcache_attention", ("attention_with_kvcache",)
    ),
    Source("few_rows", "few_rows", "few_rows", ("few_rows_linear",)),
    Source("few_experts", "experts", "few_experts", ()),
    Source("int4_grouped", "experts", "int4_grouped", ()),
    Source("few_rows_chain", "generation", "few_rows_chain", ()),
    Source("next_token", "generation", "next_token", ()),
    Source("adam", "optim", "adam", ("AdamW",)),
    Source("adam8bit", "optim", "adam8bit", ("AdamW8bit",)),
    Source("lion", "optim", "lion", ("Lion",)),
    Source("muon", "optim", "muon", ("Muon",)),
    Source("adagrad", "optim", "adagrad", ("Adagrad",)),
    Source("lamb", "optim", "lamb", ("LAMB",)),
    Source("grad_norm", "optim", "grad_norm", ("clip_grad_norm_",)),
    Source("quant", "quant", "quant", ("quantize", "dequantize")),
    Source("int4_linear", "int4_linear", "int4_linear", ("int4_linear",), "int4_few_rows"),
    Source(
        "fp8", "fp8", "fp8", ("quantize_fp8", "dequantize_fp8", "quantize_int8", "dequantize_int8")
    ),
    Source("fp8_linear", "fp8", "fp8_linear", ("fp8_linear",)),
)


def sources(ops: Sequence[str]) -> tuple[Source, ...]:
    """The sources for the families and functions called ``ops``; all if there are none.

    Raises:
        FlexopsError: a name is neither.
    """
    known = {name for source in SOURCES for name in (source.family, *source.functions)}
    unknown = sorted(set(ops) - known)
    if unknown:
        raise SettingsError(
            f"no benchmark for {', '.join(unknown)}",
            required=", ".join(sorted(known)),
            fix="flexops bench ops --help",
        )
    return tuple(
        source for source in SOURCES if not ops or set(ops) & {source.family, *source.functions}
    )


def contenders_of(op: str, setup: Setup) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Each case of a family or function, by name and part, and its contenders, for ``flexops
    profile``. Raises ``SettingsError`` for an unknown op."""
    for source in sources([op]):
        for case in source.cases(setup):
            if op in (source.family, case.function):
                yield f"{case.name}, {case.part}", case.contenders
