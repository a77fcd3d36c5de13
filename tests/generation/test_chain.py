"""Products of a decode step that wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

import flexops
from flexops.generation import chain, step
from flexops.generation import state as stepping
from flexops.generation.layers import Store
from flexops.generation.state import state
from flexops.ops import few_rows, few_rows_chain
from flexops.ops.few_rows_chain import Phase
from flexops.ops.int4_linear import product_reference
from flexops.patching import Int4Config

NEW = 5
INT4 = Int4Config(group_size=32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Products wait on the CPU, too; how many each launch has computed."""
    found: list[int] = []
    run = chain.few_rows_chain_

    def counted(phases: Any, *args: Any, **options: Any) -> None:
        found.append(len(phases))
        run(phases, *args, **options)

    monkeypatch.setattr(chain, "few_rows_chain_", counted)
    monkeypatch.setattr(chain, "runs_on", lambda _: True)
    return found


def steps(model: Any, sequences: int = 2) -> tuple[Tensor, Tensor]:
    """The tokens of a few steps, and the logits of each. Products of 4 bits are computed by the
    chain's reference; kernels for the CPU sum in another order."""
    tokens, logits = torch.arange(3, 21).view(sequences, -1), []
    own = step.logits_of

    def kept(*args: Any) -> Tensor:
        logits.append(own(*args))
        return logits[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "logits_of", kept)
        patch.setattr(few_rows, "int4_linear", product_reference)
        found = flexops.generate(model, tokens, max_new_tokens=NEW, eos_token_id=())
    return found, torch.stack(logits)


def without(
    monkeypatch: pytest.MonkeyPatch, model: Any, sequences: int = 2
) -> tuple[Tensor, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(chain, "runs_on", lambda _: False)
        return steps(model, sequences)


LAUNCHES = {
    ("llama", 2): [1, 4, 3],  # q, k and v; what follows an attention; the same before the head
    ("llama", 1): [10],  # with attention
    ("mistral", 1): [10],  # its attention has a window
    ("qwen3", 1): [10],  # its queries and keys are normalized
    ("qwen3", 2): [1, 4, 3],
    ("gemma3", 2): [1, 1, 2, 1, 1, 2],
    ("gpt_oss", 2): [1, 1, 1, 1],
}
HEAD_DIM = {"head_dim": 32}  # the least that has attention in the same kernel


@pytest.mark.parametrize(("name", "sequences"), LAUNCHES)
def test_steps_compute_the_same(
    name: str, sequences: int, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {} if sequences == 2 else HEAD_DIM
    model = tiny.model(name, torch.bfloat16, **changes).eval()
    flexops.patch(model, weights=INT4)
    expected = without(monkeypatch, model, sequences)
    assert not launches
    found = steps(model, sequences)
    assert launches == LAUNCHES[name, sequences] * (NEW - 1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Reading(nn.Module):
    """A layer of a model's own, which reads what the one before it has computed."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states * hidden_states.float().abs().mean().to(hidden_states.dtype)


@pytest.mark.parametrize("known", [False, True])
def test_code_between_products_reads_written_tensors(
    known: bool, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of an unknown package might do so by a kernel that torch does not see: then nothing
    waits."""
    if known:
        monkeypatch.setattr(chain, "_KNOWN", (*chain._KNOWN, __name__.partition(".")[0]))
    model = tiny.model("llama", torch.bfloat16, num_hidden_layers=3).eval()
    flexops.patch(model, weights=INT4)
    model.model.layers[1] = Reading()
    expected = without(monkeypatch, model)
    found = steps(model)
    assert launches == ([1, 3, 1, 3] * (NEW - 1) if known else [])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_replaced_forward_is_unknown_code() -> None:
    model = tiny.model("llama", torch.bfloat16).eval()
    flexops.patch(model)
    assert all(map(chain._is_known, model.modules()))
    model.model.norm.forward = lambda x: x
    assert not chain._is_known(model.model.norm)


def products(count: int, **changes: Any) -> list[Phase]:
    """So many products, each of the result of the one before."""
    x, made = torch.randn(1, 32).bfloat16(), []
    for _ in range(count):
        weight = flexops.quantize_int4(torch.randn(32, 32).half(), 32)
        phase = Phase(torch.full_like(x, torch.nan), x, [weight], [], None, None, 0)
        made.append(phase._replace(**changes))
        x = made[-1].out
    return made


def record(queue: Any, phases: list[Phase]) -> None:
    for phase in phases:
        assert queue.add(phase, (1e-6, 0.0)) is phase.out


def workspace() -> Tensor:
    return torch.zeros(few_rows_chain.WORKSPACE, dtype=torch.int32)


def test_more_products_than_a_launch_takes(launches: list[int]) -> None:
    phases = products(few_rows_chain.MOST_PRODUCTS + 2)
    with chain.Queue(workspace()) as queue:
        record(queue, phases)
        assert launches == [few_rows_chain.MOST_PRODUCTS]
        queue.run()
    assert launches == [few_rows_chain.MOST_PRODUCTS, 2]
    for phase in phases:
        assert torch.equal(phase.out, few_rows.composed(phase.x, phase.weights))


def test_layers_that_one_launch_does_not_take(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model("llama", torch.bfloat16, num_hidden_layers=7, **HEAD_DIM).eval()
    flexops.patch(model, weights=INT4)
    expected = without(monkeypatch, model, 1)
    found = steps(model, 1)
    assert launches == [few_rows_chain.MOST_PHASES, 35 - few_rows_chain.MOST_PHASES] * (NEW - 1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_attention_of_what_was_not_recorded(launches: list[int]) -> None:
    """Queries, keys and values that are not the last product's result, as it lies, are computed
    apart."""
    (product,) = products(1)
    x = product.out
    caches = torch.zeros(1, 9, 1, 32), torch.zeros(1, 9, 1, 32)
    rest = *caches, None, (torch.zeros(1), None), None, -1
    with chain.Queue(workspace()) as queue:
        assert queue.attend(*[x.view(1, 1, 1, 32)] * 3, *rest) is None  # nothing is recorded
        record(queue, [product])
        parts = x.view(1, 1, 1, 32)
        assert queue.attend(parts, parts, parts, *rest) is None
        assert not launches


HEADS, GAIN = (1, 1, 4, 8), torch.full((8,), 0.5).bfloat16()


def normalize(queue: Any, x: Tensor) -> Any:
    """A recorded norm of a product's heads."""
    return queue.normalize(x.view(HEADS), GAIN, 1e-5, 1.0)


@pytest.mark.parametrize(
    "read",
    [
        lambda _, x: x + 1,
        lambda _, x: x.view(-1)[3:].clone(),
        lambda _, x: torch.cat([x, x]),
        lambda queue, x: queue.add(products(1, x=x.view(1, 32))[0], (1e-6, 0.0)),
        lambda queue, x: queue.add(products(1, residual=x.view(1, 32))[0], (1e-6, 0.0)),
    ],
)
def test_norms_that_anything_but_attention_reads_are_computed(
    read: Any, launches: list[int]
) -> None:
    (product,) = products(1)
    with torch.no_grad(), chain.Queue(workspace()) as queue:
        record(queue, [product])
        made = normalize(queue, product.out)
        assert not launches
        read(queue, made)
        assert launches == [1]
        assert torch.equal(made, flexops.rms_norm(product.out.view(HEADS), GAIN + 1, 1e-5))


def test_norms_that_are_not_recorded(launches: list[int]) -> None:
    """Of what no product has just given, of several tokens, in another dtype, of all heads."""
    first, second = products(2)
    single, wide = GAIN.float(), torch.ones(32).bfloat16()
    with torch.no_grad(), chain.Queue(workspace()) as queue:
        assert normalize(queue, first.out) is None
        record(queue, [first, second])
        assert normalize(queue, first.out) is None
        x = second.out
        assert queue.normalize(x.view(1, 4, 1, 8), GAIN, 1e-5, 1.0) is None
        assert queue.normalize(x.view(HEADS), single, 1e-5, 1.0) is None
        assert queue.normalize(x.view(HEADS).transpose(2, 3), GAIN[:4], 1e-5, 1.0) is None
        assert queue.normalize(x, wide, 1e-5, 1.0) is None
        assert normalize(queue, x) is not None
        assert not launches


def test_attention_behind_norms(launches: list[int]) -> None:
    """Of queries and keys, whole and alike; then nothing else has to be computed."""
    x, weight = torch.randn(1, 64).bfloat16(), torch.ones(32).bfloat16()
    three = [flexops.quantize_int4(torch.randn(32, 64).half(), 32) for _ in range(3)]
    product = Phase(torch.empty(1, 96).bfloat16(), x, three, [], None, None, 0)
    keys, values = torch.zeros(2, 1, 9, 1, 32).bfloat16()
    rest = keys, values, None, (torch.zeros(1, dtype=torch.int32), None), None, -1
    with torch.no_grad(), chain.Queue(workspace()) as queue:
        record(queue, [product])
        q, k, v = product.out.view(1, 1, 3, 32).split(1, 2)
        of_q, of_k, other = (queue.normalize(one, weight, eps, 0.0)
                             for one, eps in ((q, 1e-5), (k, 1e-5), (k, 1e-6)))  # fmt: skip
        assert queue.attend(of_q, k, v, *rest) is None
        assert queue.attend(of_q, other, v, *rest) is None
        assert queue.attend(of_q, of_k, other, *rest) is None
        assert queue.attend(of_q.view(1, 1, 2, 16), of_k.view(1, 1, 2, 16), v, *rest) is None
        made = queue.attend(of_q.transpose(1, 2).transpose(1, 2), of_k, v, *rest)
        assert not launches
        queue.run()
    assert launches == [2]
    assert torch.equal(made, v)
    assert torch.equal(keys[:, :1], flexops.rms_norm(k, weight, 1e-5))
    assert torch.equal(values[:, :1], v)


def test_products_that_one_launch_does_not_take(launches: list[int]) -> None:
    """Of another number of rows, dtype, kind of groups or norm; what has no norm fits."""
    x, two, norm = (torch.randn(shape).bfloat16() for shape in ((1, 64), (2, 64), (64,)))
    small, large = (flexops.quantize_int4(torch.randn(64, 64).half(), size) for size in (32, 64))
    plain = Phase(x.clone(), x, [large], [], None, None, 0)
    normed, wide = plain._replace(norm=norm), plain._replace(x=two, out=two.clone())
    half, grouped = plain._replace(x=x.half(), out=x.half()), plain._replace(weights=[small])
    with chain.Queue(workspace()) as queue:
        record(queue, [plain, plain, wide, half])
        assert launches == [2, 1]
        record(queue, [plain, grouped])
        assert launches == [2, 1, 1, 1]
        queue.add(normed, (1e-6, 0.0))
        queue.add(plain, (1e-6, 0.0))
        queue.add(normed, (1e-6, 1.0))
        record(queue, [plain])
        queue.run()
    assert launches == [2, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("read", "runs"),
    [
        (lambda x: x.view(2, 16)[:, 3].unsqueeze(0), False),
        (lambda x: x.reshape(2, 16).split([4, 12], -1), False),
        (torch.empty_like, False),
        (lambda x: x + 1, True),
        (lambda x: x.float(), True),
        (lambda x: x.to(torch.bfloat16, copy=True), True),
        (lambda x: x.t().reshape(32, 1), False),
        (lambda x: x[:, ::2].contiguous(), True),
        (lambda x: x.view(4, 8).t().reshape(32), True),
        (lambda x: x[0, 0].item(), True),
        (lambda x: x.zero_(), True),
        (lambda x: flexops.rms_norm(x, torch.ones(32).bfloat16()), True),
        (
            lambda x: flexops.rotary_embedding(x.view(1, 1, 1, 32), None, *torch.ones(2, 1, 16)),
            True,
        ),
        (torch.compile(lambda x: x + 1, backend="eager"), True),
    ],
)
def test_what_reads_has_products_computed_before(
    read: Any, runs: bool, launches: list[int]
) -> None:
    phases = products(1)
    with torch.no_grad(), chain.Queue(workspace()) as queue:
        record(queue, phases)
        read(phases[0].out)
        assert launches == [1] * runs


def test_what_failed_computes_nothing_more(launches: list[int]) -> None:
    model, store, phases = nn.Linear(2, 2), Store(1, 8), products(1)

    def take(*more: Any) -> None:
        with stepping.step(store.tables), chain.deferring(model, store, torch.zeros(1, 1)):
            record(state.queue, [*phases, *more])

    with pytest.raises(AttributeError):
        take(None)
    assert not launches
    assert state.queue is None
    take()
    assert launches == [1]
