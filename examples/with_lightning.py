"""Lightning: bf16-mixed, with its own gradient clipping, which wants an optimizer that leaves
unscaling to the scaler (fused=False).

    pip install transformers lightning
    python examples/with_lightning.py
"""

from __future__ import annotations

import lightning
import torch
from text import DEVICE, Dataset, show, tiny_llama

import flexops


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.losses: list[float] = []
        print(flexops.patch(self.model))

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return flexops.optim.AdamW(self.parameters(), lr=3e-3, fused=False)


module = Module().train()
trainer = lightning.Trainer(
    max_epochs=1,
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    accelerator="gpu" if DEVICE == "cuda" else "cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(Dataset(), batch_size=8))
show(module.losses)
