"""Plans of the controller: feasible, between the optimum and MIX; arguments refused."""

import numpy as np
import pytest

from servegym.baselines.serverless_moe import grid_optimum as go
from servegym.baselines.serverless_moe.remoe import remoe
from servegym.baselines.serverless_moe.remoe.mmp import worst_cases
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.serverless_moe.rivals import deployment_cost

from ..synthetic import make_request, tiny


@pytest.mark.parametrize(
    ("reading", "limits", "n_in"),
    [
        ("remoe", (np.inf, np.inf), 115),
        ("remoe", (8.0, 0.060), 1000),
        ("remoe", (14.0, 0.050), 115),
        ("remoe_cost", (8.0, 0.060), 115),
        ("remoe_cost", (0.1, 0.001), 115),
    ],
)
def test_plans_are_feasible_with_true_routing(system, reading, limits, n_in):
    request, frequency = make_request(system, n_in=n_in)
    load = Load.predicted(system, frequency, n_in, request.n_out, 2e-4)
    kwargs = {"ttft_limit_s": limits[0], "tpot_limit_s": limits[1]}
    decision = remoe(system, load, reading=reading, **kwargs)
    outcome = evaluate_plan(system, request, decision.plan, **kwargs)
    assert outcome.feasible
    cases = worst_cases(system, load, **kwargs)
    at = np.flatnonzero(cases.ratio == decision.ratio)[0]
    if n_in == 115 and cases.feasible[at]:
        assert not any(outcome.violations.values())


def test_cheaper_than_mix_and_dearer_than_the_optimum(system):
    request, frequency = make_request(system, n_out=200)
    load = Load.predicted(system, frequency, 115, 200, 2e-4)
    limits = {"ttft_limit_s": 8.0, "tpot_limit_s": 0.060}
    mix = deployment_cost("mix", system, request, **limits).cost_usd
    costs = {}
    for reading in ("remoe", "remoe_cost"):
        decision = remoe(system, load, reading=reading, **limits)
        costs[reading] = evaluate_plan(system, request, decision.plan).cost_usd
    best = go.grid_optimum(
        system,
        Load.known(request),
        score=frequency,
        ratios=np.arange(9) / 8,
        main_specs_mb=system.main_specs_mb[::20],
        **limits,
    )
    assert best.plan is not None
    outcome = evaluate_plan(system, request, best.plan, **limits)
    assert not any(outcome.violations.values())
    true = outcome.cost_usd
    assert best.cost_usd == pytest.approx(true, rel=1e-12)
    assert 0.98 * true < costs["remoe_cost"] <= costs["remoe"] < 0.6 * mix


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ttft_limit_s": -1.0}, "ttft_limit_s=-1.0"),
        ({"tpot_limit_s": float("nan")}, "tpot_limit_s=nan"),
        ({"reading": "remo"}, "remoe"),
        ({"candidates": 0}, "candidates"),
    ],
)
def test_bad_numbers_are_refused(system, change, said):
    load = Load.predicted(tiny(system), np.full((2, 4), 0.25), 10, 5, 1e-4)
    with pytest.raises(ValueError, match=said):
        remoe(tiny(system), load, **change)
