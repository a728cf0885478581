"""Processes side by side: worker processes of Gymnasium, and one cache of compiled kernels for all.

Two ids are started here, the rest with `SERVEGYM_EXAMPLES` set: a process takes seconds.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import gymnasium as gym
import pytest

import servegym  # noqa: F401 - registers the ids

from .argument_strategies import BASE
from .test_argument_properties import IDS, same

ALL = "SERVEGYM_EXAMPLES" in os.environ
CASES = [
    (env_id, context)
    for family, ids in IDS.items()
    for env_id in ids
    for context in ("spawn", "forkserver")
    if ALL or (env_id, context) in (("servegym/LLMRoutingFlat-v0", "spawn"),
                                    ("servegym/ServerlessMoEFlat-v0", "forkserver"))
]  # fmt: skip


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
        assert same(one[0], other[0])
        ends = 0
        for _ in range(30):
            actions = sync.action_space.sample()
            one, other = sync.step(actions), apart.step(actions)
            assert all(same(a, b) for a, b in zip(one[:4], other[:4], strict=True))
            assert same(one[4].get("action_mask", 0), other[4].get("action_mask", 0))
            ends += int((one[2] | one[3]).sum())
        assert ends >= 2, "over an end of the episode"
    finally:
        apart.close()
        sync.close()


STEP = """
import sys, hashlib
import gymnasium as gym, numpy as np, servegym
found = hashlib.sha256()
for env_id, kwargs in {cases!r}:
    env = gym.make(env_id, **kwargs)
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(2):
        found.update(repr(env.step(env.action_space.sample())[1]).encode())
print(found.hexdigest())
"""


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not ALL, reason="compiles for minutes; set SERVEGYM_EXAMPLES")
def test_processes_that_fill_one_empty_cache(tmp_path):
    """Four start at once where no kernel is compiled yet; each compiles, or takes another's."""
    cases = [(ids[0], BASE[family]) for family, ids in IDS.items()]
    settings = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STEP.format(cases=cases)]
    processes = [
        subprocess.Popen(
            command, env=settings, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    said = [process.communicate(timeout=1500) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    assert len({out for out, _ in said}) == 1 and len(said[0][0].strip()) == 64, said
    assert any((tmp_path / "cache").rglob("*.nbc")), "the kernels were kept"
    last = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, check=True)
    assert last.stdout == said[0][0], "read from the cache"
