"""The timers, rows and files that all benchmarks share."""

import json

import pytest

from servegym.experiments.bench.timing import bench_options, interleave, report, row
from servegym.experiments.evaluation.output import read_rows


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


def test_repeats_below_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="repeats is 0"):
        bench_options("routing", None, ["--repeats", "0", "--out", str(tmp_path)])
