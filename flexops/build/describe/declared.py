"""What flexops' own operators declare, as other projects' do by ``builder.Library.op``: schemas,
and what the binding is written from beside them.

It stands here, not with the references in ``flexops/ops``, because a build of a library must
know without importing torch. Nothing is parsed before it is asked for (``OpSpec.every_signature``).
"""

from __future__ import annotations

from .declaration import Declared, Output, Rows

_FLOATS = ("float32", "float16", "bfloat16")
_BIASED = {
    "shapes": {"bias": "x[-1]"},
    "dtypes": {"bias": _FLOATS},
    "strided": {"x": "rows", "bias": "aligned"},
    "plain": True,
}
_BIASED_BACKWARD = {
    "dtypes": {"x": _FLOATS, "grad": "x", "bias": _FLOATS},
    "shapes": {"grad": "x", "bias": "x[-1]"},
    "strided": {"x": "rows", "grad": "rows", "bias": "aligned"},
    "outputs": (Output("x", "x"), Output("x[-1]", "bias", when="bias_gradient")),
}
_GATED = {
    "shapes": {"up": "gate"},
    "strided": {"gate": "rows", "up": "rows"},
    "outputs": (Output("gate", when="up", otherwise="gate[:-1], gate[-1] // 2"),),
    "plain": True,
}
_GATED_BACKWARD = {
    "dtypes": {"gate": _FLOATS, "grad": "gate", "up": "gate"},
    "shapes": {"up": "gate"},
    "strided": {"grad": "rows", "gate": "rows", "up": "rows"},
    "outputs": (Output("gate"), Output("gate", when="up")),
}
BIAS_GELU = Declared("bias_gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor", _BIASED)
BIAS_SILU = Declared("bias_silu(Tensor x, Tensor? bias) -> Tensor", _BIASED)
BIAS_GELU_BACKWARD = Declared(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh, bool bias_gradient) ->"
    " (Tensor, Tensor)",
    _BIASED_BACKWARD,
)
BIAS_SILU_BACKWARD = Declared(
    "bias_silu_backward(Tensor grad, Tensor x, Tensor? bias, bool bias_gradient) -> (Tensor,"
    " Tensor)",
    _BIASED_BACKWARD,
)
SWIGLU = Declared("swiglu(Tensor gate, Tensor? up, bool interleaved) -> Tensor", _GATED)
GEGLU = Declared("geglu(Tensor gate, Tensor? up, bool tanh, bool interleaved) -> Tensor", _GATED)
SWIGLU_BACKWARD = Declared(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor? up, bool interleaved) -> (Tensor, Tensor)",
    _GATED_BACKWARD,
)
GEGLU_BACKWARD = Declared(
    "geglu_backward(Tensor grad, Tensor gate, Tensor? up, bool tanh, bool interleaved) -> (Tensor,"
    " Tensor)",
    _GATED_BACKWARD,
)
GATED_BACKWARD = Declared(
    "gated_backward_(Tensor(a!) grad, Tensor gate, Tensor up, int activation, bool again) ->"
    " (Tensor, Tensor)",
    _GATED_BACKWARD
    | {
        "strided": {"grad": "any", "gate": "rows", "up": "rows"},
        "outputs": (Output("gate"), Output("gate", when="again")),
    },
)
ACTIVATIONS = (
    BIAS_GELU,
    BIAS_GELU_BACKWARD,
    BIAS_SILU,
    BIAS_SILU_BACKWARD,
    SWIGLU,
    SWIGLU_BACKWARD,
    GEGLU,
    GEGLU_BACKWARD,
    GATED_BACKWARD,
)

_SOFTMAX = {
    "dtypes": {"mask": ("bool", *_FLOATS)},
    "strided": {"x": "aligned rows", "mask": "as x"},
    "plain": True,
}
SCALED_MASKED_SOFTMAX = Declared(
    "scaled_masked_softmax(Tensor x, Tensor? mask, float scale) -> Tensor", _SOFTMAX
)
CAUSAL_SOFTMAX = Declared(
    "causal_softmax(Tensor x, float scale) -> Tensor",
    {"strided": {"x": "aligned rows"}, "plain": True},
)
SOFTMAX_BACKWARD = Declared(
    "softmax_backward(Tensor grad, Tensor y, float scale, bool causal) -> Tensor",
    {
        "dtypes": {"y": _FLOATS, "grad": "y"},
        "shapes": {"grad": "y"},
        "strided": {"grad": "aligned rows", "y": "aligned rows"},
    },
)

_LOSS = "int ignore_index, float label_smoothing, float z_loss, int reduction"
_LOSSES = {
    "dtypes": {"target": "int64"},
    "shapes": {"target": "logits[0]"},
    "strided": {"logits": "rows"},
    "outputs": (
        Output("[]", "float32", when="reduction", otherwise="logits[0]"),
        Output("logits[0] * 3 + 1", "float32", when="reduction", otherwise="logits[0] * 2"),
    ),
}
CROSS_ENTROPY = Declared(
    f"cross_entropy(Tensor logits, Tensor target, {_LOSS}) -> (Tensor, Tensor)", _LOSSES
)
CROSS_ENTROPY_INPLACE = Declared(
    f"cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? factors, {_LOSS}) -> (Tensor,"
    " Tensor)",
    _LOSSES | {"dtypes": {"target": "int64", "factors": "float32"}, "strided": {"logits": "any"}},
)
CROSS_ENTROPY_BACKWARD = Declared(
    f"cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor stats, {_LOSS}) ->"
    " Tensor",
    {
        "dtypes": {"grad": "float32", "logits": _FLOATS, "target": "int64", "stats": "float32"},
        "shapes": {"target": "logits[0]"},
        "strided": {"logits": "aligned rows"},
        "outputs": (Output("logits", "logits"),),
    },
)
SCALE_ROWS = Declared(
    "scale_rows_(Tensor(a!) values, Tensor factors) -> ()",
    {"dtypes": {"factors": "float32"}, "strided": {"values": "any"}},
)
LOSSES = (CROSS_ENTROPY, CROSS_ENTROPY_INPLACE, CROSS_ENTROPY_BACKWARD, SCALE_ROWS)

_NUMBERS = ("lr_tensor", "grad_scale", "found_inf")
_SCALED = (("grads", "grad_scale"),)
"""Gradients are divided by a scale where they lie, if there is one."""

LION = Declared(
    "lion_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, float lr, float beta1,"
    " float beta2, float weight_decay, bool maximize, Tensor? lr_tensor, Tensor? grad_scale,"
    " Tensor? found_inf, Tensor(d!)[] state_steps, bool stochastic) -> ()",
    {
        "rows": Rows(("params", "grads", "exp_avgs"), "state_steps", ("state_steps",), _SCALED),
        "numbers": _NUMBERS,
    },
)
ADAGRAD = Declared(
    "adagrad_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] sums, Tensor(d!)[] state_steps,"
    " float lr, float lr_decay, float weight_decay, float eps, bool maximize, Tensor? lr_tensor,"
    " Tensor? grad_scale, Tensor? found_inf) -> ()",
    {
        "rows": Rows(("params", "grads", "sums"), "state_steps", (), _SCALED),
        "dtypes": {"sums": "float32"},
        "numbers": _NUMBERS,
    },
)
_ADAM_LISTS = (
    "Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs,"
    " Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps"
)
_ADAM_NUMBERS = (
    "float lr, float beta1, float beta2, float eps, float weight_decay, bool amsgrad, bool"
    " maximize, bool decoupled, Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor?"
    " found_inf=None, bool stochastic=False, Tensor? grad_factor=None"
)
_ADAM = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
ADAM, ADAM_COPY = (
    Declared(
        f"{name}({_ADAM_LISTS}, {more}*, {_ADAM_NUMBERS}) -> ()",
        {
            "rows": Rows((*_ADAM, *copies), "state_steps", ("max_exp_avg_sqs",), _SCALED),
            "numbers": (*_NUMBERS, "grad_factor"),
        },
    )
    for name, more, copies in (
        ("adam_", "", ()),
        ("adam_copy_", "Tensor(g!)[] copies, ", ("copies",)),
    )
)
ADAM8BIT = Declared(
    "adam8bit_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[]"
    " exp_avg_sqs, Tensor(e!)[] exp_avg_scales, Tensor(f!)[] exp_avg_sq_scales, Tensor(g!)[]"
    " state_steps, float lr, float beta1, float beta2, float eps, float weight_decay, bool"
    " maximize, bool decoupled, Tensor? lr_tensor, Tensor? grad_scale, Tensor? found_inf) -> ()",
    {
        "rows": Rows(
            ("params", "grads", "exp_avgs", "exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales"),
            "state_steps",
            (),
            _SCALED,
            (("exp_avg_scales", 256), ("exp_avg_sq_scales", 256)),
            row_major=True,
        ),
        "dtypes": {
            "exp_avgs": "int8",
            "exp_avg_sqs": "uint8",
            "exp_avg_scales": "float32",
            "exp_avg_sq_scales": "float32",
        },
        "numbers": _NUMBERS,
    },
)
GRAD_NORM = Declared(
    "grad_norm(Tensor[] grads, float norm_type) -> Tensor",
    {"rows": Rows(("grads",)), "outputs": (Output("[]", "float32"),)},
)
CLIP_GRADS = Declared(
    "clip_grads_(Tensor(a!)[] grads, Tensor total_norm, float max_norm) -> ()",
    {"rows": Rows(("grads",)), "numbers": ("total_norm",)},
)
_LAMB = ("params", "grads", "exp_avgs", "exp_avg_sqs")
LAMB = Declared(
    "lamb_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[]"
    " exp_avg_sqs, Tensor(e!)[] state_steps, float lr, float beta1, float beta2, float eps, float"
    " weight_decay, bool adapt, bool maximize, Tensor? lr_tensor, Tensor? grad_scale, Tensor?"
    " found_inf, bool stochastic=False) -> ()",
    {"rows": Rows(_LAMB, "state_steps", (), _SCALED), "numbers": _NUMBERS},
)
LAMB_MOMENTS = Declared(
    "lamb_moments_(Tensor[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[]"
    " exp_avg_sqs, Tensor(e!)[] state_steps, float beta1, float beta2, float eps, float"
    " weight_decay, bool maximize, Tensor? grad_scale, Tensor? found_inf, bool stochastic=False) ->"
    " Tensor",
    {
        "rows": Rows(_LAMB, "state_steps", (), _SCALED),
        "numbers": ("grad_scale", "found_inf"),
        "outputs": (Output("len(params), 2", "float32"),),
    },
)
LAMB_APPLY = Declared(
    "lamb_apply_(Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[]"
    " state_steps, Tensor norms, float lr, float beta1, float beta2, float eps, float weight_decay,"
    " bool adapt, Tensor? lr_tensor, Tensor? found_inf) -> ()",
    {
        "rows": Rows(("params", "exp_avgs", "exp_avg_sqs"), "state_steps"),
        "dtypes": {"norms": "float32"},
        "shapes": {"norms": "len(params), 2"},
        "numbers": ("lr_tensor", "found_inf"),
    },
)
