"""What a choice is worth beside the noise of returns, on futures drawn anew."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.experiments.figures.beyond.routing import credit  # noqa: E402


class Drop:
    """Drops every request after the first."""

    def act(self, observation, action_mask):
        return np.zeros(len(action_mask), dtype=np.int64)


def test_only_the_future_is_drawn_anew():
    kwargs = {"num_experts": 2, "rate": 4.0, "reward": "paid_forward", "episode_requests": 200}
    envs = make_envs("servegym/LLMRouting-v0", 2, **kwargs)
    envs.reset(seed=3)
    for _ in range(20):
        envs.step(np.ones(2, dtype=np.int64))
    before = envs.unwrapped.clone_state(1)
    total, first, legal = credit.futures_of(envs, 1, 6, 4.0, Drop(), np.random.default_rng(0))
    after = envs.unwrapped.clone_state(1)
    assert (before.arrivals == after.arrivals).all() and (before.rows == after.rows).all()
    assert total.shape == first.shape == (3, 6) and legal[0]
    # Nothing comes after the first request, so that no future differs but in when it is looked at.
    np.testing.assert_allclose(total[legal], total[legal][:, :1].repeat(6, 1))
    assert total[2, 0] > total[0, 0]  # an idle expert against a drop


def test_worth_and_variances_by_hand():
    legal = np.array([True, True, True, False])
    even = np.array([[1.0, 1.0], [3.0, 5.0], [2.0, 3.0], [9.0, 9.0]])
    odd = np.array([[0.0, 0.0], [2.0, 6.0], [1.0, 3.0], [9.0, 9.0]])
    total = np.stack([even, odd], -1).reshape(4, 4)
    # Chosen on the even futures: 1 before 2; on the odd ones 2 - 1 and 6 - 3.
    found = credit.measured(total, total / 2, legal)
    assert found == pytest.approx((2.0, 8.0, 2.0, 2.0))


def test_samples_needed_by_hand():
    states = np.tile([0.1, 4.0, 1.0, 0.25], (5, 1))
    row = credit.summary(states, np.random.default_rng(0))
    assert row["return_std"] == pytest.approx(2.0) and row["paired_std"] == pytest.approx(0.5)
    assert row["returns_needed"] == pytest.approx(800) and row["pairs_needed"] == pytest.approx(25)
    assert row["n_step_needed"] == pytest.approx(200)
    assert row["pairs_needed_low"] == pytest.approx(25)
