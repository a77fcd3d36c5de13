"""``flexops bench model`` on a small one: the contenders, the report, and the charts."""

from __future__ import annotations

import gc
import json
import re
import threading
import weakref

import pytest
import torch
from command_line import flexops_command

from flexops.errors import FlexopsError
from flexops_tools.bench import model

pytestmark = pytest.mark.usefixtures("transformers_models")


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_5_vl", "qwen3_5_text"])
def test_models_of_other_kinds(kind, monkeypatch):
    monkeypatch.setattr(model, "PATCHES", 4)
    monkeypatch.setattr(model, "VISION", {"depth": 1, "hidden_size": 32, "num_heads": 2})
    shape = model.Shape(64, 1, 4, 2, 128, 512, 2, 24, kind)
    tokens = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    plain, ours = (
        model.Contender(shape, "cpu", kind=who).step(tokens).item() for who in ("", "flexops")
    )
    assert ours == pytest.approx(plain, rel=1e-5)
    assert plain > 5


@pytest.mark.extra
@pytest.mark.parametrize(("kind", "most"), [("qwen3_moe", 1), ("llama", 2)])
def test_of_models_with_experts_there_is_one_at_a_time(kind, most, monkeypatch):
    """Four of them take 95 GB on a GPU."""
    alive, seen = weakref.WeakSet(), []
    make = model.make_model

    def counted(*args):
        made = make(*args)
        alive.add(made)
        gc.collect()
        seen.append(len(alive))
        return made

    monkeypatch.setattr(model, "make_model", counted)
    shape = model.Shape(64, 1, 4, 2, 128, 512, 2, 24, kind)
    chosen = {name: model.CONTENDERS[name] for name in ("transformers", "flexops.patch")}
    tokens = torch.randint(0, 512, (8, 2, 24), generator=torch.Generator().manual_seed(0))
    found = [*model._times(shape, "cpu", chosen, tokens.flatten(), 0.1, lambda _: None)]
    assert [one.name for one in found] == [*chosen]
    assert all(one.milliseconds > 0 for one in found)
    assert max(seen) == most


def test_times_and_losses_of_all_who_can_take_part(tmp_path):
    names = ["transformers", "flexops.patch", "Liger"]
    options = ["--device", "cpu", "--batch", "2", "--length", "16", "--budget", "0.2", "--curve",
        "25", "--json"]  # fmt: skip
    done = flexops_command(
        "bench",
        "model",
        *options,
        *(part for name in names for part in ("--contender", name)),
        catch_exceptions=True,
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["results"]] == ["transformers", "flexops.patch"]
    assert all(one["milliseconds"] > 0 for one in found["results"])
    assert [one["flexops"] for one in found["results"]] == [False, True]
    assert found["absent"] == {"Liger": "its kernels need a GPU"}
    losses = found["losses"]
    assert set(losses) == {"transformers", "flexops.patch", "transformers" + model.OTHER_SEED}
    assert all(len(values) == 25 and values[-1] < values[0] for values in losses.values())
    assert model.mean_distance(losses, "flexops.patch", "transformers") < 0.1 * model.mean_distance(
        losses, f"transformers{model.OTHER_SEED}", "transformers"
    )
    (tmp_path / "run.json").write_text(done.stdout)

    again = ["bench", "model", "--from", str(tmp_path / "run.json")]
    table = flexops_command(*again, "--markdown", catch_exceptions=True).stdout
    assert f"| flexops.patch | {found['results'][1]['milliseconds']} | 0.0 | 0 |" in table
    assert re.search(r"\| transformers, another seed \| \d+\.\d{3} \| 0\.\d{4} \|", table)
    shown = flexops_command(*again, catch_exceptions=True).stdout
    assert "Liger takes no part: its kernels need a GPU" in shown
    assert (
        flexops_command(
            *again, "--plot", str(tmp_path / "run.svg"), catch_exceptions=True
        ).exit_code
        == 0
    )
    assert "flexops.patch" in (tmp_path / "run.svg").read_text()
    assert (tmp_path / "run-losses.svg").stat().st_size > 0


def test_batches_are_the_same_for_all_and_real_text():
    shape = model.SHAPES["tiny"]
    tokens = model.text_tokens(1000, shape.vocabulary)
    assert len(tokens) >= 1000
    assert int(tokens.max()) == shape.vocabulary - 1  # rare words
    one, other = (model.batches(tokens, shape, 3, "cpu") for _ in range(2))
    assert all(map(torch.equal, one, other))
    assert one[0].shape == (shape.batch, shape.length)
    assert not torch.equal(one[0], one[1])


def test_what_there_is_not_is_said(tmp_path):
    with pytest.raises(FlexopsError, match="there is no such contender"):
        model.run(model.SHAPES["tiny"], "cpu", ["apex"])
    for options, text in (
        (["--size", "70b"], "there is no such model"),
        (["--from", str(tmp_path / "none.json")], "the results cannot be read"),
    ):
        done = flexops_command("bench", "model", *options, catch_exceptions=True)
        assert text in str(done.exception)


def test_names_that_are_changed_for_a_while():
    names = {"one": 1, "two": 2}
    with model._Swapped(names, {"two": 3}, {"two": 2}):
        assert names == {"one": 1, "two": 3}
    assert names == {"one": 1, "two": 2}


def test_joules_are_those_between_ticks_of_the_counter(monkeypatch):
    now, reads = [0.0], threading.Semaphore(0)

    def read():  # 700 watts, counted ten times a second
        now[0] += 0.01
        reads.release()
        return 70.0 * int(10 * now[0])

    def step():  # twenty reads, a fifth of a second, before the watch and 8 to 12 steps in it
        for _ in range(20 if watched() else 0):
            assert reads.acquire(timeout=600)

    def watched():
        return threading.active_count() > threads

    threads = threading.active_count()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(model, "_energy_counter", lambda: read)
    monkeypatch.setattr(model.time, "perf_counter", lambda: now[0])
    assert model._joules(step, 0.2) == pytest.approx(140, rel=0.02)
    monkeypatch.setattr(model, "_energy_counter", lambda: lambda: 5.0)
    threads = 99
    assert model._joules(step, 0.2) == 0.0
