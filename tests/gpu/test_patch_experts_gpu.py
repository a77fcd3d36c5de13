"""``experts_implementation="flexops"`` on a GPU: classes of transformers against themselves in
float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexops.patching.experts import experts

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_experts_per_tok": 2}
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralExperts", {"num_local_experts": 5}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", {"moe_intermediate_size": 72}),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", {"num_local_experts": 4}),
    "nemotron_h": ("NemotronHConfig", "NemotronHExperts", {"moe_intermediate_size": 64}),
}


def run(module: Any, function: Any, args: tuple[Tensor, ...]) -> list[Tensor]:
    given = [one.detach().requires_grad_() if one.is_floating_point() else one for one in args]
    out = function(module, *given)
    sources = [*(one for one in given if one.requires_grad), *module.parameters()]
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), sources)]


@pytest.mark.parametrize("name", CLASSES)
def test_as_exact_as_the_class(name):
    torch.manual_seed(3)
    config_name, class_name, more = CLASSES[name]
    config = getattr(transformers, config_name)(**SIZES, **more)
    config._experts_implementation = "eager"
    module_of = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=[class_name])
    module = getattr(module_of, class_name)(config).cuda().bfloat16()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.1)
    weights, choices = torch.rand(300, module.num_experts, device="cuda").topk(2, -1)
    hidden = torch.randn(300, module.down_proj.shape[1 + module.is_transposed], device="cuda")
    args = hidden.bfloat16(), choices, weights.bfloat16()
    plain = run(module, lambda one, *given: one(*given), args)
    ours = run(module, experts, args)
    wide = tuple(one.double() if one.is_floating_point() else one for one in args)
    exact = run(module.double(), lambda one, *given: one(*given), wide)
    for got, other, wanted in zip(ours, plain, exact, strict=True):
        errors = [(one.double() - wanted).norm() / wanted.norm() for one in (got, other)]
        assert errors[0] < max(1.2 * errors[1], 4e-3)
