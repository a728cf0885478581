"""The table of one router over all sweeps: its points, its differences and its findings."""

import csv

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")
pytest.importorskip("tyro")

from servegym.experiments.figures.beyond.routing import generalization as routing_general  # noqa: E402
from servegym.experiments.output import write_csv  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402


def test_every_sweep_covers_every_fleet():
    found = routing_general.points()
    for fleet in routing_general.FLEETS:
        own = [one for one in found if one.fleet == fleet]
        values = {
            name: [one.value for one in own if one.sweep == name] for name in ("rate", "experts")
        }
        assert values == {"rate": [*range(3, 12), 14, 20], "experts": [3, 6, 9, 12]}
        assert {"limit_ms", "bursts"} < {one.sweep for one in own}


def test_the_differences_are_those_of_the_qos(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "1", "--routers", "rpi"]
    assert routing_general.main(argv) == 0
    rows = list(csv.DictReader(open(tmp_path / "general_router.csv")))
    points = {(row["sweep"], row["profiles"], row["value"]) for row in rows}
    assert len(rows) == 3 * len(points) and {row["sweep"] for row in rows} >= {"rate", "bursts"}
    for point in points:
        own = {
            row["policy"]: row
            for row in rows
            if (row["sweep"], row["profiles"], row["value"]) == point
        }
        gain = float(own["rpi (shipped)"]["qos"]) - float(own["greedy_qos"]["qos"])
        assert float(own["rpi (shipped)"]["over_greedy_qos"]) == pytest.approx(gain, abs=2e-5)
        assert float(own["priced_greedy"]["over_priced_greedy"]) == 0
    notes = read_record(tmp_path / "general_router.csv")["notes"]
    assert [one["points"] for one in notes if "points" in one] == [len(points)] * 2
    assert (tmp_path / "general_router.png").stat().st_size > 5000


def test_a_point_whose_interval_is_below_zero_is_named():
    def row(value, low, high, at):
        found = {
            "policy": "rpi (shipped)",
            "training_seed": 1,
            "sweep": "rate",
            "profiles": "paper-linear",
            "value": at,
            "episodes": 50,
        }
        for other in routing_general.HEURISTICS:
            found |= {f"over_{other}": value, f"over_{other}_low": low, f"over_{other}_high": high}
        return found

    rows = [row(0.02, 0.01, 0.03, 3.0), row(-0.01, -0.02, 0.01, 4.0), row(-0.03, -0.04, -0.02, 5.0)]
    first, second = routing_general.findings(rows)
    assert (first["reference"], second["reference"]) == routing_general.HEURISTICS
    assert (first["points"], first["above"], first["below"]) == (3, 1, 2)
    assert first["interval_above"] == 1 and first["worst"] == -0.03
    (below,) = first["interval_below"]
    assert "paper-linear" in below and "5" in below


def test_one_sweep_is_measured_anew_and_the_other_rows_stay(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "1", "--routers", "rpi"]
    table = tmp_path / "general_router.csv"
    assert routing_general.main(argv) == 0
    first = table.read_text()
    marked = [row | {"ceiling": "0.123"} for row in csv.DictReader(first.splitlines())]
    write_csv(table, marked)
    assert routing_general.main([*argv, "--sweeps", "bursts"]) == 0
    again = list(csv.DictReader(table.open()))
    assert {row["ceiling"] for row in again if row["sweep"] != "bursts"} == {"0.123"}
    original = {
        row["policy"]: row for row in csv.DictReader(first.splitlines()) if row["sweep"] == "bursts"
    }
    assert {row["policy"]: row for row in again if row["sweep"] == "bursts"} == original
    assert len(again) == len(marked)
