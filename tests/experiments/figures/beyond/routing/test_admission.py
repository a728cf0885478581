"""The admission study: the front by hand, and that it is drawn."""

import csv

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from servegym.experiments.figures.beyond.routing import admission as routing_admission  # noqa: E402


def test_front_by_hand():
    costs = np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [3.0, 1.0], [1.0, 3.0]])
    # The third is beaten by the second; the first and its double beat nobody and stay.
    assert routing_admission.pareto(costs).tolist() == [True, True, False, True, True]


def test_the_table_is_written(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "1", "--figure", "admission"]
    assert routing_admission.main([*argv, "--routers", "rpi"]) == 0
    rows = list(csv.DictReader(open(tmp_path / "admission.csv")))
    overload = {row["policy"]: row for row in rows if float(row["rate"]) == 20.0}
    # At twice the capacity who prices it earns more than who never drops.
    assert float(overload["priced_greedy, price 1"]["qos"]) > float(
        overload["shortest_queue"]["qos"]
    )
    assert float(overload["priced_greedy, price 4"]["refused"]) > 0
    assert any(row["pareto"] == "True" for row in overload.values())
    assert (tmp_path / "admission.png").stat().st_size > 5000


def test_a_refusal_worth_more_is_chosen_more_and_the_front_is_drawn(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "1", "--figure", "pareto"]
    assert routing_admission.main([*argv, "--routers", "rpi"]) == 0
    rows = list(csv.DictReader(open(tmp_path / "pareto.csv")))
    own = [row for row in rows if "refusal" in row["policy"]]
    dropped = [float(row["drop_rate"]) for row in own]
    assert len(own) == 3 and dropped == sorted(dropped) and dropped[0] < dropped[-1]
    plain = {row["policy"]: row for row in rows}
    # A price of nothing is greedy_qos.
    assert plain["priced_greedy, price 0"]["qos"] == plain["greedy_qos"]["qos"]
    for row in rows:
        missed = sum(float(row[key]) for key in ("drop_rate", "reject_rate", "late_rate"))
        assert float(row["missed"]) == pytest.approx(missed, abs=1e-5)
    assert (tmp_path / "pareto.png").stat().st_size > 5000
