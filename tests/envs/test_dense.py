"""The reward "dense": its sum over an episode is the outcome's, and orders policies as it does."""

import numpy as np
import pytest

from servegym.experiments.evaluation.evaluate import evaluate

ROUTING = {
    "env_id": "servegym/LLMRouting-v1",
    "policies": "drop_all random least_outstanding greedy_qos priced_greedy expected_qos".split(),
    "outcome": "avg_qos",
    "usual": 0.6,
    "episode_requests": 250,
}
PREFIX = {
    "env_id": "servegym/PrefixRouting-v1",
    "policies": ["random", "round_robin", "least_load", "llm_d", "aibrix", "weighted_load"],
    "outcome": "attainment",
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
    names = family["policies"]
    rows = evaluate(family["env_id"], names, 2, env_kwargs=arguments)
    qualities, returns = (
        np.array([[row[key] for row in rows if row["policy"] == name] for name in names]).mean(1)
        for key in (outcome, "return")
    )
    np.testing.assert_allclose(returns, (qualities - family["usual"]) * count, atol=1e-9)
    assert len(np.unique(qualities.round(9))) >= (2 if "fleet" in setting else 4)
    orders = [np.argsort(x.round(9), kind="stable").tolist() for x in (qualities, returns)]
    assert orders[0] == orders[1]
