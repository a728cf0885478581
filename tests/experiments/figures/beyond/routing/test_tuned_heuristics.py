"""The table of the heuristics as registered and as tuned."""

import csv

import pytest

pytest.importorskip("torch")

from servegym.experiments.figures.beyond.routing import tuned_heuristics  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402
from servegym.experiments.tuning import SPACES, heuristics  # noqa: E402


@pytest.mark.slow
def test_every_heuristic_has_its_rows(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "2"]
    assert tuned_heuristics.main(argv) == 0
    rows = list(csv.DictReader(open(tmp_path / "tuned_heuristics.csv")))
    for split in ("val", "eval"):
        own = {(r["policy"], r["variant"]): r for r in rows if r["split"] == split}
        assert {name for name, variant in own if variant == "tuned"} == set(SPACES)
        assert {name for name, _ in own} == {*heuristics(), "rpi"}
        (found,) = (
            one
            for one in read_record(tmp_path / "tuned_heuristics.csv")["notes"]
            if (one["split"], one["comparison"]) == (split, "lengths")
        )
        informed, reference = (
            float(own[name, "tuned"]["qos"]) for name in ("expected_qos", "priced_greedy")
        )
        assert found["value"] == pytest.approx(informed - reference, abs=2e-6)
