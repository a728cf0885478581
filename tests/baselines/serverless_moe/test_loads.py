"""A predicted load's outcome is the mean of known ones."""

import numpy as np
import pytest

from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan, expected_outcome
from servegym.envs.serverless_moe.plans import make_plan
from servegym.envs.serverless_moe.records import Request
from servegym.envs.workloads.expert_sets import bit_sets

from .synthetic import draw_sets, remote_set, tiny


def test_predicted_load_is_the_mean_of_known_ones(system):
    system = tiny(system, experts=np.array([32, 32]))
    # Of 32 experts: r is hypergeometric, which the binomial law comes close to.
    rng = np.random.default_rng(0)
    logits = np.zeros((2, 32))
    frequency = np.full((2, 32), 1 / 32)
    load = Load.predicted(system, frequency, 20, 30, 2e-4)
    assert load.tokens.sum(axis=1) == pytest.approx([40, 40])
    remote = remote_set(frequency, 0.5)
    plan = make_plan(system, remote, load.tokens, 30)
    costs = []
    for _ in range(300):
        prefill = draw_sets(rng, logits, 20, 2).sum(axis=0)
        decode = bit_sets(draw_sets(rng, logits, 30, 2))
        request = Request(prefill, decode, np.full(2, 2e-4), 20)
        costs.append(evaluate_plan(system, request, plan).cost_usd)
    expected = expected_outcome(system, load, plan).cost_usd
    assert expected == pytest.approx(np.mean(costs), rel=0.02)
    assert load.histogram(remote, 2) == pytest.approx(30 * np.array([[0.25, 0.5, 0.25]] * 2))
    with pytest.raises(ValueError, match="frequency"):
        Load.predicted(system, frequency[:1], 20, 30, 2e-4)
