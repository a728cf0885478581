"""The memory problem P2: its dual against SciPy, and where it is not convex."""

import numpy as np
import pytest
from scipy import optimize

from servegym.baselines.serverless_moe.remoe import memory


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


def kkt_residual(p, gb, multiplier):
    """Largest relative violation of P2's KKT conditions, box multipliers eliminated."""
    slope = cost_slope(p, gb) + multiplier * time_slope(p, gb)
    holding = (1 + p.eta) * (p.holding_usd_s + p.price_usd_gb_s * gb) + multiplier
    scale = np.abs(time_slope(p, gb)) * holding
    scale += (1 + p.eta) * p.price_usd_gb_s * (p.time_s(gb) + p.rounded_s)
    # At the lower end the slope may be positive, at the upper end negative.
    wrong = np.where(gb <= p.lower_gb + 1e-12, np.minimum(slope, 0.0), slope)
    wrong = np.where(gb >= p.upper_gb - 1e-12, np.maximum(wrong, 0.0), wrong)
    excess = p.time_s(gb).sum() / p.time_limit_s - 1.0
    slack = abs(excess) if multiplier > 0 else max(excess, 0.0)
    return max(np.max(np.abs(wrong) / scale), slack)


def dual(p, gb, multiplier):
    """Value of the dual at a minimiser of its Lagrangian."""
    slack = multiplier * (p.time_s(gb).sum() - p.time_limit_s) if multiplier else 0.0
    return p.cost(gb).sum() + slack


@pytest.mark.parametrize("slack", [None, 0.5, 0.05, 0.01, 1e-4])
@pytest.mark.parametrize("seed", range(4))
def test_dual_agrees_with_scipy(seed, slack):
    p = problem(seed, slack=slack)
    gb, multiplier = memory.solve_memory(p)
    cost = p.cost(gb).sum()
    assert kkt_residual(p, gb, multiplier) < 1e-7
    assert p.time_s(gb).sum() <= p.time_limit_s * (1 + 1e-9)
    assert cost - dual(p, gb, multiplier) == pytest.approx(0.0, abs=1e-9 * cost)
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
    assert (memory.solve_memory(never)[0] == p.upper_gb).all()
    # Concave at the lower end: the minimum is still that of a fine scan.
    q = problem(1, theta2=0.5, holding_usd_s=1e-6, lower_gb=np.full(6, 0.1))
    assert (2 / q.theta2 - q.holding_usd_s / q.price_usd_gb_s > q.lower_gb).all()
    scan = np.linspace(0.1, 5000 / 1024, 20001)
    best = np.array([[q.cost(np.full(6, y))] for y in scan])[:, 0].min(axis=0)
    assert q.cost(memory.solve_memory(q)[0]) == pytest.approx(best, rel=1e-6)
    with pytest.raises(ValueError, match="share"):
        problem(0, share=np.zeros(6))
