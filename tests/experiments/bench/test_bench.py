"""The benchmarks of all families: rows, files and yardsticks."""

import json

import pytest

from servegym.baselines.serverless_moe import ServerlessSystem
from servegym.baselines.serverless_moe.action_table import ActionTable
from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments import bench
from servegym.experiments.bench import prefix
from servegym.experiments.bench import serverless as bench_serverless
from servegym.experiments.bench.timing import bench_options, interleave, report, row
from servegym.experiments.evaluation.output import read_rows

ROWS = {
    "routing": {"64 environments, steps", "one environment, steps", "replay, orca, requests"},
    "prefix": {
        f"a request, {what}, blocks of {size}, {rate}/s"
        for what in ("engine", "replay_prefix")
        for size in (16, 512)
        for rate in (3.4, 10.2)
    },
    "serverless": {"requests, global", "requests, per_layer", "decision, remoe, p99"},
    "placement": {
        "expert calls, per_server, 4 GPUs",
        "plan of proxy_optimum, 3 servers, 1,664 experts",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ROWS)
def test_a_smoke_run_writes_rates_with_yardsticks(family, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_serverless, "PROMPTS", 200)
    words = ["--model", "toy"] if family == "serverless" else []
    assert bench.main([family, "--quick", "--out", str(tmp_path), *words]) == 0
    rows = {row["what"]: row for row in read_rows(tmp_path / "bench.csv")}
    assert set(rows) >= ROWS[family]
    for one in rows.values():
        assert 0 < one["low"] <= one["value"] * (1 + 1e-9)
        assert one["value"] <= one["high"] * (1 + 1e-9)
    assert json.loads((tmp_path / "bench.json").read_text())["quick"]


def test_the_yardstick_is_a_least_recently_used_cache(monkeypatch):
    monkeypatch.setattr(prefix, "REPLICAS", 1)
    # With room for two, 3 puts out whichever of 1 and 2 was asked for longer ago.
    assert prefix.lru_hits([[1, 2], [1], [2], [3], [1]], 2) == 2
    assert prefix.lru_hits([[1, 2], [1], [3], [1], [2]], 2) == 2


def test_decisions_take_longer_without_what_is_cached():
    """``clear_cache`` must really drop the predictions, or the times would flatter."""
    table = ActionTable(ServerlessSystem.from_kwargs(model="toy"))
    share = make_toy_activations().frequencies()[0]
    first = table.sets(share)
    assert table.sets(share) is first
    table.clear_cache()
    assert table.sets(share) is not first


def test_the_median_counts_and_a_ratio_is_how_many_times_as_fast():
    rate = row("steps", [3.0, 1.0, 2.0], "1/s", ("cart", [4.0]), systems=8)
    assert (rate["value"], rate["low"], rate["high"]) == (2.0, 1.0, 3.0)
    assert rate["ratio"] == 0.5 and rate["yardstick_value"] == 4.0 and rate["about"] == "systems=8"
    assert row("search", [2.0], "us", ("brute", [8.0]))["ratio"] == 4.0
    assert row("alone", [2.0], "us")["ratio"] == ""


def test_timers_take_turns_and_the_first_turn_does_not_count():
    order = []
    timers = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    assert interleave(timers, 2) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert order == list("ababab")


def test_the_report_is_a_table_with_its_provenance(tmp_path, capsys):
    options = bench_options("routing", "About.", ["--out", str(tmp_path / "new"), "--quick"])
    rows = [row("fast", [5.0], "1/s"), row("slow", [12_345.6], "us", ("other", [12_345.6]))]
    report(options, rows, "a note")
    assert read_rows(tmp_path / "new" / "bench.csv") == rows
    record = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert record["command"].startswith("servegym bench routing --out") and record["quick"]
    assert record["notes"] == [{"text": "a note"}]
    assert "12,346" in capsys.readouterr().out
    with pytest.raises(ValueError, match="repeats is 0"):
        bench_options("routing", None, ["--repeats", "0", "--out", str(tmp_path)])
