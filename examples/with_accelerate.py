"""accelerate: mixed precision and gradient accumulation around a patched model.

pip install transformers accelerate
python examples/with_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from text import DEVICE, Dataset, show, tiny_llama

import flexops

accelerator = Accelerator(
    mixed_precision="bf16", gradient_accumulation_steps=2, cpu=DEVICE == "cpu"
)
model = tiny_llama().train()
print(flexops.patch(model))
optimizer = flexops.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, batches = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(Dataset(), batch_size=8)
)

losses = []
for batch in batches:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
show(losses)
