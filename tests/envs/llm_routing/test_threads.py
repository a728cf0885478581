"""Systems split over threads: the same numbers for every count of threads."""

import threading

import gymnasium as gym
import numpy as np
import pytest

import servegym

from ...nested import assert_same, same

GRAPH, SUMMARY = servegym.ENV_IDS[0], servegym.ENV_IDS[3]
MODES = ("NextStep", "SameStep", "Disabled")
SHORT = {"num_experts": 3, "episode_requests": 25, "rate": 15.0}


def make_vec(env_id=GRAPH, num_envs=7, **kwargs):
    return gym.make_vec(env_id, num_envs=num_envs, **(SHORT | kwargs))


def threads():
    return {each for each in threading.enumerate() if each.name.startswith("servegym")}


def play(envs, steps=60, seed=0):
    """Everything that the environments return, with states taken and put back on the way."""
    envs = envs.unwrapped
    disabled = envs.autoreset_mode.value == "Disabled"
    seen = [envs.reset(seed=seed)]
    random = np.random.default_rng(seed)
    for step in range(steps):
        seen.append(envs.step(random.integers(0, 4, envs.num_envs)))
        if step == 9:
            kept = envs.clone_state(2)
        if step == 19:
            envs.restore_state(envs.num_envs - 1, kept)
            seen.append(envs.observe())
        done = seen[-1][2] | seen[-1][3] if len(seen[-1]) == 5 else np.zeros(1, bool)
        if disabled and done.any():
            seen.append(envs.reset(options={"reset_mask": done}))
    return seen + [envs.request_log(row) for row in range(envs.num_envs)]


@pytest.mark.parametrize("env_id", [GRAPH, SUMMARY])
@pytest.mark.parametrize("mode", MODES)
def test_the_count_of_threads_changes_nothing(env_id, mode):
    kwargs = {"autoreset_mode": mode}
    expected = play(make_vec(env_id, **kwargs))
    for count in (3, 9):
        envs = make_vec(env_id, num_threads=count, **kwargs)
        found = play(envs)
        assert threads(), "all systems were stepped in one thread"
        envs.close()
        assert_same(found, expected)
    assert not same(expected, play(make_vec(env_id, **kwargs), seed=1))


def test_threads_end_with_the_environment():
    others = threads()
    envs = make_vec(num_threads=3)
    envs.reset(seed=0)
    assert threads() == others, "threads before the first step"
    envs.step(np.ones(7, int))
    mine = threads() - others
    assert 1 <= len(mine) <= 2  # one thread may take both shares
    envs.close()
    assert not any(each.is_alive() for each in mine)
    dropped = make_vec(num_threads=2)
    dropped.reset(seed=0)
    dropped.step(np.ones(7, int))
    (last,) = threads() - others - mine
    del dropped
    last.join(10.0)
    assert not last.is_alive()
