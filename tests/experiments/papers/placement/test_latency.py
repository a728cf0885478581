"""What the latency figures of the placement family conclude, from runs with known results."""

import numpy as np
import pytest

from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.papers.placement import latency as placement_latency
from servegym.experiments.papers.placement.latency import PAPER


def measured(mean_s):
    """In place of `measure`: the mean latency that `mean_s` says, server 1 twice as slow.

    Episodes are 10 % below, on and 10 % above it.
    """

    def measure(point, policies, episodes, **kwargs):
        rows = []
        for policy in policies:
            value = mean_s(policy, kwargs)
            row = {**point, "policy": policy, "episodes": episodes, "mean_of_servers_s": value}
            row["overloaded"] = float(value > 100.0)
            for name, scale in (
                ("", 1.0),
                ("_server_0", 2.0),
                ("_server_1", 0.5),
                ("_server_2", 0.5),
            ):
                key = f"mean_latency_s{name}"
                row |= {
                    key: scale * value,
                    f"{key}_low": 0.9 * scale * value,
                    f"{key}_high": 1.1 * scale * value,
                }
            rows.append(row | {"_latency": value * np.array([0.9, 1.0, 1.1])})
        return rows

    return measure


def run(monkeypatch, tmp_path, figure, mean_s=None, quick=False):
    if mean_s is not None:
        monkeypatch.setattr(placement_latency, "measure", measured(mean_s))
    words = ["--figure", figure, "--episodes", "2", "--out", str(tmp_path)]
    assert placement_latency.main([*words, *(["--quick"] if quick else [])]) == 0
    (table,) = tmp_path.glob("*.csv")
    assert table.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    return read_rows(table), read_record(table)["notes"]


def test_table2_compares_with_the_paper_and_tells_who_is_overloaded(monkeypatch, tmp_path):
    """All methods 1.2 times the paper's, but uniform twice; whole_layer is overloaded."""
    scenarios = {scenario: name for name, (scenario, _) in placement_latency.WORKLOADS.items()}
    models = {short: name for name, short in placement_latency.MODELS.items()}

    def seconds(policy, kwargs):
        printed = PAPER[scenarios[kwargs["scenario"]], models[kwargs["model"]]]
        cells = {name: cells[3] for name, cells in printed.items()} | {"whole_layer": 200.0}
        return (2.0 if policy == "uniform" else 1.2) * cells.get(policy, 9.0)

    rows, notes = run(monkeypatch, tmp_path, "table2", seconds)
    assert len(rows) == 4 * 2 * len(placement_latency.POLICIES)
    (grow,) = [one["overloaded"] for one in notes if one.get("overloaded")]
    assert len(grow) == 4 * 2 and {name.split()[-1] for name in grow} == {"whole_layer"}
    for row in rows:
        if row["policy"] in ("prism", "uniform"):
            wanted = 1.2 if row["policy"] == "prism" else 2.0
            assert row["ratio_to_paper"] == pytest.approx(wanted)
        elif row["policy"] == "whole_layer":
            assert np.isnan(row["ratio_to_paper"])
    assert [one["verdict"] for one in notes if "verdict" in one] == ["agrees"] * 8
