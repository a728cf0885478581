"""Baseline RL's replay: n-step sums kept up as rewards come in, against sums over the ring."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import baseline_rl  # noqa: E402


def stored(steps, done_at, n_step, gamma, length=8):
    """One environment whose reward at step t is 10 + t; observations and masks name the step."""
    buffer = baseline_rl.ReplayBuffer(length, 1, 1, 2, n_step, gamma)
    for t in range(steps):
        buffer.add(
            obs=np.full((1, 1), t),
            next_obs=np.full((1, 1), t + 0.5),
            mask=np.array([[1, t % 2]]),
            next_mask=np.array([[1, (t + 1) % 2]]),
            action=np.array([t % 2]),
            reward=np.array([10.0 + t]),
            terminated=np.array([t in done_at and t % 2 == 0]),
            done=np.array([t in done_at]),
        )
    return buffer


@pytest.mark.parametrize(
    ("steps", "done_at", "n_step"), [(6, {2, 5}, 3), (30, {17, 24}, 4), (29, {26}, 8), (9, (), 1)]
)
def test_n_step_sums_stop_at_episode_ends(steps, done_at, n_step):
    gamma, center = 0.5, 1.5
    buffer = stored(steps, done_at, n_step, gamma)
    got = buffer.sample(500, center, np.random.default_rng(0))
    starts = got["obs"][:, 0].astype(int)
    assert set(starts) == set(range(max(steps - 8, 0), steps - n_step + 1))
    for row, start in enumerate(starts):
        ends = [t for t in range(start, start + n_step) if t in done_at]
        last = min(ends, default=start + n_step - 1)
        total = sum(gamma ** (t - start) * (10 + t - center) for t in range(start, last + 1))
        assert got["return"][row] == pytest.approx(total, rel=1e-5)
        assert got["discount"][row] == gamma ** (last + 1 - start)
        assert got["next_obs"][row, 0] == last + 0.5
        assert got["mask"][row, 1] == start % 2 == got["action"][row]
        assert got["next_mask"][row, 1] == (last + 1) % 2
        assert got["terminated"][row] == (last in done_at and last % 2 == 0)
