"""One policy for all cells: trainings by arm, indexes side by side, what the summary says."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.baselines.prefix_routing.features import first_weights  # noqa: E402
from servegym.experiments.figures.prefix import one_policy, own_index  # noqa: E402
from servegym.experiments.output import read_rows  # noqa: E402

CELL = {"num_replicas": 3, "rate": 40.0, "episode_requests": 30, "warmup_requests": 20}


def test_without_trainings_it_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="train first"):
        one_policy.indexes(tmp_path)


def test_the_summary_is_over_trainings_episodes_and_cells():
    rng = np.random.default_rng(0)
    hard = [rng.uniform(60, 90, (1, 6)) for _ in range(3)]  # cells, whose episodes differ
    gains = np.array([4.0, 1.0, -2.0])
    reached = {
        "ours": [
            one + gain + np.array([[-1.0], [1.0]]) for one, gain in zip(hard, gains, strict=True)
        ],
        "other": [one + np.array([[2.0], [2.0]]) for one in hard],
        "dynamo joint": hard,
    }
    rows = [
        {
            "policy": arm,
            **{
                f"{kind}_{end}": value
                for kind in ("published", "tuned")
                for end, value in (("gain", gain), ("low", gain - 1.5), ("high", gain + 1.5))
            },
        }
        for arm in ("ours", "other")
        for gain in gains
    ]
    found, notes = one_policy._summary(reached, ["ours", "other"], rows)
    by_policy = {row["policy"]: row for row in found}
    joint = by_policy["dynamo joint"]
    assert joint["gain"] == 1.0 and joint["worst_gain"] == -2.0
    assert joint["gain_low"] < -8  # two trainings that are 2 points apart tell little
    assert by_policy["other"]["gain"] == -1.0 and by_policy["ours"]["trainings"] == 2
    assert by_policy["ours"]["gain"] == ""
    assert joint["cells_low"] < -6 and joint["cells_high"] > 8  # three cells, six points apart
    assert "+1.0 points in the mean, least -2.0; above in 1 cells, below in 1" in notes[0]["text"]
    assert "+1.0" in notes[-1]["text"]


def test_an_index_of_its_own_is_searched_for_from_the_given_one():
    first = first_weights()
    found = own_index.search(CELL, first, 1, 10)
    assert found.shape == first.shape and 0 < np.abs(found - first).max() < 1
    np.testing.assert_array_equal(found, own_index.search(CELL, first, 1, 10))


def test_an_index_is_searched_for_where_a_tuned_rule_is_far_above(tmp_path, monkeypatch):
    monkeypatch.setattr(one_policy.Options, "cells", lambda self: [CELL, CELL])
    monkeypatch.setattr(one_policy, "GENERATIONS", 1)
    monkeypatch.setattr(one_policy, "POPULATION", 10)
    (tmp_path / "one_policy_2.csv").write_text(
        "cell,policy,kind,attainment\n"
        "0,dynamo,tuned,52.0\n0,prefix_search,trained,50.0\n"
        "1,dynamo,tuned,99.0\n1,aibrix,tuned,3.0\n1,prefix_search,trained,50.0\n"
    )
    words = ["--out", str(tmp_path), "--set", "2", "--figure", "own", "--episodes", "2"]
    assert one_policy.main(words) == 0
    (row,) = read_rows(tmp_path / "one_policy_2_own.csv")
    assert (row["cell"], row["best_tuned"], row["tuned"]) == (1, "dynamo", 99.0)
    assert row["gain"] == pytest.approx(row["own"] - row["index"], abs=0.011)
