"""What the package promises where there is no compiler: every library in it opens and is the one in
use. A GPU is not needed."""

from __future__ import annotations

import os

os.environ.update(FLEXOPS_JIT="0", FLEXOPS_FALLBACK="forbid")

import torch

import flexops
from flexops.build.describe import layout
from flexops.build.load import loader

shipped = sorted(path.name for path in layout.aot_root().iterdir())
for name in shipped:
    loader.ensure(*name.rsplit("-", 1))
opened = {
    f"{status.op}-{status.device}": status for status in flexops.status() if status.backend == "aot"
}
assert sorted(opened) == shipped, (shipped, flexops.status())
assert any(name.endswith("-cpu") for name in shipped), shipped

parameter = torch.nn.Parameter(torch.ones(1000))
optimizer = flexops.optim.AdamW([parameter], lr=0.1)
parameter.square().sum().backward()
optimizer.step()
assert torch.allclose(parameter.detach(), torch.full((1000,), 0.9), atol=0.01), parameter
print("in use:", *shipped)
