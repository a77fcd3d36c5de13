"""Optimizers with the interface of ``torch.optim``, on flexops' fused operators."""

from .adam import Adam as Adam
from .adam import AdamW as AdamW
