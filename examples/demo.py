"""``python examples/demo.py``: the operators at work in a minute: a model trained next to torch's
own optimizer, and a weight matrix in 4 bits.

Exits 1 if the losses part by more than ``TOLERANCE``, or a quantized weight is further off than
half a step.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from flexops import dequantize, optim, quantize, status

STEPS = 60
TOLERANCE = 1e-3
"""Relative. Both optimizers do the same arithmetic in float32; the order of roundings differs, and
training carries that on."""


def main() -> int:
    """Returns the exit code: 0 if everything agrees."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # of a model this small they mostly wait for each other, on a busy machine for seconds
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__} on {name}")
    agree = _train(device)
    exact = _quantize(device)
    for op in status():
        if op.backend != "unasked":
            print(f"{op.op} on {op.device}: {op.backend} ({op.reason})")
    print("the demonstration went well" if agree and exact else "the demonstration FAILED")
    return 0 if agree and exact else 1


def _train(device: str) -> bool:
    print(f"training a small model for {STEPS} steps, twice from the same start")
    ours = _losses(optim.AdamW, device)
    theirs = _losses(torch.optim.AdamW, device)
    for step in (0, STEPS // 2, STEPS - 1):
        print(
            f"  step {step + 1:>3}   loss {ours[step]:.6f} with flexops.optim.AdamW,"
            f" {theirs[step]:.6f} with torch.optim.AdamW"
        )
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    print(f"  losses differ by at most {apart:.1e} (allowed: {TOLERANCE:.0e}, relative)")
    return apart <= TOLERANCE and ours[-1] < ours[0]


def _losses(kind: type[torch.optim.Optimizer], device: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)
    ).to(device)
    x = torch.randn(256, 32, device=device)
    y = torch.sin(x @ torch.randn(32, 8, device=device) / 6)
    optimizer = kind(model.parameters(), lr=1e-3, weight_decay=0.01)  # type: ignore[call-arg]
    losses: list[Tensor] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def _quantize(device: str) -> bool:
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)).to(device)
    packed = quantize(weight, bits=4, group_size=64)
    error = (dequantize(packed) - weight).abs()
    groups = weight.view(2048, -1, 64)
    half_step = (groups.amax(-1) - groups.amin(-1)) / 15 / 2
    worst = (error.view_as(groups).amax(-1) / half_step).max().item()
    relative = float(error.norm() / weight.norm())
    print(
        f"a {tuple(weight.shape)} weight matrix in 4 bits: {weight.nbytes / 2**20:.0f} ->"
        f" {packed.nbytes / 2**20:.1f} MiB"
    )
    print(f"  relative error {relative:.3f} (root mean square), at most {worst:.3f} of half a step")
    return worst <= 1.001


if __name__ == "__main__":
    sys.exit(main())
