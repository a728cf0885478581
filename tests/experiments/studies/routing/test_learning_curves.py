"""Learning curves of the agents: trainings, the control, the table and its findings."""

import gymnasium as gym
import numpy as np
import pytest

from servegym.agents import ppo
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.studies.routing import learning_curves

TINY = "--total_timesteps=256 --num_envs=4 --num_steps=32 --eval_every=128 --eval_episodes=2"
SHORT = f'{TINY} --set "episode_requests=50"'


def test_shuffled_rewards_are_those_of_any_system_and_step_but_in_evaluations():
    def rewards(**more):
        envs = gym.make_vec("servegym/LLMRoutingSummary-v3", 8, reward="completed_qos", **more)
        envs.reset(seed=0)
        return np.array([envs.step(np.ones(8, np.int64))[1] for _ in range(40)])

    plain = rewards()
    with learning_curves.shuffled_rewards(0):
        shuffled, evaluation = rewards(), rewards(split="val")
    assert (plain != shuffled).any() and set(shuffled.ravel()) <= set(plain.ravel())
    np.testing.assert_array_equal(evaluation, rewards(split="val"))
    np.testing.assert_array_equal(plain, rewards())


@pytest.mark.slow
def test_a_smoke_run_writes_a_table_and_makes_no_training_twice(tmp_path, monkeypatch, capsys):
    words = ["--quick", "--flags", SHORT, "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    words += ["--figure", "learning_ppo"]
    assert learning_curves.main([*words, "--seeds", "2", "0"]) == 0
    assert not (tmp_path / "learning_ppo.csv").exists()
    runs = tmp_path / "runs" / "learning_ppo"
    assert {path.name for path in runs.iterdir()} == {"ppo_seed_2", "ppo_shuffled_1"}
    assert learning_curves.main(words) == 0
    rows = read_rows(tmp_path / "learning_ppo.csv")
    mine = [row for row in rows if row["policy"] == "ppo" and row["split"] == "val"]
    assert [row["decisions"] for row in mine] == 2 * [0, 128, 256]
    assert all(row["cpu_s"] > 0.0 for row in mine)
    whole = [row for row in rows if row["training"] == "all"]
    assert len(whole) == 1 and whole[0]["low"] <= whole[0]["qos"] <= whole[0]["high"]
    lines = {row["policy"] for row in rows if row["training"] in (None, "")}
    assert lines == set(learning_curves.HEURISTICS)
    record = read_record(tmp_path / "learning_ppo.csv")
    texts = " ".join(one["text"] for one in record["notes"])
    assert record["quick"] is True and record["settings"]["agent"] == "ppo"
    assert "of 2 trainings" in texts and "with shuffled rewards" in texts

    monkeypatch.setattr(ppo, "train", lambda args: pytest.fail("trained again"))
    assert learning_curves.main(words) == 0
    assert "rewards shuffled" not in capsys.readouterr().out.split("learning_ppo.csv")[-1]


@pytest.mark.parametrize("table", learning_curves.TRAININGS)
def test_every_training_has_flags_that_its_agent_takes(table):
    import importlib
    import shlex

    import tyro

    given = learning_curves.TRAININGS[table]
    module = importlib.import_module(f"servegym.agents.{given.agent}")
    flags = shlex.split(given.flags)
    assert tyro.cli(module.Args, args=flags, config=(tyro.conf.FlagConversionOff,)).seed
