"""``flexops bench generate`` on a small model: who takes part, what is printed, and the chart."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flexops.cli._app import app


@pytest.mark.extra
def test_contenders_and_the_limit(tmp_path):
    names = ["transformers", "flexops.patch", "flexops.generate"]
    options = ["--device", "cpu", "--batch", "2", "--prompt", "5", "--tokens", "60", "--json"]
    chosen = [part for name in names for part in ("--contender", name)]
    done = CliRunner().invoke(app, ["bench", "generate", *options, *chosen])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["results"]] == names
    assert [one["flexops"] for one in found["results"]] == [False, True, True]
    assert all(one["token"] > 0 and one["first"] > 0 for one in found["results"])
    assert 0 < found["limits"]["2 x 5"] < min(one["token"] for one in found["results"])
    (tmp_path / "run.json").write_text(done.stdout)

    again = ["bench", "generate", "--from", str(tmp_path / "run.json")]
    token = found["results"][2]["token"]
    table = CliRunner().invoke(app, [*again, "--markdown"]).stdout
    assert f"| flexops.generate | {found['results'][2]['first']:.2f} | {token:.3f} |" in table
    assert "limit" in CliRunner().invoke(app, again).stdout
    assert CliRunner().invoke(app, [*again, "--plot", str(tmp_path / "run.svg")]).exit_code == 0
    assert "memory limit" in (tmp_path / "run.svg").read_text()
