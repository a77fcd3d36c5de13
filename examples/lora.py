"""PEFT: LoRA on a patched model. (Patching the adapted model does the same.)

pip install transformers peft
python examples/lora.py
"""

from __future__ import annotations

import peft
import torch
from text import DEVICE, Dataset, show, tiny_llama

import flexops

model = tiny_llama().to(DEVICE)
print(flexops.patch(model))
adapted = peft.get_peft_model(
    model, peft.LoraConfig(r=16, lora_alpha=64, target_modules="all-linear")
).train()
adapted.print_trainable_parameters()
optimizer = flexops.optim.AdamW(
    [value for value in adapted.parameters() if value.requires_grad], lr=1e-2
)

losses = []
for batch in torch.utils.data.DataLoader(Dataset(), batch_size=8):
    loss = adapted(**{name: value.to(DEVICE) for name, value in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
show(losses, by=0.1)  # a random model has learned nothing that could be adapted
