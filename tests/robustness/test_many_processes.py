"""Processes side by side: worker processes of Gymnasium, and one cache of compiled kernels for all.

Some ids are started here, the rest with `SERVEGYM_EXAMPLES` set: a process takes seconds, and one
that compiles takes ten or more.
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
    if ALL
    or (env_id, context)
    in (("servegym/LLMRoutingFlat-v1", "spawn"), ("servegym/ServerlessMoEFlat-v0", "forkserver"))
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
import hashlib
import gymnasium as gym, servegym
found = hashlib.sha256()
env = gym.make({env_id!r}, **{kwargs!r})
env.action_space.seed(0)
found.update(repr(env.reset(seed=0)).encode())
ended = steps = 0
while steps < 50 and not ended:
    result = env.step(env.action_space.sample())
    found.update(repr(result).encode())
    ended, steps = result[2] or result[3], steps + 1
print(steps, found.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [name for name in IDS if ALL or name == "serverless"])
def test_processes_that_fill_one_empty_cache(family, tmp_path, capsys):
    """Four start at once where no kernel is compiled yet; each compiles, or takes another's."""
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    step = STEP.format(env_id=IDS[family][0], kwargs=BASE[family])
    command = [sys.executable, "-c", step]
    processes = [
        subprocess.Popen(
            command, env=settings, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    said = [process.communicate(timeout=800) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    steps, digest = said[0][0].split()
    assert int(steps) > 1 and len(digest) == 64
    assert all(out == said[0][0] for out, _ in said), said
    last = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, check=True)
    assert last.stdout == said[0][0], "read from the cache"
    exec(step, {})  # compiled by one process alone
    assert capsys.readouterr().out.encode() == said[0][0]
