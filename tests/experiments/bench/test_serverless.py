"""The benchmark of the serverless family: rows and files."""

import json

import pytest

from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.bench import serverless as bench_serverless
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.papers.serverless import prediction as serverless_prediction


@pytest.mark.slow
def test_the_command_writes_every_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_serverless, "PROMPTS", 200)
    monkeypatch.setattr(serverless_prediction, "QUERIES", 20)
    command = ["--quick", "--model", "toy", "--out", str(tmp_path)]
    assert bench_serverless.main(command) == 0
    rows = {row["what"]: row for row in read_rows(tmp_path / "bench.csv")}
    decisions = {f"decision, {name}, p{q}" for name in bench_serverless.POLICIES for q in (50, 99)}
    assert set(rows) >= decisions | {
        "requests, global",
        "requests, per_layer",
        "decision and prediction, slowest p99",
        "search of one prompt",
        "search of a batch",
        "tree build",
    }
    for row in rows.values():
        assert 0 < row["low"] <= row["value"] * (1 + 1e-9)
        assert row["value"] <= row["high"] * (1 + 1e-9)
    assert json.loads((tmp_path / "bench.json").read_text())["quick"]


def test_decisions_take_longer_without_what_is_cached():
    """``clear_cache`` must really drop the predictions, or the times would flatter."""
    from servegym.baselines.serverless_moe import ServerlessSystem
    from servegym.baselines.serverless_moe.action_table import ActionTable

    table = ActionTable(ServerlessSystem.from_kwargs(model="toy"))
    share = make_toy_activations().frequencies()[0]
    first = table.sets(share)
    assert table.sets(share) is first
    table.clear_cache()
    assert table.sets(share) is not first


def test_search_rows_are_those_of_the_times(monkeypatch):
    monkeypatch.setattr(serverless_prediction, "QUERIES", 20)
    rows = {row["what"]: row for row in bench_serverless.searches(200, 2)}
    for what in ("search of one prompt", "search of a batch"):
        row = rows[what]
        assert row["ratio"] == pytest.approx(row["yardstick_value"] / row["value"])
