"""PPO over sets: masks, the start, advantages and privileged inputs by hand."""

import numpy as np
import pytest
import torch

from servegym.agents import ppo_sets
from servegym.agents.lib.environments import make_envs
from servegym.baselines.llm_routing.features import privileged_inputs
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy
from servegym.baselines.llm_routing.system import RoutingSystem

from ..routing_systems import moved, permuted


def an_agent():
    torch.manual_seed(0)
    system = RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)
    return ppo_sets.Agent(system), system


def test_experts_that_trade_places_trade_probabilities(random_obs):
    agent, system = an_agent()
    order = np.array([2, 0, 3, 1])
    other = ppo_sets.Agent(permuted(system, order))
    weights = {k: v for k, v in agent.state_dict().items() if k != "law"}
    other.load_state_dict(weights, strict=False)
    obs = random_obs(5)
    mask = torch.tensor([[1, 1, 0, 1, 1]] * 5)
    there = torch.cat([mask[:, :1], mask[:, 1:][:, order]], -1)
    inputs = torch.rand(5, ppo_sets.INPUTS)
    with torch.no_grad():
        one, value = agent(torch.from_numpy(agent.rows(obs)).float(), mask, inputs)
        two, same = other(torch.from_numpy(other.rows(moved(obs, order))).float(), there, inputs)
    assert (one.exp()[mask == 0] == 0).all() and torch.isfinite(one).all()
    torch.testing.assert_close(one[:, 1:][:, order], two[:, 1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(value, same, atol=1e-4, rtol=1e-4)


def test_the_untrained_policy_is_nearly_the_heuristic(random_obs, monkeypatch):
    monkeypatch.setattr(ppo_sets, "TEMPERATURE", 0.001)  # what the network adds is nothing
    agent, system = an_agent()
    obs, mask = random_obs(200, seed=2), np.ones((200, 5), np.int8)
    wanted = PricedGreedy(system).act(obs, mask)
    assert (agent.act(obs, mask) == wanted).mean() > 0.9 and len(set(wanted)) > 3


def test_advantages_by_hand():
    reward, value = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.5], [1.0], [1.5]])
    following, done = torch.tensor([[1.0], [0.0], [2.0]]), torch.tensor([[0.0], [1.0], [0.0]])
    got = ppo_sets.advantages(reward, done, value, following, 0.5, 0.8)
    # deltas 1 + 0.5 - 0.5 = 1, 2 + 0 - 1 = 1, 3 + 1 - 1.5 = 2.5; the end cuts the third off.
    assert got[:, 0].tolist() == pytest.approx([1 + 0.4 * 1, 1.0, 2.5])


def test_privileged_inputs_by_hand():
    envs = make_envs("servegym/LLMRouting-v1", 3, episode_requests=40, rate=8.0)
    envs.reset(seed=4)
    for _ in range(30):
        envs.step(np.ones(3, np.int64))
    batch = envs.unwrapped.batch
    got = privileged_inputs(envs, ppo_sets.HORIZONS)[1].reshape(4, 4)
    for column, ahead in enumerate(ppo_sets.HORIZONS):
        count = min(ahead, 10)  # requests 30 to 39 are left
        gap = batch.arrivals[1, min(30 + ahead, 39)] - batch.arrivals[1, 30] + 0.1
        rows = batch.table[batch.rows[1, 30 : 30 + count]]
        wanted = [
            -np.log(gap / (min(ahead, count) + 0.5)) - 2,
            count / ahead,
            rows[:, :, 2].mean() / 150 - 1,
            4 * rows[:, :, 1].max(1).mean() - 3,
        ]
        assert got[:, column].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-4)
