"""Remoe: its bounds, its worst cases (MMP), the memory problem P2, its plans and policies."""

import numpy as np
import pytest
from scipy import optimize

from servegym.baselines.registry import make_policy
from servegym.baselines.serverless_moe.base import observed_row
from servegym.baselines.serverless_moe.remoe import bounds, memory, remoe
from servegym.baselines.serverless_moe.remoe.bounds import corollary1
from servegym.baselines.serverless_moe.remoe.mmp import worst_cases
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.kernel.cost import block_s, swap_s
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan

from ...envs.serverless_moe.reference import plan_of
from .episodes import FAMILY, make_env
from .synthetic import make_request, tiny


def test_bounds_by_hand():
    assert bounds.theorem1(200, 64, 6) == pytest.approx(np.sqrt(300) + 18.75)
    assert bounds.corollary1(200, 16, 64, 6) == pytest.approx(300 + 6 * np.sqrt(300))
    assert bounds.corollary1(200, 64, 64, 6) == 1200  # every call
    assert bounds.corollary1(200, 0, 64, 6) == 0
    found = bounds.predicted_bound(np.array([0.0, 0.01, 1.0]), 100, 2)
    assert found == pytest.approx([np.sqrt(150), 2 + np.sqrt(150), 100])


def test_takes_the_largest_feasible_ratio(system):
    _, frequency = make_request(system)
    load = Load.predicted(system, frequency, 115, 200, 2e-4)
    loose = worst_cases(system, load)
    assert loose.ratio[loose.chosen()] == 1.0  # everything remote
    cases = worst_cases(system, load, 20.0, 0.050)
    at = cases.chosen()
    assert 0.0 < cases.ratio[at] < 1.0
    assert not cases.feasible[:at].any() and cases.feasible[at]
    assert cases.main_mb[at] >= (64 - cases.members[at]) * system.expert_mb.sum()
    assert cases.main_mb[at] in system.main_specs_mb
    # A tighter TPOT never allows a larger b; of hopeless limits the least excess is taken.
    tried = [worst_cases(system, load, 30.0, limit) for limit in (0.045, 0.05, 0.06, 0.08)]
    ratios = [cases.ratio[cases.chosen()] for cases in tried]
    assert ratios == sorted(ratios) and len(set(ratios)) > 1
    hopeless = worst_cases(system, load, 0.1, 0.001)
    at = hopeless.chosen()
    assert not hopeless.feasible[at] and hopeless.excess[at] == hopeless.excess.min()


def test_worst_case_by_hand(system):
    system = tiny(system)
    load = Load.predicted(system, np.full((2, 4), 0.25), 20, 30, 1e-3)
    cases = worst_cases(system, load)
    b1 = 0  # m = 4: every call is remote
    assert corollary1(30, 4, 4, 2) == 60
    one = system.expert_cpu_s(2500.0, 1) + 2 * system.token_mb / system.bandwidth_mb_s + 1e-3
    swap = 2 * swap_s(system, 2)
    assert cases.tpot_s[b1] == pytest.approx(2 * (block_s(system, 1) + swap + 2 * one))
    none = -1  # m = 0: every call is local, in a function as large as the largest remote one
    assert cases.main_mb[none] == 1000.0
    own = 2 * system.expert_cpu_s(1000.0, 1)
    assert cases.tpot_s[none] == pytest.approx(2 * (block_s(system, 1) + swap + own))


def problem(seed=0, layers=6, slack=None, theta2=2.4363, **kwargs):
    rng = np.random.default_rng(seed)
    p = memory.MemoryProblem(
        theta1=6 * 6.86e-3 * rng.uniform(0.7, 1.3, layers),
        theta2=np.full(layers, theta2),
        theta3=6 * 0.2e-3 * rng.uniform(0.7, 1.3, layers),
        share=rng.uniform(0.05, 0.9, layers),
        overhead_s=rng.uniform(0.2e-3, 1e-3, layers),
        holding_usd_s=rng.uniform(5e-5, 3e-4),
        price_usd_gb_s=1.6276e-8 * 1024,
        lower_gb=np.full(layers, 1000 / 1024),
        upper_gb=np.full(layers, 5000 / 1024),
        rounded_s=rng.uniform(0.1e-3, 3e-3, layers) * (seed % 2),
    )
    if slack is not None:
        low, high = p.time_s(p.lower_gb).sum(), p.time_s(p.upper_gb).sum()
        p = memory.MemoryProblem(**{**p.__dict__, "time_limit_s": high + slack * (low - high)})
    return memory.MemoryProblem(**{**p.__dict__, **kwargs})


def time_slope(p, gb):
    """Derivative of the remote time."""
    return -p.share * p.theta1 * p.theta2 * np.exp(-p.theta2 * gb)


def cost_slope(p, gb):
    """Derivative of the objective: Theorem 2's g' times (1 + eta) share."""
    rate = p.holding_usd_s + p.price_usd_gb_s * gb
    seconds = p.time_s(gb) + p.rounded_s
    return (1 + p.eta) * (time_slope(p, gb) * rate + p.price_usd_gb_s * seconds)


@pytest.mark.parametrize("slack", [None, 0.5, 0.05, 0.01, 1e-4])
@pytest.mark.parametrize("seed", range(4))
def test_dual_agrees_with_scipy(seed, slack):
    p = problem(seed, slack=slack)
    gb = memory.solve_memory(p)
    cost = p.cost(gb).sum()
    assert p.time_s(gb).sum() <= p.time_limit_s * (1 + 1e-9)
    constraints = []
    if slack is not None:
        constraints = [
            {
                "type": "ineq",
                "fun": lambda y: (p.time_limit_s - p.time_s(y).sum()) * 1e3,
                "jac": lambda y: -time_slope(p, y) * 1e3,
            }
        ]
    reference = optimize.minimize(
        lambda y: p.cost(y).sum() * 1e6,
        np.clip(gb + 0.2, p.lower_gb, p.upper_gb),
        jac=lambda y: cost_slope(p, y) * 1e6,
        bounds=list(zip(p.lower_gb, p.upper_gb, strict=True)),
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    assert cost * 1e6 == pytest.approx(reference.fun, rel=1e-6)


def test_infeasible_and_outside_the_convex_side():
    p = problem(0)
    fastest = p.time_s(p.upper_gb).sum()
    never = memory.MemoryProblem(**{**p.__dict__, "time_limit_s": fastest / 2})
    assert (memory.solve_memory(never) == p.upper_gb).all()
    # Concave at the lower end: the minimum is still that of a fine scan.
    q = problem(1, theta2=0.5, holding_usd_s=1e-6, lower_gb=np.full(6, 0.1))
    assert (2 / q.theta2 - q.holding_usd_s / q.price_usd_gb_s > q.lower_gb).all()
    scan = np.linspace(0.1, 5000 / 1024, 20001)
    best = np.array([[q.cost(np.full(6, y))] for y in scan])[:, 0].min(axis=0)
    assert q.cost(memory.solve_memory(q)) == pytest.approx(best, rel=1e-6)


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ttft_limit_s": -1.0}, "ttft_limit_s=-1.0"),
        ({"tpot_limit_s": float("nan")}, "tpot_limit_s=nan"),
        ({"reading": "remo"}, "remoe"),
    ],
)
def test_bad_numbers_are_refused(system, change, said):
    load = Load.predicted(tiny(system), np.full((2, 4), 0.25), 10, 5, 1e-4)
    with pytest.raises(ValueError, match=said):
        remoe(tiny(system), load, **change)


@pytest.mark.parametrize("name", ["remoe", "remoe_sticky"])
def test_a_plan_of_the_grid_is_found_again(name):
    """A plan that actions of single layers can make is found again, on any layer's own steps."""
    env = make_env(1, episode_requests=30, granularity="per_layer", payload_mb=0.4)
    problem, system = env.problem, ServerlessSystem.from_env(env)
    policy = make_policy(name, system, family=FAMILY)
    observation, _ = env.reset(seed=0)
    observed, rng, kinds = observed_row(system, observation, 0), np.random.default_rng(0), 0
    prompt = int(env.batch.arrays.requests[0, 0]["prompt"])
    for _ in range(40):
        action = (rng.random(len(problem.nvec)) * problem.nvec).astype(np.int64)
        action[1] = policy.order
        plan = plan_of(problem, prompt, observed.n_in, action)
        again = plan_of(problem, prompt, observed.n_in, policy.on_grid(observed, plan))
        assert (again.remote == plan.remote).all() and again.main_mb == plan.main_mb
        assert (again.remote_mb == plan.remote_mb).all()
        assert (again.replicas == plan.replicas).all()
        kinds += len(set(plan.remote_mb)) > 1 and len(set(plan.replicas)) > 1
    assert kinds > 10, "the plans hardly differ between layers"
