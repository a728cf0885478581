"""The table of the heuristics as registered and as tuned."""

import csv
import json

import pytest

pytest.importorskip("torch")

from servegym.experiments.figures.beyond.routing import tuned_heuristics  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402
from servegym.experiments.tuning import SPACES, heuristics  # noqa: E402


@pytest.mark.slow
def test_every_heuristic_has_its_rows_and_lengths_differ_alone(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "2"]
    assert tuned_heuristics.main(argv) == 0
    rows = list(csv.DictReader(open(tmp_path / "tuned_heuristics.csv")))
    for split in ("val", "eval"):
        own = {(r["policy"], r["variant"]): r for r in rows if r["split"] == split}
        assert {name for name, variant in own if variant == "tuned"} == set(SPACES)
        assert {name for name, _ in own} == {*heuristics(), "rpi"}
        for lengths, variant in tuned_heuristics.LENGTHS.items():
            given = json.loads(own["priced_greedy", variant]["parameters"])
            assert given["lengths"] == lengths
        tuned = own["priced_greedy", "tuned"]["parameters"]
        kinds = [own["priced_greedy", v] for v in tuned_heuristics.LENGTHS.values()]
        assert tuned in [kind["parameters"] for kind in kinds]
        (found,) = (
            one
            for one in read_record(tmp_path / "tuned_heuristics.csv")["notes"]
            if (one["split"], one["policy"], one["comparison"])
            == (split, "priced_greedy", "lengths")
        )
        first, second = (float(kind["qos"]) for kind in kinds)
        assert found["value"] == pytest.approx(second - first, abs=2e-6)
