"""PPO with one head per part of the plan: probabilities, learning, checkpoints."""

import json

import gymnasium as gym
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servegym.agents import load_policy, ppo_serverless  # noqa: E402
from servegym.agents.ppo_serverless import Agent, Args, entropies, log_prob, train  # noqa: E402

QUICK = {
    "set": ("model=toy", "episode_requests=20"),
    "num_envs": 8,
    "num_steps": 16,
    "width": 16,
    "total_timesteps": 1_024,
    "eval_every": 512,
    "eval_episodes": 2,
}


@pytest.fixture
def agent():
    torch.manual_seed(0)
    return Agent(columns=5, choices=[3, 2, 4], width=8)


def test_probabilities_of_all_plans_sum_to_one(agent):
    x, mask = torch.randn(1, 5), torch.ones(1, 9)
    mask[0, 1] = 0
    heads, value = agent(x, mask)
    plans = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(4))
    repeated = [head.expand(len(plans), -1) for head in heads]
    chance = log_prob(repeated, plans).exp()
    assert value.shape == (1,)
    assert chance.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert chance[plans[:, 0] == 1].max() == 0  # the masked choice


def test_entropy_of_even_heads_is_the_log_of_their_choices(agent):
    heads = [torch.full((2, k), 1 / k).log() for k in (3, 2, 4)]
    expected = torch.tensor([3.0, 2.0, 4.0]).log().expand(2, 3)
    torch.testing.assert_close(entropies(heads), expected)


class Bandit(gym.vector.VectorEnv):
    """The reward is 1 for the plan (2, 0), half of it for each part that is right."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete([4, 3])

    def reset(self, *, seed=None, options=None):
        return np.ones((self.num_envs, 2), np.float32), {}

    def step(self, actions):
        reward = 0.5 * (actions[:, 0] == 2) + 0.5 * (actions[:, 1] == 0)
        ended = np.ones(self.num_envs, bool)
        return self.reset()[0], reward, ended, np.zeros(self.num_envs, bool), {}


def test_learns_a_bandit(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_serverless, "make_envs", lambda args, n, **kwargs: Bandit(n))
    settings = {**QUICK, "total_timesteps": 8_192, "eval_every": 8_192, "learning_rate": 0.01}
    run = train(Args(**settings, out_dir=str(tmp_path), run_name="run"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["charts/episodic_return"] < 0.6
    assert lines[-1]["eval/score"] == 1.0
    assert lines[-1]["eval/commonest_share_0"] == 1.0


def test_trains_logs_and_saves(tmp_path):
    run = train(Args(**QUICK, out_dir=str(tmp_path), run_name="run"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines] == [128 * k for k in range(1, 9)]
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    policy = load_policy(run)
    envs = gym.make_vec(
        "servegym/ServerlessMoEFlat-v0", num_envs=3, model="toy",
        vectorization_mode="vector_entry_point",
    )  # fmt: skip
    observation, info = envs.reset(seed=0)
    actions = policy.act(observation, info["action_mask"])
    assert actions.shape == (3, 5) and envs.action_space.contains(actions)
    with pytest.raises(ValueError, match="columns"):
        policy.act(observation[:, 1:], info["action_mask"])


def test_same_seed_same_log(tmp_path):
    logs = []
    for name in ("a", "b"):
        run = train(Args(**QUICK, out_dir=str(tmp_path), run_name=name))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        logs.append([{k: v for k, v in line.items() if k != "charts/SPS"} for line in lines])
    assert logs[0] == logs[1]


def test_other_spaces_are_refused(tmp_path):
    with pytest.raises(ValueError, match="LLMRoutingFlat"):
        train(Args(**{**QUICK, "set": ()}, env_id="servegym/LLMRoutingFlat-v0",
                   out_dir=str(tmp_path)))  # fmt: skip
