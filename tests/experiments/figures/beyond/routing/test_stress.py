"""Stress tests of the routers: shuffled scores change those who use them, and only those."""

import csv

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.baselines.protocol import BasePolicy  # noqa: E402
from servegym.baselines.registry import make_policy  # noqa: E402
from servegym.experiments.evaluate import evaluate  # noqa: E402
from servegym.experiments.figures.beyond.routing import stress as routing_stress  # noqa: E402
from servegym.experiments.figures.routing import common as routing_common  # noqa: E402

KWARGS = {"episode_requests": 300, "rate": 5.0}


def both(name):
    system = RoutingSystem.from_kwargs(rate=5.0)
    policies = [make_policy(name, system), routing_stress.ShuffledScores(make_policy(name, system))]
    rows = evaluate(routing_common.ENV_ID, policies, 4, env_kwargs=KWARGS)
    return [
        np.array([row["avg_qos"] for row in rows if row["policy"] == policy.name])
        for policy in policies
    ]


@pytest.mark.parametrize("name", ["greedy_qos", "priced_greedy"])
def test_routers_that_use_scores_lose_by_shuffled_ones(name):
    own, shuffled = both(name)
    assert (own > shuffled + 0.005).all()


@pytest.mark.parametrize("name", ["shortest_queue", "least_latency"])
def test_routers_blind_to_scores_lose_nothing(name):
    own, shuffled = both(name)
    assert (own == shuffled).all()


def test_the_scores_are_dealt_anew_and_nothing_else_changes():
    seen = []

    class Spy(BasePolicy):
        name = "spy"

        def act(self, observation, action_mask):
            seen.append(observation)
            return np.zeros(len(action_mask), np.int64)

    policy = routing_stress.ShuffledScores(Spy())
    policy.reset(2, seed=0)
    request = np.arange(2 * 6 * 3, dtype=np.float32).reshape(2, 6, 3)
    given = {"request": request.copy(), "experts": np.ones((2, 6, 3))}
    for _ in range(3):
        policy.act(given, np.ones((2, 7), np.int8))
    np.testing.assert_array_equal(given["request"], request)  # the caller's is left alone
    for got in seen:
        np.testing.assert_array_equal(got["request"][..., [0, 2]], request[..., [0, 2]])
        np.testing.assert_array_equal(np.sort(got["request"][..., 1], 1), request[..., 1])
        assert got["experts"] is given["experts"]
    assert any((got["request"] != request).any() for got in seen)


@pytest.mark.slow
def test_each_table_is_written(tmp_path):
    assert routing_stress.main(["--quick", "--out", str(tmp_path), "--episodes", "1"]) == 0
    for stem in ("control_shuffled_scores", "stress_staleness", "stress_failures"):
        assert (tmp_path / f"{stem}.png").stat().st_size > 5000
        rows = list(csv.DictReader(open(tmp_path / f"{stem}.csv")))
        assert {row["policy"] for row in rows} >= set(routing_stress.BASELINES)
        assert all(0 <= float(row["qos"]) <= 1 for row in rows)
