"""PPO of Stable-Baselines3 on a routing id: trains, then plays 20 episodes of the evaluation split.

A Box with a row for each expert goes through the network of ``agents/ppo.py``, one for all rows,
whose inputs are scaled column by column: what is learned at one expert serves every other. The file
serves the interoperability tests and is no agent of this package.
"""

import argparse
import time

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from servegym.agents.ppo import Agent


class Rows(BaseFeaturesExtractor):
    """The logits (B, N + 1) and the value (B, 1) of observations (B, N, columns)."""

    def __init__(self, space):
        experts = space.shape[0]
        super().__init__(space, experts + 2)
        self.net = Agent(space.shape, experts + 1, 64)
        self.register_buffer("mask", torch.ones(1, experts + 1))

    def forward(self, x):
        logits, value = self.net(self.net.moments(x), self.mask)
        return torch.cat([logits, value[:, None]], -1)


class Part(nn.Module):
    """Columns of what `Rows` gives: the actor's and the critic's head have nothing to add."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def forward(self, x):
        return x[:, self.columns]


class SharedPolicy(ActorCriticPolicy):
    """One network for all experts."""

    def __init__(self, *args, **kwargs):
        given = {"features_extractor_class": Rows, "net_arch": [], "ortho_init": False}
        super().__init__(*args, **kwargs, **given)

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_net, self.value_net = Part(slice(0, -1)), Part(slice(-1, None))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), eps=1e-5)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="servegym:servegym/LLMRoutingSummary-v2")
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=400_000)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    begin = time.process_time()
    kwargs = {"rate": args.rate, "reward": "completed_qos"}
    # The last reward of an episode has all that is still served: cut off before, and bootstrapped.
    cut = {**kwargs, "max_episode_steps": 999}
    envs = make_vec_env(args.env_id, 64, seed=args.seed, env_kwargs=cut)
    how = {"n_steps": 64, "batch_size": 512, "n_epochs": 3, "ent_coef": 0.003, "device": "cpu"}
    how |= {"learning_rate": lambda left: 1e-3 * left, "gamma": args.gamma, "seed": args.seed}
    model = PPO(SharedPolicy, envs, **how)
    moments = model.policy.features_extractor.net.moments
    observation = envs.reset()
    for k in range(200):  # random actions tell the scale of each column
        moments.update(torch.as_tensor(observation))
        observation = envs.step(np.random.default_rng(k).integers(0, envs.action_space.n, 64))[0]
    model.learn(args.total_timesteps)
    print(f"cpu_s={time.process_time() - begin:.1f}")

    tests = make_vec_env(args.env_id, 20, seed=100_000, env_kwargs={**kwargs, "split": "eval"})
    observation, qos = tests.reset(), []
    while len(qos) < 20:
        action, _ = model.predict(observation, deterministic=True)
        observation, _, _, infos = tests.step(action)
        qos += [info["episode_kpis"]["avg_qos"] for info in infos if "episode_kpis" in info]
    print(f"avg_qos={np.mean(qos):.4f}")


if __name__ == "__main__":
    main()
