"""The cross-entropy method: the same episodes for all, and what a search finds."""

import numpy as np
import pytest

from servegym.agents import cem
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.envs.llm_routing.core import RoutingBatch

from .runs import TINY, lines, tiny


def test_candidates_play_the_same_episode():
    where = cem.ROUTING_ID, TINY["direct_search"][1]["set"]
    one = np.array([1.0, -1, -2, 1, -1, -3, 0, 0], np.float32)
    drops = np.zeros(8, np.float32)
    drops[-1] = 9.0
    paid, decisions = cem.play(np.stack([one, drops, one]), *where, 1, [3, 4])
    assert (paid[0] == paid[2]).all() and paid[0].mean() > 0.1 and not paid[1].any()
    assert decisions == 3 * 2 * 30


@pytest.mark.parametrize("stream", [0, 5])
def test_the_first_index_chooses_what_expected_qos_does(stream):
    task = cem.task_of(cem.ROUTING_ID, ("fleet=random",))
    problem, every = task.problem(stream), np.ones(8, np.int8)
    system, batch = RoutingSystem.from_problem(problem), RoutingBatch(problem, 8)
    for row in range(8):
        batch.draw(row, np.random.default_rng(row))
    batch.begin(every)
    rule, scores = make_policy("expected_qos", system), task.scores(system)
    weights, same = task.first_weights(system)[None].repeat(8, 0).astype(np.float32), []
    for _ in range(120):
        chosen = cem.choose(scores(weights, batch.observation), batch.action_mask)
        same += (chosen == rule.act(batch.observation, batch.action_mask)).tolist()
        batch.step(chosen, every)
    assert np.mean(same) > 0.95  # the rule takes the fastest of experts that are worth the same


def test_a_search_finds_what_no_first_weights_have(tmp_path):
    settings = {"set": ("num_experts=2", "episode_requests=60", "rate=[9,9]"), "seed": 1}
    changes = {"total_timesteps": 60_000, "population": 20, "episodes": 2, "eval_every": 60_000}
    _, args = tiny("direct_search", tmp_path, **settings, **changes)
    rows = lines(cem.train(args))
    first = [row["charts/avg_qos"] for row in rows[:2]]
    last = [row["charts/avg_qos"] for row in rows[-2:]]
    assert np.mean(last) > np.mean(first) + 0.05
