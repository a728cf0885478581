"""Rendering: what the text says agrees with the state."""

import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled


def make(mode, steps=60, **kwargs):
    kwargs = {"rate": 12.0, "num_experts": 3, "episode_requests": 80} | kwargs
    env = gym.make("servegym/LLMRouting-v1", render_mode=mode, **kwargs)
    env.reset(seed=3)
    env.action_space.seed(3)
    for _ in range(steps):
        env.step(env.action_space.sample())
    return env


def table(text):
    """Rows of the experts: their number, then everything after it."""
    return text.splitlines()[3:-1]


def test_ansi_agrees_with_the_state():
    env = make("ansi")
    text = env.render()
    assert isinstance(text, str) and text.endswith("\n")
    bare = env.unwrapped
    log = bare.request_log()
    experts = bare.batch.expert[0]
    rows = table(text)
    assert len(rows) == 3
    assert max(map(len, text.splitlines())) < 200
    assert "request 61/80" in text and "L = 30.0 ms/token" in text
    assert f"a prompt of {int(bare.problem.table[bare.batch.rows[0, 60], 0, 0])} tokens" in text
    assert f"dropped {np.count_nonzero(log['outcome'] == 2)} " in text
    for n, row in enumerate(rows):
        cells = row.split("%", 1)[1]
        assert sum(cells.count(c) for c in "▁▂▃▄▅▆▇█") == experts[n]["running"]
        assert sum(cells.count(c) for c in "o>p") == experts[n]["waiting"]
        sent, _, rejected = (int(x) for x in row.split()[-3:])
        mine = log["expert"] == n
        assert rejected == np.count_nonzero(mine & (log["outcome"] == 3))
        assert sent == np.count_nonzero(mine) - rejected
        assert bare.problem.models[n] in row
    assert experts["running"].sum() > 0, "the test shows nothing"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    env = make("rgb_array", steps=1)
    for name in list(sys.modules):
        if name.split(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DependencyNotInstalled, match=r"pip install '\.\[plots\]'"):
        env.render()
    assert make("ansi", steps=1).render()
