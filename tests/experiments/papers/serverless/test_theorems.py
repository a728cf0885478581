"""The check of the load bounds: uniform routing, recorded routing by a loop, the command."""

import pytest

from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.serverless import theorems as serverless_theorems


def of(rows, statement, form):
    return [row for row in rows if row["statement"] == statement and row["form"] == form]


def test_uniform_routing_meets_the_corrected_bounds_and_not_the_printed_ones():
    rows = serverless_theorems.uniform(64, 6, 64, 50)
    (printed,) = of(rows, "theorem 1", "printed")
    (corrected,) = of(rows, "theorem 1", "corrected")
    assert 0.72 < printed["holds"] < 0.79 and corrected["holds"] > 0.99
    assert printed["low"] <= printed["holds"] <= printed["high"]
    assert max(row["holds"] for row in of(rows, "corollary 1", "printed")) < 0.01
    assert min(row["holds"] for row in of(rows, "corollary 1", "corrected")) == 1.0


def test_the_command_writes_every_statement(tmp_path, monkeypatch):
    toy = make_toy_activations(prompts=60)
    monkeypatch.setattr(serverless_theorems, "load_activations", lambda name: toy)
    monkeypatch.setattr(serverless_theorems, "TOKENS", (4,))
    assert serverless_theorems.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "theorems.csv")
    statements = {"theorem 1", "theorem 4", "corollary 1", "conformal"}
    assert {row["statement"] for row in rows} == statements
    for row in rows:
        assert 0 <= row["low"] <= row["holds"] <= row["high"] <= 1
    whole = [row for row in of(rows, "corollary 1", "corrected") if row["b"] == 1]
    assert whole and all(row["largest_ratio"] == pytest.approx(1.0) for row in whole)
    record = read_record(tmp_path / "theorems.csv")
    assert record["quick"] and record["notes"]
    assert (tmp_path / "theorems.png").read_bytes().startswith(b"\x89PNG")
