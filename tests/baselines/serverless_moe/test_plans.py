"""Plans of the serverless family: expected outcomes, Algorithm 2, Remoe, deployments, optimum."""

import dataclasses
import itertools

import numpy as np
import pytest

from servegym.baselines.serverless_moe import grid_optimum as go
from servegym.baselines.serverless_moe import loads
from servegym.baselines.serverless_moe.loads import Load, predict
from servegym.baselines.serverless_moe.lpt import lpt, replica_loads
from servegym.baselines.serverless_moe.remoe import remoe
from servegym.baselines.serverless_moe.remoe.bounds import corollary1
from servegym.baselines.serverless_moe.remoe.mmp import mmp, worst_cases
from servegym.baselines.serverless_moe.remoe.replicas import choose_replicas
from servegym.envs.serverless_moe import equations as eq
from servegym.envs.serverless_moe.config import build_system
from servegym.envs.serverless_moe.deployments import DEPLOYMENTS, deployment_cost
from servegym.envs.serverless_moe.sets import least_used, remote_count


def remote_set(frequency, ratio):
    return least_used(frequency, int(remote_count(ratio, frequency.shape[1])))


@pytest.fixture(scope="module")
def system():
    return build_system("deepseek-v2-lite")


def draw_sets(rng, logits, tokens, top_k):
    keys = logits + rng.gumbel(size=(tokens, *logits.shape))
    members = np.zeros(keys.shape, dtype=bool)
    np.put_along_axis(members, np.argsort(-keys, axis=2)[..., :top_k], True, axis=2)
    return members


def make_request(system, seed=0, n_in=115, n_out=60, trem=2e-4):
    """A skewed request, and the frequencies that it was drawn from (estimated)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(system.moe_layers, system.num_experts))
    prefill = draw_sets(rng, logits, n_in, system.top_k).sum(axis=0)
    decode = eq.bit_sets(draw_sets(rng, logits, n_out, system.top_k))
    frequency = draw_sets(rng, logits, 500, system.top_k).mean(axis=0) / system.top_k
    request = eq.Request(prefill, decode, trem * rng.lognormal(0, 0.25, system.moe_layers), n_in)
    return request, frequency


def tiny(system, **changes):
    """Two MoE layers of four experts and coarse grids: everything can be enumerated."""
    fields = {
        "layers": 2,
        "experts": np.array([4, 4]),
        "top_k": 2,
        "expert_mb": np.full(2, 16.5),
        "non_expert_mb": np.full(2, 60.0),
        "kv_mb_per_token": np.full(2, 0.001),
        "main_specs_mb": np.array([200.0, 1000.0]),
        "remote_specs_mb": np.array([500.0, 1500.0, 2500.0]),
        "z_max": 2,
    }
    return dataclasses.replace(system, **{**fields, **changes})


@pytest.mark.parametrize("invocation", eq.DECODE_INVOCATIONS)
@pytest.mark.parametrize("bill", [False, True])
def test_known_load_gives_the_true_outcome(system, invocation, bill):
    request, frequency = make_request(system)
    for seed, ratio in enumerate((0.0, 0.3, 1.0)):
        rng = np.random.default_rng(seed)
        remote = remote_set(frequency, ratio)
        plan = eq.make_plan(system, remote, request.prefill_counts, request.n_out)
        plan.replicas = np.where(plan.replicas > 0, rng.integers(1, 5, plan.replicas.size), 0)
        plan.assignment = np.where(remote, rng.integers(0, 9, remote.shape), -1)
        plan.assignment = np.where(remote, plan.assignment % plan.replicas.clip(1)[:, None], -1)
        options = {"decode_invocation": invocation, "bill_cold_start": bill}
        limits = {"ttft_limit_s": 5.0, "tpot_limit_s": 0.05}
        true = eq.evaluate_plan(system, request, plan, **options, **limits)
        same = predict(system, Load.known(request), plan, **options, **limits)
        for field in dataclasses.fields(true):
            a, b = getattr(true, field.name), getattr(same, field.name)
            assert a == b if field.name == "violations" else a == pytest.approx(b, rel=1e-12)


def test_predicted_load_is_the_mean_of_known_ones(system):
    system = tiny(system, experts=np.array([32, 32]))
    # Of 32 experts: r is hypergeometric, which the binomial law comes close to.
    rng = np.random.default_rng(0)
    logits = np.zeros((2, 32))
    frequency = np.full((2, 32), 1 / 32)
    load = Load.predicted(system, frequency, 20, 30, 2e-4)
    assert load.tokens.sum(axis=1) == pytest.approx([40, 40])
    remote = remote_set(frequency, 0.5)
    plan = eq.make_plan(system, remote, load.tokens, 30)
    costs = []
    for _ in range(300):
        prefill = draw_sets(rng, logits, 20, 2).sum(axis=0)
        decode = eq.bit_sets(draw_sets(rng, logits, 30, 2))
        request = eq.Request(prefill, decode, np.full(2, 2e-4), 20)
        costs.append(eq.evaluate_plan(system, request, plan).cost_usd)
    expected = predict(system, load, plan).cost_usd
    assert expected == pytest.approx(np.mean(costs), rel=0.02)
    assert load.histogram(remote, 2) == pytest.approx(30 * np.array([[0.25, 0.5, 0.25]] * 2))
    with pytest.raises(ValueError, match="frequency"):
        Load.predicted(system, frequency[:1], 20, 30, 2e-4)


def test_replica_loads_are_those_of_lpt():
    rng = np.random.default_rng(1)
    jobs = rng.exponential(size=(3, 5, 9)) * (rng.random((3, 5, 9)) < 0.8)
    body = rng.random((3, 5, 9))  # of all experts: those that are no job must not count
    table = replica_loads(jobs, body, 4)
    for i, j, z in itertools.product(range(3), range(5), range(1, 5)):
        replica = lpt(jobs[i, j], z)
        seconds = np.bincount(replica, jobs[i, j], z)
        assert table.slowest_s[i, j, z - 1] == pytest.approx(seconds.max())
        assert table.invoked[i, j, z - 1] == (seconds > 0).sum()
        bodies = np.bincount(replica, body[i, j] * (jobs[i, j] > 0), z)
        assert table.payload_mb[i, j, z - 1] == pytest.approx(bodies.max())


def test_mmp_takes_the_largest_feasible_ratio(system):
    _, frequency = make_request(system)
    load = Load.predicted(system, frequency, 115, 200, 2e-4)
    assert mmp(system, load).ratio == 1.0  # loose limits: everything remote
    cases = worst_cases(system, load, 20.0, 0.050)
    found = mmp(system, load, 20.0, 0.050)
    assert found.feasible and 0.0 < found.ratio < 1.0
    assert not cases.feasible[: cases.chosen()].any() and cases.feasible[cases.chosen()]
    assert found.main_mb >= (64 - found.members) * system.expert_mb.sum()
    assert found.main_mb in system.main_specs_mb
    # A tighter TPOT never allows a larger b; hopeless limits are flagged.
    ratios = [mmp(system, load, 30.0, limit).ratio for limit in (0.045, 0.05, 0.06, 0.08)]
    assert ratios == sorted(ratios) and len(set(ratios)) > 1
    never = mmp(system, load, 0.1, 0.001)
    hopeless = worst_cases(system, load, 0.1, 0.001)
    assert not never.feasible and hopeless.excess[hopeless.chosen()] == hopeless.excess.min()


def test_mmp_worst_case_by_hand(system):
    system = tiny(system)
    load = Load.predicted(system, np.full((2, 4), 0.25), 20, 30, 1e-3)
    cases = worst_cases(system, load)
    b1 = 0  # m = 4: every call is remote
    assert corollary1(30, 4, 4, 2) == 60
    one = system.expert_cpu_s(2500.0, 1) + 2 * system.token_mb / system.bandwidth_mb_s + 1e-3
    swap = 2 * system.swap_s(2)
    assert cases.tpot_s[b1] == pytest.approx(2 * (system.gpu_layer_s(1) + swap + 2 * one))
    none = -1  # m = 0: every call is local, in a function as large as the largest remote one
    assert cases.main_mb[none] == 1000.0
    own = 2 * system.expert_cpu_s(1000.0, 1)
    assert cases.tpot_s[none] == pytest.approx(2 * (system.gpu_layer_s(1) + swap + own))


@pytest.mark.parametrize("limits", [(np.inf, np.inf), (8.0, 0.060), (14.0, 0.050), (0.1, 0.001)])
@pytest.mark.parametrize("reading", ["remoe", "remoe_cost"])
def test_remoe_plans_are_feasible_with_true_routing(system, reading, limits):
    for seed, n_in in ((0, 115), (1, 1000)):
        request, frequency = make_request(system, seed, n_in=n_in)
        load = Load.predicted(system, frequency, n_in, request.n_out, 2e-4)
        kwargs = {"ttft_limit_s": limits[0], "tpot_limit_s": limits[1]}
        decision = remoe(system, load, reading=reading, **kwargs)
        outcome = eq.evaluate_plan(system, request, decision.plan, **kwargs)
        assert outcome.feasible
        if n_in == 115 and decision.worst_case_met:
            assert not any(outcome.violations.values())


def test_remoe_is_cheaper_than_mix_and_dearer_than_the_optimum(system):
    request, frequency = make_request(system, n_out=200)
    load = Load.predicted(system, frequency, 115, 200, 2e-4)
    limits = {"ttft_limit_s": 8.0, "tpot_limit_s": 0.060}
    mix = deployment_cost("mix", system, request, **limits).cost_usd
    costs = {}
    for reading in ("remoe", "remoe_cost"):
        decision = remoe(system, load, reading=reading, **limits)
        costs[reading] = eq.evaluate_plan(system, request, decision.plan).cost_usd
    best = go.grid_optimum(
        system,
        Load.known(request),
        score=frequency,
        ratios=np.arange(9) / 8,
        main_specs_mb=system.main_specs_mb[::20],
        **limits,
    )
    assert best.plan is not None and best.gap < 1e-5
    outcome = eq.evaluate_plan(system, request, best.plan, **limits)
    assert not any(outcome.violations.values())
    true = outcome.cost_usd
    assert best.cost_usd == pytest.approx(true, rel=1e-12)
    assert 0.98 * true < costs["remoe_cost"] <= costs["remoe"] < 0.6 * mix


def test_replicas_serve_the_ttft_then_the_cost(system):
    _, frequency = make_request(system)
    load = Load.predicted(system, frequency, 60, 200, 5e-3)
    remote, memory = remote_set(frequency, 0.9), np.full(system.moe_layers, 2000.0)
    loose = choose_replicas(system, load, remote, 14000.0, memory)
    tight = choose_replicas(system, load, remote, 14000.0, memory, ttft_limit_s=0.05)
    assert not tight.meets_ttft and tight.worst_ttft_s < loose.worst_ttft_s
    assert tight.count.sum() > loose.count.sum()
    # Step 3 stopped at a local optimum: no single increment saves anything.
    plan = eq.Plan(remote, 14000.0, memory, loose.count, loose.assignment)
    cost = predict(system, load, plan).cost_usd
    for layer in range(0, system.moe_layers, 5):
        count = loose.count.copy()
        count[layer] += 1
        assignment = loose.assignment.copy()
        jobs = loads.job_times(system, load, memory)[layer, remote[layer]]
        assignment[layer, remote[layer]] = lpt(jobs, int(count[layer]))
        more = predict(system, load, eq.Plan(remote, 14000.0, memory, count, assignment))
        assert more.cost_usd >= cost * (1 - 1e-12)
    none = choose_replicas(system, load, remote & False, 40000.0, memory * 0)
    assert (none.count == 0).all() and (none.assignment == -1).all()


def test_deployments(system):
    request, _ = make_request(system)
    found = {name: deployment_cost(name, system, request) for name in DEPLOYMENTS}
    mix = eq.evaluate_plan(system, request, eq.mix_plan(system, request.n_out))
    assert found["mix"].cost_usd == pytest.approx(mix.cost_usd, rel=1e-12)
    # GPU by hand: everything in GPU memory, both parts of every layer on the GPU.
    seconds = 27 * system.gpu_layer_s(115) + 26 * system.gpu_experts_s(115)
    seconds += request.n_out * (27 * system.gpu_layer_s(1) + 26 * system.gpu_experts_s(1))
    memory = eq.gpu_memory_mb(system, 115, request.n_out) + 26 * 64 * system.expert_mb[0]
    assert found["gpu"].cost_usd == pytest.approx(system.price_gpu * memory * seconds)
    # An eager GPU costs more than MIX, a fused one less: the conclusion turns.
    fused = build_system("deepseek-v2-lite", gpu="fused")
    other = {name: deployment_cost(name, fused, request) for name in ("gpu", "mix")}
    assert found["gpu"].cost_usd > 1.5 * mix.cost_usd
    assert other["gpu"].cost_usd < 0.5 * other["mix"].cost_usd
    assert found["per_expert"].cold_s < found["mix"].cold_s == pytest.approx(found["gpu"].cold_s)
    for name in DEPLOYMENTS:
        warm = deployment_cost(name, system, request, cold=False, ttft_limit_s=1e-3)
        assert warm.cold_s == 0 and warm.violations["ttft"]
        billed = deployment_cost(name, system, request, bill_cold_start=True)
        assert billed.cost_usd > found[name].cost_usd == pytest.approx(warm.cost_usd)
    with pytest.raises(ValueError, match="per_expert"):
        deployment_cost("per_experts", system, request)


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
        assert found.cost == pytest.approx(best)
        if np.isfinite(best):
            tight += found.cost > np.where(np.isfinite(cost), cost, 9).min(axis=1).sum()
            assert found.gap <= 1e-6
        else:
            assert (found.chosen == -1).all()
    assert tight > 5


@pytest.mark.parametrize("limits", [(np.inf, np.inf), (1.50, 0.004), (1.15, 0.0047)])
@pytest.mark.parametrize("bill", [False, True])
def test_grid_optimum_against_enumeration(system, limits, bill):
    toy = tiny(system)
    request, frequency = make_request(toy, n_in=40, n_out=20, trem=1e-4)
    kwargs = {
        "ttft_limit_s": limits[0],
        "tpot_limit_s": limits[1],
        "bill_cold_start": bill,
    }
    load, best = Load.known(request), np.inf
    cells = list(itertools.product(toy.remote_specs_mb, (1, 2)))
    for b, w, one, two in itertools.product(np.arange(5) / 4, toy.main_specs_mb, cells, cells):
        remote = remote_set(frequency, b)
        used = remote.any(axis=1)
        memory = np.where(used, [one[0], two[0]], 0.0)
        count = np.where(used, [one[1], two[1]], 0)
        assignment = np.full(remote.shape, -1)
        for layer in np.flatnonzero(used):
            jobs = eq.replica_jobs_s(toy, memory[layer], request.prefill_counts[layer])
            assignment[layer, remote[layer]] = eq.lpt(jobs[remote[layer]], count[layer])
        plan = eq.Plan(remote, w, memory, count, assignment)
        outcome = eq.evaluate_plan(toy, request, plan, **kwargs)
        if not any(outcome.violations.values()):
            best = min(best, outcome.cost_usd)
    found = go.grid_optimum(toy, load, score=frequency, gap=0.0, **kwargs)
    assert found.cost_usd == pytest.approx(best, rel=1e-9)
    assert found.bound_usd == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ttft_limit_s": -1.0}, "ttft_limit_s=-1.0"),
        ({"tpot_limit_s": float("nan")}, "tpot_limit_s=nan"),
        ({"reading": "remo"}, "remoe"),
        ({"candidates": 0}, "candidates"),
        ({"payload_margin": 0.0}, "payload_margin"),
        ({"members": [99]}, "members"),
        ({"surrogate": "eq6"}, "surrogate"),
    ],
)
def test_remoe_refuses_bad_numbers(system, change, said):
    load = Load.predicted(tiny(system), np.full((2, 4), 0.25), 10, 5, 1e-4)
    with pytest.raises(ValueError, match=said):
        remoe(tiny(system), load, **change)


def test_limits_are_checked_everywhere(system):
    request, _ = make_request(system)
    for serve in (
        lambda: deployment_cost("mix", system, request, ttft_limit_s=0.0),
        lambda: go.grid_optimum(system, Load.known(request), ttft_limit_s=0.0),
        lambda: deployment_cost("gpuu", system, request),
    ):
        with pytest.raises(ValueError, match=r"ttft_limit_s=0.0|gpu"):
            serve()
