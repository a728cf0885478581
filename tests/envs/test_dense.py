"""The reward "dense": its sum over an episode is the outcome's, and orders policies as it does."""

import numpy as np
import pytest

from servegym.experiments.evaluation.evaluate import evaluate, summarise

ROUTING = {
    "env_id": "servegym/LLMRouting-v1",
    "policies": "drop_all random least_outstanding greedy_qos priced_greedy expected_qos".split(),
    "outcome": "mean_qos",
    "usual": 0.6,
    "episode_requests": 250,
}
PREFIX = {
    "env_id": "servegym/PrefixRouting-v1",
    "policies": ["random", "round_robin", "least_load", "llm_d", "aibrix", "weighted_load"],
    "outcome": "mean_attainment",
    "usual": 0.8,
    "episode_requests": 200,
}


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        (ROUTING, {"rate": 12.0}),
        (ROUTING, {"fleet": "h100-8"}),
        (PREFIX, {"rate": 45.0}),
        (PREFIX, {"scenario": "hot-tenant", "rate": 90.0}),
    ],
)
def test_its_sum_orders_policies_as_the_outcome(family, setting):
    count, outcome = family["episode_requests"], family["outcome"]
    arguments = {"reward": "dense", "episode_requests": count, **setting}
    rows = evaluate(family["env_id"], family["policies"], 2, env_kwargs=arguments)
    by_policy = summarise(rows)
    qualities = np.array([summary[outcome] for summary in by_policy])
    returns = np.array([summary["return"] for summary in by_policy])
    np.testing.assert_allclose(returns, (qualities - family["usual"]) * count, atol=1e-9)
    assert len(np.unique(qualities.round(9))) >= (2 if "fleet" in setting else 4)
    orders = [np.argsort(x.round(9), kind="stable").tolist() for x in (qualities, returns)]
    assert orders[0] == orders[1]
