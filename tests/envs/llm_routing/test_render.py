"""Rendering: what the text says agrees with the state, and the picture changes with it."""

import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled

from servegym.envs._frames import HEIGHT, WIDTH


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


def test_ansi_marks_late_requests_and_the_last_choice():
    env = make("ansi", steps=0, rate=1000.0, running_capacity=1)
    for _ in range(3):
        env.step(2)
    assert table(env.render())[1].startswith("→ 2")
    env.step(0)
    assert "the last one was dropped" in env.render()
    assert not any(row.startswith("→") for row in table(env.render()))
    for _ in range(6):
        env.step(1)
    text = env.render()
    assert "rejected by expert 1" in text and table(text)[0].startswith("→ 1")
    for _ in range(20):  # its only slot is taken and its queue fills up again
        env.step(1)
    env.step(0)
    assert table(env.render())[0].startswith("x 1"), "expert 1 is full"
    late = make("ansi", latency_requirement_s=0.001)
    assert "!" in "".join(table(late.render()))
    assert "!" not in "".join(table(make("ansi", latency_requirement_s=1.0).render()))


def test_pixels_of_every_size_and_stage():
    for kwargs in (
        {"num_experts": 1, "running_capacity": 1, "waiting_capacity": 1},
        {"num_experts": 12, "running_capacity": 40, "waiting_capacity": 20, "steps": 79},
        {"steps": 80},
        {"memory_policy": "paged", "scheduler": "chunked_prefill", "catalog": "synthetic"},
    ):
        frame = make("rgb_array", **kwargs).render()
        assert frame.shape == (HEIGHT, WIDTH, 3)
        frame[:] = 0  # ours to write to
    env = gym.make("servegym/LLMRouting-v1", render_mode="ansi", episode_requests=5)
    env.reset(seed=0)
    assert "request 1/5" in env.render()
    ended = make("ansi", steps=80).render()
    assert "the episode is over" in ended


def test_frames_leave_no_global_figure():
    from matplotlib import _pylab_helpers

    env = make("rgb_array", num_experts=6, rate=20.0)
    for _ in range(2):
        env.render()
    assert not _pylab_helpers.Gcf.figs


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    env = make("rgb_array", steps=1)
    for name in list(sys.modules):
        if name.split(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DependencyNotInstalled, match=r"pip install '\.\[plots\]'"):
        env.render()
    assert make("ansi", steps=1).render()
