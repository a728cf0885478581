"""The study around the placement agents: what it reads, and its controls."""

import numpy as np
import pytest

from servegym.agents import ppo_placement
from servegym.envs.expert_placement.env import ExpertPlacementEnv
from servegym.experiments.studies.placement import learning


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
