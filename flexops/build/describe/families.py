"""flexops' own families, each declared once: what its folder in ``csrc`` is built for, and its
operators, as other projects declare theirs by ``builder.Library.op``.

From here come bindings, the checks of arguments, fake kernels (``ops/_declared.py``), and
every list of operators. It stands here, not with the references in ``flexops/ops``, because a build
must know without importing torch. Nothing is parsed before it is asked for
(``schema.signature_of``).
"""

from __future__ import annotations

from typing import Any

from .declaration import Declared, Output, Rows
from .spec import OpSpec

_LISTS = (7, 0)
"""Steps on lists of tensors take 31 KiB of parameters (csrc/common/multi_tensor.cuh), where older
GPUs have 4."""


def _op(schema: str, *, gradient: bool = False, hidden: bool = False, **said: Any) -> Declared:
    """An operator whose binding, checks and fake kernel are made from the declaration; arguments as
    for ``builder.Library.op``. ``split`` is ``host`` unless given; with ``plain`` it is registered
    as ``<name>_plain``, too. For ``gradient`` and ``hidden`` see ``ops/_register.py``."""
    return Declared(schema, said, gradient, hidden)


def _family(name: str, *declared: Declared, **fields: Any) -> OpSpec:
    return OpSpec(name, declared=declared, **fields)


_FLOATS = ("float32", "float16", "bfloat16")
_ROOM = Output("16777216", "uint8")  # for what blocks of fp8_linear's kernels find in columns

# ---- activation ----

_BIASED: dict[str, Any] = {
    "shapes": {"bias": "x[-1]"},
    "dtypes": {"bias": _FLOATS},
    "strided": {"x": "rows", "bias": "aligned"},
    "plain": True,
    "gradient": True,
}
_BIASED_BACKWARD: dict[str, Any] = {
    "dtypes": {"x": _FLOATS, "grad": "x", "bias": _FLOATS},
    "shapes": {"grad": "x", "bias": "x[-1]"},
    "strided": {"x": "rows", "grad": "rows", "bias": "aligned"},
    "outputs": (Output("x", "x"), Output("x[-1]", "bias", when="bias_gradient")),
}
_GATED: dict[str, Any] = {
    "shapes": {"up": "gate"},
    "strided": {"gate": "rows", "up": "rows"},
    "outputs": (Output("gate", when="up", otherwise="gate[:-1], gate[-1] // 2"),),
    "plain": True,
    "gradient": True,
}
_GATED_BACKWARD: dict[str, Any] = {
    "dtypes": {"gate": _FLOATS, "grad": "gate", "up": "gate"},
    "shapes": {"up": "gate"},
    "strided": {"grad": "rows", "gate": "rows", "up": "rows"},
    "outputs": (Output("gate"), Output("gate", when="up")),
}
_PAIR = "-> (Tensor, Tensor)"

# ---- optimizers ----

_NUMBERS = ("lr_tensor", "grad_scale", "found_inf")
_SCALED = (("grads", "grad_scale"),)
"""Gradients are divided by a scale where they lie, if there is one."""

_ADAM_LISTS = (
    "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs,"
    " Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps"
)
_ADAM_NUMBERS = (
    "float lr, float beta1, float beta2, float eps, float weight_decay, bool amsgrad, bool"
    " maximize, bool decoupled, Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor?"
    " found_inf=None, bool stochastic=False, Tensor? grad_factor=None"
)
_ADAM_ROWS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
_LAMB_ROWS = Rows(("params", "grads", "exp_avgs", "exp_avg_sqs"), "state_steps", (), _SCALED)

# ---- 4-bit weights ----

_INT4, _INT4_SIZES = "Tensor packed, Tensor scales, Tensor? zeros", "int n, int k, int group_size"
_INT4_DTYPES: dict[str, Any] = {"packed": ("uint8",), "scales": _FLOATS, "zeros": _FLOATS}

# ---- softmax and losses ----

_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, int reduction"
_LOSSES: dict[str, Any] = {
    "dtypes": {"target": "int64"},
    "shapes": {"target": "logits[0]"},
    "strided": {"logits": "rows"},
    "outputs": (
        Output("[]", "float32", when="reduction", otherwise="logits[0]"),
        Output("logits[0] * 3 + 1", "float32", when="reduction", otherwise="logits[0] * 2"),
    ),
}

# ---- mixtures of experts ----

_HALVES = ("bfloat16", "float16")
_GROUPED: dict[str, Any] = {
    "dtypes": {"x": _HALVES, "weight": "x", "offsets": "int32"},
    "shapes": {"offsets": "weight[0]"},
    "strided": {"x": "aligned", "weight": "aligned"},
}
_STATE_SCAN = (
    "Tensor(a!) state, Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor rate, Tensor? a, Tensor?"
    " bias, Tensor? skip, int gates, bool delta, bool normalize, float scale, float low, float"
    " high) -> Tensor"
)


def _state_scan(values: Any) -> dict[str, Any]:
    return {
        "dtypes": {"state": "float32", "q": "v", "k": "v", "v": values}
        | dict.fromkeys(("decay", "rate", "a", "bias", "skip"), _FLOATS),
        "strided": dict.fromkeys("qkv", "aligned columns")
        | dict.fromkeys(("state", "decay", "rate", "a", "bias", "skip"), "any"),
        "outputs": (Output("v", "v"),),
        "hidden": True,
    }


_STATE_CHUNKS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, Tensor? skip, Tensor? state, bool"
    " delta, bool normalize, float scale"
)
_OF_STATE_CHUNKS: dict[str, Any] = {
    "dtypes": {"q": "v", "k": "v", "v": "bfloat16", "state": "float32"}
    | dict.fromkeys(("decay", "rate", "skip"), _FLOATS),
    "strided": dict.fromkeys("qkv", "aligned columns")
    | dict.fromkeys(("decay", "rate", "skip"), "any"),
    "shapes": {"state": "v[0], v[2], q[3], v[3]"},
}


_MOVED: dict[str, Any] = {
    "dtypes": {"rows": _FLOATS, "inverse": "int32", "offsets": "int32", "weights": "float32"},
    "shapes": {"weights": "inverse"},
    "strided": {"rows": "aligned"},
}

# ---- convolution and log-probabilities ----

_CONVOLUTION: dict[str, Any] = {
    "dtypes": {"weight": "float32", "bias": "float32", "sequences": "int32"},
    "shapes": {"weight": "4, x[2]", "bias": "x[2]", "sequences": "x[0], x[1]"},
}
_GATED_NORM = (
    "Tensor x, Tensor gate, Tensor? weight, float eps, int groups, bool norm_first, bool sigmoid"
)
_OF_LOGPROBS = "Tensor grad, Tensor grad_entropy"
_LOGPROBS = (
    "Tensor target, Tensor stats, Tensor entropy, int ignore_index, float temperature, float"
    " softcap"
)
_LOGPROB_GRADIENTS: dict[str, Any] = {
    "dtypes": {
        "grad": "float32",
        "grad_entropy": "float32",
        "logits": _FLOATS,
        "target": "int64",
        "stats": "float32",
        "entropy": "float32",
    },
    "shapes": {
        "grad": "logits[0]",
        "grad_entropy": "logits[0]",
        "target": "logits[0]",
        "stats": "logits[0] * 2",
        "entropy": "logits[0]",
    },
}

# ---- attention ----

ATTENTION_OPTIONS = (
    "bool heads_first=False, int window_right=-1, int window_left=-1, float? scale=None, bool"
    " deterministic=False, Tensor? bias=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor?"
    " sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int max_seqlen_q=0, int"
    " max_seqlen_k=0, int score_mod=0"
)
ATTENTION_RESULTS = (
    "Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
)
_ATTENDED: dict[str, Any] = {
    "k": "q",
    "v": "q",
    "bias": ("bool", *_FLOATS, "int32"),
    "alibi_slopes": "float32",
    "sinks": "float32",
    "cu_seqlens_q": "int32",
    "cu_seqlens_k": "int32",
}
_ATTENDED_STRIDES = dict.fromkeys("qkv", "aligned columns") | {
    "bias": "any",
    "alibi_slopes": "any",
}

# ---- rotary embedding ----

_ROTATED = "Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool inverse"
_ROPE: dict[str, Any] = {
    "dtypes": {
        "key": "query",
        "cos": _FLOATS,
        "sin": "cos",
        "positions": ("int64", "int32"),
    },
    "shapes": {"sin": "cos"},
    "strided": {
        "query": "any",
        "key": "any",
        "cos": "columns",
        "sin": "columns",
        "positions": "any",
    },
}

# ---- norms ----


def _norm(schema: str, *results: Output, **said: Any) -> Declared:
    """``schema`` without what it returns."""
    parameters = [name for name in ("weight", "bias") if f"? {name}," in schema]
    rows = [name for name in ("x", "residual") if f" {name}," in schema]
    return _op(
        f"{schema} -> ({', '.join(['Tensor'] * len(results))})".replace("(Tensor)", "Tensor"),
        dtypes=dict.fromkeys((*rows, *parameters), _FLOATS),
        shapes=dict.fromkeys(parameters, "x[-1]") | dict.fromkeys(rows[1:], "x"),
        strided=dict.fromkeys(rows, "rows"),
        alike=parameters if len(parameters) == 2 else (),
        outputs=results,
        **said,
    )


def _norms(name: str, arguments: str, *results: Output) -> tuple[Declared, ...]:
    """An operator, and its overload ``forward``, which returns the rows' statistics as well: means
    and reciprocal deviations of a layer norm, the latter of an RMS norm."""
    statistics = Output("2, x[:-1]" if "layer" in name else "x[:-1]", "float32")
    return (
        _norm(f"{name}({arguments})", *results, plain=True, gradient=True),
        _norm(f"{name}.forward({arguments})", *results, statistics, hidden=True),
    )


_SCALES = Output("x[:-1], 1", "float32")
_SUMMED = Output("x"), Output("x", "residual")
_STATISTICS = (
    "Tensor grad, Tensor? grad_residual, Tensor x, Tensor? weight, Tensor statistics, float offset"
)
_NORM_BACKWARD: dict[str, Any] = {
    "dtypes": dict.fromkeys(("grad_residual", "x", "weight"), _FLOATS) | {"statistics": "float32"},
    "strided": dict.fromkeys(("grad", "grad_residual", "x"), "rows"),
    "alike": ("grad", "grad_residual", "x"),
}
_OF_INPUT = {"grad": "x", "grad_residual": "x", "weight": "x[-1]"}
_INPUT_GRADIENT = Output("x", "x", when="need_x")
_WEIGHT_GRADIENT = Output("x[-1]", "weight", when="need_weight and weight")

# ---- attention over a cache ----

KVCACHE_ATTENTION = (
    "kvcache_attention_(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v,"
    " Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens, int length, Tensor?"
    " cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, float? scale, int window_left,"
    " int window_right, float softcap, bool interleaved, Tensor? alibi_slopes, int num_splits,"
    " Tensor? sinks, bool from_leftpad, bool early) -> (Tensor, Tensor)"
)

_CODES = "Tensor({}!) k_codes, Tensor({}!) k_steps, Tensor({}!) v_codes, Tensor({}!) v_steps"
KVCACHE_CODES = (
    f"kvcache_codes_attention_(Tensor q, Tensor k, Tensor v, {_CODES.format(*'abcd')}, Tensor(e!)"
    " recent_k, Tensor(f!) recent_v, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens,"
    " int length, Tensor? cache_leftpad, int bits, int group_size, float? scale, int window_left,"
    " int window_right, float softcap, bool interleaved, Tensor? alibi_slopes, int num_splits,"
    " Tensor? sinks, bool from_leftpad, bool early) -> (Tensor, Tensor)",
    f"kvcache_compress_(Tensor k, Tensor v, {_CODES.format(*'abcd')}, int first, int bits, int"
    " group_size) -> ()",
)
_CODES_DTYPES = {
    "k_codes": "uint8",
    "k_steps": "float16",
    "v_codes": "uint8",
    "v_steps": "float16",
}
_CACHED: dict[str, Any] = {
    "q": ("float16", "bfloat16"),
    "rotary_cos": _FLOATS,
    "rotary_sin": _FLOATS,
    "cache_seqlens": "int32",
    "cache_leftpad": "int32",
    "alibi_slopes": "float32",
    "sinks": "float32",
}
_OF_CACHED = {"cache_seqlens": "q[0]", "cache_leftpad": "q[0]", "sinks": "q[2]"}
_CACHED_STRIDES = dict.fromkeys("qkv", "aligned columns") | dict.fromkeys(
    ("rotary_cos", "rotary_sin"), "columns"
)
_CACHED_LSE = Output("q[0], q[2], q[1]", "float32")

CATALOG: tuple[OpSpec, ...] = (
    _family(
        "activation",
        _op("bias_gelu(Tensor x, Tensor? bias, int approximate) -> Tensor", **_BIASED),
        _op(
            "bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, int approximate, bool"
            f" bias_gradient) {_PAIR}",
            **_BIASED_BACKWARD,
        ),
        _op("bias_silu(Tensor x, Tensor? bias) -> Tensor", **_BIASED),
        _op(
            f"bias_silu_backward(Tensor grad, Tensor x, Tensor? bias, bool bias_gradient) {_PAIR}",
            **_BIASED_BACKWARD,
        ),
        _op("bias_relu2(Tensor x, Tensor? bias) -> Tensor", **_BIASED),
        _op(
            f"bias_relu2_backward(Tensor grad, Tensor x, Tensor? bias, bool bias_gradient) {_PAIR}",
            **_BIASED_BACKWARD,
        ),
        _op("swiglu(Tensor gate, Tensor? up, bool interleaved) -> Tensor", **_GATED),
        _op(
            f"swiglu_backward(Tensor grad, Tensor gate, Tensor? up, bool interleaved) {_PAIR}",
            **_GATED_BACKWARD,
        ),
        _op("geglu(Tensor gate, Tensor? up, bool tanh, bool interleaved) -> Tensor", **_GATED),
        _op(
            "geglu_backward(Tensor grad, Tensor gate, Tensor? up, bool tanh, bool interleaved)"
            f" {_PAIR}",
            **_GATED_BACKWARD,
        ),
        _op(
            "gated_backward_(Tensor(a!) grad, Tensor gate, Tensor up, int activation, bool again)"
            f" {_PAIR}",
            **_GATED_BACKWARD
            | {
                "strided": {"grad": "any", "gate": "rows", "up": "rows"},
                "outputs": (Output("gate"), Output("gate", when="again")),
            },
            hidden=True,
        ),
    ),
    _family(
        "adagrad",
        _op(
            "adagrad_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] sums, Tensor(d!)[]"
            " state_steps, float lr, float lr_decay, float weight_decay, float eps, bool maximize,"
            " Tensor? lr_tensor, Tensor? grad_scale, Tensor? found_inf) -> ()",
            rows=Rows(("params", "grads", "sums"), "state_steps", (), _SCALED),
            dtypes={"sums": "float32"},
            numbers=_NUMBERS,
        ),
        least_capability=_LISTS,
    ),
    _family(
        "adam",
        *tuple(
            _op(
                f"{name}({_ADAM_LISTS}, {more}*, {_ADAM_NUMBERS}) -> ()",
                rows=Rows((*_ADAM_ROWS, *copies), "state_steps", ("max_exp_avg_sqs",), _SCALED),
                numbers=(*_NUMBERS, "grad_factor"),
            )
            for name, more, copies in (
                ("adam_", "", ()),
                ("adam_copy_", "Tensor(g!)[] copies, ", ("copies",)),
            )
        ),
        least_capability=_LISTS,
    ),
    _family(
        "adam8bit",
        _op(
            "adam8bit_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[]"
            " exp_avg_sqs, Tensor(e!)[] exp_avg_scales, Tensor(f!)[] exp_avg_sq_scales,"
            " Tensor(g!)[] state_steps, float lr, float beta1, float beta2, float eps, float"
            " weight_decay, bool maximize, bool decoupled, Tensor? lr_tensor, Tensor? grad_scale,"
            " Tensor? found_inf) -> ()",
            rows=Rows(
                (
                    *("params", "grads", "exp_avgs", "exp_avg_sqs"),
                    *("exp_avg_scales", "exp_avg_sq_scales"),
                ),
                "state_steps",
                (),
                _SCALED,
                (("exp_avg_scales", 256), ("exp_avg_sq_scales", 256)),
                row_major=True,
            ),
            dtypes={
                "exp_avgs": "int8",
                "exp_avg_sqs": "uint8",
                "exp_avg_scales": "float32",
                "exp_avg_sq_scales": "float32",
            },
            numbers=_NUMBERS,
        ),
        least_capability=_LISTS,
    ),
    _family(
        "few_rows",
        _op(
            "few_rows_linear(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? norm, float eps,"
            " float offset, Tensor? residual, int activation, int width, bool early) -> Tensor",
            dtypes={"x": ("float16", "bfloat16")},
            shapes={"norm": "x[-1]", "residual": "x[:-1], width"},
            outputs=(Output("x[:-1], width"),),
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "fp8",
        _op(
            f"quantize_fp8(Tensor x, ScalarType dtype, SymInt group_size) {_PAIR}",
            strided={"x": "any"},
            outputs=(Output("x", "dtype"), Output(by_host=True)),
        ),
        _op(
            "quantize_fp8_scaled(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
            numbers=("scale",),
            outputs=(Output("x", "dtype"),),
        ),
        _op(
            "dequantize_fp8(Tensor values, Tensor scales, SymInt group_size, ScalarType dtype) ->"
            " Tensor",
            dtypes={"values": ("float8_e4m3fn", "float8_e5m2"), "scales": "float32"},
            outputs=(Output("values", "dtype"),),
        ),
        _op(
            f"quantize_int8(Tensor x) {_PAIR}",
            strided={"x": "any"},
            outputs=(Output("x", "int8"), Output("x[:-1], 1", "float32")),
        ),
        _op(
            "dequantize_int8(Tensor values, Tensor scales, ScalarType dtype) -> Tensor",
            dtypes={"values": "int8", "scales": "float32"},
            shapes={"scales": "values[:-1], 1"},
            outputs=(Output("values", "dtype"),),
        ),
        apart=True,
    ),
    _family(
        "fp8_linear",
        _op(
            "fp8_rows(Tensor x, Tensor[] more, int rows) -> (Tensor codes, Tensor scales, Tensor"
            " largest, Tensor room)",
            strided={"x": "aligned rows"},
            split="whole",
            outputs=(
                Output("rows, x[1]", "float8_e4m3fn"),
                Output("rows, 1", "float32"),
                Output("x[1]", "float32"),
                _ROOM,
            ),
            hidden=True,
        ),
        _op(
            "fp8_norm_rows(Tensor x, Tensor residual, Tensor weight, float eps, float offset) ->"
            " (Tensor y, Tensor total, Tensor rstd, Tensor codes, Tensor scales, Tensor largest,"
            " Tensor room)",
            shapes={"residual": "x", "weight": "x[1]"},
            strided={"x": "aligned rows", "residual": "aligned rows"},
            split="whole",
            outputs=(
                Output("x"),
                Output("x"),
                Output("x[0]", "float32"),
                Output("x", "float8_e4m3fn"),
                Output("x[0], 1", "float32"),
                Output("x[1]", "float32"),
                _ROOM,
            ),
            hidden=True,
        ),
        _op(
            "fp8_gated_rows(Tensor packed, Tensor? grad, int activation) -> (Tensor codes, Tensor"
            " scales, Tensor largest, Tensor grad_codes, Tensor grad_scales, Tensor grad_largest,"
            " Tensor room)",
            shapes={"grad": "packed[0], packed[1] // 2"},
            strided={"packed": "aligned rows", "grad": "aligned rows"},
            split="whole",
            outputs=(
                Output("packed[0], packed[1] // 2", "float8_e4m3fn"),
                Output("packed[0], 1", "float32"),
                Output("packed[1] // 2", "float32"),
                Output("packed", "float8_e4m3fn", when="grad"),
                Output("packed[0], 1", "float32", when="grad"),
                Output("packed[1]", "float32", when="grad"),
                _ROOM,
            ),
            hidden=True,
        ),
        _op(
            "fp8_columns(Tensor x, Tensor[] more, Tensor? row_scales, Tensor largest, int rows) ->"
            " (Tensor codes, Tensor scales)",
            dtypes={
                "x": (*_FLOATS, "float8_e4m3fn"),
                "row_scales": "float32",
                "largest": "float32",
            },
            shapes={"row_scales": "x[0], 1", "largest": "x[1]"},
            strided={"x": "aligned rows"},
            split="whole",
            outputs=(Output("x[1], rows", "float8_e4m3fn"), Output("x[1], 1", "float32")),
            hidden=True,
        ),
        hip=False,
    ),
    _family(
        "experts",
        _op(
            "expert_order(Tensor experts, int count) -> (Tensor order, Tensor inverse, Tensor"
            " offsets)",
            dtypes={"experts": ("int64", "int32")},
            split="host",
            outputs=(
                Output("experts", "int32"),
                Output("experts", "int32"),
                Output("count", "int32"),
            ),
            hidden=True,
        ),
        _op(
            "expert_routes(Tensor logits, Tensor? bias, int k, bool sigmoid, bool normalize, float"
            " scale) -> (Tensor weights, Tensor choices)",
            dtypes={"bias": "float32"},
            shapes={"bias": "logits[1]"},
            split="whole",
            outputs=(Output("logits[0], k", "float32"), Output("logits[0], k", "int64")),
            hidden=True,
        ),
        _op(
            "expert_routes_backward(Tensor grad, Tensor logits, Tensor weights, Tensor choices,"
            " bool sigmoid, bool normalize, float scale) -> Tensor",
            dtypes={
                "grad": "float32",
                "logits": _FLOATS,
                "weights": "float32",
                "choices": "int64",
            },
            shapes={"weights": "grad", "choices": "grad"},
            split="whole",
            outputs=(Output("logits", "logits"),),
            hidden=True,
        ),
        _op(
            "spread_rows(Tensor x, Tensor inverse, Tensor offsets, int slots) -> Tensor",
            dtypes={"x": _FLOATS, "inverse": "int32", "offsets": "int32"},
            strided={"x": "aligned rows"},
            split="whole",
            outputs=(Output("slots, x[1]", "x"),),
            hidden=True,
        ),
        _op(
            "combine_rows(Tensor rows, Tensor inverse, Tensor offsets, Tensor? weights) -> Tensor",
            **_MOVED,
            split="whole",
            outputs=(Output("inverse[0], rows[1]", "rows"),),
            hidden=True,
        ),
        _op(
            "combine_rows_backward(Tensor grad, Tensor rows, Tensor inverse, Tensor offsets, Tensor"
            f" weights) {_PAIR}",
            **_MOVED
            | {
                "dtypes": _MOVED["dtypes"] | {"grad": _FLOATS, "rows": "grad"},
                "strided": {"grad": "aligned", "rows": "aligned"},
                "split": "whole",
                "outputs": (Output("rows", "rows"), Output("weights", "weights")),
            },
            hidden=True,
        ),
        _op(
            "expert_gate_backward_(Tensor(a!) grad, Tensor packed, Tensor weights, Tensor order,"
            f" Tensor offsets, int activation) {_PAIR}",
            dtypes={
                "grad": _FLOATS,
                "packed": "grad",
                "weights": "float32",
                "order": "int32",
                "offsets": "int32",
            },
            strided={"packed": "aligned"},
            split="whole",
            outputs=(Output("packed", "packed"), Output("weights", "weights")),
            hidden=True,
        ),
        hip=False,
        least_capability=(7, 0),
    ),
    _family(
        "grad_norm",
        _op(
            "grad_norm(Tensor[] grads, float norm_type) -> Tensor",
            rows=Rows(("grads",)),
            outputs=(Output("[]", "float32"),),
        ),
        _op(
            "clip_grads_(Tensor(a!)[] grads, Tensor total_norm, float max_norm) -> ()",
            rows=Rows(("grads",)),
            numbers=("total_norm",),
        ),
        least_capability=_LISTS,
    ),
    _family(
        "grouped_linear",
        _op(
            "grouped_rows(Tensor x, Tensor weight, Tensor offsets) -> Tensor",
            **_GROUPED,
            split="whole",
            outputs=(Output("x[0], weight[1]", "x"),),
            hidden=True,
        ),
        _op(
            "grouped_columns(Tensor x, Tensor weight, Tensor offsets) -> Tensor",
            **_GROUPED,
            split="whole",
            outputs=(Output("x[0], weight[2]", "x"),),
            hidden=True,
        ),
        _op(
            "grouped_outer_(Tensor(a!) out, Tensor grad, Tensor x, Tensor offsets, int column) ->"
            " ()",
            dtypes={"out": _HALVES, "grad": "out", "x": "out", "offsets": "int32"},
            strided={"grad": "aligned", "x": "aligned"},
            split="whole",
            hidden=True,
        ),
        _op(
            "grouped_gated(Tensor x, Tensor weight, Tensor offsets, Tensor? order, int slots, int"
            f" activation, bool keep) {_PAIR}",
            **_GROUPED | {"dtypes": _GROUPED["dtypes"] | {"order": "int32"}},
            split="whole",
            outputs=(
                Output("slots, weight[1] // 2", "x"),
                Output("slots, weight[1]", "x", when="keep"),
            ),
            hidden=True,
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "muon",
        _op(
            "muon_product_(Tensor(a!) out, Tensor a, Tensor b, Tensor? added, bool columns, float"
            " alpha, float beta, float diagonal) -> ()",
            dtypes={"out": ("float16",), "a": "out", "b": "out", "added": "out"},
            shapes={"added": "out", "b": "a"},
            strided={"a": "aligned", "b": "aligned"},
            split="whole",
            hidden=True,
        ),
        _op(
            "muon_average_(Tensor[] grads, Tensor(a!)[] buffers, Tensor(b!)[] averages, float"
            " momentum, bool nesterov, float scale, float eps, Tensor? grad_scale) -> ()",
            rows=Rows(("grads", "buffers", "averages")),
            numbers=("grad_scale",),
            hidden=True,
        ),
        _op(
            "muon_apply_(Tensor(a!)[] params, Tensor[] steps, float lr, float decay, float factor,"
            " Tensor? lr_tensor) -> ()",
            rows=Rows(("params", "steps")),
            numbers=("lr_tensor",),
            hidden=True,
        ),
        hip=False,
        least_capability=_LISTS,
    ),
    _family(
        "few_experts",
        _op(
            "few_experts(Tensor x, Tensor choices, Tensor weights, Tensor gate_up, Tensor down,"
            " Tensor? gate_up_bias, Tensor? down_bias, bool columns, bool interleaved, int"
            " activation, float alpha, float limit) -> Tensor",
            dtypes={
                "x": ("float16", "bfloat16"),
                "choices": ("int64", "int32"),
                "weights": _FLOATS,
            },
            outputs=(Output("x"),),
            hidden=True,
        ),
        _op(
            "few_experts_int4(Tensor x, Tensor choices, Tensor weights, Tensor gate_up, Tensor"
            " gate_up_scales, Tensor? gate_up_zeros, Tensor down, Tensor down_scales, Tensor?"
            " down_zeros, Tensor? gate_up_bias, Tensor? down_bias, int group_size, bool mxfp4, bool"
            " interleaved, int activation, float alpha, float limit) -> Tensor",
            dtypes={
                "x": ("float16", "bfloat16"),
                "choices": ("int64", "int32"),
                "weights": _FLOATS,
                "gate_up": ("uint8",),
                "gate_up_scales": ("float16", "bfloat16"),
                "gate_up_zeros": ("float16",),
                "down": ("uint8",),
                "down_scales": ("float16", "bfloat16"),
                "down_zeros": ("float16",),
            },
            outputs=(Output("x"),),
            hidden=True,
        ),
        _op(
            "mxfp4_unpack(Tensor packed, Tensor scales, int n, int k, ScalarType dtype) -> Tensor",
            dtypes={"packed": ("uint8",), "scales": ("float16", "bfloat16")},
            outputs=(Output("n, k", "dtype"),),
            hidden=True,
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "few_rows_chain",
        _op(
            "few_rows_chain_(Tensor x, Tensor[] xs, Tensor[] weights, Tensor[] scales, Tensor[]"
            " zeros, Tensor[] biases, Tensor[] norms, Tensor[] residuals, Tensor(c!)[] caches,"
            " Tensor(a!)[] outs, Tensor? cos, Tensor? sin, Tensor? seqlens, Tensor? leftpad,"
            " Tensor(b!) workspace, float eps, float offset, float scale, int window_left, int"
            " kinds0, int kinds1, int kinds2, int kinds3) -> ()",
            dtypes={
                "x": ("float16", "bfloat16"),
                "cos": _FLOATS,
                "sin": _FLOATS,
                "seqlens": ("int32",),
                "leftpad": ("int32",),
                "weights": ("uint8",),
                "scales": ("float16", "bfloat16"),
                "zeros": ("float16",),
                "workspace": ("int32",),
            },
            strided={"caches": "any", "cos": "columns", "sin": "columns"},
            hidden=True,
        ),
        hip=False,
        least_capability=(9, 0),
    ),
    _family(
        "int4_few_rows",
        _op(
            "int4_few_rows_linear(Tensor x, Tensor[] packed, Tensor[] scales, Tensor[] zeros,"
            " Tensor[] biases, Tensor? norm, float eps, float offset, Tensor? residual, int"
            " activation, int width, int group_size, int plan) -> Tensor",
            dtypes={
                "x": ("float16", "bfloat16"),
                "packed": ("uint8",),
                "scales": ("float16", "bfloat16"),
                "zeros": ("float16",),
            },
            shapes={"norm": "x[-1]", "residual": "x[:-1], width"},
            strided=dict.fromkeys(("x", "norm", "residual"), "aligned"),
            outputs=(Output("x[:-1], width"),),
            hidden=True,
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "int4_grouped",
        _op(
            f"int4_grouped_rows(Tensor x, {_INT4}, Tensor offsets, {_INT4_SIZES}, bool mxfp4, int"
            " plan) -> Tensor",
            dtypes={**_INT4_DTYPES, "x": _HALVES, "offsets": "int32"},
            strided={"x": "aligned"},
            outputs=(Output("x[0], n", "x"),),
            hidden=True,
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "int4_linear",
        _op(
            f"int4_product(Tensor x, {_INT4}, Tensor? bias, {_INT4_SIZES}, int plan, bool"
            " mxfp4=False) -> Tensor",
            dtypes={**_INT4_DTYPES, "bias": "x"},
            strided={"x": "aligned"},
            outputs=(Output("x[:-1], n", "x"),),
            hidden=True,
        ),
        _op(
            f"int4_unpack({_INT4}, {_INT4_SIZES}, ScalarType dtype, bool mxfp4=False) -> Tensor",
            dtypes=_INT4_DTYPES,
            outputs=(Output("n, k", "dtype"),),
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "lamb",
        _op(
            "lamb_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[]"
            " exp_avg_sqs, Tensor(e!)[] state_steps, float lr, float beta1, float beta2, float eps,"
            " float weight_decay, bool adapt, bool maximize, Tensor? lr_tensor, Tensor? grad_scale,"
            " Tensor? found_inf, bool stochastic=False) -> ()",
            rows=_LAMB_ROWS,
            numbers=_NUMBERS,
        ),
        _op(
            "lamb_moments_(Tensor[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs,"
            " Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] state_steps, float beta1, float beta2, float"
            " eps, float weight_decay, bool maximize, Tensor? grad_scale, Tensor? found_inf, bool"
            " stochastic=False) -> Tensor",
            rows=_LAMB_ROWS,
            numbers=("grad_scale", "found_inf"),
            outputs=(Output("len(params), 2", "float32"),),
        ),
        _op(
            "lamb_apply_(Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[]"
            " state_steps, Tensor norms, float lr, float beta1, float beta2, float eps, float"
            " weight_decay, bool adapt, Tensor? lr_tensor, Tensor? found_inf) -> ()",
            rows=Rows(("params", "exp_avgs", "exp_avg_sqs"), "state_steps"),
            dtypes={"norms": "float32"},
            shapes={"norms": "len(params), 2"},
            numbers=("lr_tensor", "found_inf"),
        ),
        least_capability=_LISTS,
    ),
    _family(
        "lion",
        _op(
            "lion_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[]"
            " state_steps, float lr, float beta1, float beta2, float weight_decay, bool maximize,"
            " Tensor? lr_tensor, Tensor? grad_scale, Tensor? found_inf, bool stochastic) -> ()",
            rows=Rows(("params", "grads", "exp_avgs"), "state_steps", ("state_steps",), _SCALED),
            numbers=_NUMBERS,
        ),
        least_capability=_LISTS,
    ),
    _family(
        "attention",
        _op(
            f"attention(Tensor q, Tensor k, Tensor v, {ATTENTION_OPTIONS}) {_PAIR}",
            dtypes=_ATTENDED,
            strided=_ATTENDED_STRIDES,
            outputs=(Output(by_host=True),) * 2,
            plain=True,
            gradient=True,
        ),
        _op(
            f"attention_backward({ATTENTION_RESULTS}, {ATTENTION_OPTIONS}) -> (Tensor, Tensor,"
            " Tensor)",
            dtypes=_ATTENDED
            | {"grad": "q", "q": _FLOATS, "out": "q", "lse": "float32", "grad_lse": "float32"},
            strided=_ATTENDED_STRIDES | {"grad": "aligned columns", "out": "aligned columns"},
            outputs=(Output(by_host=True),) * 3,
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "kvcache_attention",
        _op(
            KVCACHE_ATTENTION,
            dtypes=_CACHED
            | dict.fromkeys(("k_cache", "v_cache", "k", "v"), "q")
            | dict.fromkeys(("cache_batch_idx", "block_table"), "int32"),
            shapes=_OF_CACHED
            | {
                "k_cache": "k_cache[0], k_cache[1], k_cache[2], q[3]",
                "v_cache": "k_cache[0], k_cache[1], k_cache[2], v_cache[3]",
                "cache_batch_idx": "q[0]",
            },
            strided=_CACHED_STRIDES
            | dict.fromkeys(("k_cache", "v_cache"), "any")
            | {"block_table": "columns"},
            outputs=(Output("q[0], q[1], q[2], v_cache[3]", "q"), _CACHED_LSE),
        ),
        _op(
            KVCACHE_CODES[0],
            dtypes=_CACHED | _CODES_DTYPES | dict.fromkeys(("recent_k", "recent_v"), "q"),
            shapes=_OF_CACHED
            | {
                "k": "q[0], 1, recent_k[2], q[3]",
                "v": "q[0], 1, recent_k[2], recent_v[3]",
                "recent_k": "q[0], recent_k[1], recent_k[2], q[3]",
                "recent_v": "q[0], recent_k[1], recent_k[2], recent_v[3]",
                "k_codes": "q[0], recent_k[2], k_codes[2], k_codes[3]",
            },
            strided=_CACHED_STRIDES
            | dict.fromkeys((*_CODES_DTYPES, "recent_k", "recent_v"), "any"),
            outputs=(Output("q"), _CACHED_LSE),
        ),
        _op(
            KVCACHE_CODES[1],
            dtypes=_CODES_DTYPES | {"k": ("float16", "bfloat16")},
            shapes={
                "v": "k[0], k[1], k[2], v[3]",
                "k_codes": "k[0], k[2], k_codes[2], k_codes[3]",
            },
            strided=dict.fromkeys("kv", "aligned columns") | dict.fromkeys(_CODES_DTYPES, "any"),
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "quant",
        _op(
            f"quantize(Tensor x, int bits, SymInt group_size, int dim, bool symmetric) {_PAIR}",
            strided={"x": "any"},
            outputs=(Output(by_host=True),) * 2,
        ),
        _op(
            "dequantize(Tensor packed, Tensor scales, SymInt length, int bits, SymInt group_size,"
            " int dim, ScalarType dtype) -> Tensor",
            dtypes={"packed": "uint8", "scales": _FLOATS},
            outputs=(Output(by_host=True),),
        ),
        apart=True,
    ),
    _family(
        "rope",
        _op(
            f"rotary_embedding(Tensor query, Tensor? key, {_ROTATED}) {_PAIR}",
            outputs=(
                Output("query", order="query"),
                Output("key", order="key", when="key"),
            ),
            plain=True,
            **_ROPE,
            gradient=True,
        ),
        _op(f"rotary_embedding_(Tensor(a!) query, Tensor(b!)? key, {_ROTATED}) -> ()", **_ROPE),
    ),
    _family(
        "softmax",
        _op(
            "scaled_masked_softmax(Tensor x, Tensor? mask, float scale) -> Tensor",
            dtypes={"mask": ("bool", *_FLOATS)},
            strided={"x": "aligned rows", "mask": "as x"},
            plain=True,
            gradient=True,
        ),
        _op(
            "causal_softmax(Tensor x, float scale) -> Tensor",
            strided={"x": "aligned rows"},
            plain=True,
            gradient=True,
        ),
        _op(
            "softmax_backward(Tensor grad, Tensor y, float scale, bool causal) -> Tensor",
            dtypes={"y": _FLOATS, "grad": "y"},
            shapes={"grad": "y"},
            strided={"grad": "aligned rows", "y": "aligned rows"},
        ),
    ),
    _family(
        "cross_entropy",
        _op(
            f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}) {_PAIR}",
            **_LOSSES,
            gradient=True,
        ),
        _op(
            "cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? factors,"
            f" {_OPTIONS}) {_PAIR}",
            **_LOSSES
            | {"dtypes": {"target": "int64", "factors": "float32"}, "strided": {"logits": "any"}},
            gradient=True,
        ),
        _op(
            "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor stats,"
            f" {_OPTIONS}) -> Tensor",
            dtypes={"grad": "float32", "logits": _FLOATS, "target": "int64", "stats": "float32"},
            shapes={"target": "logits[0]"},
            strided={"logits": "aligned rows"},
            outputs=(Output("logits", "logits"),),
        ),
        _op(
            "scale_rows_(Tensor(a!) values, Tensor factors) -> ()",
            dtypes={"factors": "float32"},
            strided={"values": "any"},
        ),
    ),
    _family(
        "causal_conv1d",
        _op(
            "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? sequences, bool silu)"
            " -> Tensor",
            **_CONVOLUTION,
            gradient=True,
        ),
        _op(
            "causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor?"
            f" sequences, bool silu) {_PAIR}",
            dtypes=_CONVOLUTION["dtypes"] | {"grad": "x", "x": _FLOATS},
            shapes=_CONVOLUTION["shapes"] | {"grad": "x"},
            outputs=(
                Output("x", "x"),
                Output("5, x[2]", "float32"),
            ),
        ),
        _op(
            "causal_conv1d_update_(Tensor(a!) conv_state, Tensor x, Tensor weight, Tensor? bias,"
            " bool silu) -> Tensor",
            dtypes={"x": "conv_state", "weight": _FLOATS, "bias": "weight"},
            shapes={"x": "conv_state[:-1], x[-1]", "weight": "x[1], weight[1]", "bias": "x[1]"},
            strided={"x": "any"},
            outputs=(Output("x", "x"),),
        ),
    ),
    _family("state_scan", _op(f"state_scan_({_STATE_SCAN}", **_state_scan(_FLOATS))),
    _family(
        "state_chunks",
        _op(f"state_chunks_({_STATE_SCAN}", **_state_scan("bfloat16")),
        _op(
            f"state_chunks({_STATE_CHUNKS}) {_PAIR}",
            **_OF_STATE_CHUNKS,
            outputs=(Output("v", "v"), Output("v[0], v[2], q[3], v[3]", "float32")),
            gradient=True,
        ),
        _op(
            f"state_chunks_backward(Tensor grad, Tensor last, {_STATE_CHUNKS}) -> (Tensor, Tensor,"
            " Tensor, Tensor, Tensor, Tensor, Tensor)",
            dtypes=_OF_STATE_CHUNKS["dtypes"] | {"grad": "v", "last": "float32"},
            strided=_OF_STATE_CHUNKS["strided"],
            shapes=_OF_STATE_CHUNKS["shapes"] | {"grad": "v", "last": "v[0], v[2], q[3], v[3]"},
            outputs=(
                Output("v[:-1], q[3]", "v"),
                Output("v[:-1], q[3]", "v"),
                Output("v", "v"),
                Output("v[:-1]", "float32"),
                Output("v[:-1]", "float32"),
                Output("v[:-1]", "float32", when="skip"),
                Output("state", "float32", when="state"),
            ),
        ),
        hip=False,
        least_capability=(8, 0),
    ),
    _family(
        "gated_norm",
        _op(
            f"gated_rms_norm({_GATED_NORM}) -> Tensor",
            dtypes={"x": _FLOATS, "gate": "x", "weight": _FLOATS},
            shapes={"gate": "x", "weight": "x[1]"},
            gradient=True,
        ),
        _op(
            f"gated_rms_norm_backward(Tensor grad, {_GATED_NORM}) -> (Tensor, Tensor, Tensor)",
            dtypes={"grad": "x", "x": _FLOATS, "gate": "x", "weight": _FLOATS},
            shapes={"grad": "x", "gate": "x", "weight": "x[1]"},
            outputs=(
                Output("x[1]", "weight", when="weight"),
                Output("x", "x"),
                Output("x", "x"),
            ),
        ),
    ),
    _family(
        "logprobs",
        _op(
            "logprobs(Tensor logits, Tensor target, int ignore_index, float temperature, float"
            " softcap) -> (Tensor, Tensor, Tensor)",
            dtypes={"target": "int64"},
            shapes={"target": "logits[0]"},
            strided={"logits": "rows"},
            outputs=(
                Output("logits[0]", "float32"),
                Output("logits[0]", "float32"),
                Output("logits[0] * 2", "float32"),
            ),
            gradient=True,
        ),
        _op(
            f"logprobs_backward({_OF_LOGPROBS}, Tensor logits, {_LOGPROBS}) -> Tensor",
            strided={"logits": "aligned rows"},
            outputs=(Output("logits", "logits"),),
            **_LOGPROB_GRADIENTS,
        ),
        _op(
            f"logprobs_backward_({_OF_LOGPROBS}, Tensor(a!) logits, {_LOGPROBS}) -> ()",
            strided={"logits": "any"},
            **_LOGPROB_GRADIENTS,
        ),
    ),
    _family(
        "next_token",
        _op(
            "next_token_(Tensor scores, Tensor? words, Tensor(a!) tokens, Tensor(b!) last,"
            " Tensor(c!) finished, Tensor(d!) at, Tensor ends, int pad, Tensor(e!) workspace) ->"
            " ()",
            dtypes={
                "scores": _FLOATS,
                **dict.fromkeys(("words", "tokens", "last", "at", "ends", "workspace"), "int64"),
                "finished": "bool",
            },
            shapes={"words": "scores", "last": "scores[0], 1", "finished": "scores[0]", "at": "1"},
            strided={"scores": "rows"},
            hidden=True,
        ),
        _op(
            "keep_tokens_(Tensor chosen, Tensor(a!) tokens, Tensor(b!) known, Tensor(c!) finished,"
            " Tensor limit, Tensor ends, Tensor(d!) tried, Tensor(e!) lengths) -> ()",
            dtypes={
                **dict.fromkeys(("chosen", "tokens", "known", "limit", "ends", "tried"), "int64"),
                "finished": "bool",
                "lengths": "int32",
            },
            shapes={
                **dict.fromkeys(("known", "finished", "lengths"), "chosen[0]"),
                "limit": "1",
                "tried": "chosen",
            },
            hidden=True,
        ),
    ),
    _family(
        "norm",
        *_norms(
            "layer_norm",
            "Tensor x, Tensor? weight, Tensor? bias, float eps, float offset",
            Output("x"),
        ),
        *_norms("rms_norm", "Tensor x, Tensor? weight, float eps, float offset", Output("x")),
        *_norms(
            "add_layer_norm",
            "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset",
            *_SUMMED,
        ),
        *_norms(
            "add_rms_norm",
            "Tensor x, Tensor residual, Tensor? weight, float eps, float offset",
            *_SUMMED,
        ),
        _norm(
            "rms_norm_quantized(Tensor x, Tensor? weight, float eps, ScalarType dtype)",
            Output("x", "dtype"),
            _SCALES,
        ),
        _norm(
            "add_rms_norm_quantized(Tensor x, Tensor residual, Tensor? weight, float eps,"
            " ScalarType dtype)",
            Output("x", "dtype"),
            _SCALES,
            _SUMMED[1],
        ),
    ),
    _family(
        "norm_backward",
        _op(
            f"layer_norm_backward({_STATISTICS}, bool need_x, bool need_weight, bool need_bias,"
            " ScalarType bias_dtype) -> (Tensor, Tensor, Tensor)",
            shapes=_OF_INPUT | {"statistics": "2, x[:-1]"},
            outputs=(
                _INPUT_GRADIENT,
                _WEIGHT_GRADIENT,
                Output("x[-1]", "bias_dtype", when="need_bias"),
            ),
            **_NORM_BACKWARD,
            hidden=True,
        ),
        _op(
            f"rms_norm_backward({_STATISTICS}, bool need_x, bool need_weight) {_PAIR}",
            shapes=_OF_INPUT | {"statistics": "x[:-1]"},
            outputs=(_INPUT_GRADIENT, _WEIGHT_GRADIENT),
            **_NORM_BACKWARD,
            hidden=True,
        ),
    ),
)

# ---- made of other operators ----

_TRIPLE = "-> (Tensor, Tensor, Tensor)"
_RESULTS = f"{ATTENTION_RESULTS}, {ATTENTION_OPTIONS}"
_PRODUCT = "Tensor x, Tensor weight, Tensor? bias, Tensor target"
_LINEAR_LOSS = (
    f"{_PRODUCT}, Tensor? class_weight, int ignore_index, float label_smoothing, float z_loss,"
    " float softcap"
)
_GRADIENTS = "bool x_grad, bool weight_grad, bool bias_grad"
_CHUNKS = f"SymInt chunk, int accumulate, ScalarType dtype, {_GRADIENTS}"
_OF_PRODUCT = "int ignore_index, float temperature, float softcap, SymInt chunk, ScalarType dtype"
_ROUTED = "Tensor packed, Tensor order, Tensor inverse, Tensor offsets, int activation"

COMPOSED: tuple[Declared, ...] = (
    _op(
        f"attention_composed(Tensor q, Tensor k, Tensor v, {ATTENTION_OPTIONS}) {_PAIR}",
        gradient=True,
    ),
    _op(f"attention_composed_backward({_RESULTS}) {_TRIPLE}"),
    _op(f"attention_bias_backward({_RESULTS}) -> Tensor"),
    _op("experts_spread(Tensor x, Tensor inverse, Tensor offsets) -> Tensor", gradient=True),
    _op("experts_add_bias(Tensor rows, Tensor bias, Tensor offsets) -> Tensor", gradient=True),
    _op(
        "experts_combine(Tensor rows, Tensor? weights, Tensor inverse, Tensor offsets) -> Tensor",
        gradient=True,
    ),
    _op(
        "experts_combine_backward(Tensor grad, Tensor rows, Tensor weights, Tensor inverse, Tensor"
        f" offsets) {_PAIR}",
        hidden=True,
    ),
    _op(
        "gated_experts(Tensor x, Tensor choices, Tensor weights, Tensor gate_up, Tensor down, int"
        " activation, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        gradient=True,
    ),
    _op(
        f"gated_experts_backward(Tensor grad, Tensor x, Tensor weights, Tensor gate_up, Tensor"
        f" down, {_ROUTED}, bool of_x, bool of_gate_up, bool of_down) -> (Tensor, Tensor, Tensor,"
        " Tensor)",
        hidden=True,
    ),
    _op(
        "gated_linear(Tensor gate, Tensor? up, Tensor weight, Tensor? bias, int activation, bool"
        " interleaved, ScalarType dtype) -> Tensor",
        gradient=True,
    ),
    _op(
        "gated_linear_backward(Tensor grad, Tensor gate, Tensor? up, Tensor weight, int activation,"
        f" bool interleaved, bool inner, bool outer) {_TRIPLE}"
    ),
    _op("grouped_linear(Tensor x, Tensor weight, Tensor offsets) -> Tensor", gradient=True),
    _op("grouped_linear_outer(Tensor grad, Tensor x, Tensor offsets) -> Tensor", hidden=True),
    _op(
        f"int4_grouped_linear(Tensor x, {_INT4}, Tensor offsets, {_INT4_SIZES}, bool mxfp4)"
        " -> Tensor",
        gradient=True,
    ),
    _op(
        f"int4_grouped_linear_backward(Tensor grad, {_INT4}, Tensor offsets, {_INT4_SIZES}, bool"
        " mxfp4) -> Tensor",
        hidden=True,
    ),
    _op(f"int4_linear_backward(Tensor grad, {_INT4}, {_INT4_SIZES}) -> Tensor", hidden=True),
    _op(f"int4_linear(Tensor x, {_INT4}, Tensor? bias, {_INT4_SIZES}) -> Tensor", gradient=True),
    _op(KVCACHE_ATTENTION.replace("attention_", "attention_composed_", 1)),
    *(_op(one.replace("kvcache_", "kvcache_composed_", 1)) for one in KVCACHE_CODES),
    _op(
        f"linear_cross_entropy({_LINEAR_LOSS}, int reduction, bool extras, {_CHUNKS}) -> (Tensor,"
        " Tensor, Tensor, Tensor, Tensor, Tensor)",
        gradient=True,
    ),
    _op(f"linear_cross_entropy_backward(Tensor grad, {_LINEAR_LOSS}, {_CHUNKS}) {_TRIPLE}"),
    _op(
        f"linear_logprobs({_PRODUCT}, {_OF_PRODUCT}, SymInt kept) -> (Tensor, Tensor, Tensor,"
        " Tensor)",
        gradient=True,
    ),
    _op(
        f"linear_logprobs_backward_({_OF_LOGPROBS}, {_PRODUCT}, Tensor stats, Tensor entropy,"
        f" Tensor(a!) last, {_OF_PRODUCT}, {_GRADIENTS}) {_TRIPLE}"
    ),
    _op(
        "route_tokens(Tensor logits, Tensor? bias, int k, bool sigmoid, bool normalize, float"
        f" scale) {_PAIR}",
        gradient=True,
    ),
    _op(
        "route_tokens_backward(Tensor grad, Tensor logits, Tensor weights, Tensor choices, bool"
        " sigmoid, bool normalize, float scale) -> Tensor",
        hidden=True,
    ),
)
"""Operators of which no library has kernels: only their schemas, and how autograd sees them."""

OPERATORS: dict[str, tuple[str, Declared]] = {
    one.name: (spec.family, one) for spec in CATALOG for one in spec.declared
} | {one.name: ("", one) for one in COMPOSED}
"""By name, with the family, if there is one."""
