"""Heuristics where fleets are drawn for each episode."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from servegym.baselines.registry import describe_system, list_policies, make_policy

ID = "servegym/LLMRouting-v1"
SHORT = {"rollout": {"horizon": 2}}
NAMES = [info.name for info in list_policies() if info.alias_of is None]


def episodes(policy, envs, seed, requests):
    """An episode a row; returns the mean QoS (B,) and the actions."""
    policy.reset(envs.num_envs, 0)
    observation, info = envs.reset(seed=seed)
    taken = []
    for _ in range(requests):
        mask = info["action_mask"]
        action = policy.act(observation, mask)
        assert mask[np.arange(len(action)), action].all()
        observation, reward, _, _, info = envs.step(action)
        policy.feedback(reward)
        taken.append(action)
    return info["episode_kpis"]["avg_qos"], np.array(taken)


def make(num_envs, requests=40, **kwargs):
    return gymnasium.make_vec(
        ID, num_envs=num_envs, episode_requests=requests, **{"fleet": "random", **kwargs}
    ).unwrapped


@pytest.mark.parametrize("name", NAMES)
def test_every_heuristic_plays_drawn_fleets(name):
    envs = make(5, requests=12 if name == "rollout" else 40)
    policy = make_policy(name, describe_system(envs.problem), **SHORT.get(name, {}))
    if policy.needs_env:
        policy.bind(envs)
    qos, taken = episodes(policy, envs, 3, envs.problem.arguments.episode_requests)
    if name == "drop_all":
        assert not taken.any() and not qos.any()
    else:
        assert taken.any() and (qos > 0).any()


def test_what_only_a_system_has_is_refused_before_a_fleet_is_seen():
    system = describe_system(make(1).problem)
    assert (system.num_experts, system.running_capacity) == (16, 64)
    with pytest.raises(ValueError, match="estimator"):
        _ = system.estimator
    with pytest.raises(ValueError, match="overrun"):
        make_policy("least_latency", system, overrun=-1.0)
