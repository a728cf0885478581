"""The simulation of presubmit's errors at smoke size, against what can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from servegym.experiments.evaluation.tables import read_rows
from servegym.experiments.studies.routing import presubmit_errors as study


def test_played_gains_are_drawn_with_their_probability():
    draw = study.one_in(0.1, np.array([-0.5, -0.3]), np.zeros(1))
    gains = draw(np.random.default_rng(0), 20_000)
    assert gains.mean() == pytest.approx(-0.04, abs=0.003)
    assert set(gains) == {-0.5, -0.3, 0.0}


def test_a_rare_loss_escapes_where_no_episode_has_it():
    row = study.errors(study.losses(0.05, 0.8), 0.02, 1500, 0)
    assert row["passed %"] == pytest.approx(100 * 0.95**64, abs=1.5)
    assert row["passed %"] + row["failed %"] + row["not told %"] == pytest.approx(100.0, abs=0.02)
    bad = study.errors(study.normal(-0.5, 0.01), 0.02, 20, 0)
    assert bad["failed %"] == 100.0 and bad["mean episodes"] == 4.0


def test_the_table_has_every_case(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "PLAYED", (("hot-tenant", 60.0),))
    monkeypatch.setattr(study, "EPISODES", 2)
    monkeypatch.setattr(study, "REQUESTS", {"hot-tenant": 20})
    assert study.main(["--runs", "1", "--out", str(tmp_path / "errors")]) == 0
    rows = read_rows(tmp_path / "errors.csv")
    assert len(rows) == len(study.synthetic()) + 6
    true = {row["case"]: row["true gain"] for row in rows}
    assert true["loss of 0.4 in 0.1"] == -0.04 and true["equal"] == 0.0
