"""The table of what late binding gains."""

import csv
import json

import pytest

pytest.importorskip("torch")

from servegym.experiments.studies.routing import late_binding  # noqa: E402


@pytest.mark.slow
def test_rules_differ_by_holding_alone(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "2"]
    argv += ["--tuned", str(tmp_path / "tuned.json")]
    assert late_binding.main(argv) == 0
    rows = list(csv.DictReader(open(tmp_path / "late_binding.csv")))
    by_rule = {row["rule"]: row for row in rows if row["setting"] != late_binding.DRAWN}
    early, same, every, never = (
        json.loads(by_rule[rule]["parameters"])
        for rule in (
            "binds on arrival",
            "may hold, else the same",
            "may hold, all tuned",
            "tuned to hold, never does",
        )
    )
    assert {name: same[name] for name in early} == early
    assert set(same) - set(early) == {"worth", "fill"}
    assert never == {**every, "worth": 0.0}
    assert float(by_rule["tuned to hold, never does"]["mean_hold_s"]) == pytest.approx(0, abs=1e-9)
    assert {row["policy"] for row in rows} == {"expected_qos", "late_qos", "rollout"}
    assert len(json.loads((tmp_path / "quick_tuned.json").read_text())) == 1
