"""The rows and files that all benchmarks share."""

import csv

import pytest

from servegym.experiments.bench.run import Goal, bench_options, interleave, report, row
from servegym.experiments.tables import read_record  # noqa: E402


def test_the_median_counts_and_a_ratio_is_how_many_times_as_fast():
    rate = row("steps", [3.0, 1.0, 2.0], "1/s", None, ("cart", [4.0]), systems=8)
    assert (rate["value"], rate["low"], rate["high"]) == (2.0, 1.0, 3.0)
    assert rate["ratio"] == 0.5 and rate["yardstick_value"] == 4.0 and rate["about"] == "systems=8"
    assert row("search", [2.0], "us", None, ("brute", [8.0]))["ratio"] == 4.0
    assert row("alone", [2.0], "us")["ratio"] == ""


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal(">=", 20.0), 20.0, True),
        (Goal(">=", 20.0), 19.9, False),
        (Goal("<=", 20.0), 20.0, True),
        (Goal("<", 20.0), 20.0, False),
        (Goal(">=", 2.0, "ratio"), 20.0, True),
        (Goal(">=", 2.1, "ratio"), 20.0, False),
    ],
)
def test_goals_are_judged_by_their_sign_and_what_they_are_about(goal, value, met):
    assert row("x", [value], "1/s", goal, ("y", [10.0]))["met"] is met
    assert row("x", [value], "1/s", None, ("y", [10.0]))["met"] == ""


def test_timers_take_turns_and_the_first_turn_does_not_count():
    order = []
    timers = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    assert interleave(timers, 2) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert order == list("ababab")


def test_the_report_names_what_is_missed(tmp_path, capsys):
    options = bench_options("routing", "About.", ["--out", str(tmp_path / "new"), "--quick"])
    rows = [
        row("fast", [5.0], "1/s", Goal(">=", 1.0)),
        row("slow", [12_345.6], "us", Goal(">=", 2.0, "ratio"), ("other", [12_345.6])),
    ]
    report(options, rows, "a note")
    with (tmp_path / "new" / "bench.csv").open() as stream:
        assert [r["met"] for r in csv.DictReader(stream)] == ["True", "False"]
    record = read_record(tmp_path / "new" / "bench.csv")
    assert [one["text"] for one in record["notes"]] == ["missed: slow: 1 (>= 2 x)", "a note"]
    assert record["command"].startswith("servegym bench routing --out") and record["quick"]
    assert "12,346" in capsys.readouterr().out
    report(options, rows[:1])
    record = read_record(tmp_path / "new" / "bench.csv")
    assert [one["text"] for one in record["notes"]] == ["every goal is met"]


def test_repeats_below_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="repeats is 0"):
        bench_options("routing", None, ["--repeats", "0", "--out", str(tmp_path)])
