"""Old observations and failing experts as the environments show them."""

import copy

import gymnasium as gym
import numpy as np
import pytest

import servegym
from servegym.envs.llm_routing import kernel

from ...nested import same

GRAPH, FLAT, EXPERTS = servegym.ENV_IDS[:3]
FAILURES = {"mean_time_to_failure_s": 8.0, "mean_time_to_repair_s": 2.0}
BOTH = {"staleness_s": 0.4, "failures": FAILURES}
BASE = {"num_experts": 3, "episode_requests": 60, "rate": 12.0}


def play(env, actions):
    return [copy.deepcopy(env.step(int(action))) for action in actions]


def test_age_changes_what_is_seen_and_nothing_else():
    fresh, old = (gym.make(GRAPH, **BASE, staleness_s=age) for age in (0.0, 1.0))
    fresh.reset(seed=2)
    old.reset(seed=2)
    different = 0
    for action in np.random.default_rng(2).integers(0, 4, 60):
        now, before = fresh.step(action), old.step(action)
        assert now[1:4] == before[1:4]
        assert same(now[0]["request"], before[0]["request"])
        different += not same(now[0]["experts"], before[0]["experts"])
    assert different > 30
    assert same(fresh.unwrapped.request_log(), old.unwrapped.request_log())
    assert not before[0]["running"].any() and not before[0]["running_mask"].any()


def test_decisions_of_the_last_second_are_unseen():
    env = gym.make(GRAPH, **BASE, staleness_s=1.0).unwrapped
    observation, _ = env.reset(seed=3)
    arrivals = env.batch.arrivals[0]
    young = int(np.searchsorted(arrivals, arrivals[0] + 1.0))
    assert young > 5
    for _ in range(young):
        assert not observation["experts"].any() and not observation["waiting_mask"].any()
        assert env.action_masks().all()
        observation, _, _, _, _ = env.step(1)
    assert observation["experts"][0].any()
    rejected = env.request_log()["outcome"] == kernel.REJECTED
    assert rejected.any(), "the mask is as old as the rest"


def test_a_dead_expert_is_masked_and_empty_and_refuses():
    env = gym.make(GRAPH, **BASE, failures={**FAILURES, "mean_time_to_repair_s": 8.0}).unwrapped
    dead = rejected = lost = 0
    for seed in range(4):
        observation, _ = env.reset(seed=seed)
        for action in np.random.default_rng(seed).integers(1, 4, 59):
            down = env.batch.expert["down"][0] == 1
            assert not env.action_masks()[1:][down].any()
            assert not observation["experts"][down].any()
            assert not observation["running"][down].any()
            dead += int(down.sum())
            observation, _, _, _, _ = env.step(int(action))
            if down[action - 1]:
                assert env.request_log()[-1]["outcome"] == kernel.REJECTED
                rejected += 1
        log = env.request_log()
        failed = log[log["outcome"] == kernel.FAILED]
        assert np.isnan(failed["finish_s"]).all() and (failed["expert"] >= 0).all()
        assert env.episode_kpis()["failure_rate"] == pytest.approx(len(failed) / len(log))
        lost += len(failed)
    assert dead > 10 and rejected > 3 and lost > 3


def test_rewards_of_an_episode_sum_to_its_qos():
    for reward in ("completed_qos", "paid_forward"):
        env = gym.make(FLAT, **BASE, **BOTH, reward=reward)
        env.reset(seed=6)
        steps = play(env, np.random.default_rng(6).integers(0, 4, 60))
        kpis = steps[-1][4]["episode_kpis"]
        total = sum(step[1] for step in steps)
        assert total == pytest.approx(60 * kpis["avg_qos"], abs=1e-6) and total > 1
        assert "failure_rate" in kpis


def test_a_state_of_another_age_is_refused():
    env, old = (gym.make(GRAPH, **BASE, staleness_s=age).unwrapped for age in (0.0, 1.0))
    env.reset(seed=0)
    old.reset(seed=0)
    with pytest.raises(ValueError, match="staleness_s"):
        env.restore_state(old.clone_state())
