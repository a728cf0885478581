"""The study around the placement agents: what it reads, and its controls."""

import csv

import numpy as np
import pytest

from servegym.agents import ppo_placement
from servegym.agents.lib.checkpoint import load_policy
from servegym.envs.expert_placement.env import ExpertPlacementEnv
from servegym.experiments.studies.placement import learning

TOY = ("model=toy", "epochs=1", "epoch_s=30.0")


def test_controls_place_once_by_the_decoder_alone():
    for name in learning.CONTROLS:
        control = learning.Control(name)
        env = ExpertPlacementEnv(model="toy", epochs=2, **control.env_kwargs)
        seen, _ = env.reset(seed=0)
        rows = {key: part[None].repeat(2, 0) for key, part in seen.items()}
        rows["progress"][1] = 0.5
        action = control.act(rows)
        assert action["migrate"].tolist() == [1, 0] and np.ptp(action["plan"]) == 0
        assert env.action_space["plan"].contains(action["plan"][0])


@pytest.mark.parametrize("scenario", learning.SCENARIOS)
def test_every_training_has_a_command_that_the_agent_takes(scenario):
    import tyro

    from servegym.agents import mappo_placement

    for command in learning.commands(scenario):
        module, flags = command.split()[2].rpartition(".")[2], command.split()[3:]
        args_class = {"ppo_placement": ppo_placement, "mappo_placement": mappo_placement}[module]
        args = tyro.cli(args_class.Args, args=flags, config=(tyro.conf.FlagConversionOff,))
        assert args.run_name.endswith(f"{scenario}_{args.seed}")
        assert args.shuffle_rewards == ("shuffled" in args.run_name)


def test_a_missing_training_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no training of edge_hetero; make one by python"):
        learning.main(["--figure", "edge_hetero", "--runs", str(tmp_path), "--out", str(tmp_path)])


@pytest.mark.slow
def test_it_shows_curves_and_evaluations_of_trainings_rules_and_controls(tmp_path, monkeypatch):
    plain = learning.evaluate

    def on_toy(env_id, policies, episodes, seed, kwargs):
        return plain(env_id, policies, episodes, seed, {**kwargs, "model": "toy", "epochs": 1})

    monkeypatch.setattr(learning, "evaluate", on_toy)
    for seed in (1, 2):
        args = ppo_placement.Args(
            seed=seed,
            set=TOY,
            total_timesteps=32,
            num_envs=16,
            eval_every=16,
            eval_episodes=1,
            out_dir=str(tmp_path),
            run_name=f"ppo_placement_edge_hetero_{seed}",
        )
        run = ppo_placement.train(args)
    fresh = learning.random_weights(run / "last.safetensors")
    trained = load_policy(run / "last.safetensors")
    assert not fresh.net.table.any() and trained.net.table.any()
    command = ["--quick", "--figure", "edge_hetero", "--runs", str(tmp_path)]
    assert learning.main([*command, "--out", str(tmp_path)]) == 0
    with open(tmp_path / "learning_curves_edge_hetero.csv", newline="") as stream:
        curves = list(csv.DictReader(stream))
    steps = [float(row["step"]) for row in curves if row["policy"] == "ppo_placement"]
    assert steps == [0.0, 16.0, 32.0] * 2
    with open(tmp_path / "learning_edge_hetero.csv", newline="") as stream:
        rows = {row["policy"]: row for row in csv.DictReader(stream)}
    assert rows.keys() > {"ppo_placement", "random_weights", "prism", *learning.CONTROLS}
    assert float(rows["ppo_placement"]["trainings"]) == 2
    assert (tmp_path / "learning_curves_edge_hetero.png").stat().st_size > 5_000
