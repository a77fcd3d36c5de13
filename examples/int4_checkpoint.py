"""Load a checkpoint with 4-bit weights, in any format that flexops reads, and generate.

pip install transformers
python examples/int4_checkpoint.py [a folder, or a name on the Hub]

Without an argument it writes a tiny random checkpoint first.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from text import DEVICE, TEXT, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import flexops

PROMPT = TEXT[:100]


def generate(name: str, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        name, quantization_config=flexops.patching.Int4Config(), device_map=DEVICE
    )
    print(flexops.patch(model))
    tokens: torch.Tensor = model.generate(ids.to(DEVICE), max_new_tokens=20, do_sample=False)
    return tokens[0, ids.shape[1] :]


if len(sys.argv) > 1:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    made = generate(sys.argv[1], tokenizer(PROMPT, return_tensors="pt").input_ids)
    print(f"{PROMPT!r} -> {tokenizer.decode(made)!r}")
else:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama().bfloat16()
        flexops.patch(model, weights="int4")
        model.save_pretrained(folder)
        made = generate(folder, torch.tensor([list(PROMPT.encode())]))
    print(f"{PROMPT!r} -> {bytes(made.tolist())!r}")
