"""The benchmark of the serverless family: goals judged, rows and files written."""

import csv

import pytest

from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.bench import serverless as bench_serverless
from servegym.experiments.bench.run import Goal
from servegym.experiments.figures.serverless import prediction as serverless_prediction
from servegym.experiments.tables import read_record  # noqa: E402


def test_the_command_writes_every_goal_and_says_what_is_missed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_serverless, "PROMPTS", 200)
    monkeypatch.setattr(serverless_prediction, "QUERIES", 20)
    monkeypatch.setitem(bench_serverless.GOALS, "requests, global", Goal(">=", 1e12))
    monkeypatch.setitem(bench_serverless.GOALS, "requests, per_layer", Goal(">=", 1.0))
    command = ["--quick", "--model", "toy", "--out", str(tmp_path)]
    assert bench_serverless.main(command) == 0
    with (tmp_path / "bench.csv").open() as stream:
        rows = {row["what"]: row for row in csv.DictReader(stream)}
    assert set(bench_serverless.GOALS) <= set(rows)
    for row in rows.values():
        assert 0 < float(row["low"]) <= float(row["value"]) * (1 + 1e-9)
        assert float(row["value"]) <= float(row["high"]) * (1 + 1e-9)
    assert rows["requests, global"]["met"] == "False"
    assert rows["requests, per_layer"]["met"] == "True"
    record = read_record(tmp_path / "bench.csv")
    assert "missed: requests, global" in record["notes"][0]["text"] and record["quick"]
    assert "NO" in capsys.readouterr().out


def test_decisions_take_longer_without_what_is_cached():
    """``forget`` must really drop the predictions, or the times would flatter."""
    from servegym.baselines.serverless_moe import ServerlessSystem
    from servegym.baselines.serverless_moe.actions import ActionTable

    table = ActionTable(ServerlessSystem.from_kwargs(model="toy"))
    share = make_toy_activations().frequencies()[0]
    first = table.sets(share)
    assert table.sets(share) is first
    table.forget()
    assert table.sets(share) is not first


def test_search_rows_are_those_of_the_times(monkeypatch):
    monkeypatch.setattr(serverless_prediction, "QUERIES", 20)
    rows = {row["what"]: row for row in bench_serverless.searches(200, 2)}
    for what in ("search of one prompt", "search of a batch"):
        row = rows[what]
        assert row["ratio"] == pytest.approx(row["yardstick_value"] / row["value"])
        assert row["met"] is (row["ratio"] >= 10)
