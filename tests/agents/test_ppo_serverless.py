"""PPO with one head per part of the plan: probabilities, learning, what it sees."""

import numpy as np
import pytest
import torch

from servegym.agents.ppo_serverless import Agent, train
from servegym.experiments.evaluation.evaluate import evaluate

from .runs import lines, tiny

CHOICES = [3, 4, 2]
ACTIONS = torch.cartesian_prod(*(torch.arange(k) for k in CHOICES))


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = Agent(columns=5, choices=CHOICES, width=8)
    for parameter in agent.parameters():  # away from the even start
        torch.nn.init.normal_(parameter, std=0.7)
    return agent


def test_probabilities_and_entropy_of_plans_that_are_kept_or_made(agent):
    x, mask = torch.rand(1, 5), torch.ones(1, 9, dtype=torch.int8)
    mask[0, 1] = 0
    n = len(ACTIONS)
    _, log_prob, entropy, value = agent(x.expand(n, -1), mask.expand(n, -1), ACTIONS)
    chance, kept = log_prob.exp().detach().numpy(), (ACTIONS[:, -1] == 1).numpy()
    assert chance[~kept].sum() + chance[kept][0] == pytest.approx(1.0, abs=1e-5)
    assert (chance[kept] == chance[kept][0]).all(), "the other parts have no effect"
    assert chance[(ACTIONS[:, 0] == 1).numpy() & ~kept].max() < 1e-12
    outcomes = np.append(chance[~kept], chance[kept][0])
    outcomes = outcomes[outcomes > 0]
    expected = -(outcomes * np.log(outcomes)).sum()
    assert entropy[0].item() == pytest.approx(expected, abs=1e-4)
    assert value.shape == (n,)
    drawn, own, *_ = agent(x.expand(40_000, -1), mask.expand(40_000, -1))
    again = agent(x.expand(40_000, -1), mask.expand(40_000, -1), drawn)[1]
    np.testing.assert_allclose(own.detach(), again.detach())
    assert float((drawn[:, -1] == 1).float().mean()) == pytest.approx(chance[kept][0], abs=0.012)
    assert not (drawn[:, 0] == 1).any()


@pytest.mark.slow
def test_a_short_training_rises_far_above_its_random_weights(tmp_path):
    changes = {"num_envs": 32, "total_timesteps": 16_384, "width": 32, "eval_episodes": 16}
    changes |= {"eval_every": 10**6, "set": ("model=toy", "episode_requests=20")}
    run = train(tiny("ppo_serverless", tmp_path, **changes)[1])
    first, last = (line["eval/score"] for line in lines(run) if "eval/score" in line)
    assert last > first + 4, (first, last)
    # Random plans are worse still.
    kwargs = {"model": "toy", "episode_requests": 20, "split": "val"}
    rows = evaluate("servegym/ServerlessMoE-v0", ["random"], 16, 10_000, kwargs)
    assert last > np.mean([row["return"] for row in rows]) + 10
