"""The admission study: the front by hand, and that it is drawn."""

import csv

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from servegym.experiments import routing_admission  # noqa: E402


def test_front_by_hand():
    costs = np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [3.0, 1.0], [1.0, 3.0]])
    # The third is beaten by the second; the first and its double beat nobody and stay.
    assert routing_admission.pareto(costs).tolist() == [True, True, False, True, True]


def test_the_table_is_written(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "1"]
    assert routing_admission.main(argv) == 0
    rows = list(csv.DictReader(open(tmp_path / "admission.csv")))
    overload = {row["policy"]: row for row in rows if float(row["rate"]) == 20.0}
    # At twice the capacity who prices it earns more than who never drops.
    assert float(overload["priced_greedy, price 1"]["qos"]) > float(
        overload["shortest_queue"]["qos"]
    )
    assert float(overload["priced_greedy, price 4"]["refused"]) > 0
    assert any(row["pareto"] == "True" for row in overload.values())
    assert (tmp_path / "admission.png").stat().st_size > 5000
