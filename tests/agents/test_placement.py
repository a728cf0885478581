"""PPO and MAPPO for expert placement: what they see, and learning from nothing."""

import numpy as np
import pytest
import torch

from servegym.agents import mappo_placement, ppo_placement
from servegym.envs.expert_placement.env import ExpertPlacementEnv

from .runs import TOY, lines, tiny

agents = pytest.mark.parametrize("module", [ppo_placement, mappo_placement], ids=["ppo", "mappo"])


def observe(servers=3, layers=4, experts=8, seed=0):
    counts = np.random.default_rng(seed).integers(1, 1000, (2, servers, layers, experts))
    return {"counts": counts.astype(np.float32), "progress": np.array([[0.0], [0.5]])}


@pytest.mark.slow
@agents
def test_a_short_training_rises_above_its_start(module, tmp_path):
    settings = {"total_timesteps": 800, "eval_every": 10_000, "eval_episodes": 8}
    module, args = tiny(module.__name__.rpartition(".")[2], tmp_path, **settings)
    key = "eval/mean_latency_s"
    found = [line[key] for line in lines(module.train(args)) if key in line]
    # On the toy cluster own share, where it begins, is ahead of whole layers already.
    assert len(found) == 2 and found[1] < 0.985 * found[0]


def test_a_server_of_mappo_sees_only_itself():
    torch.manual_seed(0)
    agent, seen = mappo_placement.Agent(16, 3, 4), observe()["counts"]
    output = agent(mappo_placement.features(seen))
    other = seen.copy()
    other[:, 2] = other[:, 2, ::-1]
    changed = agent(mappo_placement.features(other))
    torch.testing.assert_close(changed[:, :2], output[:, :2], rtol=0, atol=0)
    assert not torch.equal(changed[:, 2], output[:, 2])


def test_mappo_plans_alike_in_both_environments():
    args = mappo_placement.Args(set=TOY)
    kwargs = {"model": "toy", "epochs": 2, "epoch_s": 40.0, "action_mode": "layer_height"}
    many = mappo_placement.parallel_env(**kwargs)
    single = ExpertPlacementEnv(**kwargs)
    torch.manual_seed(0)
    agent = mappo_placement.Agent(16, 3, 4)
    agent.table.data += torch.randn(3, 4)
    observations, _ = many.reset(seed=5)
    seen, _ = single.reset(seed=5)
    with torch.no_grad():
        x = mappo_placement.features([[seen["counts"] for seen in observations.values()]])
        plans = mappo_placement.plan(agent(x), args)[0]
    many.step({f"server_{n}": {"migrate": 1, "plan": plans[n]} for n in range(3)})
    rows = {name: part[None] for name, part in seen.items()}
    action = mappo_placement.greedy(agent, args, rows)
    single.step({name: part[0] for name, part in action.items()})
    target = single.batch.episodes[0].simulator.target()
    np.testing.assert_array_equal(many.system.simulator.target(), target)


@agents
def test_only_the_first_decision_of_an_episode_migrates(module):
    agent = module.Agent(16, (3, 4)) if module is ppo_placement else module.Agent(16, 3, 4)
    action = module.greedy(agent, module.Args(), observe())
    assert action["migrate"].tolist() == [1, 0]
    assert action["plan"].shape == (2, 3, 4) and np.abs(action["plan"] - 0.5).max() < 0.1
