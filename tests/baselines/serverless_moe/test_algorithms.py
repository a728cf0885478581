"""Known answers of the serverless algorithms: bounds, selection, LPT and memory."""

import itertools

import numpy as np
import pytest
from scipy import optimize

from servegym.baselines.serverless_moe import lpt
from servegym.baselines.serverless_moe.remoe import bounds, memory
from servegym.envs.serverless_moe.sets import least_used, remote_count


def test_theorem1_constants():
    assert bounds.theorem1_printed(200, 64) == pytest.approx(np.sqrt(600) / 2 + 3.125)
    assert bounds.theorem1(200, 64, 6) == pytest.approx(np.sqrt(300) + 18.75)
    assert bounds.corollary1_printed(200, 16, 64) == pytest.approx(np.sqrt(600) / 2 + 50)
    assert bounds.corollary1(200, 16, 64, 6) == pytest.approx(300 + 6 * np.sqrt(300))
    assert bounds.corollary1(200, 64, 64, 6) == 1200  # every call
    assert bounds.corollary1(200, 0, 64, 6) == 0
    with pytest.raises(ValueError, match="members"):
        bounds.corollary1(10, 65, 64, 6)


def test_theorem1_on_uniform_routing():
    rng = np.random.default_rng(0)
    n, experts, top_k = 200, 64, 6
    sets = np.argsort(rng.random((300, n, experts)), axis=2)[:, :, :top_k]
    counts = np.stack([np.bincount(s.ravel(), minlength=experts) for s in sets])
    # As printed it falls far short of its 95 %; corrected it holds.
    assert (counts <= bounds.theorem1_printed(n, experts)).mean() < 0.5
    assert (counts <= bounds.theorem1(n, experts, top_k)).mean() >= 0.95
    some = counts[:, :16].sum(axis=1)
    assert (some <= bounds.corollary1(n, 16, experts, top_k)).mean() >= 0.95


def test_conformal_bound_covers():
    rng = np.random.default_rng(1)
    logits = 2.0 * rng.normal(size=(3, 1, 16))
    n = 100

    def draw(prompts):
        # Two different experts a token (Gumbel's trick), layer by layer.
        keys = logits + rng.gumbel(size=(prompts, 3, n, 16))
        best = np.argsort(-keys, axis=3)[..., :2]
        return (best[..., None] == np.arange(16)).sum(axis=(2, 3))

    s = draw(100).mean(axis=0) / (2 * n)
    bound = bounds.ConformalBound.fit(draw(200), s, top_k=2)
    fresh = draw(200)
    assert (fresh <= bound(s, n)).mean() == pytest.approx(0.95, abs=0.02)
    worst = bounds.ConformalBound.fit(draw(200), s, top_k=2, layer_maximum=True)
    assert worst.q > bound.q
    assert (fresh <= worst(s, n)).all(axis=2).mean() == pytest.approx(0.95, abs=0.04)
    assert bound(1.0, n) == n
    with pytest.raises(ValueError, match="level"):
        bounds.ConformalBound.fit(draw(2), s, 2, level=1.0)


def test_theorem4_bounds_lpt():
    rng = np.random.default_rng(2)
    for _ in range(200):
        jobs, z = rng.exponential(size=rng.integers(1, 12)), int(rng.integers(1, 6))
        slowest = lpt.assign(jobs, z).load_s.max() + 0.1
        assert slowest <= bounds.theorem4(jobs.max(), jobs.sum(), z, 0.1) + 1e-12


def test_remote_sets_are_the_least_used_experts():
    s = np.array([[0.1, 0.4, 0.1, 0.4], [0.7, 0.1, 0.1, 0.1]])
    assert least_used(s, 2).tolist() == [[1, 0, 1, 0], [0, 1, 1, 0]]
    assert least_used(s, 0).sum() == 0 and least_used(s, 4).all()
    # ceil(b K) does not suffer from rounding.
    assert [int(remote_count(k / 64, 64)) for k in range(65)] == list(range(65))
    with pytest.raises(ValueError, match="ratio"):
        remote_count(1.5, 4)


def test_lpt_against_brute_force():
    rng = np.random.default_rng(3)
    worst = 0.0
    for _ in range(60):
        jobs, z = rng.integers(1, 20, size=6).astype(float), int(rng.integers(1, 4))
        best = min(
            np.bincount(choice, weights=jobs, minlength=z).max()
            for choice in itertools.product(range(z), repeat=6)
        )
        ratio = lpt.assign(jobs, z).load_s.max() / best
        assert 1.0 <= ratio <= 4 / 3 - 1 / (3 * z) + 1e-12
        worst = max(worst, ratio)
    assert worst > 1.0  # LPT is not exact: the bound was put to work
    # The textbook's worst case for z = 2.
    assert lpt.assign([3, 3, 2, 2, 2], 2).load_s.max() == 7


def test_payload_repair():
    # LPT puts the long job alone; the payload limit then needs a move.
    fixed = lpt.assign([10, 1, 1, 1], 2, payload_mb=[1, 2, 2, 2], limit_mb=5)
    assert fixed.fits and fixed.replicas == 2 and fixed.payload_mb.max() <= 5
    # Two cannot carry it.
    more = lpt.assign([1, 1, 1], 1, payload_mb=[4, 4, 4], limit_mb=5, max_replicas=3)
    assert more.fits and more.replicas == 3
    never = lpt.assign([1], 1, payload_mb=[9], limit_mb=5, max_replicas=4)
    assert not never.fits and never.replicas == 4
    assert (lpt.assign([], 2).load_s == 0.0).all()
    with pytest.raises(ValueError, match="replicas"):
        lpt.lpt([1.0], 0)


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
    )
    if slack is not None:
        low, high = p.time_s(p.lower_gb).sum(), p.time_s(p.upper_gb).sum()
        p = memory.MemoryProblem(**{**p.__dict__, "time_limit_s": high + slack * (low - high)})
    return memory.MemoryProblem(**{**p.__dict__, **kwargs})


def test_theorem2_derivatives():
    p = problem()
    y, h = np.linspace(1.2, 4.0, 6), 1e-5
    slope = (p.cost(y + h) - p.cost(y - h)) / (2 * h)
    assert p.cost_slope(y) == pytest.approx(slope, rel=1e-6)
    # The printed g'' = c theta1 theta2^2 exp(-theta2 y) (y - (2/theta2 - H/c)).
    c = p.price_usd_gb_s
    convex_from = 2 / p.theta2 - p.holding_usd_s / c
    printed = c * p.theta1 * p.theta2**2 * np.exp(-p.theta2 * y) * (y - convex_from)
    second = (p.cost_slope(y + h) - p.cost_slope(y - h)) / (2 * h)
    assert second == pytest.approx((1 + p.eta) * p.share * printed, rel=1e-6)


@pytest.mark.parametrize("slack", [None, 0.5, 0.05, 0.01, 1e-4])
@pytest.mark.parametrize("seed", range(4))
def test_memory_dual_agrees_with_scipy(seed, slack):
    p = problem(seed, slack=slack)
    found = memory.solve_memory(p)
    assert found.feasible and found.kkt < 1e-7
    assert found.time_s <= p.time_limit_s * (1 + 1e-9)
    assert found.cost - found.dual == pytest.approx(0.0, abs=1e-9 * found.cost)
    constraints = []
    if slack is not None:
        constraints = [
            {
                "type": "ineq",
                "fun": lambda y: (p.time_limit_s - p.time_s(y).sum()) * 1e3,
                "jac": lambda y: -p.time_slope(y) * 1e3,
            }
        ]
    reference = optimize.minimize(
        lambda y: p.cost(y).sum() * 1e6,
        np.clip(found.gb + 0.2, p.lower_gb, p.upper_gb),
        jac=lambda y: p.cost_slope(y) * 1e6,
        bounds=list(zip(p.lower_gb, p.upper_gb, strict=True)),
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    assert found.cost * 1e6 == pytest.approx(reference.fun, rel=1e-6)


def test_memory_infeasible_and_outside_the_convex_side():
    p = problem(0)
    fastest = p.time_s(p.upper_gb).sum()
    never = memory.solve_memory(memory.MemoryProblem(**{**p.__dict__, "time_limit_s": fastest / 2}))
    assert not never.feasible and (never.gb == p.upper_gb).all()
    # Concave at the lower end: the minimum is still that of a fine scan.
    q = problem(1, theta2=0.5, holding_usd_s=1e-6, lower_gb=np.full(6, 0.1))
    assert (2 / q.theta2 - q.holding_usd_s / q.price_usd_gb_s > q.lower_gb).all()
    scan = np.linspace(0.1, 5000 / 1024, 20001)
    best = np.array([[q.cost(np.full(6, y))] for y in scan])[:, 0].min(axis=0)
    assert q.cost(memory.solve_memory(q).gb) == pytest.approx(best, rel=1e-6)
    with pytest.raises(ValueError, match="share"):
        problem(0, share=np.zeros(6))


@pytest.mark.parametrize("slack", [None, 0.3, 0.02])
def test_rounding_is_on_the_grid_and_feasible(slack):
    p = problem(5, slack=slack)
    grid = np.arange(1000, 5001, 100) / 1024
    relaxed = memory.solve_memory(p)
    gb, feasible = memory.round_memory(p, relaxed.gb, grid)
    assert feasible and np.isin(gb, grid).all()
    assert p.time_s(gb).sum() <= p.time_limit_s * (1 + 1e-9)
    # No better than the relaxation, and within a few per cent of it.
    assert relaxed.dual * (1 - 1e-9) <= p.cost(gb).sum() <= 1.03 * relaxed.dual
    none, ok = memory.round_memory(
        memory.MemoryProblem(**{**p.__dict__, "time_limit_s": 1e-6}), relaxed.gb, grid
    )
    assert not ok and none == pytest.approx(np.full(6, grid[-1]))


def test_overhead_of_the_surrogates():
    printed = memory.make_overhead("printed", [2e-4], [0.5], 6, 1e-5)
    per_call = memory.make_overhead("eq5", [2e-4], [0.5], 6, 1e-5)
    assert printed == pytest.approx([2e-4])
    assert per_call == pytest.approx([0.5 * 6 * 2.1e-4])
    with pytest.raises(ValueError, match="surrogate"):
        memory.make_overhead("eq6", [2e-4], [0.5], 6, 1e-5)
