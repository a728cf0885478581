"""Several access points that share the experts: PettingZoo's own tests and ours."""

import warnings

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("pettingzoo", reason="the multi-agent environment needs pettingzoo")

from pettingzoo.test import parallel_api_test, parallel_seed_test

from servegym.envs.llm_routing import parallel_env

from ...nested import same

BASE = {"num_experts": 3, "num_access_points": 3, "episode_requests": 30, "rate": 4.0}
HARD = {"failures": {"mean_time_to_failure_s": 5, "mean_time_to_repair_s": 2}}
views = pytest.mark.parametrize("view", ["graph", "flat", "experts"])


@views
def test_pettingzoos_tests_have_nothing_to_say(view):
    extra = {} if view == "graph" else HARD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(**BASE, **extra, view=view), num_cycles=100)
    parallel_seed_test(lambda: parallel_env(**BASE, **extra, view=view))


@pytest.mark.parametrize(
    ("view", "reward"),
    [("graph", "qos_aware"), ("flat", "completed_qos"), ("experts", "paid_forward")],
)
def test_one_access_point_is_the_single_environment(view, reward):
    names = {"graph": "LLMRouting-v1", "flat": "LLMRoutingFlat-v3"}
    names["experts"] = "LLMRoutingExperts-v3"
    kwargs = {**BASE, **HARD, "reward": reward, "rate": (2.0, 12.0)}
    kwargs["latency_requirement_s"] = (0.02, 0.06)
    del kwargs["num_access_points"]
    single = gym.make(f"servegym/{names[view]}", **kwargs)
    env = parallel_env(num_access_points=1, view=view, **kwargs)
    for seed in (5, None):
        theirs, info = single.reset(seed=seed)
        mine, _ = env.reset(seed=seed)
        for action in np.random.default_rng(1).integers(0, 4, 30):
            agent = mine["access_point_0"]
            assert same(agent["observation"], theirs) and agent["turn"] == 1
            assert same(agent["action_mask"], info["action_mask"])
            theirs, paid, ended, _, info = single.step(int(action))
            mine, given, ends, _, infos = env.step({"access_point_0": int(action)})
            assert given["access_point_0"] == pytest.approx(paid, abs=1e-6)
            assert ends["access_point_0"] == ended
        assert ended and env.agents == []
        assert infos["access_point_0"]["episode_kpis"]["own_qos"] == pytest.approx(
            info["episode_kpis"]["avg_qos"]
        )


@pytest.mark.parametrize("reward", ["qos_aware", "completed_qos", "paid_forward"])
def test_rewards_add_up_and_go_to_the_owners(reward):
    own = parallel_env(**BASE, **HARD, reward=reward)
    shared = parallel_env(**BASE, **HARD, reward=reward, shared_reward=True)
    own.reset(seed=2)
    shared.reset(seed=2)
    random = np.random.default_rng(2)
    total = np.zeros(3)
    while own.agents:
        actions = {agent: int(random.integers(0, 4)) for agent in own.agents}
        mine, theirs = own.step(actions), shared.step(actions)
        assert len(set(theirs[1].values())) == 1
        assert sum(mine[1].values()) == pytest.approx(theirs[1]["access_point_0"], abs=1e-6)
        total += list(mine[1].values())
    qos = [mine[4][agent]["episode_kpis"]["own_qos"] for agent in own.possible_agents]
    assert len(set(qos)) == 3
    if reward != "qos_aware":
        assert total == pytest.approx(30 * np.array(qos), abs=1e-5)
    kpis = mine[4]["access_point_0"]["episode_kpis"]
    assert np.mean(qos) == pytest.approx(kpis["avg_qos"])


def test_turns_follow_the_arrivals():
    env = parallel_env(**BASE, view="graph")
    observations, infos = env.reset(seed=1)
    assert infos == {agent: {} for agent in env.agents}, "as in the placement environment"
    alone = np.array([1, 0, 0, 0], np.int8)
    times = []
    while env.agents:
        turn = env.turn
        if infos[turn]:
            assert [a for a in env.agents if infos[a]["turn"]] == [turn]
            times.append(infos[turn]["time_s"])
        for agent in env.agents:
            seen = observations[agent]
            assert seen["turn"][0] == (agent == turn)
            assert bool(seen["observation"]["request"].any()) == (agent == turn)
            assert same(
                seen["observation"]["running"], observations[turn]["observation"]["running"]
            )
            if agent != turn:
                assert same(seen["action_mask"], alone)
        # What the others answer does not count, were it nonsense.
        actions = dict.fromkeys(env.agents, "nonsense") | {turn: 1}
        observations, _, _, _, infos = env.step(actions)
    assert len(times) == 89 and np.diff(times).min() >= 0
    assert (env.request_log()["expert"] == 0).all()


def test_bad_actions_are_refused():
    env = parallel_env(**BASE)
    env.reset(seed=0)
    for actions, word in (
        (None, "must be a dict"),
        ({}, "lacks"),
        ({env.turn: 4}, "out of range"),
        ({env.turn: 0.5}, "whole"),
    ):
        with pytest.raises(ValueError, match=word):
            env.step(actions)
