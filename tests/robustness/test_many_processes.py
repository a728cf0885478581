"""Processes side by side: worker processes of Gymnasium, and one cache of compiled kernels for all.

Some ids are started here, the rest with `SERVEGYM_EXAMPLES` set: a process takes seconds, and one
that compiles takes ten or more.
"""

from __future__ import annotations

import functools
import os

import gymnasium as gym
import pytest

import servegym  # noqa: F401 - registers the ids

from ..nested import assert_same
from .argument_strategies import BASE
from .test_argument_properties import IDS

ALL = "SERVEGYM_EXAMPLES" in os.environ
CASES = [
    (env_id, context)
    for family, ids in IDS.items()
    for env_id in ids
    for context in ("spawn", "forkserver")
    if ALL
    or (env_id, context)
    in (("servegym/LLMRoutingFlat-v3", "spawn"), ("servegym/ServerlessMoEFlat-v1", "forkserver"))
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*forkserver.*")
@pytest.mark.parametrize(("env_id", "context"), CASES)
def test_worker_processes_give_what_one_process_gives(env_id, context):
    family = next(family for family, ids in IDS.items() if env_id in ids)
    # As in a script: the worker imports the package by the name in the id.
    makers = [functools.partial(gym.make, f"servegym:{env_id}", **BASE[family])] * 2
    sync = gym.vector.SyncVectorEnv(makers)
    apart = gym.vector.AsyncVectorEnv(makers, context=context)
    try:
        for envs in (sync, apart):
            envs.action_space.seed(1)
        one, other = sync.reset(seed=7), apart.reset(seed=7)
        assert_same(one[0], other[0])
        ends = 0
        for _ in range(30):
            actions = sync.action_space.sample()
            one, other = sync.step(actions), apart.step(actions)
            assert_same(one[:4], other[:4])
            assert_same(one[4].get("action_mask", 0), other[4].get("action_mask", 0))
            ends += int((one[2] | one[3]).sum())
        assert ends >= 2, "over an end of the episode"
    finally:
        apart.close()
        sync.close()
