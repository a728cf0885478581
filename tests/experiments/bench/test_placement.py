"""The growth of a call's cost is the product of its parts."""

import pytest

from servegym.experiments.bench.placement import consolidated, decomposition, main, summary
from servegym.experiments.evaluation.output import read_rows


def row(gpus, per_call, per_event, under_way):
    return {
        "gpus": gpus,
        "ns_per_call": per_call * per_event,
        "ns_per_event": per_event,
        "events_per_call": per_call,
        "under_way": under_way,
        "looks": 8,
    }


def test_parts_of_the_cost_of_a_call():
    small, blind = row(4, 0.5, 60.0, 1.0), row(256, 1.0, 75.0, 1.5)
    quiet, large = row(256, 1.0, 90.0, 1.5), row(256, 1.0, 120.0, 90)
    note = decomposition("per_server", small, blind, quiet, large)
    assert note["growth"] == pytest.approx(4.0) and note["gpus"] == [4, 256]
    assert note["factors"] == pytest.approx([2.0, 1.25, 1.2, 4 / 3])


def test_what_consolidated_calls_change():
    apart = [row(4, 0.5, 60.0, 1.0), row(256, 1.0, 120.0, 90)]
    joined = [row(4, 0.5, 60.0, 1.0), row(256, 0.6, 100.0, 90)]
    for each, latency in zip([*apart, *joined], (1.0, 9.0, 1.0, 4.0), strict=True):
        each["latency_s"] = latency
    found = consolidated(apart, joined)
    assert found["growth"] == pytest.approx([4.0, 2.0])
    assert found["events_per_call"] == [1.0, 0.6] and found["latency_s"] == [9.0, 4.0]


@pytest.mark.slow
def test_a_smoke_run_writes_rates_with_yardsticks(tmp_path):
    assert main(["--quick", "--gpus", "4", "--requests", "2", "--out", str(tmp_path)]) == 0
    rows = {row["what"]: row for row in read_rows(tmp_path / "bench.csv")}
    rate = rows["expert calls, per_server, 4 GPUs"]
    assert rate["value"] > 0 and rate["ratio"] > 0
    assert rows["plan of proxy_optimum, 3 servers, 1,664 experts"]["unit"] == "ms"
    sizes = read_rows(tmp_path / "bench_sizes.csv")
    assert [row["choice"] for row in sizes] == ["least_finish", "consolidate", "least_finish"]


def test_the_yardstick_of_the_largest_cluster_is_the_smallest():
    large = {"messages": "per_server", "gpus": 256, "calls_per_s": 30.0, "choice": "least_finish"}
    joined = large | {"choice": "consolidate", "calls_per_s": 60.0}
    quiet, small = large | {"calls_per_s": 45.0}, large | {"gpus": 4, "calls_per_s": 90.0}
    both = [small, large, quiet, joined]
    rows = summary([*both, *({**row, "messages": "per_expert"} for row in both)])
    ratios = [row["ratio"] for row in rows if "256" in row["what"]]
    assert ratios == pytest.approx([1 / 3, 1 / 3])
