"""The knapsack and the optimum of the grid against enumeration."""

import itertools

import numpy as np
import pytest

from servegym.baselines.serverless_moe import grid_optimum as go
from servegym.envs.serverless_moe.kernel.cost import main_usd_s, planned_job_s
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.serverless_moe.plans import lpt
from servegym.envs.serverless_moe.records import Plan
from servegym.envs.serverless_moe.rivals import deployment_cost

from .synthetic import make_request, remote_set, tiny


def test_knapsack_against_enumeration():
    rng = np.random.default_rng(2)
    tight = 0
    for _ in range(30):
        cost, one, two = rng.random((3, 4, 5))
        cost[rng.random(cost.shape) < 0.1] = np.inf
        limits = rng.uniform(0.8, 2.5, 2)
        best = np.inf
        for choice in itertools.product(range(5), repeat=4):
            at = (np.arange(4), np.array(choice))
            if one[at].sum() <= limits[0] and two[at].sum() <= limits[1]:
                best = min(best, cost[at].sum())
        found = go.solve_knapsack(cost, one, two, *limits, gap=0.0)
        if np.isfinite(best):
            at = (np.arange(4), found)
            assert cost[at].sum() == pytest.approx(best)
            assert one[at].sum() <= limits[0] and two[at].sum() <= limits[1]
            tight += best > np.where(np.isfinite(cost), cost, 9).min(axis=1).sum()
        else:
            assert found is None
    assert tight > 5


@pytest.mark.parametrize("limits", [(np.inf, np.inf), (1.50, 0.004), (1.15, 0.0047)])
@pytest.mark.parametrize(("bill", "fees"), [(False, (0.0, 0.0)), (True, (2e-7, 5e-4))])
def test_grid_optimum_against_enumeration(system, limits, bill, fees):
    toy = tiny(system, invocation_usd=fees[0], granularity_s=fees[1], bill_cold_start=bill)
    request, frequency = make_request(toy, n_in=40, n_out=20, trem=1e-4)
    kwargs = {"ttft_limit_s": limits[0], "tpot_limit_s": limits[1]}
    load, best = Load.known(request), np.inf
    cells = list(itertools.product(toy.remote_specs_mb, (1, 2)))
    for b, w, one, two in itertools.product(np.arange(5) / 4, toy.main_specs_mb, cells, cells):
        remote = remote_set(frequency, b)
        used = remote.any(axis=1)
        memory = np.where(used, [one[0], two[0]], 0.0)
        count = np.where(used, [one[1], two[1]], 0)
        assignment = np.full(remote.shape, -1)
        for layer in np.flatnonzero(used):
            jobs = planned_job_s(toy, *toy.expert_law(memory[layer]), request.prefill_counts[layer])
            assignment[layer, remote[layer]] = lpt(jobs[remote[layer]], count[layer])
        plan = Plan(remote, w, memory, count, assignment)
        outcome = evaluate_plan(toy, request, plan, **kwargs)
        if not any(outcome.violations.values()):
            best = min(best, outcome.cost_usd)
    found = go.grid_optimum(toy, load, score=frequency, gap=0.0, **kwargs)
    # The plan is chosen without the rounding of the main function, which is below one step.
    step = main_usd_s(toy, 60, toy.main_specs_mb[-1]) * fees[1]
    assert best * (1 - 1e-9) <= found.cost_usd <= best * (1 + 1e-9) + step


def test_limits_are_checked_everywhere(system):
    request, _ = make_request(system)
    for serve in (
        lambda: deployment_cost("mix", system, request, ttft_limit_s=0.0),
        lambda: go.grid_optimum(system, Load.known(request), ttft_limit_s=0.0),
        lambda: deployment_cost("gpuu", system, request),
    ):
        with pytest.raises(ValueError, match=r"ttft_limit_s=0.0|gpu"):
            serve()
