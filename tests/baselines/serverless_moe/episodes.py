"""Vector environments on the eval split, and one episode of a policy in them."""

import numpy as np

from servegym.baselines.registry import make_policy
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.vector_env import ServerlessMoEVectorEnv

FAMILY = "serverless_moe"


def make_env(rows=3, **kwargs):
    kwargs = {"model": "toy", "split": "eval", "episode_requests": 30, **kwargs}
    return ServerlessMoEVectorEnv(rows, autoreset_mode="SameStep", **kwargs)


def run(name, env, seed=0, **kwargs):
    """One episode a row: rewards (B, J), actions (J, B, n) and the policy."""
    policy = make_policy(name, ServerlessSystem.from_env(env), family=FAMILY, **kwargs)
    if policy.needs_env:
        policy.bind(env)
    observation, info = env.reset(seed=seed)
    policy.reset(env.num_envs, seed=0)
    rewards, actions = [], []
    for _ in range(env.problem.arguments.episode_requests):
        action = policy.act(observation, info["action_mask"])
        observation, reward, *_, info = env.step(action)
        rewards.append(reward.copy())
        actions.append(action.copy())
    return np.array(rewards).T, np.array(actions), policy
