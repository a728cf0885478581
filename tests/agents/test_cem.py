"""The cross-entropy method: the same episodes for all, what it finds, its fitness by hand."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import cem  # noqa: E402
from servegym.baselines.llm_routing.features import load_scores  # noqa: E402

from .runs import TINY, lines, tiny  # noqa: E402


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


def test_the_root_of_the_spread_divides_the_differences_of_an_episode():
    paid = np.array([[0.2, 0.50], [0.6, 0.51], [0.4, 0.52]])
    share = (paid - paid.mean(0)) / np.sqrt(paid.std(0) + 1e-3)
    np.testing.assert_allclose(cem.fitness(paid), share.mean(1))
    assert cem.fitness(paid).argmax() == 1


def test_load_scores_by_hand():
    weights = np.array([[1.0, -3, -6, 0.5, -1.5, -3, 2, 0.25]], np.float32).repeat(2, 0)
    experts = np.array([[[0.25, 1, 0], [0.0, 0, 0]], [[0.5, 2, 1], [0.25, 3, 2]]])
    wanted = [[0.25, 1.0, 0.5], [0.25, -1.0, -2.0]]
    np.testing.assert_allclose(load_scores(weights, experts), wanted, atol=1e-6)
    with pytest.raises(ValueError, match="made for 2 experts, got 3"):
        load_scores(weights[:1], np.zeros((1, 3, 3)))
