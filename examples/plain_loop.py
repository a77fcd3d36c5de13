"""A training loop of one's own: autocast, clipping, and on a GPU a GradScaler for float16.

pip install transformers
python examples/plain_loop.py
"""

from __future__ import annotations

import torch
from text import DEVICE, Dataset, show, tiny_llama

import flexops

model = tiny_llama().to(DEVICE).train()
print(flexops.patch(model))
optimizer = flexops.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
dtype = torch.float16 if DEVICE == "cuda" else torch.bfloat16

losses = []
for batch in torch.utils.data.DataLoader(Dataset(), batch_size=8):
    with torch.autocast(DEVICE, dtype=dtype):
        loss = model(**{name: value.to(DEVICE) for name, value in batch.items()}).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    flexops.optim.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
show(losses)
