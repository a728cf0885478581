"""Estimated latency from token rows, and the placements that minimise it."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from servegym.baselines.expert_placement.feasibility import (
    check_placement,
    server_view,
)
from servegym.baselines.expert_placement.heuristics import redundance, uniform
from servegym.baselines.expert_placement.kernel import layer_costs as kernel
from servegym.baselines.expert_placement.latency_search import annealing, latency_dp, local_search
from servegym.baselines.expert_placement.layer_costs import (
    LayerCostModel,
    expert_masks,
    mask_experts,
)
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.prism import prism
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.core import PlacementEpisode

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


def make_case(seed=0, max_rows=512, **changes):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng)
    counts = np.stack([mask_experts(r, 16).sum(axis=0) for r in rows])
    arguments = {
        "prompt_tokens": 30.0,
        "output_tokens": 20.0,
        "round_trip_s": [0.006, 0.006, 0.02],
        "token_s": 1e-4,
        "message_s": 4e-4,
        "max_messages": 2,
    }
    model = LayerCostModel.build(rows, 16, max_rows=max_rows, **(arguments | changes))
    return model, rows, counts, np.array([30, 34, 22, 28])


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

        start = uniform(counts, slots, ONE_TWO)
        dp = check_placement(latency_dp(model, counts, slots, ONE_TWO), slots)
        cooled = check_placement(annealing(model, counts, slots, ONE_TWO, steps=20_000), slots)
        near = check_placement(
            local_search(model, counts, slots, ONE_TWO, start, max_moved_share=1.0), slots
        )
        others = [
            cost(f(counts, slots, ONE_TWO)) for f in (uniform, redundance, prism, proxy_optimum)
        ]
        assert cost(dp) < min(others)
        assert cost(cooled) < cost(dp)
        assert cost(near) < others[0]
        assert server_view(dp, ONE_TWO).sum() == slots.sum()
        assert server_view(cooled, ONE_TWO).sum() == slots.sum()


def test_annealing_finds_the_optimum_of_a_tiny_instance():
    rng = np.random.default_rng(5)
    rows = make_rows(rng, servers=2, layers=1, experts=5, top_k=2, tokens=40)
    counts = np.stack([mask_experts(r, 5).sum(axis=0) for r in rows])
    model = LayerCostModel.build(
        rows, 5, prompt_tokens=4, output_tokens=10, round_trip_s=0.01, token_s=1e-3
    )
    slots, home = np.array([3, 3]), np.array([0, 1])
    every = [
        model.cost(held).sum()
        for a in itertools.combinations(range(5), 3)
        for b in itertools.combinations(range(5), 3)
        if (held := np.stack([np.isin(range(5), a), np.isin(range(5), b)])[:, None]).any(0).all()
    ]
    z = annealing(model, counts, slots, home, steps=4000, hot=0.3, cold=1e-3)
    assert model.cost(server_view(z, home)).sum() == pytest.approx(min(every))


def test_annealing_is_deterministic_and_keeps_its_books():
    model, _, counts, slots = make_case(3)
    runs = [annealing(model, counts, slots, ONE_TWO, steps=5000, seed=s) for s in (0, 0, 1)]
    assert (runs[0] == runs[1]).all() and (runs[0] != runs[2]).any()
    held = server_view(uniform(counts, slots, ONE_TWO), ONE_TWO)
    masks, cost = expert_masks(held), model.cost(held)
    total = kernel.anneal(model.tables, masks, cost, 5000, 0.1, 1e-3, 0)
    after = mask_experts(masks, 16)
    np.testing.assert_allclose(model.cost(after), cost)
    assert total == pytest.approx(cost.sum())
    assert after.any(axis=0).all()
    assert (after.sum(axis=(1, 2)) == held.sum(axis=(1, 2))).all()


def test_local_search_is_bounded_and_descends():
    model, _, counts, slots = make_case(6)
    start = redundance(counts, slots, ONE_TWO)
    costs = [model.cost(server_view(start, ONE_TWO)).sum()]
    for share in (0.0, 0.02, 0.1, 0.5):
        z = check_placement(
            local_search(model, counts, slots, ONE_TWO, start, max_moved_share=share), slots
        )
        moved = int((z & ~start).sum())
        assert moved <= share * slots.sum()
        costs.append(model.cost(server_view(z, ONE_TWO)).sum())
        if share == 0:
            assert (server_view(z, ONE_TWO) == server_view(start, ONE_TWO)).all()
    assert costs[0] == costs[1] > costs[2] > costs[3] > costs[4]


def test_cluster_times():
    cluster = SimpleNamespace(
        num_servers=2,
        experts=16,
        cap=np.array([50, 50]),
        gpu_server=np.array([0, 1, 1]),
        link_bytes_s=np.full((2, 2), 1e8),
        latency_s=np.array([[0, 0.01], [0.01, 0]]),
        expert_base_s=np.full(3, 1e-5),
        expert_token_s=np.full(3, 1e-7),
        activation_bytes=4096,
        pcie_bytes_s=1e10,
        pcie_latency_s=2e-5,
        message_cost_s=1e-3,
        messages="per_server",
        dense_base_s=np.full(2, 2e-4),
        dense_token_s=np.full(2, 1e-6),
    )
    rows = make_rows(np.random.default_rng(0), servers=2)
    model = LayerCostModel.of_cluster(cluster, rows, prompt_tokens=10, output_tokens=[5, 1])
    trip = 2 * 0.01 + 2 * 1e-3 + 2 * 2e-5 + 1e-5
    token = 2 * 4096 / 1e8 + 2 * 4096 / 1e10 + 1e-7
    for n, decodes in enumerate((4, 0)):
        np.testing.assert_allclose(
            model.tables.cost[n, 0].tolist(), [1, 10, decodes, trip, token, 2e-3, 1]
        )
    # Server 1 holds everything: of each layer one job of a prompt and four of decode steps pass
    # server 0's link, and so do the answers at server 1's. A Pollaczek-Khinchine wait at both.
    layers = model.tables.hit.shape[1]
    held = np.zeros(model.tables.hit.shape, bool)
    held[1] = True
    prompt, step = 10 * 4096 / 1e8 + 1e-3, 4096 / 1e8 + 1e-3
    rho = layers * (prompt + 4 * step)
    wait = layers * (prompt**2 + 4 * step**2) / (2 * (1 - rho))
    most = (2e-4 + 1e-6 + trip) * rho / (1 - rho)
    loaded = model.loaded(held, np.ones(model.tables.hit.shape)).tables.cost
    np.testing.assert_allclose(loaded["round_trip_s"][0], trip + 2 * min(wait, most))
    np.testing.assert_allclose(loaded["token_s"][0], token)
    assert (loaded["token_s"][1] == 0).all(), "it calls nobody"


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
    # Annealing begins there and counts under the load that its result causes.
    cooled = server_view(annealing(model, counts, slots, home, steps=4_000), home)
    assert model.loaded(cooled, counts).cost(cooled).sum() <= cost[1]
