"""The cross-entropy method: the same episodes for all, and what a search finds."""

import numpy as np

from servegym.agents import cem

from .runs import TINY, lines, tiny


def test_candidates_play_the_same_episode():
    where = cem.ROUTING_ID, TINY["direct_search"][1]["set"]
    one = np.array([1.0, -1, -2, 1, -1, -3, 0, 0], np.float32)
    drops = np.zeros(8, np.float32)
    drops[-1] = 9.0
    paid, decisions = cem.play(np.stack([one, drops, one]), *where, 1, [3, 4])
    assert (paid[0] == paid[2]).all() and paid[0].mean() > 0.1 and not paid[1].any()
    assert decisions == 3 * 2 * 30


def test_a_search_finds_what_no_first_weights_have(tmp_path):
    settings = {"set": ("num_experts=2", "episode_requests=60", "rate=[9,9]"), "seed": 1}
    changes = {"total_timesteps": 60_000, "population": 20, "episodes": 2, "eval_every": 60_000}
    _, args = tiny("direct_search", tmp_path, **settings, **changes)
    rows = lines(cem.train(args))
    first = [row["charts/avg_qos"] for row in rows[:2]]
    last = [row["charts/avg_qos"] for row in rows[-2:]]
    assert np.mean(last) > np.mean(first) + 0.05
