"""The choice of tokens, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexops.ops import next_token
from flexops.ops.next_token import next_token_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run(scores: Tensor, device: str, **changes: Any) -> dict[str, Tensor]:
    """What is there after two tokens: all words are of the first column of ``tokens`` on."""
    rows = scores.shape[0]
    given: dict[str, Any] = {
        "words": None,
        "tokens": torch.full((rows, 4), -1),
        "last": torch.zeros(rows, 1, dtype=torch.int64),
        "finished": torch.zeros(rows, dtype=torch.bool),
        "at": torch.tensor([1]),
        "ends": torch.zeros(0, dtype=torch.int64),
        "pad": 0,
        "workspace": torch.zeros(rows + 1, dtype=torch.int64),
    } | changes
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    next_token_(scores.to(device), **given)
    assert not given["workspace"].any()
    return {name: x.cpu() for name, x in given.items() if isinstance(x, Tensor)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 128256), (3, 997), (5, 2048), (600, 8), (2, 1)], ids=str)
def test_the_first_of_the_largest(shape, dtype, device):
    scores = torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = run(scores, device)
    expected = [int((row == row.max()).nonzero()[0]) for row in scores]
    assert made["last"].flatten().tolist() == expected
    assert made["tokens"][:, 1].tolist() == expected
    assert (made["tokens"][:, [0, 2, 3]] == -1).all()
    assert made["at"].item() == 2


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_no_numbers(device):
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor(
        [[-inf, -inf, -inf], [1.0, nan, nan], [inf, -nan, inf], [-2.0, -0.0, 0.0], [-inf, -3, -4]]
    )
    assert run(scores, device)["last"].flatten().tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_wider_tensor(device):
    scores = torch.randn(3, 5, 4001, generator=torch.Generator().manual_seed(0))
    made = run(scores.to(device)[:, -1, 1:], device)
    assert torch.equal(made["last"][:, 0], scores[:, -1, 1:].argmax(-1))


@pytest.mark.parametrize("device", DEVICES)
def test_words_that_have_the_scores(device):
    words = torch.tensor([[5, 3, 9], [7, 8, 2]])
    made = run(torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 4.0]]), device, words=words)
    assert made["last"].flatten().tolist() == [3, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_the_end_of_a_sequence(device):
    """Finished rows get padding; a row that chooses an end is finished."""
    scores = torch.eye(4, 9) * 3
    finished = torch.tensor([False, True, False, True])
    made = run(scores, device, finished=finished, ends=torch.tensor([8, 2]), pad=6)
    assert made["last"].flatten().tolist() == [0, 6, 2, 6]
    assert made["finished"].tolist() == [False, True, True, True]
    # without ends nothing is finished
    assert run(scores, device, finished=finished)["last"].flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(3)}, r"scores must be \[rows, words\], got \[3\]"),
        ({"scores": torch.zeros(2, 0)}, r"scores must be \[rows, words\], got \[2, 0\]"),
        ({"tokens": torch.zeros(3, 4, dtype=torch.int64)}, r"tokens must have shape \[2, any\]"),
        ({"workspace": torch.zeros(2, dtype=torch.int64)}, "workspace must have 3 elements, got 2"),
        ({"last": torch.zeros(2, dtype=torch.int64)}, r"last must have shape \[2, 1\]"),
    ],
    ids=lambda one: "" if isinstance(one, str) else next(iter(one)),
)
@pytest.mark.parametrize("device", DEVICES)
def test_errors_name_the_argument(changes, message, device, monkeypatch):
    scores = changes.get("scores", torch.zeros(2, 5))
    rest = {name: x for name, x in changes.items() if name != "scores"}
    monkeypatch.setattr(next_token, "_reference", torch.ops.flexops.next_token_.default)
    given = {"tokens": torch.zeros(2, 4, dtype=torch.int64)} | rest
    with pytest.raises(ValueError, match=message):
        run(scores, device, **given)
