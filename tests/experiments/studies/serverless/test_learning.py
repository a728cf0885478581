"""The table and curves of what PPO learns on the serverless family."""

from functools import partial

import gymnasium as gym
import pytest
import torch
from safetensors.torch import load_file

from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.studies.serverless import learning


def test_shuffled_rewards_are_those_of_the_step_in_another_order():
    made = {"num_envs": 16, "vectorization_mode": "vector_entry_point", "model": "toy"}
    plain, shuffled = (gym.make_vec("servegym/ServerlessMoEFlat-v1", **made) for _ in range(2))
    shuffled = learning.Shuffled(shuffled)
    plain.reset(seed=0)
    shuffled.reset(seed=0)
    actions = plain.action_space.sample()
    own, other = plain.step(actions)[1], shuffled.step(actions)[1]
    assert (own != other).any() and sorted(own) == sorted(other)


@pytest.mark.slow
def test_training_table_and_figure(tmp_path, monkeypatch):
    runs, short = tmp_path / "runs", {"episode_requests": 10}
    tiny = {
        "set": ("episode_requests=10",),
        "num_envs": 8,
        "num_steps": 4,
        "total_timesteps": 64,
        "eval_episodes": 2,
        "width": 8,
    }
    monkeypatch.setattr(learning, "SEEDS", range(1, 3))
    monkeypatch.setattr(learning, "BASELINES", ("mix", "keep_alive"))
    monkeypatch.setattr(learning, "RIVALS", ("mix",))
    monkeypatch.setattr(learning, "LINES", ("mix",))
    monkeypatch.setattr(learning, "VALIDATION_EPISODES", 2)
    monkeypatch.setattr(learning, "measure", partial(learning.measure, **short))
    monkeypatch.setattr(learning, "training", partial(learning.training, **tiny))
    given = ["--out", str(tmp_path), "--episodes", "3", "--checkpoints", str(runs)]
    assert learning.main(given) == 0
    first, last = (
        load_file(runs / "random_1" / f"{name}.safetensors") for name in ("best", "last")
    )
    trained = {key for key in first if not torch.equal(first[key], last[key])}
    assert trained <= {"mean", "variance", "count"}, "the weights stay random"
    rows = {row["policy"]: row for row in read_rows(tmp_path / "learning.csv")}
    curves = read_rows(tmp_path / "learning_curves.csv")
    assert {row["run"] for row in curves} == {"mix", "seed_1", "seed_2", "shuffled_1"}
    ours = [
        [r["mean_reward"] for r in learning.measure(learning.load_policy(run), 100_000, 3)]
        for run in (runs / "seed_1" / "last.safetensors", runs / "seed_2" / "last.safetensors")
    ]
    mix = [row["mean_reward"] for row in learning.measure("mix", 100_000, 3)]
    expected = learning.over_trainings(ours, mix)
    row = rows["ppo_serverless"]
    assert (row["trainings"], rows["random weights"]["trainings"]) == (2, 2)
    assert row["minus_mix"] == pytest.approx(expected.value)
    assert row["minus_mix_low"] == pytest.approx(expected.low)
    assert "ppo_serverless, seed_2" in rows and "shuffled rewards" in rows
    assert (tmp_path / "learning.png").stat().st_size > 10_000
    note = read_record(tmp_path / "learning.csv")["notes"][0]
    assert note["rival"] == "mix" and note["minus"][0] == pytest.approx(expected.value)
