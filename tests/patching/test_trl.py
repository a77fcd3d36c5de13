"""TRL's trainers with a patched model: their losses are computed by flexops' log-probabilities, and
have the values that they have without."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import flexops
from flexops.patching import trl as door

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
STEPS = 4
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 3,
}


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", *WORDS]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def dataset(rows: list[dict[str, Any]]) -> Any:
    import datasets  # with pandas and pyarrow, which every process that collects would import

    return datasets.Dataset.from_list(rows)


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=3 + len(WORDS),
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def text(seed: int, count: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (count,), generator=generator))


def sft(model: Any, folder: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": text(i, 4), "completion": " " + text(100 + i, 6)} for i in range(16)]
    return SFTTrainer(
        model,
        args=SFTConfig(output_dir=str(folder), **OPTIONS),
        train_dataset=dataset(rows),
        processing_class=tokenizer(),
    )


def dpo(model: Any, folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    rows = [
        {
            "prompt": text(i, 4),
            "chosen": " " + text(100 + i, 6),
            "rejected": " " + text(200 + i, 5),
        }
        for i in range(16)
    ]
    return DPOTrainer(
        model,
        args=DPOConfig(output_dir=str(folder), **OPTIONS),
        train_dataset=dataset(rows),
        processing_class=tokenizer(),
    )


def kto(model: Any, folder: Path) -> Any:
    from trl import KTOConfig, KTOTrainer

    rows = [
        {"prompt": text(i, 4), "completion": " " + text(100 + i, 6), "label": i % 2 == 0}
        for i in range(16)
    ]
    return KTOTrainer(
        model,
        args=KTOConfig(output_dir=str(folder), **OPTIONS),
        train_dataset=dataset(rows),
        processing_class=tokenizer(),
    )


def grpo(model: Any, folder: Path, kind: str = "GRPO") -> Any:
    import trl

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(each.count("one") + 0.1 * len(each.split())) for each in completions]

    return getattr(trl, f"{kind}Trainer")(
        model,
        args=getattr(trl, f"{kind}Config")(
            output_dir=str(folder),
            num_generations=4,
            max_completion_length=6,
            temperature=0.9,
            beta=0.04,
            **OPTIONS,
        ),
        reward_funcs=reward,
        train_dataset=dataset([{"prompt": text(i, 4)} for i in range(16)]),
        processing_class=tokenizer(),
    )


def rloo(model: Any, folder: Path) -> Any:
    return grpo(model, folder, "RLOO")


def curve(make: Any, patched: bool, folder: Path) -> list[dict[str, float]]:
    """The trainer reads a reference model, which is not patched, from the folder."""
    tiny_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if patched:
        assert flexops.patch(model).swapped
    trainer = make(model, folder)
    trainer.train()
    skipped = ("runtime", "second", "time", "flos")
    return [
        {k: v for k, v in entry.items() if not any(word in k for word in skipped)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = door.with_statistics
    monkeypatch.setattr(
        door, "with_statistics", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    return calls


@pytest.mark.parametrize(
    "make",
    [sft, dpo, grpo, *(pytest.param(one, marks=pytest.mark.extra) for one in (kto, rloo))],
    ids=lambda make: make.__name__,
)
def test_curves_are_the_same_to_rounding(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = curve(make, False, tmp_path / "plain")
    calls = counted(monkeypatch)
    actual = curve(make, True, tmp_path / "patched")
    assert len(calls) >= STEPS
    assert len(actual) == len(expected) == STEPS
    # The first step's policy is its reference: which of two zeros is greater is a rounding.
    for first in (actual[0], expected[0]):
        first.pop("rewards/accuracies", None)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-3, abs=2e-4)


def fused(model: Any, **options: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, **options)
    ids = torch.randint(3, 13, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :3] = -100
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    return {key: value for key, value in output.items() if value is not None}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "outputs": ("log_probs", "entropy", "mean_logits", "is_top1")},
        {"cast_lm_head_to_fp32": True},
    ],
)
def test_every_output_is_that_of_trl(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    plain = tiny_model()
    patched = copy.deepcopy(plain)
    flexops.patch(patched)
    expected, calls = fused(plain, **options), counted(monkeypatch)
    actual = fused(patched, **options)
    assert calls
    torch.testing.assert_close(actual, expected)


def test_trl_computes_what_flexops_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are not patched, and outputs that have no counterpart."""
    plain, calls = tiny_model(), counted(monkeypatch)
    patched = copy.deepcopy(plain)
    flexops.patch(patched)
    fused(plain)
    outputs = ("log_probs", "log_sum_sq_probs")
    actual, expected = fused(patched, outputs=outputs), fused(tiny_model(), outputs=outputs)
    assert not calls
    torch.testing.assert_close(actual, expected)
    flexops.unpatch(patched)
    fused(patched)
    assert not calls


def test_trl_may_be_imported_after_the_patch() -> None:
    code = """if True:
        import sys, transformers, flexops
        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16,
            num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
        before = len(sys.meta_path)
        flexops.patch(transformers.LlamaForCausalLM(config))
        flexops.patch(transformers.LlamaForCausalLM(config))
        assert "trl.trainer.utils" not in sys.modules
        assert len(sys.meta_path) == before + 1
        import trl.trainer.utils as utils
        assert type(utils._ChunkedLogProbFunction).__module__ == "flexops.patching.trl"
        assert not [each for each in sys.meta_path if type(each).__module__ == "flexops._torch"
            and each._module == "trl.trainer.utils"]
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1200)
