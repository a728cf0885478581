"""Loads: predicted ones, and spread over replicas by LPT."""

import itertools

import numpy as np
import pytest

from servegym.baselines.serverless_moe import lpt
from servegym.envs.serverless_moe import plans
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan, expected_outcome
from servegym.envs.serverless_moe.records import Request
from servegym.envs.serverless_moe.sets import least_used
from servegym.envs.workloads.expert_sets import bit_sets

from .synthetic import draw_sets, tiny


def test_predicted_load_is_the_mean_of_known_ones(system):
    system = tiny(system, experts=np.array([32, 32]))
    # Of 32 experts: r is hypergeometric, which the binomial law comes close to.
    rng = np.random.default_rng(0)
    logits = np.zeros((2, 32))
    frequency = np.full((2, 32), 1 / 32)
    load = Load.predicted(system, frequency, 20, 30, 2e-4)
    assert load.tokens.sum(axis=1) == pytest.approx([40, 40])
    remote = least_used(frequency, 16)
    plan = plans.make_plan(system, remote, load.tokens, 30)
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


def test_payload_repair():
    # LPT puts the long job alone; the payload limit then needs a move.
    body = np.array([1.0, 2, 2, 2])
    where, z = lpt.assign(np.array([10.0, 1, 1, 1]), 2, body, 5.0, 2)
    assert z == 2 and np.bincount(where, body).max() <= 5
    # Two cannot carry it.
    where, z = lpt.assign(np.ones(3), 1, np.full(3, 4.0), 5.0, 3)
    assert z == 3 and sorted(where) == [0, 1, 2]
    assert lpt.assign(np.ones(1), 1, np.array([9.0]), 5.0, 4)[1] == 4


def test_rows_and_sums_are_those_of_lpt():
    rng = np.random.default_rng(1)
    jobs, weight = rng.exponential(size=(7, 9)), rng.random((7, 9))
    replica = lpt.lpt_rows(jobs, 4)
    sums = lpt.replica_sums(replica, weight)
    assert (lpt.replica_sums(replica[None], weight[None])[0] == sums).all()
    for row, z in itertools.product(range(7), range(1, 5)):
        expected = plans.lpt(jobs[row], z)
        assert replica[row, z - 1].tolist() == expected.tolist()
        assert sums[row, z - 1, :z] == pytest.approx(np.bincount(expected, weight[row], z))
        assert not sums[row, z - 1, z:].any()
