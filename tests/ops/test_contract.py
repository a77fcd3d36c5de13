"""The shared contract for the operators that are older than it; see contract.py. Their own tests say much more."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from contract import ISA_LEVELS, Case, Contract, Make, Shape
from step_contract import needs_mutable_lists
from torch import Tensor

import flexops


def weights(make: Make, shape: Shape) -> tuple[Tensor]:
    return (make(*shape),)


def roundtrip(bits: int, dim: int, symmetric: bool) -> Case:
    def call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = flexops.quantize(x, bits, 4, dim, symmetric)
        return flexops.dequantize(q), q.packed, q.scales

    return Case(f"quantize int{bits} along {dim}", "quant", call, weights, oracle=call, names=("x",), shapes=((8, 8), (16, 100), (65, 516)),
                same_bits=True, accuracy=False, autocast=False, huge=(2**18 + 64, 2**13) if dim else None)  # fmt: skip


def adam_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    states = make(*shape, dtype=torch.float32), make.uniform(*shape, dtype=torch.float32)
    return make(*shape), make(*shape), *states, torch.full((), 3.0, device=make.device)


def adamw(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    flexops.adam_([param], [grad], [exp_avg], [exp_avg_sq], [], [step], lr=1e-2, weight_decay=0.1, decoupled=True)
    return param, exp_avg, exp_avg_sq, step


def plain_adamw(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    step = step + 1
    exp_avg = 0.9 * exp_avg + 0.1 * grad
    exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * grad * grad
    denominator = exp_avg_sq.sqrt() / (1 - 0.999**step).sqrt() + 1e-8
    return (param * (1 - 1e-3) - 1e-2 / (1 - 0.9**step) * exp_avg / denominator).to(param.dtype), exp_avg, exp_avg_sq, step


def test_the_environment_limits_the_instruction_set() -> None:
    program = "import ctypes, torch, flexops; flexops.swiglu(torch.ones(2)); library = next(one.path for one in flexops.status() if one.path)\n"
    program += "print(ctypes.CDLL(str(library)).flexops_cpu_isa(None))"
    for number, level in enumerate(ISA_LEVELS[:2]):
        run = subprocess.run([sys.executable, "-c", program], env=os.environ | {"FLEXOPS_CPU_ISA": level}, capture_output=True, text=True, check=True)
        assert int(run.stdout) <= number


class TestQuant(Contract):
    cases = (roundtrip(4, 1, False), roundtrip(8, 0, True))


@needs_mutable_lists  # all of it; what does not need them, test_adam.py has too
class TestAdam(Contract):
    cases = (Case("AdamW step", "adam", adamw, adam_inputs, oracle=plain_adamw, shapes=((3, 8), (5, 100), (64, 512)), broadcasts=False, autocast=False),)
