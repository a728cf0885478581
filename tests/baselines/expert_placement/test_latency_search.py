"""Estimated latency from token rows, and the placements that minimise it."""

import itertools

import numpy as np
import pytest

from servegym.baselines.expert_placement.heuristics import redundance, uniform
from servegym.baselines.expert_placement.kernel import layer_costs as kernel
from servegym.baselines.expert_placement.latency_search import latency_dp
from servegym.baselines.expert_placement.layer_costs import LayerCostModel
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.cluster import check_placement, server_view
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.envs.workloads.expert_sets import set_bits

ONE_TWO = np.array([0, 1, 2, 2])


def make_rows(rng, servers=3, layers=6, experts=16, top_k=3, tokens=300):
    """Tokens of a few kinds with preferences of the server."""
    rows = []
    for _ in range(servers):
        p = rng.dirichlet(np.full(experts, 0.4), size=layers)
        gumbel = rng.gumbel(size=(tokens, layers, experts)) + np.log(p + 1e-9)
        chosen = np.argsort(-gumbel, axis=2)[:, :, :top_k]
        rows.append((np.uint64(1) << chosen.astype(np.uint64)).sum(axis=2, dtype=np.uint64))
    return rows


def make_case(seed=0):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng)
    counts = np.stack([set_bits(r, 16).sum(axis=0) for r in rows])
    cost = np.zeros(3, kernel.LAYER_COST)
    cost["weight"], cost["prompt_tokens"], cost["decode_steps"] = 1.0, 30.0, 19.0
    cost["round_trip_s"], cost["token_s"] = [0.006, 0.006, 0.02], 1e-4
    cost["message_s"], cost["max_messages"] = 4e-4, 2
    return LayerCostModel.build(rows, 16, cost), rows, counts, np.array([30, 34, 22, 28])


def literal_cost(model, rows, held, n, layer):
    """One layer's estimate, written out token by token."""
    w, prompt, decodes, trip, token_s, message_s, targets = model.tables.cost[n, layer]
    remote = [
        min(targets, sum(1 for e in range(16) if (int(r[layer]) >> e) & 1 and not held[e]))
        for r in rows
    ]
    share = sum(1 for x in remote if x) / len(rows)
    volume = sum(remote) / len(rows)
    hits = 0.0
    for e in range(16):
        if not held[e]:
            p = sum((int(r[layer]) >> e) & 1 for r in rows) / len(rows)
            hits += 1 - (1 - p) ** prompt
    touched = 1 - (1 - share) ** prompt
    prefill = prompt * volume * token_s + touched * trip
    prefill += max(0, min(hits, targets) - touched) * message_s
    decode = share * trip + volume * token_s + (volume - share) * message_s
    return w * (prefill + decodes * decode)


def test_cost_is_the_literal_sum():
    model, rows, _, _ = make_case()
    rng = np.random.default_rng(1)
    held = rng.random((3, 6, 16)) < 0.6
    cost = model.cost(held)
    for n, layer in itertools.product(range(3), range(6)):
        assert cost[n, layer] == pytest.approx(
            literal_cost(model, rows[n], held[n, layer], n, layer), rel=1e-12
        )
    assert model.cost(np.ones((3, 6, 16))).max() == 0
    order = np.argsort(rng.random((6, 16)), axis=1)
    prefix = model.prefix_costs(1, order)
    for c in (0, 5, 16):
        view = np.zeros((3, 6, 16), bool)
        np.put_along_axis(view[1], order[:, :c], True, axis=1)
        np.testing.assert_allclose(prefix[:, c], model.cost(view)[1], rtol=1e-12)


def test_knapsack_is_exact():
    rng = np.random.default_rng(2)
    for _ in range(40):
        costs = rng.random((3, 5))
        cap = int(rng.integers(0, 13))
        best = min(
            sum(costs[x, c] for x, c in enumerate(choice))
            for choice in itertools.product(range(5), repeat=3)
            if sum(choice) == cap
        )
        c = kernel.knapsack(costs, cap)
        assert c.sum() == cap
        assert costs[np.arange(3), c].sum() == pytest.approx(best)


@pytest.mark.slow
def test_placements_are_feasible_and_better_by_the_estimate():
    for seed in range(4):
        model, _, counts, slots = make_case(seed)

        def cost(z, model=model):
            return model.cost(server_view(z, ONE_TWO)).sum()

        dp = check_placement(latency_dp(model, counts, slots, ONE_TWO), slots)
        others = [
            cost(f(counts, slots, ONE_TWO)) for f in (uniform, redundance, prism, proxy_optimum)
        ]
        assert cost(dp) < min(others)
        assert server_view(dp, ONE_TWO).sum() == slots.sum()


def test_servers_settle_where_none_gains():
    """Under the load that they cause, plans made for it cost less than those for idle links."""
    problem = build_problem(scenario="edge_hetero", action_mode="placement")
    system = PlacementSystem.from_problem(problem)
    engine = PlacementEpisode(problem)
    engine.begin(np.random.default_rng(0))
    counts, slots, home = engine.counts().astype(float), system.slots, system.gpu_server
    model = system.layer_cost_model(counts, rows=64)
    cost = []
    for rounds in (0, 3):
        z = latency_dp(model, counts, slots, home, rounds=rounds)
        check_placement(z, slots)
        view = server_view(z, home)
        cost.append(model.loaded(view, counts).cost(view).sum())
    assert cost[1] < 0.95 * cost[0]
