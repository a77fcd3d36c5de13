"""transformers' Trainer: patch the model, hand over the optimizer's class.

pip install transformers accelerate
python examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile

from text import DEVICE, Dataset, show, tiny_llama
from transformers import Trainer, TrainingArguments

import flexops

model = tiny_llama()
print(flexops.patch(model))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        num_train_epochs=1,
        logging_steps=1,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=DEVICE == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        eval_strategy="epoch",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Dataset(),
        eval_dataset=Dataset(pieces=16),
        optimizer_cls_and_kwargs=(flexops.optim.AdamW, {"lr": 3e-3}),
    )
    trainer.train()
show([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
