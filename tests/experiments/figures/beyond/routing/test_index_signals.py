"""What is given to an index: dispersion, running estimates, weights that move with them."""

import csv

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")

from servegym.envs.workloads import make_arrivals  # noqa: E402
from servegym.experiments.figures.beyond.routing import index_signals  # noqa: E402
from servegym.experiments.figures.beyond.routing.index_signals import (  # noqa: E402
    NOTHING,
    RUNNING,
    SIGNALS,
    TOUCHED,
    TRUE,
    Estimates,
    dispersion,
    play,
)
from servegym.experiments.tables import read_record  # noqa: E402


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("poisson", {}),
        ("gamma", {"cv": 2.0}),
        ("mmpp", {"rate_ratio": 4.0, "busy_share": 0.3, "cycle_requests": 40.0}),
    ],
)
def test_the_dispersion_is_that_of_counts_over_long_windows(name, kwargs):
    times = make_arrivals(name, 1.0, **kwargs).sample(400_000, np.random.default_rng(0))
    counts = np.histogram(times, np.arange(0.0, times[-1], 1_000.0))[0]
    # 400 windows: a standard error of 7 %.
    assert counts.var() / counts.mean() == pytest.approx(dispersion(name, kwargs), rel=0.25)


def test_estimates_find_the_rate_and_its_changes():
    kept, now = Estimates(2, served_rps=10.0), np.zeros(2)
    for k in range(400):
        seen = kept.signals(now, np.array([0.5, 1.0]))
        # 8 requests/s, in the second row 16 from the 380th on
        now = now + np.array([0.125, 0.125 if k < 380 else 0.0625])
    rate, short, varied, load = seen.T
    assert rate[0] == pytest.approx(np.log(0.8) + 0.2, abs=0.01) and rate[0] < rate[1] < 0.3
    assert abs(short[0]) < 0.01 and 0.3 < short[1] < np.log(2)
    assert varied == pytest.approx(np.full(2, 0.5 * np.log(0.1 / 1.1)), abs=0.25)
    assert load == pytest.approx([-0.3, 0.2], abs=0.01)


@pytest.mark.parametrize("arm", [TRUE, RUNNING])
def test_weights_of_what_is_given_move_the_index(monkeypatch, arm):
    monkeypatch.setattr(index_signals, "REQUESTS", 60)
    plain, given = (np.zeros((1, SIGNALS[name] * len(TOUCHED))) for name in (NOTHING, arm))
    seeds = [5, 6]
    wanted = play(NOTHING, plain, 3, seeds, "train")
    assert wanted.shape == (1, 2) and wanted[0, 0] != wanted[0, 1]
    np.testing.assert_array_equal(play(arm, given, 3, seeds, "train"), wanted)
    moved = given.copy()
    moved[:, -1] = -90.0  # of the last signal, on a drop
    both = play(arm, np.concatenate([given, moved, -moved]), 3, seeds, "train")
    np.testing.assert_array_equal(both[:1], wanted)
    assert (both[1:].min(0) < wanted[0] - 0.05).all()
    # The constant alone is the same of every arm.
    plain[:, 0], given[:, 0] = -2.0, -2.0
    shifted = play(NOTHING, plain, 3, seeds, "train")
    np.testing.assert_array_equal(play(arm, given, 3, seeds, "train"), shifted)
    assert (shifted != wanted).any()


@pytest.mark.slow
def test_the_table_has_paired_gains(tmp_path):
    argv = ["--quick", "--episodes", "2", "--searched", str(tmp_path / "searched")]
    assert index_signals.main([*argv, "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader(open(tmp_path / "index_signals.csv")))
    qos = {(row["policy"], row["fleet"]): float(row["qos"]) for row in rows}
    assert len(qos) == len(rows) == 2 * 7
    for row in rows:
        gap = qos[row["policy"], row["fleet"]] - qos[NOTHING, row["fleet"]]
        assert float(row["gain"]) == pytest.approx(gap, abs=2e-6)
    notes = read_record(tmp_path / "index_signals.csv")["notes"]
    assert [one["policy"] for one in notes][:3] == list(SIGNALS)
    kept = {file: file.read_bytes() for file in (tmp_path / "searched").iterdir()}
    assert index_signals.main([*argv, "--out", str(tmp_path / "again")]) == 0
    assert {file: file.read_bytes() for file in (tmp_path / "searched").iterdir()} == kept
    again = (tmp_path / "again" / "index_signals.csv").read_bytes()
    assert again == (tmp_path / "index_signals.csv").read_bytes()
