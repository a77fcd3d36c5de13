"""The choice of tokens, and what is kept of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flexops.ops import next_token
from flexops.ops.next_token import keep_tokens_, next_token_

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


# ---- several tokens of a row ---------------------------------------------------------------------


def tries(tokens: list[int], count: int) -> list[int]:
    """In plain Python."""
    for words in range(3, 0, -1):
        for end in range(len(tokens) - 1, words - 1, -1):
            if tokens[end - words : end] == tokens[-words:]:
                return (tokens[end - 1 :] + tokens[-1:] * count)[:count]
    return tokens[-1:] * count


def kept(
    tokens: list[int], tried: list[int], chosen: list[int], finished: bool, limit: int, ends: Any
) -> tuple[list[int], bool]:
    """In plain Python: a row's tokens, and whether it is finished."""
    for place, word in enumerate(chosen):
        if finished or len(tokens) >= limit or (place and tried[place] != chosen[place - 1]):
            break
        tokens, finished = [*tokens, word], word in ends
    return tokens, finished or len(tokens) >= limit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("new", [1, 2, 5, 32])
@pytest.mark.parametrize("words", [2, 3, 9])
def test_what_is_kept_and_tried_next(words, new, device):
    generator = torch.Generator().manual_seed(words * new)
    draw = functools.partial(torch.randint, generator=generator)
    rows, room = 100, 900
    tokens, known = draw(words, (rows, room)), draw(1, room - new, (rows,))
    known[:50].remainder_(20).add_(1)
    tried, chosen = draw(2, (rows, new)), draw(2, (rows, new))
    right = draw(new + 1, (rows, 1)) > torch.arange(new)
    tried[:, 1:] = torch.where(right[:, :-1], chosen[:, :-1], tried[:, 1:])
    chosen[draw(9, (rows, new)) == 0] = 7
    finished, limit, ends = draw(5, (rows,)) == 0, torch.tensor([700]), torch.tensor([3, 7])
    before = [x.tolist() for x in (tokens, known, tried, chosen, finished)]
    given = chosen, tokens, known, finished, limit, ends, tried, known.int()
    on_device = [x.to(device) for x in given]
    keep_tokens_(*on_device)
    _, tokens, known, finished, _, _, tried, lengths = (x.cpu() for x in on_device)
    for row, (all_tokens, count, *others, ended) in enumerate(zip(*before, strict=True)):
        expected, ends_now = kept(all_tokens[:count], *others, ended, 700, (3, 7))
        assert int(known[row]) == len(expected) == int(lengths[row]) + 1
        assert tokens[row].tolist() == expected + all_tokens[len(expected) :]
        assert bool(finished[row]) is ends_now
        assert tried[row].tolist() == tries(expected, new)


@pytest.mark.parametrize(
    ("chosen", "tokens", "message"),
    [
        ((2, 33), (2, 50), r"chosen must be \[rows, 1 to 32\], got \[2, 33\]"),
        ((2,), (2, 50), r"chosen must be \[rows, 1 to 32\], got \[2\]"),
        ((2, 3), (3, 50), r"tokens must have shape \[2, any\], got \[3, 50\]"),
    ],
)
def test_tokens_of_another_shape_are_named(chosen, tokens, message):
    given = [torch.zeros(shape, dtype=torch.int64) for shape in (chosen, tokens, (2,))]
    finished, lengths = torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int32)
    ends = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        torch.ops.flexops.keep_tokens_(*given, finished, *ends, given[0].clone(), lengths)


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
