"""The search for one good placement: the estimate by hand, what annealing keeps, the policy."""

import numpy as np
import pytest

from servegym.baselines.expert_placement import initial_placement
from servegym.baselines.expert_placement.feasibility import (
    assign_gpus,
    check_placement,
    server_view,
)
from servegym.baselines.expert_placement.heuristics import uniform, whole_layer
from servegym.baselines.expert_placement.initial_placement import (
    best_start,
    climb,
)
from servegym.baselines.expert_placement.kernel.link_queues import CALLS, count_bits, remote_calls
from servegym.baselines.expert_placement.link_queues import LinkQueueModel
from servegym.baselines.expert_placement.simulation_search import SimulatedLatency
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.registry import make_policy
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.workloads.expert_sets import bit_sets


def toy(**kwargs):
    problem = build_problem(**{"model": "toy", "action_mode": "placement", **kwargs})
    return PlacementSystem.from_problem(problem)


def view(system, place, counts):
    z = place(counts, system.slots, system.gpu_server)
    return server_view(z, system.gpu_server)


@pytest.mark.parametrize("messages", ["per_server", "per_expert"])
def test_what_tokens_do_elsewhere_is_what_sets_say(messages):
    about = LinkQueueModel(toy(cluster_kwargs={"messages": messages}), tokens=40)
    tables, rng = about.tables, np.random.default_rng(0)
    held = rng.random((3, 4, 8)) < 0.5
    held[2] |= ~held.any(axis=0)
    masks = bit_sets(held)
    for n in range(3):
        order = tables.near[n]
        assert order[0] == n
        for layer in range(4):
            want = np.zeros((3, 4))
            for row in tables.rows[n, layer]:
                missing = {e for e in range(8) if (int(row) >> e) & 1 and not held[n, layer, e]}
                for m in order[1:]:
                    there = {e for e in missing if held[m, layer, e]}
                    missing -= there
                    if there:
                        want[m, 0] += 1 / 40
                        want[m, 1] += (len(there) if messages == "per_expert" else 1) / 40
                        farthest = m
                if any((int(row) >> e) & 1 and not held[n, layer, e] for e in range(8)):
                    want[farthest, 2] += 1 / 40
            out = np.empty(3, CALLS)
            remote_calls(tables, n, layer, masks, out)
            out = np.array(out.tolist())
            np.testing.assert_allclose(out[:, :3], want[:, :3])
    assert count_bits(np.uint64(0xFFFF_0000_0000_0001)) == 17


def test_one_remote_server_by_hand():
    """All of layer 0 of server 0 is at server 1: a round trip a step and no queue."""
    system = toy(
        cluster_kwargs={
            "gpus": [1, 1],
            "slots": [32, 32],
            "nic_bps": [3e8, 2e8],
            "latency_s": 0.002,
        }
    )
    about = LinkQueueModel(system)
    held = np.ones((2, 4, 8), bool)
    assert about.cost(held, 0.3) == 0
    held[0, 0] = False
    tables, (_, tokens, _, decodes) = about.tables, about.tables.load[0]
    both = tables.token[0, 1] + tables.token[1, 0]
    step = tables.delay[0, 1] + 2 * tables.cost
    want = decodes * (step + both) + step + tokens * both
    assert about.cost(held, 0.0) == pytest.approx(want / 2)  # half of the requests
    assert about.cost(held, 1.0) > about.cost(held, 0.3) > about.cost(held, 0.0)


@pytest.mark.slow
def test_annealing_lowers_the_estimate_and_keeps_memory_and_coverage():
    system = toy()
    about = LinkQueueModel(system)
    start = view(system, uniform, about.counts)
    found = about.anneal(start, 0.3, 4_000, 0)
    assert about.cost(found, 0.3) < 0.8 * about.cost(start, 0.3)
    assert (found.sum(axis=(1, 2)) == start.sum(axis=(1, 2))).all() and found.any(axis=0).all()
    np.testing.assert_array_equal(found, about.anneal(start, 0.3, 4_000, 0))


def test_the_counts_are_those_of_the_usual_tasks():
    """What `PlacementSystem` says of its tasks, weighted by their shares."""
    for kwargs in ({}, {"task_mix": "mixed"}, {"rotate_s": 60.0}):
        system = toy(**kwargs)
        shares = system.long_run_shares
        assert (shares.max(axis=1) == 1).all() == (not kwargs)
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        about = LinkQueueModel(system, tokens=4_000)
        want = np.einsum("nk,kle->nle", shares, system.task_counts)
        np.testing.assert_allclose(about.counts, want, rtol=0.1, atol=0.5)
        assert about.tables.load["tokens"] == pytest.approx(shares @ system.task_prompt_tokens)
        assert about.tables.load["decode_steps"] == pytest.approx(system.output_tokens - 1)
        assert (about.tables.hit <= 1).all() and about.tables.hit.max() > 0.5
    with pytest.raises(ValueError, match="tokens"):
        LinkQueueModel(system, tokens=0)


def test_the_start_is_the_fastest_candidate_in_the_simulator(monkeypatch):
    tried, simulate = [], initial_placement._simulate

    def seconds(objective, system, counts, held):
        tried.append((simulate(objective, system, counts, held), held))
        return tried[-1][0]

    monkeypatch.setattr(initial_placement, "_simulate", seconds)
    monkeypatch.setattr(initial_placement, "WAITS", (0.3,))
    monkeypatch.setattr(initial_placement, "REQUESTS", 100)
    system = toy()
    found = best_start(system, tries=1, steps=2_000, swaps=0)
    # Three heuristics, then the best of them beside one that was annealed from it.
    assert len(tried) == 5 and len({latency for latency, _ in tried}) == 4
    np.testing.assert_array_equal(found, min(tried, key=lambda one: one[0])[1])
    assert found.any(axis=0).all()
    assert (found.sum(axis=(1, 2)) <= system.cluster.cap).all()


def test_exchanges_are_kept_where_they_are_faster():
    system = toy()
    counts = LinkQueueModel(system).counts
    start = view(system, whole_layer, counts)
    objective = SimulatedLatency(system, system.long_run_shares, 60)

    def seconds(held):
        return objective.latency_s(assign_gpus(held, counts, system.slots, system.gpu_server))

    found, gained = climb(objective, system, start, counts, 12, 0)
    assert 0 < gained < 12 and seconds(found) < seconds(start)
    np.testing.assert_array_equal(found.sum(axis=(1, 2)), start.sum(axis=(1, 2)))
    assert found.any(axis=0).all()
    # A place moves as a whole: how many experts the servers hold of a layer.
    places = [sorted(map(tuple, held.sum(axis=2).T)) for held in (found, start)]
    assert places[0] == places[1]
    same, none = climb(objective, system, start, counts, 0, 0)
    assert same is start and none == 0


def test_the_policy_searches_once_and_stays():
    system = toy()
    policy = make_policy("best_start", system, family="expert_placement", tries=1, steps=500)
    held = best_start(system, tries=1, steps=500)
    counts = np.ones(held.shape)
    current = uniform(counts, system.slots, system.gpu_server)
    plan = policy.plan(0, counts, current, True)
    check_placement(plan, system.slots)
    np.testing.assert_array_equal(server_view(plan, system.gpu_server), held)
    assert policy.plan(0, 0 * counts, plan, True) is plan
    assert policy.static


def test_fingerprints_differ_by_what_a_start_depends_on():
    problem = build_problem(scenario="edge_hetero", split="eval", epochs=3)

    def setting(problem):
        return PlacementSystem.from_problem(problem).setting

    digits = setting(build_problem(scenario="edge_hetero"))
    assert setting(problem) == digits
    here = {"scenario": "edge_hetero"}
    others = [
        {"scenario": "drift"},
        {"scenario": "paper_testbed"},
        {"scenario": "edge_decode"},
        {"mean_interarrival_s": 5.0},
        {"model": "toy"},
        here | {"tasks": ("law", "summary", "translation")},
        here | {"cluster_kwargs": {"link_model": "pairwise"}},
        here | {"cluster_kwargs": {"pcie_bytes_s": 24e9}},
        here | {"cluster_kwargs": {"gpu_speed": 0.5}},
    ]
    found = {setting(build_problem(**kwargs)) for kwargs in others}
    assert len({digits, *found}) == 1 + len(others)
