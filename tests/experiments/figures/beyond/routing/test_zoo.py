"""The comparison of the learning algorithms: its score, and the figure from real trainings."""

import csv

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from servegym.experiments.figures.beyond.routing import zoo as routing_zoo  # noqa: E402
from servegym.experiments.figures.routing import training as queue  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402

TINY = {
    "profiles": "edge-6-heterogeneous",
    "rate_low": 4.0,
    "rate_high": 11.0,
    "eval_rates": (8.0,),
    "reward": "paid_forward",
    "encoder": "sets",
    "num_envs": 4,
    "set": ("episode_requests=30",),
}


def test_the_gain_is_paired_by_episode_and_averaged_over_trainings_and_rates():
    reference = {5.0: np.array([0.7, 0.5]), 8.0: np.array([0.6, 0.2])}
    scores = {
        5.0: [reference[5.0] + 0.01, reference[5.0] + [0.03, 0.03]],
        8.0: [reference[8.0] + [0.0, 0.04], reference[8.0] + [0.04, 0.0]],
    }
    found = routing_zoo.gains(scores, reference)
    # Over both rates the trainings gain .015 and .025: t of one degree of freedom is 12.706.
    assert found == pytest.approx((0.02, 0.02 - 12.706 * 0.005, 0.02 + 12.706 * 0.005), abs=1e-5)


@pytest.mark.slow
def test_the_figure_tells_agents_apart_by_seed_rate_and_start(tmp_path):
    runs = [
        queue.TrainingRun(
            "zoo",
            f"ppo_{start}",
            "het4-11",
            seed,
            128,
            {**TINY, "num_steps": 8, "eval_every": 128, "prior": prior},
            "ppo_han",
        )
        for start, prior in (("greedy", 0.02), ("nothing", 0.0))
        for seed in (1, 2)
    ]
    table = tmp_path / "table.csv"
    states = queue.train_all(runs, tmp_path / "runs", table, niceness=0)
    assert set(states.values()) == {"finished"}
    out = tmp_path / "out"
    argv = ["--checkpoints", str(tmp_path / "runs"), "--out", str(out), "--quick"]
    assert routing_zoo.main([*argv, "--episodes", "2"]) == 0
    rows = list(csv.DictReader((out / "zoo.csv").open()))
    rates = {row["rate"] for row in rows}
    assert len(rows) == 4 * len(rates)
    by = {(row["policy"], row["rate"]): row for row in rows}
    for rate in rates:
        start = by["ppo_greedy", rate]
        assert (start["starts_at"], start["network"], start["trainings"]) == (
            "priced_greedy",
            "sets",
            "2",
        )
        assert by["ppo_nothing", rate]["starts_at"] == "nothing"
        assert by["priced_greedy", rate]["trainings"] == "0"
    # After 128 decisions the one is still where it started, the other knows next to nothing.
    assert {row["steps"] for row in rows if row["agent"]} == {"128"}
    notes = {one.get("policy"): one for one in read_record(out / "zoo.csv")["notes"]}
    assert notes["ppo_nothing"]["gain"] == pytest.approx(float(by["ppo_nothing", rate]["gain"]))
    assert float(start["gain"]) > float(by["ppo_nothing", rate]["gain"])
    assert abs(float(start["gain"])) < 0.1


def test_without_trainings_of_the_group_it_says_so(tmp_path, capsys):
    assert routing_zoo.main(["--out", str(tmp_path), "--quick", "--routers", "rpi"]) == 0
    assert "no trainings of the group zoo" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.csv"))
