"""Access points: one of them is the single environment, and the table is written."""

import csv

import pytest

pytest.importorskip("matplotlib")

from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.baselines.registry import make_policy  # noqa: E402
from servegym.experiments.evaluate import DEFAULT_SEED, evaluate  # noqa: E402
from servegym.experiments.figures.beyond.routing import access_points as routing_access_points  # noqa: E402


def test_one_access_point_is_the_single_environment():
    kwargs = {"rate": 8.0, "episode_requests": 80}
    policy = make_policy("priced_greedy", RoutingSystem.from_kwargs())
    seed = DEFAULT_SEED
    found = routing_access_points.play([policy], seed, split="eval", **kwargs)
    (row,) = evaluate("servegym/LLMRouting-v0", ["priced_greedy"], 1, env_kwargs=kwargs)
    assert found["avg_qos"] == pytest.approx(row["avg_qos"]) == found["own_qos"][0]


def test_the_table_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(routing_access_points, "BASELINES", ("shortest_queue", "priced_greedy"))
    monkeypatch.setattr(routing_access_points, "chosen", lambda *_: [])
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "2"]
    assert routing_access_points.main(argv) == 0
    rows = list(csv.DictReader(open(tmp_path / "access_points.csv")))
    assert {row["access_points"] for row in rows} == {"1", "8"}
    alone = [row for row in rows if row["access_points"] == "1"]
    assert all(float(row["own_spread"]) == 0 for row in alone)
    assert any(float(row["own_spread"]) > 0 for row in rows)
    by = {(row["policy"], row["staleness_s"]): float(row["qos"]) for row in alone}
    assert by["priced_greedy", "0.0"] > by["priced_greedy", "0.5"]
