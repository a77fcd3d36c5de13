"""``flexops bench generate`` on a small model: who takes part, what is printed, and the chart."""

from __future__ import annotations

import json

import pytest
from command_line import flexops_command

from flexops.errors import SettingsError
from flexops_tools.bench import generate


@pytest.mark.extra
def test_contenders_and_the_limit(tmp_path):
    names = ["transformers", "flexops.patch", "flexops.generate"]
    options = ["--device", "cpu", "--batch", "2", "--prompt", "5", "--tokens", "60", "--json"]
    chosen = [part for name in names for part in ("--contender", name)]
    done = flexops_command("bench", "generate", *options, *chosen, catch_exceptions=True)
    assert done.exit_code == 0, done.output
    assert "2 x 5  flexops.generate ...\n2 x 5  flexops.generate: " in done.stderr
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["results"]] == names
    assert [one["flexops"] for one in found["results"]] == [False, True, True]
    assert all(one["token"] > 0 and one["first"] > 0 for one in found["results"])
    assert 0 < found["limits"]["2 x 5"] < min(one["token"] for one in found["results"])
    (tmp_path / "run.json").write_text(done.stdout)

    again = ["bench", "generate", "--from", str(tmp_path / "run.json")]
    token = found["results"][2]["token"]
    table = flexops_command(*again, "--markdown", catch_exceptions=True).stdout
    assert f"| flexops.generate | {found['results'][2]['first']:.2f} | {token:.3f} |" in table
    assert "limit" in flexops_command(*again, catch_exceptions=True).stdout
    assert (
        flexops_command(
            *again, "--plot", str(tmp_path / "run.svg"), catch_exceptions=True
        ).exit_code
        == 0
    )
    assert "memory limit" in (tmp_path / "run.svg").read_text()


@pytest.mark.parametrize(("options", "tokens"), [((), 50), (("--tokens", "9"), 9)])
def test_a_quick_run_is_one_batch_and_prompt(monkeypatch, options, tokens):
    asked = []

    def run(*_, **options):
        asked.append((options["batches"], options["prompts"], options["tokens"]))
        return run_of("a GPU", 1, 1.0, "flexops.patch")

    monkeypatch.setattr(generate, "run", run)
    done = flexops_command("bench", "generate", "--quick", "--device", "cpu", *options)
    assert done.exit_code == 0
    assert asked == [((1,), (512,), tokens)]


def run_of(machine: str, batch: int, token: float, *names: str) -> generate.Run:
    results = tuple(generate.Result(name, batch, 5, 1.0, token, 0.0, True) for name in names)
    return generate.Run("2026-01-01", machine, "a model", results, {f"{batch} x 5": 0.5}, {})


def test_parts_of_a_run_become_one():
    later = run_of("a GPU", 1, 3.0, "flexops.patch", "transformers")
    parts = [run_of("a GPU", 2, 2.0, "flexops.patch"), run_of("a GPU", 1, 1.0, "flexops.patch")]
    found = generate.merged([*parts, later])
    names = [(one.batch, one.name, one.token) for one in found.results]
    assert names == [(1, "transformers", 3.0), (1, "flexops.patch", 3.0), (2, "flexops.patch", 2.0)]
    assert list(found.limits) == ["1 x 5", "2 x 5"]
    with pytest.raises(SettingsError, match="another GPU: a model"):
        generate.merged([later, run_of("another GPU", 1, 1.0)])
