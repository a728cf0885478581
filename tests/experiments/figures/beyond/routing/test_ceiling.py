"""The study of what is left above the routers."""

import csv

import pytest

pytest.importorskip("matplotlib")

from servegym.experiments.figures.beyond.routing import ceiling as routing_ceiling  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402


def test_clairvoyance_gains_and_the_verdict_says_how_much(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--episodes", "4"]
    argv += ["--routers", "ppo_sets"]
    assert routing_ceiling.main(argv) == 0
    rows = {row["policy"]: row for row in csv.DictReader(open(tmp_path / "ceiling.csv"))}
    assert [name for name in rows if "shipped" in name] == ["ppo_sets (shipped)"]
    rollout = rows["rollout, 30 requests"]
    assert float(rollout["gain"]) > 0
    for row in rows.values():
        assert float(row["qos"]) < float(row["ceiling"])
    summary = read_record(tmp_path / "ceiling.csv")["notes"][-1]
    assert summary["clairvoyant"] == "rollout, 30 requests"
    assert summary["gain"] == pytest.approx(float(rollout["gain"]), abs=1e-6)
    assert (tmp_path / "ceiling.png").stat().st_size > 5000


def test_the_share_of_the_gain_by_hand():
    gained = {"priced_greedy": 0.0, "one (shipped)": 0.01, "two (shipped)": 0.02}
    gained |= {"rollout, 30 requests": 0.03, "rollout, 100 requests": 0.05}
    found = routing_ceiling._summary(8.0, gained, 0.75)
    assert (found["clairvoyant"], found["gain"]) == ("rollout, 100 requests", 0.05)
    assert (found["policy"], found["share"]) == ("two (shipped)", pytest.approx(0.4))


def test_a_router_that_does_not_ship_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ppo_sets"):
        routing_ceiling.main(["--quick", "--out", str(tmp_path), "--routers", "ppo_set"])
