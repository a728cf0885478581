"""The table of placement algorithms: what its columns mean, resumed runs, and its words."""

import csv
import math

import pytest

from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.registry import list_policies, make_policy
from servegym.envs.expert_placement.config import build_problem
from servegym.experiments.studies.placement import algorithms
from servegym.experiments.tables import read_record  # noqa: E402

SEARCHES = ("annealing", "local_search", "latency_local_search", "best_start", "latency_dp")
NAMES = [info.name for info in list_policies("expert_placement")]


@pytest.fixture(scope="module")
def problem():
    return build_problem(model="toy", epochs=2, split="eval", action_mode="placement")


def planned(problem, policy):
    fast = {"tries": 1, "steps": 1_000, "swaps": 4} if policy == "best_start" else {}
    system = PlacementSystem.from_problem(problem)
    return algorithms.planning(
        problem, make_policy(policy, system, family="expert_placement", **fast), 2
    )


@pytest.mark.parametrize(
    "policy",
    [pytest.param(name, marks=pytest.mark.slow) if name in SEARCHES else name for name in NAMES],
)
def test_gaps_moves_and_times(problem, policy):
    row = planned(problem, policy)
    if policy.startswith("moe_infinity") or policy.endswith("_caches"):
        assert all(math.isnan(x) for x in row.values())
        return
    assert row["proxy_gap"] >= 0 and 0 <= row["moved_share"] < 1
    assert (row["proxy_gap"] == 0) == (policy == "proxy_optimum")
    if policy in ("keep", "uniform", "redundance", "whole_layer", "best_start"):
        assert row["moved_share"] == 0
    if policy == "random":
        assert row["moved_share"] > 0.2
    assert math.isnan(row["plan_cpu_s"]) == (policy == "keep")
    if policy == "prism":
        again = planned(problem, policy)
        assert again["proxy_gap"] == row["proxy_gap"]
        assert again["moved_share"] == row["moved_share"]


def made_up(policy, latency, scenario="edge_hetero"):
    row = {"scenario": scenario, "policy": policy, "episodes": 2}
    for key in (
        "mean_latency_s",
        "p99_latency_s",
        "local_call_ratio",
        "remote_layer_ratio",
        "proxy_gap",
        "moved_share",
        "plan_cpu_s",
    ):
        value = latency if key.endswith("latency_s") else 0.25
        row |= {key: value, f"{key}_low": 0.9 * value, f"{key}_high": 1.1 * value}
    if policy.startswith("moe_infinity"):
        row |= {"proxy_gap": math.nan, "moved_share": math.nan}
    return row


def test_the_findings_follow_the_numbers():
    rows = [
        made_up("prism", 10.0),
        made_up("proxy_optimum", 12.0),
        made_up("whole_layer", 6.0),
        made_up("moe_infinity", 5.0),
        made_up("moe_infinity_lb", 4.0),
    ]
    fastest, caches, untried, missing = algorithms._findings("edge_hetero", rows)
    assert fastest["fastest"] == "whole_layer"
    assert fastest["mean_latency_s"] == pytest.approx([6.0, 5.4, 6.6])
    assert fastest["below_prism_pct"] == pytest.approx(40.0)
    assert (caches["moe_infinity"], caches["moe_infinity_lb"]) == (5.0, 4.0)
    assert untried["untried"] == [row["policy"] for row in rows]
    assert {"keep", "uniform"} < set(missing["missing"])
    tried = [row | {"overloaded": float(row["policy"] == "prism")} for row in rows]
    notes = algorithms._findings("edge_hetero", tried)
    assert [one["overloaded"] for one in notes if "overloaded" in one] == [["prism"]]
    assert not any("untried" in one for one in notes)


def test_a_resumed_run_keeps_its_rows(tmp_path, monkeypatch):
    calls = []

    def measure(policies, episodes, point, **kwargs):
        calls.append((policies[0].name, episodes, kwargs["scenario"]))
        return [made_up(policies[0].name, 1.0 + len(calls))], {}

    monkeypatch.setattr(algorithms, "measure", measure)
    monkeypatch.setattr(algorithms, "planning", lambda *args: {})
    line = ["--quick", "--out", str(tmp_path), "--figure", "edge_hetero", "--policies"]
    assert algorithms.main([*line, "prism"]) == 0
    assert algorithms.main([*line, "prism", "whole_layer", "--resume"]) == 0
    assert calls == [("prism", 2, "edge_hetero"), ("whole_layer", 2, "edge_hetero")]
    with (tmp_path / "algorithms_edge_hetero.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(r["policy"], float(r["mean_latency_s"])) for r in rows] == [
        ("prism", 2.0),
        ("whole_layer", 3.0),
    ]
    record = read_record(tmp_path / "algorithms_edge_hetero.csv")
    assert record["quick"] and record["settings"]["epochs"] == 2
    assert algorithms.main([*line[:3], "--figure", "summary"]) == 0
    assert (tmp_path / "algorithms.png").stat().st_size > 10_000
    assert "scenario" in (tmp_path / "algorithms.csv").read_text()


def test_a_summary_needs_results(tmp_path):
    with pytest.raises(ValueError, match="no scenario's results"):
        algorithms.main(["--figure", "summary", "--out", str(tmp_path)])
