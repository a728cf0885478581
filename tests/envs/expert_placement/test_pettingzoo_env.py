"""Every server an agent: PettingZoo's own tests and ours."""

import warnings

import numpy as np
import pytest

pytest.importorskip("pettingzoo", reason="the multi-agent environment needs pettingzoo")

from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test
from pettingzoo.utils.conversions import parallel_to_aec

from servegym.envs.expert_placement import parallel_env
from servegym.envs.expert_placement.env import ExpertPlacementEnv

SHORT = {"model": "toy", "epochs": 7, "epoch_s": 5.0, "mean_interarrival_s": 2.0}
modes = pytest.mark.parametrize("mode", ["layer_budget", "layer_height", "expert_score"])


@modes
def test_pettingzoos_tests_have_nothing_to_say(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(**SHORT, action_mode=mode), num_cycles=30)
    parallel_seed_test(lambda: parallel_env(**SHORT, action_mode=mode))


def test_turn_by_turn_it_passes_the_tests_as_well():
    api_test(parallel_to_aec(parallel_env(**SHORT)), num_cycles=30)


@modes
@pytest.mark.parametrize("shared, reward", [(False, "latency"), (True, "log_latency")])
def test_servers_that_agree_are_the_single_environment(mode, shared, reward):
    single = ExpertPlacementEnv(**SHORT, action_mode=mode, reward=reward)
    env = parallel_env(**SHORT, action_mode=mode, reward=reward, shared_reward=shared)
    theirs, _ = single.reset(seed=1)
    env.reset(seed=1)
    single.action_space.seed(0)
    for _ in range(7):
        action = single.action_space.sample()
        theirs, paid, ended, _, info = single.step(action)
        mine, given, ends, _, infos = env.step(
            {
                agent: {"migrate": action["migrate"], "plan": action["plan"][n]}
                for n, agent in enumerate(env.agents)
            }
        )
        if shared:
            assert all(x == pytest.approx(paid) for x in given.values())
        else:
            assert list(given.values()) == list(info["reward_terms"].values())
        assert set(ends.values()) == {ended}
        np.testing.assert_array_equal(mine["server_1"]["counts"], theirs["counts"][1])
        held = env.problem.cluster.server_view(theirs["placement"])
        np.testing.assert_array_equal(mine["server_1"]["held"], held[[1, 0, 2]])
    assert ended and env.agents == []
    assert infos["server_0"]["episode_kpis"] == info["episode_kpis"]
    assert env.state_space.contains(env.state())


def test_one_server_can_change_alone():
    env = parallel_env(**SHORT, free_start=False, action_mode="expert_score")
    env.reset(seed=0)
    before = env.system.simulator.target()
    rng = np.random.default_rng(0)
    env.step(
        {
            agent: {"migrate": int(n == 2), "plan": rng.random((4, 8)).astype(np.float32)}
            for n, agent in enumerate(env.agents)
        }
    )
    after = env.system.simulator.target()
    env.problem.cluster.check_placement(after)
    assert not np.array_equal(before[2:], after[2:])
    # The others take in only what the change would have left nowhere.
    assert (before[:2] & ~after[:2]).sum() <= (after[:2] & ~before[:2]).sum()


def test_bad_calls_are_named():
    env = parallel_env(**SHORT)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="server_0"):
        env.step({})
    good = {agent: env.action_space(agent).sample() for agent in env.agents}
    for plan in (np.ones(3), np.ones((4, 8)), np.full(4, np.nan)):
        with pytest.raises(ValueError, match="plan"):
            env.step(good | {"server_1": {"migrate": 1, "plan": plan}})
    for actions in (None, 3, list(good)):
        with pytest.raises(ValueError, match="must be a dict from 'server_0' to 'server_2'"):
            env.step(actions)
    with pytest.raises(ValueError, match="'server_9'; the agents are"):
        env.step(good | {"server_9": good["server_0"]})
    assert env.system.epoch == 0
    with pytest.raises(ValueError, match="placement"):
        parallel_env(action_mode="placement")
    with pytest.raises(ValueError, match="shared_reward"):
        parallel_env(shared_reward=1)
