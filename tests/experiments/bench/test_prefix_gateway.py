"""The benchmark of the gateway: its look-ups are counted, and every rule has a row."""

import csv

import pytest

from servegym.baselines.prefix_routing import RULES
from servegym.experiments.bench import prefix_gateway


@pytest.mark.slow
def test_a_smoke_run_writes_a_row_for_every_case_and_rule(tmp_path):
    assert prefix_gateway.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "gateway.csv").open()))
    cases = [f"{name}, blocks of {size}" for name, size in prefix_gateway.CASES]
    expected = [f"{case}: {what}" for case in cases for what in ("decision", "look-up")]
    assert [row["what"] for row in rows] == expected + [f"rule {name}" for name in RULES]
    assert all(float(row["value"]) > 0 for row in rows if "look-up" not in row["what"])
