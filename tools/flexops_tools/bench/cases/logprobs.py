"""logprobs and linear_logprobs, each with its gradient."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flexops.ops import linear_logprobs as linear
from flexops.ops import logprobs as op

from .case import Case, Family, Setup, contenders
from .cross_entropy import classes, layer


def logprobs(setup: Setup) -> Iterator[Case]:
    family, rows = Family("logprobs", setup), setup.rows(8192)
    vocabulary = 151936 if setup.device == "cuda" else 32000
    args = (setup.randn(rows, vocabulary), classes(setup, rows, vocabulary))
    moved = 3 * args[0].nbytes, "reads the logits twice, writes their gradient"
    functions, what = contenders(setup, op.logprobs, torch_logprobs), f"bf16 {rows}x{vocabulary}"
    yield family.trained("logprobs", f"logprobs {what}", functions, args, (0,), moved, memory=True)
    del args
    *layers, what = layer(setup, vocabulary)
    functions = contenders(setup, linear.linear_logprobs, torch_linear)
    name, moved = "linear_logprobs", (0, "three to four matrix products bound it, not memory")
    yield family.trained(name, f"{name} {what}", functions, layers, (0, 1), moved, memory=True)


def torch_logprobs(logits: Tensor, target: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1).float()


def torch_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch_logprobs(x @ weight.t(), target)
