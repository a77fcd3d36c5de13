"""Optimizers with the interface of ``torch.optim``, and gradient clipping, on flexops' fused
operators."""

from .adagrad import Adagrad as Adagrad
from .adam import Adam as Adam
from .adam import AdamW as AdamW
from .adam8bit import AdamW8bit as AdamW8bit
from .clip import clip_grad_norm_ as clip_grad_norm_
from .lamb import LAMB as LAMB
from .lion import Lion as Lion
from .muon import Muon as Muon
